"""Run plans until every sample is done: `until_done` builds the loop, `Runner.run` runs it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np

from eagle.aio import tracing
from eagle.aio.completion import leave_when_done
from eagle.aio.display import Display
from eagle.aio.host_loop import HostLoop
from eagle.aio.limits import default_limiter, taken_at_once, wait_for_token
from eagle.aio.offload import built_off_loop
from eagle.aio.pipeline import GraphPipeline
from eagle.aio.progress import Meter
from eagle.aio.wake import mailbox
from eagle.errors import Busy
from eagle.kernels.layout import Layout, check_layout_word
from eagle.kernels.plan import Plan
from eagle.kernels.step import Step, bind_step, check_names, step_of

if TYPE_CHECKING:
    from eagle.aio.active_set import ActiveSet
    from eagle.aio.bound_loop import BoundLoop, Run
    from eagle.aio.guards import RepeatWhile
    from eagle.aio.progress import Progress
    from eagle.aio.report import RunReport
    from eagle.kernels.binding import BoundPlan

# Options of ours that came after the published ones: a kernel parameter of the same name wins.
OWN_OPTIONS = ("limiter", "priority", "order", "progress")


def check_max_steps(max_steps: object) -> int:
    """``max_steps`` when it is a plain int >= 1.

    Raises:
        TypeError: It is no int (a bool or a NumPy integer is none).
        ValueError: It is below 1.
    """
    if isinstance(max_steps, bool) or not isinstance(max_steps, int):
        raise TypeError(f"max_steps={max_steps!r}: expected an int >= 1, the steps a sample may take")
    if max_steps < 1:
        raise ValueError(f"max_steps={max_steps}: expected at least 1, the steps a sample may take")
    return max_steps


def take_options(step: Step, given: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are ours; one whose name is a parameter of a kernel is moved into ``given``."""
    names = {name for plan in step.plans for name in plan.signature.names or ()} | set(step.args)
    ours = {}
    for name, value in options.items():
        if name not in names:
            ours[name] = value
        elif value is not None and value is not False:
            given[name] = value
    return ours


class RunOptions:
    """How a run shares the machine.

    Args:
        limiter: Bounds what is in flight; None is the default of the target and event loop.
        priority: CUDA stream priority, lower is more urgent; without effect on the host.
        order: A per-sample cost estimate or "learn"; on the host ranges are balanced anyway.
        progress: Whether every run shows a bar.

    Raises:
        TypeError: An option is of no kind that can be used.
    """

    __slots__ = ("limiter", "order", "priority", "progress")

    def __init__(self, limiter: Any = None, priority: Any = None, order: Any = None, progress: Any = False) -> None:
        if limiter is not None and not isinstance(limiter, anyio.CapacityLimiter):
            raise TypeError(f"limiter={limiter!r}: expected an anyio.CapacityLimiter or None")
        if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
            raise TypeError(
                f"priority={priority!r}: expected an int (a CUDA stream priority, lower is more urgent) or None"
            )
        self.limiter = limiter
        self.priority = priority
        self.order = order
        self.progress = check_progress(progress)


def check_progress(value: object) -> bool:
    """Whether a progress bar is wanted.

    Raises:
        TypeError: ``progress`` is neither a bool nor None.
    """
    if value is None:
        return False
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(
        f"progress={value!r}: expected True or False; True shows a bar, and sim.progress() gives the figures to code"
    )


class Runner:
    """A bound, built loop that runs plans until every sample is done.

    Planes are held by reference and written in place; a new binding is a new runner. Each `run` gets a fresh budget of
    ``max_steps`` and continues from the current state. ``host_policy`` ("auto", "tiled", "measured" or "band") and
    ``host_threads`` (None or an int) may be set before a run; they pace host runs and change nothing in the answer.
    ``target`` says where it runs, "host" or "cuda".

    Args:
        plan: A plan, or a list of plans that run in order as one step.
        max_steps: Steps a sample may take in one run.
        every: Steps between two compactions of a fixed-K active-set kernel.
        reorder: Threshold of the physical reorder, 0.25 to 0.75, or True for 0.5; active-set kernels only.
        layout: Which axis holds the samples where a plane's shape reads both ways.
        limiter: Bounds what is in flight (`anyio.CapacityLimiter`).
        priority: CUDA stream priority, lower is more urgent.
        order: A per-sample cost estimate, or "learn": long samples start first, on a device.
        progress: Whether every run shows a progress bar.
        **planes: Every plane and number of the kernels by name; the mask may be left out.

    Raises:
        ValueError: A name, plane or option is wrong; nothing was written.
        TypeError: ``max_steps`` or a number is of the wrong type.
    """

    _pipeline_class: type[GraphPipeline] = GraphPipeline

    def __init__(
        self,
        plan: Plan | Sequence[Plan],
        *,
        max_steps: int,
        every: int | None = None,
        reorder: float | bool | None = None,
        layout: Layout | None = None,
        limiter: anyio.CapacityLimiter | None = None,
        priority: int | None = None,
        order: Any = None,
        progress: bool = False,
        **planes: Any,
    ) -> None:
        plans: list[Any] = list(plan) if isinstance(plan, (list, tuple)) else [plan]
        strangers = [type(p).__name__ for p in plans if not isinstance(p, Plan)]
        if strangers:
            raise ValueError(f"until_done runs plans; got {', '.join(strangers)}: make one with eagle.deploy(kernel)")
        step = step_of(plans)
        given = dict(planes)
        options = take_options(
            step, given, {"limiter": limiter, "priority": priority, "order": order, "progress": progress}
        )
        check_names(step, given, mask=True)
        self._build(step, given, max_steps, every, reorder, layout, RunOptions(**options), allocate=False)

    @classmethod
    def of_step(
        cls,
        step: Step,
        given: Mapping[str, Any],
        *,
        max_steps: int,
        every: int | None,
        reorder: float | bool | None,
        layout: Layout | None,
        options: RunOptions,
    ) -> Runner:
        """A runner of a checked step whose write-only planes may be left out: what `simulation` builds."""
        runner = cls.__new__(cls)
        runner._build(step, given, max_steps, every, reorder, layout, options, allocate=True)
        return runner

    def _build(
        self,
        step: Step,
        given: Mapping[str, Any],
        max_steps: int,
        every: int | None,
        reorder: float | bool | None,
        layout: Layout | None,
        options: RunOptions,
        *,
        allocate: bool,
    ) -> None:
        self._max_steps = check_max_steps(max_steps)
        if step.placed and reorder not in (None, False):
            raise ValueError(
                f"reorder={reorder!r}: {step.name} reads its sample's number, the batch size or random draws, which a "
                "sample that changes places would see change; leave reorder out"
            )
        planes, residency = bind_step(step, given, layout=check_layout_word(layout), allocate=allocate)
        kind: type[BoundLoop] = HostLoop
        if residency.device is not None:
            from eagle.aio.device_loop import DeviceLoop

            kind = DeviceLoop
        self._loop = kind(
            step, planes, residency, max_steps=max_steps, every=every, reorder=reorder, order=options.order
        )
        self._loop.pipeline_class = self._pipeline_class
        self.target: Literal["host", "cuda"] = "host" if residency.device is None else "cuda"
        self.options = options
        self._free = threading.Lock()  # whoever runs or resets the object holds it; two threads may try at once
        self.host_policy: str = "auto"
        self.host_threads: int | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._loop.name}, n={self.n}>"

    # ---- what is bound -------------------------------------------------------------------------------------------

    @property
    def bound(self) -> BoundLoop:
        """The bound loop: planes, mask, counter, active set."""
        return self._loop

    @property
    def step(self) -> BoundPlan | tuple[BoundPlan, ...]:
        """The bound plan, or a tuple of them for a step of several."""
        bound = self._loop.bound
        return bound if len(bound) > 1 else bound[0]

    @property
    def loop(self) -> RepeatWhile:
        """The loop; ``iterations()`` is of the last run."""
        return self._loop.loop

    @property
    def pipeline(self) -> Any:
        """The device `GraphPipeline`, built on the first run; None on the host and before."""
        return self._loop.pipeline

    @property
    def active(self) -> ActiveSet | None:
        """The active set, or None."""
        return self._loop.active

    @property
    def finished(self) -> Any:
        """Samples finished, a (1,) uint32 array."""
        return self._loop.shown_finished

    @property
    def terminated(self) -> Any:
        """The mask: the caller's own array where one was given. True entries never run and count as finished."""
        return self._loop.mask_given

    @property
    def n(self) -> int:
        """Samples."""
        return self._loop.n

    @property
    def steps_per_launch(self) -> int | str:
        """K, or "auto"."""
        return self._loop.step.steps

    @property
    def every(self) -> int | None:
        """Steps between two looks at the counters; None for an automatic kernel."""
        return None if self.auto else self._loop.every

    @property
    def launches_per_compaction(self) -> int:
        """Launches between two looks at the counters."""
        return self._loop.launches_per_compaction

    @property
    def fused_steps(self) -> Any:
        """The steps-per-launch word of an automatic kernel, a (1,) int64 array; None for a fixed one."""
        return self._loop.fused_steps if self.auto else None

    @property
    def auto(self) -> bool:
        """Whether the kernel takes as many steps a launch as it is told."""
        return self._loop.auto

    @property
    def policy(self) -> dict[str, int] | None:
        """Cells of the automatic loop: k, finished_at_launch, steps_done, max_steps, go; None for a fixed kernel."""
        return self._loop.policy

    # ---- running -------------------------------------------------------------------------------------------------

    async def run(self, *, progress: bool = False) -> RunReport:
        """Run until every sample is done or has taken ``max_steps``, and report.

        Args:
            progress: Show a progress bar of this run.

        Raises:
            Busy: Another run of this object is in progress.
            ValueError: ``host_policy`` or ``host_threads`` is none that can be used.

        Cancellation: the run ends within a slice (10 ms on the host); only then does the cancellation leave. Planes,
        mask and counters agree, copied planes are written back, and another `run` continues.
        """
        box, loop, options = mailbox(), self._loop, self.options
        limiter = options.limiter or default_limiter(self.target, box)
        self.claim()
        try:
            if check_progress(progress) or options.progress:
                loop.watchers.display = await anyio.to_thread.run_sync(Display, loop.name)
            if not taken_at_once(limiter, self):
                await wait_for_token(limiter, self, loop.name)
            try:
                short = None if box is None else loop.short(self._max_steps, options.priority)
                if short is not None and box is not None:
                    return await short.run(box)
                with tracing.timed("runs", "run", simulation=loop.name):
                    return await self._drive(self.start())
            finally:
                limiter.release_on_behalf_of(self)
        finally:
            self.release()

    async def _drive(self, run: Run) -> RunReport:
        try:
            if self.target == "host":
                # A short host run may be over before its first await: tasks started beside it get their turn first.
                await anyio.lowlevel.checkpoint()
            if not run.prepared:
                await anyio.to_thread.run_sync(run.prepare)
            while (work := run.next(join=False)) is not None:
                await leave_when_done(work)
        finally:
            run.close()
        return self.told(run)

    def told(self, run: Run) -> RunReport:
        """The report of a closed run. One that had nothing to do, or was stopped before, ends for its watchers too."""
        report = run.reported
        if not run.begun:
            value = Meter(report.n, report.finished).read(report.finished, 0)
            self._loop.watchers.begin(value)
            self._loop.watchers.end(value)
        return report

    def reset(self) -> None:
        """Clear mask, counter and active set: the next `run` starts the batch over. The state is the caller's to seed.

        Raises:
            Busy: A run is in progress.
        """
        if not self._free.acquire(blocking=False):
            raise Busy(f"{self!r} is running; await the run before reset()")
        try:
            self._loop.reset()
        finally:
            self._free.release()

    def progress(self, interval: float = 0.1) -> AsyncIterator[Progress]:
        """Follow the run in progress, or the next one; starts nothing. See `Simulation.progress`."""
        return self._loop.watchers.watch(interval)

    # ---- the start of a run, for both faces ----------------------------------------------------------------------

    def claim(self) -> None:
        """Take the object for one run.

        Raises:
            Busy: Another run has it.
        """
        if not self._free.acquire(blocking=False):
            raise Busy(f"{self!r} is running already; await that run first, or build a second one for a second batch")
        self._loop.running = self

    def release(self) -> None:
        """Give a claimed object back, however its run ended; once for each `claim`."""
        self._loop.watchers.display = None
        self._loop.running = None
        self._free.release()

    def stop(self) -> None:
        """Ask the run in progress to end at its next slice; nothing when there is none.

        From any thread, but not from a signal handler: it may have interrupted a thread that holds the lock this takes.
        """
        run = self._loop.running
        if run is not None and run is not self:
            run.stop()

    def start(self) -> Run:
        """A run of the claimed object; whoever drives it closes it, and then releases the object."""
        run = self._loop.start(
            max_steps=self._max_steps,
            host_policy=self.host_policy,
            threads=self._threads(),
            priority=self.options.priority,
        )
        self._loop.running = run
        return run

    def _threads(self) -> int | None:
        threads: Any = self.host_threads  # a plain attribute, so anything may have been put there
        if threads is not None and (type(threads) is not int or threads < 1):
            raise ValueError(f"host_threads is {threads!r}: expected None or an int >= 1")
        return threads


async def until_done(
    plan: Plan | Sequence[Plan],
    *,
    max_steps: int,
    every: int | None = None,
    reorder: float | bool | None = None,
    layout: Layout | None = None,
    limiter: anyio.CapacityLimiter | None = None,
    priority: int | None = None,
    order: Any = None,
    progress: bool = False,
    **planes: Any,
) -> Runner:
    """Bind plans and build the loop that runs them until every sample is done; see `Runner` for the arguments.

    Returns:
        The `Runner`; ``await runner.run()`` runs it.
    """
    options = {"limiter": limiter, "priority": priority, "order": order, "progress": progress}

    def build() -> Runner:
        return Runner(plan, max_steps=max_steps, every=every, reorder=reorder, layout=layout, **options, **planes)

    return await built_off_loop(build)


async def run_until_done(
    plan: Plan | Sequence[Plan],
    *,
    max_steps: int,
    every: int | None = None,
    reorder: float | bool | None = None,
    layout: Layout | None = None,
    limiter: anyio.CapacityLimiter | None = None,
    priority: int | None = None,
    order: Any = None,
    progress: bool = False,
    **planes: Any,
) -> RunReport:
    """`until_done`, then `Runner.run`: the one-call form."""
    options = {"limiter": limiter, "priority": priority, "order": order, "progress": progress}
    runner = await until_done(
        plan, max_steps=max_steps, every=every, reorder=reorder, layout=layout, **options, **planes
    )
    return await runner.run()
