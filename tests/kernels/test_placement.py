"""Kernels that read the place of their sample are told from those whose samples may move."""

from __future__ import annotations

from typing import Any

import pytest

import eagle
from eagle.kernels.placement import is_placed
from eagle.kernels.step import step_of
from tests.helpers import models
from tests.helpers.units import copy_of

PLACED = {"numbered", "numbered_listed", "counted", "drawing"}
KERNELS = {name: value for name, value in vars(models).items() if isinstance(value, models.Kernel)}


@pytest.mark.parametrize("name", KERNELS)
def test_sample_numbers_batch_sizes_and_draws_are_found_wherever_they_stand(name: str) -> None:
    assert is_placed(KERNELS[name]) == (name in PLACED)


def test_nobody_knows_a_kernel_without_its_source(tmp_path: Any) -> None:
    assert is_placed(None) is None
    assert eagle.deploy(copy_of(eagle.deploy(models.climb), tmp_path / "unit")).plugin.placed is None
    assert eagle.deploy(eagle.deploy(models.climb)).plugin.placed is False


def test_one_placed_kernel_makes_the_step_so() -> None:
    assert step_of([eagle.deploy(models.climb)]).placed is False
    assert step_of([eagle.deploy(k) for k in (models.move, models.drawing)]).placed is True
