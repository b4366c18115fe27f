"""raptor-core's Warp rows, host legs: arrays in CPU memory are read and written where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from raptor.conformance.interop import register_row

import eagle
from eagle.kernels.interop import detect

warp = pytest.importorskip("warp", reason="Warp is not installed")
pytest_plugins = ["raptor.conformance.pytest_rows"]


@pytest.fixture
def models() -> Any:
    from tests.helpers import interop_models

    warp.config.quiet = True
    return interop_models


@register_row("WP-IN-CUDA-ALIAS", leg="cpu")
def test_an_array_is_written_where_it_lies(models: Any) -> None:
    x = warp.zeros(5, dtype=warp.float64, device="cpu")
    eagle.deploy(models.drift, targets=("host",))(warp.full(5, 1.0, dtype=warp.float64, device="cpu"), 0.5, x)
    np.testing.assert_array_equal(x.numpy(), 0.5)


@register_row("WP-OUT-CUDA-ALIAS", leg="cpu")
def test_a_result_is_the_array_that_the_kernel_wrote(models: Any) -> None:
    out = warp.zeros(5, dtype=warp.float64, device="cpu")
    plan = eagle.deploy(models.scale, targets=("host",))
    got = plan(warp.full(5, 1.0, dtype=warp.float64, device="cpu"), 2.0, 1.0, out=out)
    assert detect(got).name == "warp"
    np.testing.assert_array_equal(out.numpy(), 3.0)
