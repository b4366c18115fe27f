"""The device side of a bound loop: its counters, and the captured graphs that its runs replay."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.aio import tracing
from eagle.aio.active_set import compaction_body
from eagle.aio.bound_loop import BoundLoop
from eagle.aio.completion import LONG_S
from eagle.aio.device_cells import Cells, Fetched, Peek, SharedWord, count_mask, pacing, tick
from eagle.aio.device_short import ShortRun, Steady
from eagle.aio.guards import RepeatWhile, SkipGuard, Skippable
from eagle.aio.ordering import OrderedPlanes
from eagle.aio.shapes import CROWD, Shape, choose, crowd_of, same_shape
from eagle.kernels.binding import struct_values
from eagle.kernels.device import device_props
from eagle.kernels.interop import to_cupy

if TYPE_CHECKING:
    from eagle.aio.device_run import DeviceRun
    from eagle.aio.pipeline import GraphPipeline
    from eagle.kernels.device_call import PackedLaunch
    from eagle.kernels.device_kernel import DeviceKernel
    from eagle.kernels.planes import Planes

# What is in flight on each device, by the numbers of the loops.
_running: dict[int, set[int]] = {}
_numbers = count()
SLICE_NS = 5_000_000
_FAR = 8
_FIRST_K = 16  # steps of the first launch of an automatic active-set loop
_LATENCY_NS_PER_OP = 1.0  # of a dependent FP64 operation; only until a run has been timed


class DeviceLoop(BoundLoop):
    """A bound loop over CuPy planes.

    An automatic kernel without an active set runs as one launch (`fused_pipeline`); everything else is a WHILE node in
    one graph (`band_pipeline`). Graphs reset their own counters and end with one small copy to the host.

    Attributes:
        cells: The counters.
        number: Of the loop, for `beside`.
        beside: The numbers of all loops of the device whose run is in flight.
        crowd: How many runs the device is shared between; see `crowd_of`.
        build_s: Seconds of capture so far.
        ns_per_step: Measured or estimated device time of one step of the whole batch.
        expected_s: What the last launch took.
        evenness: Mean over largest step count of the last run that told, or None.
        last_finished: Samples that had finished at the end of the last run.
        learning: Whether the next run is to learn what each sample takes.
        depth: Launches of a run that may be in flight at once, once `measured`.
        measured: Whether ``ns_per_step`` was measured.
    """

    def __init__(self, *args: Any, max_steps: int, **options: Any) -> None:
        super().__init__(*args, max_steps=max_steps, **options)
        self.device: int = self.residency.device or 0
        self.max_steps = max_steps
        self.build_s = 0.0
        self.evenness: float | None = None
        self.reorders_before = 0
        self.last_finished = 0
        self.last_policy: list[int] | None = None
        self.expected_s = 6e-5
        self.depth = 2
        self.measured = False
        self.number = next(_numbers)
        self.beside = _running.setdefault(self.device, set())
        self.crowd = 1
        self._fused: dict[tuple[Shape, int | None], tuple[GraphPipeline, Any]] = {}
        self._shape: Shape | None = None
        self._steady: Steady | None = None
        self._band: GraphPipeline | None = None
        self._shown: GraphPipeline | None = None
        self.word = None if self.fused_steps is None else SharedWord(self.fused_steps)
        flops = max(device_props(self.device).peak_flops_dp, 1.0)
        self.ns_per_step = max(self.n * self.ops / (flops / 2e9), self.ops * _LATENCY_NS_PER_OP)

    def place(self, planes: Planes, order: Any) -> tuple[Planes, Any]:
        """Planes in an order of their own where one is asked for, one launch runs all, and samples may move."""
        self.learning = False
        if order is None or not self.fuses or planes.n == 0 or self.step.placed:
            return planes, self.mask
        self.learning = isinstance(order, str)
        cost = None if self.learning else to_cupy(order)
        ordered = OrderedPlanes(planes, self.mask, cost)
        planes.xp.cuda.get_current_stream().synchronize()  # runs gather on streams of their own callers
        return ordered, ordered.mask

    def make_counter(self) -> Any:
        """The finished counter, one of the cells."""
        paced = self.auto and self.step.active_set
        self.cells = Cells(self.residency.device or 0, self.step.steps_max + 1 if paced else 0)
        return self.cells.finished

    def reset(self) -> None:
        """Nobody has finished; the reorder counter starts over with the active set."""
        super().reset()
        self.reorders_before = self.last_finished = 0

    @property
    def shown_finished(self) -> Any:
        """What the last replay counted; the counter itself is cleared for the next one."""
        return self.cells.shown

    @property
    def kernel(self) -> DeviceKernel:
        """The entries of the (first) kernel."""
        return self.bound[0].side  # type: ignore[return-value]

    @property
    def fuses(self) -> bool:
        """Whether one launch runs every sample to its end."""
        return self.auto and not self.step.active_set

    @property
    def pipeline(self) -> GraphPipeline | None:
        """The pipeline of the last run."""
        return self._shown

    @property
    def policy(self) -> dict[str, int] | None:
        """Cells of the automatic loop, of the last run."""
        if not self.auto:
            return None
        k, at, done, cap, go = self.last_policy or [1, 0, 0, self.max_steps, 0]
        return {"k": k, "finished_at_launch": at, "steps_done": done, "max_steps": cap, "go": go}

    def start(self, *, max_steps: int, host_policy: str, threads: int | None, priority: int | None) -> DeviceRun:
        """A new run, in the shape that the kernels allow; the host's pacing and threads are without effect."""
        from eagle.aio.device_run import BandRun, FusedRun, LearningRun

        kind: type[DeviceRun] = BandRun
        if self.fuses:
            kind = LearningRun if self.learning else FusedRun
        return kind(self, max_steps, priority)

    def short(self, max_steps: int, priority: int | None) -> ShortRun | None:
        """The run, issued, where it is one replay of a graph that is built and nobody looks; see `ShortRun`."""
        steady, word = self._steady, self.word
        if (
            steady is None
            or word is None
            or word.value != max_steps
            or max_steps * self.ns_per_step > SLICE_NS
            or steady.shape is not (self._shape or self.shape())
            or steady.priority != priority
            or self.copied
            or self.learning
            or self.n == 0
            or self.watchers.wanted
            or tracing.active
        ):
            return None
        return ShortRun(self, steady, max_steps)

    def timed(self, took_ns: int, steps: int, *, alone: bool) -> None:
        """Note what a launch took.

        Beside others a launch takes longer than it needs: that makes no slices shorter, which would make all of them
        slower, unless it is far from what was expected. One slow moment must not slice the next run either.

        Args:
            took_ns: From the issue until the end was seen.
            steps: Of the longest sample.
            alone: Whether nothing else was in flight.
        """
        now, before = took_ns / steps, self.ns_per_step
        if now < before or alone or took_ns > _FAR * SLICE_NS:
            # Of two launches in flight, one whose end is seen late makes the other look short.
            least = before / 2 if self.measured else 0.0
            self.ns_per_step = min(max(now, least), 2 * before)
        self.measured = True
        self.expected_s = 1e-9 * took_ns

    @property
    def spin_s(self) -> float:
        """How long a task that awaits a launch looks in turns of its loop, which runs its other tasks meanwhile.

        About as long as the last launch took: a woken task is some 30 µs late, which the shortest runs would feel. Runs
        of more than a few milliseconds are left to the poller.
        """
        return 1.5 * self.expected_s if self.expected_s < LONG_S else 0.0

    def budget(self) -> int:
        """Steps that are expected to fit one slice."""
        return max(1, int(SLICE_NS / max(self.ns_per_step, 1e-3)))

    # ---- graphs --------------------------------------------------------------------------------------------------

    def fused_pipeline(self, shape: Shape, priority: int | None) -> GraphPipeline:
        """The graph of one launch: run, and report the counters."""
        steady = self._steady
        if steady is not None and steady.shape is shape and steady.priority == priority:
            return steady.pipeline
        built = self._fused.get((shape, priority))
        if built is None:
            steps: list[Callable[[], object]] = [self._fused_launch(shape).launch, self.cells.report]
            if shape.entry == "step":  # the other entries count samples that have finished before
                steps.insert(0, count_mask(self.kernel_mask, self.cells, self.device).launch)
            built = self._fused[shape, priority] = self._built(steps, priority)
        self._shown = built[0]
        self._steady = Steady(self.n, shape, priority, *built)
        return built[0]

    def _fused_launch(self, shape: Shape) -> PackedLaunch:
        values = struct_values(self.kernel.sidecar, self.planes, self.bound[0].words)
        steps, step_sum = self.cells.address("steps"), self.cells.address("step_sum")
        kernel, keep = self.kernel, (self.bound, self.cells)
        if shape.entry == "range":
            return kernel.packed_range(values, self.n, steps=steps, step_sum=step_sum, block=shape.block, keep=keep)
        if shape.entry == "step":
            return kernel.packed(values, self.n, keep=keep)
        return kernel.packed_persist(
            values,
            self.n,
            claim=self.cells.address("claim"),
            util=self.cells.address("util") if shape.counts_lanes else 0,
            steps=steps,
            step_sum=step_sum,
            block=shape.block,
            threads_per_sm=shape.threads_per_sm,
            chunk=shape.chunk,
            keep=keep,
        )

    def shape(self) -> Shape:
        """The launch shape of the next run."""
        if self._shape is None:
            shape, steady = choose(self.kernel, self.n, self.evenness, self.crowd), self._steady
            self._shape = steady.shape if steady is not None and steady.shape == shape else shape
        return self._shape

    def tell(self, evenness: float) -> None:
        """Note how evenly the samples of a run ended; the next run's shape follows."""
        before, self.evenness = self.evenness, evenness
        if before is None or not same_shape(before, evenness):
            self._shape = None

    def shared(self, load: int) -> None:
        """Note how many runs were in flight at once; the next run's shape follows, unless it is nearly the same."""
        crowd = crowd_of(load, self.n, self.kernel.sm_count)
        before = self.crowd
        if crowd == 1:
            nearly = load >= CROWD // 2
        else:
            nearly = before > 1 and crowd in (before // 2, before * 2)
        if crowd != before and not nearly:
            self.crowd = crowd
            self._shape = None

    def has_fused(self, shape: Shape, priority: int | None) -> bool:
        """Whether `fused_pipeline` would find its graph."""
        return (shape, priority) in self._fused

    @property
    def has_band(self) -> bool:
        """Whether `band_pipeline` would find its graph."""
        return self._band is not None

    def band_pipeline(self, priority: int | None) -> GraphPipeline:
        """The graph of a loop: count the mask, repeat, copy the counters back."""
        if self._band is None:
            self.iterations = Fetched(self.loop.cell, self.device)
            reorders = None if self.active is None else self.active.reorders
            self.reordered = None if reorders is None else Fetched(reorders, self.device)
            steps: list[Callable[[], object]] = [count_mask(self.kernel_mask, self.cells, self.device).launch]
            if self.active is not None:
                self.active.prepare_compaction()
                steps.append(self.active.compact)  # an edited mask may hold as many live samples, but others
            if self.auto:
                steps.append(self._pace_begin.launch)
            steps += [self.loop, self.iterations.fetch]
            if self.reordered is not None:
                steps.append(self.reordered.fetch)
            self._band, _ = self._built([*steps, self.cells.report], priority)
        self._shown = self._band
        return self._band

    @cached_property
    def peek(self) -> Peek:
        """The counters of a band run in progress."""
        return Peek(self.cells, self.loop.iteration_index, self.device)

    def _repeat(self, max_steps: int) -> RepeatWhile:
        """The loop itself, with every compaction counted."""
        if self.active is None:
            return super()._repeat(max_steps)
        device = self.residency.device or 0
        count = tick(self.cells, device)
        launches = 1 if self.auto else self.launches_per_compaction
        body = list(
            compaction_body(
                self.once(),
                self.active,
                every=launches,
                finished=self.finished,
                steps_per_call=max(self.steps_of_a_launch, -(-4 // launches)),
            )
        )
        compact = body[1]
        assert isinstance(compact, Skippable)

        def compact_and_count() -> None:
            compact.step()
            count.launch()

        body[1] = Skippable(compact_and_count, compact.guard)
        guard = SkipGuard(self.finished, 0, self._total, 0)
        if self.auto:
            go = self.planes.xp.zeros(1, np.uint32)
            most = self.step.steps_max
            self._pace_begin, following = pacing(
                self.cells,
                go,
                self.fused_steps,
                n=self.n,
                max_steps=max_steps,
                first=min(_FIRST_K, most),
                most=most,
                device=device,
            )
            body.insert(1, following.launch)
            guard = SkipGuard.nonzero(go)
        return RepeatWhile(tuple(body), guard, self.iteration_cap(max_steps))

    def _built(self, steps: list[Callable[[], object]], priority: int | None) -> tuple[GraphPipeline, Any]:
        """A pipeline of these steps, and its graph."""
        began = perf_counter()
        with self.planes.xp.cuda.Device(self.device):
            pipeline = self.pipeline_class(f"run of {self.name}", "cuda", priority=priority)
            for step in steps:
                pipeline.add(step)
            pipeline.build()
            graph = pipeline.announce_end(self.cells.signal)
        self.build_s += perf_counter() - began
        return pipeline, graph
