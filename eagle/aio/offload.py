"""Blocking functions run off the event loop, so that the loop lives meanwhile."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import anyio.to_thread

from eagle.aio import workers
from eagle.aio.completion import Completion, leave_when_done
from eagle.aio.guards import StopWord, stop_word
from eagle.aio.wake import mailbox

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("built_off_loop", "off_loop", "on_the_callers_stream")

A = ParamSpec("A")
T = TypeVar("T")


async def off_loop(fn: Callable[A, T], /, *args: A.args, **kwargs: A.kwargs) -> T:
    """Call a blocking function on a worker thread, in a copy of the caller's context variables.

    A coroutine that is driven without an event loop calls it in its own thread: there is no loop to keep alive.

    Args:
        fn: The function.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What it returned.

    Raises:
        Exception: What it raised.
        StateError: The interpreter is exiting, or no thread could be started.

    Cancellation: the function runs to its end first, also when a native ``task.cancel()`` comes twice; a host loop
    (`RepeatWhile`) in it, and whatever else looks at `stop_word`, ends early.
    """
    if mailbox() is None:
        return fn(*args, **kwargs)
    returned: list[T] = []
    word, context = StopWord(), copy_context()
    context.run(stop_word.set, word)
    completion = Completion(returned, name=getattr(fn, "__qualname__", None), stop=word.ask)

    def call() -> None:
        error: BaseException | None = None
        try:
            returned.append(context.run(fn, *args, **kwargs))
        except BaseException as caught:
            error = caught
        completion.settle(error)

    workers.start(call, stop=word.ask)
    return (await leave_when_done(completion)).pop()


async def built_off_loop(build: Callable[[], T]) -> T:
    """Call a function that builds something for nobody but the caller on a worker thread, in the caller's context.

    As many tasks of one event loop build at once as anyio lets threads be (40); builds that were cancelled go on beside
    them. Not by anyio's own ``abandon_on_cancel``: its threads were lost (up to anyio 4.15) when the cancellation came
    before the thread took its call.

    Args:
        build: The function.

    Returns:
        What it returned.

    Raises:
        Exception: What it raised.
        StateError: The interpreter is exiting, or no thread could be started.

    Cancellation leaves at once: a build that has begun goes on for nobody (and fills caches), another never begins.
    """
    if mailbox() is None:
        return build()
    built: list[T] = []
    left = False
    context = copy_context()
    completion = Completion(built, name=getattr(build, "__qualname__", None))

    def call() -> None:
        error: BaseException | None = None
        try:
            if not left:
                with workers.building():
                    built.append(context.run(build))
        except BaseException as caught:
            error = caught
        completion.settle(error)

    limiter = anyio.to_thread.current_default_thread_limiter()
    await limiter.acquire_on_behalf_of(completion)  # the task may hold a token of its own
    try:
        workers.start(call)
        await completion
    except BaseException:
        left = True
        raise
    finally:
        limiter.release_on_behalf_of(completion)
    return built.pop()


def on_the_callers_stream(fn: Callable[[], T]) -> Callable[[], T]:
    """Bind a function to the CuPy device and stream that are current now, for a call in another thread.

    CuPy keeps both for each thread: without this, work would go to the worker's default stream, unordered with the
    caller's. Costs nothing while CuPy is not loaded.
    """
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return fn
    from eagle.kernels.device import unusable_reason

    if unusable_reason() is not None:
        return fn
    device, stream = cupy.cuda.Device(), cupy.cuda.get_current_stream()

    def call() -> T:
        with ExitStack() as stack:
            stack.enter_context(device)
            stack.enter_context(stream)
            return fn()

    return call


async def deploy(
    plugin: Any, *, targets: Any = None, cache_dir: Any = None, scalar_type: Any = None, **plan_kw: Any
) -> Any:
    """Build a kernel into a plan off the event loop: the coroutine form of `eagle.deploy`, with its parameters.

    Cancellation: the build runs to its end first; the next call finds it in the cache.
    """
    from eagle.kernels.deploy import deploy as build

    return await off_loop(build, plugin, targets=targets, cache_dir=cache_dir, scalar_type=scalar_type, **plan_kw)
