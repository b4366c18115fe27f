"""BR-44: whatever is alive when Python goes, the exit status is the program's and nothing is printed."""

from __future__ import annotations

import pytest

from tests.helpers.child import run_script

SCRIPT = """
    import sys, threading
    import anyio
    import numpy as np
    import eagle, eagle.sync
    from tests.helpers import models

    class Producer:
        '''A foreign array: DLPack over NumPy memory, which counts how often it is let go.'''

        released = 0

        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **options):
            view = self.array[:]
            import weakref
            weakref.finalize(view, Producer.release)
            return view.__dlpack__(**options)

        @staticmethod
        def release():
            Producer.released += 1

    producers = [Producer(np.arange(5.0)) for _ in range(3)]
    plan = eagle.deploy(models.affine)
    kept = [plan(producer, 2.0, 1.0) for producer in producers]
    assert all(np.array_equal(result, 2.0 * np.arange(5.0) + 1.0) for result in kept)
    planes = models.endless_planes(30_000)
    # NumPy 1 takes every foreign array as read-only, so a state is refused there.
    state = planes["x"] if np.__version__.startswith("1.") else Producer(planes["x"])
    sim = eagle.sync.simulation(models.climb, **{**planes, "x": state}, max_steps=10**9)
    {flight}
    del producers[0], state
    import gc; gc.collect()
    assert Producer.released <= 4, Producer.released
    {leave}
"""

FLIGHTS = {
    "nothing": "pass",
    "a run in a thread": "threading.Thread(target=sim.run, daemon=True).start()",
    "a run nobody awaits": "sim.runner.claim(); held = sim.runner.start(); waiting = held.next(join=False)",
}


@pytest.mark.parametrize("flight", FLIGHTS)
@pytest.mark.parametrize(("leave", "status"), [("pass", 0), ("sys.exit(3)", 3), ("raise SystemExit(4)", 4)])
def test_the_exit_is_clean(flight: str, leave: str, status: int) -> None:
    """BR-44: results in globals, foreign arrays held only by eagle, and a run in flight."""
    ended = run_script(SCRIPT.replace("{flight}", FLIGHTS[flight]).replace("{leave}", leave), limit_s=60)
    assert (ended.status, ended.out, ended.err) == (status, "", "")


def test_an_exit_in_the_middle_of_a_run_of_the_main_thread() -> None:
    """BR-44: a signal handler leaves while the main thread itself works on the run."""
    ended = run_script(
        """
        import signal, sys
        import eagle.sync as eagle
        from tests.helpers import models

        signal.signal(signal.SIGALRM, lambda *_: sys.exit(5))
        planes = models.endless_planes(30_000)
        sim = eagle.simulation(models.climb, **planes, max_steps=10**9)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        sim.run()
        """,
        limit_s=60,
    )
    assert (ended.status, ended.out, ended.err) == (5, "", "")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_that_ends_while_a_simulation_runs_and_is_built(backend: str) -> None:
    """BR-21 for simulations: no late line from a worker, and a second loop in the same process works."""
    ended = run_script(
        f"""
        import random, sys, threading
        import anyio
        import numpy as np
        import eagle
        from tests.helpers import models

        hooked = []
        threading.excepthook = lambda args: hooked.append(args)

        async def leave(nap):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    planes = models.endless_planes(500)
                    group.start_soon(lambda: eagle.simulate(models.climb, **planes, max_steps=10**9))
                await anyio.sleep(nap)
                group.cancel_scope.cancel()

        async def normal():
            planes = models.climb_planes(50)
            assert (await eagle.simulate(models.climb, **planes, max_steps=100)).done
            assert np.array_equal(planes["c"], planes["goal"])

        random.seed(21)
        for _ in range(30):
            anyio.run(leave, random.uniform(0, 0.01), backend={backend!r})
        anyio.run(normal, backend={backend!r})
        assert not hooked, hooked
        """
    ).check()
    assert ended.out == ""
