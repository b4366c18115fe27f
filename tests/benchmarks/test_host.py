"""The benchmark of whole runs still runs; what it measures decides nothing here."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.helpers.child import PROJECT, run_command

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hawk") is None, reason="hawk is not installed")


def test_a_small_table() -> None:
    ended = run_command(
        [sys.executable, str(PROJECT / "benchmarks" / "host.py"), "--n", "200", "--seconds", "0.05", "--threads", "1"]
    ).check()
    rows = [line.split() for line in ended.out.splitlines() if line.split()[:1] == ["200"]]
    assert [row[1] for row in rows] == ["spread", "uniform"]
    assert all(float(word) > 0 for row in rows for word in row[2:4])
    assert "simulate() of one sample" in ended.out
