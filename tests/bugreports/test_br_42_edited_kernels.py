"""BR-42: a kernel that was edited is another kernel, whatever it is called and wherever it was built."""

from __future__ import annotations

import linecache
import os
import random
import shutil
from typing import TYPE_CHECKING, Any

import hawk
import pytest

import eagle

if TYPE_CHECKING:
    from pathlib import Path
    from types import CodeType

BODY = """
import hawk
from hawk import Scalar

@hawk.kernel
def shift(x: Scalar) -> Scalar:
    return x + {constant}
"""


# hawk 0.7.1 knows a function by the address of its code, so code that is gone must not lend its address to another.
_kept: list[CodeType] = []


def edited(folder: Path, constant: float) -> Any:
    """The kernel of a module whose file was rewritten, as a notebook or a reload gives it."""
    path = folder / "edited_module.py"
    path.write_text(BODY.format(constant=constant))
    stamp = 1_700_000_000 + 10 * len(_kept)  # hawk reads the source as tracebacks do, and asks for the time of the file
    os.utime(path, (stamp, stamp))
    linecache.checkcache(str(path))
    namespace: dict[str, Any] = {"__name__": "edited_module"}
    code = compile(path.read_text(), str(path), "exec")
    exec(code, namespace)
    _kept.append(code)
    return namespace["shift"]


def test_the_new_body_is_the_new_answer_and_the_old_plan_keeps_its_own(tmp_path: Path) -> None:
    """BR-42: in one process and one cache folder."""
    cache = tmp_path / "cache"
    first = eagle.deploy(edited(tmp_path, 1.0), cache_dir=cache)
    assert first(0.0) == 1.0
    second = eagle.deploy(edited(tmp_path, 2.0), cache_dir=cache)
    assert (second(0.0), first(0.0)) == (2.0, 1.0)


def test_many_bodies_of_one_name(tmp_path: Path) -> None:
    """BR-42: each keeps its own answer, in any order."""
    plans = {}
    for constant in range(6):
        plans[constant] = eagle.deploy(edited(tmp_path, float(constant)), cache_dir=tmp_path / "cache")
        assert plans[constant](0.5) == constant + 0.5
    order = list(plans) * 3
    random.Random(42).shuffle(order)
    assert [plans[constant](0.0) for constant in order] == order


def test_a_unit_that_is_rebuilt_in_place(tmp_path: Path) -> None:
    """BR-42: the loader's cache of paths gives nobody the old library; the first plan keeps its code."""
    folder = tmp_path / "unit"
    hawk.build([edited(tmp_path, 3.0)], folder, targets=("host",))
    first = eagle.deploy(folder)
    assert first(x=0.0) == 3.0
    shutil.rmtree(folder)
    hawk.build([edited(tmp_path, 4.0)], folder, targets=("host",))
    second = eagle.deploy(folder)
    assert (second(x=0.0), first(x=0.0)) == (4.0, 3.0)


def test_a_unit_built_over_another_is_right_or_refused(tmp_path: Path) -> None:
    """BR-42: two different units into one folder, without clearing it."""
    folder = tmp_path / "unit"
    hawk.build([edited(tmp_path, 5.0)], folder, targets=("host",))
    first = eagle.deploy(folder)
    assert first(x=0.0) == 5.0
    hawk.build([edited(tmp_path, 6.0)], folder, targets=("host",))
    try:
        got = eagle.deploy(folder)(x=0.0)
    except eagle.ArtifactError:
        got = 6.0
    assert (got, first(x=0.0)) == (6.0, 5.0)


def test_an_artifact_that_changes_under_a_plan_that_was_not_used_yet(tmp_path: Path) -> None:
    """BR-42: what is mapped is what was checked: the unit was read before its folder was rebuilt."""
    folder = tmp_path / "unit"
    hawk.build([edited(tmp_path, 7.0)], folder, targets=("host",))
    plan = eagle.deploy(folder)
    shutil.rmtree(folder)
    hawk.build([edited(tmp_path, 8.0)], folder, targets=("host",))
    with pytest.raises(eagle.ArtifactError, match="changed"):
        plan(x=0.0)
