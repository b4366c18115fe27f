"""Signatures: a call binds as the kernel function would, and extents are known wherever somebody declares them."""

from __future__ import annotations

from typing import Any

import pytest

import eagle
from eagle.kernels.roles import Arg
from eagle.kernels.signature import Signature, bind_call, companions, signature_of
from tests.helpers import models

A = Signature("a", ("x", "r"), (), None)
B = Signature("b", ("x", "goal"), (), None)
NAMELESS = Signature("c", None, (), None)


@pytest.mark.parametrize("positional", range(4))
def test_a_call_may_mix_places_and_names(positional: int) -> None:
    values = {"x": 1, "r": 2, "goal": 3}
    args = list(values.values())[:positional]
    kwargs = dict(list(values.items())[positional:])
    assert bind_call([A, B], args, kwargs) == values


def test_several_kernels_form_one_list_of_names() -> None:
    assert bind_call([B, A], [1, 2, 3], {}) == {"x": 1, "goal": 2, "r": 3}


@pytest.mark.parametrize(
    ("signatures", "args", "kwargs", "named"),
    [
        ([A], [1, 2, 3], {}, "takes 2 arguments .x, r.; got 3"),
        ([A], [1], {"x": 2}, "'x' is given twice"),
        ([NAMELESS], [1], {}, "'c' is a prebuilt plan, called by name only"),
        ([A, NAMELESS], [1], {}, "'c' is a prebuilt plan"),
    ],
)
def test_a_bad_call_is_told_why(signatures: list[Signature], args: Any, kwargs: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        bind_call(signatures, args, kwargs)


def test_by_name_only_needs_no_signature() -> None:
    assert bind_call([NAMELESS], [], {"q": 1}) == {"q": 1}


def test_the_mask_and_the_returned_names_are_no_parameters() -> None:
    assert eagle.deploy(models.climb).signature.names == ("x", "c", "goal", "r")
    pair = eagle.deploy(models.pair).signature
    assert pair.names == ("x",)
    assert len(pair.outputs) == 2


def test_declared_extents() -> None:
    assert eagle.deploy(models.line).signature.extents == {"theta": 2}
    assert eagle.deploy(models.grid_value).signature.extents == {"u": 6}
    histogram = eagle.deploy(models.histogram)
    assert histogram.signature.extents["h"] == histogram.signature.extents["h_c"] == 4
    assert eagle.deploy(models.total).signature.extents["out"] == 1


def test_a_sidecar_alone_still_knows_the_accumulators() -> None:
    sidecar = eagle.deploy(models.histogram).sidecar
    alone = signature_of(sidecar)
    assert alone.names is None
    assert alone.extents == {"h": 4, "h_c": 4}


def test_an_adjoint_is_as_long_as_what_it_is_the_adjoint_of() -> None:
    assert eagle.deploy(models.line_vjp).signature.extents["bar_theta"] == 2
    assert eagle.deploy(models.grid_vjp).signature.extents["bar_u"] == 6
    assert "bar_w" not in eagle.deploy(models.edge_vjp).signature.extents


def test_companions_belong_to_another_accumulator() -> None:
    def sums(*names: str) -> list[Arg]:
        return [Arg(name, "accum_out", eagle.np_dtype("float64")) for name in names]

    assert companions(sums("h", "h_c", "s", "s_comp")) == {"h_c", "s_comp"}
    assert companions(sums("c", "acc", "h_c")) == frozenset()
