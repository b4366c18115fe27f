"""The benchmark of awaiting still runs; what it measures decides nothing here."""

from __future__ import annotations

import sys

from tests.helpers.child import PROJECT, run_command


def test_a_quick_table() -> None:
    script = str(PROJECT / "benchmarks" / "await.py")
    ended = run_command([sys.executable, script, "--target", "host", "--rounds", "20", "--quick"]).check()
    for group in ("short", "1 ms", "heartbeat", "in flight", "overlap of 8", "overlap of 64", "pending"):
        assert any(line.startswith(group) for line in ended.out.splitlines()), group
    assert "await pipeline.enqueue()" in ended.out
