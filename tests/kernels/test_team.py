"""The thread team: every piece is worked on once a turn, jobs take turns, and a stopped job ends."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.errors import StateError
from eagle.kernels import team as module
from eagle.kernels.team import Job, Team, core_count
from tests.helpers.child import run_script

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LIMIT_S = 60.0


class Rounds(Job[list[int]]):
    """`rounds` rounds of `pieces` pieces; a piece is a counter that is finished after `slices` calls."""

    def __init__(self, rounds: int, pieces: int, slices: int = 1, width: int = 2) -> None:
        super().__init__(width)
        self.left, self.pieces, self.slices = rounds, pieces, slices
        self.done: list[list[int]] = []
        self.calls = 0
        self.at_once = 0
        self.most_at_once = 0
        self.guard = threading.Lock()
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.ends = 0

    def turn(self) -> Iterable[list[int]]:
        assert self.at_once == 0
        if self.left == 0:
            return ()
        self.left -= 1
        fresh = [[0] for _ in range(self.pieces)]
        self.done += fresh
        return fresh

    def advance(self, piece: list[int]) -> bool:
        with self.guard:
            self.calls += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.inside()
        with self.guard:
            self.at_once -= 1
        piece[0] += 1
        return piece[0] == self.slices

    def inside(self) -> None:
        """What a piece does."""

    def end(self, error: BaseException | None) -> None:
        assert self.at_once == 0
        self.ends += 1
        self.error = error
        self.ended.set()

    def check(self, rounds: int) -> None:
        assert self.ended.wait(LIMIT_S)
        assert self.error is None
        assert self.ends == 1
        assert [piece[0] for piece in self.done] == [self.slices] * (rounds * self.pieces)
        assert self.calls == rounds * self.pieces * self.slices
        assert self.most_at_once <= self.width


@pytest.fixture
def team() -> Iterator[Team]:
    team = Team()
    yield team
    team.close()


@pytest.mark.parametrize("how", ["submit", "join"])
@pytest.mark.parametrize(
    ("rounds", "pieces", "slices", "width"),
    [(0, 0, 1, 1), (1, 1, 1, 1), (1, 7, 3, 2), (5, 3, 2, 1), (3, 40, 1, 4), (4, 2, 1, 300)],
)
def test_every_piece_of_every_round(team: Team, how: str, rounds: int, pieces: int, slices: int, width: int) -> None:
    job = Rounds(rounds, pieces, slices, width)
    getattr(team, how)(job)
    job.check(rounds)


@settings(max_examples=30)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.booleans()), max_size=6
    )
)
def test_jobs_side_by_side(shapes: list[tuple[int, int, int, int, bool]]) -> None:
    team = Team()
    jobs = []
    for rounds, pieces, slices, width, joins in shapes:
        job = Rounds(rounds, pieces, slices, width)
        jobs.append((job, rounds))
        (team.join if joins else team.submit)(job)
    for job, rounds in jobs:
        job.check(rounds)
    team.close()


def test_a_caller_that_joins_alone_needs_no_thread() -> None:
    before = threading.active_count()
    team = Team()
    job = Rounds(3, 5, 2, width=1)
    team.join(job)
    job.check(3)
    assert threading.active_count() == before


def test_a_stopped_job_ends_with_its_running_slices(team: Team) -> None:
    entered, leave = threading.Event(), threading.Event()

    class Held(Rounds):
        def inside(self) -> None:
            entered.set()
            assert leave.wait(LIMIT_S)

    job = Held(1000, 5, 1000, width=2)
    team.submit(job)
    assert entered.wait(LIMIT_S)
    job.stop()
    job.stop()  # twice is fine
    assert not job.ended.is_set()
    leave.set()
    assert job.ended.wait(LIMIT_S)
    assert job.ends == 1
    assert job.calls <= 2


def test_a_job_that_nobody_works_on_ends_in_stop() -> None:
    job = Rounds(1, 3)
    assert job.start()
    job.stop()
    assert job.ends == 1
    assert job.calls == 0
    assert not job.work()


def test_a_job_of_whole_rounds_works_off_the_round_it_is_in(team: Team) -> None:
    entered, leave = threading.Event(), threading.Event()

    class Held(Rounds):
        def inside(self) -> None:
            entered.set()
            assert leave.wait(LIMIT_S)

    job = Held(1000, 8, 2, width=2)
    job.whole_rounds = True
    team.submit(job)
    assert entered.wait(LIMIT_S)
    job.stop()
    leave.set()
    assert job.ended.wait(LIMIT_S)
    assert [piece[0] for piece in job.done] == [2] * 8


@pytest.mark.parametrize("where", ["advance", "turn", "second turn"])
def test_an_error_ends_the_job_and_reaches_its_end(team: Team, where: str) -> None:
    class Broken(Rounds):
        def inside(self) -> None:
            if where == "advance" and self.calls == 3:
                raise ZeroDivisionError

        def advance(self, piece: list[int]) -> bool:
            try:
                return super().advance(piece)
            except ZeroDivisionError:
                self.at_once -= 1
                raise

        def turn(self) -> Iterable[list[int]]:
            if where == "turn" or (where == "second turn" and self.calls):
                raise ZeroDivisionError
            return super().turn()

    job = Broken(4, 4)
    team.submit(job)
    assert job.ended.wait(LIMIT_S)
    assert isinstance(job.error, ZeroDivisionError)
    assert job.ends == 1
    after = Rounds(2, 2)
    team.submit(after)
    after.check(2)


def test_a_long_job_lets_a_short_one_through(team: Team) -> None:
    class Endless(Rounds):
        def inside(self) -> None:
            time.sleep(0.001)  # a slice

    long = [Endless(1, 2 * core_count(), 10**9, width=core_count()) for _ in range(2)]
    for job in long:
        team.submit(job)
    short = Rounds(1, 1, 3)
    team.submit(short)
    short.check(1)
    for job in long:
        job.stop()
        assert job.ended.wait(LIMIT_S)


def test_a_job_may_be_wider_than_the_machine(team: Team) -> None:
    gate = threading.Barrier(core_count() + 3)

    class Together(Rounds):
        def inside(self) -> None:
            gate.wait(LIMIT_S)  # breaks unless every piece is in here at once

    job = Together(1, core_count() + 3, 1, width=core_count() + 3)
    team.submit(job)
    job.check(1)


def test_idle_threads_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.01)
    before = set(threading.enumerate())
    team = Team()
    job = Rounds(2, 8, 1, width=4)
    team.submit(job)
    job.check(2)
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    again = Rounds(1, 4)
    team.submit(again)
    again.check(1)


def test_without_a_thread_the_caller_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThread:
        def __init__(self, **_: Any) -> None:
            pass

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    team = Team()
    monkeypatch.setattr(module.threading, "Thread", NoThread)
    with pytest.raises(StateError, match="no thread could be started"):
        team.submit(Rounds(1, 2))
    joined = Rounds(2, 3, 2)
    team.join(joined)  # the caller works alone then
    joined.check(2)
    monkeypatch.undo()
    after = Rounds(1, 2)
    team.submit(after)
    after.check(1)


def test_a_closing_team_takes_nothing_more() -> None:
    team = Team()
    team.close()
    job = Rounds(1, 3)
    with pytest.raises(StateError, match="exiting"):
        team.submit(job)
    assert job.calls == 0
    team.join(job)  # who joins does all the work, so nothing is missing
    job.check(1)


def test_the_interpreter_exits_while_jobs_run() -> None:
    """No output and status 0, although a job has work for ever."""
    run_script(
        """
        import time
        from eagle.kernels.team import Job, team

        class Endless(Job):
            def turn(self):
                return [1, 2, 3]
            def advance(self, piece):
                time.sleep(0.001)
                return False
            def end(self, error):
                assert False

        team().submit(Endless(2))
        time.sleep(0.01)
        """
    ).check()


def test_a_run_of_an_exit_hook_that_comes_too_late_is_refused_or_done() -> None:
    """The hook was registered before eagle's own, so it runs behind it; a success that never ran would be worse."""
    ended = run_script(
        """
        import asyncio, atexit
        import numpy as np
        import eagle, eagle.sync
        from tests.helpers import models

        def late():
            planes = models.climb_planes(200_000)
            try:
                asyncio.run(eagle.simulate(models.climb, **planes, max_steps=10**6))
            except eagle.StateError as error:
                assert "exiting" in str(error)
                assert not planes["c"].any()
            else:
                raise SystemExit("a run that could not begin has succeeded")
            assert eagle.sync.simulate(models.climb, **planes, max_steps=10**6).done
            assert np.array_equal(planes["c"], planes["goal"])
            print("late")

        atexit.register(late)
        eagle.sync.simulate(models.climb, x=0.0, c=0.0, goal=3.0, r=1.0, max_steps=9)
        """
    )
    assert ended.check().out == "late\n"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity of threads")
def test_a_thread_that_leaves_a_shared_core_keeps_its_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    monkeypatch.setattr(module, "_current_core", lambda: core)
    asked = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cores: asked.append(set(cores)))
    job = Rounds(1, 2)
    job.spread()
    job.spread()  # its own core is no reason to leave
    assert asked == []
    shared = Rounds(1, 2)
    shared._cores[-1] = core  # another thread works there
    shared.spread()
    assert asked == ([allowed - {core}, allowed] if len(allowed) > 1 else [])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity of threads")
@pytest.mark.parametrize("call", ["sched_getaffinity", "sched_setaffinity"])
def test_a_system_that_forbids_affinity_runs_jobs_all_the_same(
    call: str, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    core_count()
    monkeypatch.setattr(os, call, forbidden)
    monkeypatch.setattr(module, "_current_core", lambda: 0)
    job = Rounds(3, 4, 2)
    job._cores[-1] = 0
    team.submit(job)
    job.check(3)
