"""CUDA events from one pool per device: created once, recorded behind each enqueue, given back when it has ended.

An event here is a CuPy event handle without a finaliser: events at rest outlive every pipeline, and in a forked child
or at interpreter exit there is nothing that would call into a driver that is gone.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from typing import Any

from eagle.aio import counters, poller
from eagle.kernels.device import NOT_READY, SUCCESS, require_cupy
from eagle.kernels.device_call import cuda_driver

__all__ = ("EndSignal", "EventPool", "PooledEvent", "StreamEnd", "idle", "pool_of")

# How often the driver is asked although a host word tells the end.
_ASK_DRIVER_EVERY = 16
_AT_REST = 4096  # per device; what more a burst needed is destroyed again


class _ThisThread(threading.local):
    relaxed = False  # this thread told the driver that it knows what it does while others capture


_here = _ThisThread()
_pools: dict[int, EventPool] = {}
_lock = threading.Lock()


class PooledEvent:
    """One CUDA event without timing.

    Attributes:
        ptr: The raw handle, as ``cupy.cuda.Event.ptr``.
        device: The device it belongs to.
    """

    __slots__ = ("_asked", "_expected", "_query", "_record", "_signal", "device", "ptr")

    def __init__(self, device: int, runtime: Any) -> None:
        self.ptr: int = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        self.device = device
        self._query = runtime.eventQuery
        self._record = runtime.eventRecord
        self._signal: memoryview | None = None
        self._expected = 0
        self._asked = 0

    def announced_by(self, signal: memoryview, expected: int) -> None:
        """Look at a host word first: the work before the event sets it as its last deed.

        A word in pinned memory costs a tenth of asking the driver, and is there a microsecond earlier. The driver is
        still asked now and then, since a device that fails sets no word.

        Args:
            signal: uint32 memory of one word.
            expected: What the work will set it to.
        """
        self._signal, self._expected, self._asked = signal, expected, 0

    def record(self, stream_ptr: int) -> None:
        """Record it behind everything a raw stream holds."""
        self._record(self.ptr, stream_ptr)

    @property
    def done(self) -> bool:
        """Whether the work before it has ended. Never waits.

        Raises:
            CUDARuntimeError: The device has failed; CuPy's error, with CUDA's number.
        """
        if self._signal is not None:
            if (self._signal[0] - self._expected) & 0xFFFFFFFF < 0x80000000:  # the word wraps like a uint32
                return True
            self._asked += 1
            if self._asked % _ASK_DRIVER_EVERY:
                return False
        return _has_ended(self._query, self.ptr)


class StreamEnd:
    """The end of one replay that announces it: the host word first, now and then the driver about the whole stream.

    An event of the poller's that needs nothing of CUDA's: cheaper by 2 µs than a pooled one, for one waiter.

    Args:
        word: uint32 memory of one word, which the replay raises as its last deed.
        expected: What it raises it to.
        stream: The raw stream; what is issued there later may be waited for, too, when the word never comes.
        runtime: CuPy's runtime module.

    Attributes:
        error: What the driver said of a device that has failed: the replay is over, too.
    """

    __slots__ = ("_asked", "_runtime", "_stream", "_word", "error", "expected")

    def __init__(self, word: memoryview, expected: int, stream: int, runtime: Any) -> None:
        self._word, self.expected, self._stream, self._runtime = word, expected, stream, runtime
        self._asked = 0
        self.error: Exception | None = None

    def over(self) -> bool:
        """Whether the replay has ended, well or not. Never waits, never raises."""
        if (self._word[0] - self.expected) & 0xFFFFFFFF < 0x80000000:
            return True
        self._asked += 1
        if self._asked % _ASK_DRIVER_EVERY:
            return self.error is not None
        try:
            return _has_ended(self._runtime.streamQuery, self._stream)
        except Exception as error:
            self.error = error
            return True

    @property
    def done(self) -> bool:
        """The same for the poller.

        Raises:
            CUDARuntimeError: The device has failed.
        """
        over = self.over()
        if self.error is not None:
            raise self.error
        return over


class EndSignal:
    """A host word that the last step of a replay raises by 1, and how often it will have been raised.

    Several graphs may share one signal as long as one of them at a time is in flight.

    Args:
        word: uint32 array of one word in pinned memory, 0 now.
    """

    __slots__ = ("expected", "view")

    def __init__(self, word: Any) -> None:
        self.view: memoryview = word.data  # read in half the time that the array takes
        self.expected = 0

    def expect(self, replays: int) -> int:
        """What the word will be when that many more replays have ended; for the issuer, under its lock."""
        self.expected = (self.expected + replays) & 0xFFFFFFFF
        return self.expected


def _has_ended(query: Any, handle: int) -> bool:
    """Ask the driver about an event or a stream, by CuPy's function for it.

    torch captures in global mode by default, where a query by any thread that has not said otherwise ruins the capture,
    also one of another thread.
    """
    code = query(handle) if _here.relaxed or "torch" not in sys.modules else _ask_relaxed(query, handle)
    if code == SUCCESS:
        return True
    if code == NOT_READY:
        return False
    raise require_cupy().cuda.runtime.CUDARuntimeError(code)


def _ask_relaxed(query: Any, handle: int) -> int:
    driver = cuda_driver()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        return int(query(handle))
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


class EventPool:
    """The events at rest of one device.

    Args:
        device: Its CUDA ordinal.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._rest: deque[PooledEvent] = deque()

    def take(self) -> PooledEvent:
        """An event that nobody else uses. The pool's device must be current."""
        try:
            event = self._rest.pop()
        except IndexError:
            return PooledEvent(self._device, require_cupy().cuda.runtime)
        return event

    def give(self, event: PooledEvent) -> None:
        """Take an event back whose work has ended; never raises."""
        event._signal = None  # its memory is its owner's
        if len(self._rest) < _AT_REST:
            self._rest.append(event)
            return
        try:
            require_cupy().cuda.runtime.eventDestroy(event.ptr)
        except Exception:
            pass

    def __len__(self) -> int:
        return len(self._rest)


def idle(runtime: Any, stream_ptr: int) -> bool:
    """Whether a raw stream certainly holds no work: then nothing of it has to be waited for.

    A wait on an empty stream costs the device some microseconds before the work behind it begins, asking half of one.
    Where the question could ruin somebody's capture (torch captures in global mode) it is not asked.
    """
    if "torch" in sys.modules and not _here.relaxed:
        return False
    try:
        return bool(runtime.streamQuery(stream_ptr) == SUCCESS)
    except Exception:  # the stream is being captured, say: the wait itself will tell
        return False


def pool_of(device: int) -> EventPool:
    """The pool of one device."""
    pool = _pools.get(device)
    if pool is None:
        with _lock:
            pool = _pools.setdefault(device, EventPool(device))
    return pool


def _pooled() -> int:
    return sum(len(pool) for pool in list(_pools.values()))


def _relax_this_thread() -> None:
    """Let the poller ask events while other threads capture in global mode."""
    if "cupy" in sys.modules:
        driver = cuda_driver()
        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        _here.relaxed = True


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _pools.clear()


poller.before_polling(_relax_this_thread)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

counters.count_pooled_with(_pooled)
