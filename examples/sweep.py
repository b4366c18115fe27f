"""A thousand configurations of one model, overlapped: how hard may a ball in a dip be shaken before it gets out?

    python examples/sweep.py --plot sweep.png
    python examples/sweep.py --configurations 100 --starts 4096

The ball obeys x'' = -x + x**2 - 0.1 x' + force cos(omega t), lies in a dip that ends at x = 1, and has left for good
when it passes x = 1.5. A configuration is one pair (omega, force), run from the same few hundred starts for twelve
periods. A start that stays is not finished when its steps are used up: that is a result, not an error.
"""

import argparse
import math
import pathlib
import sys
import time
from collections.abc import Callable

import anyio
import numpy as np

import eagle

try:
    import hawk
    import hawk.math as hm
    from hawk import Mutable, Param, Scalar, Terminated
except ImportError as error:
    sys.exit(f'sweep.py writes its kernel with hawk ({error}); install it: pip install -e ".[hawk]"')

PERIODS = 12
STEPS_A_PERIOD = 60
OMEGAS = (0.6, 1.1)
FORCES = (0.02, 0.14)


@hawk.kernel
def shake(
    omega: Param,
    force: Param,
    dt: Param,
    terminated: Terminated,
    t: Mutable[Scalar],
    x: Mutable[Scalar],
    v: Mutable[Scalar],
) -> None:
    """One Runge-Kutta step of one ball."""
    h = 0.5 * dt
    push0 = force * hm.cos(omega * t)
    push1 = force * hm.cos(omega * (t + h))
    push2 = force * hm.cos(omega * (t + dt))
    x0 = x
    v0 = v
    a0 = x0 * x0 - x0 - 0.1 * v0 + push0
    x1 = x0 + h * v0
    v1 = v0 + h * a0
    a1 = x1 * x1 - x1 - 0.1 * v1 + push1
    x2 = x0 + h * v1
    v2 = v0 + h * a1
    a2 = x2 * x2 - x2 - 0.1 * v2 + push1
    x3 = x0 + dt * v2
    v3 = v0 + dt * a2
    a3 = x3 * x3 - x3 - 0.1 * v3 + push2
    x4 = x0 + dt / 6.0 * (v0 + 2.0 * v1 + 2.0 * v2 + v3)
    x = x4
    v = v0 + dt / 6.0 * (a0 + 2.0 * a1 + 2.0 * a2 + a3)
    t = t + dt
    terminated = x4 >= 1.5


def grid(configurations: int) -> tuple[np.ndarray, np.ndarray]:
    """Return frequencies and forces whose pairs are about so many configurations (1,000 are 40 by 25)."""
    columns = max(1, round(math.sqrt(configurations * 1.6)))
    return np.linspace(*OMEGAS, columns), np.linspace(*FORCES, max(1, configurations // columns))


def starts(n: int) -> dict[str, np.ndarray]:
    """Return the planes of n balls that start somewhere in the dip; every configuration gets copies of its own."""
    rng = np.random.default_rng(20261001)
    return {"t": np.zeros(n), "x": rng.uniform(-0.5, 0.8, n), "v": rng.uniform(-0.5, 0.5, n)}


def configuration(omega: float, force: float) -> dict[str, float]:
    """Return the shared numbers of one configuration, with the option that bounds its run."""
    return {
        "omega": omega,
        "force": force,
        "dt": 2.0 * math.pi / omega / STEPS_A_PERIOD,
        "max_steps": PERIODS * STEPS_A_PERIOD,
    }


def share_inside(result: eagle.SimResult) -> float:
    return 1.0 - result.report.finished / result.n


class Bar:
    """A progress bar over configurations, redrawn on a terminal; a log gets ten lines."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.began = time.perf_counter()
        self.redrawn = sys.stderr.isatty()

    def advance(self) -> None:
        self.done += 1
        if not self.redrawn and self.done % max(1, self.total // 10) and self.done < self.total:
            return
        left = (self.total - self.done) * (time.perf_counter() - self.began) / self.done
        filled = 30 * self.done // self.total
        line = f"[{'#' * filled}{'.' * (30 - filled)}] {self.done:,} of {self.total:,} configurations, ETA {left:.1f} s"
        end = "\n" if not self.redrawn or self.done == self.total else ""
        print(f"\r{line}" if self.redrawn else line, end=end, file=sys.stderr, flush=True)


async def sweep(
    omegas: np.ndarray, forces: np.ndarray, start: dict[str, np.ndarray], advance: Callable[[], None]
) -> np.ndarray:
    """Run every configuration, all of them overlapped; return the shares inside, shape (forces, omegas).

    How many run at a time is eagle's choice (one a core; 64 on a GPU); `limiter=` of simulate would say otherwise. The
    answers are those of running alone, bit for bit.
    """
    inside = np.zeros((forces.size, omegas.size))

    async def one(row: int, column: int) -> None:
        planes = {name: plane.copy() for name, plane in start.items()}
        shared = configuration(float(omegas[column]), float(forces[row]))
        inside[row, column] = share_inside(await eagle.simulate(shake, **planes, **shared))
        advance()

    async with anyio.create_task_group() as tasks:
        for row in range(forces.size):
            for column in range(omegas.size):
                tasks.start_soon(one, row, column)
    return inside


def print_summary(omegas: np.ndarray, forces: np.ndarray, inside: np.ndarray, seconds: float) -> None:
    row, column = np.unravel_index(np.argmin(inside), inside.shape)
    safe = forces[(inside >= 0.5).all(axis=1)]
    print(f"\n  {inside.size:,} configurations in {seconds:.2f} s, {inside.size / seconds:,.0f} a second")
    print(f"  most get out at force {forces[row]:.3f}, frequency {omegas[column]:.2f}: {inside[row, column]:.0%} stay")
    if safe.size:
        print(f"  up to force {safe.max():.3f} at least half of the balls stay, whatever the frequency")
    print()


def plot(omegas: np.ndarray, forces: np.ndarray, inside: np.ndarray, path: pathlib.Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8.6, 5.6), layout="constrained")
    panel = figure.subplots()
    mesh = panel.pcolormesh(omegas, forces, inside, cmap="cividis", vmin=0.0, vmax=1.0, shading="gouraud")
    if min(inside.shape) > 1:
        lines = panel.contour(omegas, forces, inside, levels=[0.25, 0.5, 0.75], colors="white", linewidths=1.2)
        panel.clabel(lines, fmt=lambda level: f"{100 * level:.0f} %", fontsize=11)
    bar = figure.colorbar(mesh, ax=panel, format=PercentFormatter(1.0), pad=0.02)
    bar.set_label("balls that stay in the dip", fontsize=12)
    bar.outline.set_visible(False)
    panel.set_xlabel("driving frequency (the dip's own is 1)", fontsize=12)
    panel.set_ylabel("driving force (dimensionless)", fontsize=12)
    panel.set_title(f"Shaken for {PERIODS} periods: who stays?", fontsize=15, loc="left", pad=12)
    panel.tick_params(labelsize=11)
    bar.ax.tick_params(labelsize=11)
    figure.savefig(path, dpi=150)


def options_of(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--configurations", type=int, default=1_000, help="about so many (default: 1,000)")
    parser.add_argument("--starts", type=int, default=256, help="balls for each configuration (default: 256)")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png", help="draw the map into this file")
    options = parser.parse_args()
    for name in ("configurations", "starts"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; give at least 1")
    if options.plot is not None:
        try:
            import matplotlib  # noqa: F401 - asked for now: nobody wants to hear of it after the run
        except ImportError:
            sys.exit('--plot draws with matplotlib; install it: pip install -e ".[plot]"')
    return options


def report(omegas: np.ndarray, forces: np.ndarray, inside: np.ndarray, began: float, path: pathlib.Path | None) -> None:
    print_summary(omegas, forces, inside, time.perf_counter() - began)
    if path is not None:
        plot(omegas, forces, inside, path)
        print(f"  drawn into {path}")


def main() -> None:
    options = options_of(__doc__.partition("\n")[0])
    omegas, forces = grid(options.configurations)
    began = time.perf_counter()
    try:
        bar = Bar(omegas.size * forces.size)
        inside = anyio.run(sweep, omegas, forces, starts(options.starts), bar.advance)
    except* eagle.BackendUnavailable as errors:
        sys.exit(f"sweep.py cannot run here: {errors.exceptions[0]}")
    report(omegas, forces, inside, began, options.plot)


if __name__ == "__main__":
    main()
