"""Whole runs on the CPU: RK4 oscillators, each to its own end, blocking and awaited, beside other engines.

    python benchmarks/host.py
    python benchmarks/host.py --peer /path/to/venv/bin/python     # with raptor-eagle installed there

Each engine has a process of its own (raptor-eagle is imported as ``eagle``, too), and the processes take turns: a
round of one, a round of the next. So whatever else the machine does meets all of them alike. A ratio is the median over
rounds of eagle's time by the other's in the same round; below 1.00 eagle is faster. The first rounds are dropped. On a
machine that others use, too, look at the ratio of the fastest rounds as well: engines suffer differently from company.

The kernel is the one of ``python -m eagle bench`` for both engines. Numba joins where it is installed; NumPy is a
masked loop, run once, and scaled from 10,000 samples where it would take too long (marked ~).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
WARM_UP = 2  # rounds
FEWEST, MOST = 5, 60  # rounds that count
BLOCK_S = 0.02  # short runs are repeated for so long within a round
NUMPY_SAMPLES = 10_000


def load_case() -> Any:
    """Load the kernel and its planes from the file, past the package: the peer's process must not import our eagle."""
    spec = importlib.util.spec_from_file_location("oscillators_case", ROOT / "eagle" / "oscillators.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ---- in the processes of the engines ---------------------------------------------------------------------------------


class Worker:
    """One engine; the parent calls its methods by name, a JSON line each."""

    def __init__(self, engine: str, threads: int | None) -> None:
        self.case = load_case()
        self.engine = engine
        self.threads = threads
        if engine == "eagle":
            import eagle
            import eagle.sync as blocking

            self.eagle, self.blocking, self.version = eagle, blocking, eagle.__version__
            self.loop = asyncio.Runner(loop_factory=_uvloop())
        else:
            import eagle as blocking

            self.blocking, self.version = blocking, importlib.metadata.version("raptor-eagle")
        self.sims: dict[str, Any] = {}

    def prepare(self, n: int, spread: bool) -> dict[str, Any]:
        """Build the simulations of one cell, over planes of their own."""
        self.given = self.case.planes(n, spread=spread)
        self.planes: dict[str, dict[str, np.ndarray]] = {}
        self.sims.clear()
        options = {"dt": self.case.DT, "max_steps": self.case.LONGEST}
        kinds = ("blocking", "awaited") if self.engine == "eagle" else ("blocking",)
        for kind in kinds:
            planes = self.planes[kind] = {name: plane.copy() for name, plane in self.given.items()}
            if kind == "awaited":
                sim = self.loop.run(self.eagle.simulation(self.case.oscillate, **planes, **options))
            else:
                sim = self.blocking.simulation(self.case.oscillate, **planes, **options)
            sim.runner.host_threads = self.threads
            self.sims[kind] = sim
        return {"kinds": kinds}

    def round(self, kind: str, repeat: int) -> dict[str, Any]:
        """Run the batch some times and return the median of the seconds."""
        return {"s": statistics.median(self._run(kind) for _ in range(repeat))}

    def _run(self, kind: str) -> float:
        sim, planes = self.sims[kind], self.planes[kind]
        for name in ("x", "v", "k"):
            planes[name][:] = self.given[name]
        sim.reset()
        return self.loop.run(_awaited(sim)) if kind == "awaited" else _blocked(sim)

    def check(self) -> dict[str, Any]:
        """Return the largest error of the last runs against the closed form."""
        exact = self.case.exact(self.given)
        return {"error": max(float(np.abs(planes["x"] - exact).max()) for planes in self.planes.values())}

    def one_sample(self, repeat: int) -> dict[str, Any]:
        """Return the median seconds of a warm ``simulate()`` of one sample, binding included."""
        times = []
        for _ in range(repeat):
            planes = self.case.planes(1)
            began = time.perf_counter()
            self.blocking.simulate(self.case.oscillate, **planes, dt=self.case.DT, max_steps=self.case.LONGEST)
            times.append(time.perf_counter() - began)
        return {"s": statistics.median(times[repeat // 5 :])}

    def memory(self) -> dict[str, Any]:
        """Return the memory that a run of the prepared cell adds at its peak, as a share of the planes."""
        with contextlib.suppress(OSError):
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts at what is in use now
            before = _status_bytes("VmRSS")
            self._run("blocking")
            added = max(_status_bytes("VmHWM") - before, 0)
            return {"share": added / sum(plane.nbytes for plane in self.given.values())}
        return {"share": None}


def _uvloop() -> Any:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def _blocked(sim: Any) -> float:
    began = time.perf_counter()
    sim.run()
    return time.perf_counter() - began


async def _awaited(sim: Any) -> float:
    began = time.perf_counter()
    await sim.run()
    return time.perf_counter() - began


def _status_bytes(field: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field}")


def serve(engine: str, threads: int | None) -> None:
    worker = Worker(engine, threads)
    print(json.dumps({"version": worker.version}), flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        print(json.dumps(getattr(worker, call.pop("do"))(**call)), flush=True)


# ---- in the parent ---------------------------------------------------------------------------------------------------


class Engine:
    """A worker process, from the outside."""

    def __init__(self, engine: str, python: str, path: str, threads: int | None) -> None:
        self.engine = engine
        self.python = python
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if path:
            self.environment["PYTHONPATH"] = path
        command = [python, __file__, "--worker", engine, *(["--threads", str(threads)] if threads else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment, cwd="/"
        )
        self.version = self._answer()["version"]

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.engine} ({self.python}) ended; what it said is above")
        return json.loads(line)

    def import_s(self) -> float:
        """Return the seconds that ``import eagle`` adds to ``import numpy``, in a fresh process."""
        code = "import numpy, time; t = time.perf_counter(); import eagle; print(time.perf_counter() - t)"
        ended = subprocess.run(
            [self.python, "-c", code], env=self.environment, cwd="/", capture_output=True, text=True, check=True
        )
        return float(ended.stdout)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def alternate(contenders: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """Let the contenders take turns, each a round at a time, for about so many seconds; return the rounds' times.

    Args:
        contenders: Callables by name, which take how often to repeat a run within a round and return seconds.
        seconds: Budget of the cell.
    """
    once = {name: max(run(1), 1e-6) for name, run in contenders.items()}
    repeat = {name: max(1, min(50, int(BLOCK_S / s))) for name, s in once.items()}
    a_round = sum(once[name] * repeat[name] for name in once)
    rounds = WARM_UP + max(FEWEST, min(MOST, int(seconds / a_round)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for at in range(rounds):
        for name in sorted(contenders, reverse=bool(at % 2)):  # nobody always comes first
            times[name].append(contenders[name](repeat[name]))
    return {name: taken[WARM_UP:] for name, taken in times.items()}


def contender(engine: Engine, kind: str) -> Any:
    return lambda repeat: engine.ask("round", kind=kind, repeat=repeat)["s"]


def paired(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def numpy_s(case: Any, given: dict[str, np.ndarray]) -> tuple[float, bool]:
    n = given["x"].size
    few = {name: plane[:NUMPY_SAMPLES] for name, plane in given.items()}
    began = time.perf_counter()
    case.masked_numpy(few)
    return (time.perf_counter() - began) * max(n / NUMPY_SAMPLES, 1.0), n > NUMPY_SAMPLES


def numba_runner(case: Any) -> Any:
    """Return a function that makes a contender of Numba's ``prange``, or None where Numba is not installed."""
    if importlib.util.find_spec("numba") is None:
        return None
    import numba

    dt = case.DT

    @numba.njit(parallel=True)
    def run(omega: Any, zeta: Any, nstop: Any, x: Any, v: Any, k: Any) -> None:
        for i in numba.prange(x.size):
            w, c, xi, vi, ki = omega[i] * omega[i], 2.0 * zeta[i] * omega[i], x[i], v[i], k[i]
            while ki < nstop[i]:
                a0 = -w * xi - c * vi
                v1 = vi + 0.5 * dt * a0
                a1 = -w * (xi + 0.5 * dt * vi) - c * v1
                v2 = vi + 0.5 * dt * a1
                a2 = -w * (xi + 0.5 * dt * v1) - c * v2
                v3 = vi + dt * a2
                a3 = -w * (xi + dt * v2) - c * v3
                xi += dt / 6.0 * (vi + 2.0 * v1 + 2.0 * v2 + v3)
                vi += dt / 6.0 * (a0 + 2.0 * a1 + 2.0 * a2 + a3)
                ki += 1.0
            x[i], v[i], k[i] = xi, vi, ki

    def contender(given: dict[str, np.ndarray]) -> Any:
        planes = {name: plane.copy() for name, plane in given.items()}

        def once() -> float:
            for name in ("x", "v", "k"):
                planes[name][:] = given[name]
            began = time.perf_counter()
            run(**planes)
            return time.perf_counter() - began

        once()  # compiles
        return lambda repeat: statistics.median(once() for _ in range(repeat))

    return contender


def print_runs(engines: dict[str, Engine], sizes: list[int], seconds: float) -> None:
    case, numba = load_case(), numba_runner(load_case())
    columns = [("eagle", "eagle", "blocking"), ("awaited", "eagle", "awaited")]
    columns += [("raptor-eagle", "peer", "blocking")] * ("peer" in engines)
    names = [column[0] for column in columns] + ["Numba"] * bool(numba)
    pairs = [("eagle", name) for name in names[2:]] + [("awaited", name) for name in ("eagle", *names[2:3])]
    print("times in ms, then ratios: of the medians, in brackets of the fastest rounds\n")
    heads = [f"{name:>14}" for name in (*names, "NumPy")] + [f"{f'{a} / {b}':>24}" for a, b in pairs]
    print(f"{'samples':>9} {'steps':>8}" + "".join(heads))
    for n in sizes:
        for spread in (True, False):
            for engine in engines.values():
                engine.ask("prepare", n=n, spread=spread)
            contenders = {name: contender(engines[engine], kind) for name, engine, kind in columns}
            given = case.planes(n, spread=spread)
            if numba:
                contenders["Numba"] = numba(given)
            times = alternate(contenders, seconds)
            check(engines, n)
            plain, scaled = numpy_s(case, given)
            cells = [f"{1e3 * statistics.median(times[name]):>14.3f}" for name in names]
            cells.append(f"{'~' if scaled else ''}{1e3 * plain:.0f}".rjust(14))
            for a, b in pairs:
                ratio = f"{paired(times[a], times[b]):.2f} ({min(times[a]) / min(times[b]):.2f})"
                cells.append(f"{ratio:>24}")
            print(f"{n:>9,} {'spread' if spread else 'uniform':>8}" + "".join(cells), flush=True)


def check(engines: dict[str, Engine], n: int) -> None:
    """Stop when an engine's last answers are wrong: a fast wrong answer is no figure."""
    for engine in engines.values():
        error = engine.ask("check")["error"]
        if not error < 1e-5:
            raise SystemExit(f"{engine.engine} is wrong by {error} at n = {n}")


def print_small(engines: dict[str, Engine], seconds: float, memory_n: int) -> None:
    print()

    def one_sample(engine: Engine) -> Any:
        return lambda repeat: engine.ask("one_sample", repeat=5 * repeat)["s"]

    one = alternate({name: one_sample(engine) for name, engine in engines.items()}, seconds)
    imports = {name: [engine.import_s() for _ in range(5)] for name, engine in engines.items()}
    rows = [
        ("simulate() of one sample, warm, ms", {name: 1e3 * statistics.median(s) for name, s in one.items()}),
        ("import eagle over import numpy, ms", {name: 1e3 * statistics.median(s) for name, s in imports.items()}),
    ]
    shares = {}
    for name, engine in engines.items():
        engine.ask("prepare", n=memory_n, spread=True)
        engine.ask("round", kind="blocking", repeat=1)
        shares[name] = engine.ask("memory")["share"]
    if None not in shares.values():
        rows.append((f"memory added by a run of {memory_n:,}, share of the planes", shares))
    label = {"eagle": "eagle", "peer": "raptor-eagle"}
    for text, values in rows:
        shown = "   ".join(f"{label[name]} {value:.3f}" for name, value in values.items())
        ratio = f"   ratio {values['eagle'] / values['peer']:.2f}" if values.get("peer") else ""
        print(f"{text:<58} {shown}{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has raptor-eagle")
    parser.add_argument("--peer-path", metavar="PATH", default="", help="PYTHONPATH for it (default: none)")
    parser.add_argument("--n", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--seconds", type=float, default=8.0, help="for each cell (default: 8)")
    parser.add_argument("--threads", type=int, help="threads of a run, for both engines (default: each decides)")
    parser.add_argument("--worker", choices=("eagle", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.worker, options.threads)
        return
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    engines = {"eagle": Engine("eagle", sys.executable, path, options.threads)}
    if options.peer:
        engines["peer"] = Engine("peer", options.peer, options.peer_path, options.threads)
    beside = f", raptor-eagle {engines['peer'].version}" if options.peer else ""
    threads = options.threads or "as many as each engine takes"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"eagle {engines['eagle'].version}{beside}; {cores} cores; threads: {threads}")
    try:
        print_runs(engines, options.n, options.seconds)
        print_small(engines, options.seconds / 2, max(options.n))
    finally:
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
