"""Whether the event loop stays free: a task that wakes every millisecond and keeps the longest gap."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# What design.md promises users, and what a test may assert: 50 ms is a twentieth of a blocked second, far above the
# jitter of a loaded machine.
FREE_S = 0.05


@dataclass
class Heartbeat:
    """What the beating task has seen so far."""

    worst_s: float = 0.0
    beats: int = 0


@asynccontextmanager
async def heartbeat(period_s: float = 0.001) -> AsyncIterator[Heartbeat]:
    """Beat while the block runs; the gap that is still open when the block ends counts too."""
    seen = Heartbeat()
    last = time.perf_counter()

    def note() -> None:
        nonlocal last
        now = time.perf_counter()
        seen.worst_s = max(seen.worst_s, now - last)
        seen.beats += 1
        last = now

    async def beat() -> None:
        while True:
            await anyio.sleep(period_s)
            note()

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        await anyio.sleep(period_s)
        last = time.perf_counter()  # starting the task is not the block's doing
        seen.worst_s, seen.beats = 0.0, 0
        try:
            yield seen
        finally:
            note()
            group.cancel_scope.cancel()
