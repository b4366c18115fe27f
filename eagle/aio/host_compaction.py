"""The host arm of an active set: compaction and reorder in NumPy, computed when called.

All passes over the samples go in pieces, so that they add little memory to a large batch and let other threads run
between.
"""

# ruff: noqa: D102 - what each method does is said once, in Compaction
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from eagle.aio.compaction import GROUP, MIN_REORDER_SPAN, Compaction, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

# Samples of one piece: its temporaries stay in the second-level cache.
_PIECE = 65_536


class HostCompaction(Compaction):
    """The arm over NumPy arrays; see `Compaction`."""

    def __init__(self, mask: np.ndarray, theta: float | None, *, defer_map: bool) -> None:
        self.mask = mask
        self._bytes = mask.view(np.uint8)  # compared as bytes: NumPy would widen a bool to compare it with 0
        self.n = mask.size
        self.theta = theta
        self.map = np.empty(0, np.int32) if defer_map else np.arange(self.n, dtype=np.int32)
        self.perm = None if theta is None else np.arange(self.n, dtype=np.int32)
        self.inv = None if theta is None else np.arange(self.n, dtype=np.int32)
        self.words = np.zeros(len(Word), np.uint32)
        self._start_words()

    def is_array(self, x: object) -> bool:
        return isinstance(x, np.ndarray)

    def device(self, x: np.ndarray) -> None:
        return None

    def address(self, x: np.ndarray) -> int:
        address: int = x.__array_interface__["data"][0]
        return address

    def counter(self) -> np.ndarray:
        return np.zeros(1, np.uint32)

    def make_map(self) -> None:
        self.map = np.arange(self.n, dtype=np.int32)

    def prepare(self, planes: Sequence[np.ndarray]) -> None:
        """Nothing: the temporaries of a pass live as long as the pass."""

    def capturing(self) -> bool:
        return False

    def compact(self, finished: np.ndarray | None = None, baseline: np.ndarray | None = None) -> None:
        # Read before the mask: what finishes during the pass moves the counter again and is caught by the next one.
        seen = None if finished is None else finished[0]
        count = groups = 0
        last = -1  # the group that the newest live slot lies in
        for first in range(0, self.n, _PIECE):
            live = np.flatnonzero(self._bytes[first : first + _PIECE] == 0)
            if not live.size:
                continue
            slots = self.map[count : count + live.size]
            np.add(live, first, out=slots, casting="unsafe")
            count += live.size
            if self.theta is not None:
                group = slots // GROUP
                groups += int(group[0] != last) + int(np.count_nonzero(group[1:] != group[:-1]))
                last = group[-1]
        self.words[Word.COUNT] = count
        self.words[Word.LIVE32] = groups
        self.words[Word.FIRE] = self._scattered(count, groups)
        if baseline is not None:
            baseline[0] = seen

    def reorder(self, planes: Sequence[np.ndarray]) -> None:
        if not self.words[Word.FIRE]:
            return
        count = int(self.words[Word.COUNT])
        live = self.map[:count]
        extent = int(self.words[Word.SPAN])
        if count and live[-1] >= extent:
            extent = self.n  # a sample behind the span was revived through the mask
        idle = np.ones(extent, bool)
        idle[live] = False
        source = np.concatenate([live, np.flatnonzero(idle).astype(np.int32)])
        del idle
        _take_rows((self.mask, *planes, self.perm), source)
        self.inv[self.perm[:extent]] = np.arange(extent, dtype=np.int32)
        self.map[:extent] = np.arange(extent, dtype=np.int32)
        self.words[Word.SPAN] = count
        self.words[Word.FIRE] = 0
        self.words[Word.REORDERS] += 1
        self.words[Word.MOVED] = 1

    def restore(self, planes: Sequence[np.ndarray]) -> None:
        if self.words[Word.MOVED]:
            _take_rows((self.mask, *planes), self.inv)
            self._start_order()
        self.words[Word.SPAN] = self.n
        self.words[Word.FIRE] = self.words[Word.MOVED] = 0

    def reset(self, baselines: Sequence[np.ndarray]) -> None:
        if self.map.size:
            self.map[:] = np.arange(self.n, dtype=np.int32)
        if self.perm is not None:
            self._start_order()
        self._start_words()
        for baseline in baselines:
            baseline[0] = 0

    def in_sample_order(self, plane: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        if out is None:
            out = np.empty_like(plane)
        # An index is always in range; "clip" spares NumPy the buffer that its checking mode needs beside `out`.
        return np.take(plane, self.inv, axis=-1, out=out, mode="clip")

    def read(self, word: Word) -> int:
        return int(self.words[word])

    def _scattered(self, count: int, groups: int) -> bool:
        if self.theta is None or self.words[Word.SPAN] < MIN_REORDER_SPAN:
            return False
        return count < self.theta * float(GROUP) * groups

    def _start_order(self) -> None:
        self.perm[:] = np.arange(self.n, dtype=np.int32)
        self.inv[:] = self.perm

    def _start_words(self) -> None:
        self.words[:] = 0
        self.words[Word.COUNT] = self.words[Word.SPAN] = self.words[Word.SIZE] = self.n


def _take_rows(planes: Sequence[np.ndarray], source: np.ndarray) -> None:
    """``row[:k] = row[source]`` for every row of the planes, k = source.size."""
    size = source.size
    if not size:
        return
    scratch = np.empty(size * max(plane.itemsize for plane in planes), np.uint8)  # one for all: fresh pages cost most
    for plane in planes:
        taken = scratch[: size * plane.itemsize].view(plane.dtype)
        for row in plane.reshape(-1, plane.shape[-1]):
            np.take(row, source, out=taken, mode="clip")
            row[:size] = taken
