"""eagle runs compiled per-sample kernels on the GPU and the CPU, and lets Python await them.

The names here are the async ones: `simulate`, `Simulation.run`, `GraphPipeline.launch` and their like are coroutines.
`eagle.sync` holds the same names in blocking form. Every name is bound on first use: importing eagle loads neither
CuPy nor hawk.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "eagle.aio.active_set": ("ActiveSet", "compaction_body"),
    "eagle.aio.batcher": ("Batcher",),
    "eagle.aio.completion": ("Completion",),
    "eagle.aio.composer": ("GraphComposer",),
    "eagle.aio.guards": ("RepeatWhile", "SkipGuard", "Skippable", "repeat_while", "skippable"),
    "eagle.aio.pipeline": ("GraphPipeline",),
    "eagle.aio.progress": ("Progress",),
    "eagle.aio.report": ("RunReport", "SimResult"),
    "eagle.aio.runner": ("Runner", "run_until_done", "until_done"),
    "eagle.aio.simulation": ("Simulation", "simulate", "simulation"),
    "eagle.errors": (
        "AbiMismatch",
        "ArtifactError",
        "BackendUnavailable",
        "Busy",
        "DeviceFault",
        "EagleError",
        "LayoutWarning",
        "LoopRunning",
        "NonToggleableMemberError",
        "NotBuilt",
        "StateError",
        "UnknownMemberError",
        "UnsupportedSchema",
    ),
    "eagle.kernels.abi": ("assemble_args", "check_aether_abi", "make_gref", "make_handle", "np_dtype"),
    "eagle.kernels.deploy": ("deploy",),
    "eagle.kernels.device": ("DeviceProps", "device_props"),
    "eagle.kernels.interop": ("detect", "origin_adapter", "to_cupy"),
    "eagle.kernels.launch": ("launch", "pure_prepare"),
    "eagle.kernels.loaded": ("LoadedKernel", "LoadedPure", "LoadedVector"),
    "eagle.kernels.layout": ("samples_first", "samples_last"),
    "eagle.kernels.registry": ("KernelRegistry", "load_manifest"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = tuple(sorted(_HOME_OF))


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        if name in ("aio", "sync", "kernels", "errors"):
            return import_module(f"eagle.{name}")
        raise AttributeError(f"module 'eagle' has no attribute {name!r}; its public names are in eagle.__all__")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "aio", "errors", "kernels", "sync"})
