"""The blocking pipeline: the same object, whose launch and synchronize block."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from typing import Any

import anyio
import pytest

import eagle
import eagle.sync
from eagle.errors import LoopRunning, NotBuilt
from tests.helpers.child import run_script
from tests.helpers.steps import Steps, held, until_blocking


@pytest.fixture
def steps(target: str) -> Steps:
    return Steps(target)


def blocking(target: str, *steps: Any) -> eagle.sync.GraphPipeline:
    pipe = eagle.sync.GraphPipeline(target=target)
    for step in steps:
        pipe.add(step)
    return pipe.build()


def test_it_is_a_subclass_that_overrides_only_what_waits() -> None:
    assert issubclass(eagle.sync.GraphPipeline, eagle.GraphPipeline)
    own = {name for name in vars(eagle.sync.GraphPipeline) if not name.startswith("_")}
    assert own == {"launch", "synchronize"}


def test_launch_and_synchronize_block(steps: Steps) -> None:
    count = steps.words(0)
    pipe = blocking(steps.target, steps.tick(count))
    assert pipe.launch() is pipe
    assert pipe.launch(3) is pipe
    assert steps.read(count) == [4]
    completion = pipe.enqueue(2)
    assert pipe.synchronize() is None
    assert completion.done()
    assert completion.wait() is pipe
    assert steps.read(count) == [6]


def test_launch_waits_for_the_end(steps: Steps) -> None:
    latch = steps.latch()
    pipe = blocking(steps.target, latch)
    ended: list[int] = []
    with held(latch):
        thread = threading.Thread(target=lambda: ended.append(pipe.launch() and latch.passed))
        thread.start()
        until_blocking(lambda: latch.entered)
        assert ended == []
    thread.join(10)
    assert ended == [1]


def test_the_error_of_a_step_arrives() -> None:
    def broken() -> None:
        raise KeyError("mine")

    pipe = blocking("host", broken)
    with pytest.raises(KeyError, match="mine"):
        pipe.launch()
    pipe.enqueue()
    with pytest.raises(KeyError, match="mine"):
        pipe.synchronize()
    pipe.synchronize()


def test_before_build() -> None:
    pipe = eagle.sync.GraphPipeline(target="host").add(lambda: None)
    for call in (pipe.launch, pipe.synchronize):
        with pytest.raises(NotBuilt):
            call()


async def test_a_running_loop_refuses_it_before_anything_is_issued() -> None:
    steps = Steps("host")
    count = steps.words(0)
    pipe = blocking("host", steps.tick(count))
    with pytest.raises(LoopRunning, match=r"GraphPipeline\.launch\(\) blocks.*await pipeline\.launch\(\)"):
        pipe.launch()
    with pytest.raises(LoopRunning, match=r"await pipeline\.synchronize\(\)"):
        pipe.synchronize()
    await pipe.enqueue()
    assert steps.read(count) == [1]
    await anyio.to_thread.run_sync(pipe.launch)
    assert steps.read(count) == [2]


def test_a_step_may_block_on_other_pipelines() -> None:
    steps = Steps("host")
    count = steps.words(0)
    inner = blocking("host", steps.tick(count))
    outer = blocking("host", inner.launch)
    outer.launch(3)
    assert steps.read(count) == [3]


@pytest.mark.parametrize("name", ["GraphPipeline", "GraphComposer"])
def test_the_signatures_are_the_same(name: str) -> None:
    ours, plain = getattr(eagle.sync, name), getattr(eagle, name)
    for member, value in vars(ours).items():
        if not member.startswith("_") and callable(value):
            mine, theirs = inspect.signature(value), inspect.signature(getattr(plain, member))
            assert mine.parameters == theirs.parameters
            assert not inspect.iscoroutinefunction(value)
            assert inspect.iscoroutinefunction(getattr(plain, member))


PIPE = """
    import sys, threading, time
    import numpy as np
    import eagle.sync as eagle

    def pipeline(*steps):
        pipe = eagle.GraphPipeline(target="host")
        for step in steps:
            pipe.add(step)
        return pipe.build()
"""


def interrupt(process: Any) -> None:
    assert process.stdout.readline().strip() == "ready"
    process.send_signal(signal.SIGINT)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
class TestCtrlC:
    def test_the_running_step_ends_and_the_rest_is_dropped(self) -> None:
        assert run_script(
            PIPE
            + """
    inside, count = [False], [0]

    def step():
        inside[0] = True
        count[0] += 1
        if count[0] == 1:
            print("ready", flush=True)
        time.sleep(0.01)
        inside[0] = False

    pipe = pipeline(step)
    try:
        pipe.launch(10_000)
    except KeyboardInterrupt:
        print(inside[0], count[0] < 1000)
    pipe.launch()
    print("again")
        """,
            meanwhile=interrupt,
            limit_s=60,
        ).check().out.split() == ["False", "True", "again"]

    def test_a_loop_ends_between_two_iterations(self) -> None:
        assert run_script(
            PIPE
            + """
    on, count = np.ones(1, np.uint32), [0]

    def step():
        count[0] += 1
        if count[0] == 5:
            print("ready", flush=True)

    loop = eagle.repeat_while(step, eagle.SkipGuard.nonzero(on), 2**32 - 1)
    began = time.perf_counter()
    try:
        pipeline(loop).launch()
    except KeyboardInterrupt:
        print(loop.iterations() == count[0])
        """,
            meanwhile=interrupt,
            limit_s=60,
        ).check().out.split() == ["True"]

    def test_a_waiter_leaves_at_once_and_drops_nothing(self) -> None:
        assert run_script(
            PIPE
            + """
    gate = threading.Event()

    def step():
        print("ready", flush=True)
        gate.wait(20)

    completion = pipeline(step).enqueue()
    try:
        completion.wait()
    except KeyboardInterrupt:
        print(completion.done())
    gate.set()
    completion.wait(20)
        """,
            meanwhile=interrupt,
            limit_s=60,
        ).check().out.split() == ["False"]

    def test_a_composer(self) -> None:
        assert run_script(
            PIPE
            + """
    on, log = np.ones(1, np.uint32), []

    def step():
        if loop.iterations() == 5:
            print("ready", flush=True)

    loop = eagle.repeat_while(step, eagle.SkipGuard.nonzero(on), 2**32 - 1)
    made = eagle.GraphComposer(None, target="host")
    made.register(pipeline(loop))
    made.register(lambda: time.sleep(20))
    made.register(lambda: log.append("never"))
    made.build()
    try:
        made.launch()
    except KeyboardInterrupt:
        print(log)
    print(loop.iterations() > 5)
        """,
            meanwhile=interrupt,
            limit_s=15,
        ).check().out.split() == ["[]", "True"]
