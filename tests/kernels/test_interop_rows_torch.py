"""raptor-core's torch rows, host legs: tensors in CPU memory are read and written where they lie."""

from __future__ import annotations

from typing import Any

import pytest
from raptor.conformance.interop import register_row

import eagle

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest_plugins = ["raptor.conformance.pytest_rows"]


@pytest.fixture
def models() -> Any:
    from tests.helpers import interop_models

    return interop_models


@register_row("T-IN-CUDA-ALIAS", leg="cpu")
def test_a_tensor_is_written_where_it_lies(models: Any) -> None:
    x = torch.zeros(5, dtype=torch.float64)
    got = eagle.deploy(models.drift, targets=("host",))(torch.ones(5, dtype=torch.float64), 0.5, x)
    assert got.data_ptr() == x.data_ptr()
    assert torch.equal(x, torch.full((5,), 0.5, dtype=torch.float64))


@register_row("T-OUT-CUDA-ALIAS", leg="cpu")
def test_a_result_tensor_is_the_array_that_the_kernel_wrote(models: Any) -> None:
    out = torch.zeros(5, dtype=torch.float64)
    plan = eagle.deploy(models.scale, targets=("host",))
    got = plan(torch.ones(5, dtype=torch.float64), 2.0, 1.0, out=out)
    assert got.data_ptr() == out.data_ptr()
    fresh = plan(torch.ones(5, dtype=torch.float64), 2.0, 1.0)
    assert isinstance(fresh, torch.Tensor)
    assert torch.equal(fresh, out)
