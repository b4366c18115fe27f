"""The blocking face: the same signatures, refused where a loop runs, and Ctrl-C that leaves everything consistent."""

from __future__ import annotations

import inspect
import re
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

import eagle
import eagle.aio
import eagle.sync
from eagle.sync.interrupt import interrupt_deferred
from tests.helpers import models
from tests.helpers.child import run_script
from tests.helpers.deadline import deadline

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals are sent the POSIX way")

FUNCTIONS = ("simulate", "simulation", "until_done", "run_until_done")
CLASSES = ("Simulation", "Runner")

# ---- parity ----------------------------------------------------------------------------------------------------------


def shape(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_same(name: str) -> None:
    waits, blocks = getattr(eagle, name), getattr(eagle.sync, name)
    assert inspect.iscoroutinefunction(waits)
    assert not inspect.iscoroutinefunction(blocks)
    assert shape(waits) == shape(blocks)
    annotations = {k: v for k, v in inspect.get_annotations(waits).items() if k != "return"}
    assert annotations == {k: v for k, v in inspect.get_annotations(blocks).items() if k != "return"}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_differ_only_in_what_waits(name: str) -> None:
    waits, blocks = getattr(eagle, name), getattr(eagle.sync, name)
    assert issubclass(blocks, waits)
    assert shape(waits.__init__) == shape(blocks.__init__)
    public = {key for key in vars(blocks) if not key.startswith("_")}
    for key in public & {"run"}:
        assert inspect.iscoroutinefunction(getattr(waits, key))
        assert not inspect.iscoroutinefunction(getattr(blocks, key))
        assert shape(getattr(waits, key)) == shape(getattr(blocks, key))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_cannot_tell_the_faces_apart(name: str) -> None:
    assert inspect.getdoc(getattr(eagle.sync, name))


# ---- refused in a loop -----------------------------------------------------------------------------------------------


@deadline
async def test_a_waiting_call_in_a_loop_is_refused_by_name() -> None:
    planes = models.climb_planes(3)
    plan = await anyio.to_thread.run_sync(eagle.deploy, models.climb)
    sim = await anyio.to_thread.run_sync(lambda: eagle.sync.simulation(models.climb, **planes, max_steps=5))
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: eagle.sync.simulate(models.climb, **planes, max_steps=5), "await eagle.simulate("),
        (lambda: eagle.sync.simulation(models.climb, **planes, max_steps=5), "await eagle.simulation("),
        (lambda: eagle.sync.until_done(plan, **planes, max_steps=5), "await eagle.until_done("),
        (lambda: eagle.sync.run_until_done(plan, **planes, max_steps=5), "await eagle.run_until_done("),
        (sim.run, "await sim.run()"),
        (sim.runner.run, "await runner.run()"),
    ]
    for call, instead in calls:
        with pytest.raises(eagle.LoopRunning, match=re.escape(instead)):
            call()
    assert not planes["x"].any()
    assert (await anyio.to_thread.run_sync(sim.run)).steps == 5  # what was refused is free


@deadline
async def test_plans_kernels_and_deploy_block_and_are_never_refused() -> None:
    assert eagle.sync.deploy(models.affine)(2.0, 3.0, 4.0) == 10.0
    assert models.affine(2.0, 3.0, 4.0) == 10.0


def test_after_a_loop_has_ended_blocking_works_again() -> None:
    async def main() -> None:
        await eagle.simulate(models.climb, **models.climb_planes(3), max_steps=5)

    for _ in range(3):
        anyio.run(main)
        assert eagle.sync.simulate(models.climb, **models.climb_planes(3), max_steps=5).done


@deadline
async def test_a_blocking_object_may_be_followed_from_a_loop() -> None:
    planes = models.climb_planes(2000, 50_000)
    sim = await anyio.to_thread.run_sync(lambda: eagle.sync.simulation(models.climb, **planes, max_steps=100_000))
    seen: list[eagle.Progress] = []

    async def watch() -> None:
        async for now in sim.progress(0.001):
            seen.append(now)  # noqa: PERF401

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        result = await anyio.to_thread.run_sync(sim.run)
    assert result.done
    assert seen[-1].finished == 2000


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------

INTERRUPTED = """
    import json, signal, sys, threading, time
    import numpy as np
    import eagle.sync as eagle
    from tests.helpers import models

    n = 3000
    planes = models.endless_planes(n)
    sim = eagle.simulation({model}, **planes, max_steps=10**9)
    sim.runner.host_threads = {threads}
    print("ready", flush=True)
    began = None
    try:
        sim.run({options})
    except KeyboardInterrupt:
        seen = planes["x"].copy()
        agree = bool(np.array_equal(planes["x"], planes["c"]))
        time.sleep(0.05)
        still = bool(np.array_equal(planes["x"], seen))
        planes["goal"][:] = planes["x"] + 3.0
        ended = sim.run()
        print(json.dumps([agree, still, ended.done, bool(np.array_equal(planes["x"], planes["goal"]))]), flush=True)
"""


def interrupt(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.05)  # the run has begun, or not yet: both are right
    process.send_signal(signal.SIGINT)


@posix
@pytest.mark.parametrize(
    ("model", "threads", "options"),
    [
        ("models.climb", "None", ""),
        ("models.climb", "1", ""),
        ("models.climb", "None", "progress=True"),
        ("models.climb_listed", "2", ""),
    ],
)
def test_ctrl_c_ends_a_run_that_would_never_end(model: str, threads: str, options: str) -> None:
    ended = run_script(INTERRUPTED.format(model=model, threads=threads, options=options), meanwhile=interrupt)
    assert (ended.status, ended.out) == (0, "[true, true, true, true]\n"), ended


@posix
def test_ctrl_c_that_nobody_catches_ends_the_process() -> None:
    ended = run_script(
        """
        import eagle.sync as eagle
        from tests.helpers import models
        print("ready", flush=True)
        eagle.simulate(models.climb, **models.endless_planes(), max_steps=10**9)
        """,
        meanwhile=interrupt,
    )
    assert ended.status in (-signal.SIGINT, 1, 130)
    assert ended.err.strip().endswith("KeyboardInterrupt")


@posix
def test_a_handler_of_the_program_stays_in_charge() -> None:
    ended = run_script(
        """
        import signal, threading, time
        import eagle.sync as eagle
        from tests.helpers import models

        def mine(*_):
            print("mine", flush=True)
            threading.Thread(target=sim.runner.stop).start()

        def raise_it():
            while not planes["c"].any():
                time.sleep(0.001)
            signal.raise_signal(signal.SIGINT)

        signal.signal(signal.SIGINT, mine)
        planes = models.endless_planes(3000)
        sim = eagle.simulation(models.climb, **planes, max_steps=10**9)
        threading.Thread(target=raise_it).start()
        print(sim.run().status, signal.getsignal(signal.SIGINT) is mine)
        """
    ).check()
    assert ended.out == "mine\nmax_steps True\n"


@posix
def test_an_alarm_that_raises_ends_the_run_with_its_error() -> None:
    """Test runners time out that way: the exception comes out of whatever the main thread does."""
    run_script(
        """
        import signal
        import numpy as np
        import eagle.sync as eagle
        from tests.helpers import models

        class Late(Exception):
            pass

        def late(*_):
            raise Late

        # The team's threads are there before: an exception in the middle of Thread.start() is Python's own trouble.
        eagle.simulate(models.climb, **models.climb_planes(5000), max_steps=100)
        signal.signal(signal.SIGALRM, late)
        planes = models.endless_planes(5000)
        sim = eagle.simulation(models.climb, **planes, max_steps=10**9)
        for _ in range(20):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            try:
                sim.run()
            except Late:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        assert np.array_equal(planes["x"], planes["c"])
        """,
        limit_s=60,
    ).check()


@posix
def test_the_handler_notes_stops_and_raises_at_the_end() -> None:
    stopped = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        with interrupt_deferred(stopped.set) as interrupted:
            assert not interrupted()
            signal.raise_signal(signal.SIGINT)
            assert interrupted()  # and nothing was raised here
            assert stopped.wait(60)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@posix
def test_the_handler_takes_no_lock_that_its_thread_may_hold() -> None:
    lock, stopped = threading.Lock(), threading.Event()

    def stop() -> None:
        with lock:
            stopped.set()

    with pytest.raises(KeyboardInterrupt):
        with interrupt_deferred(stop):
            with lock:
                signal.raise_signal(signal.SIGINT)  # comes back, although stop() has to wait
            assert stopped.wait(60)


def test_other_threads_are_not_concerned() -> None:
    handlers = []

    def run() -> None:
        with interrupt_deferred(lambda: None) as interrupted:
            handlers.append(signal.getsignal(signal.SIGINT))
            assert not interrupted()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_an_interrupt_before_the_run_begins_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the handler and the run there is nothing yet that could be stopped."""
    planes = models.endless_planes()
    runner = eagle.sync.until_done(eagle.deploy(models.climb), max_steps=10**9, **planes)
    real = runner.start

    def start() -> Any:
        signal.raise_signal(signal.SIGINT)
        return real()

    monkeypatch.setattr(runner, "start", start)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    monkeypatch.undo()
    assert not planes["x"].any()
    planes["goal"][:] = 2.0
    assert runner.run().done
    assert np.array_equal(planes["c"], planes["goal"])


@posix
def test_a_stop_that_is_slow_never_reaches_the_next_run() -> None:
    left = []

    def stop() -> None:
        time.sleep(0.05)
        left.append(1)

    with pytest.raises(KeyboardInterrupt):
        with interrupt_deferred(stop):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    assert left == [1, 1]
