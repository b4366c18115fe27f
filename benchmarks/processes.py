"""Worker processes of the benchmarks: each engine has one of its own, and answers one call a line, as JSON.

raptor-eagle is imported as ``eagle``, too, so it can only be measured beside eagle from a process of its own. The
processes take turns, so whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
_LIMIT_S = 300.0  # a call that takes longer has hung


class Failed(Exception):
    """A worker could not do what it was asked; the text says why."""


class Process:
    """A worker, seen from the outside. It starts at once; the first `ask` waits for it.

    Args:
        script: The benchmark, which is started again as the worker.
        name: What the worker is to be.
        options: More of its command line.
        python: Interpreter; None is this one.
        path: PYTHONPATH; None is ours, with the project in front.
    """

    def __init__(
        self, script: str, name: str, *options: str, python: str | None = None, path: str | None = None
    ) -> None:
        self.name = name
        if path is None:
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._process = subprocess.Popen(
            [python or sys.executable, script, "--worker", name, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd="/",
        )

    def send(self, do: str, **given: Any) -> None:
        """Begin a call; `answer` waits for it. One call at a time."""
        self._process.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return what the call returned.

        Raises:
            Failed: The call raised, or the worker ended.
        """
        watchdog = threading.Timer(_LIMIT_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise Failed(f"the process of {self.name} ended; what it said is above")
        told = json.loads(line)
        if "error" in told:
            raise Failed(told["error"])
        return told["value"]

    def ask(self, do: str, **given: Any) -> Any:
        """Call a method of the worker by its name and return what it returns."""
        try:
            self.send(do, **given)
        except OSError:
            raise Failed(f"the process of {self.name} ended; what it said is above") from None
        return self.answer()

    def close(self) -> None:
        """End it."""
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()


def peer(script: str, where: str, *options: str) -> Process:
    """A worker that has raptor-eagle.

    Args:
        script: The benchmark.
        where: A folder that it was installed into (``pip install --target``), or an interpreter that has it.
        *options: More of its command line.
    """
    if not os.path.isdir(where):
        return Process(script, "peer", *options, python=where, path="")
    others = [
        entry
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if entry and not os.path.exists(os.path.join(entry, "eagle", "__init__.py"))
    ]
    return Process(script, "peer", *options, path=os.pathsep.join([os.path.abspath(where), *others]))


def serve(make: Callable[[], Any]) -> None:
    """Answer calls until the other side closes the line.

    Args:
        make: Makes the worker, at the first call. Its public methods may be called; what they return must be JSON.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not meet the answers
    worker = None
    for line in sys.stdin:
        call = json.loads(line)
        try:
            worker = worker or make()
            told = {"value": getattr(worker, call.pop("do"))(**call)}
        except Exception as error:  # an answer as well
            if os.environ.get("BENCHMARK_TRACEBACKS"):
                traceback.print_exc()
            told = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        out.write(json.dumps(told) + "\n")
        out.flush()
