"""Parking those who wait, and waking them from any thread: tasks of asyncio, uvloop and trio, and plain threads.

Each event loop has one `Mailbox`. Whoever ends work posts the parked tasks of one round there, and the mailbox calls
the loop's thread-safe door once for all of them::

    quiet --post--> rung --drain (on the loop's thread)--> quiet
                    rung --post--> rung                     the same drain takes these too

`_rung_at` needs no lock: `post` lays its letters down before it looks at the time, and the drain clears that before it
takes the letters. So either `post` sees it clear and rings, or the drain that is still to come sees the letters. Two
threads may ring at once; an empty drain is harmless.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from eagle.aio.sweep import LOST_S, Sweeper
from eagle.errors import LoopRunning, StateError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    import anyio

__all__ = (
    "Hook",
    "Mailbox",
    "Parked",
    "ParkedTask",
    "ParkedThread",
    "driving",
    "loop_runs_here",
    "mailbox",
    "nap_after",
    "refuse_in_loop",
    "wake_all",
)

# A waiter looks again after about this share of the time it has waited: a 1 ms replay is noticed within some 10 µs, and
# a wait of up to 2 s costs a thousand looks a second, some 4 % of a core on the H200's host; whoever has waited longer
# is looked after 170 times a second.
_SHARE = 0.01
_SHORTEST_S, _LONGEST_S = 10e-6, 1e-3
_LONG_S = 2.0
_LOOKERS = 4  # tasks of one trio loop that look in turns instead of parking


class Parked(ABC):
    """Somebody who waits for a completion."""

    __slots__ = ()

    @property
    def mailbox(self) -> Mailbox | None:
        """Where to post it; None when `wake` may be called from any thread."""
        return None

    @abstractmethod
    def wake(self) -> None:
        """Let it go on: quick, never raises, and harmless when the waiter has left meanwhile."""


class ParkedTask(Parked):
    """A task that waits on its event loop; `wake` is for the loop's thread only."""

    __slots__ = ("_mailbox",)

    def __init__(self, box: Mailbox) -> None:
        self._mailbox = box

    @property
    def mailbox(self) -> Mailbox:
        """The mailbox of the task's loop."""
        return self._mailbox

    @abstractmethod
    def wait(self) -> Awaitable[None]:
        """Suspend until woken, when awaited; a cancellation leaves at once."""


class ParkedThread(Parked):
    """A thread that blocks."""

    __slots__ = ("_gate",)

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Block until woken, or `timeout` seconds; True when woken. Signal handlers run meanwhile and may raise."""
        end = None if timeout is None else perf_counter() + timeout
        while True:
            left = _STEP_S if end is None else min(max(end - perf_counter(), 0.0), _STEP_S)
            if self._gate.acquire(timeout=left):
                return True
            if end is not None and perf_counter() >= end:
                return False

    def wake(self) -> None:
        """Let the thread go on."""
        self._gate.release()


# Windows does not interrupt a lock for Ctrl-C, so the wait is cut there.
_STEP_S = 0.05 if sys.platform == "win32" else threading.TIMEOUT_MAX


class Hook(Parked):
    """A function of eagle's own that runs in the thread that settles: it must be quick and never raise."""

    __slots__ = ("_fn",)

    def __init__(self, fn: Callable[[], object]) -> None:
        self._fn = fn

    def wake(self) -> None:
        """Call the function."""
        self._fn()


class Mailbox(ABC):
    """The way into one event loop from other threads.

    Attributes:
        limiters: The default limiters of this loop, by target; see `eagle.aio.limits`.
    """

    def __init__(self) -> None:
        self.limiters: dict[str, weakref.ref[anyio.CapacityLimiter]] = {}
        self._letters: deque[Parked] = deque()
        self._rung_at = 0.0

    def post(self, parked: Iterable[Parked]) -> None:
        """Wake these tasks on the loop's thread; a loop that is closed or gone is ignored."""
        self._letters.extend(parked)
        now = perf_counter()
        if now - self._rung_at < LOST_S:
            return
        self._rung_at = now
        try:
            self._ring()
        except (RuntimeError, OSError):  # closed, finished, or closing this very moment: nobody is left to wake
            self._letters.clear()
            self._rung_at = 0.0

    def _drain(self) -> None:
        self._rung_at = 0.0
        letters = self._letters
        while letters:
            try:
                letter = letters.popleft()
            except IndexError:  # a post to the closing loop cleared them meanwhile
                return
            letter.wake()

    @abstractmethod
    def _ring(self) -> None:
        """Have the loop call `_drain`; the loop's own RuntimeError when it is closed."""

    @abstractmethod
    def look(self, ended: Callable[[], bool], lane: object, spin_s: float) -> bool | Awaitable[bool]:
        """Look in turns of the loop until ``ended()``; False after some ``spin_s`` seconds.

        Returns:
            The answer where it is known at once, else what to await for it. See `Sweeper.look`.
        """

    @abstractmethod
    def park(self) -> ParkedTask:
        """A waiter for the running task."""


class _FutureTask(ParkedTask):
    __slots__ = ("_future",)

    def __init__(self, box: Mailbox, future: asyncio.Future[None]) -> None:
        self._mailbox = box
        self._future = future

    def wait(self) -> Awaitable[None]:
        return self._future

    def wake(self) -> None:
        if not self._future.done():  # cancelled between the end of the work and this turn of the loop
            self._future.set_result(None)


class _AsyncioMailbox(Mailbox):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = weakref.ref(loop)  # a closed loop must not live on in the thread's cache
        self._sweeper = Sweeper()

    def _ring(self) -> None:
        loop = self.loop()
        if loop is not None:  # else it was collected, and its tasks with it
            loop.call_soon_threadsafe(self._drain)

    def look(self, ended: Callable[[], bool], lane: object, spin_s: float) -> bool | Awaitable[bool]:
        return self._sweeper.look(ended, lane, spin_s)

    def park(self) -> ParkedTask:
        return _FutureTask(self, asyncio.get_running_loop().create_future())


class _TrioTask(ParkedTask):
    __slots__ = ("_lowlevel", "_task")

    def __init__(self, box: Mailbox, lowlevel: Any) -> None:
        super().__init__(box)
        self._lowlevel = lowlevel
        self._task = lowlevel.current_task()

    async def wait(self) -> None:
        def abort(_: Any) -> Any:
            self._task = None
            return self._lowlevel.Abort.SUCCEEDED

        await self._lowlevel.wait_task_rescheduled(abort)

    def wake(self) -> None:
        task, self._task = self._task, None
        if task is not None:  # else it was cancelled meanwhile
            self._lowlevel.reschedule(task)


class _TrioMailbox(Mailbox):
    def __init__(self, lowlevel: Any, token: Any) -> None:
        super().__init__()
        self._lowlevel = lowlevel
        self.token = weakref.ref(token)  # as above
        self._looking = 0

    def _ring(self) -> None:
        token = self.token()
        if token is not None:
            token.run_sync_soon(self._drain)

    def look(self, ended: Callable[[], bool], lane: object, spin_s: float) -> bool | Awaitable[bool]:
        return self._looking < _LOOKERS and self._look(ended, spin_s)

    async def _look(self, ended: Callable[[], bool], spin_s: float) -> bool:
        self._looking += 1
        try:
            until = perf_counter() + spin_s
            while True:
                await self._lowlevel.checkpoint()
                if ended():
                    return True
                if perf_counter() >= until:
                    return False
        finally:
            self._looking -= 1

    def park(self) -> ParkedTask:
        return _TrioTask(self, self._lowlevel)


class _Thread(threading.local):
    """The mailboxes of the loops that this thread ran last, and whether it drives a coroutine without any."""

    asyncio: _AsyncioMailbox | None = None
    trio: _TrioMailbox | None = None
    driving = False


_here = _Thread()


@contextmanager
def driving() -> Iterator[None]:
    """In this block a coroutine is driven without an event loop: what it awaits blocks this thread."""
    before, _here.driving = _here.driving, True
    try:
        yield
    finally:
        _here.driving = before


def mailbox() -> Mailbox | None:
    """The mailbox of the event loop that runs the calling task; None while this thread is `driving` without a loop.

    Raises:
        StateError: No loop that eagle knows runs in this thread.
    """
    lowlevel = _trio_in_charge()
    if lowlevel is not None:
        token = lowlevel.current_trio_token()
        if _here.trio is None or _here.trio.token() is not token:
            _here.trio = _TrioMailbox(lowlevel, token)
        return _here.trio
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        if _here.driving:
            return None
        raise StateError(
            "a Completion was awaited where no event loop of asyncio or trio runs; await it in a task of one of them, "
            "or call its wait()"
        ) from None
    box = _here.asyncio
    if box is None or box.loop() is not loop:
        box = _here.asyncio = _AsyncioMailbox(loop)
    return box


def loop_runs_here() -> bool:
    """Whether an event loop runs in this thread, so that blocking here would stop it."""
    return asyncio._get_running_loop() is not None or _trio_in_charge() is not None


def refuse_in_loop(what: str, instead: str) -> None:
    """Refuse a blocking call in a thread whose event loop runs.

    Args:
        what: The call, for the message.
        instead: What to write there, such as ``await eagle.simulate(...)``.

    Raises:
        LoopRunning: A loop runs in this thread.
    """
    if loop_runs_here():
        raise LoopRunning(
            f"{what} blocks, and an event loop runs in this thread: it would stand still meanwhile. "
            f"Write `{instead}`, or call it in a worker thread (anyio.to_thread.run_sync)"
        )


def wake_all(parked: Iterable[Parked]) -> None:
    """Wake waiters of any kind, with one thread-safe call per event loop."""
    posts: dict[Mailbox, list[Parked]] = {}
    for one in parked:
        box = one.mailbox
        if box is None:
            one.wake()
        else:
            posts.setdefault(box, []).append(one)
    for box, letters in posts.items():
        box.post(letters)


def nap_after(waited_s: float) -> float:
    """How long to sleep before looking again at work that has been waited for that long (seconds)."""
    longest = _LONGEST_S if waited_s < _LONG_S else _LONGEST_S * 6
    return min(max(waited_s * _SHARE, _SHORTEST_S), longest)


def _trio_in_charge() -> Any:
    """`trio.lowlevel` when the calling code is a trio task, also one of a loop that is guest of asyncio; else None."""
    lowlevel = sys.modules.get("trio.lowlevel")
    if lowlevel is None:
        return None
    in_trio_task = getattr(lowlevel, "in_trio_task", None)  # absent while another thread is importing trio
    return lowlevel if in_trio_task is not None and in_trio_task() else None
