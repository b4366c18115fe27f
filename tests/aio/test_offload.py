from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import eagle
import eagle.aio
from eagle.aio import workers
from eagle.aio.completion import drive
from eagle.aio.offload import built_off_loop, off_loop, on_the_callers_stream
from tests.helpers.steps import Steps, held, until

steps = Steps("host")
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nobody's")


async def test_it_runs_elsewhere_with_its_arguments_and_context() -> None:
    def work(a: int, *, b: int) -> tuple[int, int, str]:
        return threading.get_ident(), a + b, variable.get()

    variable.set("mine")
    thread, total, seen = await off_loop(work, 1, b=2)
    assert thread != threading.get_ident()
    assert (total, seen) == (3, "mine")


async def test_its_error_arrives() -> None:
    def work() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await off_loop(work)


async def test_a_cancel_waits_for_its_end() -> None:
    latch, left = steps.latch(), []

    async def go() -> None:
        try:
            await off_loop(latch)
        finally:
            left.append(latch.passed)

    with anyio.fail_after(10), held(latch):
        async with anyio.create_task_group() as group:
            group.start_soon(go)
            await until(lambda: latch.entered)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
            assert left == []
            latch.open()
    assert left == [1]


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})])
async def test_so_do_two_native_cancels() -> None:
    latch = steps.latch()
    task = asyncio.ensure_future(off_loop(latch))
    with held(latch):
        await until(lambda: latch.entered)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.005)
        assert not task.done()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert latch.passed == 1


async def test_a_cancel_ends_a_host_loop_in_it() -> None:
    on = np.ones(1, np.uint32)
    loop = eagle.repeat_while(lambda: None, eagle.SkipGuard.nonzero(on), 2**32 - 1)
    with anyio.fail_after(10):
        with anyio.move_on_after(0.02) as scope:
            await off_loop(loop)
    assert scope.cancelled_caught


def test_driven_without_a_loop_it_stays_in_the_thread() -> None:
    assert drive(off_loop(threading.get_ident)) == threading.get_ident()


def test_without_cupy_the_function_is_itself() -> None:
    def work() -> None: ...

    if on_the_callers_stream(work) is not work:
        pytest.skip("CuPy is loaded")


@pytest.mark.gpu
def test_with_cupy_the_stream_goes_along() -> None:
    import cupy

    seen: list[Any] = []
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        work = on_the_callers_stream(lambda: seen.append(cupy.cuda.get_current_stream().ptr))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [stream.ptr]


def test_deploy_has_the_parameters_of_the_plain_one() -> None:
    ours, plain = (inspect.signature(fn).parameters for fn in (eagle.aio.deploy, eagle.deploy))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in plain.values()]
    assert inspect.iscoroutinefunction(eagle.aio.deploy)


# ---- builds ----------------------------------------------------------------------------------------------------------


async def test_a_build_runs_elsewhere_in_the_callers_context() -> None:
    variable.set("mine")
    thread, seen = await built_off_loop(lambda: (threading.get_ident(), variable.get()))
    assert thread != threading.get_ident()
    assert seen == "mine"


async def test_the_error_of_a_build_arrives() -> None:
    def build() -> None:
        raise KeyError("mine")

    with anyio.fail_after(10), pytest.raises(KeyError, match="mine"):
        await built_off_loop(build)


async def test_a_cancel_leaves_a_build_at_once() -> None:
    latch = steps.latch()
    with anyio.fail_after(10), held(latch):
        async with anyio.create_task_group() as group:
            group.start_soon(built_off_loop, latch)
            await until(lambda: latch.entered)
            group.cancel_scope.cancel()
        assert not latch.passed
    await until(lambda: latch.passed)


async def test_no_thread_is_lost_to_builds_that_were_left_before_they_began() -> None:
    begun, before = [], workers._pool.threads
    with anyio.fail_after(30):
        for i in range(300):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(built_off_loop, lambda i=i: begun.append(i))
                    scope.cancel()
        for _ in range(300):  # the threads are still there for others
            with anyio.move_on_after(1e-5):
                await built_off_loop(lambda: begun.append(-1))
        assert await built_off_loop(lambda: 7) == 7
        await until(lambda: len(workers._pool.idle) == workers._pool.threads)
    assert workers._pool.threads <= max(before, 45)  # anyio lets 40 be at once; some may be leaving a build still


async def test_builds_that_hang_keep_no_thread_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    begun: list[int] = []

    def hang() -> None:
        begun.append(1)
        gate.wait(30)

    monkeypatch.setattr(workers, "LIMIT", workers._pool.threads + 4)
    try:
        with anyio.fail_after(30):
            for count in range(1, 9):
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as group:
                        group.start_soon(built_off_loop, hang)
                        await until(lambda count=count: len(begun) == count)
                        scope.cancel()
            assert await off_loop(lambda: 7) == 7
    finally:
        gate.set()
    await until(lambda: workers._pool.building == 0)


async def test_a_task_that_holds_a_token_of_its_own_may_build() -> None:
    async with anyio.to_thread.current_default_thread_limiter():
        assert await built_off_loop(lambda: 7) == 7
