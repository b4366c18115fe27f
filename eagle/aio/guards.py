"""Regions that run when a word says so: `SkipGuard`, and the steps it guards, `Skippable` and `RepeatWhile`.

Under `GraphPipeline.build` on the GPU they become conditional nodes, whose guard is read on the device at every replay.
Called directly, and on the host target, they are the plain Python below: the meaning is the same.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = (
    "RepeatWhile",
    "SkipGuard",
    "Skippable",
    "StopWord",
    "plain_steps",
    "repeat_while",
    "skippable",
    "stop_word",
)

_MOST_ITERATIONS = 2**32 - 1  # the cell's words are uint32


class StopWord:
    """What the host loops of one piece of work look at between iterations.

    Attributes:
        asked: Set once, from any thread: loops end before their next iteration.
    """

    __slots__ = ("asked",)

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        """Have the loops end."""
        self.asked = True


# The word of the work that runs now, also for loops that a step calls itself. On the device the graph has its own.
stop_word: ContextVar[StopWord | None] = ContextVar("eagle_stop_word", default=None)


class SkipGuard:
    """A region runs if and only if ``count_arr[count_idx] != baseline_arr[baseline_idx]`` (0 without a baseline).

    The arrays are uint32, CuPy or NumPy, and read where they are each time; the guard keeps them alive. Nothing is
    checked here: a wrong lane is an IndexError when it is read, a wrong dtype a TypeError when a graph is built.

    Attributes:
        count_arr: Array of the count, uint32.
        count_idx: Its lane.
        baseline_arr: Array of the baseline, uint32, or None for 0.
        baseline_idx: Its lane.
    """

    __slots__ = ("__weakref__", "baseline_arr", "baseline_idx", "count_arr", "count_idx")

    def __init__(self, count_arr: Any, count_idx: int = 0, baseline_arr: Any = None, baseline_idx: int = 0) -> None:
        self.count_arr = count_arr
        self.count_idx = count_idx
        self.baseline_arr = baseline_arr
        self.baseline_idx = baseline_idx

    def __repr__(self) -> str:
        """The condition, without reading a word."""
        baseline = "0" if self.baseline_arr is None else f"baseline[{self.baseline_idx}]"
        return f"<SkipGuard: count[{self.count_idx}] != {baseline}>"

    def evaluate(self) -> bool:
        """Read the guard now. With CuPy arrays this waits for the device: for eager code and debugging.

        Raises:
            IndexError: A lane lies outside of its array.
        """
        baseline = 0 if self.baseline_arr is None else self.baseline_arr[self.baseline_idx]
        return bool(self.count_arr[self.count_idx] != baseline)

    @classmethod
    def intent(cls, flags: Any, index: int) -> SkipGuard:
        """A flag that the caller writes between replays: ``flags[index] != 0``.

        Args:
            flags: Array of uint32, one lane for each guarded region.
            index: The region's lane.
        """
        return cls(flags, index)

    @classmethod
    def nonempty_bucket(cls, type_offsets: Any, t: int) -> SkipGuard:
        """Whether bucket `t` holds anything: ``type_offsets[t + 1] != type_offsets[t]``.

        Args:
            type_offsets: Fenceposts, uint32, one more than there are buckets.
            t: The bucket.
        """
        return cls(type_offsets, t + 1, type_offsets, t)

    @classmethod
    def nonzero(cls, n_active: Any) -> SkipGuard:
        """A plain count: ``n_active[0] != 0``.

        Args:
            n_active: Array of uint32.
        """
        return cls(n_active)


def _check_guard(guard: object) -> None:
    if not isinstance(guard, SkipGuard):
        raise TypeError(f"the guard is {guard!r}; give a SkipGuard")


class Skippable:
    """A step that runs only while its guard holds.

    `GraphPipeline.build` knows it by its type and weaves an IF node around the step; called directly it reads the guard
    now. Returns None either way.

    Attributes:
        step: The callable, without arguments.
        guard: Its `SkipGuard`.
    """

    __slots__ = ("__weakref__", "guard", "step")

    def __init__(self, step: Callable[[], object], guard: SkipGuard) -> None:
        _check_guard(guard)
        self.step = step
        self.guard = guard

    def __call__(self) -> None:
        """Run the step if the guard holds now."""
        if self.guard.evaluate():
            self.step()


class RepeatWhile:
    """A step that is repeated while its guard holds, at most `max_iters` times.

    `GraphPipeline.build` turns it into one WHILE node: a replay is one graph launch, however many iterations. Called
    directly, and on the host, it loops here. A pipeline's cancelled `launch` ends it between two iterations.

    Attributes:
        step: A callable without arguments, a `Skippable`, or a tuple of such parts, run in order.
        guard: The `SkipGuard`, read before each iteration.
        max_iters: Most iterations of one run: a plain int, 1 to 2**32 - 1, fixed for good.
        cell: The words ``[remaining, ran]``, uint32 of shape (2,), in the guard's array module and on its device.

    Raises:
        TypeError: A part cannot be called, or `max_iters` is no plain int.
        ValueError: An empty tuple, or `max_iters` out of range.
    """

    __slots__ = ("__weakref__", "_parts", "cell", "guard", "max_iters", "step")

    def __init__(
        self, step: Callable[[], object] | tuple[Callable[[], object], ...], guard: SkipGuard, max_iters: int
    ) -> None:
        if isinstance(max_iters, bool) or not isinstance(max_iters, int):
            raise TypeError(f"max_iters is {max_iters!r}; give a plain int, at least 1")
        if not 1 <= max_iters <= _MOST_ITERATIONS:
            raise ValueError(f"max_iters is {max_iters}; give 1 to {_MOST_ITERATIONS}")
        _check_guard(guard)
        parts = step if isinstance(step, tuple) else (step,)
        if not parts:
            raise ValueError("the loop's step is an empty tuple; give at least one callable")
        for part in parts:
            if not callable(part):
                raise TypeError(f"a loop's step is a callable, a Skippable or a flat tuple of them; got {part!r}")
        self.step = step
        self.guard = guard
        self.max_iters = max_iters
        self._parts = parts
        self.cell = _zeros_beside(guard.count_arr)

    def __call__(self) -> None:
        """Run the loop on the host, now."""
        cell, cap, guard, parts, word = self.cell, self.max_iters, self.guard, self._parts, stop_word.get()
        cell[0], cell[1] = cap, 0
        ran = 0
        while ran < cap and not (word is not None and word.asked) and guard.evaluate():
            for part in parts:
                part()
            ran += 1
            cell[0], cell[1] = cap - ran, ran

    @property
    def parts(self) -> tuple[Callable[[], object], ...]:
        """The body in the order it runs; one part when the step was no tuple."""
        return self._parts

    @property
    def iteration_index(self) -> Any:
        """The word that counts iterations, uint32 of shape (1,): inside the body, the index of the current one, from 0.

        A view in the guard's array module, valid for the loop's life: give it to a kernel of the body.
        """
        return self.cell[1:2]

    def iterations(self) -> int:
        """How many iterations the last run made; 0 before the first. With CuPy arrays this waits for the device."""
        return int(self.cell[1])


def skippable(step: Callable[[], object], guard: SkipGuard) -> Skippable:
    """Wrap a step so that it runs only while `guard` holds.

    Args:
        step: A callable without arguments.
        guard: The guard.

    Returns:
        The step: an IF node under `GraphPipeline.build`, a check before each call elsewhere.
    """
    return Skippable(step, guard)


def repeat_while(
    step: Callable[[], object] | tuple[Callable[[], object], ...], guard: SkipGuard, max_iters: int
) -> RepeatWhile:
    """Repeat a step while `guard` holds.

    Args:
        step: A callable without arguments, a `Skippable`, or a tuple of such parts.
        guard: The guard, read before each iteration.
        max_iters: Most iterations of one run, a plain int of at least 1.

    Returns:
        The loop: one WHILE node under `GraphPipeline.build`, a host loop elsewhere.

    Raises:
        TypeError: A part cannot be called, or `max_iters` is no plain int.
        ValueError: An empty tuple, or `max_iters` out of range.
    """
    return RepeatWhile(step, guard, max_iters)


def plain_steps(step: object) -> Iterator[object]:
    """The callables inside a step, guards and loops taken off, in the order they run."""
    if isinstance(step, Skippable):
        yield from plain_steps(step.step)
    elif isinstance(step, RepeatWhile):
        for part in step.parts:
            yield from plain_steps(part)
    else:
        yield step


def _zeros_beside(array: Any) -> Any:
    from eagle.kernels.device import is_cupy, require_cupy

    if not is_cupy(array):
        return np.zeros(2, np.uint32)
    cupy = require_cupy()
    with cupy.cuda.Device(array.device.id):
        return cupy.zeros(2, np.uint32)
