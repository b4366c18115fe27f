"""GraphPipeline: steps that are recorded once and replayed cheaply, awaited through Completions.

Everything a caller can do wrong is found here, before anything changes; the work is done by one of the two graphs
behind `eagle.aio.target`. A pipeline goes through these states::

    open --add(), add_concurrent()--> open --build()--> built --enqueue(), launch(), set_member_enabled()--> built
                                      open --build() raised--> open
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from eagle.aio.completion import Completion, leave_when_done
from eagle.aio.pipeline_arguments import check_hook, check_replays, check_step, refuse_nested_loop
from eagle.aio.target import Member, choose_target, new_graph
from eagle.errors import NonToggleableMemberError, NotBuilt, StateError, UnknownMemberError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eagle.aio.events import EndSignal
    from eagle.aio.target import AbstractGraph, Stage, Target

__all__ = ("GraphPipeline", "MemberHandle")

P = TypeVar("P", bound="GraphPipeline")

_numbers = itertools.count(1)
_serials = itertools.count(1)


@dataclass(frozen=True, slots=True)
class MemberHandle:
    """A member of one pipeline, for `GraphPipeline.set_member_enabled` and its like.

    Attributes:
        index: Its place in the order of registration, from 0.
        name: Its name, or None.
        pipeline: Name of the pipeline.
        serial: Tells pipelines of one name apart.
    """

    index: int
    name: str | None
    pipeline: str
    serial: int


class GraphPipeline:
    """Steps recorded once and replayed cheaply: a CUDA graph on the GPU, an ordered queue on the host.

    Register steps, `build`, then `launch` or `enqueue` as often as you like. On the GPU every step is called once, by
    `build`, and what it launches on the current stream is captured; on the host it is called at every replay, on a
    thread that the pipeline borrows. The pipeline keeps its steps, their guards and bound plans alive; arrays that a
    step only captured (a temporary of a CuPy expression, say) must be kept by the step, or be written in place.

    Args:
        name: For errors and traces; ``pipeline-<k>`` when not given.
        target: "cuda", "host", or None for the GPU when one can be used, else the host.
        priority: CUDA stream priority, lower is more urgent; None is the default one. Without effect on the host.

    Raises:
        ValueError: An unknown target or an empty name.
        BackendUnavailable: ``target="cuda"`` without a usable GPU; the message says why.
    """

    def __init__(self, name: str | None = None, target: str | None = None, *, priority: int | None = None) -> None:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"a pipeline's name is a str or None, not {name!r}")
        if name == "":
            raise ValueError("a pipeline's name is empty; give one, or None to have it numbered")
        self._target: Target = choose_target(target)
        self._name = f"pipeline-{next(_numbers)}" if name is None else name
        self._serial = next(_serials)
        self._stages: list[Stage] = []
        self._handles: list[MemberHandle] = []
        self._named: dict[str, MemberHandle] = {}
        self._built = False
        self._graph: AbstractGraph = new_graph(self._target, self._name, priority)

    def __repr__(self) -> str:
        """Name, target and state."""
        state = "built" if self._built else "not built"
        return f"<{type(self).__name__} {self._name!r} on {self._target}: {len(self._handles)} members, {state}>"

    @property
    def name(self) -> str:
        """The pipeline's name, as in errors and traces."""
        return self._name

    @property
    def target(self) -> Target:
        """Where it runs: "cuda" or "host"."""
        return self._target

    # ---- registering ---------------------------------------------------------------------------------------------

    def add(self: P, step: Callable[[], object], *, name: str | None = None) -> P:
        """Register a step, to run behind everything registered before.

        Args:
            step: A callable without arguments, a `Skippable` or a `RepeatWhile`. On the GPU it launches work on the
                current stream, once or several times; it may not wait for the device.
            name: Alias of the member, next to its index in the order of registration.

        Returns:
            The pipeline.

        Raises:
            TypeError: The step cannot be called without arguments, or is a coroutine function.
            ValueError: Another member has that name.
            StateError: The pipeline is built already.
        """
        return self._register([step], [name])

    def add_concurrent(
        self: P, members: Sequence[Callable[[], object]], *, names: Sequence[str | None] | None = None
    ) -> P:
        """Register a fork/join stage: its members may run at the same time, and all end before the next step.

        Running them one after the other, in order, is always allowed; how much overlaps is up to the device or the
        cores. What one member launches stays in order. Whether members are independent is not checked.

        Args:
            members: At least two steps, each as in `add`.
            names: Their aliases; as many as members, entries may be None.

        Returns:
            The pipeline.

        Raises:
            TypeError: A member is no step (see `add`).
            ValueError: Fewer than two members, names that do not fit, or a name that is taken.
            StateError: The pipeline is built already.
        """
        if not isinstance(members, Iterable):
            raise TypeError(f"a concurrent stage's members are {members!r}; give a list of steps")
        if isinstance(names, str) or not (names is None or isinstance(names, Iterable)):
            raise TypeError(f"the members' names are {names!r}; give a list of one (or None) for each, in order")
        steps = list(members)
        if len(steps) < 2:
            raise ValueError(f"a concurrent stage has {len(steps)} members; give at least 2, or use add() for one")
        aliases: list[str | None] = [None] * len(steps) if names is None else list(names)
        if len(aliases) != len(steps):
            raise ValueError(f"{len(steps)} members have the names {names!r}; give one (or None) for each, in order")
        return self._register(steps, aliases)

    def _register(self: P, steps: list[Callable[[], object]], names: list[str | None]) -> P:
        if self._built:
            raise StateError(f"pipeline {self._name!r} is built; register every step before build(), or make another")
        first = len(self._handles)
        given: list[Any] = [name for name in names if name is not None]
        for step in steps:
            check_step(step)
        for name in given:
            if not isinstance(name, str) or not name:
                raise TypeError(f"a member's name is {name!r}; give a str that is not empty, or None")
            if name in self._named or given.count(name) > 1:
                raise ValueError(f"pipeline {self._name!r} has a member {name!r} already; names are unique")
        stage = tuple(Member(first + i, name, step) for i, (name, step) in enumerate(zip(names, steps, strict=True)))
        handles = [MemberHandle(member.index, member.name, self._name, self._serial) for member in stage]
        self._stages.append(stage)
        self._handles += handles
        self._named.update((handle.name, handle) for handle in handles if handle.name is not None)
        return self

    def build(self: P) -> P:
        """Record the steps into a graph; plain and blocking (on the GPU it captures, usually within milliseconds).

        The caller's current stream and device are as before, also when it fails. After a failure nothing is left of
        the attempt, and `build` may be called again.

        Returns:
            The pipeline.

        Raises:
            ValueError: No step was registered, or a `RepeatWhile` stands inside a `Skippable` or another `RepeatWhile`.
            StateError: The pipeline is built already.
            Exception: What a step raised while it was captured, with a note that names pipeline and member.
        """
        if self._built:
            raise StateError(f"pipeline {self._name!r} is built already; make another pipeline to record anew")
        if not self._stages:
            raise ValueError(f"pipeline {self._name!r} has no steps; add() some before build()")
        for member in itertools.chain.from_iterable(self._stages):
            refuse_nested_loop(member, self._name)
        self._graph.build(self._stages)
        self._built = True
        return self

    # ---- replaying -----------------------------------------------------------------------------------------------

    def enqueue(
        self: P,
        n: int = 1,
        *,
        pre_launch: Callable[[], object] | None = None,
        seed_events: Iterable[object] | None = None,
    ) -> Completion[P]:
        """Issue `n` replays on the pipeline's own stream and return at once.

        Replays run in call order, however many are in flight, behind the work that the caller's current stream and the
        legacy stream hold now. Until the Completion is done, only write buffers of the pipeline in `pre_launch`.

        Args:
            n: How many replays; all steps run n times.
            pre_launch: Called once, without arguments, on the pipeline's stream, behind earlier replays and before
                these: the place to copy inputs that change from launch to launch.
            seed_events: What to wait for instead of the caller's streams: Completions, on the GPU also CuPy events.
                Empty: no waits.

        Returns:
            A `Completion`, awaitable from any event loop and thread; it gives the pipeline. Cancelling a waiter drops
            nothing.

        Raises:
            NotBuilt: Call `build` first.
            TypeError: `n` is no int, `pre_launch` cannot be called, or a seed is of the wrong kind.
            ValueError: `n` is negative.
            DeviceFault: The device has failed before.
        """
        n = check_replays(n)
        if pre_launch is not None:
            check_hook(pre_launch)
        seeds = None if seed_events is None else self._checked_seeds(seed_events)
        return self._ready().issue(self, n, pre_launch=pre_launch, seeds=seeds)

    async def launch(self: P, n: int = 1) -> P:
        """Replay `n` times and wait for the end: ``await enqueue(n)``, made safe against cancelling.

        Args:
            n: How many replays.

        Returns:
            The pipeline.

        Raises:
            NotBuilt: Call `build` first.
            Exception: What a host step raised; the replays behind it were dropped.
            DeviceFault: The device failed, now or before.

        Cancellation: host replays that have not begun are dropped, loops end between two iterations, the running step
        and all issued device replays end; then the cancellation leaves, and no buffer is in use any more.
        """
        return await leave_when_done(self.enqueue(n))

    async def synchronize(self) -> None:
        """Wait until every replay issued so far has ended; quick when nothing is in flight.

        Raises:
            NotBuilt: Call `build` first.
            Exception: The first error of an earlier replay that nobody awaited.

        Cancellation: leaves at once and drops nothing.
        """
        await self._ready().fence(None)

    # ---- members -------------------------------------------------------------------------------------------------

    def member(self, name_or_index: str | int | MemberHandle) -> MemberHandle:
        """Find a member, before or after `build`.

        Args:
            name_or_index: Its name, its index in the order of registration, or its handle.

        Raises:
            UnknownMemberError: There is none; the message lists what there is.
            TypeError: Neither name, index nor handle.
        """
        if isinstance(name_or_index, MemberHandle):
            if name_or_index.serial == self._serial:
                return name_or_index
        elif isinstance(name_or_index, str):
            if name_or_index in self._named:
                return self._named[name_or_index]
        else:
            index = _index(name_or_index)
            if 0 <= index < len(self._handles):
                return self._handles[index]
        known = ", ".join(map(repr, self._named)) or "none"
        raise UnknownMemberError(
            f"pipeline {self._name!r} has no member {name_or_index!r}; it has {len(self._handles)} members "
            f"(give an index below that), with the names: {known}",
            name_or_index if isinstance(name_or_index, (str, int)) else str(name_or_index),
        )

    def is_member_toggleable(self, handle_or_index: str | int | MemberHandle) -> bool:
        """Whether `set_member_enabled` takes the member: it holds only kernels, copies and fills (host: a plain step).

        Raises:
            UnknownMemberError: There is no such member.
            NotBuilt: Call `build` first.
        """
        handle = self.member(handle_or_index)
        return self._ready().is_toggleable(handle.index)

    def set_member_enabled(self: P, handle_or_index: str | int | MemberHandle, enabled: bool) -> P:
        """Switch one member on or off for every replay issued from now on; nothing is recorded again.

        Replays in flight keep the state they were issued with. What a member that is off would write stays as it is.

        Args:
            handle_or_index: Its handle, name or index.
            enabled: Whether it runs.

        Returns:
            The pipeline.

        Raises:
            UnknownMemberError: There is no such member.
            NonToggleableMemberError: It is a `Skippable` or a loop, or holds other nodes.
            NotBuilt: Call `build` first.
        """
        handle = self.member(handle_or_index)
        graph = self._ready()
        if not graph.is_toggleable(handle.index):
            member = handle.index if handle.name is None else handle.name
            raise NonToggleableMemberError(
                f"member {member!r} of pipeline {self._name!r} cannot be switched: it holds more than kernels, copies "
                "and fills (a Skippable or a RepeatWhile always does); let a guard's word decide instead",
                member,
            )
        graph.set_enabled(handle.index, bool(enabled))
        return self

    def set_node_enabled(self: P, node: int, enabled: bool) -> P:
        """Switch one raw node, past the members; for callers that keep track of nodes themselves.

        Args:
            node: A handle from `member_nodes` of this pipeline.
            enabled: Whether it runs.

        Returns:
            The pipeline.

        Raises:
            UnknownMemberError: No node of this pipeline has that handle.
            NonToggleableMemberError: Its member cannot be switched.
            NotBuilt: Call `build` first.
        """
        self._ready().set_node_enabled(_index(node), bool(enabled))
        return self

    def member_nodes(self, handle_or_index: str | int | MemberHandle) -> list[int]:
        """The raw handles of the nodes that a member added to the graph, as a new list (host: opaque numbers).

        Raises:
            UnknownMemberError: There is no such member.
            NotBuilt: Call `build` first.
        """
        handle = self.member(handle_or_index)
        return self._ready().member_nodes(handle.index)

    # ---- looking inside ------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Any:
        """The captured graph as cuda-core has it; None before `build` and on the host."""
        return self._graph.captured

    @property
    def stream(self) -> int:
        """The pipeline's own stream as a raw handle (host: an opaque number), fixed for its life and never 0.

        For work that must be ordered with the replays, such as warming up a library before `build`.
        """
        return self._graph.stream

    def introspection_available(self) -> bool:
        """Whether `num_nodes` and its like answer: true once built."""
        return self._built

    def num_nodes(self) -> int:
        """How many kernel nodes the graph holds (host: steps).

        Raises:
            NotBuilt: Call `build` first.
        """
        return self._ready().num_nodes()

    def node_labels(self) -> list[str]:
        """The kernels' names in order of declaration (host: ``__qualname__`` of the steps).

        Raises:
            NotBuilt: Call `build` first.
        """
        return self._ready().node_labels()

    def to_dot(self) -> str:
        """The recorded graph in Graphviz' language, with the members' names.

        Raises:
            NotBuilt: Call `build` first.
        """
        return self._ready().to_dot()

    def announce_end(self, signal: EndSignal) -> AbstractGraph:
        """Say that the last step of the built pipeline adds 1 to a host word when a replay ends.

        Completions then look at that word before they ask the driver, which saves some microseconds a replay.

        Args:
            signal: The word, and how often it is expected to be raised; the pipeline keeps it.

        Returns:
            The graph, whose owner may issue replays that nobody else waits for (`CudaGraph.replay`).
        """
        graph = self._ready()
        graph.announce_end(signal)
        return graph

    # ---- inside --------------------------------------------------------------------------------------------------

    def _ready(self) -> AbstractGraph:
        if not self._built:
            raise NotBuilt(f"pipeline {self._name!r} is not built; call its build() first")
        return self._graph

    def _checked_seeds(self, seed_events: Iterable[object]) -> tuple[object, ...]:
        if not isinstance(seed_events, Iterable):
            raise TypeError(f"seed_events of pipeline {self._name!r} is {seed_events!r}; give a list")
        seeds = tuple(seed_events)
        for seed in seeds:
            if not isinstance(seed, Completion) and not (self._target == "cuda" and _is_cupy_event(seed)):
                kinds = (
                    "Completions or CuPy events"
                    if self._target == "cuda"
                    else "Completions (this one runs on the host)"
                )
                raise TypeError(f"seed_events of pipeline {self._name!r} holds {seed!r}; give {kinds}")
        return seeds


def _index(value: object) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{value!r} is neither a name nor an index nor a handle of this pipeline")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{value!r} is neither a name nor an index nor a handle of this pipeline") from None


def _is_cupy_event(seed: object) -> bool:
    import cupy

    return isinstance(seed, cupy.cuda.Event)
