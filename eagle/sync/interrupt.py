"""Ctrl-C in a blocking call whose thread works on the run itself: noted at once, raised when the run has stopped."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

# The functions beneath those of `signal`, which look for an enum member in every handler: 10 µs a run.
_set_handler: Callable[[int, Any], Any] = _signal.signal
_handler_of: Callable[[int], Any] = _signal.getsignal
_SIGINT = int(signal.SIGINT)


@contextlib.contextmanager
def interrupt_deferred(stop: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into ``stop()`` while the block runs, and raise KeyboardInterrupt at its end.

    A KeyboardInterrupt in the middle of the thread team's bookkeeping would leave a piece that nobody finishes. Only
    the main thread under Python's own handler is concerned; a handler that the program installed stays in charge.

    Args:
        stop: Asks the run to end at its next slice; called in a thread of its own for each Ctrl-C.

    Yields:
        Whether Ctrl-C has come: ask before anything is started that `stop` does not reach yet.
    """
    in_charge = threading.current_thread() is threading.main_thread()
    if not in_charge or _handler_of(_SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    stopping: list[Any] = []  # a lock for each Ctrl-C, held until its stop() has returned

    def stop_aside(done: Any) -> None:
        try:
            stop()
        finally:
            done.release()

    def note(signum: int, frame: Any) -> None:
        done = _thread.allocate_lock()
        done.acquire()
        stopping.append(done)
        # Not here: the handler may have interrupted this thread while it holds a lock that stop() needs.
        try:
            _thread.start_new_thread(stop_aside, (done,))
        except RuntimeError:  # the system's limit of threads: this Ctrl-C shows when the run has ended
            done.release()

    _set_handler(_SIGINT, note)
    try:
        yield lambda: bool(stopping)
    finally:
        _set_handler(_SIGINT, signal.default_int_handler)
        for done in stopping:
            done.acquire()  # a stop() that came late would end the next run
        if stopping:
            raise KeyboardInterrupt
