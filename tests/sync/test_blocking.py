from __future__ import annotations

import pytest

from eagle.aio.completion import Completion
from eagle.errors import LoopRunning, StateError
from eagle.sync.blocking import run


async def answer() -> int:
    completion = Completion(42)
    completion.settle()
    return await completion


def test_it_runs_a_coroutine_to_its_end() -> None:
    assert run(answer, "call()", "await call()") == 42


def test_its_error_leaves() -> None:
    async def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(broken, "call()", "await call()")


async def test_in_a_loop_the_coroutine_is_not_even_made() -> None:
    made: list[int] = []

    def make() -> object:
        made.append(1)
        return answer()

    with pytest.raises(LoopRunning, match=r"`await call\(\)`"):
        run(make, "call()", "await call()")  # type: ignore[arg-type]
    assert made == []


def test_what_needs_a_loop_says_so() -> None:
    import asyncio

    async def sleep() -> None:
        await asyncio.sleep(0)

    with pytest.raises(StateError, match="needs an event loop"):
        run(sleep, "call()", "await call()")
