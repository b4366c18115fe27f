"""Cases that users of such software ran into: cancelling, losing one's place, and loops that stand still."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import eagle
from tests.helpers import models
from tests.helpers.deadline import deadline
from tests.helpers.heartbeat import FREE_S, heartbeat

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


@pytest.mark.parametrize("kernel", [models.climb, models.climb_one, models.climb_listed])
@deadline
async def test_br_22_nothing_is_written_after_the_cancellation_has_left(kernel: Any) -> None:
    """BR-22: when the cancellation reaches the caller the old job is over, and its arrays may be used again."""
    for _ in range(5):
        planes = models.endless_planes(20_000)
        with anyio.move_on_after(0.01) as scope:
            await eagle.simulate(kernel, **planes, max_steps=10**9)
        assert scope.cancelled_caught
        left = planes["x"].copy()
        fresh = models.climb_planes(300)  # a new job meanwhile
        await eagle.simulate(kernel, **fresh, max_steps=1000)
        await anyio.sleep(0.01)
        assert np.array_equal(planes["x"], left)
        assert np.array_equal(planes["x"], planes["c"])


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})])
async def test_br_22_a_native_second_cancel_changes_nothing() -> None:
    """BR-22: one CancelledError, no hang, and the run is over when it leaves."""
    import asyncio

    planes = models.endless_planes(20_000)
    task = asyncio.ensure_future(eagle.simulate(models.climb, **planes, max_steps=10**9))
    while not planes["c"].any():
        await asyncio.sleep(0.001)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)
    left = planes["x"].copy()
    await asyncio.sleep(0.02)
    assert np.array_equal(planes["x"], left)
    assert np.array_equal(planes["x"], planes["c"])


@PLAIN
@deadline
async def test_br_23_cancelled_waiters_take_no_place_with_them() -> None:
    """BR-23: after any mix of cancels nobody holds a token, and the next call goes through."""
    limiter = anyio.CapacityLimiter(1)
    rng = random.Random(23)
    sims = [
        await eagle.simulation(models.climb, **models.climb_planes(50), max_steps=100, limiter=limiter)
        for _ in range(21)
    ]

    async def run(sim: Any, after: float) -> None:
        with anyio.move_on_after(after):
            await sim.run()

    for _ in range(60):
        async with anyio.create_task_group() as group:
            group.start_soon(sims[0].run)
            for sim in sims[1:]:
                group.start_soon(run, sim, rng.choice([0.0, rng.uniform(0.0, 0.005)]))
        assert limiter.statistics().borrowed_tokens == 0
        for sim in sims:
            sim.reset()
        assert (await sims[0].run()).report.steps >= 0


@PLAIN
@deadline
async def test_br_24_the_loop_lives_while_jobs_run() -> None:
    """BR-24: several long jobs at once, compiled steps, with planes that thin out."""
    rng = np.random.default_rng(24)
    worst = []
    for _ in range(3):  # the best of three: the machine is not ours alone
        async with heartbeat() as beats, anyio.create_task_group() as group:
            for kernel in (models.climb, models.climb_one, models.climb_four, models.climb_listed):
                planes = models.climb_planes(40_000)
                planes["goal"] = rng.integers(1, 2000, 40_000).astype(float)
                group.start_soon(partial(eagle.simulate, kernel, **planes, max_steps=5000))
        worst.append(beats.worst_s)
    assert min(worst) < FREE_S, worst


@PLAIN
@deadline
async def test_br_24_the_loop_lives_while_a_kernel_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-24: the first use compiles; that happens off the loop, too."""
    worst = []
    for attempt in range(2):
        monkeypatch.setenv("HAWK_CACHE_DIR", str(tmp_path / str(attempt)))
        async with heartbeat() as beats:
            began = time.perf_counter()
            result = await eagle.simulate(
                models.newton, x=np.full(3, 2.0), k=np.zeros(3), a=np.full(3, 2.0), max_steps=99
            )
            took = time.perf_counter() - began
        assert result.done
        assert beats.beats > 10, took
        worst.append(beats.worst_s)
        if worst[-1] < FREE_S:
            break
    assert min(worst) < FREE_S, worst
