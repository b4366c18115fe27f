"""How much may be in flight when the caller gives no limiter of their own: one per target and event loop."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Literal

import anyio
from anyio.lowlevel import RunVar

from eagle.aio import counters, tracing
from eagle.aio.wake import mailbox
from eagle.kernels.team import core_count

if TYPE_CHECKING:
    from eagle.aio.wake import Mailbox

__all__ = ("DEVICE_TOKENS", "default_limiter", "taken_at_once", "wait_for_token")

# As many runs as the device was seen to overlap to its full rate; more only cost memory.
DEVICE_TOKENS = 64

# A RunVar belongs to the running event loop and goes with it, so nothing here keeps a closed loop alive.
_LIMITERS: dict[str, RunVar[anyio.CapacityLimiter]] = {
    "host": RunVar("eagle_limiter_host"),
    "cuda": RunVar("eagle_limiter_cuda"),
}


def default_limiter(target: Literal["host", "cuda"], box: Mailbox | None = None) -> anyio.CapacityLimiter:
    """Return the limiter that runs on `target` share in the running event loop.

    Args:
        target: "cuda" (64 tokens) or "host" (one token a core that this process may use).
        box: The loop's mailbox, for callers that have it already.

    Returns:
        The same limiter for every call in one event loop, made at the first.

    Raises:
        ValueError: Another target.
        RuntimeError: No event loop runs in this thread.
    """
    if box is None:
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


# Tokens are taken on behalf of the object that runs, not of the task, which may hold one of the same limiter for
# something else. Whoever took one gives it back with the limiter's own `release_on_behalf_of`.


def taken_at_once(limiter: anyio.CapacityLimiter, borrower: object) -> bool:
    """Take a token that is free, without a turn of the loop: what follows waits anyway. False when none is free."""
    try:
        limiter.acquire_on_behalf_of_nowait(borrower)
    except Exception as error:
        if type(error).__name__ == "WouldBlock":  # anyio's; older releases of anyio let trio's own through
            return False
        raise
    return True


async def wait_for_token(limiter: anyio.CapacityLimiter, borrower: object, name: str) -> None:
    """Wait for a token, counted as queued meanwhile.

    Args:
        limiter: The limiter.
        borrower: On whose behalf; see above.
        name: What waits, for traces.
    """
    counters.queued()
    try:
        with tracing.timed("runs", "wait", simulation=name):
            await limiter.acquire_on_behalf_of(borrower)
    except BaseException:
        counters.dropped()
        raise
    counters.admitted()
