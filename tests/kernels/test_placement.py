"""Kernels that read the place of their sample are told from those whose samples may move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import eagle
import eagle.sync
from eagle.kernels.placement import is_placed
from eagle.kernels.step import step_of
from tests.helpers import models
from tests.helpers.units import copy_of

PLACED = {"numbered", "numbered_listed", "counted", "drawing", "gridded", "differences"}
KERNELS = {name: value for name, value in vars(models).items() if isinstance(value, models.Kernel)}


@pytest.mark.parametrize("name", KERNELS)
def test_sample_numbers_batch_sizes_and_draws_are_found_wherever_they_stand(name: str) -> None:
    assert is_placed(KERNELS[name]) == (name in PLACED)


def test_nobody_knows_a_kernel_without_its_source(tmp_path: Any) -> None:
    assert is_placed(None) is None
    assert eagle.deploy(copy_of(eagle.deploy(models.climb), tmp_path / "unit")).plugin.placed is None
    assert eagle.deploy(eagle.deploy(models.climb)).plugin.placed is False


def test_lanes_of_a_group_or_a_grid_stay_where_they_are() -> None:
    assert step_of([eagle.deploy(models.climb_grouped)]).placed is True
    planes = models.climb_planes(6000)
    planes["goal"] = np.random.default_rng(4).integers(1, 300, 6000).astype(float)
    assert eagle.sync.simulate(models.climb_grouped, **planes, max_steps=1000).done
    assert np.array_equal(planes["c"], planes["goal"])


def test_an_active_set_of_groups_is_refused_by_name() -> None:
    """Its map lists groups; a map of single samples would be read as one of groups, and samples run never or twice."""
    with pytest.raises(ValueError, match=r"climb_grouped_listed \(group=32\) drops finished samples in whole groups"):
        eagle.sync.simulate(models.climb_grouped_listed, **models.climb_planes(64), max_steps=5)


def test_one_placed_kernel_makes_the_step_so() -> None:
    assert step_of([eagle.deploy(models.climb)]).placed is False
    assert step_of([eagle.deploy(k) for k in (models.move, models.drawing)]).placed is True
