"""Packed launches: geometry, argument conversion, and on the GPU the launch itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eagle.errors import ArtifactError
from eagle.kernels import device_call
from eagle.kernels.device_call import PackedLaunch, as_dim3, by_value, function_handle, grid_for

SOURCE = r"""
struct Handle { double* data; unsigned long long samples, stride; int kind, id; };
extern "C" __global__ void scale(Handle a, Handle b, double k, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) b.data[i] = a.data[i] * k + (double)sizeof(Handle);
}
"""


@pytest.mark.parametrize(
    ("n", "block", "grid"),
    [(0, 128, 0), (1, 128, 1), (128, 128, 1), (129, 128, 2), (2**31, 64, 2**25), (2**32 + 1, 128, 2**25 + 1)],
)
def test_every_sample_gets_a_thread(n: int, block: int, grid: int) -> None:
    assert grid_for(n, block) == grid


def test_a_batch_beyond_the_largest_launch_is_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match="2,147,483,647"):
        grid_for(2**38, 64)
    with pytest.raises(ValueError, match="at least one"):
        grid_for(5, 0)


@pytest.mark.parametrize(
    ("value", "extents"), [(3, (3, 1, 1)), ((3,), (3, 1, 1)), ((3, 2), (3, 2, 1)), (np.int64(4), (4, 1, 1))]
)
def test_extents(value: Any, extents: tuple[int, int, int]) -> None:
    assert as_dim3(value, "grid") == extents


@pytest.mark.parametrize(
    ("bad", "error"), [((), ValueError), ((1, 1, 1, 1), ValueError), (-1, ValueError), (None, TypeError)]
)
def test_bad_extents_are_named(bad: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="grid"):
        as_dim3(bad, "grid")


@pytest.mark.parametrize(
    ("arg", "dtype"),
    [(1.5, np.float64), (3, np.int64), (True, np.bool_), (2**63, np.uint64), (np.float32(1), np.float32)],
)
def test_numbers_become_the_bytes_of_their_type(arg: Any, dtype: Any) -> None:
    value = by_value(arg)
    assert value == arg
    assert value.dtype == dtype


def test_structs_go_as_they_are_and_arrays_as_their_address() -> None:
    struct = np.array((1, 2), np.dtype([("a", "<u8"), ("b", "<u4")]))[()]
    assert by_value(struct) is struct
    assert by_value(SimpleNamespace(data=SimpleNamespace(ptr=4096))) == np.uint64(4096)


@pytest.mark.parametrize("bad", ["text", None, [1.0], np.zeros(3), object()])
def test_what_cannot_be_passed_is_named(bad: object) -> None:
    with pytest.raises(TypeError, match=type(bad).__name__):
        by_value(bad)


def test_a_function_is_a_handle_or_has_one() -> None:
    assert function_handle(77) == 77
    assert function_handle(SimpleNamespace(ptr=78)) == 78
    assert function_handle(SimpleNamespace(kernel=SimpleNamespace(ptr=79))) == 79
    with pytest.raises(TypeError, match="compiled kernel"):
        function_handle(lambda: None)


@pytest.fixture
def scale() -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE).get_function("scale")


def handles(*arrays: Any) -> list[Any]:
    from eagle.kernels.abi import make_handle

    return [make_handle(array, array.size) for array in arrays]


@pytest.mark.gpu
class TestOnTheDevice:
    def test_it_launches_on_the_current_stream_or_a_given_one(self, scale: Any) -> None:
        import cupy

        a, b = cupy.arange(300.0), cupy.zeros(300)
        call = PackedLaunch(scale, [*handles(a, b), 2.0, 300], grid_for(300, 128), 128, keep=(a, b))
        assert (call.grid, call.block) == ((3, 1, 1), (128, 1, 1))
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()  # the arrays are there: a non-blocking stream waits for nothing
        call.launch(stream.ptr)
        stream.synchronize()
        np.testing.assert_array_equal(b.get(), 2.0 * np.arange(300.0) + 32)
        b.fill(0)
        with stream:
            cupy.cuda.Stream.null.synchronize()
            call()
        stream.synchronize()
        np.testing.assert_array_equal(b.get(), 2.0 * np.arange(300.0) + 32)

    def test_it_may_be_captured(self, scale: Any) -> None:
        import cupy

        a, b = cupy.ones(10), cupy.zeros(10)
        cupy.cuda.get_current_stream().synchronize()  # the other stream does not wait for this one
        call = PackedLaunch(scale, [*handles(a, b), 1.0, 10], 1, 32)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            call()
            graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(b.get(), np.full(10, 33.0))

    def test_no_blocks_is_no_launch(self, scale: Any) -> None:
        import cupy

        b = cupy.zeros(1)
        PackedLaunch(scale, [*handles(b, b), 1.0, 0], 0, 128).launch()
        assert float(b[0]) == 0.0

    def test_wrong_arguments_are_refused_before_anything_runs(self, scale: Any) -> None:
        import cupy

        if device_call.parameter_sizes(scale) is None:
            pytest.skip("this driver does not describe parameters")
        assert device_call.parameter_sizes(scale) == [32, 32, 8, 8]
        b = cupy.zeros(1)
        with pytest.raises(ArtifactError, match="4 parameters"):
            PackedLaunch(scale, handles(b, b), 1, 1)
        with pytest.raises(ArtifactError, match="parameter 1"):
            PackedLaunch(scale, [*handles(b), np.uint64(0), 1.0, 0], 1, 1)

    def test_geometry_follows_the_batch_and_the_kernel(self, scale: Any) -> None:
        assert device_call.block_for(scale, 1_000_000, 132) == 128
        assert device_call.block_for(scale, 1_000, 132) == 64
        assert device_call.attribute(scale, "num_regs") > 0
