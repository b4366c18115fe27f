"""The host target: a pipeline's steps, called in order on a thread that its queue borrows.

The twin of `eagle.aio.cuda_graph` behind `eagle.aio.target`. A piece of issued work goes through these states::

    queued --its turn, seeds settled--> running --last replay ended, or a step raised--> settled
    queued or running --stop()--> the replays not begun are dropped, loops end early --> settled

Every piece runs in a copy of its issuer's context variables, so settings such as ``numpy.errstate`` hold in the steps
and never leak out of them.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from eagle.aio import counters, tracing, workers
from eagle.aio.completion import Completion
from eagle.aio.guards import RepeatWhile, Skippable, StopWord, plain_steps, stop_word
from eagle.aio.target import AbstractGraph, Member, Stage, blame
from eagle.errors import NonToggleableMemberError, StateError, UnknownMemberError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ("HostGraph",)

T = TypeVar("T")

_HELPERS = 32  # threads that join in one fork/join stage; more would only wait for cores
_handles = itertools.count(0x1000, 0x10)  # opaque, never 0, never given twice


class HostGraph(AbstractGraph):
    """Steps that run on borrowed threads; see `AbstractGraph` for the contract."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._stream = next(_handles)
        self._queue = workers.WorkQueue()
        self._stages: tuple[Stage, ...] = ()
        self._members: tuple[Member, ...] = ()
        self._nodes: tuple[tuple[int, ...], ...] = ()  # of each member, one for each of its steps
        self._off: frozenset[int] = frozenset()  # members that are switched off
        self._active: tuple[Stage, ...] = ()  # the stages without them: what a replay issued now runs
        self._failure: tuple[BaseException, weakref.ref[Completion[Any]]] | None = None

    @property
    def stream(self) -> int:
        """An opaque number."""
        return self._stream

    @property
    def captured(self) -> None:
        """None: nothing is recorded on the host."""
        return None

    # ---- recording -----------------------------------------------------------------------------------------------

    def build(self, stages: Sequence[Stage]) -> None:
        """Fix the stages; no step is called."""
        self._stages = self._active = tuple(stages)
        self._members = tuple(itertools.chain.from_iterable(stages))
        self._nodes = tuple(tuple(next(_handles) for _ in plain_steps(member.step)) for member in self._members)

    # ---- replaying -----------------------------------------------------------------------------------------------

    def issue(
        self, result: T, n: int, *, pre_launch: Callable[[], object] | None, seeds: Sequence[object] | None
    ) -> Completion[T]:
        """Put `n` replays into the queue."""
        work = _Work(self, n, pre_launch, self._active)
        # To stop is to drop the replays not begun and to end loops before their next iteration.
        completion = Completion(result, name=self.name, stop=work.word.ask)
        work.completion = completion
        counters.issued()
        try:
            with _lock:
                self._queue.put(work.run, seeds or (), work.word.ask)  # type: ignore[arg-type]
                self.issued(completion)
        except StateError:
            counters.finished("cancelled")
            raise
        return completion

    def fence(self, result: T) -> Completion[T]:
        """The end of everything in the queue, with the first error that nobody was given."""
        completion = Completion(result, name=self.name)
        last = self.pending()
        if last is None or last.settled:
            completion.settle(self._take_failure())
        else:
            self._queue.put(lambda: completion.settle(self._take_failure()))
        return completion

    def failed(self, error: BaseException, completion: Completion[Any]) -> None:
        """Remember the first error that nobody was given yet."""
        with _lock:
            if self._failure is None or _was_received(self._failure[1]):
                self._failure = error, weakref.ref(completion)

    def _take_failure(self) -> BaseException | None:
        with _lock:
            failure, self._failure = self._failure, None
        return None if failure is None or _was_received(failure[1]) else failure[0]

    # ---- members -------------------------------------------------------------------------------------------------

    def is_toggleable(self, index: int) -> bool:
        """Whether the member is a plain step."""
        return not isinstance(self._members[index].step, (Skippable, RepeatWhile))

    def set_enabled(self, index: int, enabled: bool) -> None:
        """Switch a member for the replays issued from now on."""
        with _lock:
            off = self._off - {index} if enabled else self._off | {index}
            kept = (tuple(member for member in stage if member.index not in off) for stage in self._stages)
            self._active = tuple(stage for stage in kept if stage)
            self._off = off

    def set_node_enabled(self, node: int, enabled: bool) -> None:
        """Switch the step with this handle, which is its whole member."""
        for index, nodes in enumerate(self._nodes):
            if node in nodes:
                if not self.is_toggleable(index):
                    raise NonToggleableMemberError(
                        f"node {node} of pipeline {self.name!r} belongs to {self._members[index]}, whose guard decides "
                        "whether it runs; write the guard's word instead",
                        node,
                    )
                return self.set_enabled(index, enabled)
        raise UnknownMemberError(
            f"pipeline {self.name!r} has no node {node}; take handles from member_nodes() of this pipeline", node
        )

    def member_nodes(self, index: int) -> list[int]:
        """One opaque handle for each step of the member."""
        return list(self._nodes[index])

    # ---- looking inside ------------------------------------------------------------------------------------------

    def num_nodes(self) -> int:
        """How many steps there are, parts of loops counted one by one."""
        return sum(len(nodes) for nodes in self._nodes)

    def node_labels(self) -> list[str]:
        """``__qualname__`` of every step."""
        return [_label(step) for member in self._members for step in plain_steps(member.step)]

    def to_dot(self) -> str:
        """Members as boxes, one below the other; the members of a stage side by side."""
        lines = [f"digraph {_quoted(self.name)} {{", "  node [shape=box, fontname=monospace];"]
        lines += [f"  m{member.index} [label={_quoted(_caption(member))}];" for member in self._members]
        for above, below in itertools.pairwise(self._stages):
            lines += [f"  m{a.index} -> m{b.index};" for a in above for b in below]
        return "\n".join([*lines, "}"]) + "\n"


class _Work:
    """One `issue`: what its thread runs."""

    __slots__ = ("_active", "_context", "_graph", "_n", "_pre_launch", "_queued_ns", "completion", "word")

    def __init__(
        self, graph: HostGraph, n: int, pre_launch: Callable[[], object] | None, active: tuple[Stage, ...]
    ) -> None:
        self.completion: Completion[Any]
        self._graph = graph
        self._n = n
        self._pre_launch = pre_launch
        self._active = active
        self._context = copy_context()
        self.word = StopWord()
        self._queued_ns = tracing.now_ns() if tracing.active else 0

    def run(self) -> None:
        """The job of the queue. Raises nothing."""
        began_ns = tracing.now_ns() if tracing.active else 0
        error: BaseException | None = None
        try:
            self._context.run(self._replay)
        except BaseException as caught:
            # Without our own frames, which hold the graph: an error kept by the graph would be a cycle.
            error = caught.with_traceback(_beyond_this_file(caught))
            self._graph.failed(error, self.completion)
        counters.finished("cancelled" if error is None and self.word.asked else counters.outcome_of(error))
        if tracing.active:
            self._trace(began_ns)
        self.completion.settle(error)

    def _replay(self) -> None:
        stop_word.set(self.word)
        word, name = self.word, self._graph.name
        if self._pre_launch is not None and not word.asked:
            try:
                self._pre_launch()
            except BaseException as error:
                blame(error, f"in pre_launch of pipeline {name!r}")
                raise
        for _ in range(self._n):
            if word.asked:
                return
            for stage in self._active:
                if len(stage) == 1:
                    _call(stage[0], name)
                else:
                    _Fork(stage, name).run()

    def _trace(self, began_ns: int) -> None:
        track = f"queue of {self._graph.name}"
        if self._queued_ns:
            tracing.span(track, "wait", self._queued_ns, began_ns, pipeline=self._graph.name)
        tracing.span(track, "replay", began_ns, tracing.now_ns(), pipeline=self._graph.name, n=self._n)


class _Fork:
    """One pass through a stage of several members: helpers take members until none is left, then all join.

    The thread of the queue works along, so the stage goes on when no helper can be had.
    """

    def __init__(self, stage: Stage, name: str) -> None:
        self._todo = deque(stage)
        self._name = name
        self._left = len(stage)
        self._errors: list[tuple[int, BaseException]] = []
        self._lock = threading.Lock()
        self._joined = threading.Lock()
        self._joined.acquire()

    def run(self) -> None:
        """Run every member and return when the last has ended.

        Raises:
            BaseException: What the first failed member in order of registration raised. Members not begun were dropped.
        """
        for _ in range(min(len(self._todo) - 1, _HELPERS)):
            context = copy_context()  # a context can be entered by one thread at a time
            try:
                workers.start(lambda context=context: context.run(self._help))  # type: ignore[misc]
            except StateError:
                break
        self._help()
        self._joined.acquire()
        if self._errors:
            self._errors.sort(key=lambda pair: pair[0])
            (_, first), *others = self._errors
            for _, other in others:
                blame(first, f"another member failed, too: {other!r}")
            raise first

    def _help(self) -> None:
        while True:
            try:
                member = self._todo.popleft()
            except IndexError:
                return
            error: BaseException | None = None
            try:
                if not self._errors:
                    _call(member, self._name)
            except BaseException as caught:
                error = caught
            with self._lock:
                if error is not None:
                    self._errors.append((member.index, error))
                self._left -= 1
                if self._left:
                    continue
            self._joined.release()
            return


def _call(member: Member, name: str) -> None:
    try:
        member.step()
    except BaseException as error:
        blame(error, f"in pipeline {name!r}, {member}")
        raise


def _beyond_this_file(error: BaseException) -> Any:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _was_received(completion: weakref.ref[Completion[Any]]) -> bool:
    alive = completion()
    return alive is not None and alive.received


def _label(step: object) -> str:
    return str(getattr(step, "__qualname__", type(step).__qualname__))


def _caption(member: Member) -> str:
    labels = [_label(step) for step in plain_steps(member.step)]
    if isinstance(member.step, RepeatWhile):
        labels = [f"while, at most {member.step.max_iters} times:", *labels]
    elif isinstance(member.step, Skippable):
        labels = ["if:", *labels]
    return "\n".join([str(member), *labels])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


_lock = threading.RLock()  # one for all graphs, so that a forked child can make a new one


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
