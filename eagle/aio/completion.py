"""Completion: what issued work gives back, awaitable from any event loop and any thread.

A Completion settles once, whoever does it first wins::

    pending --settle(), a source that says "ended", a fork--> settled

Waiters park (`eagle.aio.wake`) while it is pending. Every transition is made under one lock of the process and is a few
bytecodes long; waking and callbacks happen after the lock is let go. Work that another party must be asked about, such
as a CUDA event, comes with a `Source`; work of host threads is settled by the thread that ran it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import types
from collections import deque
from contextlib import nullcontext
from numbers import Real
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import anyio

from eagle.aio import counters, workers
from eagle.aio.wake import (
    Hook,
    Parked,
    ParkedThread,
    driving,
    loop_runs_here,
    mailbox,
    nap_after,
    refuse_in_loop,
    wake_all,
)
from eagle.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

__all__ = ("LONG_S", "SPIN_S", "Completion", "Source", "drained", "drive", "leave_when_done", "wait_to_end")

T = TypeVar("T")

# A replay of some 20 µs is over before a parked task could be woken (30 to 50 µs), so it is first looked at in turns of
# the task's loop.
SPIN_S = 60e-6
# Up to here it is looked at as long as the last one took; what takes longer is left to the poller, whose lateness of 50
# to 100 µs is little beside it.
LONG_S = 0.003
# A blocking caller has nothing better to do.
_SPIN_BLOCKING_S = 1e-3

_log = logging.getLogger("eagle")


class Source(Protocol):
    """Where a completion asks whether its work has ended. Safe from any thread."""

    @property
    def polled(self) -> bool:
        """Whether a blocking thread does better to ask again and again than to be woken."""

    def check(self) -> bool:
        """Ask now; settle the completion and return True when the work has ended, also when it failed."""

    def observe(self) -> None:
        """Somebody waits from now on: look often, and settle the completion soon after the end."""


class Completion(Generic[T]):
    """Work that was issued; await it for its result.

    Any number of tasks, event loops and threads may wait for one Completion, before and after its end. A waiter that is
    cancelled leaves at once and alone: the work goes on. An error of the work reaches every waiter.

    Args:
        result: What awaiting gives back.
        name: Of the pipeline or simulation, for messages.
        source: Where to ask about the end; None when the thread that runs the work calls `settle`.
        stop: Called by `stop` while the work is pending; may be called from any thread and more than once.

    Attributes:
        settled: Whether the end is known already; unlike `done`, it never asks the source.
        spin_s: Seconds that a waiting task checks in turns of its loop before it parks; whoever knows how long the work
            takes may set it.
    """

    # What most completions never set stands here: making one is a part of what a replay costs.
    spin_s = SPIN_S
    _error: BaseException | None = None
    _traceback: Any = None
    _waiters: dict[Parked, None] | None = None
    _callbacks: deque[Callable[[Completion[T]], object]] | None = None
    _calling = False
    _received = False
    _ended_at = 0.0

    def __init__(
        self,
        result: T,
        *,
        name: str | None = None,
        source: Source | None = None,
        stop: Callable[[], None] | None = None,
    ) -> None:
        self._result = result
        self._name = name
        self._source = source
        self._stop = stop
        self.settled = False
        self._epoch = _epoch

    def __repr__(self) -> str:
        """Name and state, without asking the device."""
        state = "pending" if not self.settled else "done" if self._error is None else f"failed: {self._error!r}"
        return f"<Completion of {self._name or self._result!r}: {state}>"

    # ---- waiting -------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether the work has ended, well or not. Never waits."""
        if self.settled:
            return True
        if self._epoch != _epoch:
            self.settle(_lost_in_fork(self._name))
            return True
        source = self._source
        return source is not None and source.check()

    def wait(self, timeout: float | None = None) -> T:
        """Block this thread until the work has ended, and return its result.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Returns:
            What ``await`` would give.

        Raises:
            TypeError: `timeout` is no number.
            ValueError: It is negative.
            TimeoutError: The work is still pending; it goes on.
            LoopRunning: The work is pending and an event loop runs in this thread.
            Exception: What the work raised.
        """
        given: object = timeout
        if given is not None and (isinstance(given, bool) or not isinstance(given, Real)):
            raise TypeError(f"timeout is {timeout!r}; give seconds, at least 0, or None to wait for ever")
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout is {timeout!r}; give seconds, at least 0, or None to wait for ever")
        if not self.done():
            refuse_in_loop("Completion.wait()", "await completion")
            if not self._block(None if timeout is None or timeout > threading.TIMEOUT_MAX else float(timeout)):
                raise TimeoutError(f"{self._name or 'the work'} has not ended within {timeout} s; it goes on")
        return self._outcome()

    def __await__(self) -> Generator[Any, Any, T]:
        """Wait in a task; no suspension when the work is done."""
        if not self.done():
            yield from _until_done(self)
        return self._outcome()

    def add_done_callback(self, fn: Callable[[Completion[T]], object]) -> None:
        """Call ``fn(completion)`` once when the work has ended, off the thread of any event loop.

        Callbacks run in the order they were added; at once when the work has ended. What one raises is logged and hurts
        nobody. A loop's own state must be touched through the loop's thread-safe call.

        Raises:
            TypeError: `fn` cannot be called.
        """
        if not callable(fn):
            raise TypeError(f"a done callback was {fn!r}; give a callable that takes the Completion")
        self.done()  # the source may say so already
        with _lock:
            if self._callbacks is None:
                self._callbacks = deque()
            self._callbacks.append(fn)
            if self.settled and self._calling:
                return  # the thread that calls them takes this one, too
            self._calling = self.settled
        source = self._source
        if not self.settled:
            if source is not None:
                source.observe()
        elif loop_runs_here():
            self._call_back_elsewhere()
        else:
            self._call_back()

    # ---- the producer's side -------------------------------------------------------------------------------------

    @property
    def name(self) -> str | None:
        """The name of the pipeline or simulation whose work this is."""
        return self._name

    @property
    def source(self) -> Source | None:
        """What tells the end of the work; None for host work, and once settled."""
        return self._source

    @property
    def lane(self) -> object:
        """The stream it runs on: work of one lane ends in order. None for host work, which announces its end itself."""
        return getattr(self._source, "lane", None)

    @property
    def error(self) -> BaseException | None:
        """What the work raised; None while it is pending or when it ended well."""
        return self._error

    @property
    def received(self) -> bool:
        """Whether a waiter was given the error."""
        return self._received

    def stop(self) -> None:
        """Ask the work to end early; nothing when it has ended.

        Host replays that have not begun are dropped, loops end between two iterations, device replays are issued and
        end by themselves. The Completion settles when nothing of the work runs any more.
        """
        stop = self._stop
        if stop is not None and not self.settled:
            stop()

    def settle(self, error: BaseException | None = None) -> None:
        """Note the end of the work and wake everybody. The first call counts, later ones do nothing.

        Args:
            error: What the work raised; the very object reaches every waiter.
        """
        waiters = self.conclude(error)
        if waiters:
            wake_all(waiters)

    def conclude(self, error: BaseException | None = None) -> tuple[Parked, ...] | None:
        """Note the end as `settle` does, and leave it to the caller to wake the waiters (`wake_all`).

        Returns:
            The waiters; None when the end was noted before.
        """
        with _lock:
            if self.settled:
                return None
            if error is not None:
                self._error, self._traceback = error, error.__traceback__
            waiters, self._waiters = self._waiters, None
            self._calling = calling = bool(self._callbacks)
            self._ended_at = perf_counter()
            self.settled = True
            self._source = self._stop = None
        if calling:
            self._call_back_elsewhere()
        return () if waiters is None else tuple(waiters)

    def when_settled(self, fn: Callable[[], object]) -> None:
        """Call `fn` once: now when settled, else in the thread that settles. For eagle's own quick functions."""
        if self.done() or not self._park(Hook(fn)):
            fn()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _outcome(self) -> T:
        error = self._error
        if error is None:
            return self._result
        self._received = True
        try:
            raise error.with_traceback(self._traceback)  # each waiter starts from the step's own traceback
        finally:
            del error, self  # or the error would hold this frame, which holds the error

    def _park(self, parked: Parked) -> bool:
        """Add a waiter; False when settled, and nobody will wake it."""
        with _lock:
            if self.settled:
                return False
            if self._waiters is None:
                self._waiters = {}
            self._waiters[parked] = None
            source = self._source
        if source is not None:
            source.observe()
        return True

    def _unpark(self, parked: Parked) -> None:
        with _lock:
            if self._waiters is not None:
                self._waiters.pop(parked, None)

    def _block(self, timeout: float | None) -> bool:
        """Block until settled; False at the timeout."""
        source = self._source
        if source is not None and source.polled:
            return _ask_until_done(self, timeout)
        parked = ParkedThread()
        if not self._park(parked):
            return True
        with workers.blocking():
            try:
                return parked.wait(timeout) or self.settled
            finally:
                self._unpark(parked)

    def _call_back_elsewhere(self) -> None:
        try:
            workers.start(self._call_back)
        except StateError:
            if not workers.is_closing():  # no thread can be had: better in this one than never
                self._call_back()

    def _call_back(self) -> None:
        while True:
            with _lock:
                if not self._callbacks:
                    self._calling = False
                    return
                fn = self._callbacks.popleft()
            try:
                fn(self)
            except Exception:
                _log.exception("a done callback of %s raised; the others go on", self._name or "a completion")
            except BaseException:  # Ctrl-C, an exit: this thread is leaving, the other callbacks must not pay for it
                self._call_back_elsewhere()
                raise


async def leave_when_done(completion: Completion[T], stop: Callable[[], None] | None = None) -> T:
    """Await work whose buffers are the caller's: a cancellation leaves only when the work has ended.

    Args:
        completion: The work.
        stop: Asks it to end early; `Completion.stop` by default. Called once, on the first cancellation.

    Returns:
        The completion's result.

    Cancellation: `stop` is called and the end awaited; further cancellations (also a native ``task.cancel()``, which
    passes anyio's shield) change nothing. Then the first one leaves.
    """
    try:
        return await completion
    except GeneratorExit:  # the coroutine is thrown away: nothing can be awaited any more
        (stop or completion.stop)()
        raise
    except BaseException:
        if not completion.done():
            (stop or completion.stop)()
            await drained(completion)
        raise


def wait_to_end(completion: Completion[T], stop: Callable[[], None] | None = None) -> T:
    """Block until work ends whose buffers are the caller's: `leave_when_done` without an event loop.

    Ctrl-C calls `stop` (`Completion.stop` by default) and waits for the end; then KeyboardInterrupt leaves. Further
    ones change nothing.

    The caller has refused a running loop already (`wake.refuse_in_loop`), before it issued the work.
    """
    return drive(leave_when_done(completion, stop))


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits nothing but Completions to its end, blocking this thread, without an event loop.

    Ctrl-C arrives in the coroutine at its await, as a cancellation would.

    Raises:
        StateError: It awaited something else, which needs a loop.
    """
    with driving():
        try:
            coroutine.send(None)
        except StopIteration as end:
            value: T = end.value
            return value
        coroutine.close()
    raise StateError(f"{coroutine} awaits something that needs an event loop; run it in one")


@types.coroutine
def _until_done(completion: Completion[Any]) -> Generator[Any, Any, None]:
    """Wait for the end, well or not. A generator: `Completion.__await__` needs no coroutine around it."""
    box = mailbox()
    if box is None:
        completion._block(None)
        return
    source = completion.source
    ended = completion.done if source is None else source.check
    seen = box.look(ended, completion.lane, completion.spin_s)
    if seen is True or (seen is not False and (yield from seen.__await__())):
        return
    parked = box.park()
    if not completion._park(parked):
        return
    try:
        yield from parked.wait().__await__()
    except BaseException:
        completion._unpark(parked)
        raise
    counters.woken(perf_counter() - completion._ended_at)


async def drained(completion: Completion[Any]) -> None:
    """Wait for the end, well or not, whatever cancels; an interrupt that comes meanwhile is raised at the end."""
    interrupt: KeyboardInterrupt | None = None
    with anyio.CancelScope(shield=True) if mailbox() else nullcontext():
        while not completion.done():
            try:
                await _until_done(completion)
            except asyncio.CancelledError:  # a native one, which passes the shield; the first cancellation leaves
                continue
            except KeyboardInterrupt as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


def _ask_until_done(completion: Completion[Any], timeout: float | None) -> bool:
    """Block on a source: spin as long as a short replay takes, then look again at growing distances."""
    began = perf_counter()
    while not completion.done():
        waited = perf_counter() - began
        if timeout is not None and waited >= timeout:
            return False
        if waited > _SPIN_BLOCKING_S:
            time.sleep(nap_after(waited))
    return True


def _lost_in_fork(name: str | None) -> StateError:
    return StateError(
        f"{name or 'this work'} was in flight when this process was forked: it belongs to the parent and never ends "
        "here. Issue it again in the child, or start children with the 'spawn' method of multiprocessing"
    )


_lock = threading.RLock()  # reentrant: the garbage collector may run a finaliser that settles something in here
_epoch = 0  # how many forks this process is away from the one that imported eagle


def _after_fork() -> None:
    global _lock, _epoch
    _lock = threading.RLock()
    _epoch += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
