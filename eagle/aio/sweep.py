"""Looking at short work from the event loop itself, once a turn, for all tasks that wait for some.

A thread that polls and wakes the loop costs a change of threads, 30 µs and more, and fights the loop for the
interpreter while other work is being issued. Work that ends within microseconds is better looked at here: one callback
of the loop asks, turn after turn, for everybody. It gives up on what takes longer than expected, unless other work
keeps ending; whoever waits parks then, and the poller looks.
"""

from __future__ import annotations

import asyncio
from collections import deque
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
# More streams than that would make a turn of the loop long (half a microsecond each).
_MOST_LANES = 512


class _Look:
    __slots__ = ("ended", "future", "until")

    def __init__(self, ended: Callable[[], bool], until: float, future: asyncio.Future[bool]) -> None:
        self.ended, self.until, self.future = ended, until, future


class Sweeper:
    """The looks of one asyncio event loop; for its thread only.

    Work of one lane (a stream) ends in order, so only the oldest of each is asked.
    """

    def __init__(self) -> None:
        self._lanes: dict[object, deque[_Look]] = {}
        self._context = Context()  # of no task
        self._sweeping = False
        self._kept_until = 0.0

    async def look(self, ended: Callable[[], bool], lane: object, spin_s: float) -> bool:
        """Wait until ``ended()``, for about so many seconds; False when that was not long enough.

        Args:
            ended: Answers at once; an exception it raises is raised here.
            lane: Name of the stream, hashable.
            spin_s: Seconds.

        Cancellation leaves at once.
        """
        if not self._sweeping:
            for _ in range(_AT_ONCE):
                if ended():
                    return True
        looks = self._lanes.get(lane)
        if looks is None:
            if len(self._lanes) >= _MOST_LANES:
                return False
            looks = self._lanes[lane] = deque()
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        looks.append(_Look(ended, perf_counter() + spin_s, future))
        if not self._sweeping:
            self._sweeping = True
            loop.call_soon(self._sweep, loop, context=self._context)
        return bool(await future)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = perf_counter()
        for lane, looks in list(self._lanes.items()):
            while looks:
                look = looks[0]
                future = look.future
                if not future.done():  # else its task was cancelled
                    try:
                        over = look.ended()
                    except BaseException as error:
                        future.set_exception(error)
                    else:
                        if over:
                            self._kept_until = now + _KEPT_S
                            future.set_result(True)
                        elif now < look.until or now < self._kept_until:
                            break
                        else:
                            future.set_result(False)
                looks.popleft()
            if not looks:
                del self._lanes[lane]
        if self._lanes:
            loop.call_soon(self._sweep, loop, context=self._context)
        else:
            self._sweeping = False
