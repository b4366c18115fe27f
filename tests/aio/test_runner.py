"""Runner: every kind of kernel and every way to pace it gives the same answer, also when runs are cut and go on."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

import eagle
import eagle.sync
from tests.helpers import models
from tests.helpers.faces import Face, both_faces

LIMIT_S = 60.0
KINDS = {
    "automatic": models.climb,
    "one": models.climb_one,
    "four": models.climb_four,
    "listed": models.climb_listed,
    "listed automatic": models.climb_listed_auto,
}
kinds = pytest.mark.parametrize("kind", KINDS)


def plan(kind: str) -> Any:
    return eagle.deploy(KINDS[kind])


def overrun(kind: str) -> int:
    """Steps that a run of this kind may take past its cap: whole launches, and whole rounds of an active set."""
    return {"four": 3, "listed": 15}.get(kind, 0)


def consistent(runner: Any, planes: dict[str, Any]) -> None:
    """State, mask and counter agree, wherever the run was cut."""
    x, c, mask = planes["x"], planes["c"], runner.terminated
    assert np.array_equal(x, c)  # each sample took whole steps of its own
    assert np.array_equal(mask, x >= planes["goal"])
    assert np.all(x <= planes["goal"])
    assert int(runner.finished[0]) == np.count_nonzero(mask)


# ---- the answer ------------------------------------------------------------------------------------------------------


@both_faces
@kinds
@pytest.mark.parametrize("n", [0, 1, 2, 255, 256, 257, 3000])
async def test_every_sample_takes_its_own_steps(face: Face, kind: str, n: int) -> None:
    planes = models.climb_planes(n)
    planes["goal"] = np.random.default_rng(n).permutation(planes["goal"])
    with anyio.fail_after(LIMIT_S):
        report = await face.run_until_done(plan(kind), max_steps=5000, **planes)
    assert np.array_equal(planes["c"], planes["goal"])
    assert np.array_equal(planes["x"], planes["goal"])
    assert (report.n, report.finished, report.done) == (n, n, True)
    assert report.steps >= n
    assert report.steps == sum(k * launches for k, launches in report.launches_by_k.items())
    assert (report.launches == 0) == (n == 0)
    assert (report.build_s, report.mode, report.probe) == (0.0, "band", False)


@kinds
@pytest.mark.parametrize("policy", ["auto", "tiled", "measured", "band"])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_pacing_changes_nothing_in_the_answer(kind: str, policy: str, threads: int) -> None:
    planes = models.climb_planes(1500)
    runner = eagle.sync.until_done(plan(kind), max_steps=2000, **planes)
    runner.host_policy, runner.host_threads = policy, threads
    assert runner.run().done
    assert np.array_equal(planes["c"], planes["goal"])


@kinds
@pytest.mark.parametrize("cap", [1, 2, 3, 5, 16, 17, 64, 100])
def test_the_cap(kind: str, cap: int) -> None:
    planes = models.climb_planes(200)
    runner = eagle.sync.until_done(plan(kind), max_steps=cap, **planes)
    report = runner.run()
    assert cap <= report.steps <= cap + overrun(kind)
    assert np.array_equal(planes["c"], np.minimum(planes["goal"], report.steps))
    assert not report.done
    consistent(runner, planes)


@both_faces
@kinds
async def test_a_row_of_capped_runs_gets_to_the_end(face: Face, kind: str) -> None:
    planes = models.climb_planes(500)
    with anyio.fail_after(LIMIT_S):
        runner = await face.until_done(plan(kind), max_steps=37, **planes)
        total = 0
        while True:
            report = await face.run(runner)
            total += report.steps
            consistent(runner, planes)
            if report.done:
                break
            assert report.steps <= 37 + overrun(kind)
    assert total >= 500
    assert np.array_equal(planes["c"], planes["goal"])
    again = await face.run(runner)
    assert (again.done, again.launches, again.steps, again.launches_by_k) == (True, 0, 0, {})


@kinds
@pytest.mark.parametrize("max_steps", [2**31, 2**32, 2**33 + 1, 2**63, 10**40])
def test_a_huge_cap_is_no_cap(kind: str, max_steps: int) -> None:
    planes = models.climb_planes(20)
    assert eagle.sync.run_until_done(plan(kind), max_steps=max_steps, **planes).done
    assert np.array_equal(planes["c"], planes["goal"])


@kinds
def test_the_mask_that_is_given_is_the_mask(kind: str) -> None:
    planes = models.climb_planes(50)
    mask = np.zeros(50, bool)
    mask[::7] = True
    want = np.where(mask, 0.0, planes["goal"])
    runner = eagle.sync.until_done(plan(kind), max_steps=100, terminated=mask, **planes)
    assert runner.terminated is mask
    report = runner.run()
    assert mask.all()
    assert report.finished == 50
    assert np.array_equal(planes["c"], want)


@kinds
def test_planes_and_mask_may_be_edited_between_runs(kind: str) -> None:
    planes = models.climb_planes(50)
    runner = eagle.sync.until_done(plan(kind), max_steps=1000, **planes)
    runner.run()
    runner.terminated[10:20] = False
    planes["x"][10:20] = 0.0
    planes["goal"][10:20] = 3.0
    report = runner.run()
    assert report.done
    assert np.array_equal(planes["c"][10:20], np.arange(11.0, 21.0) + 3.0)
    assert np.array_equal(np.delete(planes["c"], slice(10, 20)), np.delete(np.arange(1.0, 51.0), slice(10, 20)))


@kinds
def test_all_finished_at_the_start(kind: str) -> None:
    planes = models.climb_planes(5)
    mask = np.ones(5, bool)
    report = eagle.sync.run_until_done(plan(kind), max_steps=10, terminated=mask, **planes)
    assert (report.done, report.launches, report.steps) == (True, 0, 0)
    assert not planes["c"].any()


@kinds
def test_reset_starts_the_batch_over(kind: str) -> None:
    planes = models.climb_planes(300)
    runner = eagle.sync.until_done(plan(kind), max_steps=1000, **planes)
    for _ in range(3):
        planes["x"][:] = planes["c"][:] = 0.0
        assert runner.run().done
        assert np.array_equal(planes["c"], planes["goal"])
        assert runner.reset() is None
        assert not runner.terminated.any()
        assert int(runner.finished[0]) == 0


def test_samples_that_thin_out_at_every_rate_keep_their_order() -> None:
    """Ranges are packed as they thin out, and active sets are reordered: nobody changes places."""
    rng = np.random.default_rng(5)
    n = 20_000
    for goals in (rng.integers(1, 400, n), np.where(rng.random(n) < 0.01, 3000, 2), np.arange(n) % 97 + 1):
        for kind, threshold in (("automatic", None), ("listed", True), ("listed automatic", 0.3)):
            options = {} if threshold is None else {"reorder": threshold}
            planes = {"x": np.zeros(n), "c": np.zeros(n), "goal": goals.astype(float), "r": 1.0}
            report = eagle.sync.run_until_done(plan(kind), max_steps=5000, **options, **planes)
            assert report.done, kind
            assert np.array_equal(planes["c"], planes["goal"]), kind


# ---- cancelled -------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_run_that_is_cancelled_at_any_moment_goes_on_to_the_right_end(kind: str) -> None:
    rng = random.Random(kind)
    n = 4000
    planes = models.climb_planes(n)
    planes["goal"] = np.random.default_rng(1).integers(1, 20_000, n).astype(float)
    runner = await eagle.until_done(plan(kind), max_steps=100_000, **planes)
    cuts = 0
    with anyio.fail_after(LIMIT_S):
        while True:
            with anyio.move_on_after(rng.uniform(0.0, 0.02)) as scope:
                await runner.run()
            consistent(runner, planes)
            if not scope.cancelled_caught:
                break
            cuts += 1
            after = {name: np.copy(planes[name]) for name in "xc"}
            await anyio.sleep(0.003)
            assert all(np.array_equal(planes[name], after[name]) for name in "xc")  # nobody writes any more
            if cuts == 60:  # a slow machine gets the rest in one piece
                await runner.run()
                break
    assert cuts
    assert np.array_equal(planes["c"], planes["goal"])


async def test_cancelling_twice_is_cancelling_once(anyio_backend: tuple[str, Any]) -> None:
    planes = models.endless_planes()
    runner = await eagle.until_done(plan("automatic"), max_steps=10**9, **planes)
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(runner.run)
            while not planes["c"].any():
                await anyio.sleep(0.001)
            group.cancel_scope.cancel()
            group.cancel_scope.cancel()
        consistent(runner, planes)
        again = await anyio.to_thread.run_sync(lambda: planes["c"].copy())
        assert np.array_equal(again, planes["c"])


async def test_a_cancelled_round_of_several_kernels_is_a_whole_round() -> None:
    """A kernel without a mask runs on every sample in every round, also in the round that was cut."""
    planes = {"x": np.zeros(30_000), "r": 1.0, "goal": np.full(30_000, np.inf), "rounds": np.zeros(30_000)}
    parts = [eagle.deploy(k) for k in (models.tally, models.move, models.arrived)]
    runner = await eagle.until_done(parts, max_steps=10**9, **planes)
    with anyio.fail_after(LIMIT_S):
        for _ in range(5):
            with anyio.move_on_after(0.01):
                await runner.run()
            assert np.ptp(planes["rounds"]) == 0.0
            assert np.array_equal(planes["x"], planes["rounds"])


async def test_a_copied_plane_is_written_back_when_the_run_is_cancelled() -> None:
    n = 3000
    p, u = np.zeros((n, 3)), np.ones((3, n))
    t = np.zeros(n)
    with pytest.warns(eagle.LayoutWarning):
        runner = eagle.Runner(
            eagle.deploy(models.glide), max_steps=10**9, u=u, dt=1.0, end=np.full(n, np.inf), p=p, t=t
        )
    with anyio.fail_after(LIMIT_S):
        for _ in range(3):
            before = t.copy()
            with anyio.move_on_after(0.01):
                await runner.run()
            assert np.array_equal(p, np.repeat(t[:, None], 3, axis=1))
            assert np.all(t >= before)


# ---- one run at a time -----------------------------------------------------------------------------------------------


async def test_a_second_run_and_a_reset_are_refused_while_one_runs() -> None:
    planes = models.endless_planes()
    runner = await eagle.until_done(plan("automatic"), max_steps=10**9, **planes)
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(runner.run)
            while not planes["c"].any():
                await anyio.sleep(0.001)
            with pytest.raises(eagle.Busy, match="is running already"):
                await runner.run()
            with pytest.raises(RuntimeError, match=r"await the run before reset"):
                runner.reset()
            group.cancel_scope.cancel()
        runner.reset()
        assert not runner.terminated.any()


def test_of_many_threads_one_runs_at_a_time() -> None:
    planes = models.climb_planes(2000)
    runner = eagle.sync.until_done(plan("automatic"), max_steps=10, **planes)
    gate = threading.Barrier(8)
    busy = []

    def ask(_: int) -> None:
        for _ in range(40):
            gate.wait(LIMIT_S)
            try:
                runner.run()
            except eagle.Busy:
                busy.append(1)
            try:
                runner.reset()  # samples past their goal take more steps then
            except eagle.Busy:
                busy.append(1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    runner.host_threads = 1
    while not runner.run().done:
        pass
    assert np.array_equal(planes["x"], planes["c"])  # no step was lost, and none was taken by two threads at once
    assert (planes["c"] >= planes["goal"]).all()


@both_faces
@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        *[("host_threads", value) for value in (0, -1, 2.0, True, "2", [2])],
        *[("host_policy", value) for value in ("fast", "", None, "TILED", [], 1)],
    ],
)
async def test_odd_pacing_is_refused_and_the_runner_stays_usable(face: Face, attribute: str, value: Any) -> None:
    planes = models.climb_planes(20)
    with anyio.fail_after(LIMIT_S):
        runner = await face.until_done(plan("automatic"), max_steps=100, **planes)
        right = getattr(runner, attribute)
        setattr(runner, attribute, value)
        for _ in range(2):
            with pytest.raises(ValueError, match=attribute):
                await face.run(runner)
        assert not planes["c"].any()
        setattr(runner, attribute, right)
        assert (await face.run(runner)).done


def test_more_threads_than_the_machine_has() -> None:
    planes = models.climb_planes(5000)
    runner = eagle.sync.until_done(plan("automatic"), max_steps=10_000, **planes)
    runner.host_threads = 10**9
    assert runner.run().done
    assert np.array_equal(planes["c"], planes["goal"])


# ---- options and refusals --------------------------------------------------------------------------------------------


@both_faces
@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"limiter": 3}, TypeError, "limiter"),
        ({"priority": 1.5}, TypeError, "priority"),
        ({"priority": True}, TypeError, "priority"),
        ({"progress": "yes"}, TypeError, "progress"),
        ({"progress": 1}, TypeError, "progress"),
        ({"progress": np.ones(2)}, TypeError, "progress"),
        ({"order": "fastest"}, ValueError, "order"),
        ({"layout": "rows"}, ValueError, "layout"),
        ({"every": 8}, ValueError, "every"),
        ({"reorder": 0.5}, ValueError, "reorder"),
        ({"max_steps": 0}, ValueError, "max_steps"),
        ({"max_steps": True}, TypeError, "max_steps"),
        ({"max_steps": np.int64(3)}, TypeError, "max_steps"),
        ({"finished_count": np.zeros(1, np.uint32)}, ValueError, "finished_count"),
        ({"zeta": 1.0}, ValueError, "zeta"),
        ({"goal": 1.0}, ValueError, "goal"),
    ],
)
async def test_bad_options_are_refused_before_anything_is_written(
    face: Face, options: dict[str, Any], error: type[Exception], named: str
) -> None:
    planes: dict[str, Any] = {"max_steps": 10, **models.climb_planes(3), **options}
    with pytest.raises(error, match=named):
        await face.until_done(plan("automatic"), **planes)
    assert not planes["x"].any()


@both_faces
@pytest.mark.parametrize("junk", [None, models.climb, "climb", [models.climb], [], 3])
async def test_what_is_no_plan(face: Face, junk: Any) -> None:
    with pytest.raises(ValueError, match=r"until_done runs plans|at least one"):
        await face.until_done(junk, max_steps=3, **models.climb_planes(3))


def test_the_loop_tells_of_the_last_run() -> None:
    runner = eagle.sync.until_done(plan("one"), max_steps=100, **models.climb_planes(10))
    assert isinstance(runner.loop, eagle.RepeatWhile)
    report = runner.run()
    assert runner.loop.iterations() == report.launches == 10
    assert report.exact_steps


def test_the_policy_of_an_automatic_kernel() -> None:
    runner = eagle.sync.until_done(plan("automatic"), max_steps=100, **models.climb_planes(10))
    assert (runner.auto, runner.steps_per_launch, runner.every) == (True, "auto", None)
    report = runner.run()
    assert runner.policy["steps_done"] == report.steps
    assert runner.policy["go"] == 0
    assert eagle.sync.until_done(plan("one"), max_steps=3, **models.climb_planes(3)).policy is None


# ---- the limiter -----------------------------------------------------------------------------------------------------


async def test_a_limiter_bounds_what_runs_at_once() -> None:
    limiter = anyio.CapacityLimiter(1)
    most = 0

    async def one() -> None:
        nonlocal most
        runner = await eagle.until_done(plan("automatic"), max_steps=300, limiter=limiter, **models.climb_planes(200))
        async with anyio.create_task_group() as group:
            group.start_soon(runner.run)
            await anyio.lowlevel.checkpoint()
            most = max(most, limiter.statistics().borrowed_tokens)

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(one)
    assert most == 1
    assert limiter.statistics().borrowed_tokens == 0


async def test_a_task_that_holds_a_token_of_its_own_may_run() -> None:
    limiter = anyio.CapacityLimiter(2)
    with anyio.fail_after(LIMIT_S):
        async with limiter:
            report = await eagle.run_until_done(
                plan("automatic"), max_steps=100, limiter=limiter, **models.climb_planes(10)
            )
    assert report.done


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_blocking_run_takes_its_token_through_the_loop() -> None:
    limiter = anyio.CapacityLimiter(1)

    def run() -> eagle.RunReport:
        return eagle.sync.run_until_done(plan("automatic"), max_steps=100, limiter=limiter, **models.climb_planes(10))

    with anyio.fail_after(LIMIT_S):
        assert (await anyio.to_thread.run_sync(run)).done
    assert limiter.statistics().borrowed_tokens == 0


def test_a_blocking_run_without_a_loop_cannot_share_a_limit_and_stays_usable() -> None:
    limiter = anyio.CapacityLimiter(1)
    runner = eagle.sync.until_done(plan("automatic"), max_steps=100, limiter=limiter, **models.climb_planes(10))
    for _ in range(2):  # the second call tells the same: the object was given back
        with pytest.raises(eagle.StateError, match="limiter="):
            runner.run()
    runner.reset()
