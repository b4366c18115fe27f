"""``python -m eagle bench``: a short benchmark card of this machine, with ratios to plain NumPy.

The full comparison with other engines is in benchmarks/; this card is for "is my installation as fast as it should
be", within half a minute.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

__all__ = ("bench",)

_REPEATS = 7
# Plain NumPy is too slow to wait for above this many sample-steps; its time is then scaled, and marked so.
_NUMPY_SAMPLES = 10_000


def bench(sizes: tuple[int, ...] = (1_000, 10_000, 100_000)) -> int:
    """Print the card on standard output and return the exit status: 1 where no kernel can be run.

    Args:
        sizes: Numbers of oscillators.
    """
    try:
        import eagle.sync
        from eagle import oscillators
    except ImportError as error:
        print(f"The card needs hawk ({error}); pip install 'eagle-aio[hawk]'")
        return 1
    from eagle.kernels.device import unusable_reason
    from eagle.kernels.team import core_count

    targets = ["host"] if unusable_reason() else ["host", "cuda"]
    print(f"eagle {eagle.__version__}: damped oscillators, RK4, each to its own stop step; {core_count()} cores")
    print(f"median of {_REPEATS} warm runs; NumPy is a masked loop, once")
    print()
    print(f"{'samples':>9} {'stop steps':>11} {'target':>6} {'time':>11} {'steps/s':>9} {'NumPy':>11} {'ratio':>8}")
    for n in sizes:
        for spread in (True, False):
            given = oscillators.planes(n, spread=spread)
            numpy_s, scaled = _numpy_seconds(given, oscillators.masked_numpy)
            for target in targets:
                seconds = _eagle_seconds(given, target)
                print(
                    f"{n:>9,} {'spread' if spread else 'uniform':>11} {target:>6} {seconds * 1e3:>8.2f} ms "
                    f"{given['nstop'].sum() / seconds:>9.2e} {'~' if scaled else ''}{numpy_s * 1e3:>8.1f} ms "
                    f"{numpy_s / seconds:>6.0f} x"
                )
    return 0


def _eagle_seconds(given: dict[str, np.ndarray], target: str) -> float:
    """Return the median time of a warm run."""
    import eagle.sync
    from eagle import oscillators

    fresh: dict[str, Any] = given
    if target == "cuda":
        from eagle.kernels.interop import to_cupy

        fresh = {name: to_cupy(plane) for name, plane in given.items()}
    planes = {name: plane.copy() for name, plane in fresh.items()}
    simulation = eagle.sync.simulation(
        oscillators.oscillate, **planes, dt=oscillators.DT, max_steps=oscillators.LONGEST
    )
    simulation.run()
    times = []
    for _ in range(_REPEATS):
        for name in ("x", "v", "k"):
            planes[name][...] = fresh[name]
        simulation.reset()
        start = time.perf_counter()
        simulation.run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _numpy_seconds(given: dict[str, np.ndarray], run: Callable[[dict[str, np.ndarray]], object]) -> tuple[float, bool]:
    """Return the time of the NumPy loop, and whether it was scaled up from the first samples."""
    n = given["x"].size
    few = {name: plane[:_NUMPY_SAMPLES] for name, plane in given.items()}
    start = time.perf_counter()
    run(few)
    return (time.perf_counter() - start) * max(n / _NUMPY_SAMPLES, 1.0), n > _NUMPY_SAMPLES
