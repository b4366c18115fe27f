"""Whether a kernel's result depends on where a sample stands in its batch.

A kernel may read its sample's number or the size of the batch, and its random draws are numbered by the sample. Such a
sample must not change places: packing, reordering and merged batches would change its result without a word.
"""

from __future__ import annotations

from typing import Any

_PLACED = ("sample_index", "nsamples")
_PLACED_FAMILIES = ("random", "raw")  # draws, and blocks of foreign code that nobody can look into


def is_placed(kernel: Any) -> bool | None:
    """Whether a hawk kernel reads the place of its sample; None when its source is not at hand and nobody can know.

    Args:
        kernel: The hawk kernel, or None.
    """
    if kernel is None:
        return None
    todo: list[Any] = [kernel.sinks, kernel.walk.order]
    seen: set[int] = set()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, (list, tuple, set, frozenset)):
            todo.extend(node)
        elif isinstance(node, dict):
            todo.extend(node.values())
        elif type(node).__module__.startswith("hawk.ir"):
            kind = str(getattr(node, "kind", ""))
            if kind in _PLACED or kind.startswith(_PLACED_FAMILIES):
                return True
            todo.extend(_parts(node))
    return False


def _parts(node: Any) -> list[Any]:
    """What an IR node holds: bodies of loops and branches of selections hang there, too."""
    names = set(getattr(node, "__dict__", ()))
    for base in type(node).__mro__:
        slots = base.__dict__.get("__slots__", ())
        names |= {slots} if isinstance(slots, str) else set(slots)
    return [getattr(node, name) for name in names if not name.startswith("__") and hasattr(node, name)]
