"""What happens to replays when loops close, processes fork and the interpreter exits: cases that users ran into."""

from __future__ import annotations

import sys
import time

import anyio
import numpy as np
import pytest

from tests.helpers.child import run_script
from tests.helpers.heartbeat import heartbeat
from tests.helpers.steps import Steps

host = Steps("host")
posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX fork")

PIPE = """
    import asyncio, os, random, signal, sys, threading, time, warnings
    import anyio
    import eagle, eagle.sync

    warnings.simplefilter("ignore", DeprecationWarning)      # Python warns of forks with threads: that is the case here

    def pipeline(*steps, module=eagle):
        pipe = module.GraphPipeline(target="host")
        for step in steps:
            pipe.add(step)
        return pipe.build()
"""


class TestTheLoopIsGoneFirst:
    """BR-21."""

    @pytest.mark.parametrize("backend", ["asyncio", "uvloop", "trio"])
    def test_the_main_coroutine_returns_while_a_job_runs(self, backend: str) -> None:
        assert run_script(
            PIPE
            + f"""
    hooked = []
    threading.excepthook = lambda args: hooked.append(args)
    count, options = [0], dict(backend={backend.replace("uvloop", "asyncio")!r})
    if {backend == "uvloop"}:
        options["backend_options"] = dict(use_uvloop=True)

    def step():
        time.sleep(0.03)
        count[0] += 1

    pipe = pipeline(step)

    async def wait(completion):
        await completion

    async def leave(nap):
        kept = pipe.enqueue()
        if options["backend"] == "trio":
            async with anyio.create_task_group() as group:
                group.start_soon(wait, kept)
                await anyio.sleep(nap)
                group.cancel_scope.cancel()
        else:
            task = asyncio.ensure_future(wait(kept))
            await asyncio.sleep(nap)

    async def normal():
        await pipe.launch()

    random.seed(21)
    for _ in range(50):
        anyio.run(leave, random.uniform(0, 0.04), **options)
    anyio.run(normal, **options)
    print(count[0], hooked)
        """
        ).check().out.split() == ["51", "[]"]


class TestCancelledWorkIsOver:
    """BR-22."""

    async def test_nothing_writes_after_the_cancel(self) -> None:
        out = np.zeros(10)

        def add() -> None:
            time.sleep(0.01)
            out[...] += 1

        pipe = host.pipeline(add)
        with anyio.fail_after(20):
            with anyio.move_on_after(0.025) as scope:
                await pipe.launch(1000)
            seen = out.copy()
            assert scope.cancelled_caught
            await pipe.launch()
        assert np.array_equal(out, seen + 1)


class TestTheLoopStaysFree:
    """BR-24: jobs whose steps let go of the interpreter; a step in pure Python shares it, switched every 5 ms."""

    @pytest.mark.parametrize("kind", ["sleeping", "numpy", "python"])
    async def test_while_four_jobs_run(self, kind: str) -> None:
        data = np.ones(200_000)

        def step() -> None:
            end = time.monotonic() + 0.15
            while time.monotonic() < end:
                if kind == "sleeping":
                    time.sleep(0.01)
                elif kind == "numpy":
                    np.sqrt(data, out=data)

        pipes = [host.pipeline(step) for _ in range(4)]
        async with heartbeat() as seen:
            for completion in [pipe.enqueue() for pipe in pipes]:
                await completion
        # The promise is 50 ms. The assertion only tells a free loop from one that stood still for the jobs' time.
        assert seen.beats > 3
        assert seen.worst_s < 0.14 if kind != "python" else seen.worst_s < 0.5


@posix
class TestFork:
    """BR-25."""

    @pytest.mark.parametrize("job", ["asyncio.run(once(pipe))", "asyncio.run(once(pipeline(step)))",
                                     "pipe.enqueue().wait(5)", "pipeline(step, module=eagle.sync).launch()",
                                     "pipe.enqueue(); pipe.enqueue().wait(5); count[0] -= 1",
                                     "asyncio.run(off_loop())"])  # fmt: skip
    @pytest.mark.parametrize("in_flight", [False, True])
    def test_the_child_works_and_the_parent_goes_on(self, job: str, in_flight: bool) -> None:
        assert run_script(
            PIPE
            + f"""
    count = [0]

    def step():
        count[0] += 1

    async def once(pipe):
        return await pipe.launch()

    async def off_loop():
        from eagle.aio.offload import off_loop
        await off_loop(step)

    pipe = pipeline(step)
    asyncio.run(once(pipe))
    stuck = threading.Event()
    kept = [pipeline(lambda: stuck.wait(20)).enqueue(3) for _ in range(3 * {in_flight})]
    before = count[0]
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        {job}
        os._exit(0 if count[0] == before + 1 else 4)
    _, status = os.waitpid(pid, 0)
    stuck.set()
    for completion in kept:
        completion.wait(10)
    asyncio.run(once(pipe))
    print(os.waitstatus_to_exitcode(status), count[0] - before)
        """
        ).check().out.split() == ["0", "1"]

    def test_what_was_in_flight_fails_clearly_in_the_child(self) -> None:
        assert run_script(
            PIPE
            + """
    gate = threading.Event()
    pipe = pipeline(lambda: gate.wait(20))
    kept, behind, called = pipe.enqueue(), pipe.enqueue(), []
    kept.add_done_callback(called.append)
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        async def wait():
            await kept
        for look in (lambda: asyncio.run(wait()), lambda: behind.wait(5)):
            try:
                look()
            except eagle.StateError as error:
                assert "spawn" in str(error) and isinstance(error, RuntimeError)
            else:
                os._exit(5)
        gate.set()
        pipe.enqueue().wait(5)           # the queue is the child's own, and works
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    gate.set()
    behind.wait(10)
    print(os.waitstatus_to_exitcode(status))
        """
        ).check().out.split() == ["0"]

    def test_a_child_may_end_like_any_script(self) -> None:
        assert run_script(
            PIPE
            + """
    pipe = pipeline(lambda: time.sleep(0.01))
    pipe.enqueue(3).wait()
    pid = os.fork()
    if pid == 0:
        pipe.enqueue(3)
        sys.exit(7)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status))
        """
        ).check().out.split() == ["7"]

    def test_multiprocessing(self) -> None:
        assert run_script(
            PIPE
            + """
    import multiprocessing

    def work(number):
        out = []
        pipeline(lambda: out.append(number * number)).enqueue().wait(10)
        return out[0]

    work(1)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(*pool.map(work, range(6)))
        """
        ).check().out.split() == ["0", "1", "4", "9", "16", "25"]


class TestBuildingAndDroppingForDays:
    """BR-40."""

    @pytest.mark.slow
    def test_memory_threads_and_files_stay_where_they_were(self) -> None:
        run_script(PIPE + """
    import gc, resource, tracemalloc
    import numpy as np

    def cycle(number):
        data = np.zeros(10_000)

        def step():
            data[...] += 1
            if number % 2 and number % 4 == 1:
                raise KeyError(number)

        pipe = pipeline(step, step, eagle.repeat_while(step, eagle.SkipGuard.nonzero(flag), 2), module=eagle.sync)
        try:
            pipe.launch(2)
        except KeyError:
            pass
        refused = eagle.GraphPipeline(target="host").add(eagle.skippable(eagle.repeat_while(step, guard, 1), guard))
        try:
            refused.build()
        except ValueError:
            pass

    flag = np.ones(1, np.uint32)
    guard = eagle.SkipGuard.nonzero(flag)

    def figures():
        gc.collect()
        return tracemalloc.get_traced_memory()[0], threading.active_count(), len(os.listdir("/proc/self/fd"))

    tracemalloc.start()
    for number in range(1000):
        cycle(number)
        if number == 10:
            before = figures()
    after = figures()
    assert after[0] <= before[0] * 1.01 + 20_000, (before, after)
    assert after[1:] <= before[1:], (before, after)
        """, limit_s=180).check()  # fmt: skip

    async def test_dropped_pipelines_need_no_collector(self) -> None:
        import gc
        import tracemalloc

        async def cycle() -> None:
            data = np.zeros(100_000)
            await host.pipeline(lambda: np.add(data, 1, out=data)).launch()

        for _ in range(5):
            await cycle()
        gc.collect()
        gc.disable()
        try:
            tracemalloc.start()
            for _ in range(50):
                await cycle()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
        assert kept < 3 * 800_000  # of fifty


class TestExit:
    """BR-44: status and silence, whatever is alive."""

    @pytest.mark.parametrize("end", ["", "sys.exit(3)"])
    def test_with_everything_alive(self, end: str) -> None:
        ended = run_script(PIPE + f"""
    from eagle.aio import poller

    class Event:
        done = False

    pipe = pipeline(lambda: time.sleep(0.05))
    never_awaited = pipe.enqueue(20)
    never_ends = poller.track(pipe, Event(), name="p")
    never_ends.add_done_callback(print)
    watched = threading.Thread(target=never_ends.wait, daemon=True)
    watched.start()

    async def main():
        with anyio.move_on_after(0.01):
            await never_ends
        tasks = [asyncio.ensure_future(pipe.launch()) for _ in range(3)]
        with anyio.move_on_after(0.01):
            await never_awaited

    loop = asyncio.new_event_loop()
    asyncio.run(main())
    loop.close()
    {end}
        """)  # fmt: skip
        assert (ended.status, ended.out, ended.err) == (3 if "exit" in end else 0, "", "")

    def test_twenty_times_with_a_replay_in_flight(self) -> None:
        for number in range(5):
            run_script(
                PIPE
                + f"""
    pipes = [pipeline(lambda: time.sleep(0.002)) for _ in range(10)]
    kept = [pipe.enqueue(100) for pipe in pipes]
    time.sleep(0.002 * {number})
            """
            ).check()

    @pytest.mark.parametrize("how", ["pipeline(loop).enqueue()", "asyncio.run(leave())"])
    def test_a_loop_in_flight_ends_and_replays_not_begun_are_dropped(self, how: str) -> None:
        ended = run_script(PIPE + f"""
    import atexit
    import numpy as np
    on, count = np.ones(1, np.uint32), [0]
    atexit.register(lambda: print(count[0] < 5))

    def slow():
        count[0] += 1
        time.sleep(0.05)

    kept = pipeline(slow).enqueue(1000)
    loop = eagle.repeat_while(lambda: None, eagle.SkipGuard.nonzero(on), 2**32 - 1)

    async def leave():
        from eagle.aio.offload import off_loop
        task = asyncio.ensure_future(off_loop(loop))
        await asyncio.sleep(0.01)

    {how}
        """, limit_s=20).check()  # fmt: skip
        assert ended.out.split() == ["True"]

    def test_an_exception_at_the_end_is_the_only_output(self) -> None:
        ended = run_script(
            PIPE
            + """
    kept = pipeline(lambda: time.sleep(0.05)).enqueue(20)
    raise SystemExit("the end")
        """
        )
        assert (ended.status, ended.out, ended.err) == (1, "", "the end\n")

    def test_dev_mode_finds_nothing_left_open(self) -> None:
        run_script(PIPE + """
    import numpy as np
    made = eagle.sync.GraphComposer(None, target="host")
    made.register(pipeline(lambda: None))
    made.register(lambda: None)
    made.build().launch(3)
    pipeline(lambda: None, module=eagle.sync).launch()
    asyncio.run(pipeline(lambda: None).launch())
        """, flags=["-X", "dev"]).check()  # fmt: skip
