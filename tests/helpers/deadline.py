"""A limit for a coroutine test: a hang in an await fails, on every backend."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ParamSpec

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
LIMIT_S = 60.0  # a compilation may be in it


def deadline(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, Coroutine[Any, Any, None]]:
    """Cancel the test after `LIMIT_S` seconds, and fail it with TimeoutError."""

    @functools.wraps(test)
    async def limited(*args: P.args, **kwargs: P.kwargs) -> None:
        with anyio.fail_after(LIMIT_S):
            await test(*args, **kwargs)

    return limited
