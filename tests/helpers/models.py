"""The hawk kernels that the tests share, so that each is compiled once, with their closed forms.

Numbers are small and dyadic where it matters: then a closed form is exact and bits can be compared.
"""

from typing import Any

import hawk
import hawk.math as hm
import numpy as np
from hawk import (
    Grid,
    Index,
    Int32,
    Kernel,
    Matrix,
    Mutable,
    Param,
    Scalar,
    Sorted,
    Staged,
    Table,
    Terminated,
    Vector,
    Wide,
    WideOut,
)
from hawk.diff import vjp
from hawk.ext import Guard, Kind

LISTED = Kind("listed", guard=Guard(active_set=True))

# ---- kernels that run until done -------------------------------------------------------------------------------------


@hawk.kernel
def climb(x: Mutable[Scalar], c: Mutable[Scalar], goal: Scalar, r: Param, terminated: Terminated):
    up = x + r
    x = up
    c = c + 1.0
    terminated = up >= goal


@hawk.kernel(steps=1)
def climb_one(x: Mutable[Scalar], c: Mutable[Scalar], goal: Scalar, r: Param, terminated: Terminated):
    up = x + r
    x = up
    c = c + 1.0
    terminated = up >= goal


@hawk.kernel(steps=4)
def climb_four(x: Mutable[Scalar], c: Mutable[Scalar], goal: Scalar, r: Param, terminated: Terminated):
    up = x + r
    x = up
    c = c + 1.0
    terminated = up >= goal


@hawk.kernel(kind=LISTED, steps=1)
def climb_listed(x: Mutable[Scalar], c: Mutable[Scalar], goal: Scalar, r: Param, terminated: Terminated):
    up = x + r
    x = up
    c = c + 1.0
    terminated = up >= goal


@hawk.kernel(kind=LISTED)
def climb_listed_auto(x: Mutable[Scalar], c: Mutable[Scalar], goal: Scalar, r: Param, terminated: Terminated):
    up = x + r
    x = up
    c = c + 1.0
    terminated = up >= goal


@hawk.kernel
def logistic(x: Mutable[Scalar], k: Mutable[Scalar], last: Scalar, r: Param, terminated: Terminated):
    # Chaotic at r near 4: one different bit early on is a different result later.
    x = r * x * (1.0 - x)
    k1 = k + 1.0
    k = k1
    terminated = k1 >= last


@hawk.kernel
def glide(u: Vector[3], dt: Param, end: Scalar, terminated: Terminated, p: Mutable[Vector[3]], t: Mutable[Scalar]):
    p = p + dt * u
    t1 = t + dt
    t = t1
    terminated = t1 >= end


@hawk.kernel
def newton(x: Mutable[Scalar], k: Mutable[Scalar], a: Scalar, terminated: Terminated):
    x1 = 0.5 * (x + a / x)
    x = x1
    k = k + 1.0
    terminated = hm.abs(x1 * x1 - a) <= 1e-9 * a


@hawk.kernel
def double(x: Mutable[Scalar], c: Mutable[Scalar], terminated: Terminated):
    x1 = x + x
    x = x1
    c = c + 1.0
    terminated = x1 >= 1.0


@hawk.kernel
def looping(x: Mutable[Scalar], c: Mutable[Scalar], last: Scalar, terminated: Terminated):
    s = x
    for _ in range(20_000):
        s = 0.5 * s + 0.5
    x = s
    c1 = c + 1.0
    c = c1
    terminated = c1 >= last


@hawk.kernel
def numbered(x: Mutable[Scalar], c: Mutable[Scalar], last: Scalar, terminated: Terminated):
    x = x + hm.real(hm.sample_index())
    c1 = c + 1.0
    c = c1
    terminated = c1 >= last


@hawk.kernel(kind=LISTED, steps=1)
def numbered_listed(x: Mutable[Scalar], c: Mutable[Scalar], last: Scalar, terminated: Terminated):
    x = x + hm.real(hm.sample_index())
    c1 = c + 1.0
    c = c1
    terminated = c1 >= last


@hawk.kernel
def counted(x: Mutable[Scalar], c: Mutable[Scalar], last: Scalar, terminated: Terminated):
    x = x + hm.real(hm.n_samples())
    c1 = c + 1.0
    c = c1
    terminated = c1 >= last


@hawk.kernel(steps=1)
def drawing(x: Mutable[Scalar], c: Mutable[Scalar], last: Scalar, terminated: Terminated):
    x = x + hm.random_uniform(7, hm.index(c, 100_000))
    c1 = c + 1.0
    c = c1
    terminated = c1 >= last


# ---- kernels of one step: a move, a tally, a test --------------------------------------------------------------------


@hawk.kernel
def move(x: Mutable[Scalar], r: Param, terminated: Terminated):
    x = x + r


@hawk.kernel
def square(x: Scalar, terminated: Terminated, sq: Mutable[Scalar]):
    sq = x * x


@hawk.kernel
def arrived(x: Scalar, goal: Scalar, terminated: Terminated):
    terminated = x >= goal


@hawk.kernel
def tally(rounds: Mutable[Scalar]):
    rounds = rounds + 1.0


# ---- kernels that are called: every role of the binary interface -----------------------------------------------------


@hawk.kernel
def affine(x: Scalar, a: Param, b: Param) -> Scalar:
    return a * x + b


@hawk.kernel
def stretch(v: Vector[3], a: Param) -> Vector[3]:
    return a * v


@hawk.kernel
def turn(m: Matrix[2, 2], v: Vector[2], w: Mutable[Vector[2]]):
    w = m @ v


@hawk.kernel
def grow(m: Mutable[Matrix[2, 3]], a: Param):
    m = a * m


@hawk.kernel
def running_sum(x: Scalar, s: Mutable[Scalar]):
    s = s + x


@hawk.kernel
def count_up(x: Mutable[Int32], k: Param[Int32], y: Scalar, z: Mutable[Scalar]):
    x = x + k
    z = y * hm.real(k)


@hawk.kernel
def line(x: Scalar, theta: Table["row":2], y: Mutable[Scalar]):  # noqa: F821
    y = theta[0] * x + theta[1]


@hawk.kernel
def grid_value(x: Scalar, u: Table["row":2, "col":3]) -> Scalar:  # noqa: F821
    return x + u.at(row=1, col=2)


@hawk.kernel
def edge_sum(w: Wide[3], x: Scalar) -> Scalar:
    return x + w.at(edge=0, component=1)


@hawk.kernel
def spread(x: Scalar, o: WideOut[Scalar]):
    o = x


@hawk.kernel
def histogram(x: Scalar, k: Index, h: Mutable["bin":4]):
    hawk.scatter(h)[k] += x


@hawk.kernel
def pair(x: Scalar):
    return x + 1.0, 2.0 * x


@hawk.kernel
def named(x: Scalar):
    return {"up": x + 1.0, "twice": 2.0 * x}


@hawk.kernel
def gridded(lane: Grid["channel", "point":8], x: Scalar, y: Mutable[Scalar]):  # noqa: F821
    y = x + 100.0 * hm.real(lane.channel) + hm.real(lane.point)


@hawk.kernel
def filled(lane: Grid["channel":2, "point":8], x: Scalar, y: Mutable[Scalar]):  # noqa: F821
    y = x


@hawk.kernel
def differences(lane: Grid["pair"], x: Table["item":4], d: Mutable[Scalar]):  # noqa: F821
    i, j = hm.pair_index()
    d = x.at(i) - x.at(j)


@hawk.kernel
def branching(kind: Index, x: Scalar) -> Scalar:
    return hm.dispatch(kind, [x + 1.0, x * 2.0, x - 3.0], policy="auto")


@hawk.kernel
def segmented(kind: Index, x: Scalar) -> Scalar:
    return hm.dispatch(kind, [x + 1.0, x * 2.0, x - 3.0], policy="segmented")


@hawk.kernel
def segments(segment: Sorted[Index], x: Scalar, h: Mutable["bin":4]):
    hawk.scatter(h)[segment] += x


@hawk.kernel
def staged(feature: Staged[Vector[3], 5], k: Index, y: Mutable[Scalar]):
    y = feature.at(plane=1, sample=k)


@hawk.kernel(group=32)
def climb_grouped(x: Mutable[Scalar], c: Mutable[Scalar], goal: Scalar, r: Param, terminated: Terminated):
    up = x + r
    x = up
    c = c + 1.0
    terminated = up >= goal


@hawk.kernel(kind=LISTED, steps=1, group=32)
def climb_grouped_listed(x: Mutable[Scalar], c: Mutable[Scalar], goal: Scalar, r: Param, terminated: Terminated):
    up = x + r
    x = up
    c = c + 1.0
    terminated = up >= goal


@hawk.kernel
def total(x: Scalar):
    return hawk.sum(x)


@hawk.kernel
def total_vector(v: Vector[3]):
    return hawk.sum(v)


@hawk.kernel
def cubic(x: Scalar, a: Param, y: Mutable[Scalar]):
    y = a * x * x * x


# Derivatives: bar_y in; bar_x (and bar_a, or the shared bar_theta and bar_u) out.
cubic_vjp = Kernel("cubic_vjp", vjp(cubic))
line_vjp = Kernel("line_vjp", vjp(line))
grid_vjp = Kernel("grid_vjp", vjp(grid_value))
edge_vjp = Kernel("edge_vjp", vjp(edge_sum))


# ---- planes ----------------------------------------------------------------------------------------------------------


def climb_planes(n: int = 50, top: float | None = None) -> dict[str, Any]:
    """Planes of `climb`; with r = 1 sample i ends at x = c = goal[i]."""
    goal = np.arange(1.0, n + 1.0) if top is None else np.full(n, float(top))
    return {"x": np.zeros(n), "c": np.zeros(n), "goal": goal, "r": 1.0}


def endless_planes(n: int = 2000) -> dict[str, Any]:
    """Planes of `climb` whose samples never finish."""
    return climb_planes(n, top=np.inf)


def logistic_planes(seed: int, n: int = 97, longest: int = 400) -> dict[str, Any]:
    """Planes of `logistic`: sample i takes last[i] steps."""
    rng = np.random.default_rng(seed)
    last = rng.integers(1, longest, n).astype(float)
    return {"x": rng.uniform(0.1, 0.9, n), "k": np.zeros(n), "last": last, "r": 3.99}


def logistic_loop(x: np.ndarray, last: np.ndarray, r: float) -> np.ndarray:
    """`logistic` one NumPy step at a time; the same operations in the same order, so the same bits."""
    x, k = x.copy(), np.zeros(x.size)
    live = np.ones(x.size, bool)
    while live.any():
        x[live] = r * x[live] * (1.0 - x[live])
        k[live] += 1.0
        live &= k < last
    return x
