"""The CUDA side of `AbstractGraph`: one captured graph, one non-blocking stream, one lock that keeps the order of work.

Every call that touches the device does so with the graph's device current, and puts the caller's back.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from eagle.aio import counters, poller, tracing
from eagle.aio.capture import Recording, captures_here, record
from eagle.aio.completion import LONG_S, SPIN_S, Completion
from eagle.aio.events import EndSignal, PooledEvent, StreamEnd, idle, pool_of
from eagle.aio.graph_view import dot_of, kernel_names, togglable
from eagle.aio.guards import RepeatWhile, Skippable
from eagle.aio.target import AbstractGraph, blame
from eagle.errors import NonToggleableMemberError, StateError, UnknownMemberError
from eagle.kernels.device import check_device, fault_from, has_failed, require_cupy
from eagle.kernels.device_call import cuda_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eagle.aio.conditions import StopWords
    from eagle.aio.target import Member, Stage

__all__ = ("CudaGraph",)

T = TypeVar("T")
# Iterations that a loop of short kernels takes in less than a second (5.5 µs each on an H200): it ends by itself.
_ENDS_SOON = 1 << 16


class CudaGraph(AbstractGraph):
    """A graph on the device that is current when it is made.

    Args:
        name: The pipeline's name, for messages.
        priority: CUDA stream priority of its replays, lower is more urgent; None is the default one.

    Raises:
        BackendUnavailable: No GPU can be used.
        DeviceFault: The device has failed before.
    """

    def __init__(self, name: str, *, priority: int | None = None) -> None:
        super().__init__(name)
        cupy = require_cupy()
        self._runtime = cupy.cuda.runtime
        self.device: int = self._runtime.getDevice()
        check_device(self.device)
        self._cupy = cupy
        self._current_stream = cupy.cuda.get_current_stream
        with self._on_device():
            self._stream = _new_stream(cupy, priority)
        self._raw_stream = int(self._stream.ptr)
        self._lock = threading.RLock()  # a pre_launch may enqueue something else of the same pipeline
        self.pool = pool_of(self.device)
        self._seeds: dict[int, PooledEvent] = {}  # by device
        self._members: list[Member] = []
        self._recording: Recording | None = None
        self._executable = 0
        self.endless = False  # whether it holds a loop that may go on until it is stopped
        self._replays = 0
        self._signal: EndSignal | None = None
        self._spin_s = SPIN_S  # how long a task that awaits looks for itself

    @property
    def stream(self) -> int:
        """The raw stream."""
        return self._raw_stream

    @property
    def captured(self) -> object | None:
        """cuda-core's definition of the graph."""
        return None if self._recording is None else self._recording.definition

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The graph's device current, the caller's afterwards; faults under their own name."""
        runtime, before = self._runtime, self._runtime.getDevice()
        if before != self.device:
            runtime.setDevice(self.device)
        try:
            yield
        except Exception as error:
            fault = fault_from(error, self.device, during=self.name)
            if fault is None or fault is error:
                raise
            raise fault from error
        finally:
            if before != self.device:
                runtime.setDevice(before)

    # ---- recording -----------------------------------------------------------------------------------------------

    def build(self, stages: Sequence[Stage]) -> None:
        """Capture the stages and make the graph executable; see `AbstractGraph.build`."""
        check_device(self.device)
        with self._lock, self._on_device():
            recording = record(stages, name=self.name, device=self.device, stream=self._stream)
            self._members = [member for stage in stages for member in stage]
            self._executable = recording.executable
            self._recording = recording
            loops = [member.step for member in self._members if isinstance(member.step, RepeatWhile)]
            self.endless = any(loop.max_iters > _ENDS_SOON for loop in loops)

    @property
    def stops(self) -> StopWords | None:
        """Where the loops are told to stop; None without loops and before `build`."""
        return None if self._recording is None else self._recording.stops

    def _built(self) -> Recording:
        assert self._recording is not None, "GraphPipeline builds before it asks"
        return self._recording

    # ---- replaying -----------------------------------------------------------------------------------------------

    def issue(
        self,
        result: T,
        n: int,
        *,
        pre_launch: Callable[[], object] | None,
        seeds: Sequence[object] | None,
    ) -> Completion[T]:
        """Issue `n` replays; see `AbstractGraph.issue`.

        CUDA lets some thousand launches wait on a stream: beyond that a launch blocks until the device has taken one.
        """
        if not self.endless and not seeds:
            return self._issue(result, n, pre_launch, seeds)
        with poller.endless_coming():
            return self._issue(result, n, pre_launch, seeds)

    def _issue(
        self, result: T, n: int, pre_launch: Callable[[], object] | None, seeds: Sequence[object] | None
    ) -> Completion[T]:
        device, runtime, stream = self.device, self._runtime, self._raw_stream
        self._admit()
        current, caller = runtime.getDevice(), self._current_stream().ptr
        with self._lock:
            if current != device:
                runtime.setDevice(device)
            try:
                words: list[Any] | None = None
                if seeds is None:
                    self._wait_behind_caller(current, caller)
                elif seeds:
                    words = self._wait_for(seeds)
                if pre_launch is not None:
                    self._call_pre_launch(pre_launch)
                # The device works from the first launch on, so everything that need not come before comes behind.
                first, launch, executable = self._replays + 1, runtime.graphLaunch, self._executable
                for _ in range(n):
                    launch(executable, stream)
                    self._replays += 1
                event = self.pool.take()
                event.record(stream)
                if self._signal is not None and n:
                    event.announced_by(self._signal.view, self._signal.expect(n))
            except Exception as error:
                fault = fault_from(error, device, during=self.name)
                if fault is None or fault is error:
                    raise
                raise fault from error
            finally:
                if current != device:
                    runtime.setDevice(current)
            work = _Issued(self, event, first, n, words)
            completion = poller.follow(result, work, name=self.name, stop=work.stop)
            completion.spin_s = self._spin_s
            self.issued(completion)
        if n:
            counters.issued()
        return completion

    def replay(self) -> StreamEnd:
        """Issue one replay that one caller waits for, and that announces its end; see `issue` for the rest.

        No Completion is made, no event recorded, and the poller is not told, which together cost more than the launch;
        so `pending` and `poller.when_idle` do not know of it.

        Returns:
            Its end, for the caller to ask, or to hand to `poller.track`.

        Raises:
            DeviceFault: The device has failed before.
            BackendUnavailable: In a forked child.
            StateError: The interpreter is exiting, or a capture is in progress in this thread.
        """
        device, runtime, stream, signal = self.device, self._runtime, self._raw_stream, self._signal
        assert signal is not None, "whoever replays a graph by itself has told where it announces its end"
        self._admit()
        current, caller = runtime.getDevice(), self._current_stream().ptr
        with self._lock:
            if current != device:
                runtime.setDevice(device)
            try:
                self._wait_behind_caller(current, caller)
                runtime.graphLaunch(self._executable, stream)
            except Exception as error:
                fault = fault_from(error, device, during=self.name)
                if fault is None or fault is error:
                    raise
                raise fault from error
            finally:
                if current != device:
                    runtime.setDevice(current)
            self._replays += 1
            return StreamEnd(signal.view, signal.expect(1), stream, runtime)

    def _admit(self) -> None:
        """Refuse where nothing may be issued, and have the poller's thread running."""
        check_device(self.device)
        if captures_here():
            raise StateError(
                f"pipeline {self.name!r} was launched by a step that is being captured; a graph cannot hold another "
                "pipeline's replay: add that pipeline's steps to this one instead"
            )
        poller.start()

    def _call_pre_launch(self, pre_launch: Callable[[], object]) -> None:
        try:
            with self._stream:
                pre_launch()
        except BaseException as error:
            blame(error, f"in pre_launch of pipeline {self.name!r}")
            raise

    def _wait_behind_caller(self, device: int, stream: int) -> None:
        """Let the stream wait for what the caller's current stream and the legacy stream hold now."""
        if device != self.device:
            self._runtime.setDevice(device)  # an event is recorded on a stream of its own device
            try:
                seed = self._seed_of(device)
                seed.record(stream)
            finally:
                self._runtime.setDevice(self.device)
            self._runtime.streamWaitEvent(self._raw_stream, seed.ptr, 0)
        elif stream not in (0, self._raw_stream) and not idle(self._runtime, stream):
            self._wait_behind(stream)
        if not idle(self._runtime, 0):
            self._wait_behind(0)

    def _wait_behind(self, stream: int) -> None:
        # One event serves them all: a wait is for what the event holds when the wait is issued.
        seed = self._seed_of(self.device)
        seed.record(stream)
        self._runtime.streamWaitEvent(self._raw_stream, seed.ptr, 0)

    def _seed_of(self, device: int) -> PooledEvent:
        seed = self._seeds.get(device)
        if seed is None:
            seed = self._seeds[device] = pool_of(device).take()
            weakref.finalize(self, pool_of(device).give, seed).atexit = False
        return seed

    def _wait_for(self, seeds: Sequence[object]) -> list[Any]:
        """Let the stream wait for completions and events; the host words that it now waits on."""
        words = []
        for seed in seeds:
            if not isinstance(seed, Completion):
                self._runtime.streamWaitEvent(self._raw_stream, seed.ptr, 0)  # type: ignore[attr-defined]
                continue
            event = getattr(seed.source, "event", None)
            if isinstance(event, PooledEvent):
                # Another replay may record it between these lines. The wait is then for that one, which was issued
                # before this work and so cannot wait for it.
                self._runtime.streamWaitEvent(self._raw_stream, event.ptr, 0)
            elif not seed.done():
                words.append(self._wait_for_host(seed))
        return words

    def _wait_for_host(self, seed: Completion[Any]) -> Any:
        """Hold the stream until host work has ended: the device watches a word that whoever settles the work sets."""
        memory = self._cupy.cuda.alloc_pinned_memory(4)
        word = np.frombuffer(memory, np.uint32, 1)
        word[0] = 0
        driver = cuda_driver()
        at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        (status,) = driver.cuStreamWaitValue32(self._raw_stream, memory.ptr, 1, at_least)
        if int(status) != 0:
            raise self._cupy.cuda.driver.CUDADriverError(int(status))
        seed.when_settled(partial(word.fill, 1))
        return memory

    def expect(self, took_ns: int) -> None:
        """Note what replays took from their issue on: the next ones will be looked at for about as long.

        A parked task is woken 50 to 100 µs late, which replays of a few milliseconds would feel.
        """
        self._spin_s = max(1.5e-9 * took_ns, SPIN_S) if took_ns < 1e9 * LONG_S else SPIN_S

    def announce_end(self, signal: EndSignal) -> None:
        """Tell where each replay's last step announces its end; see `GraphPipeline.announce_end`."""
        self._signal = signal

    # ---- members -------------------------------------------------------------------------------------------------

    def is_toggleable(self, index: int) -> bool:
        """Whether the member has no guard and holds kernel, copy and fill nodes only."""
        if isinstance(self._members[index].step, (Skippable, RepeatWhile)):
            return False
        return all(togglable(node) for node in self._built().members[index])

    def set_enabled(self, index: int, enabled: bool) -> None:
        """Switch the member's nodes in the executable graph: replays issued before keep theirs."""
        check_device(self.device)
        with self._lock, self._on_device():
            for node in self._built().members[index]:
                self._switch(node, enabled)

    def set_node_enabled(self, node: int, enabled: bool) -> None:
        """Switch one node; see `AbstractGraph.set_node_enabled`."""
        check_device(self.device)
        owner = next((index for index, nodes in self._built().members.items() if node in nodes), None)
        if owner is None:
            raise UnknownMemberError(
                f"pipeline {self.name!r} has no node {node!r}; give a handle that member_nodes() returned", node
            )
        if not self.is_toggleable(owner):
            raise NonToggleableMemberError(
                f"node {node:#x} of pipeline {self.name!r} belongs to {self._members[owner]}, which is guarded or "
                "holds other nodes than kernels, copies and fills; it cannot be switched",
                node,
            )
        with self._lock, self._on_device():
            self._switch(node, enabled)

    def _switch(self, node: int, enabled: bool) -> None:
        (status,) = cuda_driver().cuGraphNodeSetEnabled(self._executable, node, int(enabled))
        if int(status) != 0:
            raise self._cupy.cuda.driver.CUDADriverError(int(status))

    def member_nodes(self, index: int) -> list[int]:
        """Raw handles of the nodes that the member added."""
        return list(self._built().members[index])

    # ---- looking inside ------------------------------------------------------------------------------------------

    def num_nodes(self) -> int:
        """Kernel nodes, those inside conditional nodes and the guards' own included."""
        return len(self.node_labels())

    def node_labels(self) -> list[str]:
        """Names of the kernels in order of declaration; a conditional node's body comes behind its guard."""
        recording = self._built()
        return kernel_names(int(recording.definition.handle), recording.bodies)

    def to_dot(self) -> str:
        """CUDA's own drawing of the graph, each member in a labelled box."""
        recording = self._built()
        names = [(str(member), recording.members[member.index]) for member in self._members]
        return dot_of(self.name, recording.definition, recording.order, names)


class _Issued(poller.Watch):
    """One `issue` on its way: how it is stopped, and what its end is noted in."""

    __slots__ = ("_began_ns", "_first", "_graph", "_n", "_stopped", "_words", "endless")

    def __init__(self, graph: CudaGraph, event: PooledEvent, first: int, n: int, words: list[Any] | None) -> None:
        super().__init__(event, graph.device, graph.stream)
        self._graph, self._first, self._n = graph, first, n
        self._words = words  # pinned memory that the stream looks at until the work has begun
        self.endless = bool(words) or graph.endless
        self._stopped = False
        self._began_ns = tracing.now_ns()

    def stop(self) -> None:
        """End the loops of these replays before their next iteration."""
        self._stopped = True
        stops = self._graph.stops
        if stops is not None and self._n:
            with suppress(Exception):  # a device that fails meanwhile ends the work by itself
                stops.stop(self._first, self._first + self._n)

    def ended(self) -> None:
        """The work has ended, well or not; the event may serve another."""
        graph = self._graph
        graph.pool.give(self.event)
        if not self._n:
            return
        failed = has_failed(graph.device)
        counters.finished("failed" if failed else "cancelled" if self._stopped else "done")
        now_ns = tracing.now_ns()
        graph.expect(now_ns - self._began_ns)
        if tracing.active:
            tracing.span(f"stream {graph.stream:#x}", "replay", self._began_ns, now_ns, pipeline=graph.name, n=self._n)


def _new_stream(cupy: Any, priority: int | None) -> Any:
    if priority is None:
        return cupy.cuda.Stream(non_blocking=True)
    return cupy.cuda.Stream(non_blocking=True, priority=priority)
