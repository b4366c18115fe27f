"""One batch: requests that run as one launch, each answered as soon as its own samples have finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.aio.offload import off_loop, on_the_callers_stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from eagle.aio.batch_frame import Frame, Frames
    from eagle.aio.batch_request import Request
    from eagle.aio.report import RunReport

# Copying more than that is done on a worker thread, so that the event loop lives (about 1 ms of copying).
_INLINE_BYTES = 8 << 20
# Requests are copied out one by one while they hold less than this share of the batch, else the batch as a whole.
_SHARE = 4


class Batch:
    """Requests in one frame.

    Args:
        requests: At least one; each is given its place.
        alone: Whether the one request gets a frame of its own.
        freed: Called when half of the samples have been answered while the others go on.

    Attributes:
        total: Samples.
        thin: Whether it keeps waiting requests from starting no more: it has answered half of its samples, or is one
            request by itself.
    """

    def __init__(self, requests: Sequence[Request], *, alone: bool, freed: Callable[[], None]) -> None:
        self._requests = list(requests)
        self._waiting = len(self._requests)  # requests that somebody still waits for
        self.alone = alone
        self.thin = alone
        self._freed = freed
        self.total = 0
        for request in self._requests:
            request.batch = self
            request.start = self.total
            self.total += request.n
        self._live = self.total
        self._over = 0
        self._run: Any = None
        self._frame: Frame | None = None
        self._starts = np.array([request.start for request in self._requests], np.intp)

    def leave(self, request: Request) -> None:
        """Nobody waits for a request any more; a batch without any other one is stopped."""
        self._answered(request)
        self._stop_when_unwanted()

    def fail(self, error: BaseException) -> None:
        """Give an error to every request that waits still."""
        for request in self._requests:
            if not request.answered:
                request.fail(error)

    async def run(self, frames: Frames) -> None:
        """Fill a frame, run it to its end, and answer everybody.

        Cancellation: the run is stopped, its end awaited; nobody is answered.
        """
        if self._waiting == 0:
            return
        frame = await self._framed(frames)
        try:
            if self._waiting:
                await self._drive(frame)
        finally:
            self._frame = None
            if not self.alone:
                frames.give(frame)

    async def _framed(self, frames: Frames) -> Frame:
        if self.alone:
            return await off_loop(on_the_callers_stream(lambda: frames.build_alone(self._requests[0])))
        frame = frames.take(self.total)
        if frame is None:
            frame = await off_loop(on_the_callers_stream(lambda: frames.build(self.total)))
        if self._waiting == 0:  # everybody left while the frame was built
            return frame
        try:
            if frame.bytes_per_sample * self.total > _INLINE_BYTES and frame.on_host:
                await off_loop(frame.fill, self._requests, self.total)
            else:
                frame.fill(self._requests, self.total)
        except BaseException:
            frames.give(frame)  # which waits for copies on their way
            raise
        return frame

    async def _drive(self, frame: Frame) -> None:
        runner = frame.runner
        runner.claim()
        try:
            run = runner.start()
            self._run, self._frame = run, frame
            try:
                if not run.prepared:
                    await off_loop(run.prepare)
                while (work := run.next(join=False)) is not None:
                    await frame.follow(run, work, self._look if len(self._requests) > 1 else None)
            finally:
                run.close()
        finally:
            self._run = None
            runner.release()
        if self._waiting:
            await self._answer_all(frame, run.reported)

    async def _answer_all(self, frame: Frame, report: RunReport) -> None:
        """The run has ended: everybody who waits gets what there is."""
        report = self._cut(report, frame)
        waiting = [request for request in self._requests if not request.answered]
        if report.done:
            finished = [request.n for request in waiting]
        else:
            mask = frame.mask(self.total)
            finished = [int(np.count_nonzero(mask[r.start : r.start + r.n])) for r in waiting]
        large = frame.bytes_per_sample * self.total > _INLINE_BYTES and frame.on_host
        if self.alone:
            outputs = await off_loop(frame.own) if large else frame.own()
            if not waiting[0].answered:
                waiting[0].answer(outputs, 0, finished[0], report)
                self._answered(waiting[0])
        elif large:
            outputs = await off_loop(frame.copy, 0, self.total, done=report.done)
            for request, count in zip(waiting, finished, strict=True):
                if not request.answered:
                    request.answer(outputs, request.start, count, report)
        else:
            self._answer(frame, waiting, finished, report)

    def _look(self, settled: np.ndarray[Any, Any]) -> None:
        """Answer whose samples are settled while the others go on."""
        seen = int(np.count_nonzero(settled[: self.total]))
        if seen == self._over or self._frame is None:
            return
        self._over = seen
        whole = np.logical_and.reduceat(settled[: self.total], self._starts)
        over = [request for request, ends in zip(self._requests, whole, strict=True) if ends and not request.answered]
        if not over:
            return
        mask = self._frame.mask(self.total) & settled[: self.total]
        finished = [int(np.count_nonzero(mask[r.start : r.start + r.n])) for r in over]
        report = self._frame.report_so_far(self._run)
        report = replace(report, n=self.total, finished=int(np.count_nonzero(mask)), done=False)
        self._answer(self._frame, over, finished, report)
        self._stop_when_unwanted()
        if not self.thin and self._live * 2 <= self.total:
            self.thin = True
            self._freed()

    def _answer(self, frame: Frame, requests: list[Request], finished: list[int], report: RunReport) -> None:
        if _SHARE * sum(request.n for request in requests) >= self.total:
            outputs = frame.copy(0, self.total, done=report.done)
            for request, count in zip(requests, finished, strict=True):
                request.answer(outputs, request.start, count, report)
            self._waiting -= len(requests)
            self._live -= sum(request.n for request in requests)
            return
        for request, count in zip(requests, finished, strict=True):
            self._answered(request)
            request.answer(frame.copy(request.start, request.n, done=count == request.n), 0, count, report)

    def _answered(self, request: Request) -> None:
        self._waiting -= 1
        self._live -= request.n

    def _stop_when_unwanted(self) -> None:
        if self._waiting == 0 and self._run is not None:
            self._run.stop()

    def _cut(self, report: RunReport, frame: Frame) -> RunReport:
        """The report without the frame's tail."""
        tail = frame.capacity - self.total
        return replace(report, n=self.total, finished=report.finished - tail) if tail else report
