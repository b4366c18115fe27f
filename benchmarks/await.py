"""What awaiting costs: replays awaited on asyncio and uvloop, beside blocking and beside the naive ways.

    python benchmarks/await.py
    python benchmarks/await.py --target host --rounds 500

The host part runs everywhere, the CUDA part where a GPU can be used; each takes about half a minute. Times are in
microseconds; the ratio is that of the medians, to the row marked 1.00 of the same group.

- *short*: a replay of 8 tiny kernels (host: 8 empty functions), against CuPy's ``graph.launch`` and
  ``stream.synchronize`` (host: the blocking pipeline). Naive: ``run_in_executor`` of a blocking wait; a host callback
  of the stream (host: a done callback) with ``call_soon_threadsafe``.
- *1 ms*: the same for a replay that takes a millisecond, where the waiter has to be woken.
- *pending*: CPU time of the whole process, a second, while one long replay is pending (10 s; on the host 3 s).
- *heartbeat*: how late a task is that wants to wake every millisecond, with 1,000 replays in flight.
- *in flight*: time per replay when 1,000 tasks await one each.
- *overlap*: a sequenced composer of 8 and of 64 pipelines, against its longest member and the sum of all.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import eagle
import eagle.sync
from eagle.kernels.device import unusable_reason

WARM_UP = 50  # rounds
IN_FLIGHT = 1_000
PIPELINES = 50

Step = Callable[[], object]


@dataclass
class Row:
    """One line of the table."""

    group: str
    way: str
    loop: str
    times_us: list[float]
    base: bool = False
    note: str = ""


@dataclass
class Table:
    """Rows, printed group by group as they come."""

    rows: list[Row] = field(default_factory=list)

    def add(self, *rows: Row) -> None:
        self.rows += rows

    def print(self) -> None:
        print(f"{'what':<22} {'way':<38} {'loop':<8} {'p50':>10} {'p99':>10} {'p99.9':>10} {'ratio':>7}")
        for group, rows in itertools.groupby(self.rows, key=lambda row: row.group):
            members = list(rows)
            base = next((quantile(row.times_us, 0.5) for row in members if row.base), None)
            for row in members:
                shares = (0.5, 0.99, 0.999) if len(row.times_us) > 1 else (0.5,)
                figures = " ".join(f"{quantile(row.times_us, share):>10,.1f}" for share in shares)
                ratio = "" if base is None else f"{quantile(row.times_us, 0.5) / base:.2f}"
                line = f"{group:<22} {row.way:<38} {row.loop:<8} {figures:<32} {ratio:>7}  {row.note}"
                print(line.rstrip())
            print()


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


# ---- what is replayed: one kit for each target -----------------------------------------------------------------------


class HostKit:
    """Steps in Python: empty ones, and sleeps, which like a kernel need no GIL."""

    target = "host"
    baseline = "blocking pipeline"
    callback = "done callback + call_soon_threadsafe"
    pending_s = 3.0

    def __init__(self, quick: bool) -> None:
        self.heartbeat_s = 2.0
        if quick:
            self.heartbeat_s, self.pending_s = 0.2, 0.5

    def short(self) -> list[Step]:
        return [_nothing] * 8

    def lasting(self, ms: float) -> list[Step]:
        return [lambda: time.sleep(ms / 1e3)]

    def bare(self, steps: list[Step]) -> Bare:
        return HostBare(steps)


class Bare:
    """The same steps without eagle's awaiting: blocking, and the ways one would wait in a loop by hand."""

    def block(self) -> None:
        """Replay and wait in this thread."""
        raise NotImplementedError

    def executor_wait(self) -> Step:
        """Issue a replay; return the blocking wait for it, to be run in another thread."""
        raise NotImplementedError

    def call_back(self, fn: Step) -> None:
        """Issue a replay; call `fn` in some thread when it has ended."""
        raise NotImplementedError


class HostBare(Bare):
    def __init__(self, steps: list[Step]) -> None:
        self.pipe = build(eagle.sync.GraphPipeline(target="host"), steps)

    def block(self) -> None:
        self.pipe.enqueue().wait()

    def executor_wait(self) -> Step:
        return self.pipe.enqueue().wait

    def call_back(self, fn: Step) -> None:
        self.pipe.enqueue().add_done_callback(lambda _: fn())


class CudaKit:
    """Kernels of one block: tiny ones, and ones that spin for a given time."""

    target = "cuda"
    baseline = "CuPy graph.launch + synchronize"
    callback = "host callback + call_soon_threadsafe"
    pending_s = 10.0

    def __init__(self, quick: bool) -> None:
        import cupy

        self.heartbeat_s = 2.0
        if quick:
            self.heartbeat_s, self.pending_s = 0.2, 0.5
        self.cupy = cupy
        self.words = cupy.zeros(32, cupy.float32)
        module = cupy.RawModule(code=_KERNELS)
        self.bump, self.spin = module.get_function("bump"), module.get_function("spin")
        for step in (*self.short(), *self.lasting(0.001)):
            step()  # loads what is loaded lazily: a capture is no place for that
        cupy.cuda.Device().synchronize()

    def short(self) -> list[Step]:
        return [lambda: self.bump((1,), (32,), (self.words,))] * 8

    def lasting(self, ms: float) -> list[Step]:
        return [lambda: self.spin((1,), (1,), (np.int64(ms * 1e6),))]

    def bare(self, steps: list[Step]) -> Bare:
        return CudaBare(self.cupy, steps)


class CudaBare(Bare):
    def __init__(self, cupy: Any, steps: list[Step]) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.event = cupy.cuda.Event(disable_timing=True)
        with self.stream:
            self.stream.begin_capture()
            for step in steps:
                step()
            self.graph = self.stream.end_capture()
        self.block()

    def block(self) -> None:
        self.graph.launch(self.stream)
        self.stream.synchronize()

    def executor_wait(self) -> Step:
        self.graph.launch(self.stream)
        self.event.record(self.stream)
        return self.event.synchronize

    def call_back(self, fn: Step) -> None:
        self.graph.launch(self.stream)
        self.stream.launch_host_func(lambda _: fn(), None)


_KERNELS = r"""
extern "C" __global__ void bump(float* words) { words[threadIdx.x] += 1.0f; }

extern "C" __global__ void spin(long long ns) {
    unsigned long long began, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while ((long long)(now - began) < ns);
}
"""


def _nothing() -> None:
    pass


def build(pipe: Any, steps: list[Step]) -> Any:
    for step in steps:
        pipe.add(step)
    return pipe.build()


def pipeline(kit: Any, steps: list[Step]) -> eagle.GraphPipeline:
    return build(eagle.GraphPipeline(target=kit.target), steps)


# ---- measuring -------------------------------------------------------------------------------------------------------


def timed(call: Step, rounds: int) -> list[float]:
    return [_timed(call) for _ in range(rounds + WARM_UP)][WARM_UP:]


def _timed(call: Step) -> float:
    began = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - began)


async def timed_awaits(make: Callable[[], Awaitable[object]], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds + WARM_UP):
        began = time.perf_counter()
        await make()
        times.append(1e6 * (time.perf_counter() - began))
    return times[WARM_UP:]


async def by_executor(bare: Bare) -> None:
    await asyncio.get_running_loop().run_in_executor(None, bare.executor_wait())


async def by_callback(bare: Bare) -> None:
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    bare.call_back(lambda: loop.call_soon_threadsafe(done.set_result, None))
    await done


async def replays(kit: Any, loop: str, group: str, steps: list[Step], rounds: int, naive_rounds: int) -> list[Row]:
    """Awaiting one replay at a time, ours and the naive ways."""
    pipe, bare = pipeline(kit, steps), kit.bare(steps)
    return [
        Row(group, "await pipeline.enqueue()", loop, await timed_awaits(pipe.enqueue, rounds)),
        Row(group, "await pipeline.launch()", loop, await timed_awaits(pipe.launch, rounds)),
        Row(group, "executor + blocking wait", loop, await timed_awaits(lambda: by_executor(bare), naive_rounds)),
        Row(group, kit.callback, loop, await timed_awaits(lambda: by_callback(bare), naive_rounds)),
    ]


async def pending(kit: Any, loop: str) -> Row:
    """CPU time while one long replay is pending."""
    pipe = pipeline(kit, kit.lasting(1e3 * kit.pending_s))
    completion = pipe.enqueue()
    await asyncio.sleep(0.2)
    cpu, began = time.process_time(), time.perf_counter()
    await completion
    wall = time.perf_counter() - began
    share = 100.0 * (time.process_time() - cpu) / wall
    return Row(
        "pending", f"CPU a second, one replay of {kit.pending_s:g} s", loop, [1e4 * share], note=f"{share:.3f} %"
    )


async def heartbeat(kit: Any, loop: str) -> Row:
    """Lateness of a task that sleeps a millisecond at a time, while 1,000 tasks await replays of 5 ms over and over."""
    pipes = [pipeline(kit, kit.lasting(5.0)) for _ in range(PIPELINES)]
    until = time.perf_counter() + kit.heartbeat_s
    late: list[float] = []

    async def wait(pipe: eagle.GraphPipeline) -> None:
        while time.perf_counter() < until:
            await pipe.enqueue()

    async def beat() -> None:
        while (began := time.perf_counter()) < until:
            await asyncio.sleep(1e-3)
            late.append(1e6 * (time.perf_counter() - began - 1e-3))

    async with asyncio.TaskGroup() as tasks:
        for _, pipe in zip(range(IN_FLIGHT), itertools.cycle(pipes), strict=False):
            tasks.create_task(wait(pipe))
        tasks.create_task(beat())
    return Row("heartbeat", f"{IN_FLIGHT:,} replays in flight", loop, late)


async def in_flight(kit: Any, loop: str) -> Row:
    """Time per replay when 1,000 tasks await one each."""
    pipes = [pipeline(kit, kit.short()) for _ in range(PIPELINES)]

    async def one(pipe: eagle.GraphPipeline) -> None:
        await pipe.enqueue()

    times = []
    for _ in range(12):
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _, pipe in zip(range(IN_FLIGHT), itertools.cycle(pipes), strict=False):
                tasks.create_task(one(pipe))
        times.append(1e6 * (time.perf_counter() - began) / IN_FLIGHT)
    return Row("in flight", f"1 of {IN_FLIGHT:,}, over {PIPELINES} pipelines", loop, times[2:])


async def overlap(kit: Any, loop: str, members: int) -> list[Row]:
    """A sequenced composer of pipelines that take 1 to 8 ms."""
    pipes = [pipeline(kit, kit.lasting(1.0 + at % 8)) for at in range(members)]
    composer = eagle.GraphComposer(None)
    for pipe in pipes:
        composer.register(pipe)
    composer.build()
    alone = []
    for pipe in pipes:
        began = time.perf_counter()
        await pipe.launch()
        alone.append(1e6 * (time.perf_counter() - began))
    times = []
    for _ in range(12):
        began = time.perf_counter()
        await composer.launch()
        times.append(1e6 * (time.perf_counter() - began))
    group = f"overlap of {members}, {loop}"  # each loop against its own longest
    return [
        Row(group, "the longest alone", loop, [max(alone)], base=True),
        Row(group, "composer.launch()", loop, times[2:]),
        Row(group, "the sum of all", loop, [sum(alone)]),
    ]


def loops() -> Iterator[tuple[str, Any]]:
    yield "asyncio", asyncio.new_event_loop
    if sys.platform != "win32":
        import uvloop

        yield "uvloop", uvloop.new_event_loop


def measure(kit: Any, rounds: int) -> Table:
    table = Table()
    naive = max(rounds // 4, 1)
    for group, steps in (("short", kit.short()), ("1 ms", kit.lasting(1.0))):
        table.add(Row(group, kit.baseline, "-", timed(kit.bare(steps).block, naive), base=True))
        for name, factory in loops():
            with asyncio.Runner(loop_factory=factory) as runner:
                table.add(*runner.run(replays(kit, name, group, steps, rounds, naive)))
    for one in (heartbeat, in_flight):
        for name, factory in loops():
            with asyncio.Runner(loop_factory=factory) as runner:
                table.add(runner.run(one(kit, name)))
    for members in (8, 64):
        for name, factory in loops():
            with asyncio.Runner(loop_factory=factory) as runner:
                table.add(*runner.run(overlap(kit, name, members)))
    with asyncio.Runner() as runner:
        table.add(runner.run(pending(kit, "asyncio")))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", choices=("host", "cuda"), help="only this part (default: all that can run)")
    parser.add_argument("--rounds", type=int, default=2_000, help="of each awaited row (default: 2,000)")
    parser.add_argument("--quick", action="store_true", help="short waits: to see that it runs")
    options = parser.parse_args()
    reason = unusable_reason()
    if options.target == "cuda" and reason:
        sys.exit(f"no CUDA part here: {reason}")
    kits = [HostKit] if options.target != "cuda" else []
    if options.target != "host" and not reason:
        kits.append(CudaKit)
    print(f"eagle {eagle.__version__}, Python {platform.python_version()}; microseconds, {options.rounds:,} rounds")
    for kit in kits:
        began = time.perf_counter()
        print(f"\ntarget {kit.target}\n")
        measure(kit(options.quick), options.rounds).print()
        print(f"({kit.target}: {time.perf_counter() - began:.0f} s)")
    if reason and options.target is None:
        print(f"\nno CUDA part: {reason}")


if __name__ == "__main__":
    main()
