"""A limiter in a blocking call: its token is taken and given back through the event loop that owns the limiter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import anyio
import anyio.from_thread
from anyio import NoEventLoopError

from eagle.errors import StateError


@contextlib.contextmanager
def token_of(limiter: anyio.CapacityLimiter) -> Iterator[None]:
    """Hold one token of ``limiter`` in the block.

    Raises:
        StateError: This thread is no worker thread of the limiter's event loop, so nobody could share the limit.
    """
    borrower = object()
    try:
        anyio.from_thread.run(limiter.acquire_on_behalf_of, borrower)
    except NoEventLoopError as error:
        raise StateError(
            "limiter= in a blocking call shares the limit of an event loop, and this thread is no worker of one; "
            "leave it out, or call through anyio.to_thread.run_sync"
        ) from error
    try:
        yield
    finally:
        anyio.from_thread.run_sync(limiter.release_on_behalf_of, borrower)
