"""A script in a process of its own: for exit behaviour, import cost, forks and anything that might crash."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PROJECT = pathlib.Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How the child ended: its exit status (negative: the signal that killed it) and what it printed."""

    status: int
    out: str
    err: str

    def check(self) -> Ended:
        """Fail unless the child exited 0 and wrote nothing to standard error."""
        assert (self.status, self.err) == (0, ""), f"status {self.status}\n{self.out}\n{self.err}"
        return self


def run_script(
    source: str,
    *,
    args: Sequence[str] = (),
    flags: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    limit_s: float = 120.0,
    meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
    stderr: int = subprocess.PIPE,
) -> Ended:
    """Write `source` (dedented) to a file and run it with this Python, eagle importable, warnings shown.

    Args:
        source: The script; a real file, so that kernels defined in it can be read back.
        args: Its command line.
        flags: Options of the interpreter itself, such as ``-X importtime``.
        env: Changes to the environment; None removes a variable.
        limit_s: The child is killed and the test fails with TimeoutExpired after this many seconds.
        meanwhile: Called once with the running process, to talk to it or to kill it.
        stderr: Where standard error goes, as in subprocess.

    Returns:
        How it ended. A child is never left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "script.py"
        script.write_text(textwrap.dedent(source), encoding="utf-8")
        return run_command(
            [sys.executable, *flags, str(script), *args],
            env=env,
            limit_s=limit_s,
            meanwhile=meanwhile,
            stderr=stderr,
            folder=folder,
        )


def run_command(
    command: Sequence[str],
    *,
    env: Mapping[str, str | None] | None = None,
    limit_s: float = 120.0,
    meanwhile: Callable[[subprocess.Popen[str]], None] | None = None,
    stderr: int = subprocess.PIPE,
    folder: str | None = None,
) -> Ended:
    """Run any command as `run_script` runs its script."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=folder, env=_environment(env)
    ) as process:
        try:
            if meanwhile is not None:
                meanwhile(process)
            out, err = process.communicate(timeout=limit_s)
        except BaseException:
            process.kill()
            raise
    return Ended(process.returncode, out, err or "")


def _environment(changes: Mapping[str, str | None] | None) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    merged: dict[str, str | None] = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(changes or {})}
    return {name: value for name, value in merged.items() if value is not None}
