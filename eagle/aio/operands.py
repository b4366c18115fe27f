"""The device arrays that a step refers to, as far as Python can tell: a captured graph holds bare addresses.

What cannot be known: arrays that a step reaches through objects of its own, through C code, or looks up by name at run
time. Those the caller keeps alive.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("operands_of",)

_DEPTH = 4  # a lambda in a lambda in a partial is common, deeper nesting is not


def operands_of(step: object) -> list[Any]:
    """Everything that the functions behind a step are bound to now, kept alive by the returned list.

    Captured variables, defaults, arguments of a partial, the object of a bound method, and the globals that a function
    names. A step that rebinds such a name while it is captured (``a = a * 2``) drops the array that the graph reads;
    the list still holds it.

    Args:
        step: A callable.
    """
    kept: list[Any] = []
    seen: set[int] = set()
    _collect(step, kept, seen, _DEPTH)
    return kept


def _collect(value: object, kept: list[Any], seen: set[int], depth: int) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    kept.append(value)
    if depth:
        for inner in _bound_to(value):
            _collect(inner, kept, seen, depth - 1)


def _bound_to(value: object) -> Iterator[object]:
    if isinstance(value, functools.partial):
        yield value.func
        yield from value.args
        yield from value.keywords.values()
    elif isinstance(value, types.MethodType):
        yield value.__func__
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        names = inspect.getclosurevars(value) if _cells_filled(value) else None
        if names is not None:
            yield from names.nonlocals.values()
            yield from (v for v in names.globals.values() if not isinstance(v, types.ModuleType))
    elif isinstance(value, (list, tuple)) and len(value) <= 64:
        yield from value
    elif isinstance(value, dict) and len(value) <= 64:
        yield from value.values()


def _cells_filled(function: types.FunctionType) -> bool:
    """Whether every captured variable has a value; `getclosurevars` cannot read an empty cell."""
    try:
        for cell in function.__closure__ or ():
            cell.cell_contents  # noqa: B018 - reading is the test
    except ValueError:
        return False
    return True
