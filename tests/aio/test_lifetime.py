"""A simulation that is dropped gives its arrays back at once, without waiting for the garbage collector."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest

import eagle
import eagle.sync
from tests.helpers.models import climb, climb_listed


@pytest.fixture
def no_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def planes(n: int = 20_000) -> dict[str, Any]:
    return {"x": np.zeros(n), "c": np.zeros(n), "goal": np.arange(1.0, n + 1.0) % 50 + 1.0, "r": 1.0}


def gone(reference: weakref.ref[Any]) -> bool:
    """Whether the object is gone; a team thread may hold the job for a moment after it has settled."""
    until = time.monotonic() + 5
    while reference() is not None and time.monotonic() < until:
        time.sleep(0.001)
    return reference() is None


@pytest.mark.parametrize("model", [climb, climb_listed], ids=lambda kernel: str(kernel.name))
def test_a_blocking_simulation(model: Any, no_collector: Any) -> None:
    sim = eagle.sync.simulation(model, **planes(), max_steps=100)
    assert sim.run().done
    loop = weakref.ref(sim.runner.bound)
    del sim
    assert gone(loop)


async def test_an_awaited_simulation(no_collector: Any) -> None:
    sim = await eagle.simulation(climb, **planes(), max_steps=100)
    result = await sim.run()
    assert result.done
    loop = weakref.ref(sim.runner.bound)
    del sim, result
    assert gone(loop)
