"""How far a run is: the `Progress` record, the exact accounting behind it, and how watchers follow a run.

A runner holds a `Feed` for life and a `Meter` for each run; it publishes once a slice and starts nothing for it.
Watchers only read: an abandoned iterator leaves no task, no thread and nothing to close.
"""

from __future__ import annotations

import math
import operator
import time
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import SupportsIndex

__all__ = ("Feed", "Meter", "Progress")

# The longest a watcher sleeps before it looks whether the run has ended, so that a long interval delays no ending.
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is; a value that does not change.

    Attributes:
        n: Samples in the run.
        finished: Samples that are done, those done before the run began included.
        steps: Sample-steps of this run: the steps launched, summed over the samples they were launched for. A sample
            that finishes inside a launch counts to the launch's end. A Python int, exact at any size.
        elapsed_s: Seconds since the run began.
        samples_per_s: Samples finished in this run per second.
        eta_s: Seconds that the remaining samples will take at this rate: 0 when all are finished, infinite before
            the first one is.
    """

    n: int
    finished: int
    steps: int
    elapsed_s: float
    samples_per_s: float
    eta_s: float


class Meter:
    """The accounting of one run, from counts of any integer type to exact, monotone figures.

    One thread at a time may call it.

    Args:
        n: Samples in the run.
        finished: Samples that are done before it begins; they count as finished, not towards the rate.
        clock: Seconds, monotone.
        began: When the run began, by the clock; None is now.
    """

    def __init__(
        self,
        n: SupportsIndex,
        finished: SupportsIndex = 0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        began: float | None = None,
    ) -> None:
        self._n = operator.index(n)
        self._before = self._finished = operator.index(finished)
        self._steps = 0
        self._clock = clock
        self._began = clock() if began is None else began

    def read(self, finished: SupportsIndex, steps: SupportsIndex | None = None) -> Progress:
        """Return the figures now.

        Args:
            finished: Samples done so far. A count below an earlier one (a mask read while it is being written) keeps
                the earlier one.
            steps: Sample-steps of this run so far, for runners that know the total; it never falls either.
        """
        self._finished = min(max(self._finished, operator.index(finished)), self._n)
        if steps is not None:
            self._steps = max(self._steps, operator.index(steps))
        elapsed = max(self._clock() - self._began, 0.0)
        gained, left = self._finished - self._before, self._n - self._finished
        rate = gained / elapsed if elapsed > 0.0 else 0.0
        if left == 0:
            eta = 0.0
        else:
            eta = left / rate if rate > 0.0 else math.inf
        return Progress(self._n, self._finished, self._steps, elapsed, rate, eta)


class _State(NamedTuple):
    """One consistent view for watchers, replaced as a whole: a reader in another thread never sees half of it."""

    runs: int = 0  # runs begun so far
    running: bool = False
    now: Progress | None = None
    last: Progress | None = None  # the final value of the newest run that ended
    look: Callable[[], Progress | None] | None = None  # asks a run that publishes nothing by itself


class Feed:
    """What a runner publishes and its watchers read. The runner's calls come from one thread at a time."""

    def __init__(self) -> None:
        self._state = _State()
        # Who follows: a short run that nobody follows need not be published. (A WeakSet's truth is a call of Python.)
        self.watches: set[weakref.ref[_Watch]] = set()

    def begin(self, value: Progress | None = None, look: Callable[[], Progress | None] | None = None) -> None:
        """A run begins; a short one that nobody follows yet needs no value.

        Args:
            value: The first value.
            look: For a run that publishes nothing: asks it how far it is, and never raises; called by watchers.
        """
        state = self._state
        self._state = _State(state.runs + 1, True, value, state.last, look)

    def publish(self, value: Progress) -> None:
        """The run has come further."""
        state = self._state
        self._state = _State(state.runs, True, value, state.last)

    def end(self, value: Progress | None = None) -> None:
        """The run is over (finished, cut off, failed or cancelled); without a value the last one stands."""
        state = self._state
        final = state.now if value is None else value
        self._state = _State(state.runs, False, final, final)

    def watch(self, interval: float = 0.1) -> AsyncIterator[Progress]:
        """Return an iterator over the run in progress, or over the next one when none is.

        It gives a value at once, then one each `interval` seconds, and ends with the run's final value. It starts
        nothing and holds nothing: leaving the loop early needs no clean-up.

        Raises:
            TypeError: `interval` is not a number.
            ValueError: `interval` is not positive and finite.
        """
        if isinstance(interval, bool) or not isinstance(interval, int | float):
            raise TypeError(f"interval must be a number of seconds, not {interval!r}; the default is 0.1")
        if not 0.0 < interval < math.inf:
            raise ValueError(f"interval must be a positive, finite number of seconds, not {interval!r}")
        watch = _Watch(self, interval)
        self.watches.add(weakref.ref(watch, self.watches.discard))
        return watch


class _Watch(AsyncIterator[Progress]):
    """Follows one run. A class, not an async generator: those leave a task behind when their loop is left early."""

    def __init__(self, feed: Feed, interval_s: float) -> None:
        state = feed._state
        self._feed = feed
        self._interval_s = interval_s
        self._run = state.runs if state.running else state.runs + 1
        self._due: float | None = None  # when the next value is; None: at once
        self._over = False

    async def __anext__(self) -> Progress:
        await anyio.lowlevel.checkpoint()
        if self._over:
            raise StopAsyncIteration
        while True:
            state, now = self._feed._state, time.perf_counter()
            if state.runs >= self._run:
                if state.runs > self._run or not state.running:
                    self._over = True
                    final = state.last
                    if final is None:
                        raise StopAsyncIteration
                    return final
                if self._due is None or now >= self._due:
                    value = state.now if state.look is None else state.look()
                    if value is not None:
                        self._due = now + self._interval_s
                        return value
            nap = _LOOK_S if self._due is None else min(_LOOK_S, max(self._due - now, 0.0))
            await anyio.sleep(min(nap, self._interval_s))
