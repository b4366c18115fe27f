"""Many small simulations at once: awaited together, as requests to a Batcher, and beside raptor-eagle.

    python benchmarks/many.py --peer WHERE      # a folder, or an interpreter, that has raptor-eagle
    python benchmarks/many.py --target host     # the CPU alone

RK4 oscillators, each to its own stop step (1 to 1,000, log-uniform). Times are milliseconds of wall: medians of 10 and
3 warm-up rounds; raptor-eagle has a process of its own, and the ways take turns. Simulations are prebuilt; outside the
timed part their state is seeded and the device left idle. Requests to a Batcher are only read, so they need no seeding.

- *gather*: ``await asyncio.gather(*(sim.run() for sim in sims))``.
- *one run*: the same samples as one simulation, which is what batching could give at best.
- *and read*: every result's arrays are made, too (a Batcher makes them on first access).
- *NumPy planes* run on the GPU all the same (``target="cuda"``): one upload and one download a batch.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from processes import Failed, Process, peer, serve

RUNS, TURNS, WARM_UP = 10, 5, 3
THREADS = 8
SEED = 20261001
LABELS = {
    "peer after": "raptor-eagle, one after another",
    "peer threads": f"raptor-eagle, {THREADS} threads",
    "after": "eagle, one after another",
    "gather uvloop": "eagle, gather, uvloop",
    "gather asyncio": "eagle, gather, asyncio",
    "merged": "eagle, one run of all samples",
    "batch": "Batcher, uvloop",
    "batch read": "Batcher, uvloop, and read",
    "batch asyncio": "Batcher, asyncio",
    "batch default": "Batcher, uvloop, default max_samples",
    "batch numpy": "Batcher, uvloop, NumPy planes",
    "batch numpy read": "Batcher, uvloop, NumPy planes, and read",
}


# ---- in the worker processes -----------------------------------------------------------------------------------------


class Batch:
    """Simulations that run together, their planes and what these start from.

    Args:
        side: Where their planes lie.
        case: The case.
        given: The input planes of each, on the host.
    """

    def __init__(self, side: Any, case: Any, given: list[dict[str, Any]]) -> None:
        self._side, self._case, self._given = side, case, given
        self.planes = [side.put(planes) for planes in given]
        self._seeds = [{name: planes[name].copy() for name in case.STATE} for planes in self.planes]
        self.sims: list[Any] = []

    def seed(self) -> None:
        """Every simulation back to its start, the device idle."""
        for sim, planes, seeds in zip(self.sims, self.planes, self._seeds, strict=True):
            for name, seed in seeds.items():
                planes[name][...] = seed
            sim.reset()
        self._side.settle()

    def error(self) -> float:
        """The largest error of what the planes hold now."""
        after = [self._side.get(planes) for planes in self.planes]
        return max(self._case.error(given, planes) for given, planes in zip(self._given, after, strict=True))


class Worker:
    """What both engines do: prebuilt simulations, run one after another or in threads.

    Args:
        name: "eagle" or "peer".
        target: "cuda" or "host".
    """

    def __init__(self, name: str, target: str) -> None:
        import rk4
        from workers import Side

        self.case, self.side, self.ours = rk4, Side(target), name == "eagle"
        self.options = {**rk4.NUMBERS, "max_steps": rk4.MAX_STEPS}
        if self.ours:
            import eagle.sync as blocking
        else:
            import eagle as blocking

            if hasattr(blocking, "aio"):
                raise RuntimeError("this process was to measure raptor-eagle, and imports another eagle")
        self.blocking = blocking
        self.batches: dict[str, Batch] = {}

    def version(self) -> str:
        """The engine's version, with its kernel built."""
        planes = self.side.put(self.case.planes(16))
        self.blocking.simulate(self.case.KERNEL, **planes, **self.options)
        return importlib.import_module("eagle").__version__ if self.ours else importlib.metadata.version("raptor-eagle")

    def planes_of(self, count: int, n: int) -> list[dict[str, Any]]:
        """Input planes of n samples each, all different."""
        return [self.case.planes(n, seed=SEED + at) for at in range(count)]

    def prepare(self, key: str, count: int, n: int) -> None:
        """Build simulations for `round`."""
        batch = self.batches[key] = Batch(self.side, self.case, self.planes_of(count, n))
        batch.sims = [self.blocking.simulation(self.case.KERNEL, **planes, **self.options) for planes in batch.planes]

    def forget(self) -> None:
        """Let go of all simulations."""
        self.batches.clear()

    def round(self, key: str, warm_up: int, repeat: int, threads: int = 0) -> list[float]:
        """Seconds of some rounds after the warm-up: one after another, or in so many threads."""
        batch = self.batches[key]
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            times = []
            for _ in range(warm_up + repeat):
                batch.seed()
                began = time.perf_counter()
                if threads:
                    list(pool.map(lambda sim: sim.run(), batch.sims))
                else:
                    for sim in batch.sims:
                        sim.run()
                times.append(time.perf_counter() - began)
        self.checked(batch.error())
        return times[warm_up:]

    def checked(self, worst: float) -> None:
        """A wrong result is no measurement."""
        if not worst < self.case.LARGEST_ERROR:
            raise RuntimeError(f"a result is wrong by {worst}")


class OurWorker(Worker):
    """What only eagle does: simulations awaited together, and requests to a Batcher."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, target)
        import uvloop

        import eagle

        self.eagle = eagle
        self.loops = {
            "asyncio": asyncio.Runner(loop_factory=asyncio.new_event_loop),
            "uvloop": asyncio.Runner(loop_factory=uvloop.new_event_loop),
        }

    def prepare_awaited(self, loop: str, count: int, n: int) -> None:
        """Build simulations for `gather`."""
        batch = self.batches[loop] = Batch(self.side, self.case, self.planes_of(count, n))

        async def build() -> list[Any]:
            return [await self.eagle.simulation(self.case.KERNEL, **planes, **self.options) for planes in batch.planes]

        batch.sims = self.loops[loop].run(build())

    def gather(self, loop: str, warm_up: int, repeat: int) -> list[float]:
        """Seconds of rounds in which all simulations are awaited at once."""
        batch = self.batches[loop]

        async def rounds() -> list[float]:
            times = []
            for _ in range(warm_up + repeat):
                batch.seed()
                began = time.perf_counter()
                await asyncio.gather(*(sim.run() for sim in batch.sims))
                times.append(time.perf_counter() - began)
            return times

        times = self.loops[loop].run(rounds())
        self.checked(batch.error())
        return times[warm_up:]

    def requests(
        self,
        count: int,
        n: int,
        loop: str,
        warm_up: int,
        repeat: int,
        numpy: bool = False,
        read: bool = False,
        max_samples: int | None = None,
    ) -> dict[str, Any]:
        """Seconds of rounds in which all requests are made at once, and the loop's CPU time of them.

        Args:
            count: Requests.
            n: Samples of each.
            loop: "asyncio" or "uvloop".
            warm_up: Rounds that do not count.
            repeat: Rounds that do.
            numpy: Whether the planes are NumPy's, to be uploaded.
            read: Whether the arrays of every result are made in the timed part.
            max_samples: Of a batch; None is all of them.
        """
        case, options = self.case, {**self.options, "max_samples": max_samples or count * n}
        if numpy:
            options["target"] = "cuda"
        given = self.planes_of(count, n)
        planes = given if numpy else [self.side.put(g) for g in given]
        self.side.settle()

        async def rounds() -> tuple[list[float], list[float], list[Any]]:
            times, spent, results = [], [], []
            async with self.eagle.Batcher(case.KERNEL, **options) as batcher:
                for _ in range(warm_up + repeat):
                    results = []
                    self.side.settle()
                    busy, began = time.thread_time(), time.perf_counter()
                    results = await asyncio.gather(*(batcher.simulate(**p) for p in planes))
                    if read:
                        for result in results:
                            _ = [result[name] for name in case.STATE]
                        self.side.settle()
                    times.append(time.perf_counter() - began)
                    spent.append(time.thread_time() - busy)
            return times, spent, results

        times, spent, results = self.loops[loop].run(rounds())
        side = type(self.side)("host") if numpy else self.side
        after = [side.get({name: result[name] for name in case.STATE}) for result in results]
        self.checked(max((case.error(g, a) for g, a in zip(given, after, strict=True)), default=0.0))
        return {"s": times[warm_up:], "cpu_s": statistics.median(spent[warm_up:])}


# ---- in the parent ---------------------------------------------------------------------------------------------------


class Bench:
    """The workers of one target, and what could not be measured.

    Args:
        target: "cuda" or "host".
        options: The command line.
    """

    def __init__(self, target: str, options: argparse.Namespace) -> None:
        script, more = str(pathlib.Path(__file__).resolve()), ("--target", target)
        self.target = target
        self.options = options
        self.missing: list[str] = []
        self.engines = {"eagle": Process(script, "eagle", *more)}
        if options.peer:
            self.engines["peer"] = peer(script, options.peer, *more)

    def ask(self, engine: str, do: str, **given: Any) -> Any:
        """A worker's answer; None where there is none, with the reason noted."""
        if engine not in self.engines:
            return None
        try:
            return self.engines[engine].ask(do, **given)
        except Failed as error:
            self.missing.append(f"{self.target}, {engine}, {do}: {error}")
            return None

    def close(self) -> None:
        """End the workers."""
        for process in self.engines.values():
            process.close()

    def in_turns(self, ways: dict[str, Callable[[int, int], list[float] | None]]) -> dict[str, list[float]]:
        """Times of each way, some rounds of one, some of the next; a way that fails is left out.

        Args:
            ways: By name, what takes a warm-up and a number of rounds and returns seconds.
        """
        times: dict[str, list[float]] = {}
        failed: set[str] = set()
        for turn in range(TURNS):
            for way, run in ways.items() if turn % 2 == 0 else reversed(ways.items()):  # nobody always comes first
                if way not in failed:
                    taken = run(1 if turn else WARM_UP, RUNS // TURNS)
                    if taken is None:
                        failed.add(way)
                    else:
                        times.setdefault(way, []).extend(taken)
        return {way: taken for way, taken in times.items() if way not in failed}

    def simulations(self, names: list[str]) -> dict[str, list[float]]:
        """The prebuilt simulations, every way of running them; and the same as requests, in the ways named."""
        count, n = self.options.count, self.options.n
        for engine in ("eagle", "peer"):
            self.ask(engine, "prepare", key="many", count=count, n=n)
        self.ask("eagle", "prepare", key="merged", count=1, n=count * n)
        for loop in ("uvloop", "asyncio"):
            self.ask("eagle", "prepare_awaited", loop=loop, count=count, n=n)

        def way(engine: str, do: str, **given: Any) -> Callable[[int, int], Any]:
            return lambda warm_up, repeat: self.ask(engine, do, warm_up=warm_up, repeat=repeat, **given)

        ways = {
            "after": way("eagle", "round", key="many"),
            "gather uvloop": way("eagle", "gather", loop="uvloop"),
            "gather asyncio": way("eagle", "gather", loop="asyncio"),
            "merged": way("eagle", "round", key="merged"),
        }
        if "peer" in self.engines:
            ways["peer after"] = way("peer", "round", key="many")
            ways["peer threads"] = way("peer", "round", key="many", threads=THREADS)
        times = self.in_turns(ways | self.batches(count, n, names))
        for engine in ("eagle", "peer"):
            self.ask(engine, "forget")
        return times

    def batches(self, count: int, n: int, names: list[str]) -> dict[str, Callable[[int, int], Any]]:
        """Requests to a Batcher, in the ways that are named: for `in_turns`."""
        kinds: dict[str, dict[str, Any]] = {
            "batch": {"loop": "uvloop"},
            "batch read": {"loop": "uvloop", "read": True},
            "batch asyncio": {"loop": "asyncio"},
            "batch default": {"loop": "uvloop", "max_samples": 65_536},
            "batch numpy": {"loop": "uvloop", "numpy": True},
            "batch numpy read": {"loop": "uvloop", "numpy": True, "read": True},
        }

        def way(name: str) -> Callable[[int, int], Any]:
            def rounds(warm_up: int, repeat: int) -> list[float] | None:
                given = {"count": count, "n": n, "warm_up": warm_up, "repeat": repeat, **kinds[name]}
                told = self.ask("eagle", "requests", **given)
                return None if told is None else told["s"]

            return rounds

        return {name: way(name) for name in names}

    def per_request(self) -> dict[str, float] | None:
        """Seconds of Python that one more request of one sample costs, and of the loop's CPU time."""
        few, many = 64, self.options.requests
        told = [
            self.ask("eagle", "requests", count=count, n=1, loop="uvloop", warm_up=WARM_UP, repeat=RUNS)
            for count in (few, many)
        ]
        if None in told or many <= few:
            return None
        walls = [statistics.median(t["s"]) for t in told]
        return {
            "wall": (walls[1] - walls[0]) / (many - few),
            "cpu": (told[1]["cpu_s"] - told[0]["cpu_s"]) / (many - few),
        }


def print_rows(title: str, times: dict[str, list[float]], bases: list[str]) -> None:
    """One line a way, with ratios: how many times faster than each base it is."""
    bases = [base for base in bases if base in times]
    heads = {"peer after": "raptor", "peer threads": "raptor 8", "merged": "one run", "batch": "Batcher"}
    print(f"\n{title}")
    print(f"  {'':<42}{'ms':>10}" + "".join(f"{'x ' + heads[base]:>12}" for base in bases))
    for way in LABELS:
        if way in times:
            here = statistics.median(times[way])
            ratios = "".join(f"{statistics.median(times[base]) / here:>12.2f}" for base in bases)
            print(f"  {LABELS[way]:<42}{1e3 * here:>10.3f}{ratios}", flush=True)


def measure(bench: Bench) -> dict[str, Any]:
    """Measure one target, and print it."""
    options, where = bench.options, "the GPU" if bench.target == "cuda" else "the CPU"
    count, n, requests, request_n = options.count, options.n, options.requests, options.request_n
    versions = {name: bench.ask(name, "version") for name in bench.engines}
    for name in [name for name, version in versions.items() if version is None]:
        bench.engines.pop(name).close()
    labels = {"eagle": "eagle", "peer": "raptor-eagle"}
    print(f"\n== {where}: " + ", ".join(f"{labels[name]} {version}" for name, version in versions.items() if version))
    if "eagle" not in bench.engines:
        return {}
    cuda = bench.target == "cuda"
    names = [
        "batch",
        "batch read",
        *(["batch asyncio", "batch default", "batch numpy", "batch numpy read"] if cuda else []),
    ]
    times = bench.simulations(names)
    print_rows(f"{count:,} of {n:,} samples", times, ["peer after", "peer threads", "merged"])
    many = bench.in_turns(bench.batches(requests, request_n, names))
    print_rows(f"{requests:,} requests of {request_n:,} samples", many, ["batch"])
    cost = bench.per_request()
    if cost:
        wall, cpu = 1e6 * cost["wall"], 1e6 * cost["cpu"]
        print(f"\n  one more request costs {wall:.1f} us of wall, {cpu:.1f} us of the loop's CPU")
    if not cuda and "gather uvloop" in times and "merged" in times:
        ratio = statistics.median(times["gather uvloop"]) / statistics.median(times["merged"])
        print(f"  {count:,} x {n:,} awaited takes {ratio:.3f} of one run of all samples")
    return {"versions": versions, "simulations": times, "requests": many, "per_request": cost}


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", metavar="WHERE", help="a folder, or an interpreter, that has raptor-eagle")
    parser.add_argument("--target", choices=("both", "cuda", "host"), default="both")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    parser.add_argument("--count", type=int, default=64, help="simulations (default: 64)")
    parser.add_argument("--n", type=int, default=10_000, help="samples of each (default: 10,000)")
    parser.add_argument("--requests", type=int, default=1_024, help="small requests (default: 1,024)")
    parser.add_argument("--request-n", type=int, default=1_000, help="samples of each (default: 1,000)")
    parser.add_argument("--worker", choices=("eagle", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind = OurWorker if options.worker == "eagle" else Worker
        serve(lambda: kind(options.worker, options.target))
        return
    from eagle.kernels.device import unusable_reason

    figures: dict[str, Any] = {"missing": []}
    for target in ("cuda", "host") if options.target == "both" else (options.target,):
        reason = unusable_reason() if target == "cuda" else None
        if reason is not None:
            print(f"== the GPU: skipped, {reason}")
            continue
        bench = Bench(target, options)
        try:
            figures[target] = measure(bench)
        finally:
            bench.close()
        for missing in bench.missing:
            print(f"missing: {missing}")
        figures["missing"] += bench.missing
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
