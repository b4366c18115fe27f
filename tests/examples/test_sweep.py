"""The sweep, overlapped and one after another: the same figures, a bar and a map."""

from __future__ import annotations

import importlib.util
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.helpers.child import PROJECT, Ended, run_command

if TYPE_CHECKING:
    import pathlib
    import subprocess

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hawk") is None, reason="hawk is not installed")


def example(name: str, *args: object) -> Ended:
    return run_command([sys.executable, str(PROJECT / "examples" / name), *map(str, args)])


def figures(ended: Ended) -> list[str]:
    assert ended.status == 0, ended
    return [line for line in ended.out.splitlines() if "stay" in line]


def test_overlapped_and_blocking_agree() -> None:
    overlapped = example("sweep.py", "--configurations", 40, "--starts", 32)
    blocking = example("blocking.py", "--configurations", 40, "--starts", 32)
    assert len(figures(overlapped)) == 2
    assert figures(overlapped) == figures(blocking)
    for ended in (overlapped, blocking):
        assert "40 of 40 configurations" in ended.err.splitlines()[-1]


@pytest.mark.parametrize("name", ["sweep.py", "blocking.py"])
def test_the_map(name: str, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "map.png"
    figures(example(name, "--configurations", 12, "--starts", 16, "--plot", picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_one_configuration_is_a_sweep() -> None:
    assert "1 configurations" in example("sweep.py", "--configurations", 1, "--starts", 1).out


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ there")
def test_ctrl_c_leaves_without_a_traceback() -> None:
    def interrupt(process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        assert "configurations" in process.stderr.readline()  # the first tenth is done
        process.send_signal(signal.SIGINT)

    ended = run_command(
        [sys.executable, str(PROJECT / "examples" / "blocking.py"), "--starts", "4096"], meanwhile=interrupt
    )
    assert ended.status == 1
    assert "stopped by Ctrl-C after" in ended.err
    assert "Traceback" not in ended.err
