"""One run until done on a device: a row of graph launches, each expected to fit one slice."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter, perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.aio import counters
from eagle.aio.ordering import OrderedPlanes
from eagle.aio.progress import Meter
from eagle.aio.report import RunReport
from eagle.kernels.device import check_device, has_failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from eagle.aio.completion import Completion
    from eagle.aio.device_loop import DeviceLoop
    from eagle.aio.progress import Progress

_FIRST_RUNG = 16  # steps of a learning run's first launch


@dataclass(slots=True)
class _Launch:
    """A launch in flight."""

    work: Completion[Any]
    budget: int  # steps a sample may take in it
    replay: int  # its number, for `Cells.read`
    issued_ns: int
    alone: bool  # whether nothing else was in flight when it was issued
    load: int  # runs that were in flight on the device then, with this one


class DeviceRun(ABC):
    """One run of a device loop: ask `next` for work and wait for it, until it gives None; then `close`.

    A run of several launches keeps two in flight, so that the device goes on while the host looks at the first.

    Args:
        loop: The bound loop.
        max_steps: Steps a sample may take in this run.
        priority: CUDA stream priority, or None.
    """

    def __init__(self, loop: DeviceLoop, max_steps: int, priority: int | None) -> None:
        self.loop = loop
        self.max_steps = max_steps
        self.priority = priority
        self.steps = 0
        self.launches = 0
        self.launches_by_k: dict[int, int] = {}
        self.finished = 0
        self.report: RunReport | None = None
        self._stopping = False
        self._flight: deque[_Launch] = deque()
        self.begun = False
        self._began_s = 0.0
        self._taken = 0
        self._ended_ns = 0
        self._build_s_before = loop.build_s
        if loop.copied:
            loop.planes.take_in()

    @property
    def reported(self) -> RunReport:
        """The report of a run that has ended."""
        if self.report is None:
            check_device(self.loop.device)  # another user of the device met its fault after this run's last launch
        assert self.report is not None, "a run that was closed without an error has a report"
        return self.report

    def stop(self) -> None:
        """Ask the run to end: no further launch, and a loop ends before its next iteration."""
        self._stopping = True
        for launch in tuple(self._flight):
            launch.work.stop()

    @property
    @abstractmethod
    def prepared(self) -> bool:
        """Whether this run's graph is captured."""

    @abstractmethod
    def prepare(self) -> None:
        """Capture this run's graph; the first one of a process compiles a few kernels too."""

    def next(self, *, join: bool) -> Completion[Any] | None:
        """Issue what may be in flight and give the oldest launch's completion; None when the run is over. Never waits.

        Args:
            join: Without effect: a device needs no thread of the caller.
        """
        if self._flight:
            self.gather()
        while not self._stopping and len(self._flight) < self.depth() and not self.over() and (budget := self.budget()):
            self._send(budget)
        if not self._flight:
            return None
        work = self._flight[0].work
        if len(self._flight) == 1:  # nothing is on its way behind it: whoever waits wants to know soon
            work.spin_s = self.loop.spin_s
        return work

    def _send(self, budget: int) -> None:
        loop, flight = self.loop, self._flight
        alone = counters.in_flight() <= len(flight)
        work = self.issue(budget)
        loop.beside.add(loop.number)
        # Not the time before: the first issue captures a graph.
        flight.append(_Launch(work, budget, loop.cells.signal.expected, perf_counter_ns(), alone, len(loop.beside)))
        work.spin_s = 0.0
        if not self.begun:
            self.begun = True
            self._began_s = perf_counter()
            loop.watchers.begin(look=self.look)

    def gather(self) -> None:
        """Read what the oldest launch counted, if it has ended. `next` and `close` do it, too."""
        if not self._flight or not self._flight[0].work.done():
            return
        launch = self._flight.popleft()
        if launch.work.error is not None:
            return
        now = perf_counter_ns()
        took_ns = now - max(launch.issued_ns, self._ended_ns)
        self._ended_ns = now
        launch.alone = launch.alone and counters.in_flight() <= len(self._flight)
        self._taken += self.collect(launch, took_ns)
        watchers = self.loop.watchers
        if watchers.wanted and not self.over():
            watchers.publish(self._meter.read(self.finished, self._taken))

    # How far a run is that tells nothing before its end; never raises. None for one that publishes its slices.
    look: Callable[[], Progress | None] | None = None

    @cached_property
    def _meter(self) -> Meter:
        """The accounting for watchers, made when the first one looks; its clock started with the run."""
        return Meter(self.loop.n, self.loop.last_finished, began=self._began_s)

    def depth(self) -> int:
        """Launches that may be in flight now."""
        return 1

    @abstractmethod
    def budget(self) -> int:
        """Steps that a sample may take in the next launch; 0 when all that it may take have been issued."""

    @abstractmethod
    def issue(self, budget: int) -> Completion[Any]:
        """Issue the next launch."""

    @abstractmethod
    def collect(self, launch: _Launch, took_ns: int) -> int:
        """Read what a launch counted; returns the sample-steps it took, at most."""

    @abstractmethod
    def over(self) -> bool:
        """Whether nothing is left to launch."""

    def close(self) -> None:
        """Leave planes in sample order and in the caller's arrays, and write the report."""
        loop = self.loop
        loop.beside.discard(loop.number)
        if has_failed(loop.device):  # nothing can be read any more; the error is on its way to the caller
            if self.begun:
                loop.watchers.end()
            return
        self._settle()
        if loop.copied or loop.active is not None:
            if loop.active is not None:
                loop.active.restore()
            loop.planes.write_back()
            loop.planes.xp.cuda.get_current_stream().synchronize()
        self.report = self.result()
        if self.begun:
            watchers = loop.watchers
            watchers.end(self._meter.read(self.finished, self._taken) if watchers.wanted else None)
            loop.last_finished = self.finished

    def _settle(self) -> None:
        """Wait for launches that nobody waited for: a stop, Ctrl-C before the wait, a coroutine that was thrown away.

        The buffers are in use until they end, which is a slice at most; a loop is asked to stop.
        """
        for launch in self._flight:
            launch.work.stop()
        while self._flight:
            while not self._flight[0].work.done():
                sleep(1e-4)
            self.gather()

    def result(self) -> RunReport:
        """The report."""
        loop = self.loop
        done = self.finished == loop.n
        return RunReport(
            n=loop.n,
            finished=self.finished,
            done=done,
            launches=self.launches,
            steps=self.steps,
            compactions=self.compactions(),
            reorders=self.reorders(),
            build_s=loop.build_s - self._build_s_before,
            launches_by_k=self.launches_by_k,
            exact_steps=self.exact(done),
            **self.shape_fields(),
        )

    def compactions(self) -> int:
        """Compactions that ran."""
        return 0

    def reorders(self) -> int:
        """Reorders that ran."""
        return 0

    @abstractmethod
    def exact(self, done: bool) -> bool:
        """Whether the report's steps are exact."""

    def shape_fields(self) -> dict[str, Any]:
        """The report's fields about the shape."""
        return {"mode": "band"}


class FusedRun(DeviceRun):
    """An automatic kernel: each launch runs every sample to its end, or for as many steps as fit a slice."""

    def __init__(self, loop: DeviceLoop, max_steps: int, priority: int | None) -> None:
        super().__init__(loop, max_steps, priority)
        self._shape = loop.shape()
        self._issued = 0  # steps of all launches so far
        self._step_sum = 0
        self._counts: Any = None

    @property
    def prepared(self) -> bool:
        """Whether the graph of its shape is captured."""
        return self.loop.has_fused(self._shape, self.priority)

    def prepare(self) -> None:
        """Capture the graph of its shape."""
        self.loop.fused_pipeline(self._shape, self.priority)

    def over(self) -> bool:
        """Every sample has finished, or the cap is reached."""
        if self._counts is None:
            return self.loop.n == 0
        return self.finished == self.loop.n or self.steps >= self.max_steps

    def depth(self) -> int:
        """Two, once it is known how long a step takes: then the slices in flight are half as long."""
        return self.loop.depth if self.loop.measured else 1

    def budget(self) -> int:
        """All that is left where it fits one slice, else a slice."""
        left, fits = self.max_steps - self._issued, self.loop.budget()
        if left <= fits and not self._flight:
            return left
        return min(left, max(1, fits // self.depth()))

    def issue(self, budget: int) -> Completion[Any]:
        """One launch of so many steps."""
        loop = self.loop
        pipeline = loop.fused_pipeline(self._shape, self.priority)
        word = loop.word
        assert word is not None, "an automatic kernel has a steps word"
        self._issued += budget
        if word.value == budget:
            return pipeline.enqueue()
        return pipeline.enqueue(pre_launch=lambda: word.set(budget))

    def collect(self, launch: _Launch, took_ns: int) -> int:
        """Count the launch by the steps of its longest sample."""
        loop = self.loop
        if self._counts is not None and self.finished == loop.n:
            return 0  # it was on its way when the one before finished the last sample
        counts = self._counts = loop.cells.read(launch.replay)
        self.finished = counts.finished
        taken = counts.steps if self._shape.entry != "step" else launch.budget
        if self.finished < loop.n:
            taken = launch.budget  # somebody ran to the end of the budget
        if taken:
            self.steps += taken
            self.launches += 1
            self.launches_by_k[taken] = self.launches_by_k.get(taken, 0) + 1
            loop.timed(took_ns, taken, alone=launch.alone)
            loop.shared(max(launch.load, len(loop.beside)))
            loop.last_policy = [taken, self.finished, self.steps, self.max_steps, int(not self.over())]
        self._step_sum += counts.step_sum
        if self._step_sum and self.over():
            loop.tell(self._step_sum / (loop.n * self.steps))
        return counts.step_sum or loop.n * taken

    def exact(self, done: bool) -> bool:
        """The range and persist entries tell the longest sample's steps."""
        return self._shape.entry != "step" or not done or self.launches == 0

    def shape_fields(self) -> dict[str, Any]:
        """Entry and geometry, and the lanes' use where it was counted."""
        shape, counts = self._shape, self._counts
        used = counts is not None and counts.lane_slots > 0
        return {
            "mode": shape.mode,
            "entry": shape.entry,
            "block": shape.block,
            "threads_per_sm": shape.threads_per_sm,
            "chunk": shape.chunk,
            "lane_utilisation": counts.active_lanes / counts.lane_slots if used else None,
        }


class LearningRun(FusedRun):
    """A run of ``order="learn"`` that notes what each sample takes, to within a factor of two.

    No entry tells a sample's steps, but the mask tells after which launch it finished: launches of doubling budgets are
    a ruler. The next run after a reset starts the long samples first.
    """

    def __init__(self, loop: DeviceLoop, max_steps: int, priority: int | None) -> None:
        super().__init__(loop, max_steps, priority)
        self._rung = 0
        self._cost: Any = loop.planes.xp.zeros(loop.n, np.int32)

    def depth(self) -> int:
        """One: the mask is read between two launches."""
        return 1

    def budget(self) -> int:
        """Twice the last launch's, as long as a slice allows."""
        return min(_FIRST_RUNG << self._rung, super().budget())

    def collect(self, launch: _Launch, took_ns: int) -> int:
        """Note who has finished in this launch."""
        taken = super().collect(launch, took_ns)
        self._rung += 1
        live = ~self.loop.kernel_mask
        self._cost[live] = self._rung
        return taken

    def close(self) -> None:
        """Keep the costs, when the run came to its end."""
        ended = self._counts is not None and self.over()
        super().close()
        planes = self.loop.planes
        if ended and isinstance(planes, OrderedPlanes):
            planes.set_cost(planes.in_sample_order(self._cost))
            self.loop.learning = False


class BandRun(DeviceRun):
    """Everything else: a WHILE node repeats launches until every sample has finished or the cap is reached."""

    def __init__(self, loop: DeviceLoop, max_steps: int, priority: int | None) -> None:
        super().__init__(loop, max_steps, priority)
        self._compactions = 0
        self._reorders = 0
        self._ran = False
        self._looking = threading.Lock()

    @property
    def prepared(self) -> bool:
        """Whether the loop's graph is captured."""
        return self.loop.has_band

    def prepare(self) -> None:
        """Capture the loop's graph."""
        self.loop.band_pipeline(self.priority)

    def over(self) -> bool:
        """The loop has run: it ends at its guard or at the cap."""
        return self._ran or self.loop.n == 0

    def budget(self) -> int:
        """All of them, once."""
        return 0 if self._flight else self.max_steps

    def issue(self, budget: int) -> Completion[Any]:
        """One launch of the whole loop."""
        loop = self.loop
        pipeline = loop.band_pipeline(self.priority)
        # Whoever looks before the loop has begun must not see what the last one counted.
        return pipeline.enqueue(pre_launch=lambda: loop.loop.cell.data.memset_async(0, loop.loop.cell.nbytes))

    def look(self) -> Progress | None:
        """The counters as they are while the loop runs; None when they cannot be read."""
        loop = self.loop
        try:
            with self._looking:
                if self._ran:
                    return None
                finished, steps, iterations = loop.peek.read()
                taken = loop.n * (steps if loop.auto else iterations * loop.every)
                return self._meter.read(finished, min(taken, loop.n * self.max_steps))
        except Exception:  # a device that fails: the run itself tells
            return None

    def collect(self, launch: _Launch, took_ns: int) -> int:
        """Count the loop's iterations."""
        loop = self.loop
        loop.expected_s = 1e-9 * took_ns
        with self._looking:
            self._ran = True
        counts = loop.cells.read(launch.replay)
        self.finished = counts.finished
        self._compactions = counts.compactions
        iterations = loop.iterations.read(1)
        self.launches = iterations
        if loop.reordered is not None:
            self._reorders = loop.reordered.read(0) - loop.reorders_before
            loop.reorders_before = loop.reordered.read(0)
        if loop.auto:
            loop.last_policy, self.launches_by_k = loop.cells.read_policy(launch.replay)
            self.steps = loop.last_policy[2]
        else:
            self.steps = iterations * loop.every
            if iterations:
                self.launches_by_k = {loop.steps_of_a_launch: iterations * loop.launches_per_compaction}
        return loop.n * self.steps

    def compactions(self) -> int:
        """Compactions that ran."""
        return self._compactions

    def reorders(self) -> int:
        """Reorders that ran."""
        return self._reorders

    def exact(self, done: bool) -> bool:
        """One step a launch is exact; so is an automatic loop that the cap ended, or that did nothing."""
        if not self.loop.auto:
            return self.loop.steps_of_a_launch == 1
        return self.launches == 0 or not done
