"""The contract behind both kinds of graph: `eagle.aio.host_graph.HostGraph` and `eagle.aio.cuda_graph.CudaGraph`.

`GraphPipeline` checks every argument, then talks to one `AbstractGraph`. A graph never sees a wrong argument, a step
that is no callable, a loop inside a loop or a call before `build`. It must never hold a reference to the pipeline but
through the completions it has issued (a cycle would keep device memory until the garbage collector comes).

States of a graph::

    new --build()--> built --issue()--> built, work in flight --> built
    new --build() raised--> new         nothing is left of the attempt; build() may be called again

What both targets promise, and one contract test checks on both:

- Work of one graph runs in the order of the `issue` calls, whichever threads they come from.
- A member with a plain step is toggleable unless the target says otherwise; `Skippable` and `RepeatWhile` never are.
- A replay runs with the member states of its `issue` call.
- `stop` ends work early, and never work of another completion.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from eagle.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eagle.aio.completion import Completion
    from eagle.aio.events import EndSignal

__all__ = ("AbstractGraph", "Member", "Stage", "Target", "blame", "choose_target", "new_graph")

T = TypeVar("T")
Target: TypeAlias = Literal["host", "cuda"]


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One registered step.

    Attributes:
        index: Its place in the order of registration, from 0, over all stages.
        name: The name the user gave, or None.
        step: A plain callable without arguments, a `Skippable` or a `RepeatWhile` (eagle.aio.guards).
    """

    index: int
    name: str | None
    step: Callable[[], object]

    def __str__(self) -> str:
        """How messages call it: ``member 'thermal'`` or ``member 3``."""
        return f"member {self.index}" if self.name is None else f"member {self.name!r}"


# The members of a stage may run at the same time; all of them end before the next stage begins.
Stage: TypeAlias = tuple[Member, ...]


class AbstractGraph(ABC):
    """A sequence of stages that is recorded once and replayed: on one stream, in order.

    Constructors take ``(name: str)``, the pipeline's name for messages, and start nothing but a stream.
    All methods may be called from any thread; `build` is called by one at a time. None of them waits for issued work.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._last: weakref.ref[Completion[Any]] | None = None

    @property
    @abstractmethod
    def stream(self) -> int:
        """The raw handle of the graph's own stream (host: an opaque number); never 0, and fixed for its life."""

    @property
    @abstractmethod
    def captured(self) -> object | None:
        """The recorded graph as the target's library has it; None before `build` and on the host."""

    # ---- recording -----------------------------------------------------------------------------------------------

    @abstractmethod
    def build(self, stages: Sequence[Stage]) -> None:
        """Record the stages; called again only when it raised.

        CUDA calls every step once, in order, with the graph's stream current, and weaves an IF node around a
        `Skippable` and a WHILE node around the parts of a `RepeatWhile` (a part may be a `Skippable`). The host calls
        no step.

        Args:
            stages: At least one, none empty; a stage of several members forks and joins.

        Raises:
            Exception: What a step raised, with a note (`add_note`) that names the pipeline and the member. The stream,
                the caller's current stream and device and the process are usable, and nothing of the attempt is left.
            TypeError: A guard's array is not of this target; names the member.
        """

    # ---- replaying -----------------------------------------------------------------------------------------------

    @abstractmethod
    def issue(
        self,
        result: T,
        n: int,
        *,
        pre_launch: Callable[[], object] | None,
        seeds: Sequence[object] | None,
    ) -> Completion[T]:
        """Issue `n` replays and return at once.

        The work is, in this order on the graph's stream: the waits for `seeds`, one call of `pre_launch`, `n` replays,
        the event of the completion. An error of a replay drops what is left of this call and reaches the completion's
        waiters; later calls are not touched.

        Args:
            result: What the completion gives back (the pipeline).
            n: At least 0; with 0 replays the waits and `pre_launch` still happen.
            pre_launch: CUDA calls it now, in this thread, with the graph's stream current, and lets its error out
                (nothing of this call was replayed then). The host runs it in the queue, in place, and its error is that
                of the completion.
            seeds: Completions, of any target, and on CUDA also CuPy events; this work begins behind them, however they
                ended. None: what the caller's current stream and the legacy stream hold now (nothing on the host).
                Empty: no waits.

        Returns:
            A new Completion, passed to `issued`, whose ``name`` is the graph's and whose ``stop`` asks this work, and
            no other, to end early: host replays not begun are dropped, loops (`RepeatWhile`) end before their next
            iteration, what stands behind a loop in the same replay still runs, device replays are all issued and run to
            their end. On the host the completion of dropped work settles without an error. ``stop`` never waits.

        Raises:
            DeviceFault: The device has failed before (CUDA).
            BackendUnavailable: CUDA in a forked child.
            StateError: The interpreter is exiting, or no thread could be started.
        """

    def issued(self, completion: Completion[Any]) -> None:
        """Note the newest completion; for `issue`, which calls it in the order of the work."""
        self._last = weakref.ref(completion)  # while it is pending, whoever runs the work holds it

    def announce_end(self, signal: EndSignal) -> None:  # noqa: B027 - the host knows its ends without being told
        """Note where each replay announces its end; see `GraphPipeline.announce_end`."""

    def pending(self) -> Completion[Any] | None:
        """The completion of the work issued last, when it may still be in flight: all earlier work ends before it."""
        return None if self._last is None else self._last()

    def fence(self, result: T) -> Completion[T]:
        """The end of everything issued so far, for `GraphPipeline.synchronize`.

        It raises, once, the first error of earlier work that no waiter was given. Anything else that was put on the
        graph's stream is waited for, too.
        """
        return self.issue(result, 0, pre_launch=None, seeds=())

    # ---- members -------------------------------------------------------------------------------------------------

    @abstractmethod
    def is_toggleable(self, index: int) -> bool:
        """Whether `set_enabled` may be called for the member: its nodes are kernels, copies and fills only."""

    @abstractmethod
    def set_enabled(self, index: int, enabled: bool) -> None:
        """Switch a toggleable member on or off for every later `issue`; nothing is recorded again."""

    @abstractmethod
    def set_node_enabled(self, node: int, enabled: bool) -> None:
        """Switch one node on or off for every later `issue`.

        Raises:
            UnknownMemberError: `node` is not one of `member_nodes` of any member.
            NonToggleableMemberError: It belongs to a member that cannot be toggled.
        """

    @abstractmethod
    def member_nodes(self, index: int) -> list[int]:
        """Raw handles of the nodes that the member added, as a new list."""

    # ---- looking inside ------------------------------------------------------------------------------------------

    @abstractmethod
    def num_nodes(self) -> int:
        """How many kernel nodes were recorded (host: steps, each part of a loop counted)."""

    @abstractmethod
    def node_labels(self) -> list[str]:
        """Their names in order of declaration (host: ``__qualname__`` of the steps)."""

    @abstractmethod
    def to_dot(self) -> str:
        """The recorded graph in Graphviz' language, with the members' names."""


def choose_target(target: str | None) -> Target:
    """What ``target=`` of a constructor means on this machine.

    Args:
        target: None for the GPU when one can be used, else the host; or "host" or "cuda".

    Raises:
        ValueError: Any other value.
        BackendUnavailable: "cuda", and no GPU can be used; the message says why.
    """
    given: object = target
    if given is not None and not (isinstance(given, str) and given in ("host", "cuda")):
        raise ValueError(f"target is {target!r}; give 'host', 'cuda', or None for the GPU when one can be used")
    if target == "host":
        return "host"
    from eagle.kernels.device import unusable_reason

    reason = unusable_reason()
    if reason is None:
        return "cuda"
    if target is None:
        return "host"
    raise BackendUnavailable(f"target='cuda' needs a GPU: {reason}. target='host' runs the same steps on the CPU")


def new_graph(target: Target, name: str, priority: int | None = None) -> AbstractGraph:
    """An empty graph of that target; a priority concerns the CUDA stream only."""
    if target == "host":
        from eagle.aio.host_graph import HostGraph

        return HostGraph(name)
    from eagle.aio.cuda_graph import CudaGraph

    return CudaGraph(name, priority=priority)


def blame(error: BaseException, text: str) -> None:
    """Note on an exception where it happened, once, such as ``in pipeline 'p', member 'thermal'``."""
    if text not in getattr(error, "__notes__", ()):
        error.add_note(text)
