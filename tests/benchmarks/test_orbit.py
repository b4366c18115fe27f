"""The orbits of the heavy case: the method has its orders, the kernel does what NumPy does, and orbits close."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import eagle.sync
from benchmarks import orbit

N = 300


def table() -> np.ndarray:
    a = np.zeros((len(orbit.STAGES), len(orbit.STAGES)))
    for row, weights in zip(a, orbit.STAGES, strict=True):
        row[: len(weights)] = weights
    return a


@pytest.mark.parametrize(("name", "order"), [("ORDER_8", 8), ("ORDER_7", 7)])
def test_the_table_meets_the_conditions_of_its_order(name: str, order: int) -> None:
    a, b = table(), np.array(getattr(orbit, name))
    c = a.sum(axis=1)
    for q in range(order):  # quadrature
        assert b @ c**q == pytest.approx(1 / (q + 1), abs=1e-14)
    chain, factorial = np.ones_like(c), 1
    for q in range(1, order + 1):  # the tall trees
        factorial *= q
        assert b @ chain == pytest.approx(1 / factorial, abs=1e-15)
        chain = a @ chain
    for q in range(1, order - 1):  # a few bushy ones
        assert b @ (a @ c**q) == pytest.approx(1 / ((q + 1) * (q + 2)), abs=1e-14)
        assert b @ (c * (a @ c ** (q - 1))) == pytest.approx(1 / (q * (q + 2)), abs=1e-14)
    assert b @ chain != pytest.approx(1 / (factorial * (order + 1)), rel=1e-3)  # and no order more


def test_half_the_step_is_far_more_exact() -> None:
    given = orbit.planes(N)
    start = tuple(given[name] for name in orbit.STATE[:4])

    def after(steps: int) -> np.ndarray:
        state = start
        for _ in range(steps):
            state, _ = orbit.step(np, state, 0.2 / steps)
        return np.array(state)

    exact = after(16)
    whole, half = (np.abs(after(steps) - exact).max() for steps in (1, 2))
    assert whole > 100 * half > 0  # 2**8 for an infinitely short step


@pytest.fixture(scope="module", params=[True, False], ids=["spread", "uniform"])
def runs(request: pytest.FixtureRequest) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    given = orbit.planes(N, spread=request.param)
    arrays = {name: plane.copy() for name, plane in given.items()}
    result = eagle.sync.simulate(orbit.KERNEL, **arrays, **orbit.NUMBERS, max_steps=orbit.MAX_STEPS)
    assert result.done
    return given, arrays, orbit.masked(np, given)


def test_the_kernel_agrees_with_numpy(runs: Any) -> None:
    _, ours, reference = runs
    np.testing.assert_array_equal(ours["t"], reference["t"])
    # Another rounding may tip a step that is accepted by a hair; the answers stay within the tolerance of the orbit.
    assert np.abs(ours["k"] - reference["k"]).max() <= 2
    for name in orbit.STATE[:4]:
        np.testing.assert_allclose(ours[name], reference[name], rtol=0, atol=1e-8)


def test_orbits_close_and_keep_their_energy(runs: Any) -> None:
    given, ours, _ = runs
    assert orbit.error(given, ours) < orbit.LARGEST_ERROR
    np.testing.assert_allclose(orbit.energy(ours), -0.5, rtol=0, atol=1e-8)


def test_samples_take_different_numbers_of_steps(runs: Any) -> None:
    given, ours, _ = runs
    taken = orbit.steps_of(ours)
    assert taken.max() > 1.5 * taken.min()
    per_orbit = taken * 2.0 * np.pi / given["t_end"]
    assert 10 < per_orbit.min() < per_orbit.max() < 200


def test_the_compacting_kernel_agrees() -> None:
    given = orbit.planes(64)
    states = []
    for kernel in (orbit.KERNEL, orbit.LISTED):
        arrays = {name: plane.copy() for name, plane in given.items()}
        assert eagle.sync.simulate(kernel, **arrays, **orbit.NUMBERS, max_steps=orbit.MAX_STEPS).done
        states.append(np.array([arrays[name] for name in orbit.STATE[:5]]))  # h hangs on the last bits
    np.testing.assert_allclose(states[0], states[1], rtol=0, atol=1e-8)
