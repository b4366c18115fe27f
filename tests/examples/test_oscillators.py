"""The main job as a user types it, with few samples."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.helpers.child import PROJECT, Ended, run_command

if TYPE_CHECKING:
    import pathlib

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hawk") is None, reason="hawk is not installed")


def oscillators(*args: object, **env: str) -> Ended:
    return run_command([sys.executable, str(PROJECT / "examples" / "oscillators.py"), *map(str, args)], env=env)


def test_the_summary_and_the_progress_line() -> None:
    ended = oscillators("--n", 2_000)
    assert ended.status == 0, ended
    assert "2,000 of 2,000" in ended.out
    assert "against the closed form" in ended.out
    last = ended.err.splitlines()[-1]
    assert "2,000 of 2,000 samples finished (100 %)" in last
    assert "steps, ETA 0.0 s" in last


def test_the_answer_is_right() -> None:
    ended = oscillators("--n", "5_000")
    error = next(line for line in ended.out.splitlines() if "largest error" in line)
    assert float(error.split()[2]) < 1e-6


def test_the_plot(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "stops.png"
    ended = oscillators("--n", 1_000, "--plot", picture)
    assert ended.status == 0, ended
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec("ziglang"):
        pytest.skip("the ziglang wheel is a compiler")
    ended = oscillators("--n", 10, PATH=os.fspath(tmp_path), HAWK_CACHE_DIR=os.fspath(tmp_path), HAWK_CXX="", CXX="")
    assert ended.status == 1
    assert "install g++" in ended.err
    assert "pip install ziglang" in ended.err
    assert "Traceback" not in ended.err


def test_a_batch_of_nothing_is_refused() -> None:
    ended = oscillators("--n", 0)
    assert ended.status == 2
    assert "give at least 1" in ended.err
