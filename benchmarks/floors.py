"""What the device allows: its measured rates, and a run's kernel launched bare, without the engine around it."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

_SOURCE = r"""
extern "C" __global__ void rate(double* out, int rounds) {
    double a[8];
    #pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = threadIdx.x + i;
    for (int round = 0; round < rounds; ++round) {
        #pragma unroll
        for (int repeat = 0; repeat < 16; ++repeat) {
            #pragma unroll
            for (int i = 0; i < 8; ++i) a[i] = fma(a[i], 0.999, 1e-3);
        }
    }
    double sum = 0.0;
    #pragma unroll
    for (int i = 0; i < 8; ++i) sum += a[i];
    if (sum == -1.0) out[0] = sum;
}
extern "C" __global__ void nothing() {}
"""
_THREADS = 256
_BLOCKS_PER_SM = 8
_ROUNDS = 1000
_COPY_BYTES = 256 * 2**20


def machine() -> dict[str, Any]:
    """Measure the device: its name, FP64 operations and bytes a second, and seconds of an empty graph.

    The rate counts a fused multiply-add as two operations; the bandwidth is that of a copy, read plus written.
    """
    import cupy

    props = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    name = props["name"].decode() if isinstance(props["name"], bytes) else props["name"]
    return {"name": name, "flops": _flops(cupy), "bytes_per_s": _bandwidth(cupy), "empty_graph_s": _empty_graph(cupy)}


def _device_seconds(cupy: Any, work: Any) -> float:
    """Best device time of five."""
    times = []
    for _ in range(6):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return min(times[1:])


def _flops(cupy: Any) -> float:
    kernel = cupy.RawModule(code=_SOURCE).get_function("rate")
    blocks = _BLOCKS_PER_SM * cupy.cuda.Device().attributes["MultiProcessorCount"]
    out = cupy.zeros(1)
    seconds = _device_seconds(cupy, lambda: kernel((blocks,), (_THREADS,), (out, np.int32(_ROUNDS))))
    return blocks * _THREADS * _ROUNDS * 16 * 8 * 2 / seconds


def _bandwidth(cupy: Any) -> float:
    source, target = cupy.zeros(_COPY_BYTES // 8), cupy.zeros(_COPY_BYTES // 8)
    return 2 * _COPY_BYTES / _device_seconds(cupy, lambda: cupy.copyto(target, source))


def _empty_graph(cupy: Any) -> float:
    kernel = cupy.RawModule(code=_SOURCE).get_function("nothing")
    kernel((1,), (1,), ())
    graph, stream = _captured(cupy, lambda stream: kernel((1,), (1,), ()))
    times = []
    for _ in range(50):
        began = time.perf_counter()
        graph.launch(stream)
        stream.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _captured(cupy: Any, work: Any) -> tuple[Any, Any]:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        work(stream)
        graph = stream.end_capture()
    return graph, stream


class Bare:
    """The kernel of a run in a graph of its own: the counters cleared, one launch, nothing else.

    Args:
        sim: A simulation of an automatic kernel on CuPy planes. Afterwards it must not be run by the engine any more.
        report: The report of such a run: entry and geometry are taken from it.
        max_steps: Steps a sample may take.
    """

    def __init__(self, sim: Any, report: Any, max_steps: int) -> None:
        import cupy

        from eagle.kernels.binding import struct_values

        loop = sim.runner.bound
        kernel, n = loop.kernel, loop.n
        loop.fused_steps[...] = max_steps
        values = struct_values(kernel.sidecar, loop.planes, loop.bound[0].words)
        claim = cupy.zeros(1, np.uint32)
        largest = cupy.zeros(1, np.uint32)
        keep = (sim, claim, largest)
        if report.entry == "persist":
            launch = kernel.packed_persist(
                values,
                n,
                claim=claim.data.ptr,
                util=0,
                steps=largest.data.ptr,
                step_sum=0,
                block=report.block,
                threads_per_sm=report.threads_per_sm,
                chunk=report.chunk,
                keep=keep,
            )
        elif report.entry == "range":
            launch = kernel.packed_range(values, n, steps=largest.data.ptr, step_sum=0, block=report.block, keep=keep)
        else:
            launch = kernel.packed(values, n, keep=keep)

        def work(stream: Any) -> None:
            for counter in (claim, loop.finished):
                cupy.cuda.runtime.memsetAsync(counter.data.ptr, 0, 4, stream.ptr)
            launch.launch(stream.ptr)

        cupy.cuda.runtime.deviceSynchronize()
        self._keep = (keep, launch)
        self._graph, self._stream = _captured(cupy, work)

    def run(self) -> float:
        """Launch it and wait; the state was seeded and the mask cleared before. Returns seconds."""
        began = time.perf_counter()
        self._graph.launch(self._stream)
        self._stream.synchronize()
        return time.perf_counter() - began


def floor(
    rates: dict[str, Any], *, flop: float, moved: float, longest: float, step_s: float
) -> tuple[float, str, dict[str, float]]:
    """The largest of what a run cannot be faster than.

    Args:
        rates: Of `machine`.
        flop: FP64 operations of all samples' steps.
        moved: Bytes read and written.
        longest: Steps of the longest sample.
        step_s: Seconds of one step of one sample that is alone on the device: its chain of dependent operations.

    Returns:
        Seconds, which it is ("FP64", "memory" or "latency"), and all three.
    """
    each = {"FP64": flop / rates["flops"], "memory": moved / rates["bytes_per_s"], "latency": longest * step_s}
    which = max(each, key=lambda name: each[name])
    return each[which], which, each
