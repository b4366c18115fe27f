"""GraphComposer: members composed into one launch list, four ways.

``sequenced`` keeps every member's own way of launching and lets pipelines overlap. The three flat modes put plain steps
into one pipeline of the composer's own: ``conditional`` behind guards whose flags the device reads, ``enabled`` with
members switched between replays, ``rebuild`` recorded anew from the active members at every `set_routing`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np

from eagle.aio.completion import leave_when_done
from eagle.aio.guards import SkipGuard, Skippable
from eagle.aio.overlap import Part, launch_together
from eagle.aio.pipeline import GraphPipeline
from eagle.aio.pipeline_arguments import check_hook, check_replays, check_step
from eagle.aio.target import choose_target
from eagle.errors import NonToggleableMemberError, NotBuilt, StateError

if TYPE_CHECKING:
    from eagle.aio.target import Target

__all__ = ("GraphComposer",)

C = TypeVar("C", bound="GraphComposer")
_Mode = Literal["sequenced", "conditional", "enabled", "rebuild"]
_MODES = ("sequenced", "conditional", "enabled", "rebuild")
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One registered member."""

    obj: Any
    kind: Literal["pipeline", "composer", "launch", "step"]
    name: str | None
    index: int
    pre_launch: Callable[[], object] | None

    @property
    def label(self) -> str:
        return f"member {self.index}" if self.name is None else f"member {self.name!r}"


class GraphComposer:
    """Members composed into one launch list.

    Args:
        member_flags: Which members are active. ``mode="conditional"``: a uint32 array of the target, one lane for each
            member (CuPy on the GPU, NumPy on the host), read by the device at every replay. The other modes: any
            sequence of true and false values, read by `build`; None for all. Kept by reference, never rebound.
        mode: "sequenced", "conditional", "enabled" or "rebuild"; see the module's description.
        target: Where the flat modes run: "cuda", "host", or None for the GPU when one can be used.

    Raises:
        ValueError: An unknown mode or target.
        TypeError: `member_flags` is no sequence; ``mode="conditional"`` without a one-dimensional uint32 array of the
            target.
        BackendUnavailable: ``target="cuda"`` without a usable GPU.
    """

    def __init__(self, member_flags: Any, *, mode: str = "sequenced", target: str | None = None) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode is {mode!r}; give one of {', '.join(map(repr, _MODES))}")
        self._target: Target = choose_target(target)
        if mode == "conditional":
            _check_flags(member_flags, self._target)
        elif member_flags is not None and (
            isinstance(member_flags, (str, bytes)) or not hasattr(member_flags, "__len__")
        ):
            raise TypeError(f"the members' flags are {member_flags!r}; give one true or false value for each, or None")
        self._mode = cast("_Mode", mode)
        self._flags = member_flags
        self._name = f"composer-{next(_numbers)}"
        self._entries: list[_Entry] = []
        self._active: list[bool] = []
        self._built = False
        self._pipe: GraphPipeline | None = None
        # The conditional mode keeps copies of its flags: reading them at once would wait for the device.
        self._history: list[Any] = []

    def __repr__(self) -> str:
        """Name, mode and state."""
        state = "built" if self._built else "not built"
        return f"<{type(self).__name__} {self._name!r}, {self._mode}: {len(self._entries)} members, {state}>"

    @property
    def member_flags(self) -> Any:
        """The object given to the constructor."""
        return self._flags

    @property
    def mode(self) -> str:
        """The mode given to the constructor."""
        return self._mode

    @property
    def num_members(self) -> int:
        """How many members are registered."""
        return len(self._entries)

    # ---- registering ---------------------------------------------------------------------------------------------

    def register(self, obj: Any, *, name: str | None = None, pre_launch: Callable[[], object] | None = None) -> int:
        """Register one member.

        Args:
            obj: A callable without arguments, in every mode. In ``sequenced`` mode also an object with ``launch(n)``
                (a pipeline overlaps with others; a ``launch`` that is a coroutine function is awaited) and a built
                ``sequenced`` composer.
            name: For errors; unique.
            pre_launch: ``sequenced`` only: called once before the member's replays at every launch, on a pipeline's own
                stream, otherwise on the host.

        Returns:
            Its index, in the order of registration.

        Raises:
            StateError: The composer is built already.
            TypeError: `obj` is none of these.
            ValueError: `obj` or `name` is registered already, `pre_launch` or a composer outside of ``sequenced``
                mode, or a composer that is not built or not ``sequenced``.
        """
        if self._built:
            raise StateError(f"{self._name} is built; register every member before build(), or make another")
        kind = self._kind_of(obj)
        if any(entry.obj is obj for entry in self._entries):
            raise ValueError(f"{obj!r} is a member of {self._name} already; register each object once")
        if name is not None:
            self._check_name(name)
        if pre_launch is not None:
            if self._mode != "sequenced":
                raise ValueError(f"pre_launch is for mode='sequenced', not {self._mode!r}; make it a member of its own")
            check_hook(pre_launch)
        self._entries.append(_Entry(obj, kind, name, len(self._entries), pre_launch))
        return len(self._entries) - 1

    def _kind_of(self, obj: Any) -> Literal["pipeline", "composer", "launch", "step"]:
        if isinstance(obj, GraphComposer):
            if self._mode != "sequenced" or obj._mode != "sequenced":
                raise ValueError(
                    f"a composer of mode {obj._mode!r} cannot be a member of one of mode {self._mode!r}; both must be "
                    "'sequenced'"
                )
            if not obj._built:
                raise ValueError(f"{obj._name} is not built; call its build() before it becomes a member")
            return "composer"
        if self._mode == "sequenced":
            if isinstance(obj, GraphPipeline):
                return "pipeline"
            if callable(getattr(obj, "launch", None)) and not isinstance(obj, type):
                return "launch"
        elif not callable(obj):
            raise TypeError(f"mode={self._mode!r} takes callables without arguments as members; got {obj!r}")
        check_step(obj, f"a member of {self._name}")
        return "step"

    def _check_name(self, name: object) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a member's name is {name!r}; give a str that is not empty, or None")
        if any(entry.name == name for entry in self._entries):
            raise ValueError(f"{self._name} has a member {name!r} already; names are unique")

    def build(self: C) -> C:
        """Set up what the mode needs; in the flat modes, record the members into one pipeline. Plain and blocking.

        Returns:
            The composer.

        Raises:
            ValueError: No members, or flags of another length.
            StateError: The composer is built already.
            NotBuilt: A member pipeline is not built.
            Exception: What a step raised while it was captured; the composer may be built again.
        """
        if self._built:
            raise StateError(f"{self._name} is built already; make another composer to record anew")
        if not self._entries:
            raise ValueError(f"{self._name} has no members; register() some before build()")
        for entry in self._entries:
            if entry.kind == "pipeline" and not entry.obj.introspection_available():
                raise NotBuilt(f"{entry.label} of {self._name} is not built; call its build() first")
        if self._flags is not None and len(self._flags) != len(self._entries):
            raise ValueError(
                f"{self._name} has {len(self._entries)} members and {len(self._flags)} flags; give one for each"
            )
        conditional = self._mode == "conditional"
        active = [True] * len(self._entries) if self._flags is None or conditional else _truths(self._flags)
        self._pipe = self._recorded(active)
        if self._mode == "enabled":
            self._switch([True] * len(active), active)
        self._active = active
        self._built = True
        return self

    def _recorded(self, active: Sequence[bool]) -> GraphPipeline | None:
        """The pipeline of a flat mode; None without members and in ``sequenced`` mode."""
        steps = []
        for entry, on in zip(self._entries, active, strict=True):
            if self._mode == "conditional":
                steps.append((Skippable(entry.obj, SkipGuard.intent(self._flags, entry.index)), entry.name))
            elif self._mode == "enabled" or (self._mode == "rebuild" and on):
                steps.append((entry.obj, entry.name))
        if not steps:
            return None
        pipe = GraphPipeline(self._name, self._target)
        if len(steps) == 1:
            pipe.add(steps[0][0], name=steps[0][1])
        else:
            pipe.add_concurrent([step for step, _ in steps], names=[name for _, name in steps])
        return pipe.build()

    # ---- routing -------------------------------------------------------------------------------------------------

    def set_routing(self: C, pattern: Sequence[object]) -> C:
        """Choose the active members for the launches from now on.

        ``conditional`` writes the flags' array in place, on the caller's current stream; ``enabled`` switches members;
        ``rebuild`` records anew, here and not at the next launch; ``sequenced`` only notes it.

        Args:
            pattern: One true or false value for each member.

        Returns:
            The composer.

        Raises:
            NotBuilt: Call `build` first.
            TypeError: The pattern is no sequence of values; nothing has changed.
            ValueError: Another length; nothing has changed.
            NonToggleableMemberError: ``enabled`` mode, for a member that cannot be switched; nothing has changed.
        """
        self._check_built()
        active = _truths(pattern)
        if len(active) != len(self._entries):
            raise ValueError(f"{self._name} has {len(self._entries)} members; the pattern has {len(active)} values")
        if self._mode == "conditional":
            _write_flags(self._flags, active)
        elif self._mode == "enabled":
            self._switch(self._active, active)
        elif self._mode == "rebuild":
            self._pipe = self._recorded(active)
        self._active = active
        return self

    def _switch(self, before: Sequence[bool], after: Sequence[bool]) -> None:
        pipe = cast("GraphPipeline", self._pipe)
        changed = [index for index, (was, on) in enumerate(zip(before, after, strict=True)) if was != on]
        for index in changed:
            if not pipe.is_member_toggleable(index):
                raise NonToggleableMemberError(
                    f"{self._entries[index].label} of {self._name} cannot be switched: it holds more than kernels, "
                    "copies and fills; use mode='conditional' or 'rebuild'",
                    index,
                )
        for index in changed:
            pipe.set_member_enabled(index, after[index])

    # ---- launching -----------------------------------------------------------------------------------------------

    async def launch(self: C, n: int = 1) -> C:
        """Launch the active members `n` times and wait for them.

        In ``sequenced`` mode pipelines (also those of nested composers) overlap on their own streams; the other members
        run in order, off the event loop's thread, meanwhile. The flat modes replay their one pipeline.

        Args:
            n: How many replays; a plain callable is called `n` times.

        Returns:
            The composer.

        Raises:
            NotBuilt: Call `build` first.
            Exception: What the one failed member raised, with a note that names it; the others were stopped first.
            ExceptionGroup: Several members failed.

        Cancellation: what has not begun is dropped, loops end early, and it leaves when no member runs any more.
        """
        self._check_built()
        n = check_replays(n)
        if self._mode == "sequenced":
            await launch_together(self._begin(""), n)
            return self
        self._history.append(self._flags.copy() if self._mode == "conditional" else self._fired(self._active))
        if self._pipe is not None:
            await leave_when_done(self._pipe.enqueue(n))
        return self

    def _begin(self, within: str) -> Iterator[Part]:
        """The parts of one sequenced launch, nested ones in their places; notes who fires."""
        self._history.append(self._fired(self._active))
        for entry, on in zip(self._entries, self._active, strict=True):
            if not on:
                continue
            label = entry.label + within
            if entry.kind != "composer":
                yield Part(label, entry.kind, entry.obj, entry.pre_launch)
                continue
            if entry.pre_launch is not None:
                yield Part(label, "hook", None, entry.pre_launch)
            yield from entry.obj._begin(f" within {label}")

    @staticmethod
    def _fired(active: Sequence[object]) -> frozenset[int]:
        return frozenset(index for index, on in enumerate(active) if on)

    def fired_history(self) -> list[frozenset[int]]:
        """The indices of the members that fired, one set for each `launch` call, oldest first; a new list.

        In ``conditional`` mode on the GPU this waits for the flags that it has not read yet.
        """
        for index, seen in enumerate(self._history):
            if not isinstance(seen, frozenset):
                self._history[index] = self._fired(_host(seen))
        return list(self._history)

    def reset_fired_history(self) -> None:
        """Forget who fired; the routing stays."""
        self._history.clear()

    # ---- looking inside ------------------------------------------------------------------------------------------

    def num_nodes(self) -> int:
        """How many kernel nodes the flat modes' graph holds (host: steps).

        Raises:
            NotBuilt: Call `build` first.
            StateError: There is no single graph: ``sequenced`` mode, or ``rebuild`` without an active member.
        """
        return self._graph_pipe().num_nodes()

    def node_labels(self) -> list[str]:
        """The kernels' names in order of declaration (host: the steps').

        Raises:
            NotBuilt: Call `build` first.
            StateError: There is no single graph: ``sequenced`` mode, or ``rebuild`` without an active member.
        """
        return self._graph_pipe().node_labels()

    def _graph_pipe(self) -> GraphPipeline:
        self._check_built()
        if self._pipe is None:
            why = "mode='sequenced' has no graph of its own" if self._mode == "sequenced" else "no member is active"
            raise StateError(f"{self._name}: {why}; ask the members themselves, or route some")
        return self._pipe

    def _check_built(self) -> None:
        if not self._built:
            raise NotBuilt(f"{self._name} is not built; call its build() first")


def _check_flags(flags: Any, target: Target) -> None:
    from eagle.kernels.device import is_cupy

    right = is_cupy(flags) if target == "cuda" else isinstance(flags, np.ndarray)
    if not right or flags.dtype != np.uint32 or flags.ndim != 1:
        kind = "CuPy" if target == "cuda" else "NumPy"
        got = f"{type(flags).__name__}, {flags.dtype}, shape {flags.shape}" if right else repr(type(flags).__name__)
        raise TypeError(f"mode='conditional' on {target} needs a one-dimensional {kind} array of uint32; got {got}")


def _truths(pattern: Any) -> list[bool]:
    try:
        return [bool(value) for value in _host(pattern)]
    except (TypeError, ValueError):
        raise TypeError(f"a pattern is one true or false value for each member; got {pattern!r:.60}") from None


def _host(values: Any) -> Any:
    from eagle.kernels.device import is_cupy

    return values.get() if is_cupy(values) else values


def _write_flags(flags: Any, active: Sequence[bool]) -> None:
    from eagle.kernels.device import is_cupy, require_cupy

    words = np.array(active, np.uint32)
    flags[...] = require_cupy().asarray(words) if is_cupy(flags) else words
