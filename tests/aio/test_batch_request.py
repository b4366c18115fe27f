"""How a request of device planes is recognised, with doubles of CuPy's arrays: wrong ones need no GPU to be seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eagle.aio.batch_request import Form

FLOAT = np.dtype(float)


class Array:
    """A double of a CuPy array."""

    def __init__(self, *shape: int, ptr: int = 7, dtype: Any = FLOAT, device: int = 0, contiguous: bool = True) -> None:
        self.shape, self.dtype = shape, dtype
        self.flags = SimpleNamespace(c_contiguous=contiguous)
        self.data = SimpleNamespace(device_id=device, ptr=ptr)


def arg(name: str, width: int) -> Any:
    return SimpleNamespace(name=name, dtype=FLOAT, shape=(width,) if width else (), width=width or 1)


@pytest.fixture
def form() -> Form:
    cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0))
    residency: Any = SimpleNamespace(device=0, xp=SimpleNamespace(cuda=cuda))
    return Form(Array, residency, [arg("v", 3), arg("x", 0), arg("y", 0)], (), ("y", "left out", "v", "x"))


def test_planes_that_look_the_same_are_a_request_with_their_addresses(form: Form) -> None:
    for n in (5, 1, 4):
        request = form.request({"v": Array(3, n, ptr=1), "x": Array(n, ptr=2), "y": Array(n, ptr=3)})
        assert request is not None
        assert (request.n, list(request.addresses), request.seed) == (n, [3, 0, 1, 2], None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": Array()},
        {"y": Array()},
        {"v": Array()},
        {"x": Array(4)},
        {"x": Array(5, 1)},
        {"v": Array(5, 3)},
        {"v": Array(3, 3), "x": Array(3), "y": Array(3)},
        {"v": Array(3, 0), "x": Array(0), "y": Array(0)},
        {"x": Array(5, device=1)},
        {"x": Array(5, contiguous=False)},
        {"x": Array(5, dtype=np.dtype("f4"))},
        {"x": np.ones(5)},
        {"z": Array(5)},
    ],
    ids=lambda wrong: " ".join(f"{name}{getattr(plane, 'shape', '')}" for name, plane in wrong.items()),
)
def test_any_others_are_checked_in_full(form: Form, wrong: dict[str, Any]) -> None:
    assert form.request({"v": Array(3, 5), "x": Array(5), "y": Array(5), **wrong}) is None
