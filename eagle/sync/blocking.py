"""How a coroutine of eagle is run to its end without an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from eagle.aio.completion import drive
from eagle.aio.wake import refuse_in_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ("run",)

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
