"""A step bound to its planes: the mask, the counter, the active set and the argument arrays that its runs share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.aio.active_set import ActiveSet, compaction_body
from eagle.aio.guards import RepeatWhile, SkipGuard
from eagle.aio.watchers import Watchers
from eagle.kernels.binding import BoundPlan, own_words
from eagle.kernels.roles import FINISHED_COUNT, FUSED_STEPS

if TYPE_CHECKING:
    from eagle.aio.host_run import Range
    from eagle.kernels.planes import Planes
    from eagle.kernels.residency import Residency
    from eagle.kernels.step import Step

DEFAULT_OPS = 100  # of a kernel whose sidecar counts none
MIN_EVERY = 4
DEFAULT_EVERY = 16


class Calls:
    """One thread's foreign calls: entries with argument arrays of its own, and its own steps word.

    Args:
        fused: Entry and argument array of an automatic kernel's range loop, or None.
        single: Entries and argument arrays of one launch of each kernel, in order.
        word: The steps word that the argument arrays point to, or None.
        keep: What the addresses point into.
    """

    __slots__ = ("_fused", "_keep", "_single", "_word")

    def __init__(self, fused: Any, single: Sequence[Any], word: Any, keep: Any) -> None:
        self._fused = fused
        self._single = single
        self._word = word
        self._keep = keep

    def of(self, k: int) -> Sequence[Any]:
        """(entry, argument array's address) pairs of a launch of k steps."""
        if self._word is not None:
            self._word[0] = k
        return self._fused if k > 1 and self._fused is not None else self._single


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
            raise ValueError(f"reorder={reorder!r}: {step.name} walks no active set; build it with Guard(active_set=True)")
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
        raise ValueError(f"every={every}: expected a multiple of {step.name}'s {k} steps a launch, at least {MIN_EVERY}")
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
        running: The run in progress, or None.
        compactions: Compactions of the current or last run.
    """

    def __init__(
        self,
        step: Step,
        planes: Planes,
        residency: Residency,
        *,
        max_steps: int,
        every: int | None,
        reorder: Any,
    ) -> None:
        self.step = step
        self.planes = planes
        self.n = planes.n
        self.residency = residency
        self.auto = step.steps == "auto"
        self.every = cadence(step, every, reorder)
        xp = planes.xp
        given = planes.planes.get(step.mask)
        self.mask = xp.zeros(self.n, np.bool_) if given is None else given.native
        self.mask_given = self.mask if given is None else given.given
        self.finished = xp.zeros(1, np.uint32)
        self._total = xp.full(1, self.n, np.uint32)
        self.fused_steps = xp.ones(1, np.int64) if self._has(FUSED_STEPS) else None
        self.active = self._active_set(reorder)
        self.bound = tuple(BoundPlan(plan, planes, self._words(plan), plan.side(residency)) for plan in step.plans)
        self.loop = self._repeat(max_steps)
        self.watchers = Watchers()
        self._spare_calls: list[Calls] = []
        self.running: Any = None
        self.compactions = 0
        self._reorders_before = 0
        self._compacted_at = 0
        self.policy: dict[str, int] | None = None
        if self.auto:
            self.policy = {"k": 1, "finished_at_launch": 0, "steps_done": 0, "max_steps": max_steps, "go": 0}

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
        words = own_words(plan.sidecar, self.n, self.planes.xp)
        shared: Mapping[str, Any] = {FINISHED_COUNT: self.finished, FUSED_STEPS: self.fused_steps}
        words.update({name: array for name, array in shared.items() if name in words})
        if self.active is not None:
            words.update({name: array for name, array in self.active.planes().items() if name in words})
        words.update({arg.name: self.mask for arg in plan.sidecar.args if arg.role == "terminated"})
        return words

    def _repeat(self, max_steps: int) -> RepeatWhile:
        def once() -> None:
            for plan in self.bound:
                plan.launch()

        guard = SkipGuard(self.finished, 0, self._total, 0)
        body: Any = once
        if self.active is not None and not self.auto:
            body = compaction_body(
                once, self.active, every=self.launches_per_compaction, finished=self.finished,
                steps_per_call=self.steps_of_a_launch,
            )
        return RepeatWhile(body, guard, -(-max_steps // self.every))

    # ---- figures -------------------------------------------------------------------------------------------------

    @property
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

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of all per-sample planes of one sample."""
        return 1 + sum(p.arg.width * p.arg.dtype.itemsize for p in self.planes.planes.values() if p.arg.per_sample)

    @property
    def ops(self) -> int:
        """Operations of one step of one sample, as the sidecars count them."""
        counts = [plan.sidecar.meta.get("step_ops") for plan in self.step.plans]
        return sum(int(count) if isinstance(count, (int, float)) and count > 0 else DEFAULT_OPS for count in counts)

    # ---- a host run's side ---------------------------------------------------------------------------------------

    def calls(self, planes: Planes | None = None, mask: Any = None) -> Calls:
        """A set of entries and argument arrays for one thread.

        Args:
            planes: Planes to run on instead of the bound ones.
            mask: Their mask.
        """
        word = None if self.fused_steps is None else np.ones(1, np.int64)
        own: dict[str, Any] = {} if word is None else {FUSED_STEPS: word}
        if mask is not None:
            own[self.step.mask] = mask
        blocks = [
            plan.block(planes, **{name: array for name, array in own.items() if name in plan.words})
            for plan in self.bound
        ]
        single = [(plan.host.entry, block.address) for plan, block in zip(self.bound, blocks, strict=True)]
        runs = self.bound[0].host.run if self.auto else None
        fused = None if runs is None else [(runs, blocks[0].address)]
        return Calls(fused, single, word if self.auto else None, (blocks, word, planes))

    @contextlib.contextmanager
    def borrowed_calls(self) -> Iterator[Calls]:
        """One thread's calls for a while; made only when no other thread has left a set behind."""
        try:
            calls = self._spare_calls.pop()
        except IndexError:
            calls = self.calls()
        try:
            yield calls
        finally:
            self._spare_calls.append(calls)

    def begin(self) -> None:
        """Set the per-run counts; called before a run is started."""
        self.compactions = 0
        self._reorders_before = self._reorders()
        if self.active is not None and int(self.active.count[0]) != self.n - self.sync_counter():
            self.active.compact()
        self._compacted_at = self.sync_counter()

    def sync_counter(self) -> int:
        """Set the counter to the mask, which the caller may have edited; returns the samples finished."""
        finished = int(np.count_nonzero(self.mask))
        self.finished[0] = finished
        return finished

    def span(self) -> int:
        """Slots that a launch must visit: the live ones, or everybody."""
        return self.n if self.active is None else self.active.live

    def after_round(self) -> None:
        """Compact, and reorder where it pays, when samples have finished since the last time."""
        if self.active is None or int(self.finished[0]) == self._compacted_at:
            return
        self._compacted_at = int(self.finished[0])
        self.active.compact()
        self.compactions += 1
        if self.active.theta is not None:
            self.active.reorder()

    def _reorders(self) -> int:
        return 0 if self.active is None or self.active.reorders is None else int(self.active.reorders[0])

    def reorders(self) -> int:
        """Reorders of this run."""
        return self._reorders() - self._reorders_before

    def leave(self) -> None:
        """Put planes back in sample order, and copied ones back into the caller's arrays."""
        if self.active is not None:
            self.active.restore()
        self.planes.write_back()

    def exact(self, most: Range, *, capped: bool) -> bool:
        """Whether the report's steps are exactly what the longest sample took or was allowed."""
        if not self.auto:
            return self.steps_of_a_launch == 1
        return most.launches == 0 or capped or most.last_k == 1

    def note_run(self, most: Range, finished: int) -> None:
        """Let the loop and the policy's cells tell of the run that ends."""
        self.loop.iteration_index[0] = most.launches
        if self.policy is not None:
            self.policy.update(k=most.last_k, finished_at_launch=finished, steps_done=most.steps)
            self.policy["go"] = int(finished < self.n and most.steps < self.policy["max_steps"])

    def reset(self) -> None:
        """Nobody has finished: clear mask, counter and active set. The state is the caller's to seed."""
        self.mask[...] = False
        self.finished[0] = 0
        if self.active is not None:
            self.active.reset()


