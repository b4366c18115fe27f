"""Batcher over CuPy planes: the bits of running alone, nothing through the host, streams, sides that are not mixed."""

from __future__ import annotations

import math
from typing import Any

import anyio
import numpy as np
import pytest

import eagle
from tests.helpers.batch_cases import CASES
from tests.helpers.batch_client import ENDLESS, Client, R, gathered
from tests.helpers.batch_models import climb_request, climbed
from tests.helpers.models import (
    climb,
    logistic,
    numbered_listed,
)

pytestmark = pytest.mark.gpu
LIMIT_S = 120.0


@pytest.fixture
def cupy() -> Any:
    from eagle.kernels.device import require_cupy

    return require_cupy()


def climbing(**options: Any) -> eagle.Batcher:
    return eagle.Batcher(climb, **{"max_steps": 10_000, "max_wait": 0.005, "r": 1.0, **options})


def moved(planes: dict[str, Any], cupy: Any) -> dict[str, Any]:
    return {name: cupy.asarray(plane) for name, plane in planes.items()}


def right(result: Any, planes: dict[str, Any], cupy: Any) -> bool:
    """Whether a `climb` result of device planes lies on the device and is right."""
    assert all(isinstance(array, cupy.ndarray) for array in (result.x, result.c, result.finished))
    goal = planes["goal"].get()
    return bool(
        result.done
        and result.n == goal.size
        and np.array_equal(result.x.get(), goal)
        and np.array_equal(result.c.get(), goal)
        and result.finished.get().all()
        and not planes["x"].get().any()
    )


# hawk 0.7.1 writes CUDA that does not compile for an automatic kernel that reads its sample's number.
ON_DEVICE = {**CASES, "sample numbers": (numbered_listed, *CASES["sample numbers"][1:])}


@pytest.mark.parametrize("case", ON_DEVICE)
@pytest.mark.parametrize("max_steps", [150, 10_000])
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_results_have_the_bits_of_running_alone(
    case: str, max_steps: int, cupy: Any, anyio_backend: object
) -> None:
    model, make, shared = ON_DEVICE[case]
    sizes = [1, 2, 97, 300, 5, 256, 1, 1000, 33, 17, 3000]
    requests = [moved(make(n, i), cupy) for i, n in enumerate(sizes)]
    kept = [{name: plane.copy() for name, plane in request.items()} for request in requests]
    async with eagle.Batcher(model, max_steps=max_steps, max_samples=2048, **shared) as batcher:
        results = await gathered(batcher, requests, LIMIT_S) + await gathered(batcher, requests[::-1], LIMIT_S)
    shared = {name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in shared.items()}
    for before, request, result in zip(kept + kept[::-1], requests + requests[::-1], results, strict=True):
        for name, plane in request.items():
            np.testing.assert_array_equal(plane.get(), before[name].get())
        given = {name: plane.copy() for name, plane in before.items()}
        alone = await eagle.simulate(model, **given, **shared, max_steps=max_steps)
        for name, want in alone.state.items():
            got = result[name]
            assert (type(got), got.shape, got.flags.c_contiguous) == (cupy.ndarray, want.shape, True)
            np.testing.assert_array_equal(got.get().view(np.uint64), want.get().view(np.uint64))
        np.testing.assert_array_equal(result.finished.get(), alone.finished.get())
        assert (result.done, result.status, result.n) == (alone.done, alone.status, alone.n)


async def test_host_and_device_requests_go_to_different_batches(cupy: Any) -> None:
    requests = [climb_request(n) if n % 2 else moved(climb_request(n), cupy) for n in range(1, 20)]
    async with climbing() as batcher:
        for _ in range(2):
            results = await gathered(batcher, requests, LIMIT_S)
            reports = {id(result.report): result.report.n for result in results}
            assert sorted(reports.values()) == [90, 100]
            for result, planes in zip(results, requests, strict=True):
                on_host = isinstance(planes["x"], np.ndarray)
                assert climbed(result, planes) if on_host else right(result, planes, cupy)
        with pytest.raises(ValueError, match=r"lie.* on the host"):
            await batcher.simulate(**{**climb_request(), "x": cupy.zeros(5)})


async def test_one_sample_and_none(cupy: Any) -> None:
    async with climbing() as batcher:
        single = await batcher.simulate(x=cupy.zeros(()), c=cupy.zeros(()), goal=cupy.asarray(3.0))
        nothing = await batcher.simulate(**moved(climb_request(0), cupy))
    assert (single.x.shape, single.finished.shape, float(single.x)) == ((), (), 3.0)
    assert (nothing.n, nothing.done, nothing.x.shape) == (0, True, (0,))
    assert isinstance(nothing.x, cupy.ndarray)


async def test_planes_may_come_from_a_stream_that_is_behind(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    n = 20_000
    async with climbing(max_samples=n) as batcher:
        await batcher.simulate(**moved(climb_request(5), cupy))
        planes = moved(climb_request(n, 0.0), cupy)
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            heavy = cupy.ones((3000, 3000))
            for _ in range(5):
                heavy = heavy @ heavy * (1.0 / 3000.0)
            planes["goal"] += 7.0 * heavy[0, 0]
            coroutine = batcher.simulate(**planes)
            parked = coroutine.__await__()
            first = next(parked)  # the request is made while its planes are not there yet

        class Rest:
            def __await__(self) -> Any:
                given = yield first
                while True:
                    try:
                        following = parked.send(given)
                    except StopIteration as end:
                        return end.value
                    given = yield following

        with anyio.fail_after(LIMIT_S):
            result = await Rest()
        with stream:  # and results may be used on any stream
            total = float((result.x + 0.0).sum())
    assert total == 7.0 * n


async def test_finished_requests_are_answered_while_the_others_go_on(cupy: Any) -> None:
    answered: list[Any] = []
    quick, slow = moved(climb_request(300), cupy), moved(climb_request(2, ENDLESS), cupy)

    async def ask(batcher: eagle.Batcher, planes: dict[str, Any]) -> None:
        answered.append(await batcher.simulate(**planes))

    with anyio.fail_after(LIMIT_S):
        async with climbing(max_steps=10**12, max_wait=math.inf) as batcher, anyio.create_task_group() as group:
            for planes in (slow, quick, slow, quick):
                group.start_soon(ask, batcher, planes)
            while len(answered) < 2:
                await anyio.sleep(0.001)
            assert all(right(result, quick, cupy) for result in answered)
            assert (answered[1].report.n, answered[1].report.done) == (604, False)
            more = await batcher.simulate(**quick)  # the places that were freed are taken
            assert right(more, quick, cupy)
            group.cancel_scope.cancel()
        while eagle.aio.statistics().in_flight:
            await anyio.sleep(0.001)


async def test_a_request_larger_than_a_batch_runs_alone(cupy: Any) -> None:
    requests = [moved(climb_request(n), cupy) for n in (64, 65, 200, 1, 1, 1)]
    async with climbing(max_samples=64) as batcher:
        results = await gathered(batcher, requests, LIMIT_S)
    assert all(right(result, planes, cupy) for result, planes in zip(results, requests, strict=True))
    assert [result.report.n for result in results[1:3]] == [65, 200]


async def test_a_thousand_requests(cupy: Any) -> None:
    requests = [moved(climb_request(1 + i % 50), cupy) for i in range(1024)]
    async with climbing() as batcher:
        for _ in range(3):
            results = await gathered(batcher, requests, LIMIT_S)
    assert all(right(result, planes, cupy) for result, planes in zip(results, requests, strict=True))


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_clients(seed: int, cupy: Any, silence: list[object]) -> None:
    tally: dict[str, int] = {}
    with anyio.fail_after(LIMIT_S):
        async with eagle.Batcher(logistic, max_steps=10**12, max_samples=128, max_wait=0.002, r=R) as batcher:
            async with anyio.create_task_group() as group:
                for i in range(12):
                    side = cupy if i % 3 else np
                    group.start_soon(Client(batcher, 1000 * seed + i, tally, side).run, 8)
        while (now := eagle.aio.statistics()).in_flight or now.queued:
            await anyio.sleep(0.001)
    assert tally["answered"] > 30
