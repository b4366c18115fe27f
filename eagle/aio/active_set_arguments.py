"""What an active set accepts: the checks of its arguments, each before anything changes."""

from __future__ import annotations

import inspect
import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.aio.compaction import DEFAULT_THETA, MAX_SAMPLES, MIN_EVERY, THETA_RANGE
from eagle.kernels.device import is_cupy
from eagle.kernels.planes import refuse_masked

if TYPE_CHECKING:
    from eagle.aio.compaction import Compaction


def theta_of(reorder: object) -> float | None:
    """The locality threshold that ``reorder=`` asks for, None for no reorder.

    Raises:
        TypeError: It is no number.
        ValueError: It is outside `THETA_RANGE`.
    """
    if reorder is None or isinstance(reorder, (bool, np.bool_)):
        return DEFAULT_THETA if reorder else None
    if not isinstance(reorder, Real):
        raise TypeError(f"reorder is {reorder!r}, expected True, False, None or a number")
    theta = float(reorder)
    low, high = THETA_RANGE
    if math.isnan(theta) or not low <= theta <= high:
        raise ValueError(
            f"reorder is {reorder!r}, expected a threshold from {low} to {high}, or True for {DEFAULT_THETA}"
        )
    return theta


def check_mask(mask: Any, *, moved: bool) -> None:
    """Refuse what is no (n,) bool or uint8 array; `moved` masks must be writable too."""
    if not isinstance(mask, np.ndarray) and not is_cupy(mask):
        raise TypeError(
            f"the mask is a {type(mask).__name__}, expected a NumPy or CuPy array of bool or uint8; an array of "
            "another framework comes in through numpy.asarray or eagle.to_cupy"
        )
    refuse_masked(mask, "the mask")
    if mask.dtype not in (np.bool_, np.uint8):
        raise ValueError(f"the mask has dtype {mask.dtype}, expected bool or uint8")
    if mask.ndim != 1 or not mask.flags.c_contiguous:
        raise ValueError(f"the mask has shape {mask.shape} and strides {mask.strides}, expected a contiguous (n,)")
    if mask.size > MAX_SAMPLES:
        raise ValueError(
            f"the mask holds {mask.size} samples, expected at most {MAX_SAMPLES} (2**31 - 1): maps are int32; split "
            "the batch"
        )
    if moved and isinstance(mask, np.ndarray) and not mask.flags.writeable:
        raise ValueError("the mask is read-only, and a reordering set moves it; pass a writable array")


def check_array(arm: Compaction, x: object, what: str) -> None:
    """Refuse what is no array of the module and device of the arm's mask."""
    if not arm.is_array(x):
        module = "NumPy" if arm.device(arm.mask) is None else "CuPy"
        raise TypeError(f"{what} is a {type(x).__name__}, expected a {module} array, as the mask is one")
    refuse_masked(x, what)
    if arm.device(x) != arm.device(arm.mask):
        raise ValueError(
            f"{what} lies on device {arm.device(x)} and the mask on device {arm.device(arm.mask)}; put them on one"
        )


def check_plane(arm: Compaction, plane: Any, what: str) -> None:
    """Refuse what does not hold one value, or a column of values, per sample."""
    check_array(arm, plane, what)
    if plane.ndim not in (1, 2) or plane.shape[-1] != arm.n:
        raise ValueError(f"{what} has shape {plane.shape}, expected ({arm.n},) or (D, {arm.n}): samples come last")


def check_movable(arm: Compaction, plane: Any, what: str) -> None:
    """Refuse a plane that cannot be permuted where it lies."""
    if not plane.flags.c_contiguous:
        raise ValueError(f"{what} is not C-contiguous; pass a contiguous array, since it is moved where it lies")
    if plane.itemsize not in (1, 2, 4, 8, 16) or plane.dtype.hasobject:
        raise ValueError(f"{what} has dtype {plane.dtype}, expected one of 1, 2, 4, 8 or 16 bytes an item")
    if isinstance(plane, np.ndarray):
        if not plane.flags.writeable:
            raise ValueError(f"{what} is read-only, and a reorder writes it; pass a writable array")
    elif arm.address(plane) % min(plane.itemsize, 8):
        raise ValueError(f"{what} is not aligned to its items of {plane.itemsize} bytes; pass an aligned array")


def check_counter(arm: Compaction, finished: Any) -> None:
    """Refuse what is no uint32 word beside the mask."""
    check_array(arm, finished, "the counter of when_finished()")
    if finished.dtype != np.uint32 or finished.ndim != 1 or finished.size < 1:
        raise ValueError(
            f"the counter of when_finished() is {finished.dtype} of shape {finished.shape}, expected uint32 (1,)"
        )


def check_out(arm: Compaction, out: Any, plane: Any) -> None:
    """Refuse an output that does not fit `plane` or shares its memory."""
    check_array(arm, out, "out= of in_sample_order()")
    if out.shape != plane.shape or out.dtype != plane.dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"out= of in_sample_order() is {out.dtype} {out.shape}, expected C-contiguous {plane.dtype} {plane.shape}"
        )
    if abs(arm.address(out) - arm.address(plane)) < plane.nbytes:
        raise ValueError("out= of in_sample_order() shares memory with the plane; pass another array")


def check_cadence(every: object, steps_per_call: object) -> None:
    """Refuse a compaction cadence that is no int, or below `MIN_EVERY` steps."""
    calls, steps = _int("every", every), _int("steps_per_call", steps_per_call)
    if steps < 1:
        raise ValueError(f"steps_per_call is {steps}, expected 1 or more")
    if calls * steps < MIN_EVERY:
        raise ValueError(
            f"every={calls} calls of {steps} step(s) compact every {calls * steps} steps; a compaction costs more than "
            f"it saves below {MIN_EVERY}, so raise every"
        )


def check_step(step: object) -> None:
    """Refuse a step that is no callable, or whose call would only make a coroutine."""
    if not callable(step) or inspect.iscoroutinefunction(step):
        raise TypeError(f"step is {step!r}, expected a plain callable without arguments")


def check_override(reorder: object, theta: float | None) -> None:
    """Refuse a ``reorder=`` of `compaction_body` that is no bool or None, or that the set cannot do."""
    if not (reorder is None or isinstance(reorder, bool)):
        raise TypeError(f"reorder is {reorder!r}, expected True, False or None; the threshold belongs to the ActiveSet")
    if reorder and theta is None:
        raise ValueError("reorder=True needs a set that reorders; make it with ActiveSet(mask, reorder=True)")


def _int(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected an int")
    return value
