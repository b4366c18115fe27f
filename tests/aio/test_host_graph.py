"""What only the host target promises: errors of steps, context variables, concurrent members on threads."""

from __future__ import annotations

import contextvars
import threading
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

import eagle
from eagle.aio.completion import Completion
from eagle.aio.counters import statistics
from eagle.aio.tracing import trace
from eagle.errors import NonToggleableMemberError
from tests.helpers.steps import Steps, held, until

LIMIT_S = 20
steps = Steps("host")
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nobody's")


class Broken(Exception):
    pass


def breaks() -> None:
    raise Broken("the valve is stuck")


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))


class TestAStepThatRaises:
    async def test_the_very_error_arrives_with_the_place(self) -> None:
        mine = Broken("mine")

        def step() -> None:
            raise mine

        pipe = eagle.GraphPipeline("orbit", "host").add(step, name="drag").build()
        for _ in range(2):  # the note comes once, however often the same object is raised
            with pytest.raises(Broken) as caught:
                await pipe.launch()
            assert caught.value is mine
            assert notes(mine) == ["in pipeline 'orbit', member 'drag'"]

    async def test_its_traceback_begins_at_the_step(self) -> None:
        completion = steps.pipeline(breaks).enqueue()
        with pytest.raises(Broken) as caught:
            await completion
        names = [entry.name for entry in caught.traceback]
        assert names[-1] == "breaks"
        assert not {"_call", "_replay"} & set(names)

    async def test_the_rest_of_its_call_is_dropped_and_later_calls_run(self) -> None:
        count, fail = steps.words(0), [True]

        def step() -> None:
            if fail.pop() if fail else False:
                breaks()

        pipe = steps.pipeline(steps.tick(count), step)
        first, second = pipe.enqueue(5), pipe.enqueue(2)
        with pytest.raises(Broken):
            await first
        assert await second is pipe
        assert steps.read(count) == [3]

    async def test_a_hook_too(self) -> None:
        count = steps.words(0)
        pipe = eagle.GraphPipeline("orbit", "host").add(steps.tick(count)).build()
        with pytest.raises(Broken) as caught:
            await pipe.enqueue(pre_launch=breaks)
        assert notes(caught.value) == ["in pre_launch of pipeline 'orbit'"]
        assert steps.read(count) == [0]

    async def test_exits_are_errors_of_the_step(self) -> None:
        def leave() -> None:
            raise SystemExit(3)

        completion = steps.pipeline(leave).enqueue()
        with anyio.fail_after(LIMIT_S):
            await until(completion.done)
        assert isinstance(completion.error, SystemExit)

    async def test_one_of_concurrent_members(self) -> None:
        other = steps.words(0)
        pipe = eagle.GraphPipeline("orbit", "host")
        pipe.add_concurrent([steps.tick(other), breaks, breaks], names=["fine", "one", "two"])
        pipe.build()
        with pytest.raises(Broken) as caught:
            await pipe.launch()
        assert notes(caught.value)[0].startswith("in pipeline 'orbit', member ")

    async def test_nobody_awaits_it_and_synchronize_raises_it_once(self) -> None:
        fail = [True]

        def step() -> None:
            if fail[0]:
                breaks()

        pipe = steps.pipeline(step)
        completion = pipe.enqueue()
        with anyio.fail_after(LIMIT_S):
            await until(completion.done)
        fail[0] = False
        last = pipe.enqueue()
        with pytest.raises(Broken):
            await pipe.synchronize()
        assert await last is pipe
        await pipe.synchronize()

    async def test_one_that_was_awaited_is_not_raised_again(self) -> None:
        pipe = steps.pipeline(breaks)
        with pytest.raises(Broken):
            await pipe.launch()
        await pipe.synchronize()

    async def test_one_in_flight_is_raised_by_synchronize(self) -> None:
        latch = steps.latch()
        pipe = steps.pipeline(latch, breaks)
        errors: list[BaseException] = []

        async def synchronize() -> None:
            try:
                await pipe.synchronize()
            except Broken as error:
                errors.append(error)

        with anyio.fail_after(LIMIT_S), held(latch):
            pipe.enqueue()
            async with anyio.create_task_group() as group:
                group.start_soon(synchronize)
                await until(lambda: latch.entered)
                latch.open()
        assert len(errors) == 1


class TestSettingsOfTheCaller:
    async def test_steps_see_the_context_of_their_enqueue(self) -> None:
        seen: list[str] = []
        pipe = steps.pipeline(lambda: seen.append(variable.get()))
        for value in ("one", "two"):
            token = variable.set(value)
            await pipe.launch()
            variable.reset(token)
        await pipe.launch()
        assert seen == ["one", "two", "nobody's"]

    async def test_what_a_step_sets_stays_in_its_replay(self) -> None:
        seen: list[str] = []

        def step() -> None:
            seen.append(variable.get())
            variable.set("the step's")

        pipe = steps.pipeline(step)
        await pipe.launch(2)
        await pipe.launch()
        assert seen == ["nobody's", "the step's", "nobody's"]
        assert variable.get() == "nobody's"

    async def test_concurrent_members_see_it_too(self) -> None:
        seen: list[str] = []
        pipe = eagle.GraphPipeline(target="host")
        pipe.add_concurrent([lambda: seen.append(variable.get())] * 5)
        token = variable.set("mine")
        await pipe.build().launch()
        variable.reset(token)
        assert seen == ["mine"] * 5

    async def test_numpy_errors_are_the_callers(self) -> None:
        # BR-30: the caller's error state holds in the step, and nothing changes it here, whatever the step does.
        def divide() -> None:
            np.seterr(all="ignore") if quiet else None
            np.ones(1) / np.zeros(1)

        quiet = False
        pipe = steps.pipeline(divide)
        with np.errstate(all="raise"):
            with pytest.raises(FloatingPointError):
                await pipe.launch()
            quiet = True
            await pipe.launch()
            with anyio.move_on_after(0):
                await pipe.launch()
            assert set(np.geterr().values()) == {"raise"}
        quiet = False
        with np.errstate(all="ignore"):
            await pipe.launch()


class TestConcurrentMembers:
    async def test_they_meet(self) -> None:
        meet = threading.Barrier(4)
        pipe = eagle.GraphPipeline(target="host").add_concurrent([lambda: meet.wait(LIMIT_S)] * 4).build()
        with anyio.fail_after(LIMIT_S):
            await pipe.launch(3)

    async def test_many_of_them(self) -> None:
        counts = [steps.words(0) for _ in range(300)]
        pipe = eagle.GraphPipeline(target="host").add_concurrent([steps.tick(count) for count in counts]).build()
        with anyio.fail_after(LIMIT_S):
            await pipe.launch(3)
        assert [steps.read(count) for count in counts] == [[3]] * 300

    async def test_one_left_switched_on(self) -> None:
        counts = [steps.words(0) for _ in range(3)]
        pipe = eagle.GraphPipeline(target="host").add_concurrent([steps.tick(count) for count in counts]).build()
        pipe.set_member_enabled(0, False).set_member_enabled(2, False)
        await pipe.launch(2)
        assert [steps.read(count) for count in counts] == [[0], [2], [0]]

    async def test_without_helpers_they_run_in_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log: list[int] = []
        monkeypatch.setattr("eagle.aio.host_graph._HELPERS", 0)
        pipe = eagle.GraphPipeline(target="host")
        pipe.add_concurrent([partial(log.append, number) for number in range(5)])
        await pipe.build().launch()
        assert log == [0, 1, 2, 3, 4]


class TestStopping:
    async def test_replays_not_begun_are_dropped(self) -> None:
        latch, count = steps.latch(), steps.words(0)
        pipe = steps.pipeline(latch, steps.tick(count))
        with anyio.fail_after(LIMIT_S):
            with held(latch):
                running = pipe.enqueue(100)
                waiting = pipe.enqueue(100, pre_launch=breaks)
                untouched = pipe.enqueue()
                await until(lambda: latch.entered)
                running.stop()
                waiting.stop()
            assert [await completion for completion in (running, waiting, untouched)] == [pipe] * 3
        assert steps.read(count) == [2]  # the running replay to its end, and the untouched one

    async def test_a_loop_that_a_step_calls_itself_ends_too(self) -> None:
        on, ran = steps.words(1), steps.words(0)
        loop = eagle.repeat_while(steps.tick(ran), eagle.SkipGuard.nonzero(on), 2**32 - 1)
        with anyio.fail_after(LIMIT_S):
            with anyio.move_on_after(0.02):
                await steps.pipeline(lambda: loop()).launch()
        assert steps.read(ran) == [loop.iterations()]

    async def test_loops_among_concurrent_members_end_too(self) -> None:
        on, ran = steps.words(1), [steps.words(0) for _ in range(3)]
        loops = [eagle.repeat_while(steps.tick(word), eagle.SkipGuard.nonzero(on), 2**32 - 1) for word in ran]
        pipe = eagle.GraphPipeline(target="host").add_concurrent(loops).build()
        with anyio.fail_after(LIMIT_S):
            with anyio.move_on_after(0.02):
                await pipe.launch()


class TestNodes:
    def test_labels_are_the_steps_names(self) -> None:
        guard = eagle.SkipGuard.nonzero(steps.words(1))
        pipe = eagle.GraphPipeline("orbit", "host")
        pipe.add(breaks).add(eagle.skippable(breaks, guard)).add(partial(breaks))
        pipe.add_concurrent([eagle.repeat_while((breaks, eagle.skippable(breaks, guard)), guard, 7), steps.latch()])
        pipe.build()
        assert pipe.node_labels() == ["breaks", "breaks", "partial", "breaks", "breaks", "Latch"]
        assert pipe.num_nodes() == 6
        assert [len(pipe.member_nodes(index)) for index in range(5)] == [1, 1, 1, 2, 1]
        assert (pipe.graph, pipe.stream != 0) == (None, True)

    def test_a_node_of_a_guarded_member_is_not_switched(self) -> None:
        guard = eagle.SkipGuard.nonzero(steps.words(1))
        pipe = steps.pipeline(eagle.skippable(breaks, guard))
        with pytest.raises(NonToggleableMemberError):
            pipe.set_node_enabled(pipe.member_nodes(0)[0], False)

    def test_the_picture(self) -> None:
        guard = eagle.SkipGuard.nonzero(steps.words(1))
        pipe = eagle.GraphPipeline('or"bit', "host").add(breaks, name="drag")
        pipe.add_concurrent([eagle.skippable(breaks, guard), eagle.repeat_while(breaks, guard, 7)]).build()
        assert pipe.to_dot().splitlines() == [
            'digraph "or\\"bit" {',
            "  node [shape=box, fontname=monospace];",
            "  m0 [label=\"member 'drag'\\nbreaks\"];",
            '  m1 [label="member 1\\nif:\\nbreaks"];',
            '  m2 [label="member 2\\nwhile, at most 7 times:\\nbreaks"];',
            "  m0 -> m1;",
            "  m0 -> m2;",
            "}",
        ]


class TestFigures:
    async def test_statistics_count_every_fate(self) -> None:
        before = statistics()
        good, latch = steps.pipeline(lambda: None), steps.latch()
        await good.launch()
        with pytest.raises(Broken):
            await steps.pipeline(breaks).launch()
        with held(latch):
            stopped = steps.pipeline(latch).enqueue(5)
            stopped.stop()
        await stopped
        after = statistics()
        assert (after.done, after.failed, after.cancelled) == (before.done + 1, before.failed + 1, before.cancelled + 1)
        assert after.in_flight == before.in_flight

    async def test_a_trace_shows_waits_and_replays(self, tmp_path: Any) -> None:
        path = tmp_path / "trace.json"
        pipe = eagle.GraphPipeline("orbit", "host").add(lambda: None).build()
        with trace(path):
            await pipe.launch(3)
        text = path.read_text()
        assert "queue of orbit" in text
        assert '"replay"' in text


async def test_a_seed_orders_whatever_its_end() -> None:
    seed, count = Completion(None), steps.words(0)
    completion = steps.pipeline(steps.tick(count)).enqueue(seed_events=[seed])
    seed.settle(Broken("only an order"))
    await completion
    assert steps.read(count) == [1]
