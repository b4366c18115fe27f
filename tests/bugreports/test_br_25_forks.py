"""BR-25: simulations before, during and after a fork. In the child a job is right, and the parent keeps working."""

from __future__ import annotations

import os

import pytest

from tests.helpers.child import run_script

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

START = """
    import os, signal, sys, threading, time, warnings
    import numpy as np
    import anyio
    import eagle, eagle.sync
    from tests.helpers import models

    warnings.simplefilter("ignore", DeprecationWarning)      # Python warns of forks beside threads: the case here

    def job(n=3000):
        planes = models.climb_planes(n)
        result = eagle.sync.simulate(models.climb, **planes, max_steps=10_000)
        return bool(result.done and np.array_equal(planes["c"], planes["goal"]))

    def awaited():
        planes = models.climb_planes(500)
        async def main():
            return await eagle.simulate(models.climb, **planes, max_steps=10_000)
        return anyio.run(main).done and bool(np.array_equal(planes["c"], planes["goal"]))

    def in_child(work):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                os._exit(0 if work() else 1)
            except BaseException as error:
                print(type(error).__name__, error, flush=True)
                os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def run(body: str) -> None:
    assert run_script(START + body).check().out == ""


def test_after_a_job_of_the_parent() -> None:
    run("""
    assert job() and awaited()
    for _ in range(3):
        assert in_child(job) == 0
        assert in_child(awaited) == 0
        assert job() and awaited()
    """)


def test_with_a_job_in_flight_in_the_parent() -> None:
    run("""
    planes = models.endless_planes(20_000)
    sim = eagle.sync.simulation(models.climb, **planes, max_steps=10**9)
    thread = threading.Thread(target=sim.run)
    thread.start()
    while not planes["c"].any():
        time.sleep(0.001)
    for _ in range(5):
        assert in_child(job) == 0
        assert in_child(awaited) == 0
    assert job()
    sim.runner.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert np.array_equal(planes["x"], planes["c"])
    """)


def test_an_object_that_ran_in_the_parent_runs_in_the_child() -> None:
    run("""
    planes = models.climb_planes(3000)
    sim = eagle.sync.simulation(models.climb, **planes, max_steps=10_000)
    sim.run()

    def again():
        planes["x"][:] = planes["c"][:] = 0.0
        sim.reset()
        return sim.run().done and bool(np.array_equal(planes["c"], planes["goal"]))

    assert in_child(again) == 0
    assert again()
    """)


def test_an_object_that_was_running_at_the_fork_is_told_so_or_works() -> None:
    run("""
    planes = models.endless_planes(20_000)
    sim = eagle.sync.simulation(models.climb, **planes, max_steps=10**9)
    thread = threading.Thread(target=sim.run, daemon=True)
    thread.start()
    while not planes["c"].any():
        time.sleep(0.001)

    def again():
        try:
            sim.run()
        except eagle.Busy as error:
            return "running already" in str(error)
        return False

    assert in_child(again) == 0
    sim.runner.stop()
    thread.join(20)
    """)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(method: str) -> None:
    run(f"""
    import multiprocessing
    if __name__ == "__main__":
        assert job()
        context = multiprocessing.get_context({method!r})
        children = [context.Process(target=work) for work in (job, awaited)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0, 0]
        assert job()
    """)
