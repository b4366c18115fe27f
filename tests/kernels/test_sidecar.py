"""Sidecars and manifests: what is read, and that whatever is damaged is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eagle
from eagle.kernels.sidecar import MAX_SIDECAR_BYTES, read_document, read_manifest, read_sidecar

if TYPE_CHECKING:
    from pathlib import Path

SIDECAR: dict[str, Any] = {
    "format": "host",
    "schema_version": 3,
    "pattern": "pure",
    "aether_abi": "aether-abi/2",
    "exec_targets": ["host"],
    "exec_access": "sample_local",
    "scalar_type": "float64",
    "kernel": "orbit",
    "params": [{"name": "dt", "dtype": "real"}, {"name": "k", "dtype": "int"}],
    "mat_shapes": {"m": [2, 3]},
    "mutables": [
        {"name": "x", "dtype": "scalar", "width": 1, "default": None, "prior": True},
        {"name": "p", "dtype": "vector", "width": 3, "default": 0.5},
        {"name": "j", "dtype": "int", "width": 1},
    ],
    "arg_widths": {"x": 1, "p": 3, "v": 3, "m": 6},
    "arg_dtypes": {"x": "float64", "p": "float64", "j": "int32", "v": "float64", "theta": "float32"},
    "finish": {"steps": "auto", "steps_max": 64},
    "terminated_readonly": False,
    "arg_spec": [
        ["mutable", "x"], ["mutable", "p"], ["mutable", "j"], ["vec_in", "v"], ["mat_in", "m"],
        ["lookup", "finished_count"], ["lookup", "fused_steps"], ["lookup", "theta"], ["terminated", "done"],
        ["uniform", "dt"], ["uniform", "k"],
    ],
    "host_entry": "orbit_host",
}  # fmt: skip

MANIFEST: dict[str, Any] = {
    "schema_version": 3,
    "pattern": "pure",
    "aether_abi": "aether-abi/2",
    "exec_targets": ["host"],
    "exec_access": "sample_local",
    "plugins": [
        {"id": "b", "order": 1, "enabled": True, "artifact": "b.so", "sidecar": "b.json", "format": "host"},
        {"id": "a", "order": 0, "enabled": False, "artifact": "a.ptx", "sidecar": "a.json", "format": "ptx"},
    ],
}


def written(folder: Path, document: object, name: str = "orbit.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def changed(document: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {key: value for key, value in {**copy.deepcopy(document), **fields}.items() if value is not ...}


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_a_sidecar_becomes_typed_records(tmp_path: Path) -> None:
    sidecar = read_sidecar(written(tmp_path, SIDECAR))
    args = {arg.name: arg for arg in sidecar.args}
    assert list(args) == [name for _, name in SIDECAR["arg_spec"]]
    assert (sidecar.name, sidecar.pattern, sidecar.scalar_type) == ("orbit", "pure", "float64")
    assert (sidecar.finish.steps, sidecar.finish.steps_max) == ("auto", 64)
    assert {name: (arg.shape, arg.struct) for name, arg in args.items() if arg.shape or arg.struct == "gref"} == {
        "p": ((3,), "gref"), "v": ((3,), "gref"), "m": ((2, 3), "gref"),
    }  # fmt: skip
    assert {name: str(arg.dtype) for name, arg in args.items()} == {
        "x": "float64", "p": "float64", "j": "int32", "v": "float64", "m": "float64", "finished_count": "float64",
        "fused_steps": "float64", "theta": "float32", "done": "bool", "dt": "float64", "k": "int64",
    }  # fmt: skip
    assert args["x"].prior
    assert not args["p"].prior
    assert args["p"].default == 0.5
    assert sidecar.arg("nobody") is None


def test_records_and_documents_cannot_be_changed(tmp_path: Path) -> None:
    sidecar = read_sidecar(written(tmp_path, SIDECAR))
    with pytest.raises(dataclasses.FrozenInstanceError):
        sidecar.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        sidecar.meta["kernel"] = "other"  # type: ignore[index]


def test_float32_reaches_every_real_argument(tmp_path: Path) -> None:
    sidecar = read_sidecar(written(tmp_path, changed(SIDECAR, scalar_type="float32", arg_dtypes=...)))
    assert sidecar.arg("dt").dtype == np.float32
    assert sidecar.arg("v").dtype == np.float32


def test_a_legacy_sidecar_of_schema_1(tmp_path: Path) -> None:
    legacy = {
        "schema_version": 1, "pattern": "pure", "aether_abi": "aether-abi/1", "scalar_type": "float64",
        "arg_spec": [["mutable", "x"], ["vec_in", "v"], ["nsamples", "nsamples"], ["uniform", "k"]],
        "mutables": [{"name": "x", "dtype": "int"}],
    }  # fmt: skip
    sidecar = read_sidecar(written(tmp_path, legacy))
    assert sidecar.access is None
    assert sidecar.finish is None
    assert sidecar.arg("x").dtype == np.int64
    assert sidecar.arg("x").prior  # nobody says that it is written first
    assert sidecar.arg("v").shape == (3,)
    assert sidecar.name == "orbit"  # its file's name


def test_a_manifest_comes_in_its_declared_order(tmp_path: Path) -> None:
    manifest = read_manifest(written(tmp_path, MANIFEST, "manifest.json"))
    assert [(entry.id, entry.enabled, entry.format) for entry in manifest.entries] == [
        ("a", False, "ptx"),
        ("b", True, "host"),
    ]
    assert manifest.entries[1].artifact == tmp_path / "b.so"


# ---- refused by name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"schema_version": 99}, eagle.UnsupportedSchema, "99"),
        ({"schema_version": "3"}, eagle.UnsupportedSchema, "schema"),
        ({"schema_version": ...}, eagle.UnsupportedSchema, "schema"),
        ({"pattern": "tensor"}, eagle.UnsupportedSchema, "tensor"),
        ({"pattern": ["pure"]}, eagle.UnsupportedSchema, "pure"),
        ({"aether_abi": "aether-abi/9"}, eagle.AbiMismatch, "aether-abi/9"),
        ({"aether_abi": ...}, eagle.AbiMismatch, "None"),
        ({"exec_access": "telepathy"}, eagle.UnsupportedSchema, "telepathy"),
        ({"exec_targets": ["abacus"]}, eagle.UnsupportedSchema, "abacus"),
        ({"arg_spec": [["tensor", "x"]]}, eagle.UnsupportedSchema, "tensor"),
        ({"arg_dtypes": {"x": "object"}}, eagle.UnsupportedSchema, "object"),
        ({"arg_dtypes": {"x": ">f8"}}, eagle.UnsupportedSchema, ">f8"),
        ({"scalar_type": "float16"}, eagle.ArtifactError, "float16"),
        ({"finish": {"steps": 0}}, eagle.UnsupportedSchema, "finish.steps"),
        ({"finish": {"steps": True}}, eagle.UnsupportedSchema, "finish.steps"),
        ({"finish": {"steps": "auto", "steps_max": math.inf}}, eagle.ArtifactError, "steps_max"),
        ({"arg_widths": {"v": -3}}, eagle.ArtifactError, "width"),
        ({"arg_widths": {"v": 2.5}}, eagle.ArtifactError, "width"),
        ({"mat_shapes": {"m": [2, 3, 4]}}, eagle.ArtifactError, "shape"),
        ({"mat_shapes": {"m": [2, 0]}}, eagle.ArtifactError, "shape"),
        ({"mutables": [{"name": "x", "dtype": "scalar", "default": "zero"}]}, eagle.ArtifactError, "default"),
        ({"host_entry": 7}, eagle.ArtifactError, "host_entry"),
    ],
)
def test_a_word_that_we_do_not_know(tmp_path: Path, fields: dict[str, Any], error: type, named: str) -> None:
    with pytest.raises(error, match=named) as caught:
        read_sidecar(written(tmp_path, changed(SIDECAR, **fields)))
    assert "orbit" in str(caught.value)  # the file, or the kernel in it


@pytest.mark.parametrize("entry", ["artifact", "sidecar"])
@pytest.mark.parametrize(
    "name", ["../other/k.so", "/etc/passwd", "sub/../../k.so", "", None, 3, ["k.so"], "..", "k\0.so"]
)
def test_a_manifest_stays_in_its_folder(tmp_path: Path, entry: str, name: object) -> None:
    folder = tmp_path / "unit"
    folder.mkdir()
    document = copy.deepcopy(MANIFEST)
    document["plugins"][0][entry] = name
    with pytest.raises(eagle.ArtifactError, match="'b'"):
        read_manifest(written(folder, document, "manifest.json"))


def test_a_link_out_of_the_folder_is_followed_and_refused(tmp_path: Path) -> None:
    folder = tmp_path / "unit"
    folder.mkdir()
    (tmp_path / "secret.so").write_bytes(b"")
    (folder / "b.so").symlink_to(tmp_path / "secret.so")
    with pytest.raises(eagle.ArtifactError, match="leaves the unit's folder"):
        read_manifest(written(folder, MANIFEST, "manifest.json"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d["plugins"][0].update(format="elf"), "elf"),
        (lambda d: d["plugins"][0].update(format=["host"]), "host"),
        (lambda d: d["plugins"][0].update(id="a"), "'a'"),
        (lambda d: d["plugins"][0].update(order="first"), "first"),
        (lambda d: d["plugins"][0].update(id=7), "id"),
        (lambda d: d.update(plugins={"b": {}}), "plugins"),
        (lambda d: d.update(plugins=["b"]), "id"),
        (lambda d: d.update(schema_version=17), "17"),
        (lambda d: d.update(aether_abi="aether-abi/7"), "aether-abi/7"),
        (lambda d: d.pop("pattern"), "pattern"),
    ],
)
def test_a_damaged_manifest(tmp_path: Path, change: Any, named: str) -> None:
    document = copy.deepcopy(MANIFEST)
    change(document)
    with pytest.raises(eagle.ArtifactError, match=named):
        read_manifest(written(tmp_path, document, "manifest.json"))


# ---- documents -------------------------------------------------------------------------------------------------------


def test_a_document_of_more_than_16_mib_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "orbit.json"
    with path.open("wb") as file:
        file.truncate(MAX_SIDECAR_BYTES + 1)
    with pytest.raises(eagle.ArtifactError, match=r"orbit\.json: 16,777,217 bytes.*16 MiB"):
        read_sidecar(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b'"text"',
        b"\xff\xfe\x00",
        b"{}x",
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b"1" * 5000,
    ],
    ids="empty cut list null text no-utf-8 tail deep-list deep-object long-number".split(),
)
def test_what_is_no_object_of_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "orbit.json"
    path.write_bytes(content)
    with pytest.raises(eagle.ArtifactError, match=r"orbit\.json"):
        read_document(path)


def test_a_missing_file_is_just_that(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_sidecar(tmp_path / "nothing.json")
    with pytest.raises(FileNotFoundError):
        read_manifest(tmp_path / "manifest.json")


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["auto", "float64", "O", "f4,f4", ">f8", "../x", "\0", "uniform", 2**40, -1]),
    st.lists(st.integers(), max_size=2),
    st.lists(st.lists(st.text(max_size=3), max_size=3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places(value: object, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([here] if here else []), *(at for key, part in inside for at in places(part, (*here, key)))]


@st.composite
def damaged(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """A document with one to three values replaced or removed."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        all_places = places(result)
        if not all_places:
            break
        *way, last = draw(st.sampled_from(all_places))
        part: Any = result
        for key in way:
            part = part[key]
        if draw(st.booleans()):
            part[last] = draw(JUNK)
        else:
            del part[last]
    return result


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=damaged(SIDECAR))
def test_any_damage_to_a_sidecar_is_read_right_or_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    try:
        sidecar = read_sidecar(written(tmp_path, document))
    except eagle.ArtifactError:
        return
    for arg in sidecar.args:
        assert arg.dtype.kind in "biuf"
        assert all(extent >= 1 for extent in arg.shape)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=damaged(MANIFEST))
def test_any_damage_to_a_manifest_is_read_right_or_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    try:
        manifest = read_manifest(written(tmp_path, document, "manifest.json"))
    except eagle.ArtifactError:
        return
    for entry in manifest.entries:
        assert entry.artifact.resolve().is_relative_to(tmp_path.resolve())
        assert entry.sidecar.resolve().is_relative_to(tmp_path.resolve())
