"""Units: digests are checked before anything is mapped, and a unit from another CPU is not used."""

from __future__ import annotations

import json
import platform
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import eagle
from eagle.kernels.unit import RECORD, STAMP, check_record, cpu_features, cpu_identity, read_unit, write_record
from tests.helpers.models import affine
from tests.helpers.units import copy_of, edit, restamp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_of(eagle.deploy(affine), tmp_path / "unit")


def test_a_whole_unit_is_read(folder: Path) -> None:
    unit = read_unit(folder)
    assert set(unit.sidecars) == {"affine"}
    assert unit.entry("affine").artifact == folder / "affine.so"
    assert unit.digest == json.loads((folder / STAMP).read_text())["unit"]


def test_a_unit_works_wherever_it_lies(folder: Path) -> None:
    plan = eagle.deploy(folder)
    assert np.array_equal(plan(x=np.arange(3.0), a=2.0, b=1.0), [1.0, 3.0, 5.0])
    assert np.array_equal(eagle.deploy(str(folder))(x=np.arange(3.0), a=2.0, b=1.0), [1.0, 3.0, 5.0])


@pytest.mark.parametrize("name", ["affine.so", "affine.json", "manifest.json"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["half", "one byte", "empty", "gone", "a folder"],
)
def test_a_changed_file_is_refused_by_name(folder: Path, name: str, damage: Callable[[Path], object]) -> None:
    damage(folder / name)
    with pytest.raises(eagle.ArtifactError, match=name):
        eagle.deploy(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda stamp: stamp.pop("files"),
        lambda stamp: stamp.pop("unit"),
        lambda stamp: stamp.update(files=[["affine.so", "x"]]),
        lambda stamp: stamp.update(files=None),
        lambda stamp: stamp["files"].update({"../affine.so": "x"}),
        lambda stamp: stamp["files"].update({"/etc/hostname": "x"}),
        lambda stamp: stamp["files"].update({"a\0b": "x"}),
        lambda stamp: stamp["files"].update({"": "x"}),
        lambda stamp: stamp["files"].update({"affine.so": None}),
        lambda stamp: stamp["files"].pop("affine.so"),
        lambda stamp: stamp["files"].pop("affine.json"),
        lambda stamp: stamp["files"].pop("manifest.json"),
    ],
)
def test_a_damaged_stamp(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit(folder / STAMP, change)
    with pytest.raises(eagle.ArtifactError, match="rebuild"):
        eagle.deploy(folder)(x=np.ones(1), a=1.0, b=1.0)


def test_without_a_stamp_it_is_no_unit(folder: Path) -> None:
    (folder / STAMP).unlink()
    with pytest.raises(eagle.ArtifactError, match=r"\.hawk_unit"):
        eagle.deploy(folder)


def test_a_sidecar_outside_the_folder_is_not_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "affine.json").write_bytes((folder / "affine.json").read_bytes())
    edit(folder / "manifest.json", lambda d: d["plugins"][0].update(sidecar="../affine.json"))
    restamp(folder)
    with pytest.raises(eagle.ArtifactError, match="leaves the unit's folder"):
        eagle.deploy(folder)


def test_a_link_that_replaces_a_file_is_followed_to_its_digest(folder: Path, tmp_path: Path) -> None:
    library = folder / "affine.so"
    (tmp_path / "elsewhere.so").write_bytes(b"not this")
    library.unlink()
    library.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(eagle.ArtifactError, match=r"affine\.so"):
        eagle.deploy(folder)


# ---- the record of the CPU -------------------------------------------------------------------------------------------


def test_a_record_made_here_fits_here(tmp_path: Path) -> None:
    write_record(tmp_path, "key")
    check_record(tmp_path, "key")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cpu_features": ["hovering"]}, "hovering"),
        ({"machine": "abacus64"}, "abacus64"),
        ({"system": "Plan 9"}, "Plan 9"),
        ({"record_version": 0}, "record_version"),
        ({"record_version": None}, "record_version"),
        ({"key": "another"}, "another"),
        ({"cpu_features": None}, "CPU features"),
        ({"cpu_features": 7}, "CPU features"),
        ({"cpu_features": [[]]}, "CPU features"),
        ({"cpu_features": "sse"}, "CPU features"),
    ],
)
def test_a_record_of_another_machine(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    write_record(tmp_path, "key")
    edit(tmp_path / RECORD, lambda record: record.update(fields))
    with pytest.raises(eagle.AbiMismatch, match=named):
        check_record(tmp_path, "key")


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_an_unreadable_record(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / RECORD).write_bytes(content)
    with pytest.raises(eagle.AbiMismatch, match=RECORD.replace(".", r"\.")):
        check_record(tmp_path, "key")


def test_the_cpu_is_part_of_the_key() -> None:
    assert len(cpu_identity()) == 16
    if platform.system() == "Linux":
        assert cpu_features()
