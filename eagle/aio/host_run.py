"""One run until done on the host: ranges of samples, each a loop of foreign calls, worked on by the thread team.

Two shapes. `RangesRun`: every range runs by itself until its samples have finished, for kernels that touch their own
sample only and leave finished ones alone; a range's data stays in the cache. `RoundsRun`: all ranges take a launch (or
a round of them) and meet, for kernels that must see one common round: active sets, and kernels without a mask.
A call is kept well under the slice, so that a run can be stopped, watched and shared fairly between any two calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.aio import counters, tracing
from eagle.aio.completion import Completion
from eagle.aio.pacing import NS_PER_OP, STEP_NS, Pacing
from eagle.aio.packing import MIN_SAMPLES, PACK_BELOW, PackedRange, packable
from eagle.aio.progress import Meter
from eagle.aio.report import RunReport
from eagle.kernels.team import Job, core_count, team

if TYPE_CHECKING:
    from eagle.aio.host_loop import Calls, HostLoop

SLICE_NS = 5_000_000  # half the promised 10 ms: a call that is mispredicted by a factor of two still keeps the promise
_PUBLISH_NS = 20_000_000
_NOTE_NS = 8_000_000
_CACHE_BYTES = 256 * 1024  # a quarter of a usual second-level cache; more costs uniform runs 15 %, less spread ones
# Of samples that ended together in the last run: a range that stays in the first-level cache takes many steps a call (3
# to 5 % less on RK4). Samples that end one by one are packed as they thin out, which needs many (20 % more with this).
_TOGETHER_BYTES = 48 * 1024
# Where the last run of so few samples took less, the next one is one range for one thread: before a second one has
# woken and warmed its cache it is over. If it is not, it is cut after all (`_cut_again`).
_BRIEF_NS, _BRIEF_SAMPLES = 900_000, 4096
_MIN_RANGE = 256  # hawk's tile: smaller ranges leave vector lanes empty
_MAX_RANGE = 16_384
_BALANCE_FROM = 2048


@dataclass(slots=True)
class Range:
    """A range of samples and how far it has come in this run."""

    base: int
    count: int
    k: int
    steps: int = 0
    launches: int = 0
    last_k: int = 1
    packed: PackedRange | None = None
    noted_ns: int = 0
    busy_ns: int = 0
    by_k: dict[int, int] = field(default_factory=dict)

    def note(self, k: int) -> None:
        """Count one launch of k steps."""
        self.steps += k
        self.launches += 1
        self.last_k = k
        self.by_k[k] = self.by_k.get(k, 0) + 1


def cut(n: int, threads: int, bytes_per_sample: int, ops: int, together: bool = False) -> Iterator[tuple[int, int]]:
    """Cut a batch into ranges: small enough for the cache and for balance, large enough to fill vector lanes.

    Args:
        n: Samples.
        threads: Threads that will share them.
        bytes_per_sample: Bytes of all planes of one sample.
        ops: Operations of one step of one sample; one step of a range must stay far below a slice.
        together: Whether the samples are expected to end together.
    """
    # Every range ends with a tile of stragglers to itself, so few ranges are better than many, until threads idle.
    share = 1 if n < threads * _BALANCE_FROM else 2
    cached = (_TOGETHER_BYTES if together else _CACHE_BYTES) // max(bytes_per_sample, 1)
    size = min(cached, int(STEP_NS / (ops * NS_PER_OP)), -(-n // (share * threads)))
    size = min(max(_MIN_RANGE, -(-size // _MIN_RANGE) * _MIN_RANGE), _MAX_RANGE)
    for base in range(0, n, size):
        yield base, min(size, n - base)


class HostRun(Job[Range]):
    """One run of a bound loop; `completion` settles when nothing of it runs any more.

    Args:
        loop: The bound loop.
        max_steps: Steps a sample may take in this run.
        threads: Threads that may work on it, or None for every core.
    """

    def __init__(self, loop: HostLoop, max_steps: int, threads: int | None) -> None:
        super().__init__(threads or core_count())
        self.loop = loop
        self.max_steps = max_steps
        self.completion: Completion[None] = Completion(None, name=loop.name, stop=self.stop)
        self.report: RunReport | None = None
        loop.planes.refuse_read_only()
        loop.planes.take_in()
        self.already = loop.begin()
        self.begun = False
        self._watching = threading.Lock()  # not the job's: a display may write to a stream that is slow
        self._meter = Meter(loop.n, self.already)
        self._taken = 0
        self._published_at = 0

    @property
    def reported(self) -> RunReport:
        """The report of a run that has ended."""
        assert self.report is not None, "a run that settled without an error has a report"
        return self.report

    prepared = True

    def prepare(self) -> None:
        """Nothing: a host run needs no graph."""

    def next(self, *, join: bool) -> Completion[Any] | None:
        """The next piece of work to wait for: the whole run at first, then None.

        Args:
            join: Whether the calling thread works on it too; it may have ended when this returns.
        """
        with self._watching:
            with self._lock:
                if self.begun or self._ended:
                    return None
                self.begun = True
            counters.issued()
            self.loop.watchers.begin(self._meter.read(self.already))
        try:
            (team().join if join else team().submit)(self)
        except BaseException as error:  # no thread could be had: nothing of the run is begun
            self.give_up(error)
            raise
        return self.completion

    def close(self) -> None:
        """Wait for a run that nobody waited for (its coroutine was thrown away): a slice at most."""
        if self.begun and not self.completion.done():
            self.stop()
            while not self.completion.done():
                sleep(1e-4)

    def end(self, error: BaseException | None) -> None:
        """Leave arrays, mask and counters agreeing, and settle."""
        try:
            self.settle_planes()
            self.report = self.result()
            self.loop.leave()
            if self.begun:
                with self._watching:
                    self.loop.watchers.end(self._meter.read(self.report.finished, self._taken))
        except BaseException as caught:  # the completion must settle whatever happens
            error = error or caught
        if self.begun:
            counters.finished("failed" if error else "cancelled" if self.stopping else "done")
        self.completion.settle(error)

    def settle_planes(self) -> None:
        """Leave every sample's state in its own place."""

    def longest(self) -> Range:
        """The range that took most steps: what the report tells."""
        raise NotImplementedError

    def so_far(self) -> Range:
        """The range that has taken most steps while the run goes on."""
        return self.longest()

    def result(self) -> RunReport:
        """The report of this run."""
        loop, most = self.loop, self.longest()
        finished = loop.sync_counter()
        done = finished == loop.n
        loop.note_run(most, finished)
        return RunReport(
            n=loop.n,
            finished=finished,
            done=done,
            launches=most.launches,
            steps=most.steps,
            compactions=loop.compactions,
            reorders=loop.reorders(),
            build_s=0.0,
            launches_by_k=dict(most.by_k),
            exact_steps=loop.exact(most, capped=most.steps >= self.max_steps and not done),
        )

    def publish(self) -> None:
        """Tell watchers how far the run is, at most every 20 ms."""
        now = perf_counter_ns()
        if now - self._published_at < _PUBLISH_NS or not self._watching.acquire(blocking=False):
            return
        try:
            self._published_at = now
            self.loop.watchers.publish(self._meter.read(int(self.loop.finished[0]), self._taken))
        finally:
            self._watching.release()

    def took(self, samples: int, steps: int) -> None:
        """Count sample-steps that were offered; a Python int, so no total wraps."""
        with self._lock:
            self._taken += samples * steps


class RangesRun(HostRun):
    """Every range by itself until its samples have finished or the cap is reached."""

    def __init__(self, loop: HostLoop, max_steps: int, threads: int | None, pacing: Pacing) -> None:
        super().__init__(loop, max_steps, threads)
        self._pacing = pacing
        self._ranges: list[Range] = []
        self._most = self.width
        small = loop.n <= _BRIEF_SAMPLES and loop.n * loop.ops * NS_PER_OP <= STEP_NS and not loop.pieces
        if small and loop.busy_ns is not None and loop.busy_ns < _BRIEF_NS:
            self.width = 1
        self._packs = packable(loop)
        self._thinned = False

    def turn(self) -> Iterable[Range]:
        """All ranges once; then the run is over."""
        loop = self.loop
        if self._ranges or self.already == loop.n:
            return ()
        if self.width < self._most:
            self._ranges.append(Range(0, loop.n, self._pacing.first(loop.n)))
            return self._ranges
        threads = max(1, min(self.width, team().idle_cores()))  # beside other runs a thread to itself is all it gets
        for base, count in loop.pieces or cut(loop.n, threads, loop.bytes_per_sample, loop.ops, loop.together):
            self._ranges.append(Range(base, count, self._pacing.first(count)))
        return self._ranges

    def longest(self) -> Range:
        """The range with the most steps."""
        return max(self._ranges, key=lambda r: r.steps, default=Range(0, 0, 1))

    def advance(self, piece: Range) -> bool:
        """Run the range until it is finished, the cap is reached, or the slice is over."""
        with self.loop.borrowed_calls() as calls, tracing.block("host", "slice", simulation=self.loop.name):
            over = self._advance(piece, calls)
        if not over and self.width < self._most and not self.stopping:
            self._cut_again(piece)
        if self.loop.settled is not None:
            self._note_settled(piece, self.loop.settled, over)
        return over

    def _cut_again(self, piece: Range) -> None:
        """Share what is left of the only range with more threads: the run turned out longer than the last one."""
        self._unpack(piece)
        size = -(-piece.count // (self._most * _MIN_RANGE)) * _MIN_RANGE
        cuts = [(base, min(size, piece.count - base)) for base in range(size, piece.count, size)]
        more = [
            replace(piece, base=piece.base + base, count=count, busy_ns=0, by_k={**piece.by_k}) for base, count in cuts
        ]
        piece.count = min(size, piece.count)
        self._ranges += more
        self.width = self._most
        self.spread()
        with self._lock:
            self._ready.extend(more)

    def _note_settled(self, piece: Range, settled: np.ndarray[Any, Any], over: bool) -> None:
        """Note which samples of a range nothing will touch any more; not every slice, since it costs some gathers."""
        now = perf_counter_ns()
        if not over and now - (piece.noted_ns or now) < _NOTE_NS:
            piece.noted_ns = piece.noted_ns or now
            return
        piece.noted_ns = now
        if piece.packed is not None:
            piece.packed.put_finished()
        samples = slice(piece.base, piece.base + piece.count)
        settled[samples] = True if over else self.loop.mask[samples]

    def _advance(self, piece: Range, calls: Calls) -> bool:
        loop, pacing = self.loop, self._pacing
        began = perf_counter_ns()
        until = began + SLICE_NS
        if self.already and piece.launches == 0 and loop.mask[piece.base : piece.base + piece.count].all():
            return True
        while True:
            k = min(piece.k, self.max_steps - piece.steps) if loop.auto else piece.k
            live = self._launch(piece, calls, k)
            if live == 0 or piece.steps >= self.max_steps:
                self._unpack(piece)
                piece.busy_ns += perf_counter_ns() - began
                return True
            now = perf_counter_ns()
            piece.busy_ns += now - began
            piece.k = pacing.next(k, piece.launches, now - began)
            began = now
            if self.stopping:
                return False
            if now > until:
                self.publish()
                return False

    def _launch(self, piece: Range, calls: Calls, k: int) -> int:
        """One launch of the range, packed where that pays; returns the samples still live."""
        packed, n = piece.packed, self.loop.n
        if packed is None:
            base, count, mask = piece.base, piece.count, self.loop.mask[piece.base : piece.base + piece.count]
        else:
            base, count, mask, calls, n = 0, packed.count, packed.mask, packed.calls, packed.count
        for entry, address in calls.of(k):
            entry(address, base, count, n)
        piece.note(k)
        self.took(count, k)
        live = count - int(np.count_nonzero(mask))
        if not self._packs or count < MIN_SAMPLES or live > PACK_BELOW * count or live == 0:
            return live
        if packed is None:
            self._thinned = True
            piece.packed = PackedRange(self.loop, np.flatnonzero(~mask) + base)
        else:
            packed.shrink()
        return live

    def settle_planes(self) -> None:
        """Put packed samples back where they belong, and note what the run took."""
        for piece in self._ranges:
            self._unpack(piece)
        if self._ranges:
            self.loop.busy_ns = sum(piece.busy_ns for piece in self._ranges)

    def result(self) -> RunReport:
        """The report; the next run is cut by how this one's samples ended."""
        report = super().result()
        if self._packs and self._ranges and report.done:
            self.loop.together = not self._thinned
        return report

    @staticmethod
    def _unpack(piece: Range) -> None:
        packed, piece.packed = piece.packed, None
        if packed is not None:
            packed.put_back()


class RoundsRun(HostRun):
    """All ranges take one round and meet: then the counters are read, and an active set is compacted."""

    def __init__(self, loop: HostLoop, max_steps: int, threads: int | None, pacing: Pacing) -> None:
        super().__init__(loop, max_steps, threads)
        # Without a mask every sample takes every round: a round that only some took would never be made up for.
        self.whole_rounds = not loop.step.guarded
        self._pacing = pacing
        self._total = Range(0, loop.n, pacing.first(loop.n))
        self._round: list[Range] = []
        self._round_k = 1
        self._seen = self.already
        self._began = 0

    def longest(self) -> Range:
        """The common rounds; one that was cut short counts as taken."""
        if self._round:
            self._close_round()
        return self._total

    def so_far(self) -> Range:
        """The common rounds that have ended."""
        return self._total

    def turn(self) -> Iterable[Range]:
        """Count the round that has ended, and lay out the next one."""
        loop, total = self.loop, self._total
        if self._round:
            self._close_round()
        finished = int(loop.finished[0])
        if finished >= loop.n or total.steps >= self.max_steps:
            return ()
        if loop.auto and total.launches:
            quiet = finished == self._seen
            total.k = self._pacing.next_round(total.k, quiet, perf_counter_ns() - self._began)
        self._seen = finished
        self._began = perf_counter_ns()
        self._round_k = min(total.k, self.max_steps - total.steps) if loop.auto else loop.every
        span = cut(loop.span(), self.width, loop.bytes_per_sample, loop.ops)
        self._round = [Range(base, count, self._round_k) for base, count in span]
        return self._round

    def _close_round(self) -> None:
        loop, total = self.loop, self._total
        k = self._round_k if loop.auto else loop.steps_of_a_launch
        total.steps += self._round_k
        total.launches += 1
        total.last_k = k
        total.by_k[k] = total.by_k.get(k, 0) + self._round_k // k
        self.took(sum(r.count for r in self._round), self._round_k)
        self._round = []
        loop.after_round()
        if loop.settled is not None and loop.step.guarded:
            loop.settled[...] = loop.mask
        self.publish()

    def advance(self, piece: Range) -> bool:
        """One range's launches of this round; False at the end of a slice between two of them."""
        n, finished = self.loop.n, self.loop.finished
        alone = self.loop.step.guarded and len(self.loop.step.plans) == 1  # others go on for samples that have finished
        launches = 1 if self.loop.auto else self.loop.launches_per_compaction
        until = perf_counter_ns() + SLICE_NS
        with self.loop.borrowed_calls() as calls, tracing.block("host", "slice", simulation=self.loop.name):
            while piece.launches < launches:
                for entry, address in calls.of(piece.k if self.loop.auto else 1):
                    entry(address, piece.base, piece.count, n)
                piece.launches += 1
                if alone and int(finished[0]) >= n:
                    return True  # the rest of the round would find nobody
                if perf_counter_ns() > until:
                    break
        return piece.launches >= launches


def host_run(loop: HostLoop, max_steps: int, policy: str, threads: int | None) -> HostRun:
    """The run of a loop, in the shape that its kernels allow.

    Ranges run by themselves when every kernel touches its own sample only, has a mask, and no active set is walked;
    the policy "band" asks an automatic kernel for common rounds, as on the device.
    """
    step = loop.step
    alone = step.local and step.guarded and not step.active_set and not (loop.auto and policy == "band")
    pacing = Pacing(policy, loop.steps_of_a_launch, step.steps_max, loop.ops, automatic=loop.auto)
    return (RangesRun if alone else RoundsRun)(loop, max_steps, threads, pacing)
