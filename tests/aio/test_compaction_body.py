"""The body of a compacting loop: what its parts are, and that a whole loop finishes every sample at its own step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle.aio.active_set import ActiveSet, compaction_body
from eagle.aio.guards import RepeatWhile, SkipGuard, Skippable, repeat_while


class Batch:
    """Samples that count to their own stop values; a step visits the slots of the map only."""

    def __init__(self, stop: np.ndarray, reorder: float | None = None) -> None:
        self.stop, self.steps = stop.copy(), np.zeros(stop.size, np.int32)
        self.mask, self.finished = np.zeros(stop.size, bool), np.zeros(1, np.uint32)
        self.active = ActiveSet(self.mask, reorder=reorder)
        if reorder is not None:
            self.active.own(self.stop, self.steps)
        self.visited: list[int] = []

    def step(self) -> None:
        slots = self.active.map[: self.active.live]
        self.visited.append(slots.size)
        todo = slots[~self.mask[slots]]
        self.steps[todo] += 1
        ended = todo[self.steps[todo] >= self.stop[todo]]
        self.mask[ended] = True
        self.finished[0] += ended.size


def finish(batch: Batch, longest: int, **options: Any) -> RepeatWhile:
    body = compaction_body(batch.step, batch.active, **options)
    loop = repeat_while(body, SkipGuard(batch.finished, 0, np.array([batch.stop.size], np.uint32)), 10 * longest)
    loop()
    return loop


@given(
    stop=st.lists(st.integers(1, 60), min_size=1, max_size=80),
    every=st.integers(4, 20),
    counted=st.booleans(),
)
def test_every_sample_stops_at_its_own_step(stop: list[int], every: int, counted: bool) -> None:
    batch = Batch(np.array(stop))
    loop = finish(batch, 60, every=every, finished=batch.finished if counted else None)
    np.testing.assert_array_equal(batch.steps, stop)
    assert loop.iterations() == -(-max(stop) // every)
    rounds = batch.visited[::every]
    assert rounds == [sum(s > every * k for s in stop) for k in range(len(rounds))]  # no finished one is visited again


@given(seed=st.integers(0, 2**32 - 1), theta=st.sampled_from([0.25, 0.5, 0.75]))
def test_a_reordering_loop_gives_the_same(seed: int, theta: float) -> None:
    stop = np.random.default_rng(seed).integers(1, 40, 6000)
    batch = Batch(stop, reorder=theta)
    finish(batch, 40, every=4, finished=batch.finished)
    np.testing.assert_array_equal(batch.active.in_sample_order(batch.steps), stop)
    batch.active.restore()
    np.testing.assert_array_equal(batch.steps, stop)
    np.testing.assert_array_equal(batch.stop, stop)


def test_scattered_survivors_are_packed_on_the_way() -> None:
    stop = np.where(np.arange(20_000) % 8 == 0, 30, 3)
    batch = Batch(stop, reorder=0.5)
    finish(batch, 30, every=4)
    assert int(batch.active.reorders[0]) == 1
    assert int(batch.active.span[0]) == 2500


def test_a_guarded_step_keeps_its_guard() -> None:
    flag, calls = np.zeros(1, np.uint32), []
    step = Skippable(lambda: calls.append(1), SkipGuard.nonzero(flag))
    body = compaction_body(step, ActiveSet(np.zeros(8, bool)), every=4)
    assert body[:4] == (step,) * 4
    for part in body:
        part()
    assert calls == []
    flag[0] = 1
    for part in body:
        part()
    assert len(calls) == 4


def test_a_nested_loop_stays_visible_to_the_build_that_refuses_it() -> None:
    loop = repeat_while(lambda: None, SkipGuard.nonzero(np.zeros(1, np.uint32)), 3)
    assert compaction_body(loop, ActiveSet(np.zeros(8, bool)))[0] is loop


def test_the_parts_carry_the_names_that_graphs_show() -> None:
    def advance() -> None:
        pass

    steps, compact = compaction_body(advance, ActiveSet(np.zeros(8, bool)))
    assert steps.__qualname__ == advance.__qualname__
    assert compact.__qualname__ == "ActiveSet.compact"


async def _coroutine() -> None:
    pass


@pytest.mark.parametrize("step", [3, None, (), _coroutine])
def test_a_step_is_a_plain_callable(step: Any) -> None:
    with pytest.raises(TypeError, match="step"):
        compaction_body(step, ActiveSet(np.zeros(8, bool)))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"every": 3}, ValueError),
        ({"every": 1, "steps_per_call": 3}, ValueError),
        ({"steps_per_call": 0}, ValueError),
        ({"every": True}, TypeError),
        ({"every": 8.0}, TypeError),
        ({"steps_per_call": None}, TypeError),
        ({"reorder": True}, ValueError),
        ({"reorder": 0.5}, TypeError),
        ({"finished": [0]}, TypeError),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options)) if "finished" not in options else "counter"):
        compaction_body(lambda: None, ActiveSet(np.zeros(8, bool)), **options)


def test_the_set_is_an_active_set() -> None:
    with pytest.raises(TypeError, match="ActiveSet"):
        compaction_body(lambda: None, np.zeros(8, bool))  # type: ignore[arg-type]


def test_a_refused_body_leaves_the_set_open() -> None:
    active = ActiveSet(np.zeros(8, bool), reorder=True)
    with pytest.raises(ValueError, match="every"):
        compaction_body(lambda: None, active, every=1, reorder=True)
    active.own(np.zeros(8))
