"""The by-value structs, byte for byte, and the checks of tags and sizes."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle
from eagle.kernels.abi import LAYOUT_SIZES, check_layout
from eagle.kernels.roles import Arg

N = 5


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class DeviceArray:
    """What a by-value view reads of a CuPy array."""

    def __init__(self, pointer: int, device: int, size: int = N) -> None:
        self.data = SimpleNamespace(ptr=pointer)
        self.device = SimpleNamespace(id=device)
        self.size = size


def test_a_gref_of_a_host_plane() -> None:
    plane = np.zeros((3, N))
    fields = struct.unpack("<QQQQii", eagle.make_gref(plane, N).tobytes())
    assert fields == (address(plane), N, N, 1, 1, 0)


def test_a_handle_of_a_host_plane() -> None:
    plane = np.zeros(N)
    fields = struct.unpack("<QQQii", eagle.make_handle(plane, N).tobytes())
    assert fields == (address(plane), N, 1, 1, 0)


@given(pointer=st.integers(0, 2**64 - 1), n=st.integers(0, 2**63), device=st.integers(0, 15))
def test_device_structs_hold_what_they_are_given(pointer: int, n: int, device: int) -> None:
    array = DeviceArray(pointer, device)
    assert struct.unpack("<QQQQii", eagle.make_gref(array, n).tobytes()) == (pointer, n, n, 1, 2, device)
    assert struct.unpack("<QQQii", eagle.make_handle(array, n).tobytes()) == (pointer, n, 1, 2, device)


@pytest.mark.parametrize("word", ["float16", "", None, [], "Float64"])
def test_an_unknown_precision_is_named(word: object) -> None:
    with pytest.raises(KeyError, match="scalar_type"):
        eagle.np_dtype(word)  # type: ignore[arg-type]


# ---- tags and sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", [None, "", "aether-abi/3", 2, ["aether-abi/2"], {"tag": "aether-abi/2"}])
def test_a_foreign_tag_is_a_mismatch_with_both_values(tag: object) -> None:
    with pytest.raises(eagle.AbiMismatch, match="vector plugin 'gravity'") as caught:
        eagle.check_aether_abi({"aether_abi": tag}, kind="vector plugin", name="gravity")
    assert caught.value.found == tag
    assert "aether-abi/2" in caught.value.expected


@pytest.mark.parametrize("index_bytes", [4, 8])
def test_both_index_types_fit(index_bytes: int) -> None:
    check_layout("aether-abi/2", [40, 32, 32, index_bytes, 24], name="k.so")


@pytest.mark.parametrize("at", range(len(LAYOUT_SIZES)))
def test_another_struct_size_is_refused_with_both_values(at: int) -> None:
    sizes = [40, 32, 32, 8, 24]
    sizes[at] += 8
    with pytest.raises(eagle.AbiMismatch, match=r"k\.so.*eagle_layout_sizes.*40, 32, 32, 4 or 8, 24") as caught:
        check_layout("aether-abi/2", sizes, name="k.so")
    assert caught.value.found == tuple(sizes)


@pytest.mark.parametrize("sizes", [[], [40, 32, 32, 8], [40, 32, 32, 8, 24, 1]])
def test_too_few_or_too_many_sizes_are_refused(sizes: list[int]) -> None:
    with pytest.raises(eagle.AbiMismatch):
        check_layout("aether-abi/2", sizes, name="k.so")


# ---- the argument list -----------------------------------------------------------------------------------------------


def test_every_role_in_the_order_of_the_signature() -> None:
    planes = {name: np.zeros((4, N)) for name in ("out", "v", "m", "mv", "mm")}
    flats = {name: np.zeros(N) for name in ("s", "x", "table", "win", "wout", "sum", "terminated")}
    spec = [
        ("out", "out"), ("vec_in", "v"), ("mat_in", "m"), ("mutable", "mv"), ("mutable", "mm"), ("mutable", "x"),
        ("per_sample", "s"), ("lookup", "table"), ("wide_in", "win"), ("wide_out", "wout"), ("accum_out", "sum"),
        ("terminated", "terminated"), ("uniform", "a"), ("uniform", "k"), ("nsamples", "n"),
    ]  # fmt: skip
    args = eagle.assemble_args(
        spec,
        out=planes["out"],
        vec={"v": planes["v"]},
        per_sample={"s": flats["s"]},
        terminated=flats["terminated"],
        uniforms={"a": 0.5, "k": np.int64(3)},
        n=N,
        tables={"table": flats["table"]},
        mutables={"x": flats["x"]},
        mutable_vec={"mv": planes["mv"]},
        mutable_mat={"mm": planes["mm"]},
        mats={"m": planes["m"]},
        wide_in={"win": flats["win"]},
        wide_out={"wout": flats["wout"], "sum": flats["sum"]},
    )
    sizes = [len(np.asarray(arg).tobytes()) for arg in args]
    assert sizes == [40] * 5 + [32] * 7 + [8] * 3
    given_planes = {**planes, **flats}
    for (role, name), arg in zip(spec, args, strict=True):
        if role not in ("uniform", "nsamples"):
            assert int(arg["data"]) == address(given_planes[name]), name
    assert args[-3:] == [0.5, 3, N]
    assert args[-2].dtype == np.int64  # an integer parameter stays one


def test_an_absent_mask_is_a_null_handle() -> None:
    (arg,) = eagle.assemble_args(
        [("terminated", "t")], out=None, vec={}, per_sample={}, terminated=None, uniforms={}, n=N
    )
    assert struct.unpack("<QQQii", arg.tobytes())[:3] == (0, N, 1)


def test_a_missing_uniform_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="a"):
        eagle.assemble_args([("uniform", "a")], out=None, vec={}, per_sample={}, terminated=None, uniforms={}, n=N)


def test_a_plan_of_the_signature_stands_for_its_pairs() -> None:
    plan = SimpleNamespace(args=(Arg("a", "uniform", np.dtype(np.float64)),))
    got = eagle.assemble_args([], out=None, vec={}, per_sample={}, terminated=None, uniforms={"a": 2}, n=N, plan=plan)
    assert got == [2.0]
