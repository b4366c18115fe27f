"""Frames on a device: one upload of a table and one launch bring the planes of a whole batch side by side.

CuPy's own concatenation is a launch and some 10 µs of Python for each array, which for a thousand requests of three
planes is more than their run. Nothing of the planes passes through the host; the mask does, and only where a request's
own end cannot be told from the batch's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.aio.batch_frame import Frame
from eagle.aio.completion import Completion, leave_when_done
from eagle.aio.device_loop import DeviceLoop
from eagle.kernels.device import require_cupy
from eagle.kernels.device_call import attribute

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from eagle.aio.batch_request import Intake, Request
    from eagle.aio.batch_result import Outputs
    from eagle.aio.device_run import DeviceRun
    from eagle.aio.report import RunReport

_HOST_TO_DEVICE = 1
_THREADS = 256
_PER_THREAD = 8  # elements that a thread copies before a block more pays
_MOST_PARTS = 1024
_HERE = nullcontext()


@cache
def gather_kernel(device: int) -> Any:
    """The function of gather.cu on the current device, compiled once per process and device, loaded."""
    source = Path(__file__).with_name("gather.cu").read_text(encoding="utf-8")
    function = require_cupy().RawModule(code=source).get_function("eagle_gather")
    attribute(function, "num_regs")  # brings the code to the device
    return function


def gather(device: int, requests: int, planes: int, count: int, width: int, longest: int, capacity: int) -> None:
    """Launch gather.cu on the current stream.

    Args:
        device: The current device.
        requests: Device address of the requests' rows.
        planes: Device address of the planes' rows.
        count: Requests.
        width: Planes.
        longest: Samples of the longest request.
        capacity: Samples from one component of a plane to the next.
    """
    parts = min(max(-(-longest // (_THREADS * _PER_THREAD)), 1), _MOST_PARTS)
    args = (np.uint64(requests), np.uint64(planes), np.uint64(width), np.uint64(capacity))
    gather_kernel(device)((count, width, parts), (_THREADS,), args)


class Place:
    """Where results lie, and the point on a stream behind which they are there.

    In the block that a call gives, the device is current, and its current stream waits for the results where they were
    copied on another one.

    Args:
        cuda: CuPy's.
        device: The device's id; it is current.
        copied: Whether the results are copies that were just issued on the current stream.
    """

    __slots__ = ("_cuda", "_device", "_event", "_ptr")

    def __init__(self, cuda: Any, device: int, *, copied: bool) -> None:
        self._cuda = cuda
        self._device = device
        self._event = self._ptr = None
        if copied:
            stream = cuda.get_current_stream()
            self._ptr = stream.ptr
            self._event = cuda.Event(disable_timing=True)
            self._event.record(stream)

    def __call__(self) -> AbstractContextManager[object]:
        """The block."""
        if self._cuda.runtime.getDevice() != self._device:
            return self._there()
        self._wait()
        return _HERE

    @contextmanager
    def _there(self) -> Iterator[None]:
        with self._cuda.Device(self._device):
            self._wait()
            yield

    def _wait(self) -> None:
        if self._event is not None:
            stream = self._cuda.get_current_stream()
            if stream.ptr != self._ptr:
                stream.wait_event(self._event)


class DeviceFrame(Frame):
    """A frame of CuPy arrays; the kinds of it differ in where the planes of requests lie."""

    def __init__(self, intake: Intake, device: int | None, given: dict[str, Any], max_steps: int) -> None:
        assert device is not None
        self._cupy = require_cupy()
        self._id = device
        self._device = self._cupy.cuda.Device(device)
        with self._device:
            super().__init__(intake, device, given, max_steps)
            gather_kernel(device)  # compiled before the event loop needs it
            self._reader = self._cupy.cuda.Stream(non_blocking=True)
            self._described = self._cupy.asarray(self._descriptions())
            self._planes = int(self._described.data.ptr)
            loop = self.runner.bound
            assert isinstance(loop, DeviceLoop)
            self._loop = loop
            loop.depth = 1  # `follow` looks at the mask while the device rests
        self._in_flight = False

    def _descriptions(self) -> np.ndarray[Any, Any]:
        """The planes as gather.cu wants them."""
        rows = np.zeros((max(len(self._filled), 1), 4), np.uint64)
        for row, (name, default) in zip(rows, self._filled, strict=False):
            native = self._natives[name]
            bits = int.from_bytes(default.tobytes(), "little")
            row[:] = (native.data.ptr, native.shape[0] if native.ndim == 2 else 1, default.itemsize, bits)
        return rows

    def _mark(self, total: int, stream: Any) -> None:
        """Nobody has finished but the tail, on a stream."""
        runtime, loop = self._cupy.cuda.runtime, self._loop
        mask = loop.mask.data.ptr
        runtime.memsetAsync(mask, 0, total, stream.ptr)
        if total < self.capacity:
            runtime.memsetAsync(mask + total, 1, self.capacity - total, stream.ptr)
        if loop.active is not None:
            loop.active.reset()

    async def follow(self, run: DeviceRun, work: Completion[Any], look: Callable[[Any], None] | None) -> None:
        """Look between two slices, while the device rests."""
        await leave_when_done(work)
        self._in_flight = False  # the run stood behind the copies
        if look is not None:
            run.gather()
            if not run.over():
                look(self.mask(self.capacity))

    def mask(self, total: int) -> np.ndarray[Any, Any]:
        """A copy of the mask, read on a stream that waits for nobody else's work."""
        with self._device:
            mask: np.ndarray[Any, Any] = self._loop.mask[:total].get(stream=self._reader)
        return mask

    def report_so_far(self, run: DeviceRun) -> RunReport:
        """By the slices that have ended."""
        return run.result()

    def rest(self) -> None:
        """Nothing of the requests is in use any more."""
        if self._in_flight:  # everybody left before the run: the copies still read the arrays and the table
            with suppress(Exception), self._device:  # a device that has failed reads nothing any more
                self._cupy.cuda.get_current_stream().synchronize()
            self._in_flight = False


class GatheredFrame(DeviceFrame):
    """A frame for requests of CuPy arrays."""

    def __init__(self, intake: Intake, device: int | None, given: dict[str, Any], max_steps: int) -> None:
        super().__init__(intake, device, given, max_steps)
        with self._device:
            self._table(64)
        self._sources: list[Any] = []

    def _table(self, rows: int) -> None:
        """Room for the addresses of so many requests, on both sides."""
        words = rows * (2 + len(self._filled))
        self._rows = rows
        self._pinned = self._cupy.cuda.alloc_pinned_memory(8 * words)
        self._host = np.frombuffer(self._pinned, np.uint64, words)
        self._there = self._cupy.empty(words, np.uint64)

    def fill(self, requests: Sequence[Request], total: int) -> None:
        """Copy the planes in with one launch, on the current stream."""
        cupy, count, planes = self._cupy, len(requests), len(self._filled)
        table = array("Q")
        seeds = []
        for r in requests:
            table.append(r.start)
            table.append(r.n)
            table.extend(r.addresses)
            if r.seed is not None:
                seeds.append(r.seed)
        with self._device:
            stream = cupy.cuda.get_current_stream()
            if count > self._rows:
                self._table(2 * count)
            self._host[: len(table)] = np.frombuffer(table, np.uint64)
            for seed in seeds:
                stream.wait_event(seed)
            there = int(self._there.data.ptr)
            cupy.cuda.runtime.memcpyAsync(there, self._pinned.ptr, 8 * len(table), _HOST_TO_DEVICE, stream.ptr)
            if planes:
                gather(self._id, there, self._planes, count, planes, max(r.n for r in requests), self.capacity)
            self._mark(total, stream)
        self._sources = [r.arrays for r in requests]  # a cancelled request's arrays may still be read from
        self._in_flight = True

    def copy(self, start: int, n: int, *, done: bool) -> Outputs:
        """Copies on the current stream; results wait for them where they are used on another one."""
        with self._device:
            outputs = super().copy(start, n, done=done)
            outputs.place = Place(self._cupy.cuda, self._id, copied=True)
        return outputs

    def own(self) -> Outputs:
        """The arrays themselves: the run has ended, so they are there."""
        with self._device:
            outputs = super().own()
            outputs.place = Place(self._cupy.cuda, self._id, copied=False)
        return outputs

    def rest(self) -> None:
        """Let go of the arrays that were copied from."""
        super().rest()
        self._sources = []
