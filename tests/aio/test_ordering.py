"""The order of samples: which options are taken, and how planes are gathered into it and scattered back, over NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import hawk
import numpy as np
import pytest
from hawk import Mutable, Scalar, Terminated

import eagle
import eagle.sync
from eagle.aio.ordering import OrderedPlanes, check_order
from tests.helpers import batch_models, models

# ---- the option ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [None, "learn"])
def test_words_that_are_taken(order: Any) -> None:
    assert check_order(order, 5) is order


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_])
def test_any_real_numbers_are_costs(dtype: Any) -> None:
    cost = np.ones(5, dtype)
    assert check_order(cost, 5) is cost


def test_a_marked_array_is_the_array_itself() -> None:
    cost = np.ones(5)
    assert check_order(eagle.samples_last(cost), 5) is cost


@pytest.mark.parametrize("order", ["", "Learn", "learnt", "longest"])
def test_another_word_is_refused_with_what_is_taken(order: str) -> None:
    with pytest.raises(ValueError, match=f"order={order!r}.*'learn'"):
        check_order(order, 5)


@pytest.mark.parametrize("order", [True, 3, 2.5, [1.0] * 5, (1, 2, 3, 4, 5), {"a": 1}, object()])
def test_no_array_is_refused_by_its_type(order: object) -> None:
    with pytest.raises(TypeError, match=type(order).__name__):
        check_order(order, 5)


@pytest.mark.parametrize(
    "cost", [np.ones(4), np.ones(6), np.ones((5, 1)), np.array(1.0), np.ones(5, complex), np.array(list("abcde"))]
)
def test_the_wrong_shape_or_dtype_is_refused_with_both(cost: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"\(5,\)") as caught:
        check_order(cost, 5)
    assert str(cost.dtype) in str(caught.value)
    assert str(cost.shape) in str(caught.value)


@pytest.mark.parametrize("order", ["longest", np.ones(3), 7])
def test_a_bad_order_is_refused_before_anything_is_written(order: Any) -> None:
    planes = models.climb_planes(5)
    with pytest.raises((TypeError, ValueError), match="order"):
        eagle.sync.simulate(models.climb, max_steps=100, order=order, **planes)
    np.testing.assert_array_equal(planes["x"], 0.0)


@hawk.kernel
def ordinal(x: Mutable[Scalar], order: Scalar, terminated: Terminated):
    up = x + 1.0
    x = up
    terminated = up >= order


def test_a_kernel_parameter_of_that_name_wins() -> None:
    order = np.arange(1.0, 5.0)
    result = eagle.sync.simulate(ordinal, x=np.zeros(4), order=order, max_steps=10)
    np.testing.assert_array_equal(result.x, order)


# ---- the planes ------------------------------------------------------------------------------------------------------


def bound(model: Any, **planes: Any) -> Any:
    """Planes and mask of a model bound on the host."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eagle.LayoutWarning)
        return eagle.sync.simulation(model, max_steps=100, **planes).runner.bound


def glide_planes(n: int, *, sample_major: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(n)
    p = rng.random((n, 3)) if sample_major else rng.random((3, n))
    return {"p": p, "u": rng.random((3, n)), "t": rng.random(n), "end": rng.random(n), "dt": 0.5}


@pytest.mark.parametrize("cost", [[3, 1, 2, 5, 4, 0, 0], [0.5] * 7, [-1, -2, -3, -4, -5, -6, -7]])
def test_long_samples_come_first_and_equal_ones_stay_in_order(cost: list[float]) -> None:
    loop = bound(models.climb, **models.climb_planes(7))
    ordered = OrderedPlanes(loop.planes, loop.mask, np.array(cost))
    ordered.take_in()
    want = sorted(range(7), key=lambda i: -cost[i])
    np.testing.assert_array_equal(ordered.planes["goal"].native, loop.planes.planes["goal"].native[want])
    np.testing.assert_array_equal(ordered.in_sample_order(ordered.planes["goal"].native), np.arange(1.0, 8.0))


def test_without_a_cost_the_order_is_the_callers() -> None:
    loop = bound(models.climb, **models.climb_planes(7))
    ordered = OrderedPlanes(loop.planes, loop.mask, None)
    ordered.take_in()
    assert ordered.cost is None
    np.testing.assert_array_equal(ordered.planes["goal"].native, np.arange(1.0, 8.0))


def test_components_of_a_vector_move_together() -> None:
    given = glide_planes(6)
    loop = bound(models.glide, **given)
    before = {name: given[name].copy() for name in ("p", "u", "t", "end")}
    cost = np.array([2, 9, 4, 7, 1, 3])
    ordered = OrderedPlanes(loop.planes, loop.mask, cost)
    ordered.take_in()
    order = np.argsort(-cost)
    for name in before:
        np.testing.assert_array_equal(ordered.planes[name].native, before[name][..., order])
    ordered.planes["p"].native += 1.0
    ordered.planes["t"].native *= 2.0
    ordered.planes["u"].native[...] = np.nan  # read-only for the kernel: never scattered back
    ordered.mask[...] = [True, False, False, True, False, False]  # samples 1 and 2
    ordered.write_back()
    np.testing.assert_array_equal(given["p"], before["p"] + 1.0)
    np.testing.assert_array_equal(given["t"], before["t"] * 2.0)
    np.testing.assert_array_equal(given["u"], before["u"])
    np.testing.assert_array_equal(loop.mask, np.isin(np.arange(6), order[[0, 3]]))


def test_a_new_cost_counts_from_the_next_gathering() -> None:
    given = models.climb_planes(4)
    loop = bound(models.climb, **given)
    ordered = OrderedPlanes(loop.planes, loop.mask, None)
    for cost in ([1, 2, 3, 4], [4, 1, 3, 2]):
        ordered.set_cost(np.array(cost))
        ordered.take_in()
        np.testing.assert_array_equal(ordered.planes["goal"].native, given["goal"][np.argsort(-np.array(cost))])
        ordered.planes["x"].native[...] = ordered.planes["goal"].native * 10
        ordered.write_back()
        np.testing.assert_array_equal(given["x"], given["goal"] * 10)


def test_a_sample_major_plane_goes_both_ways() -> None:
    given = glide_planes(5, sample_major=True)
    loop = bound(models.glide, **given)
    before, cost = given["p"].copy(), np.array([1, 5, 2, 4, 3])
    ordered = OrderedPlanes(loop.planes, loop.mask, cost)
    given["p"] += 0.5  # after binding: taken in at the start of the run
    ordered.take_in()
    np.testing.assert_array_equal(ordered.planes["p"].native, (before + 0.5).T[:, np.argsort(-cost)])
    ordered.planes["p"].native *= 2.0
    ordered.write_back()
    np.testing.assert_array_equal(given["p"], (before + 0.5) * 2.0)


def test_a_shared_table_is_the_callers_own() -> None:
    given = {"x": np.zeros(3), "goal": np.arange(1.0, 4.0), "theta": np.array([0.5, 2.0])}
    loop = bound(batch_models.stair, **given)
    ordered = OrderedPlanes(loop.planes, loop.mask, np.array([1, 2, 3]))
    assert ordered.planes["theta"].native is loop.planes.planes["theta"].native
    ordered.take_in()
    np.testing.assert_array_equal(ordered.planes["theta"].native, [0.5, 2.0])


def test_the_mask_is_gathered_too() -> None:
    planes = models.climb_planes(5)
    mask = np.array([True, False, False, True, False])
    runner = eagle.sync.until_done(eagle.sync.deploy(models.climb), max_steps=100, terminated=mask, **planes)
    loop = runner.bound
    ordered = OrderedPlanes(loop.planes, loop.mask, np.array([5, 1, 2, 3, 4]))
    ordered.take_in()
    np.testing.assert_array_equal(ordered.mask, [True, False, True, False, False])
    ordered.mask[...] = True
    ordered.write_back()
    np.testing.assert_array_equal(mask, True)


def test_numbers_and_names_are_the_bound_ones() -> None:
    loop = bound(models.glide, **glide_planes(4))
    ordered = OrderedPlanes(loop.planes, loop.mask, np.ones(4))
    assert (ordered.n, ordered.single, ordered.xp) == (4, False, np)
    assert ordered.numbers == loop.planes.numbers
    assert ordered.planes.keys() == loop.planes.planes.keys()
    assert all(ordered.planes[name].given is loop.planes.planes[name].given for name in ordered.planes)
