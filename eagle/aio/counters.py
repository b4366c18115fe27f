"""What this process has done since eagle was imported: runs and replays by outcome, and how fast waiters wake.

The modules that run things call the hooks; `statistics` reads them. A unit of work (a replay, a run, a batch) goes
through these states, one hook a transition::

    queued() -> [queued] -> admitted(), issued() -> [in flight] -> finished("done" | "failed" | "cancelled")
                [queued] -> dropped("cancelled" | "failed")         it never began
    issued()            -> [in flight] -> finished(...)             it began at once

Totals are Python ints and exact. A forked child starts from zero: the parent's work is not its own.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = (
    "Outcome",
    "Quantiles",
    "Statistics",
    "admitted",
    "count_pooled_with",
    "dropped",
    "finished",
    "in_flight",
    "issued",
    "outcome_of",
    "queued",
    "statistics",
    "woken",
)

Outcome: TypeAlias = Literal["done", "failed", "cancelled"]

# Latencies are counted in buckets of a sixteenth of an octave: fixed memory, 3 % wide, from 1 ns to some days.
_PARTS = 16
_LOWEST_EXPONENT = -30
_BUCKETS = _PARTS * 48


@dataclass(frozen=True, slots=True)
class Quantiles:
    """How a quantity was spread, within 3.2 %.

    Attributes:
        p50: The median, in seconds; NaN before the first observation, as the two below.
        p90: Nine in ten were at most this.
        p99: 99 in 100 were at most this.
        count: Observations, exact.
        total: Their sum, in seconds.
    """

    p50: float
    p90: float
    p99: float
    count: int
    total: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """Process-wide figures since import; a snapshot that does not change.

    Attributes:
        in_flight: Units of work (replays, runs, batches) issued and not finished.
        queued: Units accepted that wait for their turn.
        done: Units that ended well.
        failed: Units that ended with an error.
        cancelled: Units that were cancelled, begun or not.
        events_pooled: CUDA events at rest in the pool.
        wake_latency_s: From the end of a unit to its waiter running again, in seconds.
    """

    in_flight: int
    queued: int
    done: int
    failed: int
    cancelled: int
    events_pooled: int
    wake_latency_s: Quantiles

    def prometheus(self) -> str:
        """Return the figures in Prometheus' text format (version 0.0.4), ready to be served as ``/metrics``."""
        lines: list[str] = []
        for kind, metrics in _EXPOSED:
            for name, field, text in metrics:
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {getattr(self, field)}"]
        wake, name = self.wake_latency_s, "eagle_wake_latency_seconds"
        lines += [f"# HELP {name} From the end of a unit of work to its waiter running.", f"# TYPE {name} summary"]
        for label, value in (("0.5", wake.p50), ("0.9", wake.p90), ("0.99", wake.p99)):
            lines.append(f'{name}{{quantile="{label}"}} {"NaN" if math.isnan(value) else value}')
        lines += [f"{name}_sum {wake.total}", f"{name}_count {wake.count}"]
        return "\n".join(lines) + "\n"


_EXPOSED = (
    (
        "gauge",
        (
            ("eagle_in_flight", "in_flight", "Replays, runs and batches issued and not finished."),
            ("eagle_queued", "queued", "Replays, runs and batches that wait for their turn."),
            ("eagle_events_pooled", "events_pooled", "CUDA events at rest in the pool."),
        ),
    ),
    (
        "counter",
        (
            ("eagle_done_total", "done", "Replays, runs and batches that ended well."),
            ("eagle_failed_total", "failed", "Replays, runs and batches that ended with an error."),
            ("eagle_cancelled_total", "cancelled", "Replays, runs and batches that were cancelled."),
        ),
    ),
)


class _Counts:
    """The figures behind the hooks.

    The lock is reentrant: the garbage collector may run a finaliser that gives an event back to the pool while this
    very thread holds the lock.
    """

    __slots__ = ("cancelled", "done", "failed", "in_flight", "lock", "queued", "wake", "wake_count", "wake_s")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queued = self.in_flight = self.done = self.failed = self.cancelled = 0
        self.wake = [0] * _BUCKETS
        self.wake_count = 0
        self.wake_s = 0.0

    def ended(self, outcome: Outcome) -> None:
        if outcome == "done":
            self.done += 1
        elif outcome == "failed":
            self.failed += 1
        else:
            self.cancelled += 1


_counts = _Counts()
_count_pooled: Callable[[], int] = int  # none before the pool of events exists


def _start_from_zero() -> None:
    # A new object, lock included: another thread of the parent may have held the old one at the fork.
    global _counts
    _counts = _Counts()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_from_zero)


def queued() -> None:
    """Count a unit of work that was accepted and waits for its turn."""
    counts = _counts
    with counts.lock:
        counts.queued += 1


def issued() -> int:
    """Count a unit that begins now; returns how many are in flight with it."""
    counts = _counts
    with counts.lock:
        counts.in_flight = now = counts.in_flight + 1
    return now


def in_flight() -> int:
    """Units that have begun and not ended, without waiting for the lock."""
    return _counts.in_flight


def admitted(units: int = 1) -> None:
    """Count the end of waiting: what was queued counts itself when it begins."""
    counts = _counts
    with counts.lock:
        counts.queued -= units


def finished(outcome: Outcome) -> int:
    """Count the end of a unit that was issued; returns how many are still in flight."""
    counts = _counts
    with counts.lock:
        counts.in_flight = now = counts.in_flight - 1
        counts.ended(outcome)
    return now


def dropped(outcome: Outcome = "cancelled") -> None:
    """Count the end of a unit that was queued and never issued."""
    counts = _counts
    with counts.lock:
        counts.queued -= 1
        counts.ended(outcome)


def woken(seconds: float) -> None:
    """Note how long a waiter took to run again after its work had ended."""
    counts = _counts
    bucket = _bucket_of(seconds)
    with counts.lock:
        counts.wake[bucket] += 1
        counts.wake_count += 1
        counts.wake_s += max(seconds, 0.0)


def count_pooled_with(fn: Callable[[], int]) -> None:
    """Say how to count the CUDA events at rest; asked when somebody wants the figures, not at every replay."""
    global _count_pooled
    _count_pooled = fn


def outcome_of(error: BaseException | None) -> Outcome:
    """Return the outcome that an exception stands for.

    Cancellations of every event loop, Ctrl-C and exits are BaseException without being Exception; whatever is an
    Exception is a failure.
    """
    if error is None:
        return "done"
    return "failed" if isinstance(error, Exception) else "cancelled"


def statistics() -> Statistics:
    """Return what this process has done since eagle was imported, as one consistent snapshot.

    Costs some microseconds and waits for nothing, so a service may call it at every scrape.
    """
    counts = _counts
    with counts.lock:
        wake, count, total = counts.wake.copy(), counts.wake_count, counts.wake_s
        figures = (
            counts.in_flight,
            counts.queued,
            counts.done,
            counts.failed,
            counts.cancelled,
            _count_pooled(),
        )
    p50, p90, p99 = (_quantile(wake, count, hundredths) for hundredths in (50, 90, 99))
    return Statistics(*figures, wake_latency_s=Quantiles(p50, p90, p99, count, total))


def _bucket_of(seconds: float) -> int:
    if not seconds > 0.0:  # zero, a clock that went backwards, NaN
        return 0
    if seconds == math.inf:
        return _BUCKETS - 1
    mantissa, exponent = math.frexp(seconds)
    bucket = (exponent - _LOWEST_EXPONENT) * _PARTS + int((mantissa - 0.5) * 2 * _PARTS)
    return min(max(bucket, 0), _BUCKETS - 1)


def _middle_of(bucket: int) -> float:
    octave, part = divmod(bucket, _PARTS)
    return math.ldexp(0.5 + (part + 0.5) / (2 * _PARTS), octave + _LOWEST_EXPONENT)


def _quantile(buckets: list[int], count: int, hundredths: int) -> float:
    if not count:
        return math.nan
    rank = -(-count * hundredths // 100)  # ceil, in ints: exact for any count
    seen = 0
    for bucket, held in enumerate(buckets):
        seen += held
        if seen >= rank:
            return _middle_of(bucket)
    return _middle_of(_BUCKETS - 1)
