"""What only a device shows: capture (by CuPy's own graphs), streams, and captured reorders that decide at replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eagle.aio.active_set import ActiveSet
from eagle.errors import BackendUnavailable
from eagle.kernels.device import unusable_reason

pytestmark = pytest.mark.gpu
N = 50_000


@pytest.fixture
def cupy() -> Any:
    from eagle.kernels.device import require_cupy

    return require_cupy()


@pytest.fixture
def stream(cupy: Any) -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def masked(share: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(N) < share


def captured(stream: Any, *steps: Any) -> Any:
    with stream:
        stream.begin_capture()
        for step in steps:
            step()
        return stream.end_capture()


def replay(graph: Any, stream: Any) -> None:
    graph.launch(stream)
    stream.synchronize()


@pytest.mark.sanitize
def test_a_captured_compaction_reads_the_mask_at_each_replay(cupy: Any, stream: Any) -> None:
    active = ActiveSet(cupy.zeros(N, cupy.bool_))
    graph = captured(stream, active.compact)
    for share in (0.1, 0.9, 1.0, 0.0):
        active.mask[...] = cupy.asarray(masked(share))
        cupy.cuda.runtime.deviceSynchronize()
        replay(graph, stream)
        np.testing.assert_array_equal(active.map.get()[: active.live], np.flatnonzero(~masked(share)))


@pytest.mark.sanitize
def test_a_captured_reorder_decides_at_replay(cupy: Any, stream: Any) -> None:
    x = cupy.arange(float(N))
    active = ActiveSet(cupy.zeros(N, cupy.bool_), reorder=True).own(x)
    active.prepare_compaction()
    graph = captured(stream, active.compact, active.reorder)
    replay(graph, stream)
    assert not active.permuted
    done = masked(0.9)
    active.mask[...] = cupy.asarray(done)
    cupy.cuda.runtime.deviceSynchronize()
    replay(graph, stream)
    assert active.permuted
    np.testing.assert_array_equal(x.get()[: active.live], np.flatnonzero(~done))
    replay(graph, stream)
    assert int(active.reorders.get()[0]) == 1
    active.restore()
    np.testing.assert_array_equal(x.get(), np.arange(float(N)))


@pytest.mark.sanitize
def test_in_sample_order_may_be_captured(cupy: Any, stream: Any) -> None:
    x, out = cupy.arange(float(N)), cupy.zeros(N)
    active = ActiveSet(cupy.asarray(masked(0.9)), reorder=True).own(x)
    active.compact()
    active.reorder()
    cupy.cuda.runtime.deviceSynchronize()
    graph = captured(stream, lambda: active.in_sample_order(x, out=out))
    replay(graph, stream)
    np.testing.assert_array_equal(out.get(), np.arange(float(N)))


@pytest.mark.parametrize("what", ["construct", "compact", "reorder", "restore", "materialize"])
def test_what_a_capture_does_not_allow_is_refused_and_ends_well(cupy: Any, stream: Any, what: str) -> None:
    mask, other, x = cupy.zeros(N, cupy.bool_), cupy.zeros(8, cupy.bool_), cupy.arange(float(N))
    active = ActiveSet(mask, reorder=True, _lazy_scratch=True, _lazy_map=what == "materialize").own(x)
    calls = {
        "construct": lambda: ActiveSet(other),
        "compact": active.compact,
        "reorder": active.reorder,
        "restore": active.restore,
        "materialize": active.materialize_map,
    }
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(BackendUnavailable, match="captur"):
                calls[what]()
        finally:
            stream.end_capture()
    stream.synchronize()
    active.materialize_map()
    active.prepare_compaction()
    active.compact()
    active.restore()
    assert active.live == N


def test_work_follows_the_current_stream(cupy: Any, stream: Any) -> None:
    active = ActiveSet(cupy.zeros(N, cupy.bool_))
    done = cupy.asarray(masked(0.5))
    big = cupy.ones((2048, 2048))
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        for _ in range(20):
            big = big @ big * 1e-6  # keeps the stream busy while the next two are queued
        active.mask[...] = done
        active.compact()
        assert active.live == int((~masked(0.5)).sum())
    stream.synchronize()


def test_a_plane_that_is_not_aligned_to_its_items_is_refused(cupy: Any) -> None:
    store = cupy.zeros(2 * 64 + 1, cupy.float32)
    with pytest.raises(ValueError, match="aligned"):
        ActiveSet(cupy.zeros(64, cupy.bool_), reorder=True).own(store[1:].view(cupy.complex64))


def test_host_planes_do_not_join_a_device_set(cupy: Any) -> None:
    active = ActiveSet(cupy.zeros(64, cupy.bool_), reorder=True)
    with pytest.raises(TypeError, match="CuPy"):
        active.own(np.zeros(64))
    with pytest.raises(TypeError, match="CuPy"):
        active.when_finished(np.zeros(1, np.uint32))


def test_devices_are_not_mixed(cupy: Any) -> None:
    if unusable_reason() is None and cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one device only")
    with cupy.cuda.Device(1):
        active = ActiveSet(cupy.zeros(64, cupy.bool_), reorder=True)
    with pytest.raises(ValueError, match="device 0"):
        active.own(cupy.zeros(64))
    active.compact()  # on its own device, whatever the current one
    assert active.live == 64


def test_a_large_batch_uses_many_tiles(cupy: Any) -> None:
    n = 5_000_003  # more tiles than the scanning block has threads
    done = np.random.default_rng(3).random(n) < 0.7
    x = cupy.arange(n, dtype=cupy.int32)
    active = ActiveSet(cupy.asarray(done), reorder=0.75).own(x)
    active.compact()
    live = np.flatnonzero(~done)
    assert active.live == live.size
    np.testing.assert_array_equal(active.map.get()[: live.size], live)
    assert int(active.live32.get()[0]) == np.unique(live // 32).size
    active.reorder()
    np.testing.assert_array_equal(x.get()[: live.size], live)
    active.restore()
    np.testing.assert_array_equal(x.get(), np.arange(n))
