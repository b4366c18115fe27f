"""The shortest runs on a device: one replay of a graph that is built already, nothing to copy, nobody who watches.

For 10,000 samples the device takes some 55 µs. What a run does for slices, copies, watchers and other waiters takes
nearly as long in Python; a run that needs none of it goes this way. Whatever need not come before the launch comes
behind it, where the device works meanwhile.
"""

from __future__ import annotations

from time import perf_counter, perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any

import anyio

from eagle.aio import counters, poller
from eagle.aio.completion import LONG_S, Completion, drained
from eagle.aio.progress import Meter
from eagle.aio.report import RunReport
from eagle.aio.shapes import CROWD
from eagle.aio.wake import nap_after

if TYPE_CHECKING:
    from eagle.aio.cuda_graph import CudaGraph
    from eagle.aio.device_loop import DeviceLoop
    from eagle.aio.pipeline import GraphPipeline
    from eagle.aio.shapes import Shape
    from eagle.aio.wake import Mailbox

# A run that is expected to take longer (a task: `LONG_S`) is slept through for most of that time before it is looked
# at; looking through all of it would only heat a core.
_THREAD_DOZES_FROM_S = 0.0005
_DOZED, _MOST_S = 0.75, 0.005


class Steady:
    """What a loop's runs replay until something changes.

    Args:
        n: Samples.
        shape: The launch shape.
        priority: CUDA stream priority, or None.
        pipeline: The pipeline.
        graph: Its graph, whose last step announces the end.
    """

    __slots__ = ("fields", "graph", "pipeline", "priority", "shape")

    def __init__(self, n: int, shape: Shape, priority: int | None, pipeline: GraphPipeline, graph: CudaGraph) -> None:
        self.shape, self.priority, self.pipeline, self.graph = shape, priority, pipeline, graph
        # The fields of every report; a run fills in its own.
        self.fields: dict[str, Any] = RunReport(
            n=n,
            finished=0,
            done=False,
            launches=1,
            steps=0,
            compactions=0,
            reorders=0,
            build_s=0.0,
            mode=shape.mode,
            entry=shape.entry,
            block=shape.block,
            threads_per_sm=shape.threads_per_sm,
            chunk=shape.chunk,
        ).__dict__


class ShortRun:
    """One run that is one replay, issued as it is made: `run` in an event loop, `run_blocking` in a thread without one.

    Args:
        loop: The bound loop, idle.
        steady: What it replays.
        max_steps: Steps a sample may take; the kernel's steps word holds them already.
    """

    # What most runs never set stands here: making one is a part of what a run costs.
    _overslept = False
    _completion: Completion[None] | None = None

    def __init__(self, loop: DeviceLoop, steady: Steady, max_steps: int) -> None:
        self._end = steady.graph.replay()
        self._issued_ns = perf_counter_ns()
        beside = loop.beside
        beside.add(loop.number)
        self._load = len(beside)
        loop.watchers.short = True
        self._loop, self._steady, self._max_steps = loop, steady, max_steps
        self._report = RunReport.of(steady.fields)
        self._alone = counters.issued() == 1  # the last deed: Ctrl-C before it leaves the count as it was

    async def run(self, box: Mailbox) -> RunReport:
        """Wait for the end in turns of the event loop; longer than expected, parked.

        Args:
            box: The mailbox of the loop that runs the caller.

        Cancellation: the replay ends, a few milliseconds at most, then the cancellation leaves.
        """
        expected_s, over = self._loop.expected_s, self._end.over
        try:
            if expected_s > LONG_S:
                # Timers of event loops go by the millisecond, and are up to two late.
                await anyio.sleep(_DOZED * min(expected_s, _MOST_S) - 0.0015)
                self._overslept = over()
            seen = box.look(over, self._steady.graph.stream, 1.5 * min(expected_s, _MOST_S))
            if seen is not True and (seen is False or not await seen):
                await self._parked()
        except BaseException as error:
            try:
                if not isinstance(error, GeneratorExit) and not over():  # else nothing can be awaited any more
                    await drained(self._parked())
            finally:
                while not over():
                    sleep(1e-4)  # noqa: ASYNC251
                self._closed("failed" if isinstance(error, Exception) else "cancelled")
            raise
        return self._closed("done")

    def run_blocking(self) -> RunReport:
        """Wait for the end in this thread. Ctrl-C leaves when the replay has ended."""
        interrupt: KeyboardInterrupt | None = None
        expected_s, began, over = self._loop.expected_s, perf_counter(), self._end.over
        doze_s = _DOZED * min(expected_s, _MOST_S) if expected_s > _THREAD_DOZES_FROM_S else 0.0
        while True:
            try:
                if doze_s:
                    nap_s, doze_s = doze_s, 0.0
                    sleep(nap_s)
                    self._overslept = over()
                while not over():
                    waited = perf_counter() - began
                    if waited > 1.5 * min(expected_s, _MOST_S):
                        sleep(nap_after(waited))
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            self._closed("cancelled")
            raise interrupt
        return self._closed("done")

    # ---- inside --------------------------------------------------------------------------------------------------

    def _parked(self) -> Completion[None]:
        """The end for the poller to look at."""
        if self._completion is None:
            graph = self._steady.graph
            self._completion = poller.track(None, self._end, name=graph.name, lane=graph.stream, device=graph.device)
        return self._completion

    def _closed(self, outcome: counters.Outcome) -> RunReport:
        """Count the replay, which has ended, let the loop go, and give the report.

        Raises:
            DeviceFault: The device has failed; only where nothing else is on its way to the caller.
        """
        error, loop = self._end.error, self._loop
        took_ns, left = perf_counter_ns() - self._issued_ns, counters.finished(outcome if error is None else "failed")
        try:
            if error is None:
                self._count(took_ns, alone=left == 0)
        finally:
            loop.beside.discard(loop.number)
            loop.watchers.end_short()
        if error is not None and outcome == "done":
            fault = poller.fault_of(error, self._steady.graph.device, self._steady.graph.name)
            raise fault from fault.__cause__
        return self._report

    def _count(self, took_ns: int, *, alone: bool) -> None:
        """Read what the replay counted, tell the loop, and complete the report."""
        if self._overslept:
            took_ns //= 2  # nobody saw the end; what was expected was too much
        loop, fields = self._loop, self._report.__dict__
        n, stepwise = loop.n, self._steady.shape.entry == "step"
        finished, _, steps, _, step_sum, active_lanes, lane_slots = loop.cells.read(self._end.expected)
        # Where not all have finished, somebody took every step there was; the step entry does not tell.
        if finished != n or stepwise:
            steps = self._max_steps
        fields["finished"] = finished
        fields["done"] = finished == n
        fields["exact_steps"] = not stepwise or finished != n
        fields["steps"] = steps
        if steps:
            fields["launches_by_k"] = {steps: 1}
            loop.timed(took_ns, steps, alone=self._alone and alone)
            loop.last_policy = [steps, finished, steps, self._max_steps, 0]
            if step_sum:
                loop.tell(step_sum / (n * steps))
            load = max(self._load, len(loop.beside))
            if load >= CROWD or loop.crowd > 1:
                loop.shared(load)
        else:
            fields["launches"], fields["launches_by_k"] = 0, {}
        if lane_slots:
            fields["lane_utilisation"] = active_lanes / lane_slots
        before, loop.last_finished = loop.last_finished, finished
        watchers = loop.watchers
        if not watchers.short:  # somebody came meanwhile
            meter = Meter(n, before, began=1e-9 * self._issued_ns)
            watchers.publish(meter.read(finished, step_sum or n * steps))
