"""How much may be in flight when the caller gives no limiter of their own: one per target and event loop."""

from __future__ import annotations

import weakref
from typing import Literal

import anyio
from anyio.lowlevel import RunVar

from eagle.aio import counters, tracing
from eagle.aio.wake import mailbox
from eagle.kernels.team import core_count

__all__ = ("DEVICE_TOKENS", "Admission", "default_limiter")

# As many runs as the device was seen to overlap to its full rate; more only cost memory.
DEVICE_TOKENS = 64

# A RunVar belongs to the running event loop and goes with it, so nothing here keeps a closed loop alive.
_LIMITERS: dict[str, RunVar[anyio.CapacityLimiter]] = {
    "host": RunVar("eagle_limiter_host"),
    "cuda": RunVar("eagle_limiter_cuda"),
}


def default_limiter(target: Literal["host", "cuda"]) -> anyio.CapacityLimiter:
    """Return the limiter that runs on `target` share in the running event loop.

    Args:
        target: "cuda" (64 tokens) or "host" (one token a core that this process may use).

    Returns:
        The same limiter for every call in one event loop, made at the first.

    Raises:
        ValueError: Another target.
        RuntimeError: No event loop runs in this thread.
    """
    box = mailbox()
    found = None if box is None else box.limiters.get(target)
    limiter = None if found is None else found()
    if limiter is not None:
        return limiter
    variable = _LIMITERS.get(target)
    if variable is None:
        raise ValueError(f"target {target!r} has no limiter; give one of 'host' and 'cuda'")
    try:
        limiter = variable.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(DEVICE_TOKENS if target == "cuda" else core_count())
        variable.set(limiter)
    if box is not None:
        box.limiters[target] = weakref.ref(limiter)  # found some 5 µs sooner there
    return limiter


class Admission:
    """One token of a limiter, counted as queued while it is waited for.

    A free token is taken without a turn of the loop: what follows waits anyway. The borrower is not the task, which may
    hold a token of the same limiter for something else.

    Args:
        limiter: The limiter.
        name: What waits, for traces.
    """

    __slots__ = ("_limiter", "_name")

    def __init__(self, limiter: anyio.CapacityLimiter, name: str) -> None:
        self._limiter = limiter
        self._name = name

    def at_once(self) -> bool:
        """Take a token that is free; False when none is."""
        try:
            self._limiter.acquire_on_behalf_of_nowait(self)
        except Exception as error:
            if type(error).__name__ == "WouldBlock":  # anyio's; older releases of anyio let trio's own through
                return False
            raise
        return True

    async def wait(self) -> None:
        """Wait for a token."""
        counters.queued()
        try:
            with tracing.timed("runs", "wait", simulation=self._name):
                await self._limiter.acquire_on_behalf_of(self)
        except BaseException:
            counters.dropped()
            raise
        counters.admitted()

    def give_back(self) -> None:
        """Give the token back."""
        self._limiter.release_on_behalf_of(self)
