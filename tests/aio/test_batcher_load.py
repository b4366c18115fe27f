"""Batcher under load: when batches start, who is answered when, cancels and deadlines, sizes, a random stress."""

from __future__ import annotations

import gc
import math
import random
import threading
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import eagle
from tests.helpers.batch_client import Client, R
from tests.helpers.batch_models import climb_request, climbed
from tests.helpers.heartbeat import FREE_S, heartbeat
from tests.helpers.models import arrived, climb, logistic, move, tally

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

from contextlib import asynccontextmanager

LIMIT_S = 20.0
ENDLESS = 1e12  # a goal that no test waits for


def climbing(**options: Any) -> eagle.Batcher:
    return eagle.Batcher(climb, **{"max_steps": 10**12, "max_wait": 0.005, "r": 1.0, **options})


@asynccontextmanager
async def beside(batcher: eagle.Batcher, *requests: dict[str, Any], started: bool = True) -> AsyncIterator[list[Any]]:
    """Requests that are pending while the block runs and cancelled at its end; the answered ones are in the list.

    The first request of a Batcher has its kernel loaded on a worker thread, so `started` waits for a run in flight.
    """
    answered: list[Any] = []
    idle = eagle.aio.statistics().in_flight

    async def ask(planes: dict[str, Any]) -> None:
        answered.append(await batcher.simulate(**planes))

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            for planes in requests:
                group.start_soon(ask, planes)
            await anyio.wait_all_tasks_blocked()
            while started and eagle.aio.statistics().in_flight == idle:
                await anyio.sleep(0.001)
            yield answered
            group.cancel_scope.cancel()


async def at_rest() -> None:
    """Wait until nothing of any batch runs any more."""
    with anyio.fail_after(LIMIT_S):
        while (now := eagle.aio.statistics()).in_flight or now.queued:
            await anyio.sleep(0.001)


# ---- when a batch starts ---------------------------------------------------------------------------------------------


async def test_requests_of_one_turn_are_one_batch() -> None:
    async with climbing(max_wait=math.inf) as batcher:
        async with anyio.create_task_group() as group:
            results: list[Any] = []

            async def ask(n: int) -> None:
                results.append(await batcher.simulate(**climb_request(n)))

            for n in (3, 5, 7, 1):
                group.start_soon(ask, n)
    assert [result.report.n for result in results] == [16] * 4


async def test_an_idle_batcher_does_not_wait() -> None:
    with anyio.fail_after(LIMIT_S):
        async with climbing(max_wait=math.inf) as batcher:
            for _ in range(5):
                assert climbed(await batcher.simulate(**climb_request()), climb_request())


async def test_while_a_batch_runs_the_next_one_fills() -> None:
    async with climbing(max_wait=math.inf) as batcher:
        results: list[Any] = []

        async def ask() -> None:
            results.append(await batcher.simulate(**climb_request(4)))

        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as group:
                async with beside(batcher, climb_request(2, ENDLESS)):
                    for _ in range(3):
                        group.start_soon(ask)
                        await anyio.wait_all_tasks_blocked()
                    assert results == []
    assert [result.report.n for result in results] == [12] * 3
    assert results[0].report is results[2].report


@pytest.mark.parametrize("max_wait", [0, 0.01])
async def test_after_max_wait_a_second_batch_starts_beside(max_wait: float) -> None:
    async with climbing(max_wait=max_wait) as batcher, beside(batcher, climb_request(2, ENDLESS)) as answered:
        result = await batcher.simulate(**climb_request(4))
        assert climbed(result, climb_request(4))
        assert result.report.n == 4
        assert answered == []


async def test_a_full_batch_starts_beside_at_once() -> None:
    async with (
        climbing(max_wait=math.inf, max_samples=8) as batcher,
        beside(batcher, climb_request(2, ENDLESS), climb_request(6, ENDLESS)) as answered,
    ):
        results: list[Any] = []

        async def ask() -> None:
            results.append(await batcher.simulate(**climb_request(4)))

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(ask)
        assert [result.report.n for result in results] == [8] * 4
        assert answered == []


# ---- answered before the others --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 2000])
async def test_finished_requests_are_answered_while_the_others_go_on(n: int) -> None:
    planes = climb_request(n)
    async with climbing(max_wait=math.inf) as batcher:
        async with beside(batcher, climb_request(2, ENDLESS), planes, climb_request(700, ENDLESS), planes) as answered:
            while len(answered) < 2:
                await anyio.sleep(0.001)
            assert all(climbed(result, planes) for result in answered)
            report = answered[1].report
            assert (report.n, report.finished, report.done) == (2 * n + 702, 2 * n, False)
            assert report.steps >= n


async def test_a_batch_that_freed_half_of_its_samples_lets_others_start() -> None:
    async with climbing(max_wait=math.inf) as batcher:
        async with beside(batcher, climb_request(10), climb_request(2, ENDLESS)) as answered:
            result = await batcher.simulate(**climb_request(4))
            assert climbed(result, climb_request(4))
            assert [r.n for r in answered] == [10]


async def test_a_kernel_without_a_mask_runs_each_request_alone() -> None:
    # A merged batch would go on counting the rounds of a request whose samples have finished.
    planes = {"x": np.zeros(3), "goal": np.array([1.0, 2.0, 3.0]), "rounds": np.zeros(3)}
    slow = {"x": np.zeros(2), "goal": np.full(2, ENDLESS), "rounds": np.zeros(2)}
    async with eagle.Batcher([move, tally, arrived], max_steps=10**9, r=1.0) as batcher:
        async with beside(batcher, slow):
            result = await batcher.simulate(**planes)
    np.testing.assert_array_equal(result.rounds, [3.0] * 3)
    assert result.report.n == 3


# ---- cancels and deadlines -------------------------------------------------------------------------------------------


async def test_each_request_has_a_deadline_of_its_own(silence: list[object]) -> None:
    late, fine = [], []

    async def slow(batcher: eagle.Batcher) -> None:
        with anyio.move_on_after(0.05) as scope:
            await batcher.simulate(**climb_request(2, ENDLESS))
        late.append(scope.cancelled_caught)

    async def quick(batcher: eagle.Batcher) -> None:
        fine.append(climbed(await batcher.simulate(**climb_request()), climb_request()))

    with anyio.fail_after(LIMIT_S):
        async with climbing() as batcher, anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(slow, batcher)
                group.start_soon(quick, batcher)
    assert (late, fine) == ([True] * 4, [True] * 4)


async def test_a_batch_that_nobody_waits_for_is_stopped(silence: list[object]) -> None:
    async with climbing(max_wait=math.inf) as batcher:
        for _ in range(3):
            async with beside(batcher, climb_request(2, ENDLESS), climb_request(900, ENDLESS), climb_request(2)):
                pass
            await at_rest()
        assert climbed(await batcher.simulate(**climb_request()), climb_request())


async def test_a_request_that_is_cancelled_before_it_starts_is_dropped(silence: list[object]) -> None:
    async with climbing(max_wait=math.inf) as batcher:
        async with beside(batcher, climb_request(2, ENDLESS)):
            before = eagle.aio.statistics()
            async with beside(batcher, *[climb_request(n) for n in range(1, 40)], started=False):
                assert eagle.aio.statistics().queued == before.queued + 39
            after = eagle.aio.statistics()
            assert (after.queued, after.cancelled) == (before.queued, before.cancelled + 39)
        assert climbed(await batcher.simulate(**climb_request()), climb_request())


async def test_cancelled_at_any_moment_nothing_is_lost(silence: list[object]) -> None:
    """A busy service whose clients hang up while they wait: afterwards a plain call ends at once."""
    rng = random.Random(23)
    threads = 0
    async with climbing(max_wait=0.001, max_samples=40) as batcher:
        for turn in range(300):

            async def hang_up(after: float, n: int) -> None:
                with anyio.move_on_after(after):
                    await batcher.simulate(**climb_request(n, rng.choice([3.0, 4e6])))

            with anyio.fail_after(LIMIT_S):
                async with anyio.create_task_group() as group:
                    for _ in range(20):
                        group.start_soon(hang_up, rng.choice([0.0, rng.uniform(0.0, 0.01)]), rng.randrange(1, 9))
            with anyio.fail_after(1.0 if turn else LIMIT_S):
                assert climbed(await batcher.simulate(**climb_request()), climb_request())
            threads = threads or threading.active_count()
    await at_rest()
    assert threading.active_count() <= threads + 2  # idle threads of pools come and go


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 65, 200, 0])
@pytest.mark.parametrize("among", [0, 50])
async def test_any_size_is_served_and_holds_nobody_up(n: int, among: int) -> None:
    small: list[bool] = []
    large: list[Any] = []

    async def ask(batcher: eagle.Batcher, i: int) -> None:
        if i == among // 2:
            large.append(await batcher.simulate(**climb_request(n)))
        else:
            with anyio.fail_after(LIMIT_S):
                planes = climb_request(1, 1 + i)
                small.append(climbed(await batcher.simulate(**planes), planes))

    with anyio.fail_after(LIMIT_S):
        async with climbing(max_samples=64, max_wait=0.01) as batcher, anyio.create_task_group() as group:
            for i in range(among + 1):
                group.start_soon(ask, batcher, i)
    assert small == [True] * among
    assert climbed(large[0], climb_request(n))
    assert large[0].report.n <= max(n, 64)
    if n > 64:
        assert large[0].report.n == n  # alone


async def test_small_requests_are_not_stuck_behind_a_large_endless_one() -> None:
    async with climbing(max_samples=64, max_wait=math.inf) as batcher:
        async with beside(batcher, climb_request(65, ENDLESS), climb_request(200, ENDLESS)):
            for n in (1, 33, 64):
                assert climbed(await batcher.simulate(**climb_request(n)), climb_request(n))


@pytest.mark.parametrize("sizes", [(33, 33), (33, 31), (64, 1), (1, 63, 1)])
async def test_what_does_not_fit_goes_into_the_next_batch(sizes: tuple[int, ...]) -> None:
    results: dict[int, Any] = {}

    async def ask(batcher: eagle.Batcher, i: int) -> None:
        results[i] = await batcher.simulate(**climb_request(sizes[i]))

    with anyio.fail_after(LIMIT_S):
        async with climbing(max_samples=64, max_wait=0.01) as batcher, anyio.create_task_group() as group:
            for i in range(len(sizes)):
                group.start_soon(ask, batcher, i)
    assert all(climbed(results[i], climb_request(n)) for i, n in enumerate(sizes))
    assert max(result.report.n for result in results.values()) <= 64


async def test_one_sample_a_batch() -> None:
    async with climbing(max_samples=1) as batcher, anyio.create_task_group() as group:
        done: list[bool] = []

        async def ask(n: int) -> None:
            done.append(climbed(await batcher.simulate(**climb_request(n)), climb_request(n)))

        for n in (1, 2, 1, 1):
            group.start_soon(ask, n)
    assert done == [True] * 4


async def test_ten_thousand_requests_at_once() -> None:
    right = 0

    async def ask(batcher: eagle.Batcher, i: int) -> None:
        nonlocal right
        planes = climb_request(1 + i % 3, 1 + i % 50)
        result = await batcher.simulate(**planes)
        right += climbed(result, planes)

    with anyio.fail_after(LIMIT_S):
        async with climbing(max_samples=4096) as batcher, anyio.create_task_group() as group:
            for i in range(10_000):
                group.start_soon(ask, batcher, i)
    assert right == 10_000


async def test_a_small_result_does_not_keep_its_batch() -> None:
    async with climbing() as batcher:
        results: list[Any] = []

        async def ask(n: int) -> None:
            results.append(await batcher.simulate(**climb_request(n)))

        async with anyio.create_task_group() as group:
            group.start_soon(ask, 2)
            group.start_soon(ask, 3000)
    small = min(results, key=lambda result: result.n)
    assert (small.x.base, small.c.base, small.finished.base) == (None, None, None)
    gc.collect()
    holders = [o for o in gc.get_objects() if type(o).__name__ == "Request"]
    assert len(holders) == 1  # the large one's, whose planes were not looked at


async def test_the_loop_lives_while_batches_run() -> None:
    async with climbing(max_steps=200_000_000) as batcher:
        await batcher.simulate(**climb_request())
        with anyio.fail_after(LIMIT_S):
            async with heartbeat() as beats, anyio.create_task_group() as group:
                for n in (2, 300, 2, 20_000):
                    group.start_soon(lambda n=n: batcher.simulate(**climb_request(n, 40_000_000 // n)))
    assert beats.beats > 5
    assert beats.worst_s < 10 * FREE_S


# ---- stress ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("max_samples", "max_wait"), [(128, 0.0), (128, 0.002), (4096, math.inf)])
async def test_random_clients(seed: int, max_samples: int, max_wait: float, silence: list[object]) -> None:
    before = eagle.aio.statistics()
    tally: dict[str, int] = {}
    with anyio.fail_after(LIMIT_S):
        async with eagle.Batcher(
            logistic, max_steps=10**12, max_samples=max_samples, max_wait=max_wait, r=R
        ) as batcher:
            async with anyio.create_task_group() as group:
                for i in range(12):
                    group.start_soon(Client(batcher, 1000 * seed + i, tally).run, 12)
    assert sum(tally.values()) == 144
    assert tally["answered"] > 50
    after = eagle.aio.statistics()
    assert (after.in_flight, after.queued, after.failed) == (before.in_flight, before.queued, before.failed)


async def test_large_batches_are_copied_off_the_loop(monkeypatch: pytest.MonkeyPatch, silence: list[object]) -> None:
    monkeypatch.setattr("eagle.aio.batch._INLINE_BYTES", 0)
    tally: dict[str, int] = {}
    with anyio.fail_after(LIMIT_S):
        async with eagle.Batcher(logistic, max_steps=10**12, max_samples=128, max_wait=0.002, r=R) as batcher:
            async with anyio.create_task_group() as group:
                for i in range(12):
                    group.start_soon(Client(batcher, 77_000 + i, tally).run, 6)
    assert tally["answered"] > 20
