from __future__ import annotations

import asyncio
import dataclasses
import math
import threading

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle
from eagle.aio.progress import Feed, Meter, Progress


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def value(finished: int, n: int = 10, steps: int = 0) -> Progress:
    return Progress(n, finished, steps, 1.0, float(finished), 0.0)


def test_the_record_is_public_and_frozen() -> None:
    assert eagle.Progress is Progress
    assert [field.name for field in dataclasses.fields(Progress)] == [
        "n",
        "finished",
        "steps",
        "elapsed_s",
        "samples_per_s",
        "eta_s",
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        value(1).finished = 2  # type: ignore[misc]


def test_rate_and_eta() -> None:
    clock = Clock()
    meter = Meter(100, 20, clock=clock)
    start = meter.read(20)
    assert (start.finished, start.samples_per_s, start.eta_s) == (20, 0.0, math.inf)
    clock.now += 4.0
    later = meter.read(60, 1000)
    # Those done before the run do not count towards its rate.
    assert (later.elapsed_s, later.samples_per_s, later.eta_s, later.steps) == (4.0, 10.0, 4.0, 1000)
    assert meter.read(100).eta_s == 0.0


def test_a_run_without_samples_is_over() -> None:
    assert Meter(0).read(0).eta_s == 0.0


@pytest.mark.parametrize("kind", [int, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**32 - 1, 2**32])
def test_sums_are_exact_and_never_wrap(count: int, kind: type) -> None:
    if kind is np.uint32 and count == 2**32:
        pytest.skip("no such uint32")
    steps = Meter(1).read(0, kind(count)).steps
    assert steps == count
    assert type(steps) is int


def test_counts_must_be_whole_numbers() -> None:
    with pytest.raises(TypeError):
        Meter(1).read(0, 1.5)  # type: ignore[arg-type]


@given(st.integers(0, 50), st.lists(st.tuples(st.integers(-5, 60), st.integers(-9, 2**40), st.floats(-1.0, 9.0))))
def test_values_are_monotone_whatever_is_fed(n: int, fed: list[tuple[int, int, float]]) -> None:
    clock = Clock()
    meter = Meter(n, clock=clock)
    before = meter.read(0)
    for finished, steps, seconds in fed:
        clock.now += seconds
        now = meter.read(finished, steps)
        assert before.finished <= now.finished <= n
        assert 0 <= before.steps <= now.steps
        assert now.eta_s >= 0.0
        assert now.samples_per_s >= 0.0
        assert now.elapsed_s >= 0.0
        before = now


@pytest.mark.parametrize("interval", [0, -1, 0.0, math.inf, math.nan])
def test_an_interval_that_is_no_time_is_refused(interval: float) -> None:
    with pytest.raises(ValueError, match="positive, finite"):
        Feed().watch(interval)


@pytest.mark.parametrize("interval", ["1", None, True])
def test_an_interval_that_is_no_number_is_refused(interval: object) -> None:
    with pytest.raises(TypeError, match="number of seconds"):
        Feed().watch(interval)  # type: ignore[arg-type]


async def test_a_watcher_sees_the_values_and_the_end() -> None:
    feed = Feed()
    seen: list[int] = []

    async def watch() -> None:
        async for now in feed.watch(0.001):
            seen.append(now.finished)  # noqa: PERF401 - one by one: the test looks at it meanwhile

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            feed.begin(value(0))
            for finished in (3, 7):
                feed.publish(value(finished))
                while finished not in seen:
                    await anyio.sleep(0.001)
            feed.end(value(10))
    assert seen == sorted(seen)
    assert seen[-1] == 10


async def test_before_a_run_it_waits_for_the_next_one() -> None:
    feed = Feed()
    feed.begin(value(0))
    feed.end(value(9))  # an earlier run: not the one that is watched
    watcher = feed.watch(0.001)
    with anyio.move_on_after(0.02) as early:
        await anext(watcher)
    assert early.cancelled_caught
    feed.begin(value(1))
    with anyio.fail_after(20):
        assert (await anext(watcher)).finished == 1
        feed.end(value(10))
        assert (await anext(watcher)).finished == 10
        with pytest.raises(StopAsyncIteration):
            await anext(watcher)


async def test_a_run_too_short_to_be_seen_gives_its_final_value() -> None:
    feed = Feed()
    watcher = feed.watch(0.001)
    feed.begin(value(0))
    feed.end(value(10))
    feed.begin(value(0))  # the next run goes on already
    with anyio.fail_after(20):
        assert [now.finished async for now in watcher] == [10]


async def test_a_long_interval_does_not_delay_the_end() -> None:
    feed = Feed()
    feed.begin(value(0))
    watcher = feed.watch(3600.0)
    with anyio.fail_after(20):
        assert (await anext(watcher)).finished == 0
        feed.end(value(10))
        assert [now.finished async for now in watcher] == [10]


async def test_a_run_that_failed_ends_its_watchers() -> None:
    feed = Feed()
    feed.begin(value(0))
    feed.publish(value(4))
    watcher = feed.watch()
    feed.end()
    with anyio.fail_after(20):
        assert [now.finished async for now in watcher] == [4]


async def test_two_watchers_do_not_disturb_each_other() -> None:
    feed = Feed()
    feed.begin(value(2))
    first, second = feed.watch(0.001), feed.watch(0.001)
    with anyio.fail_after(20):
        assert (await anext(first)).finished == 2
        feed.end(value(10))
        assert [now.finished async for now in first] == [10]
        assert [now.finished async for now in second] == [10]


@pytest.mark.parametrize("way_out", ["break", "raise", "cancel"])
async def test_leaving_early_leaves_nothing(
    way_out: str, anyio_backend: tuple[str, object], silence: list[tuple[str, str]]
) -> None:
    feed = Feed()
    feed.begin(value(1))
    threads = threading.active_count()
    tasks = asyncio.all_tasks() if anyio_backend[0] == "asyncio" else set()

    async def body(scope: anyio.CancelScope) -> None:
        async for _ in feed.watch(0.001):
            if way_out == "break":
                break
            if way_out == "raise":
                raise ZeroDivisionError
            scope.cancel()
            await anyio.sleep(1)

    with anyio.CancelScope() as scope:
        try:
            await body(scope)
        except ZeroDivisionError:
            pass
    feed.watch()  # made and never used
    assert threading.active_count() == threads
    if anyio_backend[0] == "asyncio":
        assert asyncio.all_tasks() == tasks


async def test_a_watcher_lets_others_run_at_every_value() -> None:
    feed = Feed()
    feed.begin(value(1))
    watcher = feed.watch(1e-9)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(other)
            for _ in range(50):
                await anext(watcher)
            group.cancel_scope.cancel()
    assert turns >= 40  # trio shuffles who is first in a round
