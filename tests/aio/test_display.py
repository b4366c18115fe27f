from __future__ import annotations

import io
import os
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from eagle.aio import display as display_module
from eagle.aio.display import Display
from eagle.aio.progress import Progress
from tests.helpers.child import run_script
from tests.helpers.streams import Rude

if TYPE_CHECKING:
    from collections.abc import Callable

HALF = Progress(10, 5, 2**33, 1.0, 5.0, 1.0)
FULL = Progress(10, 10, 2**34, 2.0, 5.0, 0.0)


class Terminal(io.StringIO):
    """A stream that calls itself a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(params=["tqdm", "plain"])
def face(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With tqdm, and as if it were not installed."""
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "tqdm", None)
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw every value: the rate of drawing has a test of its own."""
    monkeypatch.setattr(display_module, "_TERMINAL_S", 0.0)
    monkeypatch.setattr(display_module, "_LOG_S", 0.0)


def run(shown: Display) -> None:
    """What a run does with its display."""
    for value in (Progress(10, 0, 0, 0.0, 0.0, float("inf")), HALF, FULL):
        shown.show(value)
    shown.close(FULL)
    shown.close()
    shown.show(FULL)


def test_a_terminal_gets_a_bar(face: str) -> None:
    stream = Terminal()
    run(Display("oscillators", stream))
    drawn = stream.getvalue()
    assert "oscillators" in drawn
    assert f"{2**34:,} steps" in drawn
    assert drawn.count("\n") == 1
    assert drawn.endswith("\n")
    assert ("10/10" if face == "tqdm" else "10 of 10 samples finished (100 %)") in drawn


def test_a_log_gets_whole_lines() -> None:
    stream = io.StringIO()
    run(Display("oscillators", stream))
    lines = stream.getvalue().splitlines()
    assert lines[-1].startswith("oscillators: 10 of 10 samples finished (100 %)")
    assert "\r" not in stream.getvalue()
    assert "inf" not in stream.getvalue()


def test_drawing_is_not_more_frequent_than_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display_module, "_TERMINAL_S", 3600.0)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    stream = Terminal()
    shown = Display(stream=stream)
    for _ in range(100):
        shown.show(HALF)
    shown.close(FULL)
    assert stream.getvalue().count("\r") == 2  # the first and the last


@pytest.mark.parametrize("good", [0, 1, 2, 3])
@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("closed"), UnicodeError(), RuntimeError("rude")])
def test_a_write_that_raises_switches_it_off(face: str, good: int, error: Exception, silence: list[object]) -> None:
    stream = Rude(good, error)
    run(Display(stream=stream))
    assert stream.calls <= good + 1


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [closed, object, lambda: 3], ids=["closed", "no isatty", "no stream at all"])
def test_a_stream_that_is_none_is_not_drawn_on(make: Callable[[], object], face: str, silence: list[object]) -> None:
    run(Display(stream=make()))


def test_no_standard_error_at_all(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    run(Display())


def test_an_odd_tqdm_gives_way_to_the_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        def __init__(self, **_: object) -> None:
            raise TypeError("unexpected keyword")

    monkeypatch.setattr(display_module, "_quiet_tqdm", lambda: Odd)
    stream = Terminal()
    run(Display(stream=stream))
    assert "10 of 10 samples" in stream.getvalue()


def test_no_thread_is_left(face: str) -> None:
    before = set(threading.enumerate())
    run(Display(stream=Terminal()))
    assert set(threading.enumerate()) == before


def test_an_abandoned_display_says_nothing(face: str, silence: list[object]) -> None:
    Display(stream=Terminal()).show(HALF)


SCRIPT = """
    import sys
    from eagle.aio import display
    from eagle.aio.progress import Progress
    display._TERMINAL_S = display._LOG_S = 0.0
    {before}
    shown = display.Display()
    for finished in range(2001):
        shown.show(Progress(2000, finished, finished, 1.0, 1.0, 1.0))
    shown.close()
    print("right numbers")
"""


@pytest.mark.parametrize(
    "before",
    [
        "sys.stderr.close()",
        "sys.stderr = None",
        "import os; os.close(2)",
        "import types; sys.stderr = types.SimpleNamespace(flush=int, write=len)",
        "sys.stderr = open(sys.argv[0]); sys.stderr.close()",
    ],
)
def test_a_process_with_an_odd_standard_error_ends_well(before: str) -> None:
    ended = run_script(SCRIPT.format(before=before))
    assert (ended.status, ended.out) == (0, "right numbers\n")


def test_a_pipe_whose_reader_left_costs_no_exit_status() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = run_script(SCRIPT.format(before=""), stderr=write)
    finally:
        os.close(write)
    assert (ended.status, ended.out) == (0, "right numbers\n")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes cannot be asked there")
def test_a_reader_that_does_not_read_does_not_stop_the_run() -> None:
    read, write = os.pipe()
    try:
        ended = run_script(SCRIPT.format(before=""), stderr=write, limit_s=60)
    finally:
        os.close(read)
        os.close(write)
    assert (ended.status, ended.out) == (0, "right numbers\n")


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are a POSIX thing")
@pytest.mark.parametrize("before", ["", "sys.modules['tqdm'] = None"], ids=["tqdm", "plain"])
def test_on_a_real_terminal(before: str) -> None:
    import pty

    ours, theirs = pty.openpty()
    drawn = bytearray()

    def read() -> None:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                return
            if not piece:
                return
            drawn.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        ended = run_script(SCRIPT.format(before=before), stderr=theirs)
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    assert (ended.status, ended.out) == (0, "right numbers\n")
    assert b"2000" in drawn or b"2,000" in drawn
