"""Watching whole runs: the bar that never hurts, the iterator that leaves nothing, exact totals, traces, statistics."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import eagle
import eagle.sync
from tests.helpers.child import run_script
from tests.helpers.models import climb
from tests.helpers.streams import Rude

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable


def planes(n: int = 50, goal: float | None = None) -> dict[str, Any]:
    """With r = 1 sample i ends at x = c = goal[i]."""
    goals = np.arange(1.0, n + 1.0) if goal is None else np.full(n, goal)
    return {"x": np.zeros(n), "c": np.zeros(n), "goal": goals, "r": 1.0}


@pytest.mark.parametrize(
    "make",
    [lambda: Rude(2, OSError("the terminal is gone")), object, lambda: None],
    ids=["write raises", "no isatty", "None"],
)
@pytest.mark.parametrize("tqdm", [True, False], ids=["tqdm", "plain"])
def test_a_bad_terminal_does_not_hurt_the_run(
    make: Callable[[], object], tqdm: bool, monkeypatch: pytest.MonkeyPatch, silence: list[object]
) -> None:
    if not tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    given = planes(2000)
    monkeypatch.setattr(sys, "stderr", make())
    result = eagle.sync.simulate(climb, **given, max_steps=5000, progress=True)
    monkeypatch.undo()
    assert result.done
    np.testing.assert_array_equal(result.c, given["goal"])


SCRIPT = """
    import sys
    import numpy as np
    import hawk
    from hawk import Mutable, Param, Scalar, Terminated
    import eagle.sync

    @hawk.kernel
    def climb(x: Mutable[Scalar], c: Mutable[Scalar], goal: Scalar, r: Param, terminated: Terminated):
        up = x + r
        x = up
        c = c + 1.0
        terminated = up >= goal

    {before}
    goal = np.arange(1.0, 2001.0)
    result = eagle.sync.simulate(climb, x=np.zeros(2000), c=np.zeros(2000), goal=goal, r=1.0, max_steps=5000,
                                 progress=True)
    print(result.done and np.array_equal(result.c, goal))
"""


@pytest.mark.parametrize("before", ["sys.stderr.close()", "import os; os.close(2)", "sys.stderr = None"])
def test_a_process_without_standard_error_ends_well(before: str) -> None:
    ended = run_script(SCRIPT.format(before=before))
    assert (ended.status, ended.out) == (0, "True\n"), ended


def test_a_reader_that_left_does_not_hurt_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = run_script(SCRIPT.format(before=""), stderr=write)
    finally:
        os.close(write)
    assert (ended.status, ended.out) == (0, "True\n"), ended


def test_a_log_gets_the_final_line(capsys: pytest.CaptureFixture[str]) -> None:
    eagle.sync.simulate(climb, **planes(50), max_steps=100, progress=True)
    assert "50 of 50 samples finished (100 %)" in capsys.readouterr().err


def test_no_bar_without_asking(capsys: pytest.CaptureFixture[str]) -> None:
    eagle.sync.simulate(climb, **planes(50), max_steps=100)
    assert capsys.readouterr().err == ""


async def test_the_iterator_gives_monotone_values_and_the_end() -> None:
    n, steps = 4000, 20_000.0
    sim = await eagle.simulation(climb, **planes(n, steps), max_steps=30_000)
    seen: list[eagle.Progress] = []

    async def watch() -> None:
        async for now in sim.progress(0.001):
            seen.append(now)  # noqa: PERF401

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            result = await sim.run()
    assert result.done
    for before, after in itertools.pairwise(seen):
        assert before.finished <= after.finished
        assert before.steps <= after.steps
        assert before.elapsed_s <= after.elapsed_s
    assert all(now.eta_s >= 0.0 and now.samples_per_s >= 0.0 and now.n == n for now in seen)
    last = seen[-1]
    assert (last.finished, last.eta_s) == (n, 0.0)
    assert n * steps <= last.steps <= n * 30_000  # a sample counts to the end of its last launch, at most to the cap
    assert type(last.steps) is int


@pytest.mark.parametrize("way_out", ["break", "raise", "cancel", "never used"])
async def test_leaving_the_iterator_leaves_nothing(
    way_out: str, anyio_backend: tuple[str, object], silence: list[object]
) -> None:
    given = planes(500)
    sim = await eagle.simulation(climb, **given, max_steps=1000)
    await sim.run()
    threads = threading.active_count()
    tasks = asyncio.all_tasks() if anyio_backend[0] == "asyncio" else set()

    async def watch(scope: anyio.CancelScope) -> None:
        async for _ in sim.progress(0.001):
            if way_out == "break":
                return
            if way_out == "raise":
                raise ZeroDivisionError
            scope.cancel()
            await anyio.sleep(1)

    async def run() -> None:
        given["x"][:] = 0.0
        given["c"][:] = 0.0
        sim.reset()
        await sim.run()

    with anyio.fail_after(60):
        if way_out == "never used":
            sim.progress()
            await run()
        else:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def guarded() -> None:
                        try:
                            await watch(scope)
                        except ZeroDivisionError:
                            pass

                    group.start_soon(guarded)
                    with anyio.CancelScope(shield=True):
                        await run()
        given["x"][:] = 0.0
        given["c"][:] = 0.0
        sim.reset()
        result = await sim.run()
    np.testing.assert_array_equal(result.c, given["goal"])
    assert threading.active_count() <= threads
    if anyio_backend[0] == "asyncio":
        assert asyncio.all_tasks() == tasks


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 2])
def test_totals_beyond_32_bits_are_exact(runs: int) -> None:
    n, steps = 1_100_000, 4000
    sim = eagle.sync.simulation(climb, **planes(n, float(steps)), max_steps=steps // runs)
    seen: list[eagle.Progress] = []
    done = threading.Event()

    def watch() -> None:
        async def follow() -> None:
            while not done.is_set():
                async for now in sim.progress(0.05):
                    seen.append(now)  # noqa: PERF401

        anyio.run(follow)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    reports = [sim.run().report for _ in range(runs)]
    done.set()
    assert reports[-1].done
    assert reports[-1].finished == n
    assert all(report.steps == steps // runs and type(report.steps) is int for report in reports)
    assert all(0.0 < (report.lane_utilisation or 1.0) <= 1.0 for report in reports)
    assert all(now.steps >= 0 and now.eta_s >= 0.0 for now in seen)
    assert max(now.steps for now in seen) <= n * steps  # the cap ends every launch exactly


async def test_a_trace_of_a_run_holds_its_spans_with_the_task(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.json"

    async def work() -> None:
        await eagle.simulate(climb, **planes(500), max_steps=1000)

    with anyio.fail_after(60), eagle.aio.trace(path):
        async with anyio.create_task_group() as group:
            group.start_soon(work, name="study 7")
    events = json.loads(path.read_text())
    spans = [event for event in events if event["ph"] == "X"]
    assert spans
    assert any(event["args"].get("task") == "study 7" for event in spans), spans


async def test_statistics_count_runs() -> None:
    before = eagle.aio.statistics()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(lambda: eagle.simulate(climb, **planes(50), max_steps=100))
    after = eagle.aio.statistics()
    assert after.done - before.done >= 5
    assert (after.in_flight, after.queued) == (before.in_flight, before.queued)
    assert (after.failed, after.cancelled) == (before.failed, before.cancelled)
    assert "eagle_done_total" in after.prometheus()
