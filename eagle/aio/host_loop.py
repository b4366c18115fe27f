"""The host side of a bound loop: foreign calls for the team's threads, the counters, compaction between rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.aio.bound_loop import BoundLoop
from eagle.kernels.roles import FUSED_STEPS

if TYPE_CHECKING:
    from eagle.aio.host_run import HostRun, Range
    from eagle.kernels.planes import Planes


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


class HostLoop(BoundLoop):
    """A bound loop over NumPy planes.

    Attributes:
        compactions: Compactions of the current or last run.
        pieces: Ranges (base, count) to run instead of those that `cut` makes, or None.
        together: Whether the samples of the last run that finished them all ended together: no range was packed.
        busy_ns: What all threads together worked for in the last run of ranges, or None.
        settled: Where a run notes which samples nothing of it will touch any more, (n,) bool, or None. A sample is
            noted between two calls, when its state is in its place; any thread may read both then.
    """

    def __init__(self, *args: Any, max_steps: int, **options: Any) -> None:
        super().__init__(*args, max_steps=max_steps, **options)
        self._spare_calls: list[Calls] = []
        self.compactions = 0
        self.pieces: Sequence[tuple[int, int]] | None = None
        self.settled: np.ndarray[Any, Any] | None = None
        self.busy_ns: int | None = None
        self.together = False
        self._reorders_before = 0
        self._compacted_at = 0
        self._policy = {"k": 1, "finished_at_launch": 0, "steps_done": 0, "max_steps": max_steps, "go": 0}

    @property
    def policy(self) -> dict[str, int] | None:
        """Cells of the automatic loop, of the last run."""
        return dict(self._policy) if self.auto else None

    def start(self, *, max_steps: int, host_policy: str, threads: int | None, priority: int | None) -> HostRun:
        """A new run, in the shape that the kernels allow; `priority` is the device's affair."""
        from eagle.aio.host_run import host_run

        return host_run(self, max_steps, host_policy, threads)

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

    def begin(self) -> int:
        """Set the per-run counts, called before a run is started; returns the samples finished."""
        self.compactions = 0
        self._reorders_before = self._reorders()
        finished = self._compacted_at = self.sync_counter()
        if self.active is not None:  # an edited mask may hold as many live samples as before, but others
            self.active.compact()
        return finished

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
        self._policy.update(k=most.last_k, finished_at_launch=finished, steps_done=most.steps)
        self._policy["go"] = int(finished < self.n and most.steps < self._policy["max_steps"])
