from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio
import pytest

import eagle
import eagle.sync
from eagle.errors import LoopRunning
from tests.helpers.steps import Steps

host = Steps("host")


def composer(*members: Any, target: str = "host", **options: Any) -> eagle.sync.GraphComposer:
    made = eagle.sync.GraphComposer(options.pop("flags", None), target=target, **options)
    for number, member in enumerate(members):
        made.register(member, name=f"member{number}")
    return made.build()


def pipeline(*steps: Any) -> eagle.sync.GraphPipeline:
    pipe = eagle.sync.GraphPipeline(target="host")
    for step in steps:
        pipe.add(step)
    return pipe.build()


def test_it_is_a_subclass_that_overrides_only_what_waits() -> None:
    assert issubclass(eagle.sync.GraphComposer, eagle.GraphComposer)
    assert {name for name in vars(eagle.sync.GraphComposer) if not name.startswith("_")} == {"launch"}


@pytest.mark.parametrize("mode", ["sequenced", "conditional", "enabled", "rebuild"])
def test_every_mode_blocks(target: str, mode: str) -> None:
    steps = Steps(target)
    counts = [steps.words(0) for _ in range(3)]
    flags = steps.words(1, 0, 1) if mode == "conditional" else [1, 0, 1]
    made = composer(*map(steps.tick, counts), flags=flags, mode=mode, target=target)
    assert made.launch() is made
    made.set_routing([0, 1, 1]).launch(2)
    steps.settle()
    assert [steps.read(count) for count in counts] == [[1], [2], [3]]


def test_pipelines_overlap_and_callables_stay_in_this_thread() -> None:
    meet, threads = threading.Barrier(4), []
    made = composer(
        *(pipeline(lambda: meet.wait(15)) for _ in range(3)),
        lambda: (meet.wait(15), threads.append(threading.get_ident())),
    )
    made.launch()
    assert threads == [threading.get_ident()]


def test_async_pipelines_and_composers_may_be_members() -> None:
    count = host.words(0)
    inner = eagle.GraphComposer(None, target="host")
    inner.register(host.pipeline(host.tick(count)))
    composer(host.pipeline(host.tick(count)), inner.build()).launch(2)
    assert host.read(count) == [4]


def test_a_launch_that_is_a_coroutine_gets_a_loop_of_its_own() -> None:
    log: list[int] = []

    class Unit:
        async def launch(self, n: int = 1) -> None:
            await asyncio.sleep(0.001)
            log.append(n)

    composer(Unit(), lambda: log.append(0)).launch(2)
    assert log == [2, 0, 0]


def test_a_failure_is_named_and_stops_the_rest() -> None:
    on = host.words(1)
    endless = eagle.repeat_while(lambda: None, eagle.SkipGuard.nonzero(on), 2**32 - 1)

    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        composer(pipeline(endless), broken).launch()
    assert "member 'member1'" in caught.value.__notes__[0]


async def test_a_running_loop_refuses_it_before_anything_is_issued() -> None:
    count = host.words(0)
    made = composer(host.tick(count))
    with pytest.raises(LoopRunning, match=r"GraphComposer\.launch\(\) blocks.*await composer\.launch\(\)"):
        made.launch()
    assert (host.read(count), made.fired_history()) == ([0], [])
    await anyio.to_thread.run_sync(made.launch)
    assert host.read(count) == [1]
