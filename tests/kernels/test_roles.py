"""Roles: the struct that carries each one, and what follows from it."""

from __future__ import annotations

import numpy as np
import pytest

import eagle
from eagle.kernels.roles import RESERVED, ROLES, Arg, struct_of

REAL = np.dtype(np.float64)

STRUCTS = {
    "out": "gref",
    "vec_in": "gref",
    "mat_in": "gref",
    "per_sample": "handle",
    "terminated": "handle",
    "lookup": "handle",
    "wide_in": "handle",
    "wide_out": "handle",
    "accum_out": "handle",
    "uniform": "value",
    "nsamples": "value",
}


@pytest.mark.parametrize("role", sorted(STRUCTS))
def test_each_role_has_one_struct(role: str) -> None:
    assert struct_of(role, where="unit.json") == STRUCTS[role]


@pytest.mark.parametrize(
    ("dtype", "struct"),
    [("scalar", "handle"), ("int", "handle"), ("int32", "handle"), ("vector", "gref"), ("matrix", "gref")],
)
def test_a_mutable_is_carried_by_its_shape(dtype: str, struct: str) -> None:
    assert struct_of("mutable", dtype, where="unit.json") == struct


def test_the_list_of_roles_is_complete() -> None:
    assert {*STRUCTS, "mutable"} == ROLES


@pytest.mark.parametrize("role", ["tensor", "", "OUT", "mutable "])
def test_an_unknown_role_is_refused_by_name(role: str) -> None:
    with pytest.raises(eagle.UnsupportedSchema, match=rf"unit\.json.*{role!r}.*install a newer eagle-aio"):
        struct_of(role, where="unit.json")


@pytest.mark.parametrize(("shape", "width"), [((), 1), ((1,), 1), ((3,), 3), ((2, 3), 6)])
def test_the_width_is_the_components_of_one_sample(shape: tuple[int, ...], width: int) -> None:
    assert Arg("x", "vec_in", REAL, shape).width == width


def test_who_is_per_sample_and_who_is_written() -> None:
    per_sample = {role for role in ROLES if Arg("x", role, REAL).per_sample}
    written = {role for role in ROLES if Arg("x", role, REAL).written}
    assert per_sample == {"out", "vec_in", "mat_in", "mutable", "per_sample", "terminated"}
    assert written == {"out", "mutable", "terminated", "wide_out", "accum_out"}


def test_a_read_only_mask_is_not_written() -> None:
    assert not Arg("terminated", "terminated", np.dtype(np.bool_), readonly=True).written


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_is_a_lookup_of_that_name(name: str) -> None:
    assert Arg(name, "lookup", REAL).reserved
    assert not Arg(name, "per_sample", REAL).reserved
    assert not Arg("theta", "lookup", REAL).reserved
