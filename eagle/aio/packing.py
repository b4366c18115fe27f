"""Packing on the host: the live samples of a thinned range, side by side in arrays of their own.

hawk's fused loop works in tiles of 256 lanes and a tile lasts as long as its longest sample. When samples of a range
end at very different steps, most lanes of its tiles soon stand idle. Once half the lanes are idle the live samples are
gathered into small arrays, run there, and put back where they came from when they finish. A sample's arithmetic does
not depend on its lane, so results keep their bits; kernels whose code calls vector math of the C library, where a lane
of a full vector and one of the remainder may round differently, are never packed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.kernels.planes import Plane, Planes

if TYPE_CHECKING:
    from eagle.aio.host_loop import HostLoop

PACK_BELOW = 0.5  # share of live lanes; a gather costs about what 40 steps of the same lanes cost
MIN_SAMPLES = 256  # what fits one tile costs one tile


class PackedRange:
    """The live samples of one range, gathered.

    Args:
        loop: The bound loop they belong to.
        index: Their sample numbers, ascending int64.
    """

    __slots__ = ("_arrays", "_index", "_loop", "_shown", "calls", "mask")

    def __init__(self, loop: HostLoop, index: np.ndarray[Any, Any]) -> None:
        self._loop = loop
        self._index = index
        self._arrays = {
            name: np.take(plane.native, index, axis=-1)
            for name, plane in loop.planes.planes.items()
            if plane.arg.per_sample
        }
        self.mask = np.zeros(index.size, np.bool_)
        self._shown = np.zeros(index.size, np.bool_)
        self._bind()

    @property
    def count(self) -> int:
        """Samples in here."""
        return int(self._index.size)

    def _bind(self) -> None:
        loop, count = self._loop, self.count
        planes = Planes(count, False, np, numbers=loop.planes.numbers)
        for name, plane in loop.planes.planes.items():
            planes.planes[name] = Plane(plane.arg, plane.given, self._arrays.get(name, plane.native))
        self.calls = loop.calls(planes, self.mask)

    def shrink(self) -> None:
        """Put the finished samples back and close the gaps they leave."""
        gone = np.flatnonzero(self.mask)
        self._scatter(gone)
        stay = np.flatnonzero(~self.mask)
        self._index = self._index[stay]
        self._arrays = {name: np.take(array, stay, axis=-1) for name, array in self._arrays.items()}
        self.mask = np.zeros(stay.size, np.bool_)
        self._shown = np.zeros(stay.size, np.bool_)
        self._bind()

    def put_finished(self) -> None:
        """Show the samples that have finished since the last time in their places, too; nothing moves in here."""
        new = np.flatnonzero(self.mask & ~self._shown)
        if new.size:
            self._scatter(new)
            self._shown[new] = True

    def put_back(self) -> None:
        """Put every sample back; the range is as if it had never been packed."""
        self._scatter(np.arange(self.count))

    def _scatter(self, slots: np.ndarray[Any, Any]) -> None:
        where = self._index[slots]
        for name, array in self._arrays.items():
            plane = self._loop.planes.planes[name]
            if plane.arg.written:
                plane.native[..., where] = np.take(array, slots, axis=-1)
        self._loop.mask[where] = self.mask[slots]


def packable(loop: HostLoop) -> bool:
    """Whether a loop's samples may change lanes: one automatic kernel, every plane per sample or shared."""
    if not loop.auto or len(loop.bound) != 1 or loop.step.placed is not False:
        return False
    if loop.bound[0].host.run is None or loop.bound[0].host.vector_math:
        return False
    return all(plane.arg.role not in ("wide_in", "wide_out", "accum_out") for plane in loop.planes.planes.values())
