"""The guard kernels of conditional nodes: compiled once per process and device, and the words that stop a loop.

The arithmetic is in ``conditions.cu`` beside this file.
"""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from eagle.kernels.device import is_cupy, require_cupy
from eagle.kernels.device_call import PackedLaunch, attribute

__all__ = ("STOP_SLOTS", "StopWords", "guard_kernel", "guard_words", "prepare_kernels")

# A loop can be stopped by the number of the replay it runs in; two stops whose numbers agree modulo this overwrite one
# another, so that many replays may be cancelled at once before the older ones have been noticed.
STOP_SLOTS = 256
_HOST_TO_DEVICE = 1
_compiling = threading.Lock()
_stopping = threading.Lock()


@cache
def _kernels(device: int) -> dict[str, Any]:
    """The functions of conditions.cu on the current device, loaded."""
    source = Path(__file__).with_name("conditions.cu").read_text(encoding="utf-8")
    module = require_cupy().RawModule(code=source, options=(f"-DSTOP_SLOTS={STOP_SLOTS}",))
    functions = {name: module.get_function(name) for name in ("eagle_if", "eagle_loop_head", "eagle_loop_tail")}
    for function in functions.values():
        attribute(function, "num_regs")  # brings the code to the device, which a capture would forbid
    return functions


def prepare_kernels(device: int) -> None:
    """Compile and load the guard kernels before a capture begins. The device must be current."""
    with _compiling:
        _kernels(device)


def guard_words(guard: Any) -> tuple[int, int]:
    """Device addresses of a guard's count and baseline word; 0 for no baseline.

    Args:
        guard: A `SkipGuard` over CuPy arrays.

    Raises:
        TypeError: An array is no one-dimensional CuPy array of uint32.
        IndexError: An index lies outside of its array.
    """
    baseline = 0
    if guard.baseline_arr is not None:
        baseline = _address(guard.baseline_arr, guard.baseline_idx, "baseline array")
    return _address(guard.count_arr, guard.count_idx, "count array"), baseline


def _address(array: Any, index: int, what: str) -> int:
    if not is_cupy(array) or array.dtype != np.uint32 or array.ndim != 1:
        kind = f"{type(array).__module__}.{type(array).__name__}"
        raise TypeError(
            f"the {what} of a guard must be a one-dimensional CuPy array of uint32 on the GPU target; got a {kind} of "
            f"{getattr(array, 'dtype', 'no dtype')} and shape {getattr(array, 'shape', '?')}"
        )
    if not -array.size <= index < array.size:
        raise IndexError(f"a guard reads lane {index} of a {what} that has {array.size} lanes")
    return int(array.data.ptr + (index % array.size) * array.strides[0])


def guard_kernel(name: str, device: int, *args: Any) -> PackedLaunch:
    """One guard kernel of a single thread, packed."""
    return PackedLaunch(_kernels(device)[name], args, 1, 1)


class StopWords:
    """Where the loops of one graph learn which replays are to stop.

    Replays are numbered from 1 in the order they are issued; each loop counts them itself, in the graph.
    """

    def __init__(self) -> None:
        cupy = require_cupy()
        self._words = cupy.zeros((STOP_SLOTS, 2), cupy.uint64)
        self._stream: Any = None
        self._device: int = cupy.cuda.runtime.getDevice()

    @property
    def address(self) -> int:
        """Device address of the intervals."""
        return int(self._words.data.ptr)

    def replay_word(self) -> Any:
        """A new counter of replays for one loop: a CuPy uint64 array of one element, zero."""
        cupy = require_cupy()
        return cupy.zeros(1, cupy.uint64)

    def stop(self, first: int, behind: int) -> None:
        """End the loops of the replays ``first`` to ``behind - 1`` before their next iteration. Does not wait.

        The copy runs on a stream of its own, beside the graph. Safe from any thread.
        """
        cupy = require_cupy()
        runtime = cupy.cuda.runtime
        interval = np.array([[first, behind]], np.uint64)
        with _stopping, cupy.cuda.Device(self._device):
            if self._stream is None:
                self._stream = cupy.cuda.Stream(non_blocking=True)
            for slot, count in _slots(first, behind):
                rows = np.repeat(interval, count, axis=0)
                address = self.address + slot * interval.nbytes
                # From pageable memory: the driver has taken the bytes when the call returns.
                runtime.memcpyAsync(address, rows.ctypes.data, rows.nbytes, _HOST_TO_DEVICE, self._stream.ptr)


def _slots(first: int, behind: int) -> list[tuple[int, int]]:
    """(slot, count) of the rows that hold the numbers first to behind - 1."""
    if behind - first >= STOP_SLOTS:
        return [(0, STOP_SLOTS)]
    start, stop = first % STOP_SLOTS, behind % STOP_SLOTS
    if start < stop:
        return [(start, stop - start)]
    return [(start, STOP_SLOTS - start), (0, stop)] if stop else [(start, STOP_SLOTS - start)]
