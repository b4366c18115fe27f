"""The by-value binary interface of a kernel entry: GRef, Handle, and the argument tuple.

Layouts (little-endian, 8-byte aligned), as hawk's artifacts declare them through ``eagle_layout_sizes``:

- GRef, 40 bytes, a component-major plane (W, N): data pointer u64, samples u64 = N, component stride u64 = N,
  sample stride u64 = 1, device type i32, device id i32.
- Handle, 32 bytes, one value per sample or a flat table: data pointer u64, samples u64, stride u64 = 1,
  device type i32, device id i32.
- partition triple, 24 bytes: base, count, nSamples, each i64.

Device types are DLPack's numbers: 1 CPU, 2 CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle.errors import AbiMismatch
from eagle.kernels.roles import struct_of

ACCEPTED_ABI_TAGS = ("aether-abi/1", "aether-abi/2")
LAYOUT_SIZES = (40, 32, 32, (4, 8), 24)
CPU, CUDA = 1, 2

GREF = np.dtype(
    [
        ("data", "<u8"),
        ("samples", "<u8"),
        ("comp_stride", "<u8"),
        ("sample_stride", "<u8"),
        ("device_type", "<i4"),
        ("device_id", "<i4"),
    ]
)
HANDLE = np.dtype(
    [("data", "<u8"), ("samples", "<u8"), ("stride", "<u8"), ("device_type", "<i4"), ("device_id", "<i4")]
)

_REAL_DTYPES: dict[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "softdouble": np.dtype(np.float64),
}


def np_dtype(scalar_type: str) -> np.dtype[Any]:
    """The NumPy dtype of Real-typed planes for a resolved ``scalar_type``.

    SoftDouble is bit-identical IEEE float64, so its planes are float64.

    Raises:
        KeyError: ``scalar_type`` is not "float64", "float32" or "softdouble".
    """
    try:
        return _REAL_DTYPES[scalar_type]
    except (KeyError, TypeError):
        raise KeyError(f"scalar_type {scalar_type!r} is unknown; use one of {', '.join(_REAL_DTYPES)}") from None


def check_aether_abi(meta: Mapping[str, Any], *, kind: str, name: str) -> None:
    """Refuse an artifact whose ABI tag this eagle does not speak.

    Args:
        meta: A sidecar or manifest document.
        kind: What the artifact is, for the error ("vector plugin", "plugin manifest").
        name: The artifact's name, for the error.

    Raises:
        AbiMismatch: ``meta["aether_abi"]`` is absent, empty, or not one of the accepted tags.
    """
    tag = meta.get("aether_abi")
    if tag not in ACCEPTED_ABI_TAGS:
        raise AbiMismatch(
            f"{kind} {name!r}: ABI tag {tag!r}, this eagle accepts {' and '.join(ACCEPTED_ABI_TAGS)}; "
            "rebuild it with a matching hawk",
            tag,
            ACCEPTED_ABI_TAGS,
        )


def check_layout(tag: str, sizes: Sequence[int], *, name: str) -> None:
    """Refuse a loaded library or module whose exported tag or struct sizes differ from ours.

    Args:
        tag: Its ``eagle_abi_tag``.
        sizes: Its ``eagle_layout_sizes``: bytes of GRef, Handle, int Handle, index type, partition triple.
        name: The artifact, for the error.

    Raises:
        AbiMismatch: Either differs; the message holds both values.
    """
    if tag not in ACCEPTED_ABI_TAGS:
        raise AbiMismatch(
            f"{name} exports eagle_abi_tag {tag!r}, this eagle accepts {' and '.join(ACCEPTED_ABI_TAGS)}; rebuild it",
            tag,
            ACCEPTED_ABI_TAGS,
        )
    found = tuple(int(size) for size in sizes)
    fits = len(found) == len(LAYOUT_SIZES) and all(
        size in want if isinstance(want, tuple) else size == want
        for size, want in zip(found, LAYOUT_SIZES, strict=True)
    )
    if not fits:
        raise AbiMismatch(
            f"{name} exports eagle_layout_sizes {found}, this eagle expects (40, 32, 32, 4 or 8, 24); rebuild it",
            found,
            LAYOUT_SIZES,
        )


def address_of(array: Any) -> tuple[int, int, int]:
    """Data address, DLPack device type and device id of a NumPy or CuPy-like array."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0], CPU, 0
    return int(array.data.ptr), CUDA, int(array.device.id)


def make_gref(arr: Any, n: int) -> Any:
    """A by-value GRef over a contiguous component-major plane.

    Args:
        arr: Shape (W, N), contiguous; NumPy or CuPy. The caller keeps it alive while the struct is in use.
        n: Samples; becomes ``samples`` and ``comp_stride``, the sample stride is 1.

    Returns:
        A NumPy structured scalar of 40 bytes.
    """
    address, device_type, device_id = address_of(arr)
    return np.array((address, n, n, 1, device_type, device_id), GREF)[()]


def make_handle(arr: Any, n: int) -> Any:
    """A by-value Handle over a contiguous array of one value per sample, or a flat table.

    Args:
        arr: Shape (N,), contiguous; NumPy or CuPy. The caller keeps it alive while the struct is in use.
        n: Its extent; the struct carries it.

    Returns:
        A NumPy structured scalar of 32 bytes.
    """
    address, device_type, device_id = address_of(arr)
    return np.array((address, n, 1, device_type, device_id), HANDLE)[()]


def _null_handle(n: int) -> Any:
    return np.array((0, n, 1, CUDA, 0), HANDLE)[()]


def assemble_args(
    arg_spec: Sequence[Sequence[str]],
    *,
    out: Any,
    vec: Mapping[str, Any],
    per_sample: Mapping[str, Any],
    terminated: Any,
    uniforms: Mapping[str, Any],
    n: int,
    tables: Mapping[str, Any] | None = None,
    mutables: Mapping[str, Any] | None = None,
    mutable_vec: Mapping[str, Any] | None = None,
    mutable_mat: Mapping[str, Any] | None = None,
    mats: Mapping[str, Any] | None = None,
    wide_in: Mapping[str, Any] | None = None,
    wide_out: Mapping[str, Any] | None = None,
    plan: Any = None,
) -> list[Any]:
    """The kernel's argument list, in the order its signature expects.

    Args:
        arg_spec: (role, name) pairs in the order of the entry's parameters.
        out: The output plane of a vector kernel, shape (W, n), or None.
        vec: Input vector planes by name, each (W, n).
        per_sample: Scalar planes by name, each (n,).
        terminated: The mask, (n,) bool, or None for a null handle.
        uniforms: Numbers by name; a NumPy scalar keeps its dtype, anything else becomes float64.
        n: Samples.
        tables: Lookup tables by name, any extent.
        mutables: Scalar or integer Mutable planes by name, each (n,).
        mutable_vec: Vector Mutable planes by name, each (W, n).
        mutable_mat: Matrix Mutable planes by name, each (R*C, n).
        mats: Matrix inputs by name, each (R*C, n).
        wide_in: Wide inputs by name, each (rows, n).
        wide_out: Wide and accumulating outputs by name.
        plan: A `Sidecar` of this signature; its argument pairs are used instead of ``arg_spec``.

    Returns:
        NumPy structured scalars and numbers. The arrays behind them must outlive the launch.

    Raises:
        ValueError: A role is unknown (named).
        KeyError: An argument of the signature was not given.
    """
    pairs = arg_spec if plan is None else [(arg.role, arg.name) for arg in plan.args]
    flat = {**(mutables or {}), **(tables or {}), **per_sample, **(wide_in or {}), **(wide_out or {})}
    planes = {**(mutable_vec or {}), **(mutable_mat or {}), **(mats or {}), **vec}
    args: list[Any] = []
    for role, name in pairs:
        wide_mutable = role == "mutable" and name in planes
        struct = struct_of(role, "vector" if wide_mutable else "scalar", where="assemble_args")
        if role == "nsamples":
            args.append(np.int64(n))
        elif struct == "value":
            value = uniforms[name]
            args.append(value if isinstance(value, np.generic) else np.float64(value))
        elif struct == "gref":
            args.append(make_gref(out if role == "out" else planes[name], n))
        elif role == "terminated":
            args.append(_null_handle(n) if terminated is None else make_handle(terminated, n))
        else:
            array = flat[name]
            args.append(make_handle(array, n if role in ("mutable", "per_sample") else int(array.size)))
    return args
