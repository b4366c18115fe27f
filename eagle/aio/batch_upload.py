"""Frames on a device for requests whose planes lie on the host: one upload and one download for a whole batch.

All planes of a batch travel in one block of pinned memory, side by side and packed, with the tables that the gathering
kernel needs in front; that kernel spreads them over the frame's planes, and packs the results on the way back. What
carries them is the legacy default stream, which every run waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.aio import poller
from eagle.aio.batch_device import DeviceFrame, gather
from eagle.aio.batch_frame import side_by_side
from eagle.aio.batch_result import Outputs

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from eagle.aio.batch_request import Intake, Request

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_ALIGNED = 8  # bytes: every plane begins at a multiple


class UploadedFrame(DeviceFrame):
    """A frame of CuPy arrays for requests of NumPy arrays."""

    def __init__(self, intake: Intake, device: int | None, given: dict[str, Any], max_steps: int) -> None:
        super().__init__(intake, device, given, max_steps)
        # What comes back: the mask first, then the state; and all of it component by component.
        self._results = [self._loop.mask, *(self._natives[name] for name in self._state)]
        self._rows = [row for native in self._results for row in (native if native.ndim == 2 else [native])]
        words = (2 + len(self._filled)) + (2 + len(self._rows)) + 4 * len(self._rows)
        wide = [self._natives[name] for name, _ in self._filled]
        self._up_bytes = 8 * words + sum(native.nbytes + _ALIGNED for native in wide)
        self._total = 0
        with self._device:  # what fills the frame goes by another stream than what made it
            self._cupy.cuda.get_current_stream().synchronize()

    @cached_property
    def _up(self) -> _Block:
        """What is uploaded; a request that runs alone brings its planes itself."""
        with self._device:
            return _Block(self._up_bytes, self._cupy)

    @cached_property
    def _down(self) -> _Block:
        """What is downloaded."""
        with self._device:
            return _Block(self._places(self.capacity)[-1], self._cupy, pinned=False)

    @property
    def on_host(self) -> bool:
        """Planes are copied by the thread that fills the frame."""
        return True

    def fill(self, requests: Sequence[Request], total: int) -> None:
        """Pack the planes and the tables, upload them, spread them: a copy and a launch."""
        up, inputs, rows = self._up, len(self._filled), len(self._rows)
        at = 8 * (2 + inputs + 2 + rows + 4 * rows)
        table = [0, total]
        for name, default in self._filled:
            native = self._natives[name]
            shape = (*native.shape[:-1], total)
            packed = up.host[at : at + default.itemsize * int(np.prod(shape))].view(default.dtype).reshape(shape)
            side_by_side(packed, name, default, requests)
            table.append(up.address + at)
            at = _behind(at + packed.nbytes)
        table += [0, total, *(row.data.ptr for row in self._rows)]
        for native, place in zip(self._results, self._places(total), strict=False):
            for component in range(_width(native)):
                table += [self._down.address + place + component * total * native.itemsize, 1, native.itemsize, 0]
        up.host[: 8 * len(table)].view(np.uint64)[...] = table
        runtime = self._cupy.cuda.runtime
        with self._device, self._cupy.cuda.Stream.null as stream:
            runtime.memcpyAsync(up.address, up.pinned.ptr, at, _HOST_TO_DEVICE, stream.ptr)
            if inputs:
                gather(self._id, up.address, self._planes, 1, inputs, total, self.capacity)
            self._mark(total, stream)
        self._total = total
        self._in_flight = True

    def copy(self, start: int, n: int, *, done: bool) -> Outputs:
        """The whole batch by one download, which is on its way then; a part of it by a copy of each plane."""
        if (start, n) != (0, self._total):
            with self._device:
                arrays = {name: self._natives[name][..., start : start + n].get() for name in self._state}
            return Outputs(arrays, None if done else self.mask(start + n)[start:], self._columns)
        first = 8 * (2 + len(self._filled))
        rows, cuda, places = len(self._rows), self._cupy.cuda, self._places(n)
        with self._device, cuda.Stream.null as stream:
            table = self._up.address + first
            gather(self._id, table, table + 8 * (2 + rows), 1, rows, n, n)
            pinned = cuda.alloc_pinned_memory(places[-1])  # from CuPy's pool; the results keep it
            cuda.runtime.memcpyAsync(pinned.ptr, self._down.address, places[-1], _DEVICE_TO_HOST, stream.ptr)
            event = cuda.Event(disable_timing=True)
            event.record(stream)
            # Nobody may keep the results: the memory goes back to its pool when the copy has ended, not before.
            poller.track(pinned, event, name=self.runner.bound.name, device=self._id)
        host = np.frombuffer(pinned, np.uint8, places[-1])
        mask, *state = (
            host[at : at + _width(native) * n * native.itemsize].view(native.dtype).reshape(*native.shape[:-1], n)
            for native, at in zip(self._results, places, strict=False)
        )
        arrays = dict(zip(self._state, state, strict=True))
        return Outputs(arrays, None if done else mask, self._columns, _Landed(event))

    def own(self) -> Outputs:
        """Copies of the frame's arrays, on the host."""
        with self._device:
            arrays = {name: self._natives[name].get() for name in self._state}
            return Outputs(arrays, self._loop.mask.get(), self._columns)

    def rest(self) -> None:
        """Nothing of the staging block is in use any more."""
        with self._cupy.cuda.Stream.null:
            super().rest()

    def _places(self, n: int) -> list[int]:
        """Where each result of ``n`` samples begins among the packed bytes, and behind them all how many bytes."""
        places = [0]
        for native in self._results:
            places.append(_behind(places[-1] + _width(native) * n * native.itemsize))
        return places


class _Block:
    """Bytes on the device, with pinned ones on the host where they are filled there."""

    def __init__(self, size: int, cupy: Any, *, pinned: bool = True) -> None:
        self._memory = cupy.empty(max(size, 1), np.uint8)
        self.address = int(self._memory.data.ptr)
        if pinned:
            self.pinned = cupy.cuda.alloc_pinned_memory(max(size, 1))
            self.host = np.frombuffer(self.pinned, np.uint8, max(size, 1))


class _Landed:
    """The block in which a download has arrived: entering it waits, for microseconds where the batch has just ended."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def __call__(self) -> AbstractContextManager[object]:
        event = self._event  # two threads may come for two results
        if event is not None:
            event.synchronize()
            self._event = None
        return _HERE


_HERE = nullcontext()


def _width(native: Any) -> int:
    """Components of a sample."""
    return native.shape[0] if native.ndim == 2 else 1


def _behind(at: int) -> int:
    """The next aligned byte."""
    return -(-at // _ALIGNED) * _ALIGNED
