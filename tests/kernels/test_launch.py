"""Launching by argument names: signatures, refusals, coercion; on the GPU the kinds of arguments the ABI knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eagle.errors import UnsupportedSchema
from eagle.kernels.coerce import check_names, coerce, samples_of
from eagle.kernels.launch import describe_args, launch, pure_prepare

SOURCE = r"""
struct GRef { double* data; unsigned long long samples, comp, step; int kind, id; };
struct FRef { float* data; unsigned long long samples, comp, step; int kind, id; };
struct Handle { void* data; unsigned long long samples, stride; int kind, id; };

// trace of each 2x2 matrix times a weight, into a vector mutable's second component; counts in an int mutable
extern "C" __global__ void mixed(GRef v, Handle hits, GRef m, Handle weight, Handle mask, double k, long long shift) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i >= v.samples) return;
    if (((unsigned char*)mask.data)[i]) return;
    double t = m.data[0 * m.comp + i] + m.data[3 * m.comp + i];
    v.data[1 * v.comp + i] += k * ((double*)weight.data)[i] * t;
    ((long long*)hits.data)[i] += 1 + shift;
}
extern "C" __global__ void single(FRef out, FRef in, float k) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < out.samples) for (int c = 0; c < 2; ++c) out.data[c * out.comp + i] += k * in.data[c * in.comp + i];
}
// wide: rows of an (R, n) plane summed into a wide output row, and into a shared accumulator
extern "C" __global__ void wide(Handle in, Handle out, Handle total, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double s = ((double*)in.data)[i] + ((double*)in.data)[n + i];
    ((double*)out.data)[i] = s;
    atomicAdd((double*)total.data, s);
}
"""
MIXED = [
    ("mutable", "v"),
    ("mutable", "hits"),
    ("mat_in", "m"),
    ("per_sample", "weight"),
    ("terminated", "mask"),
    ("uniform", "k"),
    ("uniform", "shift"),
]
DECLARED = [
    SimpleNamespace(name="v", dtype="vector", width=2, shape=None),
    {"name": "hits", "dtype": "int", "width": 1},
]


def mixed_args() -> Any:
    params = ["k", {"name": "shift", "dtype": "int"}]
    return describe_args(MIXED, params=params, mutables=DECLARED, mat_shapes={"m": (2, 2)})


def test_a_signature_without_a_sidecar_is_described() -> None:
    v, hits, m, weight, mask, k, shift = mixed_args()
    assert [arg.struct for arg in mixed_args()] == ["gref", "handle", "gref", "handle", "handle", "value", "value"]
    assert (v.shape, m.shape, weight.shape) == ((2,), (2, 2), ())
    assert [arg.dtype for arg in (hits, mask, k, shift)] == [np.int64, np.bool_, np.float64, np.int64]
    single = describe_args([("out", "out"), ("uniform", "k")], vec_widths={"out": 4}, dt=np.float32)
    assert (single[0].width, single[0].dtype, single[1].dtype) == (4, np.float32, np.float32)


def test_an_unknown_role_is_named() -> None:
    with pytest.raises(UnsupportedSchema, match="tensor"):
        describe_args([("tensor", "x")])


def test_unknown_names_are_listed_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"'speed'.*weight"):
        check_names(mixed_args(), {"k": 1, "speed": 2}, what="mixed")


def test_planes_of_different_lengths_are_named() -> None:
    planes = {"v": np.zeros((2, 5)), "weight": np.zeros(4)}
    with pytest.raises(ValueError, match=r"'weight' holds 4.*'v' holds 5"):
        samples_of(mixed_args(), planes, ())
    assert samples_of(mixed_args(), {"v": np.zeros((2, 5))}, ()) == 5
    assert samples_of(mixed_args(), {}, ()) is None


@pytest.mark.parametrize(
    ("given", "word"),
    [({}, "'m'"), ({"m": np.zeros((4, 3)), "v": np.zeros((2, 3))}, "'weight'"), ({"m": 1.0}, "'m' is a number")],
)
def test_what_is_missing_is_named_before_a_device_is_asked_for(given: dict[str, Any], word: str) -> None:
    with pytest.raises(TypeError, match=word):
        coerce(mixed_args(), given, what="mixed")


def test_something_must_carry_the_number_of_samples() -> None:
    args = describe_args([("mutable", "x"), ("uniform", "k")], mutables=["x"])
    with pytest.raises(TypeError, match="number of samples"):
        coerce(args, {"x": 1.0, "k": 2.0}, what="fill")


@pytest.mark.parametrize(
    ("kind", "extra", "error"),
    [("sideways", {}, ValueError), ("vector", {"mutables_decl": []}, TypeError), ("pure", {"out": None}, TypeError)],
)
def test_kinds_and_their_keywords(kind: str, extra: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=kind):
        launch(kind, None, [], [], [], [], kw={}, grid=1, block=1, **extra)


@pytest.fixture
def kernel() -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE).get_function


@pytest.mark.gpu
class TestOnTheDevice:
    def given(self, n: int, xp: Any) -> dict[str, Any]:
        rng = np.random.default_rng(3)
        m, weight = rng.normal(size=(4, n)), rng.random(n)
        mask = np.zeros(n, np.bool_)
        mask[::3] = True
        planes = {"v": np.zeros((2, n)), "hits": np.zeros(n, np.int64), "m": m, "weight": weight, "mask": mask}
        return {**{name: xp.asarray(plane) for name, plane in planes.items()}, "k": 2.0, "shift": 4}

    def check(self, got: dict[str, Any], given: dict[str, Any]) -> None:
        host = {name: np.asarray(x.get() if hasattr(x, "get") else x) for name, x in given.items()}
        live = ~host["mask"]
        want = 2.0 * host["weight"] * (host["m"][0] + host["m"][3]) * live
        np.testing.assert_allclose(got["v"].get()[1], want, rtol=1e-13)
        np.testing.assert_array_equal(got["v"].get()[0], np.zeros(live.size))
        np.testing.assert_array_equal(got["hits"].get(), 5 * live)

    def test_every_kind_of_plane(self, kernel: Any) -> None:
        import cupy

        given = self.given(500, cupy)
        got = launch(
            "pure",
            kernel("mixed"),
            MIXED,
            (),
            ["k", {"name": "shift", "dtype": "int"}],
            ("weight",),
            kw=given,
            grid=None,
            block=None,
            mutables_decl=DECLARED,
            matrix_inputs={"m": (2, 2)},
        )
        assert got["v"] is given["v"]
        self.check(got, given)

    @pytest.mark.parametrize("where", ["numpy", "cupy"])
    def test_pure_prepare_takes_what_the_user_has(self, kernel: Any, where: str) -> None:
        given = self.given(70, pytest.importorskip(where))
        given.update({"v": 0.0, "weight": 0.5})
        got = pure_prepare(
            kernel("mixed"),
            MIXED,
            vector_inputs=(),
            per_sample=("weight",),
            params=["k", {"name": "shift", "dtype": "int"}],
            mutables_decl=DECLARED,
            mutable_defaults={},
            lookup_counts={},
            kw=given,
            mat_shapes={"m": (2, 2)},
        )
        self.check(got, {**given, "weight": np.full(70, 0.5)})

    def test_a_writable_mask_is_new_each_time_and_a_readonly_one_shared(self) -> None:
        from eagle.kernels.launch import coerce as coerced

        args = describe_args([("mutable", "x"), ("terminated", "mask")], mutables=["x"])
        fresh = [coerced(args, {"x": np.zeros(8)}, what="f")[0]["mask"] for _ in range(2)]
        assert fresh[0].data.ptr != fresh[1].data.ptr
        args = describe_args([("mutable", "x"), ("terminated", "mask")], mutables=["x"], readonly_mask=True)
        shared = [coerced(args, {"x": np.zeros(8)}, what="f")[0]["mask"] for _ in range(2)]
        assert shared[0].data.ptr == shared[1].data.ptr
        assert not shared[0].any()

    def test_float32_planes_and_numbers(self, kernel: Any) -> None:
        import cupy

        spec = [("out", "out"), ("vec_in", "x"), ("uniform", "k")]
        x, out = cupy.arange(20, dtype=cupy.float32).reshape(2, 10), cupy.ones((2, 10), cupy.float32)
        options: dict[str, Any] = {"grid": 1, "block": 32, "dt": np.float32, "vec_widths": {"x": 2, "out": 2}}
        got = launch("vector", kernel("single"), spec, ("x",), ("k",), (), kw={"x": x, "k": 0.5}, out=out, **options)
        assert got is out
        np.testing.assert_array_equal(out.get(), 1 + 0.5 * np.arange(20, dtype=np.float32).reshape(2, 10))
        with pytest.raises(ValueError, match="float32"):
            launch(
                "vector",
                kernel("single"),
                spec,
                ("x",),
                ("k",),
                (),
                kw={"x": x.astype(float), "k": 1},
                out=out,
                **options,
            )
        with pytest.raises(ValueError, match=r"\(2, n\)"):
            launch(
                "vector", kernel("single"), spec, ("x",), ("k",), (), kw={"x": x.T.copy(), "k": 1}, out=out, **options
            )

    def test_wide_planes_carry_the_samples_and_exempt_ones_do_not(self, kernel: Any) -> None:
        import cupy

        spec = [("wide_in", "rows"), ("wide_out", "sums"), ("accum_out", "total"), ("nsamples", "n")]
        rows = np.arange(24.0).reshape(2, 12)
        sums, total = cupy.zeros((1, 12)), cupy.zeros(1)
        got = pure_prepare(
            kernel("wide"),
            spec,
            vector_inputs=(),
            per_sample=(),
            params=(),
            mutables_decl=(),
            mutable_defaults={},
            lookup_counts={},
            kw={"rows": rows, "sums": sums, "total": total},
            wide_inputs=("rows",),
            wide_outputs=("sums", "total"),
            wide_out_exempt=("total",),
        )
        assert got["sums"] is sums
        np.testing.assert_array_equal(sums.get()[0], rows.sum(0))
        assert float(total[0]) == rows.sum()

    def test_no_samples_is_no_launch(self, kernel: Any) -> None:
        import cupy

        spec = [("out", "out"), ("vec_in", "x"), ("uniform", "k")]
        empty = cupy.zeros((2, 0), cupy.float32)
        options: dict[str, Any] = {"grid": None, "block": None, "dt": np.float32, "vec_widths": {"x": 2, "out": 2}}
        kw = {"x": empty, "k": 1}
        assert launch("vector", kernel("single"), spec, ("x",), ("k",), (), kw=kw, out=empty, **options) is empty
