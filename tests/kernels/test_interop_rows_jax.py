"""raptor-core's JAX rows, host legs: arrays in CPU memory are read where they lie and never written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from raptor.conformance.interop import register_row

import eagle
from eagle.kernels.interop import detect

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest_plugins = ["raptor.conformance.pytest_rows"]


@pytest.fixture
def models() -> Any:
    from tests.helpers import interop_models

    return interop_models


@pytest.fixture
def ones() -> Any:
    with jax.enable_x64(True):
        return jax.device_put(np.ones(5), jax.devices("cpu")[0])


@register_row("JX-IN-CUDA-ALIAS", leg="cpu")
def test_an_array_is_read_where_it_lies(models: Any, ones: Any) -> None:
    assert detect(ones).to_numpy(ones).ctypes.data == ones.unsafe_buffer_pointer()
    with jax.enable_x64(True):
        got = eagle.deploy(models.scale, targets=("host",))(ones, 2.0, 1.0)
        assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(np.asarray(got), 3.0)


@register_row("JX-IN-WRITE-REFUSED", leg="cpu")
def test_an_array_is_never_written(models: Any, ones: Any) -> None:
    with pytest.raises(ValueError, match=r"'x'.*jax"):
        eagle.deploy(models.drift, targets=("host",))(np.ones(5), 0.5, ones)
    np.testing.assert_array_equal(np.asarray(ones), 1.0)
