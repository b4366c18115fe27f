"""The few words that a device run counts in, and the one small copy that brings them to the host."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle.aio.events import EndSignal
from eagle.kernels.device import require_cupy
from eagle.kernels.device_call import PackedLaunch, attribute

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_NAMES = ("eagle_count_mask", "eagle_report", "eagle_copy", "eagle_tick", "eagle_pace_begin", "eagle_pace_next")


@cache
def loop_kernels(device: int) -> dict[str, Any]:
    """The functions of loops.cu on the current device, compiled once per process and device, loaded."""
    source = Path(__file__).with_name("loops.cu").read_text(encoding="utf-8")
    module = require_cupy().RawModule(code=source)
    functions = {name: module.get_function(name) for name in _NAMES}
    for function in functions.values():
        attribute(function, "num_regs")  # brings the code to the device, which a capture would forbid
    return functions


class Counts(NamedTuple):
    """What a replay counted.

    Attributes:
        finished: Samples whose mask is set.
        claim: Where a persist launch's claims ended.
        steps: Largest step count of one sample in the launch.
        compactions: Compactions of a band run.
        step_sum: Sum of step counts.
        active_lanes: Lanes that worked, of a persist launch that counted them.
        lane_slots: Lanes there were.
    """

    finished: int
    claim: int
    steps: int
    compactions: int
    step_sum: int
    active_lanes: int
    lane_slots: int


_COUNTS = struct.Struct("<4I3Q")
_OFFSETS = {"finished": 0, "claim": 4, "steps": 8, "compactions": 12, "step_sum": 16, "util": 24, "policy": 40}
_POLICY = struct.Struct("<5Q")
_HISTOGRAM = 80


class Cells:
    """Counters side by side in device memory, zero between replays, and the pinned words they are reported to.

    Args:
        device: CUDA device id, current.
        histogram: Entries of a uint32 histogram behind the counters, for the launches of each step count.

    Attributes:
        finished: The finished counter of the replay in flight, a (1,) uint32 view; 0 between replays.
        shown: What it was at the end of the last replay, (1,) uint32.
        signal: The host word that `report` raises by 1.
    """

    def __init__(self, device: int, histogram: int = 0) -> None:
        cupy = require_cupy()
        self._bytes = _HISTOGRAM + 4 * histogram
        self._histogram = histogram
        self._memory = cupy.zeros(self._bytes, np.uint8)
        self._replays = cupy.zeros(1, np.uint32)
        self._pinned = cupy.cuda.alloc_pinned_memory(2 * self._bytes + 4)
        self._host = np.frombuffer(self._pinned, np.uint8, 2 * self._bytes + 4)
        self._host[...] = 0
        self._view = self._host.data
        self.base: int = int(self._memory.data.ptr)
        self.finished = self._memory[:4].view(np.uint32)
        self.shown = cupy.zeros(1, np.uint32)
        self.signal = EndSignal(self._host[2 * self._bytes :].view(np.uint32))
        args = [
            np.uint64(self.base),
            np.uint32(self._bytes // 4),
            np.uint64(self._pinned.ptr),
            np.uint64(self._replays.data.ptr),
            np.uint64(self._pinned.ptr + 2 * self._bytes),
            np.uint64(self.shown.data.ptr),
        ]
        self._report = PackedLaunch(loop_kernels(device)["eagle_report"], args, 1, 32)

    def address(self, name: str) -> int:
        """Device address of a counter: finished, claim, steps, compactions, step_sum, util, policy or histogram."""
        return self.base + (_HISTOGRAM if name == "histogram" else _OFFSETS[name])

    def report(self) -> None:
        """Bring every counter to the host, clear it, and raise the signal: the last step of a replay."""
        self._report.launch()

    def read(self, replay: int) -> Counts:
        """What the `report` of a replay brought.

        Args:
            replay: Its number: what the signal was expected to be at its end, which must have been seen. At most one
                later replay may have been issued.
        """
        return tuple.__new__(Counts, _COUNTS.unpack_from(self._view, (replay & 1) * self._bytes))

    def read_policy(self, replay: int) -> tuple[list[int], dict[int, int]]:
        """The policy cells (k, finished at launch, steps done, cap, go) and the launches of each k, as in `read`."""
        at = (replay & 1) * self._bytes
        cells = list(_POLICY.unpack_from(self._view, at + _OFFSETS["policy"]))
        counts = self._host[at + _HISTOGRAM : at + self._bytes].view(np.uint32)
        return cells, {k: int(count) for k, count in enumerate(counts) if count}


class Fetched:
    """A small array's copy on the host.

    Args:
        array: A uint32 array on the device.
        device: CUDA device id, current.
    """

    def __init__(self, array: Any, device: int) -> None:
        cupy = require_cupy()
        self._pinned = cupy.cuda.alloc_pinned_memory(array.nbytes)
        self._host = np.frombuffer(self._pinned, np.uint32, array.size)
        self._host[...] = 0
        args = [np.uint64(array.data.ptr), np.uint32(array.size), np.uint64(self._pinned.ptr)]
        self._copy = PackedLaunch(loop_kernels(device)["eagle_copy"], args, 1, 32, keep=array)

    def fetch(self) -> None:
        """Copy the array to the host, on the current stream; before the `Cells.report` of the same replay."""
        self._copy.launch()

    def read(self, index: int) -> int:
        """One entry as the last `fetch` brought it."""
        return int(self._host[index])


class Peek:
    """Counters of a loop that is running, read beside it on a stream of its own (some 100 µs).

    Args:
        cells: The counters.
        ran: The loop's iteration counter, uint32 of shape (1,) on the device.
        device: CUDA device id.
    """

    def __init__(self, cells: Cells, ran: Any, device: int) -> None:
        cupy = require_cupy()
        self._device = cupy.cuda.Device(device)
        self._runtime = cupy.cuda.runtime
        self._keep = (cells, ran)
        self._sources = (cells.base, int(ran.data.ptr))
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._pinned = cupy.cuda.alloc_pinned_memory(_HISTOGRAM + 4)
        self._host = np.frombuffer(self._pinned, np.uint8, _HISTOGRAM + 4)

    def read(self) -> tuple[int, int, int]:
        """Samples finished, steps done by the policy of an automatic loop, and iterations."""
        counters, ran = self._sources
        with self._device:
            copy, stream = self._runtime.memcpyAsync, self._stream.ptr
            copy(self._pinned.ptr, counters, _HISTOGRAM, _DEVICE_TO_HOST, stream)
            copy(self._pinned.ptr + _HISTOGRAM, ran, 4, _DEVICE_TO_HOST, stream)
            self._stream.synchronize()
        view = self._host.data
        finished = _COUNTS.unpack_from(view, 0)[0]
        steps = _POLICY.unpack_from(view, _OFFSETS["policy"])[2]
        return finished, steps, int(self._host[_HISTOGRAM:].view(np.uint32)[0])


class SharedWord:
    """One int64 on the device that the host sets before a launch, through pinned memory of its own.

    Args:
        array: The word on the device, shape (1,).
    """

    def __init__(self, array: Any) -> None:
        cupy = require_cupy()
        self._address = int(array.data.ptr)
        self._array = array
        self._copy = cupy.cuda.runtime.memcpyAsync
        self._current = cupy.cuda.get_current_stream
        self._pinned = cupy.cuda.alloc_pinned_memory(16)
        self._host = np.frombuffer(self._pinned, np.int64, 2)
        self._at = 0
        self.value = 0

    def set(self, value: int) -> None:
        """Copy ``value`` to the device on the current stream.

        The stream must have passed the copy before the last one, which reads the same pinned memory.
        """
        at = self._at = 1 - self._at
        self._host[at] = self.value = value
        self._copy(self._address, self._pinned.ptr + 8 * at, 8, _HOST_TO_DEVICE, self._current().ptr)


def count_mask(mask: Any, cells: Cells, device: int) -> PackedLaunch:
    """The launch that counts a mask's set bytes into the finished counter, which must be 0."""
    n = int(mask.size)
    args = [np.uint64(mask.data.ptr), np.uint64(cells.address("finished")), np.uint64(n)]
    return PackedLaunch(loop_kernels(device)["eagle_count_mask"], args, -(-n // (256 * 16)), 256, keep=(mask, cells))


def tick(cells: Cells, device: int) -> PackedLaunch:
    """The launch that counts one compaction."""
    return PackedLaunch(loop_kernels(device)["eagle_tick"], [np.uint64(cells.address("compactions"))], 1, 1, keep=cells)


def pacing(
    cells: Cells, go: Any, word: Any, *, n: int, max_steps: int, first: int, most: int, device: int
) -> tuple[PackedLaunch, PackedLaunch]:
    """The launches that begin and continue the pacing of an automatic loop.

    Args:
        cells: Counters with policy cells and a histogram of more than ``most`` entries.
        go: The guard's word, (1,) uint32.
        word: The kernel's steps word, (1,) int64.
        n: Samples.
        max_steps: The cap.
        first: Steps of the first launch.
        most: Steps of the longest one.
        device: The current device.
    """
    functions = loop_kernels(device)
    policy, finished = np.uint64(cells.address("policy")), np.uint64(cells.address("finished"))
    shared = [policy, np.uint64(go.data.ptr), np.uint64(word.data.ptr), finished, np.uint32(n)]
    keep = (cells, go, word)
    start = [*shared, np.uint64(max_steps), np.uint64(first)]
    following = [*shared, np.uint64(most), np.uint64(cells.address("histogram"))]
    return (
        PackedLaunch(functions["eagle_pace_begin"], start, 1, 1, keep=keep),
        PackedLaunch(functions["eagle_pace_next"], following, 1, 1, keep=keep),
    )
