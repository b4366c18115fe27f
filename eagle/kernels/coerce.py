"""What a user gives a device kernel by name, made into contiguous device planes and numbers.

Arrays of other frameworks are imported without a copy where they lie on the device, NumPy arrays are uploaded, numbers
are spread over the samples. Planes that the kernel writes stay the caller's own device memory; where that is
impossible they are refused, because the result would land in a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.kernels.device import is_cupy, require_cupy
from eagle.kernels.interop import to_cupy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from eagle.kernels.roles import Arg

_idle_masks: dict[int, Any] = {}


def check_names(args: Sequence[Arg], given: Mapping[str, Any], *, what: str) -> None:
    """Refuse names the kernel does not have.

    Raises:
        TypeError: Names them, and those the kernel takes.
    """
    known = {arg.name for arg in args if arg.role not in ("nsamples", "out")}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TypeError(f"{what} has no argument {', '.join(map(repr, unknown))}; it takes {', '.join(sorted(known))}")


def is_native(arg: Arg, array: Any) -> bool:
    """Whether an array has the component-major shape of a per-sample argument."""
    shape: tuple[int, ...] = array.shape
    return shape[:-1] == ((arg.width,) if arg.struct == "gref" else ()) and len(shape) >= 1


def samples_of(args: Sequence[Arg], arrays: Mapping[str, Any], exempt: Iterable[str]) -> int | None:
    """N of a set of native planes; None when none carries it."""
    n, first = None, ""
    for arg in args:
        array = arrays.get(arg.name)
        carries = arg.per_sample or (arg.role in ("wide_in", "wide_out") and arg.name not in exempt)
        if array is None or not carries:
            continue
        extent = int(array.shape[-1])
        if n is not None and extent != n:
            raise ValueError(f"{arg.name!r} holds {extent} samples and {first!r} holds {n}; all planes need the same")
        n, first = extent, first or arg.name
    return n


def number_of(arg: Arg, value: Any) -> Any:
    """A uniform's value in the dtype the entry takes."""
    try:
        return arg.dtype.type(value)
    except (TypeError, ValueError):
        raise TypeError(f"{arg.name!r} is a {type(value).__name__}, expected a number") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.generic)) or (isinstance(value, np.ndarray) and value.ndim == 0)


def coerce(
    args: Sequence[Arg],
    kw: Mapping[str, Any],
    *,
    counts: Mapping[str, int] | None = None,
    exempt: Iterable[str] = (),
    n: int | None = None,
    what: str,
) -> tuple[dict[str, Any], int]:
    """Device planes and numbers for every argument but ``out``, and the number of samples.

    Args:
        args: The signature.
        kw: What the caller gave.
        counts: Elements of each lookup table, checked where known.
        exempt: Wide outputs that do not carry the sample axis.
        n: The number of samples when something outside of ``kw`` carries it.
        what: The call, for error messages.
    """
    check_names(args, kw, what=what)
    _check_missing(args, kw, what)
    carriers = [arg for arg in args if arg.role not in ("nsamples", "uniform", "out")]
    arrays = {a.name for a in carriers if a.name in kw and kw[a.name] is not None and not _is_number(kw[a.name])}
    if n is None and not any(a.name in arrays and (a.per_sample or a.role.startswith("wide")) for a in carriers):
        raise TypeError(f"{what}: no argument carries the number of samples; pass at least one per-sample plane")
    require_cupy()
    values: dict[str, Any] = {arg.name: number_of(arg, kw[arg.name]) for arg in args if arg.role == "uniform"}
    for arg in carriers:
        if arg.name in arrays:
            values[arg.name] = _device_plane(arg, kw[arg.name], (counts or {}).get(arg.name))
    found = samples_of(args, values, exempt)
    if n is None:
        n = found or 0
    elif found is not None and found != n:
        raise ValueError(f"{what}: 'out' holds {n} samples and the inputs hold {found}; all planes need the same")
    for arg in carriers:
        if arg.name not in values:
            values[arg.name] = _filled(arg, kw.get(arg.name), n)
    return values, n


def _check_missing(args: Sequence[Arg], kw: Mapping[str, Any], what: str) -> None:
    for arg in args:
        filled = arg.role == "mutable" and not (arg.prior and arg.default is None)
        if not filled and arg.role not in ("terminated", "nsamples", "out") and kw.get(arg.name) is None:
            raise TypeError(f"{what}: argument {arg.name!r} is missing; pass it by name")
        if _is_number(kw.get(arg.name)) and arg.role not in ("uniform", "per_sample", "mutable"):
            raise TypeError(f"{what}: argument {arg.name!r} is a number, expected an array")


def _device_plane(arg: Arg, given: Any, count: int | None) -> Any:
    """One given array as a contiguous device plane; written planes stay the caller's own device memory."""
    cupy = require_cupy()
    array = to_cupy(given)
    if arg.role == "lookup":
        dtype = arg.dtype if array.dtype.kind == "f" or not is_cupy(given) else array.dtype
        array = cupy.ascontiguousarray(array, dtype=dtype)
        if count is not None and array.size < count:
            raise ValueError(f"table {arg.name!r} holds {array.size} elements, the kernel reads {count}")
        return array
    if arg.per_sample and arg.struct == "gref" and array.ndim > 2:
        array = array.reshape(arg.width, -1)
    if arg.per_sample and not is_native(arg, array):
        want = f"({arg.width}, n)" if arg.struct == "gref" else "(n,)"
        raise ValueError(f"{arg.name!r} has shape {array.shape}, expected {want}")
    fits = array.dtype == arg.dtype or (arg.role == "terminated" and array.dtype.itemsize == 1)
    if arg.written and is_cupy(given) and not (fits and array.flags.c_contiguous):
        raise ValueError(
            f"{arg.name!r} is written in place and must be contiguous {arg.dtype}; got {array.dtype}, "
            f"contiguous: {array.flags.c_contiguous}"
        )
    return cupy.ascontiguousarray(array, dtype=None if fits else arg.dtype)


def _filled(arg: Arg, given: Any, n: int) -> Any:
    """A plane of one value: a number the caller gave, a declared default, or an all-false mask."""
    cupy = require_cupy()
    if arg.role == "terminated":
        return idle_mask(n) if arg.readonly else cupy.zeros(n, cupy.bool_)
    shape = (arg.width, n) if arg.struct == "gref" else (n,)
    fill = given if given is not None else arg.default
    return cupy.zeros(shape, arg.dtype) if fill is None else cupy.full(shape, float(fill), arg.dtype)


def idle_mask(n: int) -> Any:
    """A shared all-false mask of ``n`` samples on the current device, for kernels that never write theirs."""
    cupy = require_cupy()
    device = cupy.cuda.runtime.getDevice()
    mask = _idle_masks.get(device)
    if mask is None or mask.size < n:
        mask = _idle_masks[device] = cupy.zeros(max(n, 1024), cupy.bool_)
        cupy.cuda.get_current_stream().synchronize()  # other streams read it without waiting for this one
    return mask[:n]
