from __future__ import annotations

import contextvars
from typing import Any

import numpy as np
import pytest

from eagle.aio.guards import (
    RepeatWhile,
    SkipGuard,
    Skippable,
    StopWord,
    plain_steps,
    repeat_while,
    skippable,
    stop_word,
)
from tests.helpers.steps import Steps


@pytest.fixture
def steps(target: str) -> Steps:
    return Steps(target)


class TestSkipGuard:
    @pytest.mark.parametrize(
        ("count", "lane", "baseline", "other", "holds"),
        [
            ((0,), 0, None, 0, False),
            ((7,), 0, None, 0, True),
            ((0, 4), 1, None, 0, True),
            ((5,), 0, (5,), 0, False),
            ((5,), 0, (6,), 0, True),
            ((1, 9), 1, (3, 9), 1, False),
            ((1, 9), -1, (3, 9), 0, True),
        ],
    )
    def test_it_compares_two_words(
        self, steps: Steps, count: Any, lane: int, baseline: Any, other: int, holds: bool
    ) -> None:
        guard = SkipGuard(steps.words(*count), lane, None if baseline is None else steps.words(*baseline), other)
        assert guard.evaluate() is holds

    def test_the_words_are_read_where_they_are(self, steps: Steps) -> None:
        flags = steps.words(0, 0)
        guard = SkipGuard.intent(flags, 1)
        assert not guard.evaluate()
        steps.write(flags, 0, 2**32 - 1)
        assert guard.evaluate()
        assert guard.count_arr is flags

    def test_a_bucket_is_two_fenceposts(self, steps: Steps) -> None:
        offsets = steps.words(0, 2, 2, 5)
        guards = [SkipGuard.nonempty_bucket(offsets, bucket) for bucket in range(3)]
        assert [guard.evaluate() for guard in guards] == [True, False, True]
        assert (guards[1].count_idx, guards[1].baseline_idx) == (2, 1)

    def test_a_lane_outside_is_found_when_it_is_read(self, steps: Steps) -> None:
        guard = SkipGuard(steps.words(1), 3)
        with pytest.raises(IndexError):
            guard.evaluate()

    def test_its_repr_reads_nothing(self) -> None:
        assert repr(SkipGuard(None, 2)) == "<SkipGuard: count[2] != 0>"
        assert repr(SkipGuard(None, 2, object(), 1)) == "<SkipGuard: count[2] != baseline[1]>"


class TestSkippable:
    def test_called_directly_it_asks_now(self, steps: Steps) -> None:
        flag, count = steps.words(0), steps.words(0)
        step = skippable(steps.tick(count), SkipGuard.nonzero(flag))
        assert step() is None
        steps.write(flag, 1)
        assert step() is None
        assert steps.read(count) == [1]
        assert isinstance(step, Skippable)


class TestRepeatWhile:
    def test_it_ends_with_its_guard(self, steps: Steps) -> None:
        left, ran = steps.words(4), steps.words(0)
        loop = repeat_while(steps.countdown(left, ran), SkipGuard.nonzero(left), 9)
        assert loop.iterations() == 0
        loop()
        assert (loop.iterations(), steps.read(loop.cell)) == (4, [5, 4])

    def test_it_ends_at_its_cap_and_starts_afresh(self, steps: Steps) -> None:
        left, ran = steps.words(5), steps.words(0)
        loop = repeat_while(steps.countdown(left, ran), SkipGuard.nonzero(left), 3)
        loop()
        assert (loop.iterations(), steps.read(left)) == (3, [2])
        loop()
        assert (loop.iterations(), steps.read(left)) == (2, [0])
        loop()
        assert loop.iterations() == 0

    def test_the_index_is_a_view_of_the_count(self, steps: Steps) -> None:
        left, ran, seen = steps.words(3), steps.words(0), []

        def body() -> None:
            seen.append(int(loop.iteration_index[0]))
            steps.call("countdown", left, ran)

        loop = repeat_while(body, SkipGuard.nonzero(left), 9)
        loop()
        assert seen == [0, 1, 2]
        assert type(loop.iteration_index) is type(left)
        assert (loop.iteration_index.shape, loop.iteration_index.dtype) == ((1,), np.uint32)

    def test_parts_run_in_order_and_keep_their_guards(self, steps: Steps) -> None:
        left, ran, flag, log = steps.words(2), steps.words(0), steps.words(0), steps.log()
        marked = skippable(steps.append(log, 7), SkipGuard.nonzero(flag))
        parts = (steps.append(log, 1), marked, steps.put(flag, 1), steps.countdown(left, ran))
        loop = repeat_while(parts, SkipGuard.nonzero(left), 9)
        loop()
        assert steps.logged(log) == [1, 1, 7]
        assert loop.parts == parts
        assert loop.step is parts

    def test_an_error_leaves_the_finished_iterations_counted(self) -> None:
        flag = np.ones(1, np.uint32)

        def body() -> None:
            if loop.iterations() == 2:
                raise KeyError("third")

        loop = repeat_while(body, SkipGuard.nonzero(flag), 9)
        with pytest.raises(KeyError):
            loop()
        assert loop.iterations() == 2

    @pytest.mark.parametrize("bad", [0, -1, 2**32])
    def test_a_cap_out_of_range(self, bad: int) -> None:
        with pytest.raises(ValueError, match=f"max_iters is {bad}"):
            RepeatWhile(lambda: None, SkipGuard.nonzero(np.ones(1, np.uint32)), bad)

    @pytest.mark.parametrize("bad", [True, 2.0, "3", None, np.int64(3)])
    def test_a_cap_that_is_no_plain_int(self, bad: Any) -> None:
        with pytest.raises(TypeError, match="max_iters is"):
            RepeatWhile(lambda: None, SkipGuard.nonzero(np.ones(1, np.uint32)), bad)

    @pytest.mark.parametrize("part", [5, "step", None, (lambda: None,)])
    def test_parts_that_cannot_be_called(self, part: Any) -> None:
        with pytest.raises(TypeError, match="flat tuple"):
            RepeatWhile((lambda: None, part), SkipGuard.nonzero(np.ones(1, np.uint32)), 3)

    def test_no_parts(self) -> None:
        with pytest.raises(ValueError, match="empty tuple"):
            RepeatWhile((), SkipGuard.nonzero(np.ones(1, np.uint32)), 3)


class TestStopWord:
    def test_a_loop_ends_before_its_next_iteration(self) -> None:
        flag, word = np.ones(1, np.uint32), StopWord()

        def body() -> None:
            if loop.iterations() == 3:
                word.ask()

        loop = repeat_while(body, SkipGuard.nonzero(flag), 100)
        context = contextvars.copy_context()
        context.run(stop_word.set, word)
        context.run(loop)
        assert loop.iterations() == 4
        context.run(loop)
        assert loop.iterations() == 0

    def test_it_stays_with_its_work(self) -> None:
        flag, word = np.ones(1, np.uint32), StopWord()
        word.ask()
        contextvars.copy_context().run(stop_word.set, word)
        loop = repeat_while(lambda: None, SkipGuard.nonzero(flag), 5)
        loop()
        assert loop.iterations() == 5


def test_the_steps_inside() -> None:
    def a() -> None: ...
    def b() -> None: ...

    guard = SkipGuard.nonzero(np.ones(1, np.uint32))
    assert list(plain_steps(a)) == [a]
    assert list(plain_steps(skippable(a, guard))) == [a]
    assert list(plain_steps(repeat_while((a, skippable(b, guard)), guard, 3))) == [a, b]


@pytest.mark.parametrize("guard", [None, 3, np.ones(1, np.uint32)])
def test_what_is_no_guard(guard: Any) -> None:
    with pytest.raises(TypeError, match="SkipGuard"):
        skippable(print, guard)
    with pytest.raises(TypeError, match="SkipGuard"):
        repeat_while(print, guard, 3)
