"""Kernels of the Batcher's tests that no other test needs, and requests of the shared ones."""

from typing import Any

import hawk
import hawk.math as hm
import numpy as np
from hawk import Matrix, Mutable, Param, Scalar, Table, Terminated, Vector

import eagle


@hawk.kernel
def wave(x: Mutable[Scalar], k: Mutable[Scalar], last: Scalar, r: Param, terminated: Terminated):
    # A library call that vector lanes may round differently.
    x = hm.sin(x * r) + hm.exp(-x * x)
    k1 = k + 1.0
    k = k1
    terminated = k1 >= last


@hawk.kernel
def waiting(x: Mutable[Scalar], goal: Scalar, max_wait: Param, terminated: Terminated):
    # A parameter that is called like an option of Batcher.
    up = x + max_wait
    x = up
    terminated = up >= goal


@hawk.kernel
def stair(x: Mutable[Scalar], goal: Scalar, theta: Table["row":2], terminated: Terminated):  # noqa: F821
    up = x + theta[0] * theta[1]
    x = up
    terminated = up >= goal


@hawk.kernel
def tilt(m: Mutable[Matrix[2, 3]], k: Mutable[Scalar], last: Scalar, r: Param, terminated: Terminated):
    m = r * m
    k1 = k + 1.0
    k = k1
    terminated = k1 >= last


@hawk.kernel(steps=1)
def drift(v: Vector[3], k: Mutable[Scalar], last: Scalar, terminated: Terminated, p: Mutable[Vector[3]]):
    # p is written only: it may be left out.
    p = 2.0 * v
    k1 = k + 1.0
    k = k1
    terminated = k1 >= last


def climb_request(n: int = 5, top: float | None = None) -> dict[str, Any]:
    """Planes of `climb` without r; with r = 1 sample i ends at x = c = goal[i]."""
    goal = np.arange(1.0, n + 1.0) if top is None else np.full(n, float(top))
    return {"x": np.zeros(n), "c": np.zeros(n), "goal": goal}


def climbed(result: eagle.SimResult, planes: dict[str, Any]) -> bool:
    """Whether a finished `climb` request is right, and its planes are as they were."""
    goal = planes["goal"]
    return bool(
        result.done
        and result.status == "finished"
        and result.n == goal.size
        and np.array_equal(result.x, goal)
        and np.array_equal(result.c, goal)
        and np.array_equal(result.finished, np.ones(goal.shape, bool))
        and not planes["x"].any()
    )
