"""A trace of what ran when, in the trace-event format that Perfetto and chrome://tracing read.

While no trace is on, a hook costs one look at a module variable. Callers write one of::

    with tracing.timed("host", "wait", simulation="s"):    # one task, awaiting inside
    with tracing.block("stream 3", "issue"):               # one thread, no await inside; an NVTX range too
    if tracing.active:                                     # what begins here and ends there
        tracing.span("stream 3", "replay", start_ns, tracing.now_ns(), pipeline="p", task=tracing.task_name())

Tracks are named after what they show: one per stream or queue. The span names in use are ``wait`` (in a queue or for
a limiter), ``replay``, ``slice`` and ``batch``. Spans of one track that overlap without nesting (waits in a queue do)
go to further lanes of that track, because the format draws only nested ones.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

__all__ = ("Recorder", "active", "block", "now_ns", "span", "task_name", "timed", "trace")

now_ns = time.perf_counter_ns

# The recorders of every `with trace(...)` block that is open now; empty nearly always.
active: tuple[Recorder, ...] = ()

_switch = threading.Lock()
# How far back a lane remembers its spans. A span that began earlier still is drawn right as long as it contains them.
_REMEMBERED = 64


class Recorder:
    """The file of one trace. Made by `trace`; use `span` to add spans of your own.

    Every event is written whole, by one unbuffered write, so the file is a valid trace whenever the process dies.
    Nothing here raises into the work that is being traced: the first failure ends the recording and is raised where
    the ``with`` block ends.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):  # a number would be a descriptor, and be closed in the end
            raise TypeError(f"a trace's path is {path!r}; give a str or a Path")
        # Reentrant: a finaliser that the garbage collector runs in here may end a span of its own.
        self._lock = threading.RLock()
        self._lanes: dict[str, tuple[int, list[_Lane]]] = {}  # of each track, with its place among the tracks
        self._tids = 0
        self._trouble: Exception | None = None
        self._origin_ns = now_ns()
        self._pid = os.getpid()
        self._file: Any = open(path, "wb", buffering=0)
        start = {"name": "process_name", "ph": "M", "pid": self._pid, "tid": 0, "args": {"name": "eagle"}}
        try:
            self._file.write(b"[\n" + _line(start))
        except BaseException:
            self._file.close()
            raise

    def span(self, track: str, name: str, start_ns: int, end_ns: int, /, **args: object) -> None:
        """Record that `name` ran on `track` from `start_ns` to `end_ns`.

        Args:
            track: The row it is drawn in.
            name: What ran.
            start_ns: Its start, by ``time.perf_counter_ns()``; what began before the trace is cut off at its start.
            end_ns: Its end, by the same clock.
            **args: Details shown when the span is selected; numbers and texts as they are, the rest by its repr.
        """
        with self._lock:
            if self._file is None:
                return
            try:
                self._record(track, name, start_ns, end_ns, args)
            except Exception as error:  # a full disk, a repr that raises: the traced work must not notice
                self._trouble = error
                self._close_file()

    def close(self) -> Exception | None:
        """End the file and return what went wrong since it was opened, or None. Closing twice is fine."""
        with self._lock:
            if self._file is not None:
                try:
                    self._file.write(b"\n]\n")
                except OSError as error:
                    self._trouble = error
                self._close_file()
            return self._trouble

    def disown(self) -> None:
        """Let go of the file without a mark on it: in a forked child it belongs to the parent."""
        self._lock = threading.RLock()  # whoever held the old one does not exist in the child
        self._close_file()

    def _record(self, track: str, name: str, start_ns: int, end_ns: int, args: dict[str, object]) -> None:
        start = max(start_ns - self._origin_ns, 0)
        end = max(end_ns - self._origin_ns, start)
        lane, events = self._place(track, start, end)
        events.append(
            {
                "name": name,
                "cat": "eagle",
                "ph": "X",
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "pid": self._pid,
                "tid": lane.tid,
                "args": {key: _plain(value) for key, value in args.items()},
            }
        )
        self._file.write(b"".join(b",\n" + _line(event) for event in events))

    def _place(self, track: str, start: int, end: int) -> tuple[_Lane, list[dict[str, object]]]:
        """Find the lane for a span, with the events that introduce the lane when it is new."""
        order, lanes = self._lanes.setdefault(track, (len(self._lanes), []))
        for lane in lanes:
            if lane.takes(start, end):
                return lane, []
        self._tids += 1
        lane = _Lane(self._tids)
        lane.takes(start, end)
        lanes.append(lane)
        label = track if len(lanes) == 1 else f"{track} ({len(lanes)})"
        common = {"ph": "M", "pid": self._pid, "tid": lane.tid}
        # Lanes of a track stand together, tracks in order of their first span.
        place = order * 1000 + len(lanes)
        return lane, [
            {"name": "thread_name", **common, "args": {"name": label}},
            {"name": "thread_sort_index", **common, "args": {"sort_index": place}},
        ]

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class _Lane:
    """One drawn row: spans that follow each other or nest, never overlap in part."""

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self._spans: list[tuple[int, int]] = []  # disjoint, in order of time; what nests in one is left out

    def takes(self, start: int, end: int) -> bool:
        """Add the span and return True, or return False when it overlaps one of this lane in part."""
        spans = self._spans
        inside = 0  # how many of the last spans the new one contains
        for other_start, other_end in reversed(spans):
            if other_end <= start:
                break
            if other_start < start or other_end > end:
                return False
            inside += 1
        del spans[len(spans) - inside :]
        spans.append((start, end))
        if len(spans) > _REMEMBERED:
            del spans[0]
        return True


def span(track: str, name: str, start_ns: int, end_ns: int, /, **args: object) -> None:
    """Record a span in every open trace; nothing when none is open. See `Recorder.span` for the arguments."""
    for recorder in active:
        recorder.span(track, name, start_ns, end_ns, **args)


def timed(track: str, name: str, /, **args: object) -> AbstractContextManager[None]:
    """Record the block as a span with the name of the task that runs it. The block may await; no NVTX range is made."""
    return _Timed(track, name, args) if active else _NOTHING


def block(track: str, name: str, /, **args: object) -> AbstractContextManager[None]:
    """Record the block as a span, and as an NVTX range where a profiler asks for them.

    For code without an ``await`` inside: NVTX ranges belong to the thread and would leak into other tasks. A profiler
    asks by starting the process (Nsight Systems sets its variables), a user by setting EAGLE_NVTX=1; EAGLE_NVTX=0
    keeps the ranges off. They go through CuPy and only when something else has imported it.
    """
    if active or _NVTX_WANTED:
        return _Block(track, name, args)
    return _NOTHING


_NOTHING: AbstractContextManager[None] = nullcontext()


class _Timed:
    """What `timed` returns while a trace is on."""

    __slots__ = ("_args", "_name", "_start_ns", "_track")

    def __init__(self, track: str, name: str, args: dict[str, object]) -> None:
        self._track, self._name = track, name
        self._args = {"task": task_name(), **args}

    def __enter__(self) -> None:
        self._start_ns = now_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._args["error"] = type(error).__name__
        span(self._track, self._name, self._start_ns, now_ns(), **self._args)


class _Block(_Timed):
    """What `block` returns while somebody looks."""

    __slots__ = ("_nvtx",)

    def __enter__(self) -> None:
        self._nvtx = _nvtx()
        if self._nvtx is not None:
            self._nvtx.RangePush(f"{self._track}: {self._name}")
        super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._nvtx is not None:
            self._nvtx.RangePop()


def _profiler_asks() -> bool:
    answer = os.environ.get("EAGLE_NVTX")
    if answer is not None:
        return answer not in ("", "0")
    return "NVTX_INJECTION64_PATH" in os.environ or "NSYS_PROFILING_SESSION_ID" in os.environ


_NVTX_WANTED = _profiler_asks()


def _nvtx() -> Any:
    """Return CuPy's NVTX module when a profiler asks and CuPy is there already, else None."""
    cupy = sys.modules.get("cupy") if _NVTX_WANTED else None
    return getattr(getattr(cupy, "cuda", None), "nvtx", None)


def task_name() -> str:
    """Return the name of the task that runs now, or of the thread where no task does."""
    try:
        name = anyio.get_current_task().name
    except Exception:  # each event loop says "no task here" in its own way
        name = None
    return name or threading.current_thread().name


@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[Recorder]:
    """Write a trace of everything that eagle does in this process while the block runs.

    Load the file in https://ui.perfetto.dev or chrome://tracing. It holds a JSON array with a track per stream and
    spans for waits, replays, slices and batches, with the names of the tasks that asked for them. When the process
    dies in the middle the file lacks its last bracket, which both viewers accept. Several blocks may be open at once;
    each records everything. A forked child records nothing.

    Args:
        path: The file; an old one is replaced.

    Yields:
        The recorder, whose `span` adds spans of your own.

    Raises:
        TypeError: `path` is no path.
        OSError: The file cannot be opened (nothing was begun), or could not be written (raised when the block ends;
            the work inside went on). When the block itself raises, that exception leaves with a note instead.
    """
    recorder = Recorder(path)
    _switch_to(add=recorder)
    try:
        yield recorder
    except BaseException as error:
        _switch_to(drop=recorder)
        trouble = recorder.close()
        if trouble is not None:
            error.add_note(f"The trace {os.fspath(path)!r} is incomplete: {trouble!r}")
        raise
    _switch_to(drop=recorder)
    trouble = recorder.close()
    if trouble is not None:
        raise trouble


def _switch_to(*, add: Recorder | None = None, drop: Recorder | None = None) -> None:
    global active
    with _switch:
        kept = tuple(recorder for recorder in active if recorder is not drop)
        active = kept if add is None else (*kept, add)


def _in_child() -> None:
    global active, _switch
    _switch = threading.Lock()
    for recorder in active:
        recorder.disown()
    active = ()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, allow_nan=False).encode()


def _plain(value: object) -> object:
    """Turn a detail into what JSON holds: NumPy scalars into numbers, infinities and the rest into text."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        value = item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int | bool):
        return value
    return repr(value)
