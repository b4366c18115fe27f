"""The benchmark of many runs at once still runs; what it measures decides nothing."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.child import PROJECT, run_command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hawk") is None, reason="hawk is not installed")
SMALL = ["--count", "3", "--n", "100", "--requests", "70", "--request-n", "10"]
SIMULATIONS = {"after", "gather uvloop", "gather asyncio", "merged", "batch", "batch read"}


def figures_of(target: str, folder: Path) -> dict[str, Any]:
    file, script = folder / "figures.json", str(PROJECT / "benchmarks" / "many.py")
    ended = run_command([sys.executable, script, "--target", target, *SMALL, "--json", str(file)], limit_s=300)
    assert ended.status == 0, ended.err
    figures: dict[str, Any] = json.loads(file.read_text())
    assert figures["missing"] == []
    return figures


def test_a_small_table(tmp_path: Path) -> None:
    figures = figures_of("host", tmp_path)["host"]
    assert figures["simulations"].keys() >= SIMULATIONS
    assert {len(times) for times in figures["simulations"].values()} == {10}
    assert figures["requests"].keys() >= {"batch", "batch read"}
    assert figures["per_request"].keys() == {"wall", "cpu"}


@pytest.mark.gpu
def test_the_device_side_of_it(tmp_path: Path) -> None:
    figures = figures_of("cuda", tmp_path)["cuda"]
    assert figures["simulations"].keys() >= {*SIMULATIONS, "batch asyncio", "batch default", "batch numpy"}
    assert figures["requests"].keys() >= {"batch", "batch numpy", "batch numpy read"}
