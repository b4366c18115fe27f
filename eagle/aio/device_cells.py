"""The few words that a device run counts in, and their one small copy to the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from eagle.kernels.device import require_cupy
from eagle.kernels.device_call import PackedLaunch, attribute

_DEVICE_TO_HOST = 2
_HOST_TO_DEVICE = 1
_NAMES = ("eagle_count_mask", "eagle_tick", "eagle_pace_begin", "eagle_pace_next")


@cache
def loop_kernels(device: int) -> dict[str, Any]:
    """The functions of loops.cu on the current device, compiled once per process and device, loaded."""
    source = Path(__file__).with_name("loops.cu").read_text(encoding="utf-8")
    module = require_cupy().RawModule(code=source)
    functions = {name: module.get_function(name) for name in _NAMES}
    for function in functions.values():
        attribute(function, "num_regs")  # brings the code to the device, which a capture would forbid
    return functions


@dataclass(frozen=True, slots=True)
class Counts:
    """What a launch counted.

    Attributes:
        finished: Samples whose mask is set.
        steps: Largest step count of one sample in the launch.
        step_sum: Sum of step counts.
        active_lanes: Lanes that worked, of a persist launch.
        lane_slots: Lanes there were.
        compactions: Compactions of a band run.
    """

    finished: int
    steps: int
    step_sum: int
    active_lanes: int
    lane_slots: int
    compactions: int


class Cells:
    """Counters side by side in device memory, and pinned memory of the same size that they are read back into.

    Args:
        histogram: Entries of a uint32 histogram behind the counters, for the launches of each step count.
    """

    _LAYOUT = (
        ("finished", 0, np.uint32),
        ("claim", 4, np.uint32),
        ("steps", 8, np.uint32),
        ("compactions", 12, np.uint32),
    )
    _STEP_SUM, _UTIL, _POLICY, _BYTES = 16, 24, 40, 80

    def __init__(self, histogram: int = 0) -> None:
        cupy = require_cupy()
        self._runtime = cupy.cuda.runtime
        self._current = cupy.cuda.get_current_stream
        self.bytes = self._BYTES + 4 * histogram + (histogram % 2) * 4
        self._memory = cupy.zeros(self.bytes, np.uint8)
        self._pinned = cupy.cuda.alloc_pinned_memory(self.bytes)
        self._host = np.frombuffer(self._pinned, np.uint8, self.bytes)
        self._host[...] = 0
        self._histogram = histogram
        self.base: int = int(self._memory.data.ptr)
        self.finished = self._view(0, np.uint32)

    def _view(self, offset: int, dtype: Any) -> Any:
        return self._memory[offset : offset + np.dtype(dtype).itemsize].view(dtype)

    def address(self, name: str) -> int:
        """Device address of a counter: finished, claim, steps, compactions, step_sum, util, policy or histogram."""
        offsets = {name: offset for name, offset, _ in self._LAYOUT}
        offsets |= {"step_sum": self._STEP_SUM, "util": self._UTIL, "policy": self._POLICY, "histogram": self._BYTES}
        return self.base + offsets[name]

    def clear(self) -> None:
        """Zero every counter, on the current stream; capture-legal."""
        self._runtime.memsetAsync(self.base, 0, self.bytes, self._current().ptr)

    def fetch(self) -> None:
        """Copy every counter to the host, on the current stream; capture-legal."""
        self._runtime.memcpyAsync(self._pinned.ptr, self.base, self.bytes, _DEVICE_TO_HOST, self._current().ptr)

    def read(self) -> Counts:
        """What the last `fetch` brought; its stream must have passed it."""
        words = self._host[:16].view(np.uint32)
        longs = self._host[16:40].view(np.uint64)
        return Counts(
            finished=int(words[0]),
            steps=int(words[2]),
            step_sum=int(longs[0]),
            active_lanes=int(longs[1]),
            lane_slots=int(longs[2]),
            compactions=int(words[3]),
        )

    def read_policy(self) -> tuple[list[int], dict[int, int]]:
        """The policy cells (k, finished at launch, steps done, cap, go) and the launches of each k."""
        cells = [int(word) for word in self._host[self._POLICY : self._BYTES].view(np.uint64)]
        counts = self._host[self._BYTES : self._BYTES + 4 * self._histogram].view(np.uint32)
        return cells, {k: int(count) for k, count in enumerate(counts) if count}


class Fetched:
    """A small array's copy on the host.

    Args:
        array: A uint32 array on the device.
    """

    def __init__(self, array: Any) -> None:
        cupy = require_cupy()
        self._array = array
        self._runtime = cupy.cuda.runtime
        self._current = cupy.cuda.get_current_stream
        self._pinned = cupy.cuda.alloc_pinned_memory(array.nbytes)
        self._host = np.frombuffer(self._pinned, np.uint32, array.size)
        self._host[...] = 0

    def fetch(self) -> None:
        """Copy the array to the host, on the current stream; capture-legal."""
        array = self._array
        self._runtime.memcpyAsync(
            self._pinned.ptr, int(array.data.ptr), array.nbytes, _DEVICE_TO_HOST, self._current().ptr
        )

    def read(self, index: int) -> int:
        """One entry as the last `fetch` brought it."""
        return int(self._host[index])


class SharedWord:
    """One int64 on the device that the host sets before a launch, through pinned memory of its own.

    Args:
        array: The word on the device, shape (1,).
    """

    def __init__(self, array: Any) -> None:
        cupy = require_cupy()
        self._array = array
        self._runtime = cupy.cuda.runtime
        self._current = cupy.cuda.get_current_stream
        self._pinned = cupy.cuda.alloc_pinned_memory(8)
        self._host = np.frombuffer(self._pinned, np.int64, 1)
        self.value = 0

    def set(self, value: int) -> None:
        """Copy ``value`` to the device on the current stream, unless it is there already.

        The stream must have passed the last copy, which reads the same pinned memory.
        """
        if value == self.value:
            return
        self._host[0] = self.value = value
        self._runtime.memcpyAsync(int(self._array.data.ptr), self._pinned.ptr, 8, _HOST_TO_DEVICE, self._current().ptr)


def count_mask(mask: Any, cells: Cells, device: int) -> PackedLaunch:
    """The launch that counts a mask's set bytes into the finished counter; it needs 256 * 16 samples a block."""
    function = loop_kernels(device)["eagle_count_mask"]
    n = int(mask.size)
    args = [np.uint64(mask.data.ptr), np.uint64(cells.address("finished")), np.uint64(n)]
    return PackedLaunch(function, args, -(-n // (256 * 16)), 256, keep=(mask, cells))


def tick(cells: Cells, device: int) -> PackedLaunch:
    """The launch that counts one compaction."""
    function = loop_kernels(device)["eagle_tick"]
    return PackedLaunch(function, [np.uint64(cells.address("compactions"))], 1, 1, keep=cells)


def pacing(
    cells: Cells, go: Any, word: Any, n: int, max_steps: int, first: int, most: int, device: int
) -> tuple[Any, Any]:
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
    begin = PackedLaunch(
        functions["eagle_pace_begin"], [*shared, np.uint64(max_steps), np.uint64(first)], 1, 1, keep=keep
    )
    histogram = np.uint64(cells.address("histogram"))
    following = PackedLaunch(functions["eagle_pace_next"], [*shared, np.uint64(most), histogram], 1, 1, keep=keep)
    return begin, following
