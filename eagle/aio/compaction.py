"""The contract of the two arms of an active set (NumPy on the host, CuPy on a device), and the words they keep.

An arm owns the arrays of one set and does the work on them; `eagle.aio.active_set.ActiveSet` above it checks arguments
and keeps the rules. Both arms hold their words in one small array, so that a runner reads all of them in one copy:

    count, span     live samples; slots in front that hold them all (n until a reorder packs them)
    fire            the last compaction asks for a reorder
    live32          groups of 32 neighbouring slots with a live sample in them
    reorders        reorders since the last reset
    moved           planes are permuted: a reorder ran since the last restore or reset
    extent          slots that the reorder in progress moves
    size            n, a constant that kernels take as a guard and as a length
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

# Below this many slots a scattered batch costs nothing: its planes fit the caches.
MIN_REORDER_SPAN = 4096
# One warp and, for float64, two cache lines: the grain at which scattered live samples waste work.
GROUP = 32
# A reorder pays when the live samples fill less than theta of the groups that they touch.
THETA_RANGE = (0.25, 0.75)
DEFAULT_THETA = 0.5
# A compaction costs about as much as a few steps of a small kernel, so it may not come more often than this.
MIN_EVERY = 4
# Sample indices are int32.
MAX_SAMPLES = 2**31 - 1


class Word(IntEnum):
    """Where each word lies in `Compaction.words`; active_set.cu numbers them alike."""

    COUNT = 0
    SPAN = 1
    FIRE = 2
    LIVE32 = 3
    REORDERS = 4
    MOVED = 5
    EXTENT = 6
    SIZE = 7


class Compaction(ABC):
    """One arm: the arrays of one active set and the work on them.

    Attributes:
        mask: The set's mask, shape (n,), bool or uint8, by reference; nonzero = finished.
        n: Samples.
        theta: The locality threshold of a reordering set, None for any other.
        map: int32, shape (n,): the live slots in ascending order; shape (0,) while deferred.
        perm: int32, shape (n,): the sample in each slot; None for a set that does not reorder.
        inv: int32, shape (n,): the slot of each sample; None likewise.
        words: uint32, shape (8,): see `Word`.
    """

    mask: Any
    n: int
    theta: float | None
    map: Any
    perm: Any
    inv: Any
    words: Any

    @abstractmethod
    def is_array(self, x: object) -> bool:
        """Whether `x` is an array of this arm's module (NumPy or CuPy)."""

    @abstractmethod
    def device(self, x: Any) -> int | None:
        """The CUDA device of one of this arm's arrays; None on the host."""

    @abstractmethod
    def address(self, x: Any) -> int:
        """The address of an array's first byte."""

    @abstractmethod
    def counter(self) -> Any:
        """A new uint32 word, shape (1,), zero."""

    @abstractmethod
    def make_map(self) -> None:
        """Allocate the deferred map, the identity."""

    @abstractmethod
    def prepare(self, planes: Sequence[Any]) -> None:
        """Allocate and load all that `compact`, `reorder` and `restore` over `planes` need, once."""

    @abstractmethod
    def capturing(self) -> bool:
        """Whether work issued now would be recorded into a graph."""

    @abstractmethod
    def compact(self, finished: Any = None, baseline: Any = None) -> None:
        """Recompute map, count, live32 and fire from the mask; then ``baseline[0] = finished[0]`` where given."""

    @abstractmethod
    def reorder(self, planes: Sequence[Any]) -> None:
        """Where fire is set: bring the live samples of the mask and of `planes` to the front, in sample order."""

    @abstractmethod
    def restore(self, planes: Sequence[Any]) -> None:
        """Where planes are permuted: put the mask and `planes` back in sample order. The map is left stale."""

    @abstractmethod
    def reset(self, baselines: Sequence[Any]) -> None:
        """Identity everywhere, zero counters; planes and mask stay as they are."""

    @abstractmethod
    def in_sample_order(self, plane: Any, out: Any) -> Any:
        """Write ``plane[..., inv]`` into `out` (None: a new array) and return it."""

    @abstractmethod
    def read(self, word: Word) -> int:
        """One word as a Python int (a device waits for the current stream)."""
