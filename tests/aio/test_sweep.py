"""Looking from the event loop itself: who is asked, when it gives up, and that the loop lives meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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


async def look(sweeper: Sweeper, work: Callable[[], bool], lane: object, spin_s: float) -> bool:
    """What a task does."""
    seen = sweeper.look(work, lane, spin_s)
    return seen if isinstance(seen, bool) else await seen


async def finished(*looks: Any) -> list[bool]:
    with anyio.fail_after(LIMIT_S):
        return list(await asyncio.gather(*looks))


async def test_it_waits_for_the_end_or_gives_up() -> None:
    sweeper = Sweeper()
    ends, never = Work(50), Work()
    assert await finished(look(sweeper, ends, "a", LONG_S), look(sweeper, never, "b", 0.0)) == [True, False]
    assert ends.asked == 51


async def test_only_the_oldest_of_a_lane_is_asked() -> None:
    sweeper = Sweeper()
    first, last = Work(20), Work(40)
    asked_in_time = []

    def second() -> bool:
        asked_in_time.append(first.left < 0)
        return True

    looks = [look(sweeper, work, "a", LONG_S) for work in (first, second, last)]
    assert await finished(*looks) == [True, True, True]
    assert asked_in_time == [True]


async def test_many_lanes_end_in_any_order() -> None:
    sweeper = Sweeper()
    works = [Work(looks * 7 % 100) for looks in range(sweep._MOST_LANES)]
    assert all(await finished(*(look(sweeper, work, i, LONG_S) for i, work in enumerate(works))))


async def test_work_that_keeps_ending_keeps_it_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_KEPT_S", LONG_S)
    sweeper = Sweeper()
    patient = asyncio.ensure_future(look(sweeper, Work(100), "a", 1e-3))
    assert await finished(look(sweeper, Work(1), "b", LONG_S)) == [True]
    assert await finished(patient) == [True]


async def test_a_cancelled_task_is_forgotten() -> None:
    sweeper = Sweeper()
    never = Work()
    with anyio.fail_after(LIMIT_S):
        for lanes in (["a"], ["a", "b"]):
            with anyio.move_on_after(0.01) as scope:
                await asyncio.gather(*(look(sweeper, never, lane, LONG_S) for lane in lanes))
            assert scope.cancelled_caught
        assert await look(sweeper, Work(3), "a", LONG_S)
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
            look(sweeper, failing, "a", LONG_S), look(sweeper, Work(9), "a", LONG_S), return_exceptions=True
        )
    assert isinstance(results[0], OSError)
    assert results[1] is True


async def test_earlier_work_that_is_awaited_later_is_seen_too() -> None:
    sweeper = Sweeper()
    later = asyncio.ensure_future(look(sweeper, Work(), "a", LONG_S))
    await asyncio.sleep(0)
    assert await finished(look(sweeper, Work(30), "a", LONG_S)) == [True]
    assert not later.done()
    later.cancel()


async def test_others_get_their_turn_beside_work_that_has_always_ended() -> None:
    sweeper = Sweeper()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    with anyio.fail_after(LIMIT_S):
        while turns < 20:
            assert await look(sweeper, Work(2), "a", LONG_S)
    counting.cancel()


async def test_work_that_announces_its_end_is_looked_at_alone() -> None:
    sweeper = Sweeper()
    assert await finished(look(sweeper, Work(30), None, LONG_S), look(sweeper, Work(30), None, LONG_S)) == [True, False]


async def test_a_sweep_that_was_lost_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeper = Sweeper()
    patient = asyncio.ensure_future(look(sweeper, Work(20), "a", LONG_S))
    await asyncio.sleep(0)
    sweeper._chain += 1  # what is scheduled comes to nothing, as if Ctrl-C had met it
    sweeper._swept_at -= 1.0
    assert await finished(look(sweeper, Work(20), "b", LONG_S), patient) == [True, True]


def test_ctrl_c_in_a_sweep_leaves_the_loop_usable(anyio_backend: Any) -> None:
    loop = asyncio.new_event_loop()
    sweeper = Sweeper()
    interrupting, patient = True, Work(60)

    def interrupted() -> bool:
        nonlocal interrupting
        if interrupting and patient.asked:
            interrupting = False
            raise KeyboardInterrupt
        return not interrupting

    async def wait() -> list[bool]:
        return await asyncio.gather(look(sweeper, patient, "a", LONG_S), look(sweeper, interrupted, "b", LONG_S))

    task = loop.create_task(wait())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(task)
    assert loop.run_until_complete(task) == [True, True]
    loop.close()


async def test_the_loop_goes_round_meanwhile() -> None:
    sweeper = Sweeper()
    never = Work()
    waiting = asyncio.ensure_future(look(sweeper, never, "a", LONG_S))
    for turn in range(100):
        await asyncio.sleep(0)
        assert never.asked <= turn + 2 + sweep._AT_ONCE
    never.left = 0
    assert await finished(waiting) == [True]


async def test_more_lanes_than_pay_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_MOST_LANES", 2)
    sweeper = Sweeper()
    works = [Work(50) for _ in range(3)]
    assert await finished(*(look(sweeper, work, i, LONG_S) for i, work in enumerate(works))) == [True, True, False]


async def test_it_rests_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeper = Sweeper()
    assert await finished(look(sweeper, Work(2), "a", LONG_S)) == [True]
    sweeps: list[object] = []
    monkeypatch.setattr(sweeper, "_sweep", sweeps.append)
    await asyncio.sleep(0.01)
    assert not sweeps
    assert not sweeper._sweeping
