"""Batcher: what requests get back, which are refused, and how its block begins and ends."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import pickle
import threading
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import eagle
from eagle.errors import StateError
from tests.helpers.batch_cases import CASES
from tests.helpers.batch_client import gathered
from tests.helpers.batch_models import climb_request, climbed, drift, stair, waiting
from tests.helpers.models import arrived, climb, glide, move, numbered

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

LIMIT_S = 10.0


def climbing(**options: Any) -> eagle.Batcher:
    return eagle.Batcher(climb, **{"max_steps": 10_000, "max_wait": 0.005, "r": 1.0, **options})


# ---- the bits of running alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("max_steps", [150, 10_000])
async def test_results_have_the_bits_of_running_alone(case: str, max_steps: int) -> None:
    model, make, shared = CASES[case]
    sizes = [1, 2, 97, 300, 5, 256, 1, 1000, 33, 17]
    requests = [make(n, i) for i, n in enumerate(sizes)]
    async with eagle.Batcher(model, max_steps=max_steps, max_samples=700, **shared) as batcher:
        results = await gathered(batcher, requests) + await gathered(batcher, requests[::-1])
    for request, result in zip(requests + requests[::-1], results, strict=True):
        alone = await eagle.simulate(model, **copy.deepcopy(request), **shared, max_steps=max_steps)
        assert list(result.state) == list(alone.state)
        for name, want in alone.state.items():
            got = result[name]
            assert (got.shape, got.dtype, got.flags.c_contiguous) == (want.shape, want.dtype, True)
            np.testing.assert_array_equal(got.view(np.uint64), want.view(np.uint64))
        np.testing.assert_array_equal(result.finished, alone.finished)
        assert (result.done, result.status, result.n) == (alone.done, alone.status, alone.n)
        assert result.allocated == alone.allocated


async def test_the_cap_counts_for_each_request() -> None:
    async with climbing(max_steps=4) as batcher:
        short, exact, cut = await gathered(batcher, [climb_request(n) for n in (3, 4, 9)])
    assert [short.status, exact.status, cut.status] == ["finished", "finished", "max_steps"]
    np.testing.assert_array_equal(cut.c, np.minimum(np.arange(1.0, 10.0), 4.0))
    np.testing.assert_array_equal(cut.finished, np.arange(1, 10) <= 4)
    assert not cut.done


# ---- shapes and layouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [float, np.float64, np.asarray], ids=["float", "NumPy scalar", "0-d"])
async def test_one_sample_without_an_axis_comes_back_without_one(number: Callable[[float], Any]) -> None:
    async with climbing() as batcher:
        batch, single = await gathered(
            batcher, [climb_request(3), {"x": number(0.0), "c": number(0.0), "goal": number(3.0)}]
        )
    assert batch.report is single.report
    assert (single.x.shape, single.finished.shape, single.n) == ((), (), 1)
    assert float(single.x) == 3.0
    assert bool(single.finished)
    assert isinstance(single.x, np.ndarray)


async def test_one_vector_comes_back_as_one() -> None:
    async with eagle.Batcher(drift, max_steps=5) as batcher:
        result = await batcher.simulate(v=np.array([1.0, 2.0, 3.0]), k=0.0, last=2.0)
    np.testing.assert_array_equal(result.p, [2.0, 4.0, 6.0])
    assert result.k.shape == ()
    assert result.allocated == ("p",)


async def test_sample_major_planes_come_back_sample_major() -> None:
    u, end = np.arange(12.0).reshape(4, 3), np.full(4, 0.5)
    views = {"u": u.T.copy().T, "end": end, "p": np.zeros((3, 4)).T, "t": np.zeros(4)}
    async with eagle.Batcher(glide, max_steps=100, dt=0.25) as batcher:
        with pytest.warns(eagle.LayoutWarning, match="'u' is sample-major"):
            copied = await batcher.simulate(u=u, end=end, p=np.zeros((3, 4)), t=np.zeros(4))
        viewed = await batcher.simulate(**views)
        marked = await batcher.simulate(**{**views, "p": eagle.samples_first(np.zeros((3, 4)).T)})
    np.testing.assert_array_equal(copied.p, 0.5 * u.T)
    for result in (viewed, marked):
        assert result.p.shape == (4, 3)
        np.testing.assert_array_equal(result.p, 0.5 * u)


@pytest.mark.parametrize("layout", ["samples_first", "samples_last"])
async def test_a_square_plane_is_read_as_the_layout_says(layout: str) -> None:
    v = np.arange(9.0).reshape(3, 3)
    rest = {"k": np.zeros(3), "last": np.ones(3)}
    async with eagle.Batcher(drift, max_steps=5) as batcher:
        with pytest.raises(ValueError, match="reads as samples first and as samples last"):
            await batcher.simulate(v=v, **rest)
    async with eagle.Batcher(drift, max_steps=5, layout=layout) as batcher:
        given = v.T.copy().T if layout == "samples_first" else v
        result = await batcher.simulate(v=given, p=np.zeros_like(given), **rest)
    np.testing.assert_array_equal(result.p, 2.0 * v)


async def test_nothing_in_nothing_out_at_once() -> None:
    async with eagle.Batcher(drift, max_steps=5) as batcher:
        result = await batcher.simulate(v=np.zeros((3, 0)), k=np.zeros(0), last=np.zeros(0))
    assert (result.n, result.done, result.status, result.steps) == (0, True, "finished", 0)
    assert (result.p.shape, result.k.shape, result.finished.shape) == ((3, 0), (0,), (0,))
    assert result.finished.dtype == bool


async def test_nothing_in_of_a_kernel_that_runs_alone() -> None:
    async with eagle.Batcher(numbered, max_steps=5) as batcher:
        with anyio.fail_after(LIMIT_S):
            result = await batcher.simulate(x=np.zeros(0), c=np.zeros(0), last=np.zeros(0))
    assert (result.n, result.status) == (0, "finished")


async def test_a_request_after_an_outer_cancellation_does_not_wait_for_ever() -> None:
    """Clean-up of a cancelled block, shielded, still asks: it is answered, or told that the Batcher is closed."""
    with anyio.CancelScope() as outer:
        async with climbing() as batcher:
            await batcher.simulate(**climb_request(3, 1))
            outer.cancel()
            with anyio.CancelScope(shield=True), anyio.fail_after(LIMIT_S):
                await anyio.sleep(0.01)
                with contextlib.suppress(StateError):
                    assert (await batcher.simulate(**climb_request(3, 1))).n == 3


# ---- results --------------------------------------------------------------------------------------------------------


async def test_results_are_new_arrays_and_the_requests_own_stay() -> None:
    zeros = np.zeros(5)
    zeros.flags.writeable = False  # nothing is written into it, so it may be, and may be given twice
    goal = np.arange(1.0, 6.0)
    async with climbing() as batcher:
        first = await batcher.simulate(x=zeros, c=zeros, goal=goal)
        kept = first.x.copy(), first.c.copy()
        second = await batcher.simulate(x=zeros, c=zeros, goal=goal + 1.0)
    np.testing.assert_array_equal(goal, np.arange(1.0, 6.0))
    np.testing.assert_array_equal(first.x, kept[0])  # the batch's arrays were used again meanwhile
    np.testing.assert_array_equal(first.c, kept[1])
    np.testing.assert_array_equal(second.x, goal + 1.0)
    assert not np.shares_memory(first.x, second.x)
    assert first.x.flags.writeable
    assert first.x is first["x"] is first.state["x"]
    assert first.finished is first.finished


async def test_a_result_that_is_read_late_holds_its_own_batch() -> None:
    async with climbing() as batcher:
        requests = [climb_request(n) for n in (1, 4, 9)]
        results = [await gathered(batcher, requests) for _ in range(4)]
    for batch in results:
        assert all(climbed(result, planes) for result, planes in zip(batch, requests, strict=True))


async def test_the_report_is_the_batchs() -> None:
    async with climbing() as batcher:
        small, large = await gathered(batcher, [climb_request(3), climb_request(40)])
    assert small.report is large.report
    assert (small.report.n, small.report.finished, small.report.done) == (43, 43, True)
    assert (small.n, large.n) == (3, 40)
    assert small.steps == small.report.steps >= 40
    assert 0.0 < small.wall_s < LIMIT_S
    assert repr(small).startswith("<SimResult finished, n=3 in a batch of 43,")


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result))])
async def test_results_can_be_copied(again: Callable[[Any], Any]) -> None:
    planes = climb_request(6)
    async with climbing() as batcher:
        result = again((await gathered(batcher, [planes, climb_request(3)]))[0])
    assert climbed(result, planes)
    with pytest.raises(AttributeError, match=r"speed.*x, c"):
        _ = result.speed
    with pytest.raises(KeyError, match=r"speed.*x, c"):
        _ = result["speed"]


# ---- what is refused ------------------------------------------------------------------------------------------------

WRONG = {
    "length": {"goal": np.ones(4)},
    "name": {"speed": np.ones(5)},
    "dtype": {"x": np.ones(5, np.float32)},
    "none": {"x": None},
    "list": {"x": [0.0] * 5},
    "text": {"x": "zeros"},
    "strided": {"x": np.zeros(10)[::2]},
    "two axes": {"x": np.zeros((5, 1))},
    "one sample among many": {"x": 0.0},
    "no axis": {"x": np.zeros(())},
    "no axis, another": {"goal": np.ones(())},
    "masked": {"x": np.ma.zeros(5)},
    "byte order": {"x": np.zeros(5, ">f8")},
    "mask": {"terminated": np.zeros(5, bool)},
    "counter": {"finished_count": np.zeros(1, np.uint32)},
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_bad_request_fails_alone_as_simulate_does(wrong: str) -> None:
    bad = {**climb_request(5), **WRONG[wrong]}
    with pytest.raises((TypeError, ValueError)) as expected:
        await eagle.simulate(climb, **bad, r=1.0, max_steps=100)
    failed: list[BaseException] = []
    ok = []

    async def ask(batcher: eagle.Batcher, i: int) -> None:
        planes = climb_request(5)
        try:
            result = await batcher.simulate(**(bad if i == 3 else planes))
        except (TypeError, ValueError) as error:
            failed.append(error)
        else:
            ok.append(climbed(result, planes))

    with anyio.fail_after(LIMIT_S):
        async with climbing() as batcher:
            await ask(batcher, 0)  # later ones are recognised by their form
            async with anyio.create_task_group() as group:
                for i in range(8):
                    group.start_soon(ask, batcher, i)
            await ask(batcher, 9)
    assert [(type(e), str(e)) for e in failed] == [(expected.type, str(expected.value))]
    assert ok == [True] * 9


async def test_a_missing_plane_and_a_shared_one_are_named() -> None:
    async with climbing() as batcher:
        with pytest.raises(ValueError, match="missing 'c'"):
            await batcher.simulate(x=np.zeros(3), goal=np.ones(3))
        with pytest.raises(ValueError, match=r"'r' was given to Batcher"):
            await batcher.simulate(**climb_request(), r=1.0)
        with pytest.raises(ValueError, match="missing"):
            await batcher.simulate()


SHARED_WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "missing number": (climb, {}, ValueError, "missing 'r'"),
    "missing table": (stair, {}, ValueError, "missing 'theta'"),
    "unknown": (climb, {"r": 1.0, "speed": 2.0}, ValueError, "no argument 'speed'"),
    "per sample": (climb, {"r": 1.0, "goal": np.ones(3)}, ValueError, "each request brings its own"),
    "no number": (climb, {"r": "fast"}, TypeError, "'r' is one real number"),
    "array": (climb, {"r": np.ones(3)}, ValueError, "'r' is one number"),
    "table dtype": (stair, {"theta": np.ones(2, np.float32)}, ValueError, "'theta' must be float64"),
    "table extent": (stair, {"theta": np.ones(3)}, ValueError, "'theta' is declared with 2"),
    "no kernel": (3, {}, ValueError, "a model is a hawk kernel"),
    "never finishes": (move, {"r": 1.0}, ValueError, "never finishes"),
}


@pytest.mark.parametrize("wrong", SHARED_WRONG)
async def test_a_wrong_model_or_shared_value_is_refused_on_entering(wrong: str) -> None:
    model, shared, kind, text = SHARED_WRONG[wrong]
    batcher = eagle.Batcher(model, max_steps=5, **shared)
    with pytest.raises(kind, match=text):
        async with batcher:
            pytest.fail("it was entered")
    with pytest.raises(StateError):
        await batcher.simulate(**climb_request())


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"max_steps": 0}, ValueError),
        ({"max_steps": 1.5}, TypeError),
        ({"max_samples": 0}, ValueError),
        ({"max_samples": 2**40}, ValueError),
        ({"max_samples": 10.0}, TypeError),
        ({"max_samples": True}, TypeError),
        ({"max_wait": -1.0}, ValueError),
        ({"max_wait": math.nan}, ValueError),
        ({"max_wait": "soon"}, TypeError),
        ({"max_wait": None}, TypeError),
        ({"target": "gpu"}, ValueError),
        ({"target": 0}, ValueError),
        ({"layout": "sideways"}, ValueError),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(options))):
        climbing(**options)


async def test_a_parameter_that_is_called_like_an_option_wins() -> None:
    async with eagle.Batcher(waiting, max_steps=100, max_samples=64, max_wait=-2.0) as batcher:
        result = await batcher.simulate(x=np.zeros(3), goal=np.full(3, -1.0))
    np.testing.assert_array_equal(result.x, [-2.0] * 3 if result.steps == 1 else result.x)
    assert result.x[0] < 0.0
    unset = eagle.Batcher(waiting, max_steps=100)  # a default is not the kernel's
    with pytest.raises(ValueError, match="missing 'max_wait'"):
        await unset.__aenter__()


async def test_until_scalar_type_and_plans_are_taken_as_by_simulation() -> None:
    planes = {"x": np.zeros(4, np.float32), "goal": np.arange(1, 5, dtype=np.float32)}
    async with eagle.Batcher(move, until=arrived, scalar_type="float32", max_steps=100, r=1.0) as batcher:
        result = await batcher.simulate(**planes)
        with pytest.raises(ValueError, match="float32"):
            await batcher.simulate(x=np.zeros(4), goal=np.ones(4))
    np.testing.assert_array_equal(result.x, planes["goal"])
    assert result.x.dtype == np.float32
    async with eagle.Batcher(eagle.deploy(climb), max_steps=100, r=1.0) as batcher:
        assert climbed(await batcher.simulate(**climb_request()), climb_request())


# ---- the block ------------------------------------------------------------------------------------------------------


async def test_before_and_after_the_block_requests_are_refused() -> None:
    batcher = climbing()
    with pytest.raises(RuntimeError, match="not open yet"):
        await batcher.simulate(**climb_request())
    async with batcher:
        with pytest.raises(StateError, match="entered before"):
            await batcher.__aenter__()
        assert climbed(await batcher.simulate(**climb_request()), climb_request())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            await batcher.simulate(**climb_request())
    with pytest.raises(StateError, match="entered before"):
        await batcher.__aenter__()


async def test_an_unused_batcher_closes() -> None:
    with anyio.fail_after(LIMIT_S):
        async with climbing():
            pass


async def test_leaving_answers_what_was_asked(silence: list[object]) -> None:
    got: list[bool] = []

    async def ask(batcher: eagle.Batcher, planes: dict[str, Any]) -> None:
        got.append(climbed(await batcher.simulate(**planes), planes))

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            async with climbing(max_steps=10**9, max_wait=math.inf, max_samples=8) as batcher:
                group.start_soon(ask, batcher, climb_request(2, 2e7))
                for n in range(1, 21):
                    group.start_soon(ask, batcher, climb_request(n))
                await anyio.wait_all_tasks_blocked()
            assert batcher._lanes == {}
    assert got == [True] * 21


@pytest.mark.parametrize("way_out", ["raise", "cancel", "cancel while draining"])
async def test_an_error_in_the_block_cancels_what_is_pending(way_out: str, silence: list[object]) -> None:
    failed: list[str] = []

    async def ask(batcher: eagle.Batcher, goal: float) -> None:
        try:
            await batcher.simulate(**climb_request(2, goal))
        except StateError as error:
            failed.append(str(error))

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            with anyio.CancelScope() as scope:
                try:
                    async with climbing(max_steps=10**12, max_wait=math.inf) as batcher:
                        for goal in (1e12, 1e12, 3.0):
                            group.start_soon(ask, batcher, goal)
                            await anyio.wait_all_tasks_blocked()
                        if way_out == "raise":
                            raise ZeroDivisionError("the block's own")
                        scope.cancel()
                        if way_out == "cancel":
                            await anyio.sleep_forever()
                except ZeroDivisionError:
                    assert way_out == "raise"
            assert scope.cancelled_caught == (way_out != "raise")
    assert len(failed) == 3
    assert all("left by an exception" in text for text in failed)


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"])
async def test_native_cancels_of_the_block_stop_what_runs(anyio_backend: object, silence: list[object]) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        async with climbing(max_steps=10**12) as batcher:
            entered.set()
            await batcher.simulate(**climb_request(2, 1e12))

    task = asyncio.create_task(work())
    await entered.wait()
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with anyio.fail_after(LIMIT_S):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not [t for t in asyncio.all_tasks() if t is task or "batch" in repr(t.get_coro())]


async def test_another_loop_is_refused() -> None:
    seen: list[BaseException] = []

    def elsewhere(batcher: eagle.Batcher) -> None:
        async def ask() -> None:
            try:
                await batcher.simulate(**climb_request())
            except StateError as error:
                seen.append(error)

        anyio.run(ask)

    with anyio.fail_after(LIMIT_S):
        async with climbing() as batcher:
            await anyio.to_thread.run_sync(elsewhere, batcher)
            assert climbed(await batcher.simulate(**climb_request()), climb_request())
    assert "belongs to the event loop that entered it" in str(seen[0])


def test_it_cannot_be_used_without_a_loop() -> None:
    coroutine = climbing().simulate(**climb_request())
    with pytest.raises(StateError):
        coroutine.send(None)


async def test_a_build_that_fails_later_reaches_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle.aio.batch_frame import Frames

    def fails(*_: object) -> None:
        raise eagle.ArtifactError("the library is gone")

    with anyio.fail_after(LIMIT_S):
        async with climbing() as batcher:
            with monkeypatch.context() as patch:
                patch.setattr(Frames, "prepare", fails)
                results = await asked(batcher, 3)
            assert [type(result) for result in results] == [eagle.ArtifactError] * 3
            with monkeypatch.context() as patch:
                patch.setattr(Frames, "build", fails)
                results = await asked(batcher, 3)
            assert [type(result) for result in results] == [eagle.ArtifactError] * 3
            assert climbed(await batcher.simulate(**climb_request()), climb_request())


async def asked(batcher: eagle.Batcher, count: int) -> list[Any]:
    """Results or errors of some requests."""
    got: list[Any] = []

    async def ask() -> None:
        try:
            got.append(await batcher.simulate(**climb_request()))
        except Exception as error:
            got.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(ask)
    return got


# ---- watching -------------------------------------------------------------------------------------------------------


async def test_a_trace_shows_the_batches(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "batches.json"
    async with climbing() as batcher:
        with eagle.aio.trace(path):
            await gathered(batcher, [climb_request(n) for n in (2, 3, 4)])
    spans = [event for event in json.loads(path.read_text()) if event["ph"] == "X" and event["name"] == "batch"]
    assert [(span["args"]["requests"], span["args"]["samples"]) for span in spans] == [(3, 9)]


async def test_statistics_return_to_rest() -> None:
    before = eagle.aio.statistics()
    async with climbing() as batcher:
        await gathered(batcher, [climb_request(n) for n in range(1, 30)])
        with pytest.raises(ValueError, match="speed"):
            await batcher.simulate(**climb_request(), speed=1.0)
    after = eagle.aio.statistics()
    assert (after.in_flight, after.queued) == (before.in_flight, before.queued)
    assert (after.failed, after.cancelled) == (before.failed, before.cancelled)
    assert after.done > before.done


async def test_nothing_is_left_behind(anyio_backend: tuple[str, object]) -> None:
    async with climbing() as batcher:
        await batcher.simulate(**climb_request())
    threads = threading.active_count()
    tasks = asyncio.all_tasks() if anyio_backend[0] == "asyncio" else set()
    for _ in range(5):
        async with climbing() as batcher:
            await gathered(batcher, [climb_request(n) for n in range(1, 20)])
    assert threading.active_count() <= threads
    if anyio_backend[0] == "asyncio":
        assert asyncio.all_tasks() == tasks
