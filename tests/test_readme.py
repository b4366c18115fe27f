"""README.md keeps its word: the two commands are there, and every Python block runs as printed.

A block whose first line names a file (``# coffee.py``) is that file and is run as a script; where a text block follows,
it is what the script prints. The other blocks are one session after another in one event loop, as in a notebook.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.child import PROJECT, run_command, run_script

README = (PROJECT / "README.md").read_text(encoding="utf-8")
needs_hawk = pytest.mark.skipif(importlib.util.find_spec("hawk") is None, reason="hawk is not installed")


@dataclass(frozen=True)
class Block:
    """One Python block, and the text block right behind it (or None)."""

    line: int
    code: str
    prints: str | None

    @property
    def file(self) -> str | None:
        named = re.match(r"# (\w+\.py)\n", self.code)
        return named[1] if named else None


def python_blocks() -> list[Block]:
    found = re.finditer(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", README, re.MULTILINE | re.DOTALL)
    return [Block(README.count("\n", 0, match.start()) + 2, match[1], match[2]) for match in found]


BLOCKS = python_blocks()
FILES = [block for block in BLOCKS if block.file]
SESSION = [block for block in BLOCKS if not block.file]

# Runs blocks given as files, in one namespace and one event loop; the blocks' own line numbers are README's.
SESSION_RUNNER = """
    import ast, asyncio, inspect, pathlib, sys

    async def session(folder):
        names = {"__name__": "__main__"}
        for block in sorted(pathlib.Path(folder).glob("block_*.py")):
            code = compile(block.read_text(), str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            print("##", block.name, flush=True)
            made = eval(code, names)
            if inspect.iscoroutine(made):
                await made

    sys.path.insert(0, sys.argv[1])
    asyncio.run(session(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds the files README tells its readers to save."""
    for block in FILES:
        (tmp_path / str(block.file)).write_text(block.code, encoding="utf-8")
    return tmp_path


def test_the_two_commands_are_on_the_first_screen() -> None:
    top = README.split("\n## ")[0]
    assert re.search(r'^pip install -e "\.\[hawk\]" && python examples/oscillators\.py\b', top, re.MULTILINE)
    assert re.search(r'^pip install -e "\.\[test\]" && python -m pytest\b', top, re.MULTILINE)
    assert "ziglang" in top


def test_there_are_blocks_to_run() -> None:
    assert "coffee.py" in {block.file for block in FILES}
    assert len(SESSION) >= 5
    assert README.count("```python") == len(BLOCKS)


@needs_hawk
@pytest.mark.parametrize("block", FILES, ids=lambda block: block.file)
def test_a_file_runs_as_printed(block: Block, folder: Path) -> None:
    ended = run_command([sys.executable, str(folder / str(block.file))], folder=str(folder)).check()
    assert ended.out.strip()
    if block.prints is not None:
        assert ended.out == block.prints


@needs_hawk
def test_the_session_runs_as_printed(folder: Path) -> None:
    for number, block in enumerate(SESSION):
        code = "\n" * (block.line - 1) + block.code
        (folder / f"block_{number:03}.py").write_text(code, encoding="utf-8")
    ended = run_script(SESSION_RUNNER, args=[str(folder)]).check()
    printed = ended.out.split("## ")[1:]
    assert len(printed) == len(SESSION)
    for block, out in zip(SESSION, printed, strict=True):
        if block.prints is not None:
            assert out.partition("\n")[2] == block.prints


def test_the_files_it_names_exist() -> None:
    for path in set(re.findall(r"\b(?:examples|benchmarks|docs|scripts)/[\w./]*\w", README)):
        if path not in re.sub(r"<!--.*?-->", "", README, flags=re.DOTALL):
            continue  # announced in a comment only
        assert (PROJECT / path).exists(), path


def test_the_picture_shows_the_pipeline_that_stands_beside_it() -> None:
    picture = (PROJECT / "docs" / "tray.svg").read_text(encoding="utf-8")
    for member in ("cool", "mean", "hottest", "refill"):
        assert f"member '{member}'" in picture.replace("&#39;", "'").replace("&#45;", "-")


def test_names_of_the_api_are_real() -> None:
    import eagle
    import eagle.aio

    for name in set(re.findall(r"\beagle\.(\w+)", README)) - {"py", "sync", "aio"}:
        assert hasattr(eagle, name), name
    for name in set(re.findall(r"\beagle\.aio\.(\w+)", README)):
        assert hasattr(eagle.aio, name), name
