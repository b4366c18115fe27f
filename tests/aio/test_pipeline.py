"""GraphPipeline on both targets: one body for each promise."""

from __future__ import annotations

import functools
import gc
import pickle
import threading
import weakref
from typing import Any

import anyio
import numpy as np
import pytest

import eagle
from eagle.aio import poller
from eagle.aio.completion import Completion
from eagle.errors import (
    BackendUnavailable,
    LoopRunning,
    NonToggleableMemberError,
    NotBuilt,
    StateError,
    UnknownMemberError,
)
from tests.helpers.steps import Steps, held, until

LIMIT_S = 20


@pytest.fixture
def steps(target: str) -> Steps:
    return Steps(target)


def nothing() -> None:
    """A step without effect."""


class TestMaking:
    def test_unnamed_ones_are_numbered(self, target: str) -> None:
        first, second = eagle.GraphPipeline(target=target).name, eagle.GraphPipeline(None, target).name
        assert int(second.removeprefix("pipeline-")) == int(first.removeprefix("pipeline-")) + 1

    def test_it_says_what_it_is(self, target: str) -> None:
        pipe = eagle.GraphPipeline("orbit", target)
        assert (pipe.name, pipe.target) == ("orbit", target)
        assert repr(pipe) == f"<GraphPipeline 'orbit' on {target}: 0 members, not built>"

    @pytest.mark.parametrize("bad", ["gpu", "", "HOST", 3, True])
    def test_an_unknown_target(self, bad: Any) -> None:
        with pytest.raises(ValueError, match=r"target is .*'host', 'cuda'"):
            eagle.GraphPipeline(target=bad)

    def test_a_name_that_is_none(self) -> None:
        with pytest.raises(TypeError, match="name is a str"):
            eagle.GraphPipeline(3, "host")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="empty"):
            eagle.GraphPipeline("", "host")

    def test_without_a_gpu_none_is_the_host_and_cuda_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("eagle.kernels.device.unusable_reason", lambda: "the card is in the other machine")
        assert eagle.GraphPipeline().target == "host"
        with pytest.raises(BackendUnavailable, match=r"card is in the other machine.*target='host'"):
            eagle.GraphPipeline(target="cuda")

    def test_streams_are_their_own(self, target: str) -> None:
        pipes = [eagle.GraphPipeline(target=target) for _ in range(3)]
        streams = [pipe.stream for pipe in pipes]
        assert len(set(streams)) == 3
        assert 0 not in streams
        assert [pipe.stream for pipe in pipes] == streams


class TestRegistering:
    def test_it_chains(self, steps: Steps) -> None:
        count = steps.words(0)
        pipe = eagle.GraphPipeline(target=steps.target)
        assert pipe.add(steps.tick(count)) is pipe
        assert pipe.add_concurrent([steps.tick(steps.words(0)), steps.tick(steps.words(0))]) is pipe
        assert pipe.build() is pipe

    @pytest.mark.parametrize("bad", [None, 3, "step", [nothing]])
    def test_what_cannot_be_called(self, target: str, bad: Any) -> None:
        pipe = eagle.GraphPipeline(target=target)
        with pytest.raises(TypeError, match="a step is"):
            pipe.add(bad)
        with pytest.raises(TypeError, match="a step is"):
            pipe.add_concurrent([nothing, bad])

    def test_what_needs_arguments(self, target: str) -> None:
        pipe = eagle.GraphPipeline(target=target)
        with pytest.raises(TypeError, match=r"without arguments .*functools.partial"):
            pipe.add(lambda x: x)  # type: ignore[misc]
        pipe.add(functools.partial(lambda x: x, 1))
        pipe.add(lambda x=1: x)

    def test_what_is_async(self, target: str) -> None:
        async def step() -> None: ...

        class Step:
            async def __call__(self) -> None: ...

        guard = eagle.SkipGuard.nonzero(np.ones(1, np.uint32))
        pipe = eagle.GraphPipeline(target=target)
        for bad in (step, Step(), functools.partial(step), eagle.skippable(step, guard),
                    eagle.repeat_while((nothing, step), guard, 3)):  # fmt: skip
            with pytest.raises(TypeError, match="coroutine function"):
                pipe.add(bad)

        def generator() -> Any:
            yield

        with pytest.raises(TypeError, match="generator function"):
            pipe.add(generator)
        assert "0 members" in repr(pipe)

    @pytest.mark.parametrize("count", [0, 1])
    def test_a_stage_needs_two(self, target: str, count: int) -> None:
        with pytest.raises(ValueError, match="at least 2"):
            eagle.GraphPipeline(target=target).add_concurrent([nothing] * count)

    def test_a_stage_of_what_is_no_list(self, target: str) -> None:
        pipe = eagle.GraphPipeline(target=target)
        with pytest.raises(TypeError, match="members"):
            pipe.add_concurrent(None)  # type: ignore[arg-type]
        for names in ("ab", 3):
            with pytest.raises(TypeError, match="names"):
                pipe.add_concurrent([nothing, nothing], names=names)  # type: ignore[arg-type]
        assert "0 members" in repr(pipe)

    def test_names_are_unique_and_a_refused_stage_leaves_nothing(self, target: str) -> None:
        pipe = eagle.GraphPipeline(target=target).add(nothing, name="a")
        with pytest.raises(ValueError, match="'a' already"):
            pipe.add(nothing, name="a")
        with pytest.raises(ValueError, match="'b' already"):
            pipe.add_concurrent([nothing, nothing], names=["b", "b"])
        with pytest.raises(ValueError, match=r"one .*for each"):
            pipe.add_concurrent([nothing, nothing], names=["b"])
        for bad in (3, ""):
            with pytest.raises(TypeError, match="name is"):
                pipe.add(nothing, name=bad)  # type: ignore[arg-type]
        pipe.add(nothing, name="b")
        assert [pipe.member(key).index for key in ("a", "b")] == [0, 1]

    def test_not_once_it_is_built(self, steps: Steps) -> None:
        pipe = steps.pipeline(steps.tick(steps.words(0)))
        for call in (lambda: pipe.add(nothing), lambda: pipe.add_concurrent([nothing, nothing]), pipe.build):
            with pytest.raises(StateError, match="is built"):
                call()

    def test_nothing_to_build(self, target: str) -> None:
        with pytest.raises(ValueError, match="no steps"):
            eagle.GraphPipeline(target=target).build()

    @pytest.mark.parametrize("wrap", ["loop", "part", "skippable", "skippable part"])
    def test_loops_do_not_nest(self, steps: Steps, wrap: str) -> None:
        guard = eagle.SkipGuard.nonzero(steps.words(1))
        inner = eagle.repeat_while(nothing, guard, 2)
        outer = {
            "loop": lambda: eagle.repeat_while(inner, guard, 2),
            "part": lambda: eagle.repeat_while((nothing, inner), guard, 2),
            "skippable": lambda: eagle.skippable(inner, guard),
            "skippable part": lambda: eagle.repeat_while((nothing, eagle.skippable(inner, guard)), guard, 2),
        }[wrap]()
        pipe = eagle.GraphPipeline(target=steps.target).add(outer, name="outer")
        with pytest.raises(ValueError, match=r"'outer'.*do not nest"):
            pipe.build()
        assert not pipe.introspection_available()


class TestBeforeBuild:
    async def test_what_needs_the_graph_says_so(self, target: str) -> None:
        pipe = eagle.GraphPipeline("orbit", target).add(nothing)
        for call in (pipe.enqueue, pipe.num_nodes, pipe.node_labels, pipe.to_dot, lambda: pipe.member_nodes(0),
                     lambda: pipe.set_member_enabled(0, True), lambda: pipe.is_member_toggleable(0),
                     lambda: pipe.set_node_enabled(1, True)):  # fmt: skip
            with pytest.raises(NotBuilt, match=r"'orbit'.*build\(\)"):
                call()
        for coroutine in (pipe.launch, pipe.synchronize):
            with pytest.raises(NotBuilt):
                await coroutine()


class TestReplays:
    async def test_steps_run_in_order_at_every_replay(self, steps: Steps) -> None:
        log = steps.log()
        pipe = steps.pipeline(steps.append(log, 1), steps.append(log, 2))
        assert steps.logged(log) == []
        assert await pipe.launch() is pipe
        assert await pipe.enqueue(2) is pipe
        assert steps.logged(log) == [1, 2] * 3

    async def test_none_is_a_replay_too(self, steps: Steps) -> None:
        count, log = steps.words(0), steps.log()
        pipe = steps.pipeline(steps.tick(count))
        assert await pipe.launch(0) is pipe
        await pipe.enqueue(0, pre_launch=steps.append(log, 1))
        assert (steps.read(count), steps.logged(log)) == ([0], [1])
        await pipe.launch(np.int64(2))
        assert steps.read(count) == [2]

    @pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1.0, TypeError), ("1", TypeError), (True, TypeError),
                                                (None, TypeError)])  # fmt: skip
    async def test_a_count_that_is_none(self, steps: Steps, bad: Any, error: type[Exception]) -> None:
        count = steps.words(0)
        pipe = steps.pipeline(steps.tick(count))
        with pytest.raises(error, match="n is"):
            pipe.enqueue(bad)
        with pytest.raises(error, match="n is"):
            await pipe.launch(bad)
        assert steps.read(count) == [0]

    async def test_pre_launch_runs_once_in_its_place(self, steps: Steps) -> None:
        log = steps.log()
        pipe = steps.pipeline(steps.append(log, 9))
        first = pipe.enqueue(2, pre_launch=steps.append(log, 1))
        second = pipe.enqueue(pre_launch=steps.append(log, 2))
        await second
        assert first.done()
        assert steps.logged(log) == [1, 9, 9, 2, 9]

    async def test_what_is_no_hook_and_no_seed(self, steps: Steps) -> None:
        async def hook() -> None: ...

        pipe = steps.pipeline(steps.tick(steps.words(0)))
        for bad in (3, "x", hook):
            with pytest.raises(TypeError, match="pre_launch is"):
                pipe.enqueue(pre_launch=bad)  # type: ignore[arg-type]
        for seeds in ([3], [None], [object()]):
            with pytest.raises(TypeError, match="seed_events"):
                pipe.enqueue(seed_events=seeds)

    async def test_seeds_come_first(self, steps: Steps) -> None:
        log, latch = steps.log(), steps.latch()
        before = steps.pipeline(latch, steps.append(log, 1))
        behind = steps.pipeline(steps.append(log, 2))
        with anyio.fail_after(LIMIT_S):
            with held(latch):
                seed = before.enqueue()
                await until(lambda: latch.entered)
                completion = behind.enqueue(seed_events=[seed])
                for _ in range(5):
                    await anyio.sleep(0.001)
                assert not completion.done()
            await completion
        assert steps.logged(log) == [1, 2]

    async def test_a_seed_of_the_host_on_either_target(self, steps: Steps) -> None:
        count, seed = steps.words(0), Completion(None)
        pipe = steps.pipeline(steps.tick(count))
        completion = pipe.enqueue(seed_events=[seed])
        for _ in range(5):
            await anyio.sleep(0.001)
        assert not completion.done()
        seed.settle()
        with anyio.fail_after(LIMIT_S):
            await completion
        assert steps.read(count) == [1]

    async def test_many_in_flight_end_in_call_order(self, steps: Steps) -> None:
        log = steps.log()
        pipe = steps.pipeline(steps.append(log, 0))
        ended: list[int] = []
        with anyio.fail_after(LIMIT_S):
            completions = [pipe.enqueue(pre_launch=steps.append(log, i)) for i in range(20)]
            for number, completion in enumerate(completions):
                completion.add_done_callback(lambda _, number=number: ended.append(number))
            for completion in reversed(completions):
                await completion
            await until(lambda: len(ended) == 20)
        assert steps.logged(log)[::2] == list(range(20))

    async def test_from_several_threads_none_is_lost(self, steps: Steps) -> None:
        count = steps.words(0)
        pipe = steps.pipeline(steps.tick(count))

        def work() -> None:
            for completion in [pipe.enqueue(seed_events=()) for _ in range(50)]:
                completion.wait(LIMIT_S)

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(anyio.to_thread.run_sync, work)
        assert steps.read(count) == [200]

    async def test_concurrent_members_fork_and_join(self, steps: Steps) -> None:
        log, counts = steps.log(), [steps.words(0) for _ in range(3)]
        pipe = eagle.GraphPipeline(target=steps.target)
        pipe.add(steps.append(log, 1))
        pipe.add_concurrent([steps.tick(count) for count in counts])
        pipe.add(steps.append(log, 2))
        await pipe.build().launch(4)
        assert steps.logged(log) == [1, 2] * 4
        assert [steps.read(count) for count in counts] == [[4]] * 3

    async def test_pipelines_in_flight_overlap(self, steps: Steps) -> None:
        latch, count = steps.latch(), steps.words(0)
        stuck, free = steps.pipeline(latch), steps.pipeline(steps.tick(count))
        with anyio.fail_after(LIMIT_S), held(latch):
            completion = stuck.enqueue()
            await until(lambda: latch.entered)
            await free.enqueue(seed_events=())
            assert not completion.done()
        await completion


class TestSynchronize:
    async def test_it_waits_for_everything(self, steps: Steps) -> None:
        latch, ended = steps.latch(), []
        pipe = steps.pipeline(latch)

        async def synchronize() -> None:
            ended.append(await pipe.synchronize())

        with anyio.fail_after(LIMIT_S):
            with held(latch):
                completions = [pipe.enqueue() for _ in range(3)]
                async with anyio.create_task_group() as group:
                    group.start_soon(synchronize)
                    await until(lambda: latch.entered)
                    assert ended == []
                    latch.open()
        assert ended == [None]
        assert all(completion.done() for completion in completions)

    async def test_with_nothing_in_flight(self, steps: Steps) -> None:
        pipe = steps.pipeline(steps.tick(steps.words(0)))
        await pipe.synchronize()
        await pipe.launch()
        await pipe.synchronize()
        await pipe.synchronize()


class TestCancelling:
    async def test_a_launch_leaves_when_its_buffers_are_free(self, steps: Steps) -> None:
        latch, left = steps.latch(), []
        pipe = steps.pipeline(latch)

        async def go() -> None:
            try:
                await pipe.launch()
            finally:
                left.append(latch.passed)

        with anyio.fail_after(LIMIT_S), held(latch):
            async with anyio.create_task_group() as group:
                group.start_soon(go)
                await until(lambda: latch.entered)
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    for _ in range(10):
                        await anyio.sleep(0.001)
                assert left == []
                latch.open()
        assert left == [1]

    async def test_a_waiter_of_an_enqueue_leaves_at_once(self, steps: Steps) -> None:
        latch = steps.latch()
        pipe = steps.pipeline(latch)
        with anyio.fail_after(LIMIT_S):
            with held(latch):
                completion = pipe.enqueue(2)
                with anyio.move_on_after(0.02) as scope:
                    await completion
                assert scope.cancelled_caught
                assert not completion.done()
            assert await completion is pipe
        assert latch.passed == 2

    async def test_a_loop_ends_between_iterations_and_what_follows_runs(self, steps: Steps) -> None:
        on, log, ran = steps.words(1), steps.log(), steps.words(0)
        loop = eagle.repeat_while(steps.tick(ran), eagle.SkipGuard.nonzero(on), 2**32 - 1)
        pipe = steps.pipeline(loop, steps.append(log, 7))
        with anyio.fail_after(LIMIT_S):
            with anyio.move_on_after(0.1):
                await pipe.launch()
        assert steps.logged(log) == [7]
        assert steps.read(ran) == [loop.iterations()]

    async def test_a_launch_behind_it_starts_clean(self, steps: Steps) -> None:
        on, left, ran = steps.words(1), steps.words(3), steps.words(0)
        endless = eagle.repeat_while(steps.tick(ran), eagle.SkipGuard.nonzero(on), 2**32 - 1)
        pipe = steps.pipeline(endless, eagle.repeat_while(steps.countdown(left, ran), eagle.SkipGuard.nonzero(left), 9))
        with anyio.fail_after(LIMIT_S):
            with anyio.move_on_after(0.05):
                await pipe.launch()
            steps.write(on, 0)
            steps.write(left, 3)
            await pipe.launch()
        assert steps.read(left) == [0]

    async def test_only_the_cancelled_launch_is_stopped(self, steps: Steps) -> None:
        latch, on, ran = steps.latch(), steps.words(1), steps.words(0)
        left = steps.words(500)
        loop = eagle.repeat_while(steps.countdown(left, ran), eagle.SkipGuard.nonzero(left), 2**32 - 1)
        pipe = steps.pipeline(latch, loop)
        with anyio.fail_after(LIMIT_S), held(latch):
            before = pipe.enqueue()
            async with anyio.create_task_group() as group:
                group.start_soon(pipe.launch)
                await until(lambda: latch.entered)
                for _ in range(3):
                    await anyio.sleep(0.001)
                group.cancel_scope.cancel()
                latch.open()
            await before
        assert (steps.read(left), steps.read(on)) == ([0], [1])


class TestMembers:
    def test_by_name_index_and_handle(self, steps: Steps) -> None:
        pipe = eagle.GraphPipeline("orbit", steps.target)
        pipe.add(nothing, name="head").add_concurrent([nothing, nothing], names=["left", None])
        assert pipe.member("head") == pipe.member(0) == pipe.member(pipe.member(0))
        assert pipe.member("left") == pipe.member(np.int64(1)) != pipe.member(2)
        assert (pipe.member(1).index, pipe.member(1).name, pipe.member(1).pipeline) == (1, "left", "orbit")
        assert hash(pipe.member(1)) == hash(pipe.member("left"))

    @pytest.mark.parametrize("key", ["nobody", 2, -1, 99])
    def test_nobody_of_that_name(self, steps: Steps, key: Any) -> None:
        pipe = eagle.GraphPipeline("orbit", steps.target).add(nothing, name="a").add(nothing)
        with pytest.raises(UnknownMemberError, match=r"'orbit' has no member .*2 members.*'a'") as caught:
            pipe.member(key)
        assert caught.value.member == key
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    def test_a_handle_of_another_pipeline(self, steps: Steps) -> None:
        one, two = (eagle.GraphPipeline("same", steps.target).add(nothing, name="a") for _ in range(2))
        with pytest.raises(UnknownMemberError):
            two.member(one.member("a"))

    @pytest.mark.parametrize("key", [True, 1.0, None])
    def test_what_is_no_key(self, steps: Steps, key: Any) -> None:
        with pytest.raises(TypeError, match="neither a name nor an index"):
            eagle.GraphPipeline(target=steps.target).add(nothing).member(key)

    async def test_toggling_is_for_later_replays(self, steps: Steps) -> None:
        a, b, latch = steps.words(0), steps.words(0), steps.latch()
        pipe = eagle.GraphPipeline(target=steps.target)
        pipe.add(latch).add(steps.tick(a), name="a").add_concurrent([steps.tick(b), steps.tick(steps.words(0))])
        pipe.build()
        with anyio.fail_after(LIMIT_S):
            with held(latch):
                both = pipe.enqueue()
                assert pipe.set_member_enabled("a", False) is pipe
                pipe.set_member_enabled(2, False)
                neither = pipe.enqueue()
                pipe.set_member_enabled(pipe.member("a"), True)
                one = pipe.enqueue()
            await both
            await neither
            await one
        assert (steps.read(a), steps.read(b)) == ([2], [1])

    async def test_all_members_off(self, steps: Steps) -> None:
        count = steps.words(0)
        pipe = steps.pipeline(steps.tick(count), steps.tick(count))
        for index in range(2):
            pipe.set_member_enabled(index, False)
            pipe.set_member_enabled(index, False)
        await pipe.launch(3)
        assert steps.read(count) == [0]
        pipe.set_member_enabled(1, True)
        await pipe.launch()
        assert steps.read(count) == [1]

    async def test_guarded_members_cannot_be_switched(self, steps: Steps) -> None:
        flag, left, ran = steps.words(1), steps.words(2), steps.words(0)
        pipe = eagle.GraphPipeline(target=steps.target)
        pipe.add(steps.tick(ran), name="plain")
        pipe.add(eagle.skippable(steps.tick(ran), eagle.SkipGuard.nonzero(flag)), name="if")
        pipe.add(eagle.repeat_while(steps.countdown(left, ran), eagle.SkipGuard.nonzero(left), 9), name="while")
        pipe.build()
        assert [pipe.is_member_toggleable(index) for index in range(3)] == [True, False, False]
        for name in ("if", "while"):
            with pytest.raises(NonToggleableMemberError, match=f"'{name}'.*cannot be switched") as caught:
                pipe.set_member_enabled(name, False)
            assert caught.value.member == name
        await pipe.launch()
        assert steps.read(ran) == [4]

    async def test_nodes_are_disjoint_copies(self, steps: Steps) -> None:
        count = steps.words(0)
        pipe = steps.pipeline(steps.tick(count), steps.tick(count))
        nodes = [pipe.member_nodes(index) for index in range(2)]
        assert all(isinstance(node, int) for own in nodes for node in own)
        assert not set(nodes[0]) & set(nodes[1])
        pipe.set_node_enabled(nodes[0][0], False)
        nodes[0].clear()
        assert len(pipe.member_nodes(0)) == 1
        await pipe.launch()
        assert steps.read(count) == [1]
        pipe.set_node_enabled(pipe.member_nodes(0)[0], True)
        await pipe.launch()
        assert steps.read(count) == [3]

    def test_a_node_of_nobody(self, steps: Steps) -> None:
        pipe = steps.pipeline(steps.tick(steps.words(0)))
        with pytest.raises(UnknownMemberError, match="no node"):
            pipe.set_node_enabled(1, False)
        with pytest.raises(TypeError):
            pipe.set_node_enabled("a", False)  # type: ignore[arg-type]


class TestLookingInside:
    def test_counts_and_pictures(self, steps: Steps) -> None:
        flag = eagle.SkipGuard.nonzero(steps.words(1))
        pipe = eagle.GraphPipeline('or"bit', steps.target)
        pipe.add(steps.tick(steps.words(0)), name="head")
        pipe.add_concurrent([steps.tick(steps.words(0)), eagle.skippable(steps.tick(steps.words(0)), flag)])
        pipe.build()
        assert pipe.introspection_available()
        assert pipe.num_nodes() == len(pipe.node_labels()) >= 3
        dot = pipe.to_dot()
        assert dot.startswith("digraph")
        assert "head" in dot
        assert "->" in dot


class TestLifetime:
    async def test_a_dropped_pipeline_ends_its_replays(self, steps: Steps) -> None:
        latch, count = steps.latch(), steps.words(0)
        pipe = steps.pipeline(latch, steps.tick(count))
        with anyio.fail_after(LIMIT_S):
            with held(latch):
                pipe.enqueue(3)
                await until(lambda: latch.entered)
                del pipe
                gc.collect()
            await until(lambda: steps.read(count) == [3])

    async def test_it_goes_without_the_collector(self, steps: Steps) -> None:
        class Step:
            def __init__(self) -> None:
                self.step = steps.tick(steps.words(0))

            def __call__(self) -> None:
                self.step()

        async def use() -> weakref.ref[Any]:
            step = Step()
            pipe = steps.pipeline(step)
            await pipe.launch()
            await pipe.enqueue()
            await pipe.synchronize()
            return weakref.ref(step)

        gc.collect()
        gc.disable()
        try:
            reference = await use()
            with anyio.fail_after(LIMIT_S):
                await until(lambda: reference() is None)
        finally:
            gc.enable()

    async def test_beside_a_loop_that_only_a_stop_ends_others_may_be_dropped(
        self, steps: Steps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Destroying a graph waits for the device and holds the driver: nobody could stop the loop then."""
        monkeypatch.setattr(poller, "_MOST_JOBS", 2)
        on, count, others = steps.words(1), steps.words(0), steps.words(0)
        loop = steps.pipeline(eagle.repeat_while(steps.tick(count), eagle.SkipGuard.nonzero(on), 2**32 - 1))
        short = steps.pipeline(steps.tick(others))
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as group:
                group.start_soon(loop.launch)
                for _ in range(8):
                    await steps.pipeline(steps.tick(others)).launch()
                gc.collect()
                for _ in range(50):
                    await short.launch()
                group.cancel_scope.cancel()
        assert steps.read(others) == [58]
        await short.launch()


class TestBlockingCalls:
    async def test_a_pending_completion_refuses_to_block_a_loop(self, steps: Steps) -> None:
        latch = steps.latch()
        pipe = steps.pipeline(latch)
        with anyio.fail_after(LIMIT_S):
            with held(latch):
                completion = pipe.enqueue()
                await until(lambda: latch.entered)
                with pytest.raises(LoopRunning):
                    completion.wait()
            await completion
        assert completion.wait() is pipe

    async def test_no_step_runs_on_the_loops_thread(self) -> None:
        threads: list[int] = []
        pipe = Steps("host").pipeline(lambda: threads.append(threading.get_ident()))
        await pipe.launch(3)
        assert threading.get_ident() not in threads
        assert len(threads) == 3
