"""A million damped oscillators, each integrated until it has reached its own stop step.

    python examples/oscillators.py
    python examples/oscillators.py --n 200_000 --plot oscillators.png
    python examples/oscillators.py --gpu

Every oscillator obeys x'' = -omega**2 x - 2 zeta omega x' and is advanced by the classical Runge-Kutta method with
dt = 0.01 s. Stop steps run from 2 to 1000, most of them early: after half a simulated second more than half of the
samples are finished, and eagle spends no more time on them.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import AsyncIterator

import anyio
import numpy as np

import eagle

try:
    import hawk
    from hawk import Mutable, Param, Scalar, Terminated
except ImportError as error:
    sys.exit(f'oscillators.py writes its kernel with hawk ({error}); install it: pip install -e ".[hawk]"')

DT = 0.01  # seconds
LONGEST = 1000  # steps
SEED = 20261001


@hawk.kernel
def oscillate(
    omega: Scalar,
    zeta: Scalar,
    nstop: Scalar,
    dt: Param,
    terminated: Terminated,
    x: Mutable[Scalar],
    v: Mutable[Scalar],
    k: Mutable[Scalar],
) -> None:
    """One step of one sample; assigning `terminated` is how a sample finishes."""
    w = omega * omega
    c = 2.0 * zeta * omega
    x0 = x
    v0 = v
    a0 = 0.0 - w * x0 - c * v0
    v1 = v0 + 0.5 * dt * a0
    a1 = 0.0 - w * (x0 + 0.5 * dt * v0) - c * v1
    v2 = v0 + 0.5 * dt * a1
    a2 = 0.0 - w * (x0 + 0.5 * dt * v1) - c * v2
    v3 = v0 + dt * a2
    a3 = 0.0 - w * (x0 + dt * v2) - c * v3
    x = x0 + dt / 6.0 * (v0 + 2.0 * v1 + 2.0 * v2 + v3)
    v = v0 + dt / 6.0 * (a0 + 2.0 * a1 + 2.0 * a2 + a3)
    k1 = k + 1.0
    k = k1
    terminated = k1 >= nstop


def oscillators(n: int, longest: int = LONGEST) -> dict[str, np.ndarray]:
    """Return the planes of n oscillators: one float64 value per sample each, the same ones at every call.

    Args:
        n: Oscillators.
        longest: No stop step is later than this.
    """
    rng = np.random.default_rng(SEED)
    return {
        "omega": rng.uniform(1.0, 3.0, n),
        "zeta": rng.uniform(0.0, 0.2, n),
        "x": rng.uniform(-1.0, 1.0, n),
        "v": rng.uniform(-1.0, 1.0, n),
        "k": np.zeros(n),
        "nstop": np.minimum(np.floor(np.exp(rng.uniform(0.0, np.log(longest), n))) + 1.0, longest),
    }


def closed_form(given: dict[str, np.ndarray]) -> np.ndarray:
    """Return where each oscillator should be at its stop step."""
    t, w, z = given["nstop"] * DT, given["omega"], given["zeta"]
    damped = w * np.sqrt(1.0 - z * z)
    swing = given["x"] * np.cos(damped * t) + (given["v"] + z * w * given["x"]) / damped * np.sin(damped * t)
    return np.exp(-z * w * t) * swing


async def follow(run: AsyncIterator[eagle.Progress]) -> None:
    """Keep one line on the terminal up to date while the simulation runs; write lines into a log."""
    redrawn = sys.stderr.isatty()
    async for p in run:
        share = 100.0 * p.finished / max(p.n, 1)
        eta = f"{p.eta_s:.1f} s" if np.isfinite(p.eta_s) else "?"
        line = f"{p.finished:>11,} of {p.n:,} samples finished ({share:3.0f} %), {p.steps:,} steps, ETA {eta}"
        print(f"\r{line:<78}" if redrawn else line, end="" if redrawn else "\n", file=sys.stderr, flush=True)
    if redrawn:
        print(file=sys.stderr)


async def ask_for_patience() -> None:
    """Say what takes so long, when it does: the event loop is free while a kernel is compiled."""
    await anyio.sleep(1.0)
    print("compiling the kernel, this once ...", file=sys.stderr)


async def run(n: int, gpu: bool) -> tuple[dict[str, np.ndarray], eagle.SimResult, float]:
    """Simulate n oscillators; return the planes they started from, the result, and the seconds spent on building."""
    given = oscillators(n)
    # A result is the caller's own arrays, written in place: the start values go in as copies.
    planes = {name: eagle.to_cupy(plane) if gpu else plane.copy() for name, plane in given.items()}
    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_for_patience)
        sim = await eagle.simulation(oscillate, **planes, dt=DT, max_steps=LONGEST)
        tasks.cancel_scope.cancel()
    built_s = time.perf_counter() - began
    async with anyio.create_task_group() as tasks:
        # Asked for here, it is about the run below; asked for in a task that comes too late, it is about the next one.
        tasks.start_soon(follow, sim.progress(interval=0.1 if sys.stderr.isatty() else 1.0))
        result = await sim.run()
    return given, result, built_s


def on_host(array: object) -> np.ndarray:
    """Return a NumPy array; one of the GPU is copied."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def print_summary(given: dict[str, np.ndarray], result: eagle.SimResult, built_s: float) -> None:
    taken = on_host(result.k)
    total = int(taken.sum())
    wrong = float(np.abs(on_host(result.x) - closed_form(given)).max(initial=0.0))
    rows = [
        ("samples finished", f"{result.report.finished:,} of {result.n:,}"),
        ("steps of a sample", f"median {np.median(taken):.0f}, longest {taken.max():.0f}" if result.n else "-"),
        ("steps in all", f"{total:,}"),
        ("building the kernel", f"{built_s:.3f} s (compiled once, then cached)"),
        ("running", f"{result.wall_s:.3f} s"),
        ("speed", f"{total / result.wall_s / 1e6:,.1f} million steps a second"),
        ("largest error", f"{wrong:.1e} against the closed form"),
    ]
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"  {name:<{width}}   {value}")
    print()


def plot(taken: np.ndarray, path: pathlib.Path) -> None:
    """Draw the stop steps and how the batch thins out; `taken` holds each sample's steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    blue, orange, grey = "#1f5fa8", "#e07b1f", "#4a525c"
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=11, colors=grey)
        panel.grid(axis="y", color="#e3e6ea")
        panel.set_axisbelow(True)

    width = 25
    edges = np.arange(0, LONGEST + 1, width)
    left.hist(taken, bins=edges + 0.5, color=blue, edgecolor="white", lw=0.8)
    expected = taken.size * np.diff(np.log(np.maximum(edges, 1))) / np.log(LONGEST)
    left.plot(edges[:-1] + width / 2, expected, color=orange, lw=2.2, label="expected: uniform in the logarithm")
    left.legend(frameon=False, fontsize=12, labelcolor=grey)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    left.set_xlim(0, LONGEST)
    left.set_xlabel("stop step", fontsize=12)
    left.set_ylabel(f"samples per {width} steps", fontsize=12)
    left.set_title(f"Where {taken.size:,} oscillators stop", fontsize=14, loc="left", pad=12)

    steps = np.arange(LONGEST + 1)
    live = 1.0 - np.cumsum(np.bincount(taken.astype(int), minlength=LONGEST + 1)) / taken.size
    right.fill_between(steps * DT, 100.0 * live, color=blue, alpha=0.18, lw=0)
    right.plot(steps * DT, 100.0 * live, color=blue, lw=2.2)
    half = float(np.argmax(live <= 0.5)) * DT
    right.plot([half], [50.0], "o", color=blue, ms=7)
    right.annotate(f"half of them after {half:.2f} s", (half, 50.0), (half + 0.5, 56.0), fontsize=12, color=grey)
    right.set_xlim(0.0, LONGEST * DT)
    right.set_ylim(0.0, 100.0)
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    right.set_xlabel("simulated time, seconds", fontsize=12)
    right.set_ylabel("samples still running", fontsize=12)
    right.set_title("How the batch thins out", fontsize=14, loc="left", pad=12)

    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=1_000_000, help="oscillators (default: 1,000,000)")
    parser.add_argument("--gpu", action="store_true", help="run on the GPU instead of the CPU")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png", help="draw the stop steps into this file")
    options = parser.parse_args()
    if options.n < 1:
        parser.error(f"--n is {options.n}; give at least 1")
    if options.plot is not None:
        try:
            import matplotlib  # noqa: F401 - asked for now: nobody wants to hear of it after the run
        except ImportError:
            sys.exit('--plot draws with matplotlib; install it: pip install -e ".[plot]"')
        if not options.plot.parent.is_dir():
            parser.error(f"--plot is {options.plot}; there is no folder {options.plot.parent}")
    try:
        given, result, built_s = anyio.run(run, options.n, options.gpu)
    except* eagle.BackendUnavailable as errors:
        sys.exit(f"oscillators.py cannot run here: {errors.exceptions[0]}")
    print_summary(given, result, built_s)
    if options.plot is not None:
        plot(on_host(result.k), options.plot)
        print(f"  drawn into {options.plot}")


if __name__ == "__main__":
    main()
