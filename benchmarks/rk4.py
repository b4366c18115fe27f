"""The light case of the benchmarks: damped oscillators by Runge-Kutta 4, each to its own stop step.

The kernel is that of eagle/oscillators.py, loaded from its file: a process that measures another engine must not import
our package. Beside it the same arithmetic for engines that work on arrays, and a kernel that walks an active set.
"""

from __future__ import annotations

import importlib.util
import math
import pathlib
import sys
from typing import Any

import hawk
import numpy as np
from hawk import Mutable, Param, Scalar, Terminated
from hawk.ext import Guard, Kind


def _load() -> Any:
    path = pathlib.Path(__file__).resolve().parents[1] / "eagle" / "oscillators.py"
    spec = importlib.util.spec_from_file_location("oscillators_case", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # hawk reads a kernel's source through it
    spec.loader.exec_module(module)
    return module


_case = _load()

NAME = "RK4"
KERNEL = _case.oscillate
STATE = ("x", "v", "k")
NUMBERS = {"dt": _case.DT}
MAX_STEPS = LONGEST = _case.LONGEST
LARGEST_ERROR = 1e-5
planes = _case.planes


def step(x: Any, v: Any, k: Any, *, omega: Any, zeta: Any, nstop: Any, dt: Any) -> tuple[Any, Any, Any, Any]:
    """One step: (x, v, k) after it, and whether the sample has finished. The arithmetic of the kernel."""
    w = omega * omega
    c = 2.0 * zeta * omega
    a0 = 0.0 - w * x - c * v
    v1 = v + 0.5 * dt * a0
    a1 = 0.0 - w * (x + 0.5 * dt * v) - c * v1
    v2 = v + 0.5 * dt * a1
    a2 = 0.0 - w * (x + 0.5 * dt * v1) - c * v2
    v3 = v + dt * a2
    a3 = 0.0 - w * (x + dt * v2) - c * v3
    k1 = k + 1.0
    return (
        x + dt / 6.0 * (v + 2.0 * v1 + 2.0 * v2 + v3),
        v + dt / 6.0 * (a0 + 2.0 * a1 + 2.0 * a2 + a3),
        k1,
        k1 >= nstop,
    )


@hawk.kernel(steps=1, kind=Kind("rk4_listed", guard=Guard(active_set=True)))
def oscillate_listed(
    omega: Scalar,
    zeta: Scalar,
    nstop: Scalar,
    dt: Param,
    terminated: Terminated,
    x: Mutable[Scalar],
    v: Mutable[Scalar],
    k: Mutable[Scalar],
) -> None:
    """The same step over the samples that still run."""
    new = step(x, v, k, omega=omega, zeta=zeta, nstop=nstop, dt=dt)
    x = new[0]
    v = new[1]
    k = new[2]
    terminated = new[3]  # assigning it is how a kernel finishes a sample


LISTED = oscillate_listed


def long_planes(n: int, steps: int) -> dict[str, np.ndarray]:
    """Input planes of n oscillators that all take so many steps."""
    return {**planes(n, spread=False), "nstop": np.full(n, float(steps))}


def advance(m: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """`step` on arrays by name: the new state, and "terminated"."""
    given = {name: arrays[name] for name in ("x", "v", "k", "omega", "zeta", "nstop")}
    x, v, k, over = step(**given, **NUMBERS)
    return {"x": x, "v": v, "k": k, "terminated": over}


def error(given: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float:
    """Largest distance of a position from the closed form; infinite where a sample took other than its stop steps."""
    if not np.array_equal(after["k"], given["nstop"]):
        return math.inf
    return float(np.abs(after["x"] - _case.exact(given)).max(initial=0.0))


def steps_of(after: dict[str, np.ndarray]) -> np.ndarray:
    """Steps that every sample took, from its planes after a run."""
    return after["k"]
