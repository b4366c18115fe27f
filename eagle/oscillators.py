"""The case that the self-test and the benchmark card run: damped oscillators, RK4, each to its own stop step.

It holds a hawk kernel, so it is loaded only where a command asks for it, never by ``import eagle``.
"""

import hawk
import numpy as np
from hawk import Mutable, Param, Scalar, Terminated

DT = 0.01
LONGEST = 1000


@hawk.kernel  # type: ignore[untyped-decorator]
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
    """One RK4 step of x'' = -omega**2 x - 2 zeta omega x'; a sample is finished when its step count reaches nstop."""
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
    terminated = k1 >= nstop  # noqa: F841 - assigning it is how a kernel finishes a sample


def planes(n: int, *, spread: bool = True, seed: int = 20261001) -> dict[str, np.ndarray]:
    """Return the input planes of n oscillators, each of shape (n,), float64.

    Args:
        n: Oscillators.
        spread: Stop steps from 1 to 1000, log-uniform; otherwise 1000 for all.
        seed: Of NumPy's default generator.
    """
    rng = np.random.default_rng(seed)
    made = {
        "omega": rng.uniform(1.0, 3.0, n),
        "zeta": rng.uniform(0.0, 0.2, n),
        "x": rng.uniform(-1.0, 1.0, n),
        "v": rng.uniform(-1.0, 1.0, n),
        "k": np.zeros(n),
    }
    stops = np.floor(np.exp(rng.uniform(0.0, np.log(LONGEST), n))) + 1.0 if spread else np.full(n, float(LONGEST))
    made["nstop"] = np.minimum(stops, LONGEST)
    return made


def exact(given: dict[str, np.ndarray]) -> np.ndarray:
    """Return the closed-form position of every oscillator at its stop step; RK4 is within 1e-7 of it here."""
    t, w, z = given["nstop"] * DT, given["omega"], given["zeta"]
    damped = w * np.sqrt(1.0 - z * z)
    swing = given["x"] * np.cos(damped * t) + (given["v"] + z * w * given["x"]) / damped * np.sin(damped * t)
    return np.asarray(np.exp(-z * w * t) * swing)


def masked_numpy(given: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, v) at the stop steps by plain NumPy, a step at a time over the samples still running."""
    x, v = given["x"].copy(), given["v"].copy()
    live = np.arange(x.size)
    w, c, stop = given["omega"] ** 2, 2.0 * given["zeta"] * given["omega"], given["nstop"]
    for step in range(1, int(stop.max(initial=0.0)) + 1):
        x0, v0, w_live, c_live = x[live], v[live], w[live], c[live]
        a0 = -w_live * x0 - c_live * v0
        v1 = v0 + 0.5 * DT * a0
        a1 = -w_live * (x0 + 0.5 * DT * v0) - c_live * v1
        v2 = v0 + 0.5 * DT * a1
        a2 = -w_live * (x0 + 0.5 * DT * v1) - c_live * v2
        v3 = v0 + DT * a2
        a3 = -w_live * (x0 + DT * v2) - c_live * v3
        x[live] = x0 + DT / 6.0 * (v0 + 2.0 * v1 + 2.0 * v2 + v3)
        v[live] = v0 + DT / 6.0 * (a0 + 2.0 * a1 + 2.0 * a2 + a3)
        live = live[stop[live] > step]
    return x, v
