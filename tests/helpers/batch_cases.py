"""Models of every kind that a Batcher takes, each with a maker of requests of n samples and what its requests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.helpers.batch_models import drift, stair, tilt, wave
from tests.helpers.models import (
    arrived,
    climb_four,
    climb_listed,
    climb_listed_auto,
    glide,
    logistic,
    move,
    numbered,
    square,
    tally,
)


def chaos(n: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([n, seed])
    return {"x": rng.uniform(0.1, 0.9, n), "k": np.zeros(n), "last": rng.integers(1, 300, n).astype(float)}


def flight(n: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([n, seed])
    planes = {"u": rng.normal(size=(3, n)), "end": rng.uniform(0.1, 3.0, n), "p": np.zeros((3, n)), "t": np.zeros(n)}
    return planes if seed % 2 else dict(reversed(planes.items()))


def boxes(n: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([n, seed])
    return {"m": rng.normal(size=(6, n)), "k": np.zeros(n), "last": rng.integers(1, 90, n).astype(float)}


def arrows(n: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([n, seed])
    planes = {"v": rng.normal(size=(3, n)), "k": np.zeros(n), "last": rng.integers(1, 9, n).astype(float)}
    return planes if seed % 2 else {**planes, "p": np.full((3, n), 7.0)}  # half of them leave p out


def heights(n: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([n, seed])
    return {"x": np.zeros(n), "c": np.zeros(n), "goal": rng.integers(1, 300, n).astype(float)}


def marches(n: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([n, seed])
    return {"x": np.zeros(n), "c": np.zeros(n), "last": rng.integers(1, 60, n).astype(float)}


def paths(n: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([n, seed])
    return {"x": np.zeros(n), "goal": rng.integers(1, 60, n).astype(float)}


def counted(n: int, seed: int) -> dict[str, Any]:
    return {**paths(n, seed), "rounds": np.zeros(n)}


CASES: dict[str, tuple[Any, Callable[[int, int], dict[str, Any]], dict[str, Any]]] = {
    "automatic": (logistic, chaos, {"r": 3.99}),
    "vector math": (wave, chaos, {"r": 1.7}),
    "vectors": (glide, flight, {"dt": 0.01}),
    "matrices": (tilt, boxes, {"r": 0.98}),
    "four steps a launch": (climb_four, heights, {"r": 1.0}),
    "active set": (climb_listed, heights, {"r": 1.0}),
    "automatic active set": (climb_listed_auto, heights, {"r": 1.0}),
    "table": (stair, paths, {"theta": np.array([0.5, 2.0])}),
    "write-only plane": (drift, arrows, {}),
    "sample numbers": (numbered, marches, {}),
    "several kernels": ([move, square, arrived], paths, {"r": 1.0}),
    "a kernel without a mask": ([move, tally, arrived], counted, {"r": 1.0}),
}
