"""BR-38: a cached library that was built for another CPU, or that is no library, never gets to run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import eagle
from tests.helpers import models
from tests.helpers.child import run_script
from tests.helpers.units import copy_of, restamp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# The child runs a job on what is in the cache, then another one: the process is alive and right.
JOB = """
    import sys
    import numpy as np
    import eagle.sync as eagle
    from tests.helpers.models import affine, climb, climb_planes

    if sys.argv[2] == "cache":
        plan = eagle.deploy(affine, cache_dir=sys.argv[1])
        print("right" if plan(2.0, 3.0, 4.0) == 10.0 else "wrong")
    else:
        try:
            plan = eagle.deploy(sys.argv[1])
            print("right" if plan(x=2.0, a=3.0, b=4.0) == 10.0 else "wrong")
        except eagle.ArtifactError as error:
            print("refused", "affine" in str(error) or "unit" in str(error))
    planes = climb_planes(5)
    assert eagle.simulate(climb, **planes, max_steps=9).done and np.array_equal(planes["c"], planes["goal"])
"""


def record(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / ".eagle_unit"
        document = json.loads(path.read_text())
        document.update(fields)
        path.write_text(json.dumps(document))

    return change


def feature(folder: Path) -> None:
    path = folder / ".eagle_unit"
    document = json.loads(path.read_text())
    document["cpu_features"].append("avx9000")
    path.write_text(json.dumps(document))


def library(change: Callable[[bytes], bytes], *, stamped: bool) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "affine.so"
        path.write_bytes(change(path.read_bytes()))
        if stamped:
            restamp(folder)

    return damage


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def text(content: bytes) -> bytes:
    return b"this is no library\n" * 50


def without_entry(content: bytes) -> bytes:
    return content.replace(b"\0affine_host\0", b"\0offine_host\0")


RECORDS = {
    "an invented feature": feature,
    "another architecture": record(machine="abacus64"),
    "another system": record(system="CP/M"),
    "another version of the record": record(record_version=99),
    "an older version of the record": record(record_version=0),
    "another key": record(key="0" * 32),
    "no record": lambda folder: (folder / ".eagle_unit").unlink(),
    "an empty record": lambda folder: (folder / ".eagle_unit").write_text(""),
}
LIBRARIES = {
    "half a library": library(half, stamped=False),
    "half a library, stamped": library(half, stamped=True),
    "a text file": library(text, stamped=False),
    "a text file, stamped": library(text, stamped=True),
    "no entry": library(without_entry, stamped=False),
    "no entry, stamped": library(without_entry, stamped=True),
    "no library": lambda folder: (folder / "affine.so").unlink(),
    "another ABI": library(lambda c: c.replace(b"aether-abi/2", b"aether-abi/7"), stamped=True),
}


@pytest.mark.parametrize("damage", [*RECORDS, *LIBRARIES])
def test_a_unit_of_the_cache_is_built_again(tmp_path: Path, damage: str) -> None:
    """BR-38: the record and the library are checked before anything is mapped, and what does not fit is rebuilt."""
    built = eagle.deploy(models.affine).plugin.bundle.unit("host").folder
    folder = copy_of(eagle.deploy(models.affine), tmp_path / "bundles" / built.name)
    {**RECORDS, **LIBRARIES}[damage](folder)
    ended = run_script(JOB, args=[str(tmp_path), "cache"]).check()
    assert ended.out == "right\n"


@pytest.mark.parametrize("damage", LIBRARIES)
def test_a_unit_from_elsewhere_is_refused(tmp_path: Path, damage: str) -> None:
    """BR-38: there is no source to rebuild it from, so the error names the file; the process goes on."""
    folder = copy_of(eagle.deploy(models.affine), tmp_path / "unit")
    LIBRARIES[damage](folder)
    ended = run_script(JOB, args=[str(folder), "unit"]).check()
    assert ended.out == "refused True\n"
