"""Manifests beyond the acceptance suite: host entries, stamps, neural layers; loaded kernels on the GPU."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eagle.errors import AbiMismatch, ArtifactError, UnknownMemberError, UnsupportedSchema
from eagle.kernels.loaded import LoadedPure, LoadedVector
from eagle.kernels.registry import KernelRegistry, LoadedNeuralLayer, load_manifest

if TYPE_CHECKING:
    import pathlib

STRUCTS = r"""
struct GRef { double* data; unsigned long long samples, comp, step; int kind, id; };
struct Handle { void* data; unsigned long long samples, stride; int kind, id; };
extern "C" __device__ const char eagle_abi_tag[] = "%s";
extern "C" __device__ unsigned long long eagle_layout_sizes[5] = {40, %d, 32, 8, 24};
"""
# y <- a * y + 1 on a partition, and a count of the threads that took part
AFFINE = r"""
extern "C" __global__ void affine(Handle y, Handle seen, double a, long long base, long long count, long long n) {
    long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (t >= count) return;
    double* v = (double*)y.data + base + t;
    *v = *v * a + 1.0;
    atomicAdd((unsigned int*)seen.data, 1u);
}
"""
SIDECAR: dict[str, Any] = {
    "schema_version": 3,
    "pattern": "pure",
    "aether_abi": "aether-abi/2",
    "exec_targets": ["device"],
    "exec_access": "sample_local",
    "scalar_type": "float64",
    "kernel": "affine",
    "params": [{"name": "a", "dtype": "float"}],
    "mutables": [{"name": "y", "dtype": "scalar", "width": 1, "default": None, "prior": True}],
    "arg_widths": {"y": 1},
    "arg_dtypes": {"y": "float64", "seen": "uint32"},
    "arg_spec": [["mutable", "y"], ["lookup", "seen"], ["uniform", "a"]],
}


def write(folder: pathlib.Path, name: str, content: Any) -> pathlib.Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def manifest(folder: pathlib.Path, *entries: dict[str, Any], **over: Any) -> pathlib.Path:
    document = {
        "schema_version": 3,
        "pattern": "pure",
        "aether_abi": "aether-abi/2",
        "exec_targets": ["device"],
        "exec_access": "sample_local",
        "plugins": list(entries),
        **over,
    }
    return write(folder, "manifest.json", {key: value for key, value in document.items() if value is not None})


def entry(id_: str = "affine", **over: Any) -> dict[str, Any]:
    files = {"artifact": f"{id_}.ptx", "sidecar": f"{id_}.json"}
    return {"id": id_, "order": 0, "enabled": True, "format": "ptx", **files, **over}


def block(**over: Any) -> dict[str, Any]:
    widths = dict.fromkeys(("output_width", "out_degree", "in_degree", "input_width", "state_width"), 1)
    return {
        "schema_version": 1,
        "pattern": "neural_block",
        "kernel": "dense",
        "scalar_type": "float64",
        "scatter_policy": "unique_write",
        "param_width": 0,
        "arg_spec": [],
        "forward_exec": {"kind": "kernel", "kernel": "affine"},
        **widths,
        **over,
    }


def test_a_host_entry_is_refused_and_names_deploy(tmp_path: pathlib.Path) -> None:
    path = manifest(tmp_path, entry(format="host", artifact="affine.so"))
    with pytest.raises(ArtifactError, match=r"affine.*deploy"):
        load_manifest(path)


def test_a_sidecar_under_another_name_is_refused(tmp_path: pathlib.Path) -> None:
    write(tmp_path, "other.json", SIDECAR)
    with pytest.raises(ArtifactError, match=r"affine\.json"):
        load_manifest(manifest(tmp_path, entry(sidecar="other.json")))


def neural(folder: pathlib.Path, *blocks: Any, entries: tuple[dict[str, Any], ...] = ()) -> pathlib.Path:
    over = {"schema_version": 1, "aether_abi": "aether-abi/1", "exec_targets": None, "exec_access": None}
    return manifest(folder, *entries, pattern="neural_block", blocks=list(blocks), **over)


def test_a_neural_unit_without_blocks_is_an_empty_layer(tmp_path: pathlib.Path) -> None:
    layer = load_manifest(neural(tmp_path))
    assert isinstance(layer, LoadedNeuralLayer)
    assert layer.blocks == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.blocks = ()  # type: ignore[misc]


@pytest.mark.parametrize("entries", [(), (entry(enabled=False),)])
def test_a_block_whose_kernel_the_unit_lacks_is_named(
    tmp_path: pathlib.Path, entries: tuple[dict[str, Any], ...]
) -> None:
    with pytest.raises(UnknownMemberError, match=r"dense.*affine") as caught:
        load_manifest(neural(tmp_path, block(), entries=entries))
    assert caught.value.member == "affine"
    assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize("bad", [block(forward_exec="affine"), block(kernel=""), {"pattern": "neural_block"}])
def test_a_damaged_block_is_refused(tmp_path: pathlib.Path, bad: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSchema, match="neural block"):
        load_manifest(neural(tmp_path, bad))


def test_blocks_that_are_no_list_are_refused(tmp_path: pathlib.Path) -> None:
    path = neural(tmp_path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "blocks": {}}))
    with pytest.raises(ArtifactError, match="blocks"):
        load_manifest(path)


def test_a_missing_name_lists_what_is_there() -> None:
    registry = KernelRegistry([test_a_missing_name_lists_what_is_there])
    with pytest.raises(KeyError, match="lists_what_is_there"):
        registry["nope"]


@pytest.mark.parametrize("kind", [LoadedPure, LoadedVector])
def test_a_loader_of_the_other_pattern_is_refused(tmp_path: pathlib.Path, kind: Any) -> None:
    other = "vector" if kind is LoadedPure else "pure"
    write(tmp_path, "affine.json", {**SIDECAR, "pattern": other})
    with pytest.raises(ArtifactError, match=other):
        kind(tmp_path / "affine.ptx")


def compiled(folder: pathlib.Path, *, tag: str = "aether-abi/2", handle: int = 32) -> pathlib.Path:
    from cuda.core import Device, Program, ProgramOptions

    device = Device()
    device.set_current()
    options = ProgramOptions(arch=f"sm_{device.arch}")
    code = Program(STRUCTS % (tag, handle) + AFFINE, "c++", options).compile("cubin").code
    (folder / "affine.cubin").write_bytes(code)
    write(folder, "affine.json", SIDECAR)
    return folder / "affine.cubin"


@pytest.mark.gpu
class TestOnTheDevice:
    def test_a_cubin_of_the_second_generation_gets_its_partition(self, tmp_path: pathlib.Path) -> None:
        import cupy

        compiled(tmp_path)
        registry = load_manifest(manifest(tmp_path, entry(artifact="affine.cubin", format="cubin")))
        assert isinstance(registry, KernelRegistry)
        kernel, seen = registry["affine"], cupy.zeros(1, cupy.uint32)
        y = cupy.arange(1000.0)
        assert kernel(y=y, seen=seen, a=2.0)["y"] is y
        np.testing.assert_array_equal(y.get(), 2.0 * np.arange(1000.0) + 1.0)
        assert int(seen[0]) == 1000
        got = kernel.launch(y=y, seen=seen, a=0.0, block=64)
        assert set(got) == {"y"}
        np.testing.assert_array_equal(y.get(), np.ones(1000))

    def test_what_a_launch_needs_is_named(self, tmp_path: pathlib.Path) -> None:
        import cupy

        kernel, seen = LoadedPure(compiled(tmp_path)), cupy.zeros(1, cupy.uint32)
        with pytest.raises(TypeError, match="'y'"):
            kernel(seen=seen, a=1.0)
        with pytest.raises(TypeError, match="'seen'"):
            kernel(y=cupy.zeros(4), a=1.0)
        with pytest.raises(TypeError, match="CuPy arrays only"):
            kernel.launch(y=np.zeros(4), seen=seen, a=1.0)
        with pytest.raises(ValueError, match="float64"):
            kernel.launch(y=cupy.zeros(4, cupy.float32), seen=seen, a=1.0)
        with pytest.raises(ValueError, match="contiguous"):
            kernel.launch(y=cupy.zeros(8)[::2], seen=seen, a=1.0)
        with pytest.raises(ValueError, match="contiguous"):
            kernel(y=cupy.zeros(8)[::2], seen=seen, a=1.0)

    @pytest.mark.parametrize(("over", "found"), [({"tag": "aether-abi/1"}, "aether-abi/1"), ({"handle": 48}, "48")])
    def test_an_artifact_that_differs_from_us_is_refused_with_both_values(
        self, tmp_path: pathlib.Path, over: dict[str, Any], found: str
    ) -> None:
        with pytest.raises(AbiMismatch, match=found):
            LoadedPure(compiled(tmp_path, **over))

    def test_damaged_artifacts_are_refused_by_name(self, tmp_path: pathlib.Path) -> None:
        path = compiled(tmp_path)
        whole = path.read_bytes()
        for content in (b"", b"not a module", whole[: len(whole) // 2]):
            path.write_bytes(content)
            with pytest.raises(ArtifactError, match=r"affine\.cubin"):
                LoadedPure(path)
        path.write_bytes(whole)
        write(tmp_path, "affine.json", {**SIDECAR, "kernel": "other"})
        with pytest.raises(ArtifactError, match="other"):
            LoadedPure(path)

    def test_a_stamped_unit_is_checked_before_the_driver_sees_it(self, tmp_path: pathlib.Path) -> None:
        path = compiled(tmp_path)
        manifest(tmp_path, entry(artifact="affine.cubin", format="cubin"))
        files = ("affine.cubin", "affine.json", "manifest.json")
        digests = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in files}
        write(tmp_path, ".hawk_unit", {"unit": "u", "files": digests})
        LoadedPure(path)
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(ArtifactError, match="changed or truncated"):
            load_manifest(tmp_path / "manifest.json")

    def test_a_neural_layer_resolves_its_kernels(self, tmp_path: pathlib.Path) -> None:
        path = compiled(tmp_path)
        layer = load_manifest(neural(tmp_path, block(), entries=(entry(artifact=path.name, format="cubin"),)))
        assert isinstance(layer, LoadedNeuralLayer)
        assert layer.blocks[0].kernel == "dense"
        assert isinstance(layer.blocks[0].execs["forward_exec"], LoadedPure)
