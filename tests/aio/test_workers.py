from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
import weakref
from typing import Any

import pytest

from eagle.aio import workers
from eagle.aio.completion import Completion
from eagle.errors import StateError
from tests.helpers.child import run_script
from tests.helpers.steps import until_blocking


def put_and_wait(queue: workers.WorkQueue, job: Any = lambda: None) -> None:
    completion = Completion(None)

    def run() -> None:
        try:
            job()
        finally:
            completion.settle()

    queue.put(run)
    completion.wait(10)


class TestOneQueue:
    def test_jobs_run_in_order_and_one_at_a_time(self) -> None:
        queue, log, inside = workers.WorkQueue(), [], []

        def job(number: int) -> None:
            inside.append(number)
            assert inside == [number]
            log.append(number)
            inside.clear()

        for number in range(500):
            queue.put(lambda number=number: job(number))
        put_and_wait(queue)
        assert log == list(range(500))

    def test_from_many_threads_none_is_lost(self) -> None:
        queue, log = workers.WorkQueue(), []

        def put() -> None:
            for _ in range(200):
                queue.put(lambda: log.append(1))

        threads = [threading.Thread(target=put) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        put_and_wait(queue)
        assert len(log) == 1600

    def test_a_job_that_raises_is_logged_and_the_queue_goes_on(self, caplog: pytest.LogCaptureFixture) -> None:
        queue = workers.WorkQueue()
        queue.put(lambda: {}["missing"])
        put_and_wait(queue)
        assert [record.levelno for record in caplog.records] == [logging.ERROR]

    def test_what_a_job_holds_is_let_go_when_it_ended(self) -> None:
        class Array:
            pass

        queue, array = workers.WorkQueue(), Array()
        reference = weakref.ref(array)
        queue.put(lambda array=array: None)
        del array
        put_and_wait(queue)
        until_blocking(lambda: reference() is None)

    def test_a_queue_that_is_dropped_while_it_works_ends_its_work(self) -> None:
        log: list[int] = []
        queue = workers.WorkQueue()
        for number in range(5):
            queue.put(lambda number=number: log.append(number))
        del queue
        gc.collect()
        until_blocking(lambda: log == [0, 1, 2, 3, 4])


class TestWaitingForOthers:
    def test_a_job_waits_for_its_seeds_without_a_thread(self) -> None:
        seeds, log = [Completion(1), Completion(2)], []
        queue = workers.WorkQueue()
        queue.put(lambda: log.append("before"))
        queue.put(lambda: log.append("behind the seeds"), seeds)
        queue.put(lambda: log.append("last"))
        until_blocking(lambda: log == ["before"])
        seeds[0].settle()
        put_and_wait(workers.WorkQueue())  # the threads are free for others
        assert log == ["before"]
        seeds[1].settle(KeyError("a seed only orders"))
        until_blocking(lambda: log == ["before", "behind the seeds", "last"])

    def test_seeds_that_have_settled_hold_nothing(self) -> None:
        seed, log = Completion(1), []
        seed.settle()
        queue = workers.WorkQueue()
        queue.put(lambda: log.append(1), [seed, seed])
        until_blocking(lambda: log == [1])

    def test_a_seed_that_settles_at_any_moment(self) -> None:
        for _ in range(300):
            seed, done = Completion(1), Completion(2)
            queue = workers.WorkQueue()
            thread = threading.Thread(target=seed.settle)
            thread.start()
            queue.put(done.settle, [seed])
            assert done.wait(10) == 2
            thread.join()

    def test_a_ring_of_more_queues_than_threads(self) -> None:
        # Each waits for the one before: with a thread for each waiting queue the pool would be used up.
        count = workers.LIMIT + 50
        completions = [Completion(number) for number in range(count)]
        for before, after in itertools.pairwise(completions):
            workers.WorkQueue().put(after.settle, [before])
        completions[0].settle()
        assert completions[-1].wait(20) == count - 1


class TestThePool:
    def test_queues_work_beside_each_other(self) -> None:
        meet = threading.Barrier(40)
        queues = [workers.WorkQueue() for _ in range(40)]
        completions = [Completion(1) for _ in range(40)]
        for queue, completion in zip(queues, completions, strict=True):
            queue.put(lambda completion=completion: (meet.wait(15), completion.settle()))
        for completion in completions:
            completion.wait(20)

    def test_ten_thousand_queues_are_not_ten_thousand_threads(self) -> None:
        left = Completion(1)
        count = 10_000
        ended = []

        def job() -> None:
            ended.append(1)
            if len(ended) == count:
                left.settle()

        queues = [workers.WorkQueue() for _ in range(count)]
        for queue in queues:
            queue.put(job)
        left.wait(30)
        assert sum(thread.name.startswith("eagle-worker") for thread in threading.enumerate()) <= workers.LIMIT

    def test_jobs_that_wait_for_jobs_do_not_use_it_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "LIMIT", workers._pool.threads - len(workers._pool.idle) + 3)
        gate = threading.Event()
        inner = [Completion(number) for number in range(8)]
        outer = [Completion(number) for number in range(8)]

        def job(number: int) -> None:
            gate.wait(10)
            workers.start(inner[number].settle)
            inner[number].wait(10)
            outer[number].settle()

        for number in range(8):
            workers.start(lambda number=number: job(number))
        gate.set()
        assert [completion.wait(10) for completion in outer] == list(range(8))

    def test_queues_take_turns_when_every_thread_is_busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "_pool", workers._Pool())
        monkeypatch.setattr(workers, "LIMIT", 1)
        greedy, modest, log, gate = workers.WorkQueue(), workers.WorkQueue(), [], threading.Event()
        greedy.put(lambda: gate.wait(10))
        for _ in range(5):
            greedy.put(lambda: log.append("greedy"))
        modest.put(lambda: log.append("modest"))
        gate.set()
        until_blocking(lambda: len(log) == 6)
        assert log.index("modest") <= 1

    def test_idle_threads_leave(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = workers._Pool()
        monkeypatch.setattr(workers, "_pool", pool)
        monkeypatch.setattr(workers, "IDLE_S", 0.01)
        for _ in range(20):  # also in the moment in which they leave
            put_and_wait(workers.WorkQueue())
            time.sleep(0.01)
        until_blocking(lambda: pool.threads == 0 and not pool.idle)
        put_and_wait(workers.WorkQueue())

    def test_no_thread_to_be_had_is_said_and_takes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "_pool", workers._Pool())

        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        queue, log = workers.WorkQueue(), []
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(StateError, match="no thread could be started"):
                queue.put(lambda: log.append("refused"))
        put_and_wait(queue)
        assert log == []

    def test_a_queue_that_a_stand_in_should_serve_keeps_its_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = workers._Pool()
        monkeypatch.setattr(workers, "_pool", pool)
        monkeypatch.setattr(workers, "LIMIT", 1)
        second = Completion(None)

        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        def job() -> None:
            workers.start(second.settle)  # the pool is full: it waits
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                with workers.blocking():
                    pass

        put_and_wait(workers.WorkQueue(), job)
        second.wait(10)
        assert pool.lent == 0


class TestExit:
    def test_the_running_job_ends_and_the_rest_is_dropped(self) -> None:
        assert run_script("""
            import time
            from eagle.aio import workers
            queue = workers.WorkQueue()
            for number in range(50):
                queue.put(lambda number=number: (time.sleep(0.1), print(number, flush=True)))
            time.sleep(0.05)
        """).check().out.split() == ["0"]

    def test_the_running_job_is_asked_to_end(self) -> None:
        run_script(
            """
            import threading
            from eagle.aio import workers
            ended = threading.Event()
            workers.start(lambda: ended.wait(30), stop=ended.set)
        """,
            limit_s=20,
        ).check()

    def test_jobs_that_come_too_late_are_refused(self) -> None:
        assert run_script("""
            import atexit

            def late():
                from eagle.errors import StateError
                for put in (queue.put, workers.start):
                    try:
                        put(print)
                    except StateError as error:
                        print("exiting" in str(error))

            atexit.register(late)          # before eagle's own, so it runs behind it
            from eagle.aio import workers
            queue = workers.WorkQueue()
        """).check().out.split() == ["True", "True"]

    def test_a_thread_that_waits_for_dropped_work_is_not_waited_for(self) -> None:
        run_script(
            """
            import time
            from eagle.aio import workers
            from eagle.aio.completion import Completion
            workers.start(lambda: Completion(1).wait())
            time.sleep(0.05)
        """,
            limit_s=20,
        ).check()

    def test_a_status_stays(self) -> None:
        ended = run_script("""
            import sys, time
            from eagle.aio import workers
            for _ in range(5):
                workers.start(lambda: time.sleep(0.05))
            sys.exit(3)
        """)
        assert (ended.status, ended.out, ended.err) == (3, "", "")
