"""Planes: the arrays a kernel reads and writes, bound from what the caller gave.

A per-sample plane of one value per sample is (N,); of a vector (w, N), component-major; of a matrix (R*C, N). A
transposed view of such an array, (N, w), binds without a copy; a contiguous (N, w) array is copied with a
`LayoutWarning` and, where the kernel writes it, copied back at the end. Everything is checked before anything is
written: `bind_planes` raises or gives arrays that are right to launch on.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.errors import LayoutWarning
from eagle.kernels.interop import detect
from eagle.kernels.layout import Layout, unmarked

if TYPE_CHECKING:
    from types import ModuleType

    from eagle.kernels.roles import Arg


@dataclass(slots=True)
class Plane:
    """One bound plane.

    Attributes:
        arg: The argument it is bound to.
        given: The caller's own object (what results give back).
        native: The C-contiguous array the kernel runs on: (N,), (w, N), (R*C, N) or a shared table.
        source: Array view of ``given`` that a copied plane is written back to, or None when nothing was copied.
    """

    arg: Arg
    given: Any
    native: Any
    source: Any = None


@dataclass(slots=True)
class Planes:
    """Every plane and number of one binding.

    Attributes:
        n: Samples.
        single: True when every per-sample plane was one sample without a sample axis.
        xp: The array module, NumPy or CuPy.
        planes: By name.
        numbers: Uniforms by name, as NumPy scalars of the declared dtype.
        allocated: Names of planes made here because the caller left them out.
    """

    n: int
    single: bool
    xp: ModuleType
    planes: dict[str, Plane] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    allocated: tuple[str, ...] = ()

    def refuse_read_only(self) -> None:
        """Refuse a run that would write into arrays which have become read-only since they were bound.

        Raises:
            ValueError: A written plane is read-only now; nothing was written.
        """
        for name, plane in self.planes.items():
            given = plane.given
            if plane.arg.written and isinstance(given, np.ndarray) and not given.flags.writeable:
                raise ValueError(
                    f"{name!r} is written by the kernel, and its array has become read-only since it was bound; make "
                    "it writable, or bind a writable copy"
                )

    def write_back(self) -> None:
        """Copy every written plane that was copied in back into the caller's array."""
        for plane in self.planes.values():
            if plane.source is not None and plane.arg.written:
                plane.source[...] = plane.native.T.reshape(plane.source.shape)

    def take_in(self) -> None:
        """Copy every plane that was copied in afresh from the caller's array, which may have changed since."""
        for plane in self.planes.values():
            if plane.source is not None:
                plane.native[...] = plane.source.reshape(plane.source.shape[0], -1).T


def real_number(value: Any) -> bool:
    """Whether ``value`` is one real number: a Python or NumPy int or float, or a 0-d array of one; never a bool."""
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        return True
    return isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iuf"


def bind_number(arg: Arg, value: Any, *, array_error: type[Exception] = ValueError) -> Any:
    """A uniform as a NumPy scalar of its declared dtype.

    Raises:
        TypeError: ``value`` is no real number, or a fraction for an integer parameter.
        ValueError: ``value`` is an array, or does not fit the integer dtype (``array_error`` for the array).
    """
    value = unmarked(value)[0]
    if getattr(value, "ndim", 0) or isinstance(value, (list, tuple)):
        shape = getattr(value, "shape", None) or (len(value),)
        raise array_error(f"parameter {arg.name!r} is one number shared by every sample; got an array of shape {shape}")
    if getattr(value, "ndim", None) == 0 and not isinstance(value, np.generic):
        value = value.item()  # 0-d arrays of any framework
    if isinstance(value, np.generic):
        value = float(value) if isinstance(value, np.longdouble) else value.item()
    if isinstance(value, complex) or not isinstance(value, (int, float)):
        raise TypeError(f"parameter {arg.name!r} is one real number; got {value!r} of type {type(value).__name__}")
    if arg.dtype.kind in "iu":
        if isinstance(value, float):
            raise TypeError(f"parameter {arg.name!r} is an integer; got the float {value!r}, pass an int")
        limits = np.iinfo(np.dtype(arg.dtype).str)
        if not limits.min <= value <= limits.max:
            raise ValueError(
                f"parameter {arg.name!r} = {value} does not fit {arg.dtype} ({limits.min} to {limits.max})"
            )
    try:
        with np.errstate(over="ignore", under="ignore"):
            bound = arg.dtype.type(value)
    except OverflowError as error:
        raise ValueError(f"parameter {arg.name!r} = {value} does not fit {arg.dtype}") from error
    if math.isinf(bound) and math.isfinite(value):
        raise ValueError(f"parameter {arg.name!r} = {value} does not fit {arg.dtype}")
    return bound


@dataclass(slots=True)
class _Reading:
    """How one per-sample array reads: its sample count, and whether samples come first."""

    arg: Arg
    given: Any
    array: Any
    n: int
    first: bool
    single: bool


def _describe(array: Any) -> str:
    return f"{array.dtype} array of shape {tuple(array.shape)}"


def _wants(arg: Arg) -> str:
    if not arg.shape:
        return "(N,)"
    flat = f"({arg.width}, N)"
    return flat if len(arg.shape) == 1 else f"{flat}, row-major flat {arg.shape[0]}x{arg.shape[1]} matrices"


def refuse_masked(x: object, what: str) -> None:
    """Refuse a masked array.

    Raises:
        ValueError: `x` is one.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise ValueError(f"{what} is a masked array, whose mask a kernel cannot see; pass .filled(...) or .data")


def _as_array(arg: Arg, value: Any, xp: ModuleType) -> Any:
    """``value`` as an array of ``xp`` over the same memory; numbers become 0-d arrays."""
    if value is None or isinstance(value, (str, bytes, bool, np.bool_, complex)):
        raise (TypeError if value is None else ValueError)(f"{arg.name!r} needs a plane {_wants(arg)}; got {value!r}")
    if isinstance(value, (int, float, np.integer, np.floating)):
        return _number_as_array(arg, value)
    if isinstance(value, xp.ndarray):
        if type(value) is xp.ndarray:
            return value
        refuse_masked(value, repr(arg.name))
        # A subclass may reshape as it likes (np.matrix stays 2-d), and its own view() may do anything.
        return np.ndarray.view(value, np.ndarray) if xp is np else value
    adapter = detect(value)
    if adapter is None:
        raise ValueError(f"{arg.name!r} needs an array {_wants(arg)} of {arg.dtype}; got a {type(value).__name__}")
    if arg.written and not adapter.writable(value):
        raise ValueError(
            f"{arg.name!r} is written by the kernel, and a {adapter.name} array cannot be written in place; "
            "pass a NumPy or CuPy array (or torch tensor) for it"
        )
    return adapter.to_numpy(value) if xp is np else adapter.to_cupy(value)


def _number_as_array(arg: Arg, value: Any) -> Any:
    """One sample's number as a 0-d array; refused where the dtype cannot hold it."""
    whole = arg.dtype.kind in "iu"
    if whole and value != value // 1:  # NaN is unequal to itself
        raise ValueError(f"{arg.name!r} is {value!r}; it holds {arg.dtype}, so pass a whole number")
    try:
        with np.errstate(all="ignore"):
            array = np.array(int(value) if whole else value, arg.dtype)
    except OverflowError:
        fits = False
    else:
        fits = whole or bool(np.isinf(array)) == math.isinf(value)
    if not fits:
        raise ValueError(f"{arg.name!r} is {value!r:.40}, which does not fit {arg.dtype}; pass a number that does")
    return array


def _read(arg: Arg, given: Any, xp: ModuleType, layout: Layout | None) -> _Reading:
    value, mark = unmarked(given)
    array = _as_array(arg, value, xp)
    shape = tuple(array.shape)
    if not arg.shape:
        if len(shape) > 1:
            raise ValueError(f"{arg.name!r} holds one value per sample, shape (N,); got a {_describe(array)}")
        return _Reading(arg, value, array, shape[0] if shape else 1, False, not shape)
    width = arg.width
    last, first = _orientations(arg, shape)
    single = not (last or first) and shape in ((width,), arg.shape)
    if single:
        return _Reading(arg, value, array, 1, False, True)
    if not (last or first):
        raise ValueError(f"{arg.name!r} needs shape {_wants(arg)}; got a {_describe(array)}")
    if mark is not None and not (first if mark == "samples_first" else last):
        wanted = f"(N, {width})" if mark == "samples_first" else f"({width}, N)"
        raise ValueError(f"{arg.name!r} is marked {mark}, so its shape must be {wanted}; got {shape}")
    if last and first and width > 1:
        said = mark or layout
        if said is None:
            raise ValueError(
                f"{arg.name!r} has shape {shape}, which reads as samples first and as samples last; say which with "
                "layout='samples_first' / 'samples_last', or mark it: eagle.samples_first(x) / eagle.samples_last(x)"
            )
        last = said == "samples_last"
    return _Reading(arg, value, array, shape[-1] if last else shape[0], not last, False)


def _orientations(arg: Arg, shape: tuple[int, ...]) -> tuple[bool, bool]:
    """Whether a batch of that shape can read as samples last, and as samples first."""
    if len(shape) == 2:
        return shape[0] == arg.width, shape[1] == arg.width
    if len(shape) == 3 and len(arg.shape) == 2:
        return shape[:2] == arg.shape, shape[1:] == arg.shape
    return False, False


def _check_dtype(arg: Arg, array: Any, where: str = "") -> None:
    if array.dtype == arg.dtype and array.dtype.isnative:
        return
    if arg.role == "terminated" and array.dtype == np.bool_:
        return
    raise ValueError(f"{arg.name!r} must be {arg.dtype} (the kernel's own precision{where}); got a {_describe(array)}")


def _check_memory(arg: Arg, array: Any) -> None:
    if not isinstance(array, np.ndarray):
        return
    if not array.flags.aligned:
        raise ValueError(f"{arg.name!r} lies at an address that {arg.dtype} may not have; pass an aligned copy of it")
    if arg.written and not array.flags.writeable:
        raise ValueError(f"{arg.name!r} is written by the kernel, and its array is read-only; pass a writable copy")


def callers_level() -> int:
    """The ``stacklevel`` with which a warning of the calling function points at the first line outside eagle."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "eagle":
        level, frame = level + 1, frame.f_back
    return level


def _native(reading: _Reading, warn: bool) -> tuple[Any, Any]:
    """The kernel's array for a reading, and the array it was copied from (None when nothing was copied)."""
    arg, array = reading.arg, reading.array
    _check_dtype(arg, array)
    _check_memory(arg, array)
    if reading.single or not arg.shape:
        if not array.flags.c_contiguous:
            raise ValueError(f"{arg.name!r} must be C-contiguous; got a strided {_describe(array)}, pass a copy of it")
        return array.reshape(arg.width, 1) if arg.shape else array.reshape(-1), None
    if not reading.first:
        if not array.flags.c_contiguous:
            raise ValueError(f"{arg.name!r} must be C-contiguous; got a strided {_describe(array)}, pass a copy of it")
        return array.reshape(arg.width, reading.n), None
    flat = array if array.ndim == 2 else None
    if flat is not None and flat.T.flags.c_contiguous:
        return flat.T, None
    if not array.flags.c_contiguous:
        raise ValueError(f"{arg.name!r} must be contiguous; got a strided {_describe(array)}, pass a copy of it")
    if warn and reading.n:
        warnings.warn(
            f"{arg.name!r} is sample-major, {tuple(array.shape)}, and is copied into the component-major layout "
            f"({arg.width}, {reading.n}) that kernels read; pass it that way, or the transposed view of such an array",
            LayoutWarning,
            stacklevel=callers_level(),
        )
    return None, array  # copied once every plane has passed its checks


def _agree(readings: Sequence[_Reading]) -> tuple[int, bool]:
    if not readings:
        return 1, True
    singles = [r.arg.name for r in readings if r.single]
    batches = [r for r in readings if not r.single]
    if singles and batches:
        raise ValueError(
            f"{', '.join(map(repr, singles))} {'is' if len(singles) == 1 else 'are'} one sample, but "
            f"{', '.join(repr(r.arg.name) for r in batches)} hold a batch of {batches[0].n}; "
            "give every per-sample plane as an array with one value per sample, or every one as a single sample"
        )
    counts = {r.n for r in readings}
    if len(counts) > 1:
        listed = ", ".join(f"{r.arg.name!r} has {r.n}" for r in readings)
        raise ValueError(f"the planes disagree on the number of samples: {listed}; give every plane the same number")
    return readings[0].n, bool(singles)


def _extent(array: Any) -> tuple[int, int]:
    if isinstance(array, np.ndarray):
        start = array.__array_interface__["data"][0]
    else:
        start = int(array.data.ptr)
    return start, start + int(array.nbytes)


def refuse_overlaps(planes: Mapping[str, Plane]) -> None:
    """Refuse two planes over the same memory when the kernel writes one of them.

    Raises:
        ValueError: Names both.
    """
    arrays = {name: plane.native if plane.source is None else plane.source for name, plane in planes.items()}
    spans = sorted((*_extent(a), planes[name].arg.written, name) for name, a in arrays.items() if a.nbytes)
    any_end, any_name = -1, ""
    written_end, written_name = -1, ""
    for start, end, written, name in spans:
        clash = any_name if written and start < any_end else written_name if start < written_end else ""
        if clash:
            raise ValueError(
                f"{clash!r} and {name!r} overlap in memory and the kernel writes one of them; pass separate arrays"
            )
        if end > any_end:
            any_end, any_name = end, name
        if written and end > written_end:
            written_end, written_name = end, name


def shared_array(arg: Arg, given: Any, xp: ModuleType, extent: int | None) -> Plane:
    """Bind a plane that is not per sample: a lookup table, a wide plane or an accumulator.

    Raises:
        ValueError: Wrong dtype, not contiguous, read-only where written, or not the declared extent.
    """
    value = unmarked(given)[0]
    array = _as_array(arg, value, xp)
    _check_dtype(arg, array)
    if not array.flags.c_contiguous:
        raise ValueError(f"{arg.name!r} must be C-contiguous; got a strided {_describe(array)}, pass a copy of it")
    _check_memory(arg, array)
    if extent is not None and array.size != extent:
        raise ValueError(f"{arg.name!r} is declared with {extent} elements; got a {_describe(array)}")
    return Plane(arg, value, array.reshape(-1))


def bind_planes(
    args: Sequence[Arg],
    values: Mapping[str, Any],
    *,
    xp: ModuleType = np,
    layout: Layout | None = None,
    extents: Mapping[str, int] | None = None,
    n: int | None = None,
    warn: bool = True,
) -> Planes:
    """Bind every plane and number of a kernel, or of the kernels of one step, from what the caller gave.

    Args:
        args: The arguments to bind; reserved lookups and ``nsamples`` are left to the runner.
        values: The caller's values by name. A write-only plane that is absent is allocated and zero-filled (filled
            with its declared default where it has one); an absent mask stays unbound.
        xp: NumPy or CuPy; arrays of other frameworks are taken over DLPack without a copy.
        layout: Which axis holds the samples where a shape reads both ways.
        extents: Declared element counts of shared tables and accumulators, where known.
        n: Samples, when the call says so; planes must hold as many.
        warn: Whether a copied sample-major plane warns.

    Raises:
        ValueError: A plane has the wrong shape, dtype, byte order or strides, is read-only, overlaps, or disagrees on
            the number of samples. Nothing was written.
        TypeError: A number is no real number.
        LayoutWarning: Where the caller made it an error; nothing was written.
    """
    extents = extents or {}
    bound = {arg.name: arg for arg in args if not arg.reserved and arg.role != "nsamples"}
    readings: dict[str, _Reading] = {}
    planes: dict[str, Plane] = {}
    numbers: dict[str, Any] = {}
    for name, arg in bound.items():
        if arg.role == "uniform":
            numbers[name] = bind_number(arg, values[name])
        elif name in values and arg.per_sample:
            readings[name] = _read(arg, values[name], xp, layout)
        elif name in values:
            planes[name] = shared_array(arg, values[name], xp, extents.get(name))
    samples, single = _agree(list(readings.values()))
    if n is not None:
        if readings and samples != n:
            raise ValueError(f"{next(iter(readings))!r} holds {samples} samples, and the call asks for {n}")
        samples, single = n, single and bool(readings)
    copies: list[Plane] = []
    for name, reading in readings.items():
        native, source = _native(reading, warn)
        given = reading.array if isinstance(reading.given, (int, float, np.generic)) else reading.given
        planes[name] = Plane(reading.arg, given, native, source)
        if source is not None:
            copies.append(planes[name])
    _check_wide(planes, samples)
    refuse_overlaps(planes)
    for plane in copies:
        plane.native = xp.ascontiguousarray(plane.source.reshape(samples, -1).T)
    allocated = tuple(_allocate(bound, planes, samples, single, xp, extents))
    return Planes(samples, single, xp, planes, numbers, allocated)


def _check_wide(planes: Mapping[str, Plane], n: int) -> None:
    """A wide output is indexed by sample, so fewer columns than samples would be written past its end."""
    for name, plane in planes.items():
        if plane.arg.role == "wide_out" and (plane.native.size < n or (n and plane.native.size % n)):
            raise ValueError(f"{name!r} needs shape (rows, {n}); got {plane.native.size} elements")


def _allocate(
    bound: Mapping[str, Arg],
    planes: dict[str, Plane],
    n: int,
    single: bool,
    xp: ModuleType,
    extents: Mapping[str, int],
) -> list[str]:
    made = []
    for name, arg in bound.items():
        if name in planes or arg.role in ("uniform", "terminated"):
            continue
        if arg.role == "accum_out":
            if name not in extents:
                raise ValueError(
                    f"{name!r} was not given and its extent is not declared; pass a {arg.dtype} array of zeros"
                )
            array = xp.zeros(extents[name], arg.dtype)
            planes[name] = Plane(arg, array if array.size > 1 else array.reshape(()), array)
        elif arg.role in ("mutable", "out"):
            shape = (arg.width, n) if arg.shape else (n,)
            array = xp.full(shape, arg.default or 0, arg.dtype)
            planes[name] = Plane(arg, array.reshape(arg.shape) if single else array, array)
        else:
            raise ValueError(f"{name!r} was not given; pass a plane of {arg.dtype}")
        made.append(name)
    return made
