"""Cases that users ran into: views, samples that never finish or have finished, order, empty and huge batches."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import eagle
import eagle.sync
from tests.helpers import models
from tests.helpers.deadline import deadline
from tests.helpers.faces import Face, both_faces


def collatz_like(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample i needs (i * 7919) % 97 + 1 steps and carries its index."""
    index = np.arange(n)
    return index.astype(float), ((index * 7919) % 97 + 1).astype(float)


# ---- BR-31 -----------------------------------------------------------------------------------------------------------

BASE_SHAPE = (2, 3, 4)
VIEWS = {
    "column": lambda b: b[0, :, 3],
    "every second": lambda b: b[:, ::2],
    "transposed": lambda b: b.T,
    "reversed": lambda b: b[::-1],
    "row": lambda b: b[1, 2],
    "flat": lambda b: b.reshape(-1),
    "plane": lambda b: b[1],
    "Fortran": lambda b: np.asfortranarray(b[0]),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("use", ["input", "state", "output"])
def test_br_31_only_the_elements_of_a_view_are_read_and_written(view: str, use: str) -> None:
    """BR-31: a view gives what its contiguous copy gives, or a clear error; the rest of its base stays."""
    base = np.arange(24.0).reshape(BASE_SHAPE)
    before = base.copy()
    array = VIEWS[view](base)
    given = array.copy()
    if use == "input":
        try:
            got = models.affine(array, 2.0, 1.0)
        except ValueError as error:
            assert "'x'" in str(error)  # noqa: PT017 - an error is one of two right answers
        else:
            assert np.array_equal(got, 2.0 * given + 1.0)
        assert np.array_equal(base, before)
        return
    try:
        if use == "state":
            n = array.shape[0] if array.ndim == 1 else 4
            eagle.sync.simulate(
                models.climb, x=array, c=np.zeros(n), goal=np.full(n, 100.0), r=1.0, max_steps=5, layout=None
            )
            want = given + 5.0
        else:
            eagle.deploy(models.affine)(given, 2.0, 1.0, out=array)
            want = 2.0 * given + 1.0
    except ValueError as error:
        assert "'x'" in str(error) or "'out'" in str(error)  # noqa: PT017
        assert np.array_equal(base, before)
        return
    assert np.array_equal(array, want)
    expected = before.copy()
    if array.base is not None:
        VIEWS[view](expected)[...] = want
    assert np.array_equal(base, expected)


def test_br_31_a_broadcast_number_is_no_state_and_no_output() -> None:
    """BR-31: a broadcast array has one element in memory, however long it says it is."""
    wide = np.broadcast_to(1.0, (6,))
    with pytest.raises(ValueError, match="'x'"):
        eagle.sync.simulate(models.climb, x=wide, c=np.zeros(6), goal=np.ones(6), r=1.0, max_steps=5)
    with pytest.raises(ValueError, match="'out'"):
        eagle.deploy(models.affine)(np.ones(6), 2.0, 1.0, out=wide)
    assert np.array_equal(models.affine(wide, 2.0, 1.0), np.full(6, 3.0))


# ---- BR-32 -----------------------------------------------------------------------------------------------------------


@both_faces
@deadline
async def test_br_32_a_sample_that_is_nan_ends_at_the_cap_and_hurts_no_other(face: Face) -> None:
    """BR-32: the others finish, the NaN sample is told apart by its mask, and the run ends."""
    a = np.array([2.0, np.nan, 9.0])
    began = time.perf_counter()
    result = await face.simulate(models.newton, x=a.copy(), k=np.zeros(3), a=a, max_steps=1000)
    assert time.perf_counter() - began < 30.0
    assert result.status == "max_steps"
    assert result.finished.tolist() == [True, False, True]
    np.testing.assert_allclose(result.x[[0, 2]], [2.0**0.5, 3.0], rtol=1e-9)
    assert result.k[1] == 1000.0
    with pytest.raises(TypeError, match="max_steps"):
        await face.simulate(models.newton, x=a.copy(), k=np.zeros(3), a=a)


# ---- BR-33 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["auto", "measured", "band"])
@pytest.mark.parametrize("n", [2, 700])
def test_br_33_a_finished_sample_is_not_stepped_again(policy: str, n: int) -> None:
    """BR-33: its state is frozen bit for bit, its own count is right, and the caller's errstate never fires."""
    x = np.full(n, 2.0**-1000)  # a thousand doublings
    x[::2] = 0.5  # one
    c = np.zeros(n)
    sim = eagle.sync.simulation(models.double, x=x, c=c, max_steps=5000)
    sim.runner.host_policy = policy
    with np.errstate(all="raise"):
        assert sim.run().done
        assert np.geterr()["over"] == "raise"
    assert np.array_equal(x, np.ones(n))  # unfrozen it would have become infinite
    assert np.array_equal(c[::2], np.ones(c[::2].size))
    assert np.array_equal(c[1::2], np.full(c[1::2].size, 1000.0))


# ---- BR-34 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "options"),
    [(models.climb, {}), (models.climb_one, {}), (models.climb_listed, {}), (models.climb_listed, {"reorder": True}),
     (models.climb_listed_auto, {"reorder": 0.4})],
)  # fmt: skip
def test_br_34_result_i_belongs_to_input_i(kernel: Any, options: dict[str, Any]) -> None:
    """BR-34: tags, steps and values stay with their samples whatever thins out, and repeats are equal bit for bit."""
    n = 10_000
    tag, steps = collatz_like(n)
    first = None
    for _ in range(4):
        planes = {"x": tag.copy(), "c": np.zeros(n), "goal": tag + steps, "r": 1.0}
        assert eagle.sync.simulate(kernel, **planes, max_steps=200, **options).done
        assert np.array_equal(planes["c"], steps)
        assert np.array_equal(planes["x"], tag + steps)
        first = first or planes["x"].tobytes()
        assert planes["x"].tobytes() == first


def test_br_34_with_planes_of_several_shapes() -> None:
    """BR-34: three planes of different width keep their samples together."""
    n = 10_000
    tag, steps = collatz_like(n)
    p, t = np.stack([tag, -tag, 2.0 * tag]), np.zeros(n)
    u = np.stack([steps, tag, np.ones(n)])
    start = p.copy()
    assert eagle.sync.simulate(models.glide, u=u, dt=1.0, end=steps, p=p, t=t, max_steps=200).done
    assert np.array_equal(t, steps)
    assert np.array_equal(p, start + u * steps)


# ---- BR-35 -----------------------------------------------------------------------------------------------------------


@both_faces
@pytest.mark.parametrize(
    "kernel", [models.climb, models.climb_one, models.climb_four, models.climb_listed, models.climb_listed_auto]
)
@deadline
async def test_br_35_no_samples_are_done_at_once(face: Face, kernel: Any) -> None:
    """BR-35: no launch, no warning, arrays of the right shape and dtype."""
    result = await face.simulate(kernel, **models.climb_planes(0), max_steps=5)
    assert (result.done, result.status, result.n, result.report.launches) == (True, "finished", 0, 0)
    assert (result.x.shape, result.x.dtype, result.finished.shape, result.finished.dtype) == ((0,), float, (0,), bool)
    runner = await face.until_done(
        eagle.deploy(kernel), max_steps=5, **models.climb_planes(3), terminated=np.ones(3, bool)
    )
    report = await face.run(runner)
    assert (report.done, report.launches, report.steps) == (True, 0, 0)
    assert (await face.simulate(kernel, **models.climb_planes(1), max_steps=5)).done


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_br_35_vectors_of_no_samples(shape: tuple[int, int]) -> None:
    """BR-35: both layouts of nothing, without a warning."""
    result = eagle.sync.simulate(
        models.glide, u=np.zeros(shape), dt=1.0, end=np.zeros(0), p=np.zeros(shape), t=np.zeros(0), max_steps=5
    )
    assert (result.done, result.p.shape) == (True, shape)
    assert models.stretch(np.zeros((3, 0)), 2.0).shape == (3, 0)


def test_br_35_the_last_active_sample_finishes_in_the_middle_of_a_run() -> None:
    """BR-35: nothing is launched for nobody."""
    for kernel in (models.climb_listed, models.climb_listed_auto):
        planes = models.climb_planes(500, 3.0)
        report = eagle.sync.run_until_done(eagle.deploy(kernel), max_steps=10**6, **planes)
        assert report.done
        assert report.steps <= 64
        assert np.array_equal(planes["c"], planes["goal"])
