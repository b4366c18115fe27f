"""The names of `eagle` in blocking form: ``import eagle.sync as eagle`` runs a script written against them.

What waits blocks here; everything else is the very same object. A blocking call in a thread whose event loop runs is
refused with the name of the coroutine to await. ``deploy``, plan calls, direct kernel calls and constructors are never
refused: they block, in a coroutine too.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import eagle
from eagle.aio.functions_first import FunctionsFirst

_HOMES = {
    "eagle.sync.composer": ("GraphComposer",),
    "eagle.sync.pipeline": ("GraphPipeline",),
    "eagle.sync.simulation": (
        "Runner",
        "Simulation",
        "run_until_done",
        "simulate",
        "simulation",
        "until_done",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = eagle.__all__


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
    elif name in eagle.__all__ or name == "errors":
        value = getattr(eagle, name)
    else:
        raise AttributeError(f"module 'eagle.sync' has no attribute {name!r}; its public names are in eagle.__all__")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = FunctionsFirst
