"""Host runs: how a batch is cut, how launches are paced, what is packed, and the sums that reports are made of."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle
import eagle.aio
import eagle.sync
from eagle.aio import host_run, packing
from eagle.aio.host_run import Range, RangesRun, RoundsRun, cut
from eagle.aio.pacing import POLICIES, Pacing
from eagle.errors import StateError
from eagle.kernels.team import Team
from tests.helpers import models

# ---- cutting ---------------------------------------------------------------------------------------------------------


@given(
    n=st.integers(0, 300_000),
    threads=st.integers(1, 300),
    width=st.integers(1, 100_000),
    ops=st.integers(1, 10_000_000),
    together=st.booleans(),
)
def test_ranges_cover_the_batch_once_in_order(n: int, threads: int, width: int, ops: int, together: bool) -> None:
    ranges = list(cut(n, threads, width, ops, together))
    assert sum(count for _, count in ranges) == n
    assert all(0 < count <= 16_384 for _, count in ranges)
    at = 0
    for base, count in ranges:
        assert base == at
        at += count


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**31 + 5, 2**32 - 1, 2**32 + 1, 2**40])
def test_the_arithmetic_of_launches_has_no_32_bit_limit(n: int) -> None:
    """BR-36: nothing is allocated here; the first ranges and the last one are looked at."""
    step = 16_384
    first = list(itertools.islice(cut(n, 8, 8, 1), 3))
    assert first == [(0, step), (step, step), (2 * step, step)]
    last = n - (n % step or step)
    assert (last, n - last) == (last, min(step, n - last))
    assert last + (n - last) == n
    assert type(first[0][0]) is int


def test_a_range_counts_in_python_integers() -> None:
    """BR-50: sums pass 2**31 and 2**32 and stay exact."""
    piece = Range(0, 100, 1)
    counts = [2**31 - 1, 2**31, 2**32 - 1, 2**32] * 2
    for k in counts:
        piece.note(k)
    assert piece.steps == sum(counts)
    assert piece.launches == len(counts)
    assert sum(k * launches for k, launches in piece.by_k.items()) == sum(counts)


def test_the_accounting_of_a_run_is_exact() -> None:
    """BR-50: sample-steps are a Python int whatever integers they are made of."""
    runner = eagle.sync.until_done(eagle.deploy(models.climb), max_steps=10, **models.climb_planes(3))
    runner.claim()
    run = runner.start()
    counts = [2**31 - 1, 2**31, 2**32 - 1, 2**32] * 2
    for count in counts:
        run.took(count, 3)
    assert run._taken == 3 * sum(counts)
    run.close()
    runner.release()


# ---- which shape -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernels", "policy", "shape"),
    [
        ((models.climb,), "auto", RangesRun),
        ((models.climb,), "band", RoundsRun),
        ((models.climb_one,), "auto", RangesRun),
        ((models.climb_four,), "band", RangesRun),
        ((models.climb_listed,), "auto", RoundsRun),
        ((models.climb_listed_auto,), "auto", RoundsRun),
        ((models.tally, models.climb_one), "auto", RoundsRun),
        ((models.move, models.arrived), "auto", RangesRun),
    ],
)
def test_the_shape_follows_from_the_kernels(kernels: tuple[Any, ...], policy: str, shape: type) -> None:
    planes = {
        name: value
        for name, value in models.climb_planes(3).items()
        if kernels[-1] is not models.arrived or name != "c"
    }
    if models.tally in kernels:
        planes["rounds"] = np.zeros(3)
    runner = eagle.sync.until_done([eagle.deploy(kernel) for kernel in kernels], max_steps=5, **planes)
    runner.host_policy = policy
    runner.claim()
    run = runner.start()
    assert type(run) is shape
    run.close()
    runner.release()


# ---- pacing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@given(times=st.lists(st.integers(0, 10**10), max_size=60), samples=st.integers(1, 10**6), ops=st.integers(1, 10**6))
def test_every_launch_takes_at_least_a_step(policy: str, times: list[int], samples: int, ops: int) -> None:
    pacing = Pacing(policy, 1, 64, ops, automatic=True)
    k = pacing.first(samples)
    for launches, took in enumerate(times, 1):
        assert type(k) is int
        assert k >= 1
        following = pacing.next(k, launches, took)
        assert following <= max(2 * k, 8)
        k = following
    assert pacing.next_round(k, quiet=True, took_ns=0) >= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fixed_kernel_keeps_its_count(policy: str) -> None:
    pacing = Pacing(policy, 4, 4, 100, automatic=False)
    assert {pacing.first(1), pacing.first(10**6), pacing.next(4, 1, 0), pacing.next(4, 9, 10**10)} == {4}


def test_a_kernel_whose_operations_nobody_counts_begins_with_one_step() -> None:
    """Its step may be a loop of any length: 64 of them in the first call took 13 s, and a cancel had to wait."""
    n = 2000
    planes = {"x": np.zeros(n), "c": np.zeros(n), "last": np.full(n, 5.0)}
    runner = eagle.sync.until_done(eagle.deploy(models.looping), max_steps=10, **planes)
    assert runner.bound.step.plans[0].sidecar.meta.get("step_ops") is None
    for policy in POLICIES:
        assert Pacing(policy, 1, 64, runner.bound.ops, automatic=True).first(256) == 1
    assert runner.run().done
    assert np.array_equal(planes["c"], planes["last"])


def test_long_calls_get_shorter_and_short_ones_longer() -> None:
    pacing = Pacing("auto", 1, 64, 100, automatic=True)
    assert pacing.next(100, 1, 1_000) == 200
    assert pacing.next(100, 1, 1_000_000) == 100
    assert pacing.next(100, 1, 30_000_000) == 10
    assert pacing.next(1, 1, 10**12) == 1


@pytest.mark.parametrize("policy", ["", "fast", None, 1, ["auto"]])
def test_an_unknown_policy(policy: Any) -> None:
    with pytest.raises(ValueError, match="host_policy"):
        Pacing(policy, 1, 64, 100, automatic=True)


# ---- packing ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the packed ranges that are made; small ranges are packed, too."""
    sizes: list[int] = []
    real = packing.PackedRange

    class Noted(real):  # type: ignore[misc, valid-type]
        def __init__(self, loop: Any, index: Any) -> None:
            sizes.append(index.size)
            super().__init__(loop, index)

    monkeypatch.setattr(host_run, "PackedRange", Noted)
    monkeypatch.setattr(host_run, "MIN_SAMPLES", 2)
    return sizes


@given(data=st.data(), n=st.integers(1, 700), cap=st.integers(1, 60), threads=st.integers(1, 3))
def test_packed_samples_come_back_to_their_places(data: st.DataObject, n: int, cap: int, threads: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_run, "MIN_SAMPLES", 2)
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        last = rng.integers(1, 50, n).astype(float)
        x = rng.uniform(0.1, 0.9, n)
        want = models.logistic_loop(x, last, 3.99)
        planes = {"x": x.copy(), "k": np.zeros(n), "last": last, "r": 3.99}
        runner = eagle.sync.until_done(eagle.deploy(models.logistic), max_steps=cap, **planes)
        runner.host_threads = threads
        for _ in range(60):
            if runner.run().done:
                break
        assert np.array_equal(planes["k"], last)
        np.testing.assert_allclose(planes["x"], want, rtol=0, atol=1e-6)


def test_ranges_are_packed_and_vectors_and_tables_go_with_them(packs: list[int]) -> None:
    n = 3000
    end = np.random.default_rng(2).integers(1, 3000, n).astype(float)
    u = np.arange(3.0 * n).reshape(3, n)
    p, t = np.zeros((3, n)), np.zeros(n)
    report = eagle.sync.run_until_done(eagle.deploy(models.glide), max_steps=4000, u=u, dt=1.0, end=end, p=p, t=t)
    assert report.done
    assert packs
    assert np.array_equal(t, end)
    assert np.array_equal(p, u * end)


def test_samples_that_ended_together_are_cut_smaller_until_they_no_longer_do(packs: list[int]) -> None:
    n = 9000
    last = np.full(n, 3000.0)
    planes = {"x": np.zeros(n), "goal": last, "c": np.zeros(n)}
    sim = eagle.sync.simulation(models.climb, max_steps=4000, r=1.0, **planes)
    loop: Any = sim.runner.bound
    told = []
    for spread in (False, False, True, True, False):
        last[...] = np.random.default_rng(1).integers(1, 3000, n) if spread else 3000.0
        planes["x"][...] = planes["c"][...] = 0.0
        sim.reset()
        assert sim.run().done
        np.testing.assert_array_equal(planes["c"], last)
        told.append(loop.together)
    assert told == [True, True, False, False, True]
    loop.together = False
    sim.reset()
    planes["x"][...] = planes["c"][...] = 0.0
    sim.runner._max_steps = 5
    assert not sim.run().done
    assert not loop.together  # nobody has ended, which says nothing
    assert packs
    assert len(list(cut(n, 1, 49, 44, True))) > len(list(cut(n, 1, 49, 44, False)))


def test_kernels_that_read_their_place_are_not_packed(packs: list[int]) -> None:
    rng = np.random.default_rng(3)
    n = 6000
    last = rng.integers(1, 200, n).astype(float)
    for kernel, each in ((models.numbered, np.arange(float(n))), (models.counted, np.full(n, float(n)))):
        result = eagle.sync.simulate(kernel, x=np.zeros(n), c=np.zeros(n), last=last, max_steps=1000)
        assert np.array_equal(result.x, last * each)
    assert packs == []


def test_reordering_samples_that_read_their_place_is_refused() -> None:
    planes = {"x": np.zeros(9), "c": np.zeros(9), "last": np.ones(9)}
    for threshold in (True, 0.5):
        with pytest.raises(ValueError, match=r"reorder=.*reads its sample's number"):
            eagle.sync.simulate(models.numbered_listed, **planes, max_steps=5, reorder=threshold)
    assert eagle.sync.simulate(models.numbered_listed, **planes, max_steps=5).done


def test_draws_are_the_samples_own() -> None:
    def draw(n: int, threads: int) -> np.ndarray:
        sim = eagle.sync.simulation(models.drawing, x=np.zeros(n), c=np.zeros(n), last=np.full(n, 20.0), max_steps=50)
        sim.runner.host_threads = threads
        return sim.run().x

    one = draw(5000, 1)
    assert np.array_equal(draw(5000, 3), one)
    assert np.array_equal(draw(700, 2), one[:700])
    assert np.unique(one).size == one.size


# ---- ends that nobody planned ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reorder": True}])
@pytest.mark.parametrize("kernel", [models.climb_listed, models.climb_listed_auto])
def test_a_sample_revived_through_the_mask_runs(kernel: Any, options: dict[str, Any]) -> None:
    """As many live samples as before, but others: the list of the live must be made anew."""
    goal = np.array([1.0, 1.0, 1.0, 1.0, 100.0, 100.0, 100.0, 100.0])
    x, c = np.zeros(8), np.zeros(8)
    sim = eagle.sync.simulation(kernel, x=x, c=c, goal=goal, r=1.0, max_steps=16, **options)
    sim.run()
    sim.terminated[0], sim.terminated[7] = False, True
    x[0], c[0], goal[0] = 0.0, 0.0, 5.0
    sim.run()
    assert c[0] == 5.0
    assert c[7] == 16.0
    assert list(c[4:7]) == [32.0] * 3


def test_a_run_whose_coroutine_is_thrown_away_has_ended_when_it_is_gone() -> None:
    """A loop that is given up in the middle of a run, as a debugger or a crashing service does it."""
    planes = models.endless_planes(100_000)
    loop = asyncio.new_event_loop()
    try:
        sim = loop.run_until_complete(eagle.simulation(models.climb, **planes, max_steps=10**9))
        run = sim.run()
        task = loop.create_task(run)

        async def until_it_runs() -> None:
            with anyio.fail_after(20):
                while not planes["c"].any():
                    await anyio.lowlevel.checkpoint()

        loop.run_until_complete(until_it_runs())
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        run.close()
        before = planes["c"].copy()
        sim.reset()  # refused while anything of the run is left
        loop.run_until_complete(asyncio.sleep(0.05))
        assert np.array_equal(planes["c"], before)
    finally:
        loop.close()


async def test_a_run_that_gets_no_thread_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = await eagle.simulation(models.climb, **models.endless_planes(5000), max_steps=50)
    in_flight = eagle.aio.statistics().in_flight
    watch = sim.progress()
    with monkeypatch.context() as patch:
        without = Team()
        patch.setattr(host_run, "team", lambda: without)
        patch.setattr(without, "_start_thread", lambda: False)
        with pytest.raises(StateError, match="limit of threads"):
            await sim.run()
    with anyio.fail_after(20):
        assert [value async for value in watch]
    assert eagle.aio.statistics().in_flight == in_flight
    sim.reset()
    assert (await sim.run()).report.steps == 50


def test_a_run_stopped_before_it_begins_counts_nowhere() -> None:
    sim = eagle.sync.simulation(models.climb, **models.endless_planes(100), max_steps=50)
    runner = sim.runner
    before = eagle.aio.statistics()
    runner.claim()
    run = runner.start()
    run.stop()
    assert run.next(join=True) is None
    run.close()
    runner.release()
    after = eagle.aio.statistics()
    assert (after.in_flight, after.cancelled) == (before.in_flight, before.cancelled)
    assert run.reported.steps == 0
    assert sim.run().report.steps == 50


@pytest.mark.parametrize("n", [1, 1000, 4096])
def test_a_brief_run_is_one_range(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    turn = RangesRun.turn

    def noted(run: RangesRun) -> Any:
        ranges = list(turn(run))
        if ranges:
            counts.append(len(ranges))
        return ranges

    monkeypatch.setattr(RangesRun, "turn", noted)
    monkeypatch.setattr(host_run, "_BRIEF_NS", 10**12)  # however slow this machine is
    planes = {"x": np.zeros(n), "goal": np.full(n, 3.0), "c": np.zeros(n)}
    sim = eagle.sync.simulation(models.climb, max_steps=10, r=1.0, **planes)
    sim.runner.host_threads = 2
    for _ in range(2):
        planes["x"][...] = planes["c"][...] = 0.0
        sim.reset()
        assert sim.run().done
        np.testing.assert_array_equal(planes["x"], planes["goal"])
    assert counts[-1] == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_run_that_turns_out_longer_than_the_last_one_is_cut_after_all(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[RangesRun] = []
    result = RangesRun.result

    def noted(run: RangesRun) -> Any:
        runs.append(run)
        return result(run)

    monkeypatch.setattr(RangesRun, "result", noted)
    monkeypatch.setattr(host_run, "_BRIEF_NS", 10**12)  # however slow this machine is
    n = 1000
    goal = np.full(n, 3.0)
    planes = {"x": np.zeros(n), "goal": goal, "c": np.zeros(n)}
    sim = eagle.sync.simulation(models.climb, max_steps=10**9, r=1.0, **planes)
    sim.runner.host_threads = threads
    assert sim.run().done
    monkeypatch.setattr(host_run, "SLICE_NS", 1)  # whatever comes takes longer than a slice
    monkeypatch.setattr(Pacing, "next", lambda *_: 5)
    monkeypatch.setattr(Pacing, "first", lambda *_: 5)
    goal[...] = np.random.default_rng(1).integers(10, 500, n)
    goal[n // 2] = 500.0
    for name in ("x", "c"):
        planes[name][...] = 0.0
    sim.reset()
    after = sim.run()
    np.testing.assert_array_equal(planes["x"], goal)
    np.testing.assert_array_equal(planes["c"], goal)
    assert (after.done, after.steps) == (True, 500)
    ranges = sorted((piece.base, piece.count) for piece in runs[-1]._ranges)
    assert ranges == ([(0, n)] if threads == 1 else [(0, 512), (512, 488)])
    assert all(sum(k * count for k, count in piece.by_k.items()) == piece.steps for piece in runs[-1]._ranges)


@pytest.mark.parametrize("first", [False, True], ids=["never ran", "ran before"])
async def test_a_follower_of_a_run_that_is_stopped_before_it_begins_sees_its_end(first: bool) -> None:
    sim = await eagle.simulation(models.climb, **models.endless_planes(100), max_steps=50)
    if first:
        await sim.run()
    seen = []

    async def follow(values: Any) -> None:
        seen.extend([now async for now in values])

    async def stop() -> None:
        sim.runner.stop()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(follow, sim.progress(0.001))
            group.start_soon(sim.run)
            group.start_soon(stop)
    assert (seen[-1].n, seen[-1].finished) == (100, 0)


def test_followers_of_a_run_with_nothing_to_do_see_its_end() -> None:
    planes = {"x": np.full(5, 9.0), "goal": np.full(5, 3.0), "c": np.zeros(5)}
    sim = eagle.sync.simulation(models.climb, max_steps=10, r=1.0, **planes)
    sim.run()
    values = sim.progress(0.001)
    sim.run()
    seen = []

    async def follow() -> None:
        with anyio.fail_after(20):
            seen.extend([now async for now in values])

    asyncio.run(follow())
    assert [(now.finished, now.steps) for now in seen] == [(5, 0)]
