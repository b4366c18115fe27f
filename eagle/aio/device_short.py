"""The shortest runs on a device: one replay of a graph that is built already, nothing to copy, nobody who watches.

For 10,000 samples the device takes some 55 µs. What a run does for slices, copies, watchers and other waiters takes
nearly as long in Python; a run that needs none of it goes this way.
"""

from __future__ import annotations

from time import perf_counter, perf_counter_ns, sleep
from typing import TYPE_CHECKING

import anyio

from eagle.aio import counters, poller
from eagle.aio.completion import LONG_S, Completion, drained
from eagle.aio.progress import Meter
from eagle.aio.report import RunReport
from eagle.aio.shapes import CROWD
from eagle.aio.wake import mailbox, nap_after

if TYPE_CHECKING:
    from eagle.aio.cuda_graph import CudaGraph
    from eagle.aio.device_loop import DeviceLoop
    from eagle.aio.events import StreamEnd
    from eagle.aio.shapes import Shape

# A run that is expected to take longer (a task: `LONG_S`) is slept through for most of that time before it is looked
# at; looking through all of it would only heat a core.
_THREAD_DOZES_FROM_S = 0.0005
_DOZED, _MOST_S = 0.75, 0.005


class ShortRun:
    """One run that is one replay: `run` in an event loop, or `run_blocking` in a thread without one.

    Args:
        loop: The bound loop, idle.
        shape: The launch shape of its graph.
        graph: Its graph, whose last step announces the end.
        max_steps: Steps a sample may take; the kernel's steps word holds them already.
    """

    __slots__ = (
        "_alone",
        "_completion",
        "_end",
        "_error",
        "_graph",
        "_issued_ns",
        "_load",
        "_loop",
        "_max_steps",
        "_overslept",
        "_shape",
    )

    def __init__(self, loop: DeviceLoop, shape: Shape, graph: CudaGraph, max_steps: int) -> None:
        self._loop = loop
        self._shape = shape
        self._graph = graph
        self._max_steps = max_steps
        self._error: Exception | None = None
        self._overslept = False
        self._completion: Completion[None] | None = None
        self._alone = not counters.in_flight()
        self._load = 1 + len(loop.beside)
        self._end: StreamEnd = graph.replay()
        loop.beside.add(id(loop))
        loop.watchers.begin_short()
        self._issued_ns = perf_counter_ns()
        counters.issued()

    async def run(self) -> RunReport:
        """Wait for the end in turns of the event loop; longer than expected, parked.

        Cancellation: the replay ends, a few milliseconds at most, then the cancellation leaves.
        """
        box = mailbox()
        assert box is not None, "an event loop runs the caller"
        expected_s = self._loop.expected_s
        try:
            if expected_s > LONG_S:
                # Timers of event loops go by the millisecond, and are up to two late.
                await anyio.sleep(_DOZED * min(expected_s, _MOST_S) - 0.0015)
                self._overslept = self._over()
            if not await box.look(self._over, self._graph.stream, 1.5 * min(expected_s, _MOST_S)):
                await self._parked()
        except BaseException as error:
            try:
                if not isinstance(error, GeneratorExit) and not self._over():  # else nothing can be awaited any more
                    await drained(self._parked())
            finally:
                while not self._over():
                    sleep(1e-4)  # noqa: ASYNC251
                self._close("failed" if isinstance(error, Exception) else "cancelled")
            raise
        return self._report()

    def run_blocking(self) -> RunReport:
        """Wait for the end in this thread. Ctrl-C leaves when the replay has ended."""
        interrupt: KeyboardInterrupt | None = None
        expected_s, began = self._loop.expected_s, perf_counter()
        doze_s = _DOZED * min(expected_s, _MOST_S) if expected_s > _THREAD_DOZES_FROM_S else 0.0
        while True:
            try:
                if doze_s:
                    nap_s, doze_s = doze_s, 0.0
                    sleep(nap_s)
                    self._overslept = self._over()
                while not self._over():
                    waited = perf_counter() - began
                    if waited > 1.5 * min(expected_s, _MOST_S):
                        sleep(nap_after(waited))
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            self._close("cancelled")
            raise interrupt
        return self._report()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        """Whether the replay has ended, well or not."""
        try:
            return self._completion.done() if self._completion is not None else self._end.done
        except Exception as error:
            self._error = error
            return True

    def _parked(self) -> Completion[None]:
        """The end for the poller to look at."""
        if self._completion is None:
            graph = self._graph
            self._completion = poller.track(None, self._end, name=graph.name, lane=graph.stream, device=graph.device)
        return self._completion

    def _close(self, outcome: counters.Outcome) -> RunReport | None:
        """Count the replay, which has ended, and let the loop go; its report unless it failed."""
        report = self._counted() if self._error is None and outcome != "failed" else None
        counters.finished(outcome)
        self._loop.beside.discard(id(self._loop))
        self._loop.watchers.end_short()
        return report

    def _report(self) -> RunReport:
        error = self._error
        if error is not None:
            self._close("failed")
            fault = poller.fault_of(error, self._graph.device, self._graph.name)
            raise fault from fault.__cause__
        report = self._close("done")
        assert report is not None, "it has not failed"
        return report

    def _counted(self) -> RunReport:
        took_ns = perf_counter_ns() - self._issued_ns
        if self._overslept:
            took_ns //= 2  # nobody saw the end; what was expected was too much
        loop, shape = self._loop, self._shape
        n, counts = loop.n, loop.cells.read(self._end.expected)
        done = counts.finished == n
        # Where not all have finished, somebody took every step there was; the step entry does not tell.
        steps = counts.steps if done and shape.entry != "step" else self._max_steps
        if steps:
            loop.timed(took_ns, steps, alone=self._alone and counters.in_flight() <= 1)  # this one counts still
            loop.last_policy = [steps, counts.finished, steps, self._max_steps, 0]
            if counts.step_sum:
                loop.tell(counts.step_sum / (n * steps))
            load = max(self._load, len(loop.beside))
            if load >= CROWD or loop.crowd > 1:
                loop.shared(load)
        before, loop.last_finished = loop.last_finished, counts.finished
        watchers = loop.watchers
        if not watchers.short:  # somebody came meanwhile
            meter = Meter(n, before, began=1e-9 * self._issued_ns)
            watchers.publish(meter.read(counts.finished, counts.step_sum or n * steps))
        return RunReport(
            n=n,
            finished=counts.finished,
            done=done,
            launches=1 if steps else 0,
            steps=steps,
            compactions=0,
            reorders=0,
            build_s=0.0,
            launches_by_k={steps: 1} if steps else {},
            exact_steps=shape.entry != "step" or not done,
            lane_utilisation=counts.active_lanes / counts.lane_slots if counts.lane_slots else None,
            mode=shape.mode,
            entry=shape.entry,
            block=shape.block,
            threads_per_sm=shape.threads_per_sm,
            chunk=shape.chunk,
        )
