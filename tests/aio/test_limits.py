from __future__ import annotations

import gc
import weakref

import anyio
import pytest

from eagle.aio import limits
from eagle.kernels.team import core_count


async def test_one_limiter_for_a_target_and_a_loop() -> None:
    host, cuda = limits.default_limiter("host"), limits.default_limiter("cuda")
    assert host is limits.default_limiter("host")
    assert cuda is limits.default_limiter("cuda")
    assert (host.total_tokens, cuda.total_tokens) == (core_count(), 64)


async def test_it_is_shared_by_the_tasks_of_the_loop() -> None:
    seen = []

    async def look() -> None:
        seen.append(limits.default_limiter("host"))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(look)
    assert len({id(limiter) for limiter in seen}) == 1


def test_each_loop_has_its_own_and_takes_it_along(anyio_backend: tuple[str, dict[str, bool]]) -> None:
    name, options = anyio_backend

    async def look() -> weakref.ref[anyio.CapacityLimiter]:
        return weakref.ref(limits.default_limiter("cuda"))

    kept = [anyio.run(look, backend=name, backend_options=options) for _ in range(2)]
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


async def test_an_unknown_target_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'gpu'.*'host' and 'cuda'"):
        limits.default_limiter("gpu")  # type: ignore[arg-type]


def test_without_an_event_loop_there_is_none() -> None:
    with pytest.raises(RuntimeError):
        limits.default_limiter("host")
