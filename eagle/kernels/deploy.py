"""deploy: a hawk kernel becomes a plan that runs where its data lives."""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from raptor.schema.blocks import NEURAL_BLOCK_PATTERN

from eagle.errors import ArtifactError, DeviceFault
from eagle.kernels.build import cache_root, is_hawk_kernel, lowered_dispatch, unit_key
from eagle.kernels.fork_lock import ForkLock
from eagle.kernels.plan import Plan
from eagle.kernels.plugin import Bundle, Plugin, plugins_of
from eagle.kernels.unit import read_unit

log = logging.getLogger("eagle")

_TARGETS = ("host", "cuda")
_SCALAR_TYPES = ("float64", "float32")
# Bundles in use, so that a second deploy shares the loaded kernels of the first.
_bundles: weakref.WeakValueDictionary[tuple[str, str, tuple[str, ...]], _Shared] = weakref.WeakValueDictionary()
# The newest ones are kept although nobody uses them: a service deploys the same kernel in every request.
_recent: deque[_Shared] = deque(maxlen=64)
_lock = ForkLock()


class _Shared:
    """A bundle and its plugins, weakly remembered."""

    def __init__(self, bundle: Bundle, plugins: tuple[Plugin, ...]) -> None:
        self.bundle = bundle
        self.plugins = plugins
        self.host_only = False  # building for the device has failed
        for plugin in plugins:
            plugin.shared = self  # the plugins keep the entry alive


def deploy(
    plugin: Any,
    *,
    targets: Iterable[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    scalar_type: str | None = None,
    **plan_kw: Any,
) -> Any:
    """Build a kernel into a plan that runs where its data lives. Blocking; `eagle.aio.deploy` awaits the same.

    Args:
        plugin: A hawk kernel, a list of kernels (one bundle), a unit that `hawk.build` returned, or the ``plugin`` of
            an earlier plan. Loading an artifact runs its code.
        targets: Sides to build, of "host" and "cuda". None: the host, and the device too when a GPU is usable; each
            is then built when first needed, the current side before this returns (the host where the device's fails).
        cache_dir: Folder that holds the built units; None is hawk's default. A repeat call compiles nothing.
        scalar_type: Precision to build in: "float64" (None) or "float32"; planes must match it.
        **plan_kw: None is taken; each is refused by name.

    Returns:
        A `Plan`; for a list a tuple of plans in order.

    Raises:
        ValueError: ``plugin`` is nothing that can be deployed, an option is unknown or does not fit.
        BackendUnavailable: The build needs a compiler or a device that is not here.
        ArtifactError: A unit that was built elsewhere is damaged, changed or foreign.
        hawk.ir.HawkError: hawk cannot build these kernels together.
    """
    if plan_kw:
        names = ", ".join(map(repr, plan_kw))
        raise ValueError(f"deploy takes no option {names}; how a plan runs is chosen from where its data lives")
    options: dict[str, Any] = {"targets": targets, "cache_dir": cache_dir, "scalar_type": scalar_type}
    if isinstance(plugin, (list, tuple)):
        if not plugin:
            raise ValueError("deploy got an empty list; pass at least one hawk kernel")
        if all(is_hawk_kernel(item) for item in plugin):
            return tuple(Plan(p) for p in _built(plugin, **options))
        if all(isinstance(item, (Plugin, Plan)) for item in plugin):
            return tuple(deploy(item, **options) for item in plugin)
        if hasattr(plugin, "primal"):
            raise ValueError(f'this derivative is no kernel yet; name it: hawk.Kernel("{plugin.primal}_vjp", vjp(...))')
        strangers = ", ".join(type(item).__name__ for item in plugin if not is_hawk_kernel(item))
        raise ValueError(f"a list for deploy holds hawk kernels only; got {strangers} among them")
    if is_hawk_kernel(plugin):
        return Plan(_built([plugin], **options)[0])
    _refuse_build_options(options)
    if isinstance(plugin, Plan):
        return plugin.by_name()
    if isinstance(plugin, Plugin):
        return Plan(plugin).by_name()
    plans = tuple(Plan(p).by_name() for p in _from_unit(plugin))
    return plans[0] if len(plans) == 1 else plans


def deploy_for(side: str | None, kernels: Sequence[Any], scalar_type: str | None) -> tuple[Plan, ...]:
    """`deploy` of a list of kernels whose data is known to lie on that side: the other one is built only when needed.

    Args:
        side: "host" or "cuda"; None when nobody knows.
        kernels: hawk kernels; one bundle.
        scalar_type: As in `deploy`.
    """
    from eagle.kernels.device import unusable_reason

    if side == "cuda" and unusable_reason() is not None:
        side = None  # binding says which planes lie where nothing can run
    built = _built(kernels, targets=None, cache_dir=None, scalar_type=scalar_type, side=side)
    return tuple(Plan(plugin) for plugin in built)


def _refuse_build_options(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}= is a build option, and a built plugin is built already; leave it out")


def _checked_targets(targets: Iterable[str] | None) -> tuple[str, ...]:
    if targets is None:
        return _TARGETS
    if isinstance(targets, str):
        raise ValueError(f"targets={targets!r}: pass a list of names, such as targets=({targets!r},)")
    try:
        names = tuple(targets)
    except TypeError:
        raise ValueError(f"targets={targets!r}: expected names out of {', '.join(_TARGETS)}, or None") from None
    unknown = [name for name in names if name not in _TARGETS]
    if unknown or not names:
        raise ValueError(f"targets={names!r}: expected at least one of {', '.join(_TARGETS)}, and nothing else")
    return names


def _built(
    kernels: Sequence[Any],
    *,
    targets: Iterable[str] | None,
    cache_dir: str | os.PathLike[str] | None,
    scalar_type: Any,
    side: str | None = None,
) -> tuple[Plugin, ...]:
    names = _checked_targets(targets)
    lowered = {id(kernel): lowered_dispatch(kernel) for kernel in kernels}
    kernels = [lowered[id(kernel)] for kernel in kernels]
    precision = "float64" if scalar_type is None else scalar_type
    if not isinstance(precision, str) or precision not in _SCALAR_TYPES:
        raise ValueError(f"scalar_type={scalar_type!r}: expected 'float64', 'float32' or None")
    key = (str(cache_root(cache_dir)), unit_key(kernels, precision, "any"), names)
    with _lock:
        shared = _bundles.get(key)
        if shared is None:
            bundle = Bundle(_distinct(kernels), precision, cache_dir, names)
            shared = _bundles[key] = _Shared(bundle, plugins_of(bundle, kernels))
            _recent.append(shared)
    if targets is not None or side is not None:
        _build_now(shared.plugins, names if side is None else (side,))
    else:
        _build_likely(shared)
    return shared.plugins


def _distinct(kernels: Sequence[Any]) -> tuple[Any, ...]:
    by_identity = {id(kernel): kernel for kernel in kernels}
    return tuple(by_identity.values())


def _build_now(plugins: Sequence[Plugin], targets: Sequence[str]) -> None:
    """Build and load the kernels for these targets."""
    from eagle.kernels.device import require_cupy

    for plugin in plugins:
        if "host" in targets:
            plugin.host()
        if "cuda" in targets:
            plugin.device(int(require_cupy().cuda.runtime.getDevice()))


def _build_likely(shared: _Shared) -> None:
    """Build the side that is likely to be used first: the device where there is one.

    A kernel that cannot be built for the device may still run on the host; the device's error comes when it is used.
    """
    from eagle.kernels.device import unusable_reason

    if unusable_reason() is None and not shared.host_only:
        try:
            _build_now(shared.plugins, ["cuda"])
            return
        except DeviceFault:
            raise
        except Exception as error:
            shared.host_only = True
            log.info("%s runs on the host only: %s", ", ".join(plugin.name for plugin in shared.plugins), error)
    _build_now(shared.plugins, ["host"])


def _from_unit(unit: Any) -> tuple[Plugin, ...]:
    """Plugins of a unit that was built elsewhere: a hawk bundle, or its folder."""
    folder = getattr(unit, "directory", unit)
    if not isinstance(folder, (str, os.PathLike)) or not Path(folder).is_dir():
        raise ValueError(
            "deploy takes a hawk kernel, a list of them, a built unit or a plan's plugin; "
            f"got {type(unit).__name__} {unit!r:.80}"
        )
    loaded = read_unit(Path(folder).absolute())  # its libraries are read on first use, from wherever that happens
    if loaded.manifest.pattern == NEURAL_BLOCK_PATTERN:
        raise ArtifactError(f"{loaded.manifest.path} describes a neural layer; read it with eagle.load_manifest")
    if not loaded.sidecars:
        raise ArtifactError(f"{loaded.manifest.path} has no enabled kernel; there is nothing to run")
    formats = {entry.format for entry in loaded.manifest.entries if entry.enabled}
    targets = tuple({"host" if format_ == "host" else "cuda" for format_ in formats})
    bundle = Bundle((), "float64", None, targets)
    bundle.units.update(dict.fromkeys(targets, loaded))
    return tuple(Plugin(bundle, id_) for id_ in loaded.sidecars)
