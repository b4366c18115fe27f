"""raptor-core's certification rows on the host: the NumPy leg, and that no row of ours can hide behind a skip.

A row that names CUDA is certified by `test_interop_rows_device`; its host leg here, where it has one, is the same
promise about host memory.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from raptor.conformance.interop import ROWS, assert_no_skip_machinery, discover_matrix_modules, register_row

import eagle

pytest_plugins = ["raptor.conformance.pytest_rows"]  # records which rows ran


@pytest.fixture
def drift() -> Any:
    from tests.helpers import interop_models

    return eagle.deploy(interop_models.drift, targets=("host",))


@register_row("NP-HOST-ALIAS", leg="cpu")
def test_numpy_is_written_where_it_lies(drift: Any) -> None:
    v, x = np.ones(5), np.zeros(5)
    got = drift(v, 0.5, x)
    assert got is x
    np.testing.assert_array_equal(x, 0.5)


def test_no_row_can_skip() -> None:
    folder = pathlib.Path(__file__).parent
    assert_no_skip_machinery(folder)
    assert len(discover_matrix_modules(folder)) >= 5


def test_the_numpy_leg_ran(request: pytest.FixtureRequest) -> None:
    from raptor.conformance.pytest_rows import unfinished

    collected = {item.name for item in request.session.items}
    if "test_numpy_is_written_where_it_lies" in collected:  # a run of this test alone proves nothing, and says nothing
        assert not list(unfinished([("NP-HOST-ALIAS", "cpu")]))
    assert ROWS["NP-HOST-ALIAS"].legs == ("cpu",)
