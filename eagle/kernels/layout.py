"""Which axis of a plane holds the samples, where its shape does not say: the two words, and marks on single arrays."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Layout = Literal["samples_first", "samples_last"]
_LAYOUTS = ("samples_first", "samples_last")
_AXIS_MARK = "__raptor_samples_axis__"  # hawk's marks carry it too, so both kinds pass every door


class Marked:
    """An array whose sample axis the caller named; ``array`` is the caller's own object."""

    __slots__ = (_AXIS_MARK, "array")

    def __init__(self, array: Any, axis: Literal["first", "last"]) -> None:
        self.array = array
        setattr(self, _AXIS_MARK, axis)


def samples_first(x: Any) -> Any:
    """Mark ``x`` as sample-major: its first axis holds the samples, (N, w) or (N, R, C).

    Zero-copy, accepted by every eagle and hawk door that binds per-sample planes, and stronger than the door's
    ``layout=``. A shape that contradicts it is refused when the plane is bound.
    """
    return Marked(unmarked(x)[0], "first")


def samples_last(x: Any) -> Any:
    """Mark ``x`` as component-major (native): its last axis holds the samples, (w, N).

    Zero-copy, accepted by every eagle and hawk door that binds per-sample planes, and stronger than the door's
    ``layout=``. A shape that contradicts it is refused when the plane is bound.
    """
    return Marked(unmarked(x)[0], "last")


def unmarked(x: Any) -> tuple[Any, Layout | None]:
    """The array itself, and the layout its mark names."""
    axis = getattr(x, _AXIS_MARK, None) if not isinstance(x, np.ndarray) else None
    if axis is None:
        return x, None
    return x.array, "samples_first" if axis == "first" else "samples_last"


def marked(x: Any, layout: Layout | None) -> Any:
    """``x`` with the mark of ``layout``; ``x`` itself for None."""
    return x if layout is None else Marked(x, "first" if layout == "samples_first" else "last")


def check_layout_word(layout: object) -> Layout | None:
    """``layout`` when it is None or one of the two words.

    Raises:
        ValueError: It is anything else.
    """
    if layout is None or (isinstance(layout, str) and layout in _LAYOUTS):
        return layout  # type: ignore[return-value]
    raise ValueError(f"layout={layout!r}: expected 'samples_first', 'samples_last' or None")
