"""Which memory the living reordering sets own: no byte may be moved by two of them.

Claims are kept as address ranges, not as object ids: views count, and a range stays taken exactly as long as its owner
lives, since the owner holds the arrays.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Claim(NamedTuple):
    """One array's bytes: addresses from `start` to before `stop` (host and device share one address space)."""

    start: int
    stop: int
    what: str

    def overlaps(self, other: Claim) -> bool:
        """Whether a byte lies in both."""
        return self.start < other.stop and other.start < self.stop


_claims: weakref.WeakKeyDictionary[object, list[Claim]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def claim(owner: object, wanted: Sequence[Claim]) -> None:
    """Give `owner` the arrays of `wanted`, all or none.

    Args:
        owner: The set; it must hold the arrays for as long as it lives.
        wanted: What it asks for.

    Raises:
        ValueError: One overlaps another of `wanted`, or what `owner` or another living set owns.
    """
    wanted = [one for one in wanted if one.start < one.stop]  # an empty array lies nowhere
    conflict = _try_claim(owner, wanted)
    if conflict is not None and gc.isenabled():  # its owner may be garbage in a reference cycle
        gc.collect()
        conflict = _try_claim(owner, wanted)
    if conflict is not None:
        raise ValueError(conflict)


def _try_claim(owner: object, wanted: Sequence[Claim]) -> str | None:
    with _lock:
        for index, one in enumerate(wanted):
            for other in wanted[:index]:
                if one.overlaps(other):
                    return f"{one.what} and {other.what} share memory; give the set each plane once"
            for holder, held in _claims.items():
                for other in held:
                    if one.overlaps(other):
                        whose = "this set" if holder is owner else "another living reordering set"
                        return (
                            f"{one.what} shares memory with {other.what}, which {whose} owns; each byte can be moved "
                            "by one set only: pass another array, or drop the other set first"
                        )
        _claims.setdefault(owner, []).extend(wanted)
        return None


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # another thread may have held it at the fork
