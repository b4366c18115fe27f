from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle.aio import tracing
from tests.helpers.child import run_script

if TYPE_CHECKING:
    import pathlib
    import subprocess


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "run.json"


def events_of(path: pathlib.Path, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == phase]


def tracks_of(path: pathlib.Path) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events_of(path, "M") if event["name"] == "thread_name"}


def record(name: str = "replay", track: str = "stream 1", length_ns: int = 1000, **args: object) -> None:
    start = tracing.now_ns()
    tracing.span(track, name, start, start + length_ns, **args)


def test_nothing_is_recorded_while_no_trace_is_on() -> None:
    assert tracing.active == ()
    record()
    with tracing.block("stream 1", "issue"), tracing.timed("stream 1", "run"):
        pass
    assert tracing.timed("a", "b") is tracing.block("c", "d")  # no object is made for it


def test_an_empty_trace_is_valid(path: pathlib.Path) -> None:
    with tracing.trace(path):
        assert len(tracing.active) == 1
    assert tracing.active == ()
    assert all("ph" in event for event in json.loads(path.read_text()))


def test_spans_hold_track_time_and_details(path: pathlib.Path) -> None:
    with tracing.trace(str(path)) as recorder:
        record("replay", "stream 1", 2500, pipeline="p", n=np.int64(3), task="main")
        record("wait", "stream 2")
        recorder.span("mine", "step", tracing.now_ns(), tracing.now_ns() + 5, name="free", track="free")
    replay, wait, mine = events_of(path)
    assert (replay["name"], replay["dur"]) == ("replay", 2.5)
    assert replay["args"] == {"pipeline": "p", "n": 3, "task": "main"}
    assert mine["args"] == {"name": "free", "track": "free"}
    names = tracks_of(path)
    assert [names[event["tid"]] for event in (replay, wait, mine)] == ["stream 1", "stream 2", "mine"]
    assert replay["pid"] == os.getpid()
    assert replay["ts"] >= 0


def test_a_span_from_before_the_trace_is_cut_off(path: pathlib.Path) -> None:
    before = tracing.now_ns()
    with tracing.trace(path):
        tracing.span("s", "old", before, tracing.now_ns())
        tracing.span("s", "older", before - 10**9, before)
    assert [event["ts"] for event in events_of(path)] == [0.0, 0.0]
    assert all(event["dur"] >= 0 for event in events_of(path))


@pytest.mark.parametrize(
    "odd", [float("nan"), float("inf"), object(), [1], b"x", "\ud800", 2**80, None, np.float64("inf")]
)
def test_odd_details_stay_valid_json(path: pathlib.Path, odd: object) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with tracing.trace(path):
        record(odd=odd)
    json.loads(path.read_text(), parse_constant=refuse)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=40))
def test_no_lane_holds_spans_that_overlap_in_part(times: list[tuple[int, int]]) -> None:
    lanes: list[tracing._Lane] = []
    placed: dict[int, list[tuple[int, int]]] = {}
    for start, length in times:
        span = (start, start + length)
        lane = next((lane for lane in lanes if lane.takes(*span)), None)
        if lane is None:
            lane = tracing._Lane(len(lanes))
            lanes.append(lane)
            assert lane.takes(*span)
        placed.setdefault(lane.tid, []).append(span)
    for spans in placed.values():
        for (a0, a1), (b0, b1) in itertools.combinations(sorted(spans, key=lambda s: (s[0], -s[1])), 2):
            assert b0 >= a1 or b1 <= a1, (a0, a1, b0, b1)


def test_overlapping_waits_go_to_further_lanes_of_their_track(path: pathlib.Path) -> None:
    with tracing.trace(path):
        now = tracing.now_ns()
        for k in range(3):
            tracing.span("queue", "wait", now + k, now + 100 + k)
        tracing.span("queue", "wait", now + 500, now + 600)
    names = tracks_of(path)
    lanes = [names[event["tid"]] for event in events_of(path)]
    assert lanes == ["queue", "queue (2)", "queue (3)", "queue"]


def test_nested_spans_share_a_lane(path: pathlib.Path) -> None:
    with tracing.trace(path):
        now = tracing.now_ns()
        for start, end in ((0, 10), (10, 20), (0, 20), (0, 20), (30, 40), (0, 50)):
            tracing.span("stream", "slice", now + start, now + end)
    assert list(tracks_of(path).values()) == ["stream"]


def test_spans_of_many_threads_are_all_there(path: pathlib.Path) -> None:
    def work(track: str) -> None:
        for k in range(200):
            record("replay", track, k=k)

    with tracing.trace(path):
        threads = [threading.Thread(target=work, args=(f"stream {k}",)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(events_of(path)) == 1200


def test_traces_may_nest(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    inner = tmp_path / "inner.json"
    with tracing.trace(path):
        record("outer")
        with tracing.trace(inner):
            record("both")
        record("outer again")
    assert [event["name"] for event in events_of(path)] == ["outer", "both", "outer again"]
    assert [event["name"] for event in events_of(inner)] == ["both"]


def test_a_trace_that_cannot_be_opened_begins_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError), tracing.trace(tmp_path / "missing" / "run.json"):
        raise AssertionError("the block must not begin")
    assert tracing.active == ()


def test_a_block_that_raises_still_ends_the_file(path: pathlib.Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught, tracing.trace(path):
        record()
        _ = 1 / 0
    assert len(events_of(path)) == 1
    assert not hasattr(caught.value, "__notes__")


class FullDisk:
    """A file that takes so many writes and no more."""

    def __init__(self, file: Any, writes: int) -> None:
        self.file, self.left = file, writes

    def write(self, data: bytes) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= 1
        return int(self.file.write(data))

    def close(self) -> None:
        self.file.close()


@pytest.mark.parametrize("writes", [0, 1])
def test_a_full_disk_does_not_reach_the_work(path: pathlib.Path, writes: int) -> None:
    after = []
    with pytest.raises(OSError, match="No space left"), tracing.trace(path) as recorder:
        recorder._file = FullDisk(recorder._file, writes)
        for _ in range(3):
            record()
        after.append("went on")
    assert after == ["went on"]
    assert tracing.active == ()


def test_a_failing_block_keeps_its_exception_beside_a_full_disk(path: pathlib.Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught, tracing.trace(path) as recorder:
        recorder._file = FullDisk(recorder._file, 0)
        record()
        _ = 1 / 0
    assert "No space left" in caught.value.__notes__[0]


def test_a_detail_whose_repr_raises_does_not_reach_the_work(path: pathlib.Path) -> None:
    class Rude:
        def __repr__(self) -> str:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"), tracing.trace(path):
        record(rude=Rude())
        record()


def test_a_span_after_the_end_is_dropped(path: pathlib.Path) -> None:
    with tracing.trace(path) as recorder:
        pass
    recorder.span("s", "late", 0, 1)
    assert recorder.close() is None
    assert events_of(path) == []


async def test_task_names(path: pathlib.Path) -> None:
    names = []

    async def work() -> None:
        names.append(tracing.task_name())

    async with anyio.create_task_group() as group:
        group.start_soon(work, name="sweep 7")
    assert names == ["sweep 7"]


async def test_a_timed_block_may_await_and_names_its_task(path: pathlib.Path) -> None:
    begun: list[int] = []
    left = [anyio.Event() for _ in range(4)]
    together = anyio.Event()

    async def work(k: int) -> None:
        with tracing.timed("host", "run", k=k):
            before = begun.copy()
            begun.append(k)
            if len(begun) == 3:
                together.set()
            await together.wait()
            for earlier in before:  # who began first leaves first, so that no span lies within another
                await left[earlier].wait()
            await anyio.sleep(0.001)
        left[k].set()

    with tracing.trace(path):
        async with anyio.create_task_group() as group:
            for k in range(3):
                group.start_soon(work, k, name=f"study {k}")
        with anyio.move_on_after(0):
            await work(3)
    events = {event["args"]["k"]: event["args"] for event in events_of(path)}
    assert [events[k]["task"] for k in range(3)] == ["study 0", "study 1", "study 2"]
    assert events[3]["error"] in ("CancelledError", "Cancelled")
    assert len({event["tid"] for event in events_of(path)}) >= 2  # they overlapped, so they have lanes of their own


def test_the_thread_names_what_no_task_does() -> None:
    names: list[str] = []
    thread = threading.Thread(target=lambda: names.append(tracing.task_name()), name="team-3")
    thread.start()
    thread.join()
    assert names == ["team-3"]


class Nvtx(types.SimpleNamespace):
    """CuPy's NVTX module, noting what it is told."""

    def __init__(self) -> None:
        super().__init__(said=[])

    def RangePush(self, text: str) -> None:
        self.said.append(text)

    def RangePop(self) -> None:
        self.said.append("pop")


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Nvtx:
    module = Nvtx()
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(nvtx=module))
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    return module


def test_a_block_is_an_nvtx_range_when_a_profiler_asks(nvtx: Nvtx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_NVTX_WANTED", True)
    with pytest.raises(ZeroDivisionError), tracing.block("stream 1", "issue"):
        _ = 1 / 0
    assert nvtx.said == ["stream 1: issue", "pop"]


def test_a_block_is_no_nvtx_range_otherwise(nvtx: Nvtx, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_NVTX_WANTED", False)
    with tracing.trace(path), tracing.block("stream 1", "issue", k=1):
        pass
    assert nvtx.said == []
    (event,) = events_of(path)
    assert (event["name"], event["args"]["k"]) == ("issue", 1)


def test_nvtx_needs_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_NVTX_WANTED", True)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with tracing.block("stream 1", "issue"):
        pass
    assert "cupy" not in sys.modules


@pytest.mark.parametrize(
    ("variables", "asks"),
    [
        ({}, False),
        ({"EAGLE_NVTX": "1"}, True),
        ({"NVTX_INJECTION64_PATH": "x"}, True),
        ({"NSYS_PROFILING_SESSION_ID": "7"}, True),
        ({"EAGLE_NVTX": "0", "NSYS_PROFILING_SESSION_ID": "7"}, False),
    ],
)
def test_who_counts_as_a_profiler(variables: dict[str, str], asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EAGLE_NVTX", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tracing._profiler_asks() is asks


def test_a_process_that_is_killed_leaves_a_valid_trace(path: pathlib.Path) -> None:
    def kill(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()

    ended = run_script(
        """
        import sys, time
        from eagle.aio import tracing
        with tracing.trace(sys.argv[1]):
            for k in range(1000):
                tracing.span("stream 1", "replay", tracing.now_ns(), tracing.now_ns(), k=k)
            print("recorded")
            time.sleep(60)
        """,
        args=[str(path)],
        meanwhile=kill,
    )
    assert ended.status == -signal.SIGKILL
    # The array lacks its bracket, as the format allows; nothing else is missing.
    events = json.loads(path.read_text() + "]")
    assert [event["args"]["k"] for event in events if event["ph"] == "X"] == list(range(1000))


def test_an_exit_in_the_block_ends_the_file(path: pathlib.Path) -> None:
    ended = run_script(
        """
        import sys
        from eagle.aio import tracing
        with tracing.trace(sys.argv[1]):
            tracing.span("stream 1", "replay", 0, 1)
            sys.exit(3)
        """,
        args=[str(path)],
    )
    assert (ended.status, ended.err) == (3, "")
    assert len(events_of(path)) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_leaves_the_file_alone(path: pathlib.Path) -> None:
    run_script(
        """
        import os, sys
        from eagle.aio import tracing
        child = None
        try:
            with tracing.trace(sys.argv[1]):
                tracing.span("s", "parent", 0, 1)
                child = os.fork()
                if child == 0:
                    tracing.span("s", "child", 0, 1)
                    raise KeyboardInterrupt  # leaves the block in the child
                os.waitpid(child, 0)
                tracing.span("s", "parent", 2, 3)
        except KeyboardInterrupt:
            os._exit(0)
        """,
        args=[str(path)],
    ).check()
    assert [event["name"] for event in events_of(path)] == ["parent", "parent"]


@pytest.mark.parametrize("path", [1, None, b"x"])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(TypeError, match="path"), tracing.trace(path):
        pass
