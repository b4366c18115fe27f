"""Long samples first: the planes of a device run in an order of our own, results in the caller's.

A persist launch is over when its last sample is, so samples that take long should start first. The kernel runs on
permuted copies of the planes: gathered before a run, scattered after it. Both cost a read and a write of every plane
(about 0.16 ms for six float64 planes of a million samples on an H200), so ordering pays only where steps are heavy; it
is never switched on by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle.kernels.interop import detect
from eagle.kernels.layout import unmarked
from eagle.kernels.planes import Plane, Planes

LEARN = "learn"


def check_order(order: Any, n: int) -> Any:
    """An ``order`` option for ``n`` samples: None, "learn", or its cost estimates as they were given.

    Raises:
        ValueError: Another word, or not one real number per sample.
        TypeError: No array.
    """
    if order is None or (isinstance(order, str) and order == LEARN):
        return order
    if isinstance(order, str):
        raise ValueError(f"order={order!r}: expected an array of one cost per sample, {LEARN!r} or None")
    array = unmarked(order)[0]
    if detect(array) is None:
        raise TypeError(f"order is a {type(order).__name__}: expected one cost per sample, {LEARN!r} or None")
    if tuple(array.shape) != (n,) or _kind_of(array.dtype) not in "iufb":
        raise ValueError(f"order must hold one real cost per sample, ({n},); got {array.dtype} {tuple(array.shape)}")
    return array


def _kind_of(dtype: Any) -> str:
    """NumPy's kind of a dtype of any framework; "?" for one that NumPy lacks."""
    try:
        return np.dtype(str(dtype).removeprefix("torch.")).kind
    except TypeError:
        return "?"


class OrderedPlanes(Planes):
    """Planes whose native arrays are permuted copies of the bound ones.

    Args:
        inner: The bound planes.
        mask: The caller's mask.
        cost: One cost per sample on the planes' device, or None while it is to be learnt.

    Attributes:
        mask: The permuted mask that kernels see.
        cost: The costs the order comes from, or None.
    """

    def __init__(self, inner: Planes, mask: Any, cost: Any) -> None:
        planes = {
            name: Plane(
                plane.arg, plane.given, inner.xp.empty_like(plane.native) if plane.arg.per_sample else plane.native
            )
            for name, plane in inner.planes.items()
        }
        super().__init__(inner.n, inner.single, inner.xp, planes, inner.numbers, inner.allocated)
        self._inner = inner
        self._shown_mask = mask
        self.mask = inner.xp.empty_like(mask)
        self.cost: Any = None
        self._order = inner.xp.arange(inner.n)
        if cost is not None:
            self.set_cost(cost)

    def set_cost(self, cost: Any) -> None:
        """Order by falling cost; equal ones stay in sample order."""
        self.cost = cost
        self._order = self.xp.argsort(-self.xp.asarray(cost, np.float64), kind="stable")

    def _moved(self) -> list[str]:
        return [name for name, plane in self.planes.items() if plane.arg.per_sample and plane.native is not self.mask]

    def take_in(self) -> None:
        """Gather every per-sample plane and the mask."""
        self._inner.take_in()
        for name in self._moved():
            self.xp.take(self._inner.planes[name].native, self._order, axis=-1, out=self.planes[name].native)
        self.xp.take(self._shown_mask, self._order, out=self.mask)

    def write_back(self) -> None:
        """Scatter what the kernel wrote, and the mask, back into sample order."""
        for name in self._moved():
            if self.planes[name].arg.written:
                self._inner.planes[name].native[..., self._order] = self.planes[name].native
        self._shown_mask[self._order] = self.mask
        self._inner.write_back()

    def in_sample_order(self, array: Any) -> Any:
        """A per-sample array of the run, as a copy in the caller's order."""
        back = self.xp.empty_like(array)
        back[self._order] = array
        return back
