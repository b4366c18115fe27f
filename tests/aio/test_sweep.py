"""Looking from the event loop itself: who is asked, when it gives up, and that the loop lives meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from eagle.aio import sweep
from eagle.aio.sweep import Sweeper

LIMIT_S = 20.0
LONG_S = 10.0


class Work:
    """Ends after so many looks, or never."""

    def __init__(self, looks: float = float("inf")) -> None:
        self.left = looks
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        self.left -= 1
        return self.left < 0


@pytest.fixture(
    params=[("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def finished(*looks: Any) -> list[bool]:
    with anyio.fail_after(LIMIT_S):
        return list(await asyncio.gather(*looks))


async def test_it_waits_for_the_end_or_gives_up() -> None:
    sweeper = Sweeper()
    ends, never = Work(50), Work()
    assert await finished(sweeper.look(ends, "a", LONG_S), sweeper.look(never, "b", 0.0)) == [True, False]
    assert ends.asked == 51


async def test_only_the_oldest_of_a_lane_is_asked() -> None:
    sweeper = Sweeper()
    first = Work(20)
    asked_in_time = []

    def second() -> bool:
        asked_in_time.append(first.left < 0)
        return True

    assert await finished(sweeper.look(first, "a", LONG_S), sweeper.look(second, "a", LONG_S)) == [True, True]
    assert asked_in_time == [True]


async def test_many_lanes_end_in_any_order() -> None:
    sweeper = Sweeper()
    works = [Work(looks * 7 % 100) for looks in range(200)]
    assert all(await finished(*(sweeper.look(work, i, LONG_S) for i, work in enumerate(works))))


async def test_work_that_keeps_ending_keeps_it_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_KEPT_S", LONG_S)
    sweeper = Sweeper()
    patient = asyncio.ensure_future(sweeper.look(Work(100), "a", 1e-3))
    assert await finished(sweeper.look(Work(1), "b", LONG_S)) == [True]
    assert await finished(patient) == [True]


async def test_a_cancelled_task_is_forgotten() -> None:
    sweeper = Sweeper()
    never = Work()
    with anyio.fail_after(LIMIT_S):
        for lanes in (["a"], ["a", "b"]):
            with anyio.move_on_after(0.01) as scope:
                await asyncio.gather(*(sweeper.look(never, lane, LONG_S) for lane in lanes))
            assert scope.cancelled_caught
        assert await sweeper.look(Work(3), "a", LONG_S)
    asked = never.asked
    await asyncio.sleep(0.01)
    assert never.asked == asked
    assert not sweeper._lanes


async def test_an_error_reaches_its_own_waiter() -> None:
    def failing() -> bool:
        raise OSError("gone")

    sweeper = Sweeper()
    with anyio.fail_after(LIMIT_S):
        results = await asyncio.gather(
            sweeper.look(failing, "a", LONG_S), sweeper.look(Work(9), "a", LONG_S), return_exceptions=True
        )
    assert isinstance(results[0], OSError)
    assert results[1] is True


async def test_the_loop_goes_round_meanwhile() -> None:
    sweeper = Sweeper()
    never = Work()
    waiting = asyncio.ensure_future(sweeper.look(never, "a", LONG_S))
    for turn in range(100):
        await asyncio.sleep(0)
        assert never.asked <= turn + 2 + sweep._AT_ONCE
    never.left = 0
    assert await finished(waiting) == [True]


async def test_more_lanes_than_pay_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_MOST_LANES", 2)
    sweeper = Sweeper()
    works = [Work(50) for _ in range(3)]
    assert await finished(*(sweeper.look(work, i, LONG_S) for i, work in enumerate(works))) == [True, True, False]


async def test_it_rests_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeper = Sweeper()
    assert await finished(sweeper.look(Work(2), "a", LONG_S)) == [True]
    sweeps: list[object] = []
    monkeypatch.setattr(sweeper, "_sweep", sweeps.append)
    await asyncio.sleep(0.01)
    assert not sweeps
    assert not sweeper._sweeping
