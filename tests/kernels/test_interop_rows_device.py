"""raptor-core's certification rows on a GPU: zero-copy crossings of NumPy, CuPy, torch and JAX, and their order.

The order tests queue a long piece of work before the value that the other side must see: without the DLPack stream
exchange it would read the old one.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from raptor.conformance.interop import register_row

import eagle
from eagle.errors import BackendUnavailable
from eagle.kernels.device import require_cupy, unusable_reason
from eagle.kernels.interop import detect

if unusable_reason() is not None:
    pytest.skip(f"no GPU: {unusable_reason()}", allow_module_level=True)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX must leave memory to the others
torch = pytest.importorskip("torch", reason="torch is not installed")
jax = pytest.importorskip("jax", reason="JAX is not installed")
cupy = require_cupy()

pytestmark = pytest.mark.gpu
pytest_plugins = ["raptor.conformance.pytest_rows"]
N = 4096


@pytest.fixture
def models() -> Any:
    from tests.helpers import interop_models

    return interop_models


@pytest.fixture
def scale(models: Any) -> Any:
    return eagle.deploy(models.scale)


@pytest.fixture
def drift(models: Any) -> Any:
    return eagle.deploy(models.drift)


@pytest.fixture
def side() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


@pytest.fixture
def busy() -> Any:
    """A function that keeps the current CuPy stream at work for some milliseconds."""
    big = cupy.ones((4096, 4096))
    big @ big  # cuBLAS is made ready outside of the test
    return lambda: [cupy.matmul(big, big, out=None) for _ in range(4)]


class Recorder:
    """A CUDA producer that notes with which stream it was asked."""

    def __init__(self, array: Any) -> None:
        self.array, self.streams = array, []

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


# --- NumPy, CuPy ---


@register_row("NP-IN-CPU-COPY", leg="cuda")
def test_numpy_is_uploaded() -> None:
    x = np.arange(5.0)
    got = eagle.to_cupy(x)
    got += 1
    np.testing.assert_array_equal(x, np.arange(5.0))
    np.testing.assert_array_equal(got.get(), x + 1)


@register_row("CP-IN-ALIAS", leg="cuda")
def test_cupy_is_written_where_it_lies(drift: Any) -> None:
    x = cupy.zeros(N)
    assert drift(cupy.ones(N), 0.5, x).data.ptr == x.data.ptr
    np.testing.assert_array_equal(x.get(), 0.5)
    assert eagle.to_cupy(x) is x


@register_row("CP-OUT-ALIAS", leg="cuda")
def test_a_cupy_result_is_the_array_that_the_kernel_wrote(scale: Any) -> None:
    out = cupy.zeros(N)
    assert scale(cupy.ones(N), 2.0, 1.0, out=out).data.ptr == out.data.ptr
    np.testing.assert_array_equal(out.get(), 3.0)


@register_row("CP-CAPTURE-REJECT", leg="cuda")
def test_an_import_under_capture_is_refused(side: Any) -> None:
    t, ready = torch.ones(4, device="cuda"), cupy.ones(4)
    with side:
        side.begin_capture()
        try:
            for x in (np.ones(4), [1.0], t, t.cpu()):
                with pytest.raises(BackendUnavailable, match="captur"):
                    eagle.to_cupy(x)
            assert eagle.to_cupy(ready) is ready
        finally:
            side.end_capture()
    side.synchronize()
    assert eagle.to_cupy(t).data.ptr == t.data_ptr()


@register_row("STREAM-CUPY-PRODUCER-ORDER", leg="cuda")
def test_a_plan_runs_behind_what_the_current_stream_holds(scale: Any, side: Any, busy: Any) -> None:
    x = cupy.zeros(N)
    scale(x, 1.0, 0.0)
    cupy.cuda.runtime.deviceSynchronize()
    with side:
        busy()
        x.fill(7.0)
        got = scale(x, 2.0, 1.0)
    side.synchronize()
    np.testing.assert_array_equal(got.get(), 15.0)


# --- torch ---


@register_row("T-IN-CUDA-ALIAS", leg="cuda")
def test_a_tensor_is_written_where_it_lies(drift: Any) -> None:
    x = torch.zeros(N, dtype=torch.float64, device="cuda")
    assert eagle.to_cupy(x).data.ptr == x.data_ptr()
    got = drift(torch.ones(N, dtype=torch.float64, device="cuda"), 0.5, x)
    assert got.data_ptr() == x.data_ptr()
    assert bool((x == 0.5).all())


@register_row("T-OUT-CUDA-ALIAS", leg="cuda")
def test_a_result_tensor_is_the_array_that_the_kernel_wrote(scale: Any) -> None:
    out = torch.zeros(N, dtype=torch.float64, device="cuda")
    got = scale(torch.ones(N, dtype=torch.float64, device="cuda"), 2.0, 1.0, out=out)
    assert got.data_ptr() == out.data_ptr()
    adapter, array = detect(out), cupy.arange(6.0).reshape(2, 3)
    assert adapter.from_cupy(array).data_ptr() == array.data.ptr
    assert bool((out == 3.0).all())


@register_row("T-IN-CPU-COPY", leg="cuda")
def test_a_host_tensor_is_uploaded() -> None:
    x = torch.arange(5.0, dtype=torch.float64)
    got = eagle.to_cupy(x)
    got += 1
    assert torch.equal(x, torch.arange(5.0, dtype=torch.float64))


def test_booleans_cross_both_ways() -> None:
    x = torch.tensor([True, False, True], device="cuda")
    got = eagle.to_cupy(x)
    assert (got.dtype, got.data.ptr) == (np.dtype(bool), x.data_ptr())
    back = detect(x).from_cupy(got)
    assert (back.dtype, back.data_ptr()) == (torch.bool, x.data_ptr())
    assert torch.equal(back, x)


@register_row("STREAM-TORCH-PRODUCER-ORDER", leg="cuda")
def test_work_on_a_torch_side_stream_comes_first(scale: Any) -> None:
    stream, big = torch.cuda.Stream(), torch.ones(4096, 4096, device="cuda")
    big @ big
    x = torch.zeros(N, dtype=torch.float64, device="cuda")
    scale(x, 1.0, 0.0)
    torch.cuda.synchronize()
    for k in range(20):
        with torch.cuda.stream(stream):
            for _ in range(4):
                big @ big
            x.fill_(float(k))
            got = eagle.to_cupy(x) * 2.0
            result = scale(x, 2.0, 1.0)
        np.testing.assert_array_equal(got.get(), 2.0 * k)
        stream.synchronize()
        assert bool((result == 2.0 * k + 1.0).all())


@register_row("STREAM-TORCH-CONSUMER-ORDER", leg="cuda")
def test_a_torch_side_stream_waits_for_a_result(side: Any, busy: Any, drift: Any) -> None:
    stream, adapter = torch.cuda.Stream(), detect(torch.zeros(1, device="cuda"))
    x = torch.zeros(N, dtype=torch.float64, device="cuda")
    v = torch.ones(N, dtype=torch.float64, device="cuda")
    drift(v, 0.0, x)
    torch.cuda.synchronize()
    for k in range(1, 20):
        array = cupy.zeros(N)
        cupy.cuda.runtime.deviceSynchronize()
        with side, torch.cuda.stream(stream):
            busy()
            array.fill(k)
            seen = adapter.from_cupy(array) + 0.0
            busy()
            drift(v, 1.0, x)  # written in place, not returned to anybody
            after = x + 0.0
        stream.synchronize()
        assert bool((seen == k).all())
        assert bool((after == k).all())


@register_row("STREAM-IDENTITY", leg="cuda")
def test_a_producer_is_asked_with_the_very_stream(side: Any) -> None:
    torch_side = torch.cuda.ExternalStream(side.ptr)
    with side, torch.cuda.stream(torch_side):
        x = Recorder(torch.ones(8, device="cuda"))
        got = eagle.to_cupy(x) + 1
    side.synchronize()
    np.testing.assert_array_equal(got.get(), 2.0)
    legacy = Recorder(torch.ones(8, device="cuda"))
    eagle.to_cupy(legacy)
    assert x.streams[-1] == side.ptr
    assert legacy.streams[-1] == 1  # the legacy default stream, in DLPack's numbering


# --- JAX ---


@pytest.fixture
def jax_ones() -> Any:
    x = jax.device_put(np.ones(N, np.float32), jax.devices("gpu")[0])
    return x.block_until_ready()


@register_row("JX-IN-CUDA-ALIAS", leg="cuda")
def test_a_jax_array_is_read_where_it_lies(jax_ones: Any) -> None:
    got = eagle.to_cupy(jax_ones)
    assert got.data.ptr == jax_ones.unsafe_buffer_pointer()
    assert detect(jax_ones).device_id(jax_ones) == 0


@register_row("JX-IN-WRITE-REFUSED", leg="cuda")
def test_a_jax_array_is_never_written(models: Any, jax_ones: Any) -> None:
    plan = eagle.deploy(models.drift, scalar_type="float32")
    with pytest.raises(ValueError, match=r"'x'.*jax"):
        plan(cupy.ones(N, np.float32), 0.5, jax_ones)
    np.testing.assert_array_equal(np.asarray(jax_ones), 1.0)


@register_row("JX-OUT-CUDA-ALIAS", leg="cuda")
def test_a_jax_result_is_the_array_that_the_kernel_wrote(models: Any, jax_ones: Any) -> None:
    array = cupy.arange(8, dtype=np.float32)
    out = detect(jax_ones).from_cupy(array)
    assert isinstance(out, jax.Array)
    assert out.unsafe_buffer_pointer() == array.data.ptr
    got = eagle.deploy(models.scale, scalar_type="float32")(jax_ones, 2.0, 1.0)
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(np.asarray(got), 3.0)


@register_row("JX-IN-CPU-COPY", leg="cuda")
def test_a_host_jax_array_is_uploaded() -> None:
    x = jax.device_put(np.arange(5, dtype=np.float32), jax.devices("cpu")[0])
    got = eagle.to_cupy(x)
    got += 1
    np.testing.assert_array_equal(np.asarray(x), np.arange(5))
    np.testing.assert_array_equal(got.get(), np.arange(5) + 1)


@register_row("STREAM-JAX-PRODUCER-ORDER", leg="cuda")
def test_what_jax_has_dispatched_comes_first(jax_ones: Any) -> None:
    big = jax.device_put(np.ones((2048, 2048), np.float32), jax.devices("gpu")[0])

    @jax.jit
    def slowly(k: Any) -> Any:
        y = big
        for _ in range(10):
            y = (y @ big) / 2048.0
        return y[0, :64] * k

    slowly(0.0).block_until_ready()
    for k in range(1, 20):
        got = eagle.to_cupy(slowly(float(k)))
        np.testing.assert_allclose((got * 1.0).get(), k, rtol=1e-5)
