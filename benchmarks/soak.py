"""A soak: random submits, cancels, failures and timeouts, every result checked, and nothing left behind.

    python benchmarks/soak.py --seconds 600
    python benchmarks/soak.py --seconds 120 --target cuda

Eight tasks each pick, over and over, one of: a simulation awaited to its end; one cancelled at a random moment and then
continued by a second call; one under a time limit; a call with a wrong plane; a request to a batcher, awaited or
cancelled; replays of a pipeline, awaited or abandoned, with a step that raises now and then. What each leaves in its
arrays has a closed form, which is compared exactly. At the end threads, file descriptors, events in use and memory are
back where they were after the warm-up, and nobody has logged anything.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import hawk
import numpy as np
from hawk import Mutable, Param, Scalar, Terminated

import eagle
from eagle.kernels.device import unusable_reason

TASKS = 8
WARM_UP_S = 10.0
# By how much what is held may grow.
ALLOWED = {"MiB": 64, "threads": 2, "descriptors": 2}


@hawk.kernel
def climb(x: Mutable[Scalar], c: Mutable[Scalar], goal: Scalar, r: Param, terminated: Terminated):
    """One unit up a step, counted, until the goal: x and c end at the goal exactly."""
    up = x + r
    x = up
    c = c + 1.0
    terminated = up >= goal


class Soak:
    """The shared state of one soak.

    Args:
        target: "host" or "cuda".
        seed: Of the random choices.
    """

    def __init__(self, target: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.target = target
        self.done: Counter[str] = Counter()
        self.batcher: Any = None
        if target == "cuda":
            import cupy

            self.xp: Any = cupy
        else:
            self.xp = np

    def planes(self, n: int, longest: float) -> dict[str, Any]:
        goal = np.floor(np.random.default_rng(self.random.getrandbits(32)).uniform(1.0, longest, n))
        return {"x": self.xp.zeros(n), "c": self.xp.zeros(n), "goal": self.xp.asarray(goal)}

    def check(self, planes: dict[str, Any], *, ended: bool) -> None:
        x, c, goal = (self.host(planes[name]) for name in ("x", "c", "goal"))
        assert np.array_equal(x, c), "x and c of one sample moved apart"
        assert (c <= goal).all(), "a sample went past its goal"
        assert not ended or np.array_equal(c, goal), "a sample ended short of its goal"

    def host(self, array: Any) -> Any:
        return array if self.xp is np else array.get()

    # ---- what a task may do --------------------------------------------------------------------------------------

    async def finish(self) -> None:
        planes = self.planes(self.random.randrange(0, 3_000), 2_000.0)
        result = await eagle.simulate(climb, **planes, r=1.0, max_steps=5_000)
        assert result.done
        self.check(planes, ended=True)

    async def cancel_and_go_on(self) -> None:
        planes = self.planes(self.random.randrange(1, 8), 3e7)
        sim = await eagle.simulation(climb, **planes, r=1.0, max_steps=10**8)
        with anyio.move_on_after(self.random.uniform(0.0, 0.03)):
            await sim.run()
        self.check(planes, ended=False)
        planes["goal"][...] = self.xp.minimum(planes["goal"], planes["c"] + 1_000.0)
        assert (await sim.run()).done
        c, goal = self.host(planes["c"]), self.host(planes["goal"])
        assert (c >= goal).all(), "a continued run ended short of its goal"

    async def time_out(self) -> None:
        planes = self.planes(2, 1e9)
        try:
            with anyio.fail_after(self.random.uniform(0.0, 0.02)):
                await eagle.simulate(climb, **planes, r=1.0, max_steps=2 * 10**9)
        except TimeoutError:
            self.check(planes, ended=False)

    async def fail(self) -> None:
        planes = self.planes(10, 50.0)
        planes["goal"] = planes["goal"][:-1]
        try:
            await eagle.simulate(climb, **planes, r=1.0, max_steps=100)
        except ValueError:
            assert not self.host(planes["c"]).any(), "a refused call wrote"
        else:
            raise AssertionError("a plane of the wrong length was accepted")

    async def request(self) -> None:
        planes = self.planes(self.random.randrange(1, 200), 300.0)
        result = await self.batcher.simulate(**planes)
        self.check({"x": result.x, "c": result.c, "goal": planes["goal"]}, ended=True)
        assert not self.host(planes["c"]).any(), "a request's own arrays were written"

    async def drop_request(self) -> None:
        planes = self.planes(self.random.randrange(1, 50), 1e6)
        with anyio.move_on_after(self.random.uniform(0.0, 0.005)):
            await self.batcher.simulate(**planes)

    async def replay(self) -> None:
        count = [0]

        def step() -> None:
            count[0] += 1
            if count[0] == 4:
                raise ZeroDivisionError

        pipe = eagle.GraphPipeline(target="host")
        pipe.add(step)
        pipe.build()
        completions = [pipe.enqueue() for _ in range(self.random.randrange(1, 6))]
        if self.random.random() < 0.3:
            return  # nobody awaits them
        for at, completion in enumerate(completions, 1):
            try:
                assert await completion is pipe
            except ZeroDivisionError:
                assert at == 4

    # ---- the soak ------------------------------------------------------------------------------------------------

    async def task(self, until: float) -> None:
        deeds = (
            self.finish,
            self.finish,
            self.cancel_and_go_on,
            self.time_out,
            self.fail,
            self.request,
            self.request,
            self.drop_request,
            self.replay,
        )
        while time.monotonic() < until:
            deed = self.random.choice(deeds)
            with anyio.fail_after(60):
                await deed()
            self.done[deed.__name__] += 1

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        async with eagle.Batcher(climb, r=1.0, max_steps=10**7, max_samples=2_000) as self.batcher:
            async with anyio.create_task_group() as group:
                for _ in range(TASKS):
                    group.start_soon(self.task, until)


class Noise(logging.Handler):
    """Keeps every warning that anybody logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def resources(soak: Soak) -> dict[str, int]:
    """What must not grow: resident MiB, threads, descriptors, and on a device memory in use by CuPy's pool."""
    gc.collect()
    held = {
        "MiB": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "in flight": eagle.aio.statistics().in_flight,
        "queued": eagle.aio.statistics().queued,
    }
    if soak.target == "cuda":
        held["device MiB"] = soak.xp.get_default_memory_pool().used_bytes() >> 20
    return held


def main() -> int:
    """Run the soak; the exit status says whether it was clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: 600)")
    parser.add_argument("--target", choices=("host", "cuda"), default="host")
    parser.add_argument("--seed", type=int, default=20261130)
    options = parser.parse_args()
    if options.target == "cuda" and unusable_reason() is not None:
        print(f"no soak on a device: {unusable_reason()}")
        return 0
    noise = Noise()
    logging.getLogger().addHandler(noise)
    threading.excepthook = lambda args: noise.lines.append(f"thread: {args.exc_value!r}")
    sys.unraisablehook = lambda args: noise.lines.append(f"finaliser: {args.exc_value!r}")
    soak = Soak(options.target, options.seed)
    asyncio.run(soak.run(min(WARM_UP_S, options.seconds)))
    time.sleep(0.2)  # what waits for a calm moment, such as destroying graphs, is done then
    before = resources(soak)
    soak.done.clear()
    asyncio.run(soak.run(options.seconds))
    time.sleep(0.2)
    after = resources(soak)
    for name, count in sorted(soak.done.items()):
        print(f"{name:<18}{count:>9,}")
    print(f"{'all':<18}{sum(soak.done.values()):>9,}  in {options.seconds:,.0f} s, every result checked")
    for name, value in after.items():
        print(f"{name:<18}{before[name]:>9,} -> {value:,}")
    for line in noise.lines[:10]:
        print("logged:", line)
    grown = [name for name, room in ALLOWED.items() if after[name] > before[name] + room]
    grown += [name for name in ("in flight", "queued") if after[name]]
    if noise.lines:
        grown.append("the log")
    print(f"NOT CLEAN: {', '.join(grown)}" if grown else "clean")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
