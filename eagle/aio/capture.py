"""Recording steps into a CUDA graph: stream capture through cuda-core, one attempt at a time.

While a capture runs, the garbage collector is held off (a finaliser may free device memory inside it), CuPy takes
memory from a pool of the graph's own (temporaries of a step live as long as the graph that writes them), and the
capture mode is relaxed, so other threads may use the device. Only a device-wide synchronisation by another thread
breaks it (CUDA allows none meanwhile); the attempt is then repeated.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from eagle.aio import poller
from eagle.aio.conditions import StopWords, guard_kernel, guard_words, prepare_kernels
from eagle.aio.guards import RepeatWhile, Skippable, plain_steps
from eagle.aio.operands import operands_of
from eagle.aio.target import blame
from eagle.errors import StateError
from eagle.kernels.device import cuda_code, import_cuda, require_cupy
from eagle.kernels.device_call import cuda_driver

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eagle.aio.target import Member, Stage

__all__ = ("Recording", "captures_here", "nodes_of", "record")

_INVALIDATED = 901  # cudaErrorStreamCaptureInvalidated
# A capture takes some 50 µs. Beside a thread that synchronises the device 2000 times a second, one in seven broke.
_ATTEMPTS = 8


class _ThisThread(threading.local):
    captures = False


_here = _ThisThread()
_collector_lock = threading.Lock()
_captures = 0
_collected_before = False


_Frontier: TypeAlias = frozenset[int]


@dataclass(eq=False)
class Recording:
    """A captured graph and what was learnt while it was captured.

    Attributes:
        definition: cuda-core's definition of the graph.
        executable: Raw handle of the executable graph; destroyed with this record.
        order: Handles of the top-level nodes in the order they were added.
        members: Handles of the nodes that each member added, by member index.
        bodies: Definitions of the bodies of conditional nodes, by the handle of the node.
        stops: The stop words of its loops; None without loops.
        keep: What must live as long as the graph: the pool of the steps' temporaries first, then the arrays of steps
            and guards.
    """

    definition: Any = None
    executable: int = 0
    order: list[int] = field(default_factory=list)
    members: dict[int, list[int]] = field(default_factory=dict)
    bodies: dict[int, Any] = field(default_factory=dict)
    stops: StopWords | None = None
    keep: list[Any] = field(default_factory=list)


def captures_here() -> bool:
    """Whether this thread is recording a graph of eagle's: a step must not replay another one then."""
    return _here.captures


class _BrokenCapture(Exception):
    """Somebody invalidated the capture; the message says during what."""


def record(stages: Sequence[Stage], *, name: str, device: int, stream: Any) -> Recording:
    """Capture the stages into one executable graph; each step is called once.

    Args:
        stages: See `AbstractGraph.build`.
        name: The pipeline's name, for messages.
        device: The device of `stream`; current while the steps are called.
        stream: The pipeline's CuPy stream; current while a step is called.

    Raises:
        Exception: What a step raised, with a note naming it; the stream is usable again.
        StateError: The capture was broken several times over.
        BackendUnavailable: cuda-core is not installed.
    """
    cupy = require_cupy()
    with cupy.cuda.Device(device):
        for left in reversed(range(_ATTEMPTS)):
            attempt = _Attempt(name, device, stream)
            try:
                return attempt.run(stages)
            except _BrokenCapture as broken:
                if not left:
                    raise StateError(
                        f"pipeline {name!r}: {broken}. Either a step waits for the device (a synchronize, a .get() or "
                        "a print of an array), which a capture forbids, or another thread keeps calling a device-wide "
                        "synchronize; let it synchronize its own stream instead"
                    ) from broken.__cause__
    raise AssertionError("unreachable")


class _Attempt:
    """One capture; whatever happens in it, `run` leaves no stream capturing."""

    def __init__(self, name: str, device: int, stream: Any) -> None:
        self._name, self._device, self._stream = name, device, stream
        self._cupy = require_cupy()
        self._driver = cuda_driver()
        self._builders: list[Any] = []  # the main one and those of conditional bodies: each ends its own capture
        self._forks: list[Any] = []
        self._words: list[Any] = []
        self._loops = 0
        self._recording = Recording()
        self._spans: list[tuple[int, _Frontier, _Frontier]] = []  # of each member: what its stream held before, after

    def run(self, stages: Sequence[Stage]) -> Recording:
        recording = self._recording
        self._prepare(stages)
        pool = self._cupy.cuda.MemoryPool()
        recording.keep.append(pool)
        with _collector_held_off(), self._cupy.cuda.using_allocator(pool.malloc):
            _here.captures = True
            try:
                main = self._begin()
                for stage in stages:
                    main = self._stage(stage, main)
                self._end(main)
            finally:
                self._abandon()
                _here.captures = False
        return recording

    def _prepare(self, stages: Sequence[Stage]) -> None:
        """What a capture forbids: compiling and loading the guard kernels, filling the loops' words."""
        members = [member for stage in stages for member in stage]
        steps = [member.step for member in members]
        for member in members:
            self._check_guards(member, member.step)
            self._recording.keep += [member.step, *map(operands_of, plain_steps(member.step))]
        if any(isinstance(step, (Skippable, RepeatWhile)) for step in steps):
            prepare_kernels(self._device)
        loops = [step for step in steps if isinstance(step, RepeatWhile)]
        if loops:
            with self._stream:
                self._recording.stops = stops = StopWords()
                self._words = [stops.replay_word() for _ in loops]
            self._stream.synchronize()
            self._recording.keep += self._words

    def _check_guards(self, member: Member, step: object) -> None:
        """Refuse a guard that the device cannot read before anything is recorded."""
        if not isinstance(step, (Skippable, RepeatWhile)):
            return
        try:
            guard_words(step.guard)
        except (TypeError, IndexError) as error:
            raise type(error)(f"{member} of pipeline {self._name!r}: {error}") from None
        for part in step.parts if isinstance(step, RepeatWhile) else (step.step,):
            self._check_guards(member, part)

    def _begin(self) -> Any:
        device = import_cuda("cuda.core").Device(self._device)
        device.set_current()
        builder = device.create_stream(self._stream).create_graph_builder()
        self._builders.append(builder)
        builder.begin_building("relaxed")
        return builder

    def _stage(self, stage: Stage, main: Any) -> Any:
        """Weave one stage behind what `main` holds; the builder that the next one goes behind."""
        if len(stage) == 1:
            self._member(stage[0], main, self._stream)
            return main
        branches = main.split(len(stage))
        self._forks += [branch for branch in branches if branch is not main]
        for member, branch in zip(stage, branches, strict=True):
            self._member(member, branch, self._stream if branch is main else self._stream_of(branch))
        return type(main).join(*branches)

    def _member(self, member: Member, builder: Any, stream: Any) -> None:
        try:
            before = self._frontier(stream)
            self._weave(member.step, builder, stream)
            self._spans.append((member.index, before, self._frontier(stream)))
        except BaseException as error:
            if self._is_broken(error):
                raise _BrokenCapture(f"the capture of {member} was invalidated") from error
            blame(error, f"in pipeline {self._name!r}, {member}, while its graph was captured")
            raise

    def _weave(self, step: Any, builder: Any, stream: Any) -> None:
        if isinstance(step, RepeatWhile):
            self._loop(step, builder, stream)
        elif isinstance(step, Skippable):
            count, baseline = guard_words(step.guard)
            condition = builder.create_condition()
            arguments = _unsigned(condition.handle, count, baseline)
            guard_kernel("eagle_if", self._device, *arguments).launch(stream.ptr)
            with self._body(builder.if_then, condition, stream) as (body, inside):
                self._weave(step.step, body, inside)
        else:
            with stream:
                step()

    def _loop(self, loop: RepeatWhile, builder: Any, stream: Any) -> None:
        stops = self._recording.stops
        assert stops is not None
        replay = self._words[self._loops]
        self._loops += 1
        count, baseline = guard_words(loop.guard)
        condition = builder.create_condition()
        arguments = _unsigned(condition.handle, count, baseline, loop.cell.data.ptr, replay.data.ptr, stops.address)
        cap = np.uint32(loop.max_iters)
        guard_kernel("eagle_loop_head", self._device, *arguments, cap).launch(stream.ptr)
        with self._body(builder.while_loop, condition, stream) as (body, inside):
            for part in loop.parts:
                self._weave(part, body, inside)
            guard_kernel("eagle_loop_tail", self._device, *arguments).launch(inside.ptr)

    @contextmanager
    def _body(self, make: Any, condition: Any, stream: Any) -> Iterator[tuple[Any, Any]]:
        """A conditional node behind what `stream` holds, and the capture of its body: its builder and stream."""
        body = make(condition)
        self._builders.append(body)
        (node,) = self._frontier(stream)  # everything that follows on the stream follows this node
        self._recording.bodies[node] = body.graph_definition
        body.begin_building("relaxed")
        yield body, self._stream_of(body)
        body.end_building()

    def _end(self, main: Any) -> None:
        recording = self._recording
        try:
            main.end_building()
            recording.definition = main.graph_definition
            recording.order = nodes_of(int(recording.definition.handle))
            recording.members = _attributed(recording, self._spans)
            recording.executable = self._executable(recording)
        except Exception as error:
            if self._is_broken(error):
                raise _BrokenCapture("the capture was invalidated") from error
            blame(error, f"while the captured graph of pipeline {self._name!r} was made executable")
            raise

    def _executable(self, recording: Recording) -> int:
        """Instantiate the graph.

        Not through cuda-core's `complete`: of its executables (1.2.2) the driver lets only 29 launches wait on a
        stream before the next one blocks, of this one 1022. Measured on an H200 with driver 580; why is not known.
        """
        handle = int(self._cupy.cuda.runtime.graphInstantiate(int(recording.definition.handle)))
        # What goes with it: to free either may wait for the device, too.
        company = (recording.definition, recording.keep[0])
        weakref.finalize(recording, _destroy, self._cupy.cuda.runtime, handle, os.getpid(), company).atexit = False
        return handle

    def _abandon(self) -> None:
        """Close the builders; after a failure this also ends the captures, so that the stream is usable again."""
        for builder in reversed(self._builders):
            with suppress(Exception):
                if builder.is_building:
                    builder.end_building()
        for builder in (*self._forks, *reversed(self._builders)):
            with suppress(Exception):
                builder.close()
        self._forks.clear()
        self._builders.clear()
        runtime = self._cupy.cuda.runtime
        with suppress(Exception):
            if runtime.streamIsCapturing(self._stream.ptr):
                runtime.graphDestroy(runtime.streamEndCapture(self._stream.ptr))

    def _stream_of(self, builder: Any) -> Any:
        return self._cupy.cuda.Stream.from_external(builder.stream)

    def _is_broken(self, error: BaseException) -> bool:
        """Whether an error only says that the capture had been invalidated before."""
        if isinstance(error, _BrokenCapture) or cuda_code(error) == _INVALIDATED:
            return True
        # cuda-core says so in words: it refuses to go on with a capture that is already invalid.
        return type(error) is RuntimeError and "has been invalidated" in str(error)

    def _frontier(self, stream: Any) -> _Frontier:
        """The nodes that the next one on a capturing stream will depend on.

        The graph under construction is never looked into: another thread may invalidate, and so destroy, it any moment.
        """
        _, status, _, _, dependencies, *_ = self._driver.cuStreamGetCaptureInfo(stream.ptr)
        if status != self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            raise _BrokenCapture("the capture was invalidated")
        return frozenset(int(node) for node in dependencies)


def _destroy(runtime: Any, executable: int, owner: int, company: object) -> None:
    """Destroy an executable graph once no replay is in flight.

    The call waits until the device is idle and keeps everybody else from the driver meanwhile. Beside a loop that waits
    to be stopped, or a kernel that waits for the host, it would never return.
    """

    def destroy(company: object = company) -> None:
        if os.getpid() == owner:  # not in a forked child, whose driver knows nothing of it
            with suppress(Exception):  # a device that has failed took its graphs along
                runtime.graphExecDestroy(executable)

    poller.when_idle(destroy)


def nodes_of(graph: int) -> list[int]:
    """Handles of a finished graph's nodes in the order they were added."""
    driver = cuda_driver()
    count = driver.cuGraphGetNodes(graph)[-1]
    return [int(node) for node in driver.cuGraphGetNodes(graph, count)[1][:count]] if count else []


def _attributed(recording: Recording, spans: list[tuple[int, _Frontier, _Frontier]]) -> dict[int, list[int]]:
    """The nodes of each member: those between what its stream held before and what it held after."""
    before_node: dict[int, list[int]] = {}
    for earlier, later in recording.definition.edges():
        before_node.setdefault(int(later.handle), []).append(int(earlier.handle))
    place = {node: index for index, node in enumerate(recording.order)}
    members: dict[int, list[int]] = {}
    owned: set[int] = set()
    for index, before, after in spans:
        mine: set[int] = set()
        todo = list(after)
        while todo:
            node = todo.pop()
            if node not in before and node not in owned and node not in mine:
                mine.add(node)
                todo += before_node.get(node, ())
        owned |= mine
        members[index] = sorted(mine, key=place.__getitem__)
    return members


def _unsigned(*words: Any) -> list[Any]:
    return [np.uint64(int(word)) for word in words]


@contextmanager
def _collector_held_off() -> Iterator[None]:
    """No garbage collection meanwhile, and the user's setting again behind the last of several captures."""
    global _captures, _collected_before
    with _collector_lock:
        if not _captures:
            _collected_before = gc.isenabled()
            gc.disable()
        _captures += 1
    try:
        yield
    finally:
        with _collector_lock:
            _captures -= 1
            if not _captures and _collected_before:
                gc.enable()
