"""Members launched together: pipelines overlap on their own streams while the others run one after the other.

A group ends as a task group does: nothing of it runs any more when it leaves. The first failure stops the rest, a
cancellation stops all of it, and what was stopped is waited for. There is no task for each member: sixty-four
pipelines in flight are one Completion to wait for.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import anyio

from eagle.aio.completion import Completion, drained, leave_when_done
from eagle.aio.guards import stop_word
from eagle.aio.offload import off_loop, on_the_callers_stream
from eagle.aio.target import blame
from eagle.aio.wake import Hook, mailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ("Part", "all_of", "launch_together")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """One member of a group.

    Attributes:
        label: What notes on errors call it, such as ``member 'thermal'``.
        kind: "pipeline" (issued at once), "launch" (an object with ``launch(n)``), "step" (a callable, called `n`
            times) or "hook" (nothing but its `pre_launch`, for the parts behind it).
        work: The pipeline, object or callable; None for a hook.
        pre_launch: Called once before the replays, or None.
    """

    label: str
    kind: Literal["pipeline", "launch", "step", "hook"]
    work: Any = None
    pre_launch: Callable[[], object] | None = None


async def launch_together(parts: Iterable[Part], n: int) -> None:
    """Launch every part `n` times and wait for all of them.

    Pipelines are issued first, in order. The other parts run behind each other, in order and off the event loop's
    thread, while the pipelines are in flight; a ``launch`` that is a coroutine function is awaited in this task.

    Raises:
        Exception: What the one failed part raised, with a note that names it.
        ExceptionGroup: Several failed.

    Cancellation: leaves when nothing of the group runs any more.
    """
    group = _Group(list(parts), n)
    try:
        await group.run()
    except GeneratorExit:  # the coroutine is thrown away: nothing can be awaited any more
        group.stop()
        raise
    except BaseException:
        group.stop()
        for _, completion in group.flight:
            await drained(completion)
        if not group.failures:
            raise
    await group.raise_failures()


class _Group:
    """The parts on their way.

    Attributes:
        flight: Parts that were issued, with their completions.
        failures: What parts raised, with their labels.
    """

    def __init__(self, parts: list[Part], n: int) -> None:
        self.flight: list[tuple[Part, Completion[Any]]] = []
        self.failures: list[Exception] = []
        self._n = n
        self._issued = [part for part in parts if part.kind in ("pipeline", "hook")]
        # Bound now: the caller's stream is the current one only until the first await.
        self._calls = [(part, _Call(part, n)) for part in parts if part.kind in ("launch", "step")]
        self._seeds = _shared_seeds([part.work for part in parts if part.kind == "pipeline"])
        self._hooks = {id(part): _bound(part.pre_launch) for part in parts if part.kind == "hook"}
        self._stopping = False
        self._cut: Callable[[], None] | None = None  # cancels the member that is awaited in this task

    async def run(self) -> None:
        """Launch the parts and wait for them; a part's error is noted and stops the rest."""
        for part in self._issued:
            if self._stopping:
                break
            try:
                if part.kind == "hook":
                    await off_loop(self._hooks[id(part)])
                else:
                    self._issue(part)
            except Exception as error:
                self._fail(part, error)
        for part, call in self._calls:
            if self._stopping:
                break
            try:
                await self._interruptible(call)
            except Exception as error:
                self._fail(part, error)
        if self.flight:
            await leave_when_done(all_of([completion for _, completion in self.flight], None), self.stop)

    def stop(self) -> None:
        """Ask everything to end early. Safe from any thread."""
        self._stopping = True
        for _, completion in self.flight:
            completion.stop()
        cut = self._cut
        if cut is not None:
            cut()

    async def raise_failures(self) -> None:
        """Raise what the parts raised, if anything. Everything in flight has ended."""
        for part, completion in self.flight:
            try:
                await completion
            except Exception as error:
                self._note(part, error)
        failures, self.failures = self.failures, []
        try:
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise ExceptionGroup(f"{len(failures)} members of a composer failed", failures)
        finally:
            del failures  # or the error would hold this frame, which holds the error

    def _issue(self, part: Part) -> None:
        seeds = self._seeds if part.work.target == "cuda" else ()
        completion = part.work.enqueue(self._n, pre_launch=part.pre_launch, seed_events=seeds)
        self.flight.append((part, completion))
        if self._stopping:  # an earlier one failed between these lines and did not see this one
            completion.stop()
        if completion.source is None:  # only host steps fail by themselves; a fault of the device ends all of them

            def ended() -> None:
                if completion.error is not None and not self._stopping:
                    self.stop()

            completion.when_settled(ended)

    def _fail(self, part: Part, error: Exception) -> None:
        self._note(part, error)
        self.stop()

    def _note(self, part: Part, error: Exception) -> None:
        blame(error, f"in {part.label} of a GraphComposer")
        self.failures.append(error)

    async def _interruptible(self, call: _Call) -> None:
        """Make the call; a failure in flight cuts it short where it awaits, and never where it blocks."""
        box = mailbox()
        if not call.is_async or box is None:
            await call()
            return
        with anyio.CancelScope() as scope:

            def cancel() -> None:  # on the loop's thread
                if self._cut is cut:
                    scope.cancel()

            def cut() -> None:  # on whatever thread
                box.post([Hook(cancel)])

            self._cut = cut
            try:
                if not self._stopping:
                    await call()
            finally:
                self._cut = None


class _Call:
    """How one part that is no pipeline is launched."""

    def __init__(self, part: Part, n: int) -> None:
        launch = part.work.launch if part.kind == "launch" else None
        self.is_async = launch is not None and inspect.iscoroutinefunction(launch)
        self._pre_launch = None if part.pre_launch is None else _bound(part.pre_launch)
        if launch is None:
            self._work: Callable[[], Any] = _bound(partial(_repeat, part.work, n))
        else:
            self._work = partial(launch, n) if self.is_async else _bound(partial(launch, n))

    async def __call__(self) -> None:
        if self._pre_launch is not None:
            await off_loop(self._pre_launch)
        answer = self._work() if self.is_async else await off_loop(self._work)
        if isinstance(answer, Awaitable):
            await _foreign(answer)


def _repeat(step: Callable[[], object], n: int) -> None:
    word = stop_word.get()
    for _ in range(n):
        if word is not None and word.asked:
            return
        step()


def _bound(fn: Callable[[], T] | None) -> Callable[[], T]:
    assert fn is not None
    return on_the_callers_stream(fn)


async def _foreign(answer: Awaitable[Any]) -> None:
    """Await what somebody else's ``launch`` returned, in a loop of its own where none runs."""
    if mailbox() is not None or isinstance(answer, Completion):
        await answer
        return

    async def wait() -> None:
        await answer

    asyncio.run(wait())


def all_of(completions: Sequence[Completion[Any]], result: T) -> Completion[T]:
    """A Completion that is done when all of `completions` are, however they ended."""
    several = _Several(completions)
    several.completion = Completion(result, name=f"{len(completions)} members", source=several)
    return several.completion


class _Several:
    """The source of `all_of`."""

    __slots__ = ("_completions", "_ended", "_observed", "completion")

    def __init__(self, completions: Sequence[Completion[Any]]) -> None:
        self.completion: Completion[Any]
        self._completions = completions
        self._ended = itertools.count(1)  # counts in one step, whichever threads come
        self._observed = itertools.count()

    @property
    def polled(self) -> bool:
        """As the slowest way among them."""
        return any(completion.source is not None and completion.source.polled for completion in self._completions)

    def check(self) -> bool:
        """Ask them in order; True when all have ended."""
        if not all(completion.done() for completion in self._completions):
            return False
        self.completion.settle()
        return True

    def observe(self) -> None:
        """Settle with the last of them, from now on."""
        if next(self._observed) == 0:
            for completion in self._completions:
                completion.when_settled(self._one_ended)

    def _one_ended(self) -> None:
        if next(self._ended) == len(self._completions):
            self.completion.settle()


def _shared_seeds(pipelines: Sequence[Any]) -> Sequence[object] | None:
    """What all the pipelines wait for: the caller's streams, recorded once. None: each records its own."""
    if sum(pipeline.target == "cuda" for pipeline in pipelines) < 2:
        return None
    import cupy

    current = cupy.cuda.get_current_stream()
    streams = [current] if current.ptr == 0 else [current, cupy.cuda.Stream.null]
    return [stream.record() for stream in streams]
