"""GraphComposer in its four modes, on both targets."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import eagle
from eagle.errors import NonToggleableMemberError, NotBuilt, StateError
from tests.helpers.steps import Steps, held, until

if TYPE_CHECKING:
    from eagle.aio.completion import Completion

LIMIT_S = 20
FLAT = ["conditional", "enabled", "rebuild"]
MODES = [*FLAT, "sequenced"]
host = Steps("host")


@pytest.fixture
def steps(target: str) -> Steps:
    return Steps(target)


class Broken(Exception):
    pass


def breaks() -> None:
    raise Broken("no convergence")


def nothing() -> None:
    """A step without effect."""


class Unit:
    """A launchable that blocks and owns no stream."""

    def __init__(self, log: list[Any], tag: str) -> None:
        self.log, self.tag = log, tag

    def launch(self, n: int = 1) -> Unit:
        self.log.append((self.tag, n, threading.get_ident()))
        return self


class AsyncUnit(Unit):
    async def launch(self, n: int = 1) -> AsyncUnit:  # type: ignore[override]
        await anyio.sleep(0.002)
        self.log.append((self.tag, n, threading.get_ident()))
        return self


def composer(*members: Any, flags: Any = None, mode: str = "sequenced", target: str = "host") -> eagle.GraphComposer:
    made = eagle.GraphComposer(flags, mode=mode, target=target)
    for number, member in enumerate(members):
        made.register(member, name=f"member{number}")
    return made.build()


def flags_for(steps: Steps, mode: str, pattern: list[int]) -> Any:
    return steps.words(*pattern) if mode == "conditional" else pattern


class TestEveryMode:
    @pytest.mark.parametrize("mode", MODES)
    async def test_routing_decides_and_is_remembered(self, steps: Steps, mode: str) -> None:
        counts = [steps.words(0) for _ in range(3)]
        flags = flags_for(steps, mode, [1, 0, 1])
        made = composer(*map(steps.tick, counts), flags=flags, mode=mode, target=steps.target)
        assert await made.launch() is made
        assert made.set_routing([False, True, True]) is made
        await made.launch(2)
        made.set_routing(np.array([0, 0, 0]))
        await made.launch(5)
        made.set_routing((1, 1, 1))
        await made.launch()
        assert [steps.read(count) for count in counts] == [[2], [3], [4]]
        assert made.fired_history() == [frozenset(s) for s in ({0, 2}, {1, 2}, set(), {0, 1, 2})]
        assert made.fired_history() is not made.fired_history()
        assert made.reset_fired_history() is None
        assert made.fired_history() == []
        assert (made.mode, made.num_members, made.member_flags is flags) == (mode, 3, True)

    @pytest.mark.parametrize("mode", MODES)
    async def test_one_member_is_enough(self, steps: Steps, mode: str) -> None:
        count = steps.words(0)
        made = composer(steps.tick(count), flags=flags_for(steps, mode, [1]), mode=mode, target=steps.target)
        await made.launch(3)
        made.set_routing([0])
        await made.launch()
        assert steps.read(count) == [3]

    @pytest.mark.parametrize("mode", MODES)
    async def test_refusals_change_nothing(self, steps: Steps, mode: str) -> None:
        made = eagle.GraphComposer(flags_for(steps, mode, [1, 0]), mode=mode, target=steps.target)
        with pytest.raises(ValueError, match="no members"):
            made.build()
        for call in (lambda: made.set_routing([1, 1]), made.num_nodes, made.node_labels):
            with pytest.raises(NotBuilt):
                call()
        with pytest.raises(NotBuilt):
            await made.launch()
        first, second = steps.words(0), steps.words(0)
        step = steps.tick(first)
        made.register(step, name="a")
        with pytest.raises(ValueError, match="flags"):
            made.build()
        with pytest.raises(ValueError, match="already"):
            made.register(step)
        with pytest.raises(ValueError, match="'a' already"):
            made.register(steps.tick(second), name="a")
        for bad in (42, None, "step", object()):
            with pytest.raises(TypeError):
                made.register(bad)
        for bad in (3, ""):
            with pytest.raises(TypeError, match="name is"):
                made.register(nothing, name=bad)  # type: ignore[arg-type]
        assert made.register(steps.tick(second)) == 1
        made.build()
        for late in (lambda: made.register(nothing), made.build):
            with pytest.raises(StateError):
                late()
        for pattern in ([], [1], [1, 1, 1]):
            with pytest.raises(ValueError, match="2 members"):
                made.set_routing(pattern)
        with pytest.raises(ValueError, match="n is"):
            await made.launch(-1)
        await made.launch()
        assert (steps.read(first), steps.read(second)) == ([1], [0])

    @pytest.mark.parametrize("mode", MODES)
    def test_async_steps_are_refused(self, steps: Steps, mode: str) -> None:
        async def step() -> None: ...

        made = eagle.GraphComposer(flags_for(steps, mode, [1]), mode=mode, target=steps.target)
        with pytest.raises(TypeError, match="coroutine function"):
            made.register(step)

    @pytest.mark.parametrize("bad", ["parallel", "", None, 3])
    def test_an_unknown_mode(self, bad: Any) -> None:
        with pytest.raises(ValueError, match="mode is"):
            eagle.GraphComposer(None, mode=bad)

    def test_an_unknown_target(self) -> None:
        with pytest.raises(ValueError, match="target is"):
            eagle.GraphComposer(None, target="gpu")

    async def test_it_goes_without_the_collector(self) -> None:
        def use() -> weakref.ref[Any]:
            made = composer(host.pipeline(nothing), nothing, composer(host.pipeline(nothing)))
            return weakref.ref(made)

        gc.collect()
        gc.disable()
        try:
            assert use()() is None
        finally:
            gc.enable()


class TestFlatModes:
    @pytest.mark.parametrize("mode", FLAT)
    def test_nodes_are_counted_and_named(self, steps: Steps, mode: str) -> None:
        flags = flags_for(steps, mode, [1, 0, 1])
        made = composer(*(steps.tick(steps.words(0)) for _ in range(3)), flags=flags, mode=mode, target=steps.target)
        assert made.num_nodes() >= (2 if mode == "rebuild" else 3)
        assert len(made.node_labels()) == made.num_nodes()

    def test_there_may_be_no_graph(self, steps: Steps) -> None:
        sequenced = composer(nothing, target=steps.target)
        empty = composer(nothing, flags=[0], mode="rebuild", target=steps.target)
        for made in (sequenced, empty):
            for call in (made.num_nodes, made.node_labels):
                with pytest.raises(StateError):
                    call()

    @pytest.mark.parametrize("mode", FLAT)
    def test_what_belongs_to_sequenced(self, steps: Steps, mode: str) -> None:
        made = eagle.GraphComposer(flags_for(steps, mode, [1]), mode=mode, target=steps.target)
        with pytest.raises(ValueError, match="pre_launch"):
            made.register(nothing, pre_launch=nothing)
        with pytest.raises(ValueError, match="'sequenced'"):
            made.register(composer(nothing))
        for launchable in (Unit([], "u"), host.pipeline(nothing)):
            with pytest.raises(TypeError, match="callables"):
                made.register(launchable)

    async def test_enabled_refuses_guarded_members_as_a_whole(self, steps: Steps) -> None:
        count = steps.words(0)
        guarded = eagle.skippable(steps.tick(count), eagle.SkipGuard.nonzero(steps.words(1)))
        made = composer(steps.tick(count), guarded, mode="enabled", target=steps.target)
        with pytest.raises(NonToggleableMemberError, match="'member1'"):
            made.set_routing([0, 0])
        await made.launch()
        assert steps.read(count) == [2]
        made.set_routing([0, 1])
        await made.launch()
        assert steps.read(count) == [3]

    async def test_a_rebuild_that_fails_keeps_the_old_graph(
        self, steps: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        count = steps.words(0)
        made = composer(steps.tick(count), nothing, flags=[1, 0], mode="rebuild", target=steps.target)
        with monkeypatch.context() as patch:
            patch.setattr(eagle.GraphPipeline, "build", lambda self: breaks())
            with pytest.raises(Broken):
                made.set_routing([1, 1])
        await made.launch()
        assert (steps.read(count), made.fired_history()) == ([1], [frozenset({0})])

    async def test_conditional_flags_are_read_at_the_replay(self, steps: Steps) -> None:
        flags, counts = steps.words(0, 1), [steps.words(0), steps.words(0)]
        made = composer(*map(steps.tick, counts), flags=flags, mode="conditional", target=steps.target)
        await made.launch()
        steps.write(flags, 7, 0)
        await made.launch(2)
        assert [steps.read(count) for count in counts] == [[2], [1]]
        assert made.fired_history() == [frozenset({1}), frozenset({0})]

    @pytest.mark.parametrize(
        "bad", [None, [1, 0], np.ones(2, np.int64), np.ones((2, 2), np.uint32), np.float64(1.0)], ids=repr
    )
    def test_conditional_needs_the_targets_words(self, target: str, bad: Any) -> None:
        with pytest.raises(TypeError, match="uint32"):
            eagle.GraphComposer(bad, mode="conditional", target=target)

    async def test_the_error_of_a_step(self) -> None:
        made = composer(nothing, breaks, mode="enabled")
        with pytest.raises(Broken) as caught:
            await made.launch()
        assert "member 'member1'" in caught.value.__notes__[0]


class TestSequenced:
    async def test_pipelines_overlap(self, steps: Steps) -> None:
        latch, count = steps.latch(), steps.words(0)
        made = composer(steps.pipeline(latch), steps.pipeline(steps.tick(count)), target=steps.target)
        with anyio.fail_after(LIMIT_S), held(latch):
            async with anyio.create_task_group() as group:
                group.start_soon(made.launch)
                await until(lambda: latch.entered)
                with steps.side_stream() or anyio.CancelScope():
                    await until(lambda: steps.read(count) == [1])
                latch.open()

    async def test_others_run_in_order_beside_them(self) -> None:
        log: list[Any] = []
        latch = host.latch()
        made = composer(Unit(log, "a"), host.pipeline(latch), lambda: log.append(("f", 1, threading.get_ident())),
                        AsyncUnit(log, "b"), Unit(log, "c"))  # fmt: skip
        with anyio.fail_after(LIMIT_S), held(latch):
            async with anyio.create_task_group() as group:
                group.start_soon(made.launch, 2)
                await until(lambda: len(log) == 5)
                latch.open()
        assert [(tag, n) for tag, n, _ in log] == [("a", 2), ("f", 1), ("f", 1), ("b", 2), ("c", 2)]
        here = threading.get_ident()
        assert [thread == here for _, _, thread in log] == [False, False, False, True, False]

    async def test_what_a_launch_returns_is_awaited(self) -> None:
        latch = host.latch()
        pipe = host.pipeline(latch)

        class Hand:
            def launch(self, n: int = 1) -> Completion[Any]:
                return pipe.enqueue(n)

        made, ended = composer(Hand()), []

        async def go() -> None:
            ended.append(await made.launch())

        with anyio.fail_after(LIMIT_S), held(latch):
            async with anyio.create_task_group() as group:
                group.start_soon(go)
                await until(lambda: latch.entered)
                assert ended == []
                latch.open()

    async def test_hooks_come_before_their_members(self, steps: Steps) -> None:
        log = steps.log()
        inner = composer(steps.pipeline(steps.append(log, 2)), target=steps.target)
        made = eagle.GraphComposer(None, target=steps.target)
        made.register(steps.pipeline(steps.append(log, 11)), pre_launch=steps.append(log, 10))
        await made.build().launch(2)
        assert steps.logged(log) == [10, 11, 11]
        nested = eagle.GraphComposer([1, 0], target=steps.target)
        order: list[str] = []
        nested.register(inner, pre_launch=lambda: order.append("hook"))
        nested.register(Unit([], "off"), pre_launch=lambda: order.append("never"))
        await nested.build().launch()
        assert (order, steps.logged(log)[3:]) == (["hook"], [2])

    async def test_a_unit_has_a_hook_too(self) -> None:
        log: list[Any] = []
        made = eagle.GraphComposer(None, target="host")
        made.register(Unit(log, "u"), pre_launch=lambda: log.append("pre"))
        made.register(AsyncUnit(log, "v"), pre_launch=lambda: log.append("pre"))
        await made.build().launch(4)
        assert [entry if entry == "pre" else entry[:2] for entry in log] == ["pre", ("u", 4), "pre", ("v", 4)]

    async def test_composers_nest_and_route_at_each_level(self, steps: Steps) -> None:
        counts = [steps.words(0) for _ in range(4)]
        inner = composer(steps.pipeline(steps.tick(counts[0])), steps.tick(counts[1]), target=steps.target)
        middle = composer(inner, steps.pipeline(steps.tick(counts[2])), target=steps.target)
        outer = composer(middle, steps.tick(counts[3]), flags=[1, 1], target=steps.target)
        await outer.launch(2)
        inner.set_routing([0, 1])
        middle.set_routing([1, 0])
        await outer.launch()
        outer.set_routing([0, 1])
        await outer.launch()
        assert [steps.read(count) for count in counts] == [[2], [3], [2], [4]]
        assert inner.fired_history() == [frozenset({0, 1}), frozenset({1})]
        assert outer.fired_history() == [frozenset({0, 1}), frozenset({0, 1}), frozenset({1})]

    async def test_nested_pipelines_join_the_overlap(self) -> None:
        meet = threading.Barrier(4)
        pipes = [host.pipeline(lambda: meet.wait(LIMIT_S)) for _ in range(4)]
        made = composer(composer(pipes[0], composer(pipes[1])), pipes[2], pipes[3])
        with anyio.fail_after(LIMIT_S):
            await made.launch()

    def test_what_may_nest(self) -> None:
        unbuilt = eagle.GraphComposer(None, target="host")
        unbuilt.register(nothing)
        made = eagle.GraphComposer(None, target="host")
        with pytest.raises(ValueError, match="not built"):
            made.register(unbuilt)
        with pytest.raises(ValueError, match="'enabled'"):
            made.register(composer(nothing, mode="enabled"))

    def test_a_member_pipeline_must_be_built(self) -> None:
        made = eagle.GraphComposer(None, target="host")
        made.register(eagle.GraphPipeline(target="host").add(nothing), name="raw")
        with pytest.raises(NotBuilt, match="'raw'"):
            made.build()

    async def test_a_loop_as_a_plain_callable(self, steps: Steps) -> None:
        left, ran = steps.words(3), steps.words(0)
        await composer(
            eagle.repeat_while(steps.countdown(left, ran), eagle.SkipGuard.nonzero(left), 9), target=steps.target
        ).launch()
        assert steps.read(ran) == [3]


class TestWhatEndsASequence:
    async def test_a_failure_stops_the_rest_and_is_named(self) -> None:
        count, latch, log = host.words(0), host.latch(), []

        def bad() -> None:
            latch()
            breaks()

        made = composer(host.pipeline(host.tick(count), latch), host.pipeline(bad), Unit(log, "u"))
        with anyio.fail_after(LIMIT_S), held(latch):
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: expect(Broken, made, 1_000_000, "member 'member1'"))
                await until(lambda: latch.entered and log)
                latch.open()
        before = host.read(count)
        assert before[0] < 1_000_000
        await host.pipeline(nothing).launch()
        assert host.read(count) == before

    async def test_a_failing_callable_stops_the_pipelines(self) -> None:
        on, log = host.words(1), []
        endless = eagle.repeat_while(nothing, eagle.SkipGuard.nonzero(on), 2**32 - 1)
        made = composer(host.pipeline(endless), breaks, Unit(log, "never"))
        with anyio.fail_after(LIMIT_S):
            await expect(Broken, made, 1, "member 'member1'")
        assert log == []

    async def test_a_failing_pipeline_cuts_an_awaited_launch_short(self) -> None:
        class Sleeper:
            cut = False

            async def launch(self, n: int = 1) -> None:
                sleeping.set()
                try:
                    await anyio.sleep_forever()
                finally:
                    self.cut = True

        def bad() -> None:
            assert sleeping.wait(LIMIT_S)
            breaks()

        sleeper, sleeping = Sleeper(), threading.Event()
        with anyio.fail_after(LIMIT_S):
            await expect(Broken, composer(sleeper, host.pipeline(bad)), 1, "member 'member1'")
        assert sleeper.cut

    async def test_several_failures_leave_together(self) -> None:
        meet = threading.Barrier(3)

        def bad() -> None:
            meet.wait(LIMIT_S)
            breaks()

        made = composer(*(host.pipeline(bad) for _ in range(3)))
        with anyio.fail_after(LIMIT_S), pytest.raises(ExceptionGroup) as caught:
            await made.launch()
        assert all(isinstance(error, Broken) for error in caught.value.exceptions)
        named = [note for error in caught.value.exceptions for note in error.__notes__ if "Composer" in note]
        assert len(set(named)) == len(caught.value.exceptions) >= 2

    async def test_a_nested_member_is_named_with_its_place(self) -> None:
        made = composer(composer(nothing, host.pipeline(breaks)))
        await expect(Broken, made, 1, "member 'member1' within member 'member0'")

    async def test_a_failed_hook(self) -> None:
        made = eagle.GraphComposer(None, target="host")
        made.register(composer(nothing), name="inner", pre_launch=breaks)
        await expect(Broken, made.build(), 1, "'inner'")

    async def test_a_cancel_leaves_when_no_member_runs(self, steps: Steps) -> None:
        latches, left = [steps.latch() for _ in range(3)], []
        made = composer(*map(steps.pipeline, latches), target=steps.target)

        async def go() -> None:
            try:
                await made.launch()
            finally:
                left.append([latch.passed for latch in latches])

        with anyio.fail_after(LIMIT_S), held(*latches):
            async with anyio.create_task_group() as group:
                group.start_soon(go)
                await until(lambda: all(latch.entered for latch in latches))
                group.cancel_scope.cancel()
                latches[0].open()
                latches[1].open()
                with anyio.CancelScope(shield=True):
                    for _ in range(10):
                        await anyio.sleep(0.001)
                assert left == []
                latches[2].open()
        assert left == [[1, 1, 1]]
        with anyio.fail_after(LIMIT_S):
            assert await made.launch() is made

    async def test_a_cancel_waits_for_a_running_callable_and_starts_no_other(self) -> None:
        latch, log, left = host.latch(), [], []
        made = composer(latch, Unit(log, "never"))

        async def go() -> None:
            try:
                await made.launch(5)
            finally:
                left.append(latch.passed)

        with anyio.fail_after(LIMIT_S), held(latch):
            async with anyio.create_task_group() as group:
                group.start_soon(go)
                await until(lambda: latch.entered)
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.01)
                latch.open()
        assert (left, log) == ([1], [])


async def expect(error: type[Exception], made: eagle.GraphComposer, n: int, note: str) -> None:
    with pytest.raises(error) as caught:
        await made.launch(n)
    assert any(note in text for text in caught.value.__notes__), caught.value.__notes__


def test_flags_and_patterns_that_are_no_sequences() -> None:
    with pytest.raises(TypeError, match="flags"):
        eagle.GraphComposer(3, target="host")
    composer = eagle.GraphComposer(None, mode="rebuild", target="host")
    composer.register(print)
    composer.build()
    for pattern in (None, 3, np.ones((2, 2))):
        with pytest.raises(TypeError, match="pattern"):
            composer.set_routing(pattern)
