"""Whole runs on the GPU: light and heavy steps, each sample to its own end, beside other engines and the hardware.

    python benchmarks/device.py --peer FOLDER       # with raptor-eagle installed there (pip install --target FOLDER)
    python benchmarks/device.py --quick             # fewer cells, no JAX and no CuPy
    python benchmarks/device.py --target host       # the same code over NumPy planes, to see that it works

Times are microseconds of wall: medians of 20 after a warm-up of 10. Engines have a process each and take turns, five
runs at a time. Outside the timed part the state is seeded and the device left idle.

- *eagle*: ``sim.run()`` of a built simulation, blocking; *asyncio*, *uvloop*: ``await sim.run()``.
- *kernel*: its launch in a graph of its own, launched and synchronised without the engine.
- *raptor*: raptor-eagle's ``sim.run()``. *JAX*: ``jit(vmap(while_loop))``, median of 5 after 2. *CuPy*: masked array
  operations, median of 2 after 1, left out where a run takes more than 2 s.
- *floor*: the largest of FP64 operations over the measured rate, bytes of the planes over the measured bandwidth, and
  the longest sample's steps times the latency of a step (one sample alone); *x floor* is eagle over it.

Below the table: what ``order=`` and ``reorder=`` give, all counted; device memory; what slices and watchers cost.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys
import time
from typing import Any

from processes import Failed, Process, peer, serve

RUNS, TURNS, WARM_UP = 20, 4, 10
SIZES = {"RK4": [1_000, 10_000, 100_000, 1_000_000], "orbit": [1_000, 10_000, 100_000]}
QUICK = {"RK4": [1_000, 10_000, 100_000, 1_000_000], "orbit": [10_000]}
ORDERED = {"RK4": [100_000, 1_000_000], "orbit": [10_000, 100_000]}
QUICK_ORDERED = {"RK4": [1_000_000], "orbit": []}
# Rows about the order of the samples: which kernel, and what simulation() gets.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "as given": ("KERNEL", {}),
    "order=steps": ("KERNEL", {"order": "steps"}),
    "order='learn'": ("KERNEL", {"order": "learn"}),
    "active set": ("LISTED", {}),
    "active set, reorder=0.5": ("LISTED", {"reorder": 0.5}),
}
COLUMNS = {
    "blocking": "eagle",
    "asyncio": "asyncio",
    "uvloop": "uvloop",
    "kernel": "kernel",
    "peer": "raptor",
    "jax": "JAX",
    "array": "CuPy",
}


class Bench:
    """The worker processes, what they measured, and the reasons for what is missing.

    Args:
        engines: The processes by name.
        target: "cuda" or "host".
    """

    def __init__(self, engines: dict[str, Process], target: str) -> None:
        self.engines = engines
        self.target = target
        self.missing: list[str] = []
        self.rates: dict[str, Any] = {}
        self.latency: dict[str, float] = {}

    def ask(self, engine: str, what: str, do: str, **given: Any) -> Any:
        """A worker's answer; None where there is no such worker, or where it failed: then the reason is noted."""
        process = self.engines.get(engine)
        if process is None:
            return None
        try:
            return process.ask(do, **given)
        except Failed as error:
            self.missing.append(f"{engine}, {what}, {do}: {error}")
            return None

    # ---- one cell ------------------------------------------------------------------------------------------------

    def cell(self, case: str, n: int, spread: bool) -> dict[str, Any]:
        """Every engine's times of one cell."""
        what = f"{case} {n:,} {'spread' if spread else 'uniform'}"
        given = {"case": case, "n": n, "spread": spread}
        contenders = [
            (engine, kind) for engine in ("eagle", "peer") for kind in self.ask(engine, what, "prepare", **given) or ()
        ]
        times = self.in_turns(what, contenders)
        checks = {engine: self.ask(engine, what, "check") for engine in ("eagle", "peer")}
        for engine in ("eagle", "peer"):
            self.ask(engine, what, "forget")
        for rival in ("jax", "array"):
            taken = self.ask(rival, what, "run", **given)
            if taken:
                times[rival] = taken
        medians = {column: statistics.median(taken) for column, taken in times.items() if taken}
        return {**given, "s": medians, "runs": times, "checks": checks, "floor": self.floor(case, checks["eagle"])}

    def in_turns(self, what: str, contenders: list[tuple[str, str]]) -> dict[str, list[float]]:
        """The contenders' times by column, a few runs of each in turn; a column that failed is left out."""
        times: dict[str, list[float]] = {}
        failed: set[str] = set()
        for turn in range(TURNS):
            for engine, kind in contenders if turn % 2 == 0 else reversed(contenders):  # nobody always comes first
                column = "peer" if engine == "peer" else kind
                if column in failed:
                    continue
                warm_up = 1 if turn else WARM_UP
                taken = self.ask(engine, what, "round", kind=kind, warm_up=warm_up, repeat=RUNS // TURNS)
                if taken is None:
                    failed.add(column)
                else:
                    times.setdefault(column, []).extend(taken)
        return {column: taken for column, taken in times.items() if column not in failed}

    def floor(self, case: str, check: dict[str, Any] | None) -> dict[str, Any] | None:
        """What no run of this cell can be faster than."""
        if check is None or case not in self.latency or not self.rates:
            return None
        from floors import floor
        from rivals import operations
        from workers import case_of

        flop = operations(case_of(case)) * check["sum"]
        seconds, which, each = floor(
            self.rates, flop=flop, moved=check["moved"], longest=check["longest"], step_s=self.latency[case]
        )
        return {"s": seconds, "which": which, "each": each}

    # ---- the parts below the table -------------------------------------------------------------------------------

    def order_rows(self, case: str, n: int) -> list[dict[str, Any]]:
        """Blocking runs with and without an order of the samples."""
        rows = []
        for name, (kernel, options) in VARIANTS.items():
            what = f"{case} {n:,} {name}"
            kinds = self.ask(
                "eagle",
                what,
                "prepare",
                case=case,
                n=n,
                spread=True,
                kernel=kernel,
                options=options,
                kinds=["blocking"],
            )
            few = kernel == "LISTED"  # a loop of launches takes a hundred times as long
            warm_up, repeat = (2, 5) if few else (WARM_UP, RUNS)
            times = kinds and self.ask("eagle", what, "round", kind="blocking", warm_up=warm_up, repeat=repeat)
            if times and self.ask("eagle", what, "check") is not None:
                rows.append({"case": case, "n": n, "way": name, "s": statistics.median(times)})
        self.ask("eagle", "order", "forget")
        return rows


# ---- printing --------------------------------------------------------------------------------------------------------


def print_head(columns: list[str], target: str) -> None:
    names = {**COLUMNS, "array": "CuPy" if target == "cuda" else "NumPy"}
    print(f"{'case':<6}{'samples':>10} {'steps':>8}", end="")
    print("".join(f"{names[column]:>11}" for column in columns), end="")
    print(f"{'/raptor':>9}{'/JAX':>8}{'/kernel':>9}{'await +':>9}{'floor':>10} {'':<8}{'x floor':>8}  shape")


def microseconds(seconds: float | None, width: int) -> str:
    if seconds is None:
        return f"{'-':>{width}}"
    return f"{1e6 * seconds:>{width},.{1 if seconds < 0.1 else 0}f}"


def print_cell(cell: dict[str, Any], columns: list[str]) -> None:
    s, floor = cell["s"], cell["floor"]
    ours = s.get("blocking")

    def over(column: str, width: int, digits: int = 2) -> str:
        ready = ours is not None and column in s
        return f"{ours / s[column]:>{width}.{digits}f}" if ready else f"{'-':>{width}}"

    print(f"{cell['case']:<6}{cell['n']:>10,} {'spread' if cell['spread'] else 'uniform':>8}", end="")
    print("".join(microseconds(s.get(column), 11) for column in columns), end="")
    print(over("peer", 9), over("jax", 8, 4), over("kernel", 8), sep="", end="")
    print(f"{1e6 * (s['asyncio'] - ours):>9.1f}" if ours is not None and "asyncio" in s else f"{'-':>9}", end="")
    if floor is None or ours is None:
        print(f"{'-':>10} {'':<8}{'-':>8}", end="")
    else:
        print(f"{1e6 * floor['s']:>10,.1f} {floor['which']:<8}{ours / floor['s']:>8.2f}", end="")
    shape = (cell["checks"]["eagle"] or {}).get("shape")
    print("  " + (" ".join(str(part) for part in shape if part) if shape else ""), flush=True)


def print_order(rows: list[dict[str, Any]]) -> None:
    if rows:
        print(f"\n{'spread steps, in which order':<44}{'us':>12}{'ratio':>8}")
    base = None
    for row in rows:
        base = row["s"] if row["way"] == "as given" else base
        ratio = f"{row['s'] / base:>8.2f}" if base else f"{'-':>8}"
        print(f"{row['case']:<6}{row['n']:>10,}  {row['way']:<26}{1e6 * row['s']:>12,.1f}{ratio}", flush=True)


def print_memory(told: dict[str, float] | None, n: int) -> None:
    if told:
        print(
            f"\ndevice memory of a simulation of {n:,} that has run, its planes included, over the planes "
            f"({told['planes_bytes'] / 1e6:.0f} MB): used {told['pool_used']:.3f}, held by the pool "
            f"{told['pool_held']:.3f}, taken from the device {told['device']:.3f}"
        )


def print_watched(told: dict[str, Any] | None, n: int, steps: int) -> None:
    if not told:
        return
    s = {way: statistics.median(taken) for way, taken in told["times"].items()}
    print(f"\na long run: {n:,} samples of {steps:,} steps, awaited; {told['seen']:.0f} values seen by the watcher")
    bases = {"one launch": "one launch", "slices": "one launch", "slices, watched": "slices"}
    for (way, seconds), launches in zip(s.items(), told["launches"], strict=True):
        base = bases[way]
        paired = zip(told["times"][way], told["times"][base], strict=True)
        ratio = statistics.median(a / b for a, b in paired)
        print(f"  {way:<18}{1e3 * seconds:>10.3f} ms  {launches:>3} launches   {ratio:.4f} of '{base}'")


# ---- the command -----------------------------------------------------------------------------------------------------


def engines_of(options: argparse.Namespace) -> dict[str, Process]:
    """Start the processes; they load their engines all at once."""
    script, target = str(pathlib.Path(__file__).resolve()), ("--target", options.target)
    engines = {"eagle": Process(script, "eagle", *target)}
    if options.peer:
        engines["peer"] = peer(script, options.peer, *target)
    if not options.quick:
        if importlib.util.find_spec("jax") is not None:
            engines["jax"] = Process(script, "jax", *target)
        engines["array"] = Process(script, "array", *target)
    return engines


def started(bench: Bench, cases: list[str], listed: bool) -> None:
    """Wait until every engine is loaded and its kernels are built, and say what they are."""
    versions = {name: bench.ask(name, "start", "version") for name in bench.engines}
    for name in [name for name, version in versions.items() if version is None]:
        bench.engines.pop(name).close()
    built = {name: bench.engines[name] for name in ("eagle", "peer") if name in bench.engines}
    for name, process in built.items():  # side by side
        process.send("compile", cases=cases, listed=listed and name == "eagle")
    seconds = []
    for name, process in built.items():
        try:
            seconds.append(process.answer())
        except Failed as error:
            bench.missing.append(f"{name}, building the kernels: {error}")
            bench.engines.pop(name).close()
    bench.rates = bench.ask("eagle", "start", "machine") or {}
    if bench.rates:
        for case in cases:
            latency = bench.ask("eagle", case, "step_latency", case=case)
            if latency is not None:
                bench.latency[case] = latency
    labels = {"eagle": "eagle", "peer": "raptor-eagle", "jax": "JAX", "array": "arrays"}
    print(", ".join(f"{labels[name]} {version}" for name, version in versions.items() if version), end="; ")
    print(f"kernels built or found in {max(seconds, default=0.0):.0f} s")
    if bench.rates:
        steps = ", ".join(f"{case} {1e9 * latency:.1f} ns a step" for case, latency in bench.latency.items())
        rates = bench.rates
        print(
            f"{rates['name']}: {rates['flops'] / 1e12:.1f} TFLOP/s of FP64, {rates['bytes_per_s'] / 1e12:.2f} TB/s, "
            f"an empty graph {1e6 * rates['empty_graph_s']:.1f} us; latency: {steps}"
        )


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Measure and print everything."""
    sizes, ordered = (QUICK, QUICK_ORDERED) if options.quick else (SIZES, ORDERED)
    if options.n:
        sizes = ordered = dict.fromkeys(SIZES, options.n)
    cases = options.cases
    columns = [
        column
        for column in COLUMNS
        if column in ("blocking", "asyncio", "uvloop")
        or column in bench.engines
        or (column == "kernel" and bench.target == "cuda")
    ]
    print_head(columns, bench.target)
    cells = []
    for case in cases:
        for n in sizes[case]:
            for spread in (True, False):
                cells.append(bench.cell(case, n, spread))
                print_cell(cells[-1], columns)
    order = [row for case in cases for n in ordered[case] for row in bench.order_rows(case, n)]
    print_order(order)
    memory = watched = None
    if bench.target == "cuda":
        memory = bench.ask("eagle", "memory", "memory", n=options.long_n)
        print_memory(memory, options.long_n)
    if bench.target == "cuda" or options.n:
        repeat = 5 if options.quick else 10
        watched = bench.ask("eagle", "watched", "watched", n=options.long_n, steps=options.long_steps, repeat=repeat)
        print_watched(watched, options.long_n, options.long_steps)
    return {"cells": cells, "order": order, "memory": memory, "watched": watched}


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", metavar="WHERE", help="a folder, or an interpreter, that has raptor-eagle")
    parser.add_argument("--quick", action="store_true", help="fewer cells, no JAX and no CuPy")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    parser.add_argument("--target", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--cases", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--n", type=int, nargs="+", help="other numbers of samples than the usual ones")
    parser.add_argument("--long-n", type=int, default=1_000_000, help=argparse.SUPPRESS)
    parser.add_argument("--long-steps", type=int, default=20_000, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=("eagle", "peer", "jax", "array"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        from workers import worker

        serve(lambda: worker(options.worker, options.target))
        return
    if options.target == "cuda":
        from eagle.kernels.device import unusable_reason

        reason = unusable_reason()
        if reason is not None:
            raise SystemExit(f"nothing was measured: {reason}. With --target host the same runs over NumPy planes")
    bench = Bench(engines_of(options), options.target)
    try:
        started(bench, options.cases, listed=True)
        figures = measure(bench, options)
    finally:
        for process in bench.engines.values():
            process.close()
    for reason in bench.missing:
        print(f"missing: {reason}")
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    if options.json:
        figures |= {"rates": bench.rates, "step_s": bench.latency, "missing": bench.missing}
        pathlib.Path(options.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if any("building" in reason or ", start" in reason for reason in bench.missing):
        sys.exit(1)


if __name__ == "__main__":
    main()
