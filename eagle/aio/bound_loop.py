"""A step bound to its planes: the mask, the counter, the active set and the argument arrays that its runs share."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from eagle.aio.active_set import ActiveSet, compaction_body
from eagle.aio.guards import RepeatWhile, SkipGuard
from eagle.aio.ordering import check_order
from eagle.aio.pipeline import GraphPipeline
from eagle.aio.watchers import Watchers
from eagle.kernels.binding import BoundPlan, own_words
from eagle.kernels.roles import FINISHED_COUNT, FUSED_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from eagle.aio.completion import Completion
    from eagle.aio.device_short import ShortRun
    from eagle.aio.report import RunReport
    from eagle.kernels.planes import Planes
    from eagle.kernels.residency import Residency
    from eagle.kernels.step import Step

DEFAULT_OPS = 100  # of a kernel whose sidecar counts none
UNCOUNTED_OPS = 100_000  # of an automatic kernel that counts none, because it loops: its first call must be a short one
MIN_EVERY = 4
DEFAULT_EVERY = 16
MOST_ITERATIONS = 2**32 - 1  # a loop counts its iterations in a uint32


class Run(Protocol):
    """One run of a loop: ask `next` for work and wait for it, until it gives None; then `close`."""

    @property
    def reported(self) -> RunReport:
        """The report of a run that was closed without an error."""

    begun: bool  # whether its watchers were told

    @property
    def prepared(self) -> bool:
        """Whether `next` has nothing to build before it begins."""

    def prepare(self) -> None:
        """Build what the run needs; may take a while, so not in the thread of an event loop."""

    def next(self, *, join: bool) -> Completion[Any] | None:
        """Begin the next piece of work; None when the run is over. Never waits, but may work in this thread."""

    def stop(self) -> None:
        """Ask the run to end at its next slice; from any thread."""

    def close(self) -> None:
        """Leave planes, mask and counters agreeing."""


def cadence(step: Step, every: int | None, reorder: Any) -> int:
    """Steps between two looks at the counters.

    Args:
        step: The step.
        every: What the caller asked for, or None.
        reorder: The reorder threshold, or None.

    Raises:
        ValueError: The step has no active set, or ``every`` is no multiple of K of at least 4.
        TypeError: ``every`` is no int.
    """
    if step.steps == "auto":
        if every is not None:
            raise ValueError(f"every={every!r}: {step.name} is automatic and paces itself; leave every out")
        if reorder is not None and not step.active_set:
            raise ValueError(
                f"reorder={reorder!r}: {step.name} walks no active set; build it with Guard(active_set=True)"
            )
        return 1
    k = step.steps
    if not step.active_set:
        for name, value in (("every", every), ("reorder", reorder)):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r}: {step.name} walks no active set, so nothing is compacted; leave {name} out, or "
                    "build the kernel with Guard(active_set=True)"
                )
        return k
    if every is None:
        return k * -(-DEFAULT_EVERY // k)
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"every={every!r}: expected an int, a multiple of {k} of at least {MIN_EVERY}")
    if every < MIN_EVERY or every % k:
        raise ValueError(
            f"every={every}: expected a multiple of {step.name}'s {k} steps a launch, at least {MIN_EVERY}"
        )
    return every


class BoundLoop:
    """A step and everything its runs share. One run at a time; `running` holds it.

    Attributes:
        step: The step.
        planes: Its bound planes.
        n: Samples.
        mask: The finished samples, (n,) bool; the caller's own array where one was given.
        finished: Samples finished, (1,) uint32; kernels count into it as they run.
        bound: One bound plan per kernel.
        active: The active set, or None.
        every: Steps between two looks at the counters.
        loop: The `RepeatWhile` that says the same; `iterations()` is of the last run.
        fused_steps: The steps word of an automatic kernel, or None.
        watchers: Who follows the run.
        kernel_mask: The mask that kernels see: the same, unless a device run has an order of its own.
        copied: Whether planes are copied in before a run, and back after it.
        running: The run in progress, or None.
    """

    pipeline_class: type[GraphPipeline] = GraphPipeline  # the blocking face hands out blocking pipelines

    def __init__(
        self,
        step: Step,
        planes: Planes,
        residency: Residency,
        *,
        max_steps: int,
        every: int | None,
        reorder: Any,
        order: Any = None,
    ) -> None:
        self.step = step
        self.n = planes.n
        self.residency = residency
        self.auto = step.steps == "auto"
        self.every = cadence(step, every, reorder)
        xp = planes.xp
        given = planes.planes.get(step.mask)
        self.mask = xp.zeros(self.n, np.bool_) if given is None else given.native
        self.mask_given = self.mask if given is None else given.given
        self.planes, self.kernel_mask = self.place(planes, check_order(order, self.n))
        self.finished = self.make_counter()
        self._total = xp.full(1, self.n, np.uint32)
        self.fused_steps = xp.ones(1, np.int64) if self._has(FUSED_STEPS) else None
        self.copied = self.planes is not planes or any(p.source is not None for p in planes.planes.values())
        self.active = self._active_set(reorder)
        self.bound = tuple(BoundPlan(plan, self.planes, self._words(plan), plan.side(residency)) for plan in step.plans)
        self.loop = self._repeat(max_steps)
        self.watchers = Watchers()
        self.running: Any = None  # the run in progress, or what has claimed it

    def place(self, planes: Planes, order: Any) -> tuple[Planes, Any]:
        """The planes and the mask that kernels run on; the host balances its ranges whatever the order."""
        return planes, self.mask

    @property
    def shown_finished(self) -> Any:
        """The counter as users see it."""
        return self.finished

    def make_counter(self) -> Any:
        """The array that kernels count finished samples into."""
        return self.planes.xp.zeros(1, np.uint32)

    @property
    def pipeline(self) -> Any:
        """The device pipeline, once a run has built it."""
        return None

    @property
    def policy(self) -> dict[str, int] | None:
        """Cells of the automatic loop: k, finished_at_launch, steps_done, max_steps, go; None for a fixed kernel."""
        raise NotImplementedError

    def start(self, *, max_steps: int, host_policy: str, threads: int | None, priority: int | None) -> Run:
        """A new run of this loop, not yet begun.

        Args:
            max_steps: Steps a sample may take in it.
            host_policy: How a host run paces automatic launches.
            threads: Host threads, or None.
            priority: CUDA stream priority, or None.
        """
        raise NotImplementedError

    def short(self, max_steps: int, priority: int | None) -> ShortRun | None:
        """The whole run, issued at once, where that can be done in a shorter way than by `start`; else None."""
        return None

    def _has(self, name: str) -> bool:
        return name in self.step.args

    def _active_set(self, reorder: Any) -> ActiveSet | None:
        if not self.step.active_set:
            return None
        active = ActiveSet(self.mask, reorder=reorder)
        if active.theta is not None:
            moved = [p.native for p in self.planes.planes.values() if p.arg.per_sample and p.arg.name != self.step.mask]
            active.own(*moved)
        return active

    def _words(self, plan: Any) -> dict[str, Any]:
        shared: dict[str, Any] = {FINISHED_COUNT: self.finished, self.step.mask: self.kernel_mask}
        if self.fused_steps is not None:
            shared[FUSED_STEPS] = self.fused_steps
        if self.active is not None:
            shared.update(self.active.planes())
        return own_words(plan.sidecar, self.n, self.planes.xp, shared)

    def once(self) -> Callable[[], None]:
        """One launch of every kernel, in order; it holds the bound plans and not this loop, which holds it."""
        bound = self.bound

        def launch_once() -> None:
            for plan in bound:
                plan.launch()

        return launch_once

    def _repeat(self, max_steps: int) -> RepeatWhile:
        guard = SkipGuard(self.finished, 0, self._total, 0)
        body: Any = self.once()
        if self.active is not None and not self.auto:
            body = compaction_body(
                body,
                self.active,
                every=self.launches_per_compaction,
                finished=self.finished,
                steps_per_call=self.steps_of_a_launch,
            )
        return RepeatWhile(body, guard, self.iteration_cap(max_steps))

    def iteration_cap(self, max_steps: int) -> int:
        """Iterations that a cap of that many steps allows."""
        return min(-(-max_steps // self.every), MOST_ITERATIONS)

    # ---- figures -------------------------------------------------------------------------------------------------

    @cached_property
    def name(self) -> str:
        """The kernels' names."""
        return self.step.name

    @property
    def steps_of_a_launch(self) -> int:
        """K, or 1 for an automatic kernel."""
        return 1 if self.step.steps == "auto" else self.step.steps

    @property
    def launches_per_compaction(self) -> int:
        """Launches between two looks at the counters."""
        return self.every // self.steps_of_a_launch

    @cached_property
    def bytes_per_sample(self) -> int:
        """Bytes of all per-sample planes of one sample."""
        return 1 + sum(p.arg.width * p.arg.dtype.itemsize for p in self.planes.planes.values() if p.arg.per_sample)

    @cached_property
    def ops(self) -> int:
        """Operations of one step of one sample, as the sidecars count them."""
        counts = [plan.sidecar.meta.get("step_ops") for plan in self.step.plans]
        unknown = UNCOUNTED_OPS if self.auto else DEFAULT_OPS
        return sum(int(count) if isinstance(count, (int, float)) and count > 0 else unknown for count in counts)

    def reset(self) -> None:
        """Nobody has finished: clear mask, counter and active set. The state is the caller's to seed."""
        self.mask[...] = False
        self.shown_finished[0] = 0
        if self.active is not None:
            self.active.reset()
