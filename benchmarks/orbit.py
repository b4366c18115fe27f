"""The heavy case of the benchmarks: two-body orbits by an embedded Runge-Kutta 7(8) with adaptive steps.

The method is the RK7(8) pair of E. Fehlberg, "Classical fifth-, sixth-, seventh-, and eighth-order Runge-Kutta formulas
with stepsize control", NASA Technical Report R-287 (1968), table X: 13 stages, the solution of order 8 carried on, the
difference to that of order 7 as the error of a step. tests/benchmarks/test_orbit.py checks the table by the orders that
it must have.

Units: gravitational parameter 1, semi-major axis 1, so an orbit takes 2 pi. A sample starts at its pericentre and goes
round a whole number of times; there its start is the exact answer. One step of the kernel is one attempted step of the
integrator: a rejected one leaves the state alone and shrinks the step. Eccentric orbits take more steps.

`attempt` is the arithmetic, written once for every engine: hawk traces it, NumPy, CuPy and JAX call it on arrays.
"""

from __future__ import annotations

import math
from typing import Any

import hawk
import hawk.math as hm
import numpy as np
from hawk import Mutable, Param, Scalar, Terminated
from hawk.ext import Guard, Kind

NAME = "orbit"
STATE = ("x", "y", "vx", "vy", "t", "h", "k")
TOLERANCE = 1e-10  # of one step: the length of the error of (x, y, vx, vy)
NUMBERS = {"tol": TOLERANCE}
MAX_STEPS = 20_000
LONGEST = 40  # orbits
FIRST_STEP = 0.05
_SAFETY, _SHRINK, _GROW = 0.9, 0.2, 5.0

# Row i: the weights of the slopes before it, in stage i's argument.
STAGES = (
    (),
    (2 / 27,),
    (1 / 36, 1 / 12),
    (1 / 24, 0, 1 / 8),
    (5 / 12, 0, -25 / 16, 25 / 16),
    (1 / 20, 0, 0, 1 / 4, 1 / 5),
    (-25 / 108, 0, 0, 125 / 108, -65 / 27, 125 / 54),
    (31 / 300, 0, 0, 0, 61 / 225, -2 / 9, 13 / 900),
    (2, 0, 0, -53 / 6, 704 / 45, -107 / 9, 67 / 90, 3),
    (-91 / 108, 0, 0, 23 / 108, -976 / 135, 311 / 54, -19 / 60, 17 / 6, -1 / 12),
    (2383 / 4100, 0, 0, -341 / 164, 4496 / 1025, -301 / 82, 2133 / 4100, 45 / 82, 45 / 164, 18 / 41),
    (3 / 205, 0, 0, 0, 0, -6 / 41, -3 / 205, -3 / 41, 3 / 41, 6 / 41, 0),
    (-1777 / 4100, 0, 0, -341 / 164, 4496 / 1025, -289 / 82, 2193 / 4100, 51 / 82, 33 / 164, 12 / 41, 0, 1),
)
ORDER_8 = (0, 0, 0, 0, 0, 34 / 105, 9 / 35, 9 / 35, 9 / 280, 9 / 280, 0, 41 / 840, 41 / 840)
ORDER_7 = (41 / 840, 0, 0, 0, 0, 34 / 105, 9 / 35, 9 / 35, 9 / 280, 9 / 280, 41 / 840, 0, 0)
_ERROR = tuple(a - b for a, b in zip(ORDER_7, ORDER_8, strict=True))


def _weighted(weights: tuple[float, ...], slopes: list[Any]) -> Any:
    terms = [w * slope for w, slope in zip(weights, slopes, strict=False) if w]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def step(m: Any, state: tuple[Any, ...], s: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """One step of size s from state (x, y, vx, vy).

    Args:
        m: What knows ``sqrt``: hawk.math, NumPy, CuPy or jax.numpy.
        state: One number, array or traced value per component.
        s: The step size, likewise.

    Returns:
        The state after it, of order 8, and its error, both by component.
    """
    slopes: list[list[Any]] = [[], [], [], []]
    for row in STAGES:
        x, y, vx, vy = (
            start + s * _weighted(row, own) if row else start for start, own in zip(state, slopes, strict=True)
        )
        r2 = x * x + y * y
        pull = 1.0 / (r2 * m.sqrt(r2))
        for own, slope in zip(slopes, (vx, vy, -(pull * x), -(pull * y)), strict=True):
            own.append(slope)
    after = tuple(start + s * _weighted(ORDER_8, own) for start, own in zip(state, slopes, strict=True))
    error = tuple(s * _weighted(_ERROR, own) for own in slopes)
    return after, error


def attempt(m: Any, x: Any, y: Any, vx: Any, vy: Any, t: Any, h: Any, k: Any, *, t_end: Any, tol: Any) -> Any:
    """One attempted step: (x, y, vx, vy, t, h, k) after it, and whether the sample has finished.

    Args:
        m: What knows ``sqrt``, ``where``, ``minimum`` and ``maximum``.
        x: Position.
        y: Position.
        vx: Velocity.
        vy: Velocity.
        t: Time.
        h: The step size to try; the last step is cut to end at ``t_end``.
        k: Attempted steps so far.
        t_end: Where the sample ends.
        tol: Largest error of an accepted step.
    """
    left = t_end - t
    last = h >= left
    s = m.where(last, left, h)
    after, error = step(m, (x, y, vx, vy), s)
    e = [component / tol for component in error]
    q = e[0] * e[0] + e[1] * e[1] + e[2] * e[2] + e[3] * e[3]
    good = q <= 1.0
    root = m.sqrt(m.sqrt(m.sqrt(m.sqrt(q))))  # the error goes with the 8th power of the step, and q is its square
    h1 = s * m.minimum(_GROW, m.maximum(_SHRINK, _SAFETY / m.maximum(root, 1e-3)))
    moved = [m.where(good, new, old) for new, old in zip(after, (x, y, vx, vy), strict=True)]
    t1 = m.where(good, m.where(last, t_end, t + s), t)
    return (*moved, t1, h1, k + 1.0), t1 >= t_end


def orbit(
    t_end: Scalar,
    tol: Param,
    terminated: Terminated,
    x: Mutable[Scalar],
    y: Mutable[Scalar],
    vx: Mutable[Scalar],
    vy: Mutable[Scalar],
    t: Mutable[Scalar],
    h: Mutable[Scalar],
    k: Mutable[Scalar],
) -> None:
    """One attempted step of an orbit, which is finished at t_end."""
    new, over = attempt(hm, x, y, vx, vy, t, h, k, t_end=t_end, tol=tol)
    x = new[0]
    y = new[1]
    vx = new[2]
    vy = new[3]
    t = new[4]
    h = new[5]
    k = new[6]
    terminated = over  # assigning it is how a kernel finishes a sample


KERNEL = hawk.kernel(orbit)
LISTED = hawk.kernel(orbit, steps=1, kind=Kind("orbit_listed", guard=Guard(active_set=True)))


def planes(n: int, *, spread: bool = True, seed: int = 20261001) -> dict[str, np.ndarray]:
    """Input planes of n orbits, each (n,) float64, with eccentricities from 0 to 0.7.

    Args:
        n: Orbits.
        spread: Every sample goes round 1 to 40 times, log-uniform; otherwise all go round 20 times.
        seed: Of NumPy's default generator.
    """
    rng = np.random.default_rng(seed)
    e, turned = rng.uniform(0.0, 0.7, n), rng.uniform(0.0, 2.0 * np.pi, n)
    rounds = np.floor(np.exp(rng.uniform(0.0, math.log(LONGEST), n))) + 1.0
    rounds = np.minimum(rounds, LONGEST) if spread else np.full(n, LONGEST / 2.0)
    nearest, fastest = 1.0 - e, np.sqrt((1.0 + e) / (1.0 - e))
    return {
        "x": nearest * np.cos(turned),
        "y": nearest * np.sin(turned),
        "vx": -fastest * np.sin(turned),
        "vy": fastest * np.cos(turned),
        "t": np.zeros(n),
        "h": np.full(n, FIRST_STEP),
        "k": np.zeros(n),
        "t_end": 2.0 * np.pi * rounds,
    }


def advance(m: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """`attempt` on arrays by name: the new state, and "terminated"."""
    new, over = attempt(m, *(arrays[name] for name in STATE), t_end=arrays["t_end"], tol=TOLERANCE)
    return {**dict(zip(STATE, new, strict=True)), "terminated": over}


def energy(arrays: dict[str, Any]) -> np.ndarray:
    """Energy of each sample on the host; exactly -0.5 for every orbit of this case."""
    kinetic = 0.5 * (arrays["vx"] ** 2 + arrays["vy"] ** 2)
    return np.asarray(kinetic - 1.0 / np.hypot(arrays["x"], arrays["y"]))


def error(given: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float:
    """Largest distance of a sample from its exact place at the end; infinite where one has not ended."""
    if not np.array_equal(after["t"], given["t_end"]):
        return math.inf
    return float(np.hypot(after["x"] - given["x"], after["y"] - given["y"]).max(initial=0.0))


LARGEST_ERROR = 1e-6


def steps_of(after: dict[str, np.ndarray]) -> np.ndarray:
    """Steps that every sample took, from its planes after a run."""
    return after["k"]


def masked(m: Any, given: dict[str, Any], *, most: int = MAX_STEPS) -> dict[str, Any]:
    """Every sample to its end, by array operations over the samples that still run."""
    arrays = {name: plane.copy() for name, plane in given.items()}
    live = m.arange(arrays["x"].size)
    for _ in range(most):
        if live.size == 0:
            break
        new = advance(m, {name: plane[live] for name, plane in arrays.items()})
        for name in STATE:
            arrays[name][live] = new[name]
        live = live[~new["terminated"]]
    return arrays
