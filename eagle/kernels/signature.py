"""How a kernel is called: its parameters in order, what it returns, and which planes are its own affair."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle.kernels.roles import Arg
    from eagle.kernels.sidecar import Sidecar


@dataclass(frozen=True, slots=True)
class Signature:
    """The call signature of one kernel.

    Attributes:
        kernel: The kernel's name, for messages.
        names: Parameters in call order, the mask left out. None when the kernel's source is not at hand: calls by name.
        outputs: Names that the kernel's ``return`` makes; given by keyword only.
        returns: What a call gives back: None, one name, or a tuple, list or dict of names.
        extents: Declared element counts of shared tables and accumulators, by name.
        unused: Parameters that the compiled kernel dropped because nothing reads them.
        parts: Returned vectors that the compiled kernel keeps as one accumulator per component, by name.
        ascending: Planes whose values the caller promises never to decrease (``Sorted[Index]``).
    """

    kernel: str
    names: tuple[str, ...] | None
    outputs: tuple[str, ...]
    returns: Any
    extents: Mapping[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ascending: tuple[str, ...] = ()

    def check_promises(self, planes: Mapping[str, Any]) -> None:
        """Look at the planes that are promised to ascend, where $HAWK_CHECK_SORTED asks for it.

        Args:
            planes: Bound planes by name.

        Raises:
            ValueError: One decreases; names it and the first place.
        """
        if not self.ascending or not os.environ.get("HAWK_CHECK_SORTED"):
            return
        for name in self.ascending:
            values: Any = planes[name].native
            falls = values[1:] < values[:-1]
            if falls.any():
                at = int(falls.argmax())
                raise ValueError(f"{name!r} is declared Sorted and falls after sample {at}; sort the samples by it")


def companions(args: Sequence[Arg]) -> frozenset[str]:
    """Accumulators that only hold the compensation term of another one; the caller never passes them."""
    sums = {arg.name for arg in args if arg.role == "accum_out"}
    return frozenset(name for name in sums if name.removesuffix("_comp").removesuffix("_c") in sums - {name})


def signature_of(sidecar: Sidecar, kernel: Any = None) -> Signature:
    """The signature of a compiled kernel, from its source kernel where it is at hand, else from its sidecar.

    Args:
        sidecar: The compiled kernel's sidecar.
        kernel: The hawk kernel it was built from, or None.
    """
    hidden = companions(sidecar.args)
    primal = None if kernel is None else getattr(kernel.sinks, "source", None)
    if kernel is None or primal is not None:
        # A derivative is made from its primal, not from a function: it has no parameter list to bind by position.
        extents = _declared_extents(sidecar) if primal is None else _adjoint_extents(sidecar, primal)
        return Signature(sidecar.name, None, (), None, extents)
    outputs = _flat_names(kernel.returns)
    mask = next((arg.name for arg in sidecar.args if arg.role == "terminated"), None)
    names: list[str] = []
    extents = _declared_extents(sidecar)
    parts: dict[str, tuple[str, ...]] = {}
    sums = {arg.name for arg in sidecar.args if arg.role == "accum_out"}
    for name, plane in kernel.planes.items():
        extent = _extent(plane, 1 if name in sums else None)
        if extent is not None and (name in sums or plane.form in ("table", "mutable")):
            extents[name] = extent
        if name in outputs and f"{name}_0" in sums:
            parts[name] = tuple(f"{name}_{i}" for i in range(math.prod(plane.ttype.shape)))
            extents.update(dict.fromkeys(parts[name], 1))
        if getattr(plane, "grid", ()):
            continue  # the lane's own coordinates, which nobody passes
        if plane.form != "terminated" and name not in outputs and name not in hidden and name != mask:
            names.append(name)
    known = {arg.name for arg in sidecar.args}
    ascending = tuple(name for name, plane in kernel.planes.items() if name in known and plane.sorted)
    unused = tuple(name for name in names if name not in known)
    for name in hidden:
        extents.setdefault(name, extents.get(name.removesuffix("_comp").removesuffix("_c"), 1))
    return Signature(sidecar.name, tuple(names), outputs, kernel.returns, extents, unused, parts, ascending)


def _extent(plane: Any, without_axes: int | None = None) -> int | None:
    """Elements of a shared plane of a source kernel; None for an extent that is known only at run time.

    Args:
        plane: hawk's plane.
        without_axes: What a plane without named axes holds, in values: one where lanes add into it.
    """
    values = without_axes if not plane.dims else 1
    for _, size, _ in plane.dims:
        if size is None or values is None:
            return None
        values *= int(size)
    return None if values is None else values * math.prod(int(size) for size in plane.ttype.shape)


def _declared_extents(sidecar: Sidecar) -> dict[str, int]:
    """Extents of accumulators as the sidecar tells them, for units without their source."""
    declared = sidecar.meta.get("plane_axes")
    extents = {}
    for name, plane in (declared if isinstance(declared, Mapping) else {}).items():
        try:
            sizes = [axis["extent"] for axis in plane["axes"]] + list(plane["payload"])
        except (KeyError, TypeError):
            continue
        if sizes and all(type(size) is int and size > 0 for size in sizes):
            extents[name] = math.prod(sizes)
    return extents


def _adjoint_extents(sidecar: Sidecar, primal: Any) -> dict[str, int]:
    """Extents of a derivative's shared planes: those of the primal, and the same for their adjoints and tangents."""
    from hawk.diff import ADJOINT_PREFIX, TANGENT_PREFIX

    extents = _declared_extents(sidecar)
    for name, plane in primal.planes.items():
        extent = _extent(plane)
        if extent is not None and plane.form in ("table", "accum", "mutable"):
            for prefix in ("", f"{ADJOINT_PREFIX}_", f"{TANGENT_PREFIX}_"):
                extents.setdefault(prefix + name, extent)
    return extents


def _flat_names(returns: Any) -> tuple[str, ...]:
    if returns is None:
        return ()
    if isinstance(returns, str):
        return (returns,)
    parts = returns.values() if isinstance(returns, Mapping) else returns
    return tuple(name for part in parts for name in _flat_names(part))


def bind_call(signatures: Sequence[Signature], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Bind a call's arguments by name, exactly as a call to the kernel functions would.

    Several kernels form one signature: their names in order of first appearance.

    Raises:
        ValueError: Too many positional arguments, an argument given twice, or positional ones where the kernels' source
            is not at hand. Missing and unknown names are left to the caller, which knows what may be left out.
    """
    if not args:
        return dict(kwargs)
    names: dict[str, None] = {}
    for signature in signatures:
        if signature.names is None:
            raise ValueError(
                f"{signature.kernel!r} is a prebuilt plan, called by name only; pass its planes as keywords "
                "(for example x=..., v=...)"
            )
        names.update(dict.fromkeys(signature.names))
    order = list(names)
    kernels = " + ".join(s.kernel for s in signatures)
    if len(args) > len(order):
        raise ValueError(
            f"{kernels} takes {len(order)} arguments ({', '.join(order)}); got {len(args)} positional ones"
        )
    bound = dict(zip(order, args, strict=False))
    for name in kwargs:
        if name in bound:
            raise ValueError(f"{kernels}: argument {name!r} is given twice, by position and by name")
    return {**bound, **kwargs}
