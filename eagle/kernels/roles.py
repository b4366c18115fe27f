"""The argument roles of a kernel entry, and how each one crosses the binary interface.

A role is the first word of an ``arg_spec`` pair. It fixes the struct that carries the argument (a GRef, a Handle or a
plain value), whether the argument has one column per sample, and whether the kernel writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from eagle.errors import UnsupportedSchema

Struct = Literal["gref", "handle", "value"]

FINISHED_COUNT = "finished_count"
FUSED_STEPS = "fused_steps"
ACTIVE_MAP = "active_map"
ACTIVE_COUNT = "active_count"
# Lookup planes that the running loop owns; a caller never passes them.
RESERVED = (FINISHED_COUNT, ACTIVE_MAP, ACTIVE_COUNT, FUSED_STEPS)

_GREF_ROLES = frozenset({"out", "vec_in", "mat_in"})
_HANDLE_ROLES = frozenset({"per_sample", "terminated", "lookup", "wide_in", "wide_out", "accum_out"})
_VALUE_ROLES = frozenset({"uniform", "nsamples"})
_PER_SAMPLE_ROLES = frozenset({"out", "vec_in", "mat_in", "mutable", "per_sample", "terminated"})
_WRITTEN_ROLES = frozenset({"out", "mutable", "terminated", "wide_out", "accum_out"})
ROLES = _GREF_ROLES | _HANDLE_ROLES | _VALUE_ROLES | {"mutable"}


@dataclass(frozen=True, slots=True)
class Arg:
    """One parameter of a kernel entry.

    Attributes:
        name: The name the caller binds.
        role: Its role in ``arg_spec``.
        dtype: Element dtype of the plane, or of the value for a uniform.
        shape: Shape of one sample: () for a scalar, (w,) for a vector, (R, C) for a matrix.
        struct: Which by-value struct carries it.
        prior: True when the kernel reads the plane before it writes it, so the caller must give it.
        default: Declared fill of an omitted plane, or None.
        readonly: True when the kernel never writes a plane of a written role (a read-only mask).
    """

    name: str
    role: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...] = ()
    struct: Struct = "handle"
    prior: bool = True
    default: float | None = None
    readonly: bool = False

    @property
    def width(self) -> int:
        """Components of one sample."""
        width = 1
        for extent in self.shape:
            width *= extent
        return width

    @property
    def per_sample(self) -> bool:
        """Whether the plane has one column per sample."""
        return self.role in _PER_SAMPLE_ROLES

    @property
    def written(self) -> bool:
        """Whether the kernel writes the plane."""
        return self.role in _WRITTEN_ROLES and not self.readonly

    @property
    def reserved(self) -> bool:
        """Whether the running loop owns this plane."""
        return self.name in RESERVED and self.role == "lookup"


def struct_of(role: str, mutable_dtype: str = "scalar", *, where: str) -> Struct:
    """The by-value struct that carries an argument of ``role``.

    Args:
        role: The role word of an ``arg_spec`` pair.
        mutable_dtype: The declared dtype word of a mutable ("scalar", "int32", "vector", "matrix", ...).
        where: The artifact, for the error.

    Raises:
        UnsupportedSchema: ``role`` is not one this eagle knows.
    """
    if role in _GREF_ROLES:
        return "gref"
    if role in _HANDLE_ROLES:
        return "handle"
    if role in _VALUE_ROLES:
        return "value"
    if role == "mutable":
        return "gref" if mutable_dtype in ("vector", "matrix") else "handle"
    raise UnsupportedSchema(
        f"{where}: argument role {role!r} is unknown to this eagle (known: {', '.join(sorted(ROLES))}); "
        "install a newer eagle-aio, or build the kernel with a hawk release of the same generation"
    )
