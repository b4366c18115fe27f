"""BR-37: many processes on a cold cache. All succeed, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.helpers.child import PROJECT

if TYPE_CHECKING:
    import pathlib

PROCESSES = int(os.environ.get("EAGLE_TEST_PROCESSES", "4"))
ROUNDS = int(os.environ.get("EAGLE_TEST_ROUNDS", "1"))

SCRIPT = textwrap.dedent("""
    import os, pathlib, sys, time
    import numpy as np
    import eagle.sync as eagle
    from tests.helpers.models import climb, climb_planes

    cache, gate = sys.argv[1], pathlib.Path(sys.argv[2])
    (gate / str(os.getpid())).touch()
    while not (gate / "go").exists():
        time.sleep(0.0005)
    planes = climb_planes(300)
    runner = eagle.until_done(eagle.deploy(climb, targets=["host"], cache_dir=cache), max_steps=1000, **planes)
    assert runner.run().done and np.array_equal(planes["c"], planes["goal"])
""")


def one_round(folder: pathlib.Path, cache: pathlib.Path, processes: int) -> None:
    gate = folder / "gate"
    gate.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)}
    command = [sys.executable, str(script), str(cache), str(gate)]
    children = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    try:
        while len(list(gate.iterdir())) < processes:
            assert all(child.poll() is None for child in children)
        (gate / "go").touch()
        ends = [child.communicate(timeout=240) for child in children]
    except BaseException:
        for child in children:
            child.kill()
        raise
    assert [(child.returncode, *end) for child, end in zip(children, ends, strict=True)] == [(0, "", "")] * processes


@pytest.mark.parametrize("state", ["cold", "damaged"])
def test_all_succeed_and_nothing_is_left(tmp_path: pathlib.Path, state: str) -> None:
    """BR-37: one unit in the store, no private folder, no lock file, no copy of a library in the temporary folder."""
    cache = tmp_path / "cache"
    for number in range(ROUNDS):
        folder = tmp_path / f"round{number}"
        folder.mkdir()
        if state == "damaged":
            one_round(folder, cache, 1)
            for library in (cache / "bundles").glob("*/*.so"):
                library.write_bytes(library.read_bytes()[:1000])
            folder = tmp_path / f"again{number}"
            folder.mkdir()
        one_round(folder, cache, PROCESSES)
        (unit,) = (cache / "bundles").iterdir()
        assert {path.name for path in unit.iterdir()} >= {"climb.so", "climb.json", ".hawk_unit", ".eagle_unit"}
        assert sorted(path.name for path in cache.iterdir()) == ["bundles"]
        assert sorted(path.name for path in folder.iterdir()) == ["gate", "script.py"]
        for path in unit.iterdir():
            path.unlink()
        unit.rmdir()
