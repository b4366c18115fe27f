"""Looking at short work from the event loop itself, once a turn, for all tasks that wait for some.

A thread that polls and wakes the loop costs a change of threads, 30 µs and more, and fights the loop for the
interpreter while other work is being issued. Work that ends within microseconds is better looked at here: one callback
of the loop asks, turn after turn, for everybody. It gives up on what takes longer than expected, unless other work
keeps ending; whoever waits parks then, and the poller looks.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# While something ends that often, looking pays for all.
_KEPT_S = 60e-6
# So often a task that waits alone looks before it leaves the turn to others: some microseconds, as long as going round
# takes the loop.
_AT_ONCE = 8
# A task that finds all its work ended at once still lets others have a turn that often.
_STAY_S = 0.5e-3
# More streams than that would make a turn of the loop long (half a microsecond each).
_MOST_LANES = 128
# A callback of the loop that is so late may have been lost: Ctrl-C came where the loop was about to call it.
LOST_S = 0.05


class _Look:
    __slots__ = ("ended", "future", "until")

    def __init__(self, ended: Callable[[], bool], until: float, future: asyncio.Future[bool]) -> None:
        self.ended, self.until, self.future = ended, until, future


class Sweeper:
    """The looks of one asyncio event loop; for its thread only.

    Work of one lane (a stream) ends in order, so only the look that came first is asked, and the one that came last.
    """

    def __init__(self) -> None:
        self._lanes: dict[object, list[_Look]] = {}
        self._context = Context()  # of no task
        self._sweeping = False
        self._swept_at = 0.0
        self._chain = 0
        self._kept_until = 0.0
        self._stayed_since: float | None = None

    def look(self, ended: Callable[[], bool], lane: object, spin_s: float) -> bool | asyncio.Future[bool]:
        """Look until ``ended()``, for about so many seconds; False when that was not long enough.

        Args:
            ended: Answers at once; an exception it raises is raised here, or by the future.
            lane: Name of the stream, hashable; None for work that announces its own end, which is looked at only
                while nothing else is.
            spin_s: Seconds.

        Returns:
            The answer where it is known already, else a future of it for the caller to await.
        """
        if not self._sweeping and self._may_stay():
            for _ in range(_AT_ONCE):
                if ended():
                    return True
        looks = self._lanes.get(lane)
        if lane is None and self._lanes:
            return False
        if looks is None:
            if len(self._lanes) >= _MOST_LANES:
                return False
            looks = self._lanes[lane] = []  # of one, mostly; a deque takes ten times the memory
        loop, now = asyncio.get_running_loop(), perf_counter()
        future = loop.create_future()
        looks.append(_Look(ended, now + spin_s, future))
        if not self._sweeping or now - self._swept_at > LOST_S:
            self._chain += 1  # an older one, should it come after all, ends
            self._go_on(loop, now)
        return future

    def _may_stay(self) -> bool:
        """Whether a task may go on without leaving its turn: others get theirs at least once in `_STAY_S`."""
        now = perf_counter()
        if self._stayed_since is None:
            self._stayed_since = now
            asyncio.get_running_loop().call_soon(self._turned, context=self._context)
        return now - self._stayed_since < _STAY_S

    def _turned(self) -> None:
        self._stayed_since = None

    def _go_on(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        self._sweeping, self._swept_at = True, now
        loop.call_soon(self._sweep, loop, self._chain, context=self._context)

    def _sweep(self, loop: asyncio.AbstractEventLoop, chain: int) -> None:
        if chain != self._chain:
            return
        now = perf_counter()
        try:
            for lane, looks in list(self._lanes.items()):
                while looks and self._settled(looks[0], now, now >= self._kept_until):
                    del looks[0]
                if not looks:
                    del self._lanes[lane]
                else:
                    while len(looks) > 1 and self._settled(looks[-1], now, False):  # earlier work, awaited later
                        looks.pop()
        finally:  # Ctrl-C may come in here
            if self._lanes:
                self._go_on(loop, now)
            else:
                self._sweeping = False

    def _settled(self, look: _Look, now: float, giving_up: bool) -> bool:
        """Whether a look has ended, is nobody's any more, or has taken too long where looks are given up."""
        future = look.future
        if future.done():  # its task was cancelled
            return True
        try:
            if look.ended():
                self._kept_until = now + _KEPT_S
                future.set_result(True)
            elif giving_up and now >= look.until:
                future.set_result(False)
            else:
                return False
        except Exception as error:
            future.set_exception(error)
        return True
