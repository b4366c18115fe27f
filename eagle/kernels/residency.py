"""Where a call's data lives: the array module to bind with, the device, and the framework that results go back to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eagle.errors import BackendUnavailable
from eagle.kernels.interop import Adapter, detect, origin_adapter
from eagle.kernels.layout import unmarked

if TYPE_CHECKING:
    from types import ModuleType


@dataclass(frozen=True, slots=True)
class Residency:
    """Where the planes of one call lie.

    Attributes:
        device: CUDA device id, or None for the host.
        origin: The framework that new arrays are handed back in.
    """

    device: int | None
    origin: Adapter

    @property
    def xp(self) -> ModuleType:
        """NumPy on the host, CuPy on a device."""
        if self.device is None:
            return np
        from eagle.kernels.device import require_cupy

        return require_cupy()  # type: ignore[no-any-return]

    def hand_back(self, array: Any) -> Any:
        """A new array of ours, in the caller's framework."""
        return self.origin.from_numpy(array) if self.device is None else self.origin.from_cupy(array)


def host_view(value: Any) -> np.ndarray[Any, Any] | None:
    """A NumPy view of an array that lies on the host, of any framework; None for everything else."""
    if isinstance(value, np.ndarray):
        return value
    adapter = None if isinstance(value, np.generic) else detect(value)
    if adapter is None or adapter.is_device(value):
        return None
    return adapter.to_numpy(value)


def _is_number(value: Any) -> bool:
    """Whether it is one of NumPy's numbers, also in the form of an array."""
    return isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)


def side_of(values: Iterable[Any]) -> Literal["host", "cuda"] | None:
    """The side that the first array among ``values`` lies on; None without arrays. `residency_of` checks them all."""
    for marked in values:
        value = unmarked(marked)[0]
        adapter = detect(value)
        if adapter is not None and not _is_number(value):
            return "cuda" if adapter.is_device(value) else "host"
    return None


def residency_of(values: Iterable[tuple[str, Any]]) -> Residency:
    """Find where the arrays among ``values`` (name, value) lie; numbers and lists go anywhere.

    Raises:
        ValueError: Some lie on the host and some on a device, or on two devices; each side is named.
        TypeError: Two strong frameworks (torch, jax, tensorflow) are mixed.
        BackendUnavailable: An array lies on a device and no GPU can be used.
    """
    arrays: list[Any] = []
    host: list[str] = []
    devices: dict[int, list[str]] = {}
    for name, marked in values:
        value = unmarked(marked)[0]
        adapter = detect(value)
        if adapter is None or _is_number(value):
            continue
        arrays.append(value)
        if not adapter.is_device(value):
            host.append(name)
        else:
            devices.setdefault(adapter.device_id(value) or 0, []).append(name)
    if devices and host:
        on_device = ", ".join(repr(name) for names in devices.values() for name in names)
        raise ValueError(
            f"{', '.join(map(repr, host))} lie on the host and {on_device} on a device; a kernel runs where its data "
            "lives, so move every array to one side (cupy.asarray(x), or x.get())"
        )
    if len(devices) > 1:
        listed = "; ".join(f"device {k}: {', '.join(map(repr, names))}" for k, names in sorted(devices.items()))
        raise ValueError(f"the planes lie on several devices ({listed}); move them to one device")
    if not devices:
        return Residency(None, origin_adapter(arrays))
    from eagle.kernels.device import unusable_reason

    reason = unusable_reason()
    if reason is not None:
        raise BackendUnavailable(f"{', '.join(map(repr, *devices.values()))} lie on a device, but {reason}")
    return Residency(next(iter(devices)), origin_adapter(arrays))
