"""The benchmark of device runs still runs, here over NumPy planes; what it measures decides nothing."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.helpers.child import PROJECT, run_command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hawk") is None, reason="hawk is not installed")
SCRIPT = str(PROJECT / "benchmarks" / "device.py")


def test_a_small_table(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    small = ["--n", "100", "--long-n", "100", "--long-steps", "200", "--cases", "RK4", "--json", str(file)]
    ended = run_command([sys.executable, SCRIPT, "--target", "host", "--quick", *small]).check()
    figures = json.loads(file.read_text())
    assert figures["missing"] == []
    assert [(cell["n"], cell["spread"]) for cell in figures["cells"]] == [(100, True), (100, False)]
    for cell in figures["cells"]:
        assert {column: len(runs) for column, runs in cell["runs"].items()} == dict.fromkeys(
            ("blocking", "asyncio", "uvloop"), 20
        )
        assert cell["checks"]["eagle"]["longest"] <= 1000
    assert len(figures["order"]) == 5
    assert figures["watched"]["seen"] >= 1
    assert "spread steps, in which order" in ended.out


@pytest.mark.gpu
def test_the_device_side_of_it(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    small = ["--n", "1000", "--long-n", "1000", "--long-steps", "2000", "--cases", "RK4", "--json", str(file)]
    ended = run_command([sys.executable, SCRIPT, "--quick", *small], limit_s=300)
    assert ended.status == 0, ended.err
    figures = json.loads(file.read_text())
    assert figures["missing"] == []
    for cell in figures["cells"]:
        assert set(cell["s"]) == {"blocking", "asyncio", "uvloop", "kernel"}
        assert cell["floor"]["s"] > 0
    assert figures["memory"]["pool_used"] > 1
