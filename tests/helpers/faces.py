"""The two faces behind one set of awaitable calls, so that one test body runs on both."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio.to_thread
import pytest

import eagle
import eagle.sync


class Async:
    """`eagle` itself."""

    name = "async"

    async def simulate(self, *args: Any, **kwargs: Any) -> eagle.SimResult:
        return await eagle.simulate(*args, **kwargs)

    async def simulation(self, *args: Any, **kwargs: Any) -> Any:
        return await eagle.simulation(*args, **kwargs)

    async def until_done(self, *args: Any, **kwargs: Any) -> Any:
        return await eagle.until_done(*args, **kwargs)

    async def run_until_done(self, *args: Any, **kwargs: Any) -> eagle.RunReport:
        return await eagle.run_until_done(*args, **kwargs)

    async def run(self, bound: Any, **kwargs: Any) -> Any:
        return await bound.run(**kwargs)


class Blocking:
    """`eagle.sync`, called in a worker thread as a service would."""

    name = "blocking"

    async def simulate(self, *args: Any, **kwargs: Any) -> eagle.SimResult:
        return await anyio.to_thread.run_sync(partial(eagle.sync.simulate, *args, **kwargs))

    async def simulation(self, *args: Any, **kwargs: Any) -> Any:
        return await anyio.to_thread.run_sync(partial(eagle.sync.simulation, *args, **kwargs))

    async def until_done(self, *args: Any, **kwargs: Any) -> Any:
        return await anyio.to_thread.run_sync(partial(eagle.sync.until_done, *args, **kwargs))

    async def run_until_done(self, *args: Any, **kwargs: Any) -> eagle.RunReport:
        return await anyio.to_thread.run_sync(partial(eagle.sync.run_until_done, *args, **kwargs))

    async def run(self, bound: Any, **kwargs: Any) -> Any:
        return await anyio.to_thread.run_sync(partial(bound.run, **kwargs))


Face = Async | Blocking
both_faces = pytest.mark.parametrize("face", [Async(), Blocking()], ids=lambda face: face.name)
