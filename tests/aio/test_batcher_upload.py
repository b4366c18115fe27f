"""Batcher with ``target="cuda"``: planes of the host, run on the device, with one upload and one download a batch."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import anyio
import numpy as np
import pytest

import eagle
from eagle.errors import BackendUnavailable
from eagle.kernels.device import unusable_reason
from tests.helpers.batch_cases import CASES
from tests.helpers.batch_client import ENDLESS, Client, R, gathered
from tests.helpers.batch_models import climb_request, climbed
from tests.helpers.models import climb, climb_listed, logistic, numbered_listed

gpu = pytest.mark.gpu
LIMIT_S = 120.0
ON_DEVICE = {**CASES, "sample numbers": (numbered_listed, *CASES["sample numbers"][1:])}  # see test_batcher_device.py


def climbing(**options: Any) -> eagle.Batcher:
    return eagle.Batcher(climb, **{"max_steps": 10_000, "max_wait": 0.005, "r": 1.0, "target": "cuda", **options})


def on_host(result: Any) -> bool:
    return all(type(array) is np.ndarray for array in (*result.state.values(), result.finished))


@pytest.mark.skipif(unusable_reason() is None, reason="a GPU can be used here")
async def test_without_a_gpu_entering_the_block_says_so() -> None:
    batcher = climbing()
    with pytest.raises(BackendUnavailable):
        await batcher.__aenter__()
    with pytest.raises(RuntimeError, match="closed"):
        await batcher.simulate(**climb_request())


async def test_the_host_may_be_named() -> None:
    async with climbing(target="host") as batcher:
        result = await batcher.simulate(**climb_request())
    assert climbed(result, climb_request())


@gpu
@pytest.mark.parametrize("case", ON_DEVICE)
@pytest.mark.parametrize("max_steps", [150, 10_000])
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_results_have_the_bits_of_running_alone_on_the_device(
    case: str, max_steps: int, anyio_backend: object
) -> None:
    import cupy

    model, make, shared = ON_DEVICE[case]
    sizes = [1, 2, 97, 300, 5, 256, 1, 1000, 33, 17, 3000]
    requests = [make(n, i) for i, n in enumerate(sizes)]
    kept = [{name: plane.copy() for name, plane in request.items()} for request in requests]
    async with eagle.Batcher(model, max_steps=max_steps, max_samples=2048, target="cuda", **shared) as batcher:
        results = await gathered(batcher, requests, LIMIT_S) + await gathered(batcher, requests[::-1], LIMIT_S)
    shared = {name: cupy.asarray(value) if isinstance(value, np.ndarray) else value for name, value in shared.items()}
    for before, request, result in zip(kept + kept[::-1], requests + requests[::-1], results, strict=True):
        for name, plane in request.items():
            np.testing.assert_array_equal(plane, before[name])
        given = {name: cupy.array(plane) for name, plane in before.items()}
        alone = await eagle.simulate(model, **given, **shared, max_steps=max_steps)
        assert on_host(result)
        for name, want in alone.state.items():
            got = result[name]
            assert (got.shape, got.dtype, got.flags.c_contiguous) == (want.shape, want.dtype, True)
            np.testing.assert_array_equal(got.view(np.uint64), want.get().view(np.uint64))
        np.testing.assert_array_equal(result.finished, alone.finished.get())
        assert (result.done, result.status, result.n) == (alone.done, alone.status, alone.n)


@gpu
async def test_single_precision_of_odd_sizes() -> None:
    requests = [{name: plane.astype(np.float32) for name, plane in climb_request(n).items()} for n in (1, 3, 7, 5)]
    async with climbing(scalar_type="float32") as batcher:
        for _ in range(2):
            results = await gathered(batcher, requests, LIMIT_S)
            for result, planes in zip(results, requests, strict=True):
                np.testing.assert_array_equal(result.x, planes["goal"])
                np.testing.assert_array_equal(result.c, planes["goal"])
                assert result.x.dtype == np.float32


@gpu
async def test_a_batch_is_one_upload_and_one_download(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    requests = [climb_request(n) for n in range(1, 40)]
    async with climbing() as batcher:
        await gathered(batcher, requests, LIMIT_S)
        copies: list[int] = []
        runtime = cupy.cuda.runtime
        copy = runtime.memcpyAsync

        def counted(to: int, source: int, size: int, kind: int, stream: int) -> None:
            copies.append(kind)
            copy(to, source, size, kind, stream)

        monkeypatch.setattr(runtime, "memcpyAsync", counted)
        results = await gathered(batcher, requests, LIMIT_S)
        assert all(climbed(result, planes) for result, planes in zip(results, requests, strict=True))
        batches = len({id(result.report) for result in results})
        assert sorted(copies) == [1] * batches + [2] * batches


@gpu
async def test_the_block_may_be_entered_on_a_busy_stream() -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    requests = [climb_request(n) for n in (300, 7, 1000)]
    with anyio.fail_after(LIMIT_S):
        for _ in range(5):
            with stream:  # what builds the frames is ordered behind this
                heavy = cupy.ones((2000, 2000))
                for _ in range(20):
                    heavy = heavy @ heavy * (1.0 / 2000.0)
                batcher = climbing()
                await batcher.__aenter__()
                results = await gathered(batcher, requests, LIMIT_S)
                await batcher.__aexit__(None, None, None)
            assert all(climbed(result, planes) for result, planes in zip(results, requests, strict=True))


@gpu
async def test_results_that_nobody_keeps_are_written_nowhere_else() -> None:
    import cupy

    request = climb_request(60_000)
    size = 8 * request["x"].size
    async with climbing() as batcher:
        for _ in range(20):
            heavy = cupy.ones((1500, 1500)) @ cupy.ones((1500, 1500))  # what downloads wait behind
            await batcher.simulate(**request)  # the result is gone at once
            blocks = [cupy.cuda.alloc_pinned_memory(size * k) for k in (1, 2, 3)]
            views = [np.frombuffer(block, np.uint8, block.mem.size) for block in blocks]
            for view in views:
                view[...] = 7
            cupy.cuda.runtime.deviceSynchronize()
            assert all((view == 7).all() for view in views)
            del heavy


@gpu
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_shapeless_plane_is_refused_alone(anyio_backend: str) -> None:
    bad = {**climb_request(5), "x": np.zeros(())}
    async with climbing() as batcher:
        for _ in range(2):
            good, other = await asyncio.gather(
                batcher.simulate(**climb_request(4)), batcher.simulate(**bad), return_exceptions=True
            )
            assert climbed(good, climb_request(4))
            assert isinstance(other, ValueError)


@gpu
async def test_both_sides_at_once() -> None:
    import cupy

    requests = [climb_request(n) for n in range(1, 20)]
    mixed = [planes if n % 2 else {k: cupy.asarray(v) for k, v in planes.items()} for n, planes in enumerate(requests)]
    async with climbing() as batcher:
        for _ in range(3):
            results = await gathered(batcher, mixed, LIMIT_S)
            for n, (result, planes) in enumerate(zip(results, requests, strict=True)):
                assert on_host(result) == bool(n % 2)
                assert np.array_equal(result.x if n % 2 else result.x.get(), planes["goal"])


@gpu
async def test_one_sample_none_and_one_larger_than_a_batch() -> None:
    async with climbing(max_samples=64) as batcher:
        single = await batcher.simulate(x=np.zeros(()), c=np.zeros(()), goal=np.array(3.0))
        nothing = await batcher.simulate(**climb_request(0))
        large = await batcher.simulate(**climb_request(200))
    assert (single.x.shape, single.finished.shape, float(single.x)) == ((), (), 3.0)
    assert (nothing.n, nothing.x.shape) == (0, (0,))
    assert climbed(large, climb_request(200))
    assert on_host(single)
    assert on_host(large)
    assert on_host(nothing)


@gpu
async def test_the_cap_ends_some_and_active_sets_run() -> None:
    requests = [climb_request(n) for n in (5, 50, 300)]
    async with eagle.Batcher(climb_listed, max_steps=32, r=1.0, target="cuda") as batcher:
        for _ in range(2):
            results = await gathered(batcher, requests, LIMIT_S)
            for result, planes in zip(results, requests, strict=True):
                np.testing.assert_array_equal(result.x, np.minimum(planes["goal"], 32.0))
                np.testing.assert_array_equal(result.finished, planes["goal"] <= 32.0)
                assert result.status == ("finished" if planes["goal"].max() <= 32.0 else "max_steps")


@gpu
async def test_finished_requests_are_answered_while_the_others_go_on() -> None:
    answered: list[Any] = []
    quick, slow = climb_request(300), climb_request(2, ENDLESS)

    async def ask(batcher: eagle.Batcher, planes: dict[str, Any]) -> None:
        answered.append(await batcher.simulate(**planes))

    with anyio.fail_after(LIMIT_S):
        async with climbing(max_steps=10**12, max_wait=math.inf) as batcher, anyio.create_task_group() as group:
            for planes in (slow, quick, slow, quick):
                group.start_soon(ask, batcher, planes)
            while len(answered) < 2:
                await anyio.sleep(0.001)
            assert all(climbed(result, quick) for result in answered)
            group.cancel_scope.cancel()
        while eagle.aio.statistics().in_flight:
            await anyio.sleep(0.001)


@gpu
@pytest.mark.parametrize("seed", [1, 2])
async def test_random_clients(seed: int, silence: list[object]) -> None:
    tally: dict[str, int] = {}
    with anyio.fail_after(LIMIT_S):
        async with eagle.Batcher(
            logistic, max_steps=10**12, max_samples=128, max_wait=0.002, target="cuda", r=R
        ) as batcher:
            async with anyio.create_task_group() as group:
                for i in range(8):
                    group.start_soon(Client(batcher, 1000 * seed + i, tally, np).run, 6)
        while (now := eagle.aio.statistics()).in_flight or now.queued:
            await anyio.sleep(0.001)
    assert tally["answered"] > 10
