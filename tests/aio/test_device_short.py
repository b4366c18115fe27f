"""The shortest runs on a device: the fates of their one replay with doubles of graph and loop, and real runs."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import types
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import eagle
import eagle.sync
from eagle.aio import counters, device_loop, device_short
from eagle.aio.device_cells import Counts
from eagle.aio.device_short import ShortRun, Steady
from eagle.aio.events import StreamEnd
from eagle.aio.shapes import Shape
from eagle.aio.wake import mailbox
from eagle.aio.watchers import Watchers
from eagle.errors import DeviceFault
from eagle.kernels.device import NOT_READY, SUCCESS
from tests.helpers import models
from tests.helpers.deadline import deadline
from tests.helpers.event_doubles import FakeEvent
from tests.helpers.sides import Side

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from eagle.aio.report import RunReport

LIMIT_S = 20.0
CAP = 1000


class Graph:
    """A double of `CudaGraph` whose replay ends, and raises its word, when its event says so."""

    name, device, stream = "run of climb", 0, 1234

    def __init__(self, event: FakeEvent) -> None:
        self.event = event

    def replay(self) -> StreamEnd:
        return StreamEnd(self, 1, self.stream, self)  # type: ignore[arg-type]

    def __getitem__(self, _: int) -> int:
        """The host word: a device that fails never raises it."""
        return int(self.event._error is None and self.event.done)

    def streamQuery(self, stream: int) -> int:
        """The driver's word."""
        return SUCCESS if self.event.done else NOT_READY


class Loop:
    """A double of `DeviceLoop` with what a short run touches."""

    n, last_finished, expected_s, number = 100, 0, 0.005, 7
    last_policy: Any = None
    crowd = 2

    def __init__(self, finished: int = 100, steps: int = 60) -> None:
        self.watchers = Watchers()
        counts = Counts(finished, 0, steps, 0, 2500, 0, 0)
        self.cells = types.SimpleNamespace(read=lambda replay: counts)
        self.told: list[float] = []
        self.beside: set[int] = set()
        self.loads: list[int] = []
        self.times: list[tuple[int, bool]] = []

    def timed(self, took_ns: int, steps: int, *, alone: bool) -> None:
        assert took_ns >= 0
        self.times.append((steps, alone))

    def shared(self, load: int) -> None:
        self.loads.append(load)

    def tell(self, evenness: float) -> None:
        self.told.append(evenness)


def started(event: FakeEvent, loop: Loop | None = None, shape: Shape | None = None) -> tuple[ShortRun, Loop]:
    graph, loop = Graph(event), loop or Loop()
    steady = Steady(loop.n, shape or Shape("range", 64), None, None, graph)  # type: ignore[arg-type]
    return ShortRun(loop, steady, CAP), loop  # type: ignore[arg-type]


def awaited(run: ShortRun) -> Coroutine[Any, Any, RunReport]:
    """The run, awaited from the loop that runs here."""
    box = mailbox()
    assert box is not None
    return run.run(box)


def at_rest(loop: Loop, before: int) -> bool:
    """Whether nothing of a run is left: nobody counts it."""
    return not loop.watchers._feed._state.running and counters.in_flight() == before and not loop.beside


@pytest.fixture(params=[0.0, 20e-6, 0.003, 0.05])
def event(request: pytest.FixtureRequest) -> FakeEvent:
    return FakeEvent(after_s=request.param)


async def test_it_is_awaited_however_long_it_takes(event: FakeEvent) -> None:
    before = counters.in_flight()
    run, loop = started(event)
    assert counters.in_flight() == before + 1
    with anyio.fail_after(LIMIT_S):
        report = await awaited(run)
    check_report(report, loop)
    assert at_rest(loop, before)


def test_it_is_waited_for(event: FakeEvent) -> None:
    before = counters.in_flight()
    run, loop = started(event)
    check_report(run.run_blocking(), loop)
    assert at_rest(loop, before)


def check_report(report: RunReport, loop: Loop) -> None:
    assert (report.n, report.finished, report.done, report.steps) == (100, 100, True, 60)
    assert (report.launches, report.launches_by_k, report.exact_steps) == (1, {60: 1}, True)
    assert (report.mode, report.entry, report.block) == ("fused_one", "range", 64)
    assert loop.times == [(60, True)]
    assert loop.told == [2500 / (100 * 60)]
    assert loop.last_finished == 100
    assert loop.loads == [1]


@pytest.mark.parametrize(
    ("entry", "finished", "told", "steps", "launches", "exact"),
    [
        ("range", 99, 1000, CAP, 1, True),
        ("range", 100, 0, 0, 0, True),
        ("step", 100, 0, CAP, 1, False),
        ("step", 7, 0, CAP, 1, True),
        ("persist", 100, 12, 12, 1, True),
    ],
)
def test_the_report_of_every_end(entry: Any, finished: int, told: int, steps: int, launches: int, exact: bool) -> None:
    run, _ = started(FakeEvent(after_s=0.0), Loop(finished, told), Shape(entry, 64))
    report = run.run_blocking()
    assert (report.steps, report.launches, report.done, report.exact_steps) == (steps, launches, finished == 100, exact)
    assert sum(report.launches_by_k.values()) == launches


@pytest.mark.parametrize("expected_s", [0.0, 0.002, 5.0], ids=["parked", "looking", "dozing"])
async def test_a_cancellation_leaves_when_the_replay_has_ended(
    expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "expected_s", expected_s)
    before = counters.in_flight()
    cancelled = counters.statistics().cancelled
    event = FakeEvent()
    run, loop = started(event)
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(awaited, run)
            await anyio.sleep(0.01)
            group.cancel_scope.cancel()
            threading.Timer(0.05, event.finish).start()
    assert event._ended
    assert at_rest(loop, before)
    assert counters.statistics().cancelled == cancelled + 1


@pytest.mark.parametrize("expected_s", [0.0, 0.002, 5.0], ids=["parked", "looking", "dozing"])
async def test_a_fault_reaches_the_caller(expected_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "expected_s", expected_s)
    before, failed = counters.in_flight(), counters.statistics().failed
    event = FakeEvent()
    event.fail(OSError("the device is gone"))
    run, loop = started(event)
    with anyio.fail_after(LIMIT_S), pytest.raises(DeviceFault, match=r"run of climb.*the device is gone"):
        await awaited(run)
    assert at_rest(loop, before)
    assert counters.statistics().failed == failed + 1


def test_a_fault_reaches_a_blocking_caller() -> None:
    event = FakeEvent()
    event.fail(OSError("the device is gone"))
    run, loop = started(event)
    with pytest.raises(DeviceFault, match="run of climb"):
        run.run_blocking()
    assert at_rest(loop, counters.in_flight())


def test_ctrl_c_leaves_when_the_replay_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    event = FakeEvent()
    run, loop = started(event)
    naps = 0

    def nap(_: float) -> None:
        nonlocal naps
        naps += 1
        if naps == 3:
            event.finish()
        raise KeyboardInterrupt

    monkeypatch.setattr(device_short, "sleep", nap)
    with pytest.raises(KeyboardInterrupt):
        run.run_blocking()
    assert naps == 3
    assert at_rest(loop, counters.in_flight())


async def test_a_coroutine_that_is_thrown_away_waits_for_its_buffers() -> None:
    before = counters.in_flight()
    event = FakeEvent()
    run, loop = started(event)
    coroutine = awaited(run)
    coroutine.send(None)
    threading.Timer(0.02, event.finish).start()
    coroutine.close()
    assert event._ended
    assert at_rest(loop, before)


@pytest.mark.parametrize("how", ["closed", "interrupted"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_leaving_while_it_drains_waits_for_its_buffers(how: str, anyio_backend: str) -> None:
    before = counters.in_flight()
    event = FakeEvent()
    run, loop = started(event)
    coroutine = awaited(run)
    coroutine.send(None)
    coroutine.throw(asyncio.CancelledError())  # it drains now
    threading.Timer(0.02, event.finish).start()
    if how == "closed":
        coroutine.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            while True:
                coroutine.throw(KeyboardInterrupt)
    assert event._ended
    assert at_rest(loop, before)


async def test_a_cancelled_one_is_counted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    event = FakeEvent(after_s=0.02)
    run, loop = started(event)
    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(awaited, run)
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert loop.last_finished == 100
    assert loop.last_policy == [60, 100, 60, CAP, 0]


def test_a_slow_moment_does_not_make_threads_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "expected_s", 5.0)
    run, _ = started(FakeEvent(after_s=0.3))
    busy = time.thread_time()
    assert run.run_blocking().done
    assert time.thread_time() - busy < 0.2


async def test_whoever_comes_during_a_run_sees_its_end() -> None:
    event = FakeEvent()
    run, loop = started(event)
    seen = []

    async def follow() -> None:
        seen.extend([now async for now in loop.watchers.watch(0.001)])

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(awaited, run)
            await anyio.lowlevel.checkpoint()
            group.start_soon(follow)
            await anyio.lowlevel.checkpoint()
            event.finish()
    assert [(now.finished, now.steps) for now in seen] == [(100, 2500)]


@pytest.mark.parametrize("took", [(20_000_000, 1_000, 1_000), (2_500_000, 1, 1, 1)])
def test_a_late_look_makes_no_slice_much_longer(took: tuple[int, ...]) -> None:
    loop = device_loop.DeviceLoop.__new__(device_loop.DeviceLoop)
    loop.measured, loop.ns_per_step = True, 1000.0
    for at, ns in enumerate(took):
        before = loop.ns_per_step
        loop.timed(ns, 2500, alone=True)
        assert before / 2 <= loop.ns_per_step <= 2 * before, at
    loop.measured, loop.ns_per_step = False, 1000.0
    loop.timed(2500, 2500, alone=True)
    assert loop.ns_per_step == 1.0  # a first guess may be far off


def test_a_crowd_is_left_later_than_it_is_entered() -> None:
    loop = device_loop.DeviceLoop.__new__(device_loop.DeviceLoop)
    loop.n, loop.crowd, loop._shape = 200_000, 1, Shape("range", 64)
    loop.bound = (types.SimpleNamespace(side=types.SimpleNamespace(sm_count=132)),)  # type: ignore[assignment]
    seen = []
    for load in (7, 8, 7, 4, 3, 64, 30, 8, 7, 1):
        loop.shared(load)
        seen.append(loop.crowd)
    assert seen == [1, 8, 8, 8, 1, 64, 64, 8, 8, 1]


# ---- on the device ---------------------------------------------------------------------------------------------------


def seeded(side: Side, n: int, longest: int = 60) -> tuple[dict[str, Any], np.ndarray]:
    goal = np.random.default_rng(n).integers(1, longest + 1, n).astype(float)
    return side.put({"x": np.zeros(n), "goal": goal, "c": np.zeros(n)}), goal


@pytest.mark.gpu
class TestRealRuns:
    @pytest.fixture
    def shorts(self, monkeypatch: pytest.MonkeyPatch) -> list[ShortRun]:
        """The short runs that are made from now on."""
        made: list[ShortRun] = []

        def make(*args: Any) -> ShortRun:
            made.append(ShortRun(*args))
            return made[-1]

        monkeypatch.setattr(device_loop, "ShortRun", make)
        return made

    @pytest.mark.parametrize("n", [1, 100, 50_000])
    def test_the_same_as_the_first_run(self, n: int, shorts: list[ShortRun]) -> None:
        side = Side("cuda")
        planes, goal = seeded(side, n)
        sim = eagle.sync.simulation(models.climb, max_steps=CAP, r=1.0, **planes)
        for _ in range(4):
            planes["x"][...] = 0.0
            planes["c"][...] = 0.0
            sim.reset()
            result = sim.run()
            np.testing.assert_array_equal(side.get(planes["x"]), goal)
            np.testing.assert_array_equal(side.get(planes["c"]), goal)
            assert (result.done, result.report.finished, result.steps) == (True, n, int(goal.max()))
            assert int(side.get(sim.finished)[0]) == n
        assert shorts

    @deadline
    async def test_many_at_once_are_each_their_own(self, shorts: list[ShortRun]) -> None:
        side = Side("cuda")
        made = [seeded(side, n) for n in range(500, 600)]
        sims = [await eagle.simulation(models.climb, max_steps=CAP, r=1.0, **planes) for planes, _ in made]
        for _ in range(3):
            for sim, (planes, _) in zip(sims, made, strict=True):
                planes["x"][...] = 0.0
                planes["c"][...] = 0.0
                sim.reset()
            results: list[Any] = [None] * len(sims)

            async def run(i: int, results: list[Any] = results) -> None:
                results[i] = await sims[i].run()

            async with anyio.create_task_group() as group:
                for i in range(len(sims)):
                    group.start_soon(run, i)
            for (planes, goal), result in zip(made, results, strict=True):
                np.testing.assert_array_equal(side.get(planes["x"]), goal)
                assert (result.done, result.steps) == (True, int(goal.max()))
        assert len(shorts) >= len(sims)

    @deadline
    async def test_a_cancelled_one_agrees_and_goes_on(self, shorts: list[ShortRun]) -> None:
        side = Side("cuda")
        planes, goal = seeded(side, 2000)
        sim = await eagle.simulation(models.climb, max_steps=7, r=1.0, **planes)
        await sim.run()
        for _ in range(20):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await sim.run()
            x, mask = side.get(planes["x"]), side.get(sim.terminated)
            assert np.array_equal(mask, x >= goal)
            assert int(side.get(sim.finished)[0]) == np.count_nonzero(mask)
        np.testing.assert_array_equal(x, goal)
        assert shorts

    def test_it_is_ordered_behind_the_callers_stream(self, shorts: list[ShortRun]) -> None:
        import cupy

        side = Side("cuda")
        planes, goal = seeded(side, 5000)
        sim = eagle.sync.simulation(models.climb, max_steps=CAP, r=1.0, **planes)
        for _ in range(3):
            sim.run()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            heavy = cupy.ones((2000, 2000))
            for _ in range(10):
                heavy = heavy @ heavy * (1.0 / 2000.0)
            planes["x"][...] = 0.0 * heavy[0, 0]
            planes["goal"] += heavy[0, 0]
            sim.terminated[...] = False
            sim.run()
        np.testing.assert_array_equal(side.get(planes["x"]), goal + 1.0)
        assert len(shorts) >= 2

    def test_threads_run_their_own_at_once(self, shorts: list[ShortRun]) -> None:
        side = Side("cuda")
        made = [seeded(side, 700 + i) for i in range(8)]
        sims = [eagle.sync.simulation(models.climb, max_steps=CAP, r=1.0, **planes) for planes, _ in made]
        errors: list[BaseException] = []

        def work(i: int) -> None:
            try:
                planes, goal = made[i]
                for _ in range(20):
                    planes["x"][...] = 0.0
                    sims[i].reset()
                    sims[i].run()
                    # Not by a device-wide synchronisation, which CUDA refuses while another thread captures.
                    np.testing.assert_array_equal(planes["x"].get(), goal)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not errors
        assert shorts

    def test_nothing_is_left(self) -> None:
        side = Side("cuda")
        planes, _ = seeded(side, 300)
        sim = eagle.sync.simulation(models.climb, max_steps=CAP, r=1.0, **planes)

        async def gathered() -> None:
            twin = await eagle.simulation(models.climb, max_steps=CAP, r=1.0, **planes)
            for _ in range(50):
                await twin.run()

        sim.run()
        asyncio.run(gathered())
        gc.collect()
        pooled = counters.statistics().events_pooled
        for _ in range(100):
            sim.run()
        assert counters.statistics().events_pooled == pooled
        assert counters.in_flight() == 0
