"""When things run: completions, pipelines, loops, simulations and many of them at once.

The public names are those of `eagle` itself, bound on first use, and the coroutine form of `deploy`; `trace`,
`statistics` and `healthy` are found only here.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import eagle
from eagle.aio.functions_first import FunctionsFirst

_HOMES = {
    "deploy": "eagle.aio.offload",
    "healthy": "eagle.kernels.device",
    "statistics": "eagle.aio.counters",
    "trace": "eagle.aio.tracing",
}

__all__ = tuple(sorted({*eagle.__all__, *_HOMES}))


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in eagle.__all__:
        value = getattr(eagle, name)
    else:
        raise AttributeError(f"module 'eagle.aio' has no attribute {name!r}; its public names are in eagle.aio.__all__")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = FunctionsFirst
