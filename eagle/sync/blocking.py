"""How a coroutine of eagle is run to its end without an event loop, and how a function becomes its blocking twin."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from eagle.aio.completion import drive
from eagle.aio.wake import refuse_in_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ("blocking_twin", "run")

A = ParamSpec("A")
T = TypeVar("T")


def run(coroutine: Callable[[], Coroutine[Any, Any, T]], what: str, instead: str) -> T:
    """Run a coroutine that waits for nothing but Completions; its await blocks this thread on the event itself.

    Args:
        coroutine: Makes the coroutine; called only when blocking is allowed, so that a refused call issues nothing.
        what: The blocking call, for the message.
        instead: What to write in an event loop.

    Returns:
        What the coroutine returned.

    Raises:
        LoopRunning: An event loop runs in this thread.
        KeyboardInterrupt: Ctrl-C, which the coroutine takes as a cancellation: running work has ended.
    """
    refuse_in_loop(what, instead)
    return drive(coroutine())


def blocking_twin(
    coroutine_function: Callable[A, Coroutine[Any, Any, Any]],
) -> Callable[[Callable[..., T]], Callable[A, T]]:
    """Give a function the name and signature of the coroutine function whose blocking form it is.

    The twin takes what the coroutine function takes, by construction, and is refused where an event loop runs.

    Args:
        coroutine_function: What is awaited under the same name of `eagle`.

    Returns:
        A decorator; the function it is put on gets the call's arguments as they are and blocks.
    """
    name = coroutine_function.__name__

    def decorate(fn: Callable[..., T]) -> Callable[A, T]:
        @functools.wraps(fn)
        def twin(*args: A.args, **kwargs: A.kwargs) -> T:
            refuse_in_loop(f"{name}()", f"await eagle.{name}(...)")
            return fn(*args, **kwargs)

        returns = fn.__annotations__.get("return")
        twin.__annotations__ = {**coroutine_function.__annotations__, "return": returns}
        signature = inspect.signature(coroutine_function).replace(return_annotation=returns)
        twin.__signature__ = signature  # type: ignore[attr-defined]
        return twin

    return decorate
