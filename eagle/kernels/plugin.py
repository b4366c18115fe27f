"""One built kernel: its unit per target, built or loaded when first needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from eagle.errors import ArtifactError
from eagle.kernels.build import build_unit
from eagle.kernels.fork_lock import ForkLock
from eagle.kernels.host import HostKernel, load_host_kernel
from eagle.kernels.placement import is_placed
from eagle.kernels.signature import Signature, signature_of

if TYPE_CHECKING:
    import os

    from eagle.kernels.device_kernel import DeviceKernel
    from eagle.kernels.sidecar import Sidecar
    from eagle.kernels.unit import Unit


@dataclass(slots=True)
class Bundle:
    """The kernels of one deploy call, built together, once per target.

    Attributes:
        kernels: Source kernels in order; empty for a unit that was built elsewhere.
        scalar_type: Precision of the build.
        cache_dir: Folder of the store, or None for the default.
        targets: Targets that may be built or loaded.
        units: What is built or loaded so far: by "host", or by "cuda:ARCH".
    """

    kernels: tuple[Any, ...]
    scalar_type: str
    cache_dir: str | os.PathLike[str] | None
    targets: tuple[str, ...]
    units: dict[str, Unit] = field(default_factory=dict)
    lock: ForkLock = field(default_factory=ForkLock)

    def unit(self, target: str, arch: str = "", *, rebuild: bool = False) -> Unit:
        """The unit of that target, built on first use.

        Raises:
            ValueError: The bundle was deployed without that target.
        """
        if target not in self.targets:
            names = ", ".join(str(getattr(kernel, "name", kernel)) for kernel in self.kernels) or "this plan"
            raise ValueError(
                f"{names} was deployed for {', '.join(self.targets)} only, and its data lies on the {target} side; "
                "deploy it with targets=None or with that target"
            )
        key = f"{target}:{arch}" if arch else target
        with self.lock:
            unit = self.units.get(key)
            if unit is None or (rebuild and self.kernels):
                unit = build_unit(
                    self.kernels,
                    target=target,
                    scalar_type=self.scalar_type,
                    cache_dir=self.cache_dir,
                    arch=arch,
                    rebuild=rebuild,
                )
                self.units[key] = unit
            return unit


class Plugin:
    """One kernel of a bundle. `deploy` accepts it again; hawk reads ``_hawk_source`` of it.

    Attributes:
        bundle: The bundle it belongs to.
        name: The kernel's name, which is its id in the unit.
        source: The hawk kernel it was built from, or None.
    """

    def __init__(self, bundle: Bundle, name: str, source: Any = None) -> None:
        self.bundle = bundle
        self.name = name
        self.source = source
        self._host: tuple[Sidecar, HostKernel] | None = None
        self._devices: dict[int, DeviceKernel] = {}
        self._signature: Signature | None = None
        self.shared: object = None  # what `deploy` remembers this plugin by

    def __repr__(self) -> str:
        return f"<Plugin {self.name!r} for {', '.join(self.bundle.targets)}>"

    @property
    def _hawk_source(self) -> tuple[Any, str]:
        """The source kernel and its unit's digest: what hawk asks of a derivative's primal."""
        return self.source, next(iter(self.bundle.units.values())).digest

    @cached_property
    def placed(self) -> bool | None:
        """Whether a sample's result depends on its number in the batch; None when nobody can know."""
        return is_placed(self.source)

    @property
    def sidecar(self) -> Sidecar:
        """A sidecar of this kernel; the argument list is the same on every target."""
        units = self.bundle.units
        unit = units.get("host") or next(iter(units.values()), None) or self._first_unit()
        return unit.sidecars[self.name]

    def _first_unit(self) -> Unit:
        if "host" in self.bundle.targets:
            return self.bundle.unit("host")
        return self.device_unit()

    @property
    def signature(self) -> Signature:
        """How the kernel is called, from its source where that is at hand."""
        if self._signature is None:
            self._signature = signature_of(self.sidecar, self.source)
        return self._signature

    def host(self) -> HostKernel:
        """The host entries, loaded on first use; a cached unit that does not load is built again.

        Raises:
            ArtifactError: The library is damaged or foreign, and there is no source to rebuild it from.
            ValueError: The kernel was deployed without the host target.
        """
        with self.bundle.lock:
            if self._host is None:
                try:
                    self._host = self._load_host(self.bundle.unit("host"))
                except ArtifactError:
                    if not self.bundle.kernels:
                        raise
                    self._host = self._load_host(self.bundle.unit("host", rebuild=True))
            return self._host[1]

    def _load_host(self, unit: Unit) -> tuple[Sidecar, HostKernel]:
        sidecar = unit.sidecars[self.name]
        return sidecar, load_host_kernel(unit, sidecar, unit.entry(self.name).artifact)

    def device_unit(self) -> Unit:
        """The device unit for the current device's architecture, built on first use."""
        from eagle.kernels.device_kernel import architecture

        return self.bundle.unit("cuda", architecture() if self.bundle.kernels else "")

    def device(self, device: int) -> DeviceKernel:
        """The kernel's entries on one device, loaded on first use.

        Raises:
            BackendUnavailable: No GPU can be used.
            ValueError: The kernel was deployed without the cuda target.
        """
        with self.bundle.lock:
            kernel = self._devices.get(device)
            if kernel is None:
                from eagle.kernels.device_kernel import load_device_kernel

                unit = self.device_unit()
                kernel = load_device_kernel(unit, self.name, device)
                self._devices[device] = kernel
            return kernel


def plugins_of(bundle: Bundle, sources: Sequence[Any]) -> tuple[Plugin, ...]:
    """One plugin per source kernel of a bundle; a kernel that appears twice is built once."""
    return tuple(Plugin(bundle, str(source.name), source) for source in sources)
