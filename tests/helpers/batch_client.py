"""Requests made together, and a random client of a Batcher of `logistic`, for tests on either side."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from tests.helpers.models import logistic_loop

if TYPE_CHECKING:
    import eagle

R = 3.99  # what the Batcher must share as r
ENDLESS = 1e12  # more steps than any test waits for


async def gathered(batcher: eagle.Batcher, requests: list[dict[str, Any]], limit_s: float = 10.0) -> list[Any]:
    """The results of requests made in one turn of the loop; TimeoutError after `limit_s` seconds."""
    results: list[Any] = [None] * len(requests)

    async def ask(i: int) -> None:
        results[i] = await batcher.simulate(**requests[i])

    with anyio.fail_after(limit_s):
        async with anyio.create_task_group() as group:
            for i in range(len(requests)):
                group.start_soon(ask, i)
    return results


class Client:
    """A user who asks, gives up, sends nonsense and checks every answer."""

    def __init__(self, batcher: eagle.Batcher, seed: int, tally: dict[str, int], xp: Any = np) -> None:
        self._batcher = batcher
        self._xp = xp
        self._rng = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._tally = tally

    async def run(self, requests: int) -> None:
        for _ in range(requests):
            await self._one()

    async def _one(self) -> None:
        rng = self._rng
        n = rng.choice([0, 1, 2, 3, 50, 127, 128, 129, rng.randrange(130)])
        last = self._numbers.integers(1, rng.choice([4, 300]), n).astype(float)
        planes = {"x": self._numbers.uniform(0.1, 0.9, n), "k": np.zeros(n), "last": last}
        kept = {name: plane.copy() for name, plane in planes.items()}
        planes = {name: self._xp.asarray(plane) for name, plane in planes.items()}
        what = rng.choice(["plain"] * 6 + ["cancel", "late", "endless", "bad", "pause"])
        if what == "bad":
            planes[rng.choice(["x", "k", "last"])] = rng.choice(
                [None, self._xp.zeros(n + 1), self._xp.zeros(n, np.float32), [1.0]]
            )
        if what == "endless" and n:
            kept["last"] = np.full(n, ENDLESS)
            planes["last"] = self._xp.asarray(kept["last"])
        if what == "pause":
            await anyio.sleep(rng.uniform(0.0, 0.003))
        limit = {"cancel": 0.0, "late": rng.uniform(0.0, 0.01), "endless": 0.01}.get(what, math.inf)
        try:
            with anyio.move_on_after(limit) as scope:
                result = await self._batcher.simulate(**planes)
                self._check(result, kept)
                what = "answered"
            if scope.cancelled_caught:
                what = "gave up"
        except (TypeError, ValueError):
            assert what == "bad"
        assert what != "plain"
        self._tally[what] = self._tally.get(what, 0) + 1
        assert all(np.array_equal(self._host(planes[name]), kept[name]) for name in kept if what != "bad")

    def _host(self, array: Any) -> np.ndarray:
        host: np.ndarray = array if self._xp is np else array.get()
        return host

    def _check(self, result: eagle.SimResult, kept: dict[str, np.ndarray]) -> None:
        assert result.done
        assert result.n == kept["x"].size
        np.testing.assert_array_equal(self._host(result.k), kept["last"])
        np.testing.assert_array_equal(self._host(result.x), logistic_loop(kept["x"], kept["last"], R))
        assert result.finished.all()
