"""Steps: which kernels may run together, and whose planes they share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import eagle
from eagle.kernels.step import MAX_MAPPED_SAMPLES, MAX_SAMPLES, bind_step, check_names, missing_names, step_of
from tests.helpers import models


def plans(*kernels: Any) -> list[Any]:
    return [eagle.deploy(kernel) for kernel in kernels]


@pytest.fixture(scope="module")
def walk() -> Any:
    return step_of(plans(models.move, models.square, models.arrived))


def test_one_kernel_keeps_its_own_pace() -> None:
    assert step_of(plans(models.climb)).steps == "auto"
    assert step_of(plans(models.climb_four)).steps == 4
    assert step_of(plans(models.climb_one)).steps == 1


def test_several_kernels_take_one_step_each(walk: Any) -> None:
    assert walk.steps == 1
    assert walk.name == "move + square + arrived"
    assert walk.guarded
    assert walk.local
    assert not walk.active_set
    assert walk.mask == "terminated"


def test_a_writer_declares_a_shared_plane(walk: Any) -> None:
    assert walk.args["x"].written
    assert step_of(plans(models.arrived, models.move)).args["x"].written


def test_kernels_without_a_mask_leave_the_step_unguarded() -> None:
    assert not step_of(plans(models.tally, models.climb_one)).guarded


@pytest.mark.parametrize(
    ("kernels", "named"),
    [
        ((), "at least one kernel"),
        ((models.affine,), "affine never finishes"),
        ((models.move, models.square), "move, square never finishes"),
        ((models.move, models.climb_four), "climb_four_x4 takes several steps"),
        ((models.climb_listed, models.climb_one), "active-set guard"),
    ],
)
def test_what_is_no_step(kernels: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        step_of(plans(*kernels))


def test_one_name_of_two_kinds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'a' is a number in affine and a float64 plane per sample in newton"):
        step_of(plans(models.affine, models.newton))


def test_a_whole_number_and_a_real_one_are_two_kinds() -> None:
    with pytest.raises(
        ValueError, match="'k' is a whole number in count_up and a float64 plane per sample in logistic"
    ):
        step_of(plans(models.count_up, models.logistic))


def test_names_are_checked_before_anything_is_bound(walk: Any) -> None:
    check_names(walk, {"x": 0, "r": 0, "goal": 0, "sq": 0}, mask=False)
    check_names(walk, {"terminated": 0}, mask=True)
    for name, mask, said in [
        ("finished_count", True, "owned by the running loop"),
        ("terminated", False, "never pass it"),
        ("zeta", True, "'zeta'; it takes"),
    ]:
        with pytest.raises(ValueError, match=said):
            check_names(walk, {name: 0}, mask=mask)


def test_what_is_missing_names_its_kernel(walk: Any) -> None:
    assert missing_names(walk, {"x": 0, "r": 0}, allocate=True) == ["'goal' (of arrived)"]
    assert missing_names(walk, {"x": 0, "r": 0}, allocate=False) == ["'sq' (of square)", "'goal' (of arrived)"]


@pytest.mark.parametrize(
    ("mask", "named"),
    [
        (np.zeros(3, np.uint8), "bool"),
        (np.zeros(3), "bool"),
        (np.zeros(4, bool), "disagree"),
        (np.zeros((3, 1), bool), "one value per sample"),
        (np.zeros(6, bool)[::2], "contiguous"),
        (np.broadcast_to(np.False_, (3,)), "read-only|contiguous"),
        ([False] * 3, "list"),
        (True, "terminated"),
        (0.0, "one sample"),
    ],
)
def test_a_mask_that_cannot_be_one(mask: Any, named: str) -> None:
    step = step_of(plans(models.climb))
    planes = {**models.climb_planes(3), "terminated": mask}
    with pytest.raises(ValueError, match=named):
        bind_step(step, planes, layout=None, allocate=False)
    assert np.array_equal(planes["x"], np.zeros(3))


def test_more_samples_than_the_counters_hold_are_refused_before_anything_is_made(monkeypatch: Any) -> None:
    """The counter of finished samples has 32 bits, the map of an active set 31 (BR-36, without the memory)."""
    assert (MAX_SAMPLES, MAX_MAPPED_SAMPLES) == (2**32 - 1, 2**31 - 1)
    from eagle.kernels import step as module

    monkeypatch.setattr(module, "MAX_SAMPLES", 10)
    monkeypatch.setattr(module, "MAX_MAPPED_SAMPLES", 5)
    for kernel, limit in ((models.climb, 10), (models.climb_listed, 5)):
        step = step_of(plans(kernel))
        assert bind_step(step, models.climb_planes(limit), layout=None, allocate=True)[0].n == limit
        with pytest.raises(ValueError, match=f"{limit + 1} samples: at most {limit}"):
            bind_step(step, models.climb_planes(limit + 1), layout=None, allocate=True)
