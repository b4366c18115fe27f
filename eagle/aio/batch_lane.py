"""Lanes: the requests whose planes lie on one side (the host, or one device), and when they start as a batch.

A lane is served by one task::

    request --put--> waiting --start--> in a batch --answer--> answered
                     waiting --cancelled--> dropped           in a batch --cancelled--> its result is discarded

Waiting requests start as one batch when no batch runs, when the oldest has waited ``max_wait``, when they fill
``max_samples``, and when the running batch has answered half of its samples. Requests that are made in one turn of the
event loop are together, since the task that starts them runs in the next one.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import TYPE_CHECKING

import anyio

from eagle.aio import counters, tracing
from eagle.aio.batch import Batch
from eagle.aio.offload import off_loop, on_the_callers_stream
from eagle.aio.wake import mailbox
from eagle.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from eagle.aio.batch_frame import Frames
    from eagle.aio.batch_request import Request
    from eagle.aio.wake import ParkedTask

# Batches in flight at once, and how many of them may hold one large request: small ones always find a place.
_MOST, _MOST_ALONE = 16, 8


class Lane:
    """Requests of one side.

    Args:
        name: Of the step, for traces.
        frames: The frames of this side.
        max_samples: Samples of a batch, at most.
        max_wait: Seconds that a request waits beside a running batch, at most.
        spawn: Starts a task.

    Attributes:
        broken: Whether its kernels could not be built or loaded; its requests have failed.
    """

    def __init__(
        self, name: str, frames: Frames, max_samples: int, max_wait: float, spawn: Callable[..., object]
    ) -> None:
        self._name = name
        self._frames = frames
        self._max_samples = max_samples
        self._max_wait = max_wait
        self._spawn = spawn
        self._waiting: deque[Request] = deque()  # with those dropped since, which are skipped
        self._samples = 0  # of those that wait
        self._large: deque[Request] = deque()
        self._running: set[Batch] = set()
        self._bell: ParkedTask | None = None
        self._closing = False
        self.broken = False

    # ---- requests ------------------------------------------------------------------------------------------------

    def put(self, request: Request) -> None:
        """Let a request wait for a batch."""
        counters.queued()
        n = request.n
        if n > self._max_samples or not n:  # the small ones are counted in samples
            self._large.append(request)
        else:
            self._waiting.append(request)
            self._samples += n
        if self._bell is not None:
            self._ring()

    def drop(self, request: Request) -> None:
        """Nobody waits for a request any more."""
        if request.answered:
            return
        request.answered = True
        if request.batch is not None:
            request.batch.leave(request)
            return
        counters.dropped()
        request.let_go()
        if request.n <= self._max_samples:
            self._samples -= request.n

    def close(self) -> None:
        """Start what waits, and let `serve` end when all of it is answered."""
        self._closing = True
        self._ring()

    def fail(self, error: BaseException) -> None:
        """Give an error to every request that waits for a batch."""
        for request in (*self._large, *self._waiting):
            if not request.answered:
                counters.dropped()
                request.fail(error)
        self._large.clear()
        self._waiting.clear()
        self._samples = 0

    # ---- the task that starts batches ----------------------------------------------------------------------------

    async def serve(self) -> None:
        """Start batches until the lane is closed and everybody is answered."""
        try:
            await off_loop(on_the_callers_stream(self._frames.prepare))
            while True:
                self._start_due()
                if self._closing and not (self._samples or self._waiting or self._large or self._running):
                    return
                await self._doze()
        except Exception as error:
            self.broken = True
            self.fail(error)
        except BaseException:
            self.broken = True
            self.fail(closed_by_error())
            raise

    async def _doze(self) -> None:
        """Sleep until something happens, or the oldest request has waited long enough."""
        box = mailbox()
        assert box is not None, "the lane's task runs in an event loop"
        self._bell = bell = box.park()
        left = self._due_in()
        if left is None:
            await bell.wait()
            return
        with anyio.move_on_after(left):
            await bell.wait()
        self._bell = None

    def _ring(self) -> None:
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.wake()

    def _due_in(self) -> float | None:
        """Seconds until the oldest request is due; None when no time will make one."""
        if not self._samples or len(self._running) >= _MOST or self._max_wait == float("inf"):
            return None
        return max(self._oldest().began + self._max_wait - perf_counter(), 0.0)

    def _oldest(self) -> Request:
        """The request that has waited longest; there is one."""
        while self._waiting[0].answered:
            self._waiting.popleft()
        return self._waiting[0]

    def _start_due(self) -> None:
        while self._large and len(self._running) < _MOST and self._count_alone() < _MOST_ALONE:
            request = self._large.popleft()
            if not request.answered:
                self._start([request], alone=True)
        while self._samples and len(self._running) < _MOST and self._due():
            if self._frames.merges:
                self._start(self._next_requests(), alone=False)
            else:
                request = self._oldest()
                self._waiting.popleft()
                self._samples -= request.n
                self._start([request], alone=True)
        if not self._samples:
            self._waiting.clear()  # only dropped ones are left

    def _count_alone(self) -> int:
        return sum(batch.alone for batch in self._running)

    def _due(self) -> bool:
        if self._closing or self._samples >= self._max_samples or all(batch.thin for batch in self._running):
            return True
        return perf_counter() >= self._oldest().began + self._max_wait

    def _next_requests(self) -> list[Request]:
        """The oldest requests that fit one batch."""
        requests: list[Request] = []
        waiting, left, room = self._waiting, self._samples, self._max_samples
        while left:
            request = waiting[0]
            if not request.answered:  # else it was dropped, and is counted no more
                if request.n > room:
                    break
                room -= request.n
                left -= request.n
                requests.append(request)
            waiting.popleft()
        self._samples = left
        return requests

    def _start(self, requests: list[Request], *, alone: bool) -> None:
        counters.admitted(len(requests))
        batch = Batch(requests, alone=alone, freed=self._ring)
        self._running.add(batch)
        self._spawn(self._run, batch, len(requests))

    async def _run(self, batch: Batch, requests: int) -> None:
        try:
            with tracing.timed("batches", "batch", simulation=self._name, requests=requests, samples=batch.total):
                await batch.run(self._frames)
        except Exception as error:
            batch.fail(error)
        except BaseException:
            batch.fail(closed_by_error())
            raise
        finally:
            self._running.discard(batch)
            self._ring()


def closed_by_error() -> StateError:
    """What a request gets whose Batcher was left by an exception or a cancellation."""
    return StateError(
        "the block of this Batcher was left by an exception before the request was answered; leave it normally to have "
        "everything answered, or ask again in a new Batcher"
    )
