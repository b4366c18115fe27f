"""What runs in the worker processes of device.py: eagle or raptor-eagle, and the rivals that need no such engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.metadata
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

CUPY_LIMIT_S, WARM_UP_LIMIT_S = 2.0, 15.0
RUNS_ALONE = 25


def case_of(name: str) -> Any:
    """The module of a case."""
    if name == "RK4":
        import rk4 as case
    else:
        import orbit as case
    return case


class Side:
    """Arrays of the target.

    Args:
        target: "cuda" or "host".
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.xp: ModuleType = np
        if target == "cuda":
            import cupy

            self.xp = cupy

    def put(self, planes: dict[str, np.ndarray]) -> dict[str, Any]:
        """Copies of host planes."""
        return {name: self.xp.array(plane) for name, plane in planes.items()}

    def get(self, planes: dict[str, Any]) -> dict[str, np.ndarray]:
        """Host copies of planes."""
        return {name: plane.get() if self.target == "cuda" else plane.copy() for name, plane in planes.items()}

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.target == "cuda":
            self.xp.cuda.runtime.deviceSynchronize()


class Engine:
    """An engine with ``simulation``: ours or raptor-eagle. Its public methods are called by the parent.

    Args:
        name: "eagle" or "peer".
        target: "cuda" or "host".
    """

    def __init__(self, name: str, target: str) -> None:
        self.side = Side(target)
        self.ours = name == "eagle"
        if self.ours:
            import uvloop

            import eagle
            import eagle.sync as blocking

            self._eagle = eagle
            self._loops = {
                "asyncio": asyncio.Runner(loop_factory=asyncio.new_event_loop),
                "uvloop": asyncio.Runner(loop_factory=uvloop.new_event_loop),
            }
        else:
            import eagle as blocking

            if hasattr(blocking, "aio"):
                raise RuntimeError("this process was to measure raptor-eagle, and imports another eagle")
        self._blocking = blocking
        self._sims: dict[str, Any] = {}
        self._planes: dict[str, dict[str, Any]] = {}
        self._bare: Any = None

    def version(self) -> str:
        """The engine's version."""
        return self._eagle.__version__ if self.ours else importlib.metadata.version("raptor-eagle")

    def compile(self, cases: list[str], listed: bool) -> float:
        """Run every kernel once; returns the seconds that took."""
        began = time.perf_counter()
        for name in cases:
            case = case_of(name)
            for kernel in (case.KERNEL, case.LISTED) if listed else (case.KERNEL,):
                planes = self.side.put(case.planes(64))
                self._blocking.simulate(kernel, **planes, **case.NUMBERS, max_steps=case.MAX_STEPS)
        return time.perf_counter() - began

    def forget(self) -> None:
        """Let go of what was prepared."""
        self._sims.clear()
        self._planes.clear()
        self._bare = None
        gc.collect()

    def prepare(
        self,
        case: str,
        n: int,
        spread: bool,
        kernel: str = "KERNEL",
        options: dict[str, Any] | None = None,
        kinds: list[str] | None = None,
    ) -> list[str]:
        """Build the simulations of one cell, each over planes of its own; returns the kinds that `round` takes.

        Args:
            case: "RK4" or "orbit".
            n: Samples.
            spread: Whether the samples take very different numbers of steps.
            kernel: "KERNEL" or "LISTED".
            options: More for ``simulation``; order="steps" stands for the steps that every sample will take.
            kinds: The kinds to build; None is all: blocking, and for ours asyncio, uvloop and kernel.
        """
        self.forget()
        self._case = case_of(case)
        self._given = self._case.planes(n, spread=spread)
        self._seeds = self.side.put({name: self._given[name] for name in self._case.STATE})
        self._kernel, self._options = getattr(self._case, kernel), dict(options or {})
        if self._options.get("order") == "steps":
            self._options["order"] = self._steps()
        kinds = list(kinds or (("blocking", "asyncio", "uvloop") if self.ours else ("blocking",)))
        for kind in kinds:
            self._build(kind)
        if self.ours and self.side.target == "cuda" and len(kinds) > 1:
            self._build_bare()
            kinds.append("kernel")
        return kinds

    def _build(self, kind: str) -> Any:
        case = self._case
        planes = self._planes[kind] = self.side.put(self._given)
        options = {**self._options, **case.NUMBERS, "max_steps": case.MAX_STEPS}
        if kind in ("asyncio", "uvloop"):
            sim = self._loops[kind].run(self._eagle.simulation(self._kernel, **planes, **options))
        else:
            sim = self._blocking.simulation(self._kernel, **planes, **options)
        self._sims[kind] = sim
        return sim

    def _build_bare(self) -> None:
        from floors import Bare

        sim = self._build("kernel")
        for _ in range(3):  # the first run tells the shape of the next ones
            self._seed("kernel")
            report = sim.run().report
        self._bare = Bare(sim, report, self._case.MAX_STEPS)

    def _steps(self) -> Any:
        planes = self.side.put(self._given)
        self._blocking.simulate(self._case.KERNEL, **planes, **self._case.NUMBERS, max_steps=self._case.MAX_STEPS)
        return self._case.steps_of(planes)

    def _seed(self, kind: str) -> None:
        planes = self._planes[kind]
        for name, seed in self._seeds.items():
            planes[name][...] = seed
        self._sims[kind].reset()
        self.side.settle()

    def round(self, kind: str, warm_up: int, repeat: int) -> list[float]:
        """Run the batch so often, and return the seconds of each run after the warm-up."""
        sim = self._sims[kind]
        if kind in self.loops:
            return self._loops[kind].run(self._awaited(kind, sim, warm_up + repeat))[warm_up:]
        times = []
        for _ in range(warm_up + repeat):
            self._seed(kind)
            if kind == "kernel":
                times.append(self._bare.run())
                continue
            began = time.perf_counter()
            sim.run()
            times.append(time.perf_counter() - began)
        return times[warm_up:]

    @property
    def loops(self) -> dict[str, Any]:
        """The event loops; none for raptor-eagle."""
        return self._loops if self.ours else {}

    async def _awaited(self, kind: str, sim: Any, repeat: int) -> list[float]:
        times = []
        for _ in range(repeat):
            self._seed(kind)
            began = time.perf_counter()
            await sim.run()
            times.append(time.perf_counter() - began)
        return times

    def check(self) -> dict[str, Any]:
        """The largest error of what was prepared, the shape of the runs, and what the samples took in all."""
        self.side.settle()
        after = {kind: self.side.get(planes) for kind, planes in self._planes.items()}
        worst = max(self._case.error(self._given, planes) for planes in after.values())
        if not worst < self._case.LARGEST_ERROR:
            raise RuntimeError(f"the result is wrong by {worst}")
        steps = self._case.steps_of(next(iter(after.values())))
        moved = sum(plane.nbytes for plane in self._given.values())
        moved += sum(self._given[name].nbytes for name in self._case.STATE) + 2 * steps.size
        told = {"error": worst, "sum": float(steps.sum()), "longest": float(steps.max(initial=0)), "moved": moved}
        if self.ours and "kernel" in self._sims:  # no other of ours may be run now: the state is at its end
            report = self._sims["blocking"].run().report
            told["shape"] = [report.mode, report.entry, report.block, report.threads_per_sm, report.chunk]
        return told

    # ---- ours alone ----------------------------------------------------------------------------------------------

    def machine(self) -> dict[str, Any] | None:
        """The device's measured rates, and the latency of a step of each case."""
        if self.side.target != "cuda":
            return None
        from floors import machine

        return machine()

    def step_latency(self, case: str) -> float:
        """Seconds of one step of a sample that is alone on the device: many steps against one."""
        from floors import Bare

        module = case_of(case)
        took: list[tuple[float, float]] = []
        for cap in (module.MAX_STEPS, 1):
            given = {name: plane[:1] for name, plane in module.planes(1, spread=False).items()}
            planes, seeds = self.side.put(given), self.side.put(given)
            sim = self._blocking.simulation(module.KERNEL, **planes, **module.NUMBERS, max_steps=module.MAX_STEPS)
            bare = Bare(sim, sim.run().report, cap)
            times = []
            for _ in range(RUNS_ALONE):
                for name in module.STATE:
                    planes[name][...] = seeds[name]
                sim.reset()
                self.side.settle()
                times.append(bare.run())
            took.append((statistics.median(times[5:]), float(module.steps_of(self.side.get(planes))[0])))
        (many_s, many), (one_s, one) = took
        return (many_s - one_s) / (many - one)

    def memory(self, n: int) -> dict[str, float]:
        """Device memory that a simulation and a run of it take, the planes included, as shares of the planes."""
        case = case_of("RK4")
        self.forget()
        cupy = self.side.xp
        pool = cupy.get_default_memory_pool()
        self.side.settle()
        pool.free_all_blocks()
        used, free = pool.used_bytes(), cupy.cuda.runtime.memGetInfo()[0]
        planes = self.side.put(case.planes(n))
        size = sum(plane.nbytes for plane in planes.values())
        sim = self._blocking.simulation(case.KERNEL, **planes, **case.NUMBERS, max_steps=case.MAX_STEPS)
        sim.run()
        self.side.settle()
        told = {
            "planes_bytes": size,
            "pool_used": (pool.used_bytes() - used) / size,
            "pool_held": (pool.total_bytes() - used) / size,
            "device": (free - cupy.cuda.runtime.memGetInfo()[0]) / size,
        }
        del sim, planes
        gc.collect()
        return told

    def watched(self, n: int, steps: int, repeat: int) -> dict[str, Any]:
        """Times of a long run in one launch, in slices, and in slices with a watcher; and values the watcher saw."""
        from eagle.aio import device_loop

        case = case_of("RK4")
        self.forget()
        given = case.long_planes(n, steps)
        planes, seeds = self.side.put(given), self.side.put(given)
        runner = self._loops["uvloop"]
        sim = runner.run(self._eagle.simulation(case.KERNEL, **planes, **case.NUMBERS, max_steps=steps))
        seen: list[int] = []

        async def once(watching: bool) -> float:
            for name in case.STATE:
                planes[name][...] = seeds[name]
            sim.reset()
            self.side.settle()
            watcher = asyncio.create_task(self._watch(sim, seen)) if watching else None
            await asyncio.sleep(0)
            began = time.perf_counter()
            report = (await sim.run()).report
            took = time.perf_counter() - began
            launches.append(report.launches)
            if watcher is not None:
                await watcher
            return took

        times: dict[str, list[float]] = {"one launch": [], "slices": [], "slices, watched": []}
        launches: list[int] = []
        slice_ns = getattr(device_loop, "SLICE_NS", None)
        for at in range(repeat + 2):
            for way, taken in times.items():
                if slice_ns is not None:
                    device_loop.SLICE_NS = 10**12 if way == "one launch" else slice_ns
                took = runner.run(once(way == "slices, watched"))
                if at >= 2:
                    taken.append(took)
        if slice_ns is not None:
            device_loop.SLICE_NS = slice_ns
        return {"times": times, "launches": launches[-3:], "seen": statistics.median(seen) if seen else 0}

    @staticmethod
    async def _watch(sim: Any, seen: list[int]) -> None:
        values = 0
        async for _ in sim.progress(0.001):
            values += 1
        seen.append(values)


class Rivals:
    """JAX, or masked array operations. Its public methods are called by the parent.

    Args:
        name: "jax" or "array".
        target: "cuda" or "host".
    """

    def __init__(self, name: str, target: str) -> None:
        self._name = name
        self._side = Side(target)
        self._jax: dict[str, Any] = {}
        self._too_slow: set[str] = set()

    def version(self) -> str:
        """The rival's version."""
        module = sys.modules["numpy"] if self._name == "array" else __import__("jax")
        return str((self._side.xp if self._name == "array" else module).__version__)

    def run(self, case: str, n: int, spread: bool) -> list[float]:
        """Seconds of some warm runs; none where one would take too long."""
        module = case_of(case)
        given = module.planes(n, spread=spread)
        times, after = (self._run_jax if self._name == "jax" else self._run_array)(case, module, given)
        if times and not module.error(given, after) < module.LARGEST_ERROR:
            raise RuntimeError("the result is wrong")
        return times

    def _run_jax(self, name: str, case: Any, given: dict[str, np.ndarray]) -> tuple[list[float], dict[str, Any]]:
        from rivals import jax_run

        if name not in self._jax:
            self._jax[name] = jax_run(case)
        put, run = self._jax[name]
        arrays, times = put(given), []
        for _ in range(7):
            began = time.perf_counter()
            after = run(arrays)
            times.append(time.perf_counter() - began)
        return times[2:], {plane: np.asarray(array) for plane, array in after.items()}

    def _run_array(self, name: str, case: Any, given: dict[str, np.ndarray]) -> tuple[list[float], dict[str, Any]]:
        from rivals import masked

        if name in self._too_slow:
            return [], {}  # fewer samples took too long already
        arrays, times, after = self._side.put(given), [], None
        for run in range(3):
            self._side.settle()
            began = time.perf_counter()
            # The first run of a process compiles a kernel for every expression.
            after = masked(case, self._side.xp, arrays, limit_s=CUPY_LIMIT_S if run else WARM_UP_LIMIT_S)
            self._side.settle()
            times.append(time.perf_counter() - began)
            if after is None:
                self._too_slow.add(name)
                return [], {}
        with contextlib.suppress(AttributeError):
            self._side.xp.get_default_memory_pool().free_all_blocks()
        return times[1:], self._side.get(after)


def worker(name: str, target: str) -> Any:
    """What a worker process serves."""
    return Engine(name, target) if name in ("eagle", "peer") else Rivals(name, target)
