from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Awaitable
from typing import Any

import anyio
import pytest

from eagle.aio import completion as completions
from eagle.aio import workers
from eagle.aio.completion import Completion, drive, leave_when_done, wait_to_end
from eagle.errors import LoopRunning, StateError
from tests.helpers.steps import until, until_blocking


def in_thread(fn: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=fn, args=args)
    thread.start()
    return thread


def parked(completion: Completion[Any]) -> int:
    return len(completion._waiters or ())


class TestAwaiting:
    async def test_done_is_no_suspension(self) -> None:
        completion = Completion("result")
        completion.settle()
        with pytest.raises(StopIteration) as end:
            next(completion.__await__())
        assert end.value.value == "result"
        assert isinstance(completion, Awaitable)

    async def test_many_waiters_and_one_end(self) -> None:
        completion, got = Completion(object()), []

        async def wait() -> None:
            got.append(await completion)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                for _ in range(20):
                    group.start_soon(wait)
                await until(lambda: parked(completion) == 20)
                in_thread(completion.settle).join()
        assert got == [await completion] * 20

    async def test_an_end_before_the_waiter_parks_is_seen(self) -> None:
        # Settled in every phase of a waiter: before it looks, while it takes turns, between the look and the park.
        with anyio.fail_after(20):
            for delay in range(200):
                completion = Completion(delay)
                gate = threading.Event()

                def settle(completion: Completion[int] = completion, gate: threading.Event = gate) -> None:
                    gate.wait(5)
                    for _ in range(completion._result * 20):
                        pass
                    completion.settle()

                thread = in_thread(settle)
                gate.set()
                assert await completion == delay
                thread.join()

    async def test_a_cancelled_waiter_leaves_alone(self) -> None:
        completion = Completion(1)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:

                async def leave() -> None:
                    with anyio.CancelScope() as scope:
                        scopes.append(scope)
                        await completion

                async def stay() -> None:
                    got.append(await completion)

                scopes: list[anyio.CancelScope] = []
                got: list[int] = []
                group.start_soon(leave)
                group.start_soon(stay)
                await until(lambda: parked(completion) == 2)
                scopes[0].cancel()
                await until(lambda: parked(completion) == 1)
                completion.settle()
            assert (got, scopes[0].cancelled_caught) == ([1], True)

    async def test_cancelled_in_the_turn_in_which_it_settles(self, silence: list[Any]) -> None:
        for _ in range(50):
            completion = Completion(1)
            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:

                    async def wait(completion: Completion[int] = completion) -> None:
                        await completion

                    group.start_soon(wait)
                    await until(lambda completion=completion: parked(completion))
                    completion.settle()
                    group.cancel_scope.cancel()
            assert await completion == 1

    async def test_where_no_loop_runs_it_says_so(self) -> None:
        errors: list[BaseException] = []

        def drive_by_hand() -> None:
            try:
                Completion(1).__await__().send(None)
            except StateError as error:
                errors.append(error)

        in_thread(drive_by_hand).join()
        assert "asyncio or trio" in str(errors[0])


class TestErrors:
    async def test_the_very_error_reaches_everybody(self) -> None:
        completion, error = Completion(1), KeyError("mine")
        completion.settle(error)
        for _ in range(3):
            with pytest.raises(KeyError) as caught:
                await completion
            assert caught.value is error
        with pytest.raises(KeyError):
            completion.wait()
        assert (completion.error, completion.received) == (error, True)

    async def test_its_traceback_does_not_grow(self) -> None:
        def broken() -> None:
            raise KeyError

        completion = Completion(1)
        try:
            broken()
        except KeyError as error:
            completion.settle(error)
        lengths = []
        for _ in range(5):
            with pytest.raises(KeyError) as caught:
                await completion
            lengths.append(len(caught.traceback))
        assert len(set(lengths)) == 1

    def test_the_first_end_counts(self) -> None:
        completion = Completion(1)
        completion.settle()
        completion.settle(KeyError())
        assert completion.wait() == 1
        assert completion.error is None

    @pytest.mark.parametrize("error", [None, KeyError("mine")])
    def test_what_is_dropped_goes_without_the_collector(self, error: BaseException | None) -> None:
        class Result:
            pass

        def use() -> weakref.ref[Result]:
            completion = Completion(Result(), stop=lambda: None)
            completion.when_settled(lambda: None)
            completion.settle(error)
            return weakref.ref(completion._result)

        gc.disable()
        try:
            assert use()() is None
        finally:
            gc.enable()


class TestWait:
    def test_it_blocks_until_the_end(self) -> None:
        completion = Completion("result")
        threading.Timer(0.02, completion.settle).start()
        assert completion.wait(timeout=10) == "result"

    def test_the_builtin_timeout(self) -> None:
        completion = Completion(1, name="p")
        for timeout in (0, 0.0, 0.01):
            with pytest.raises(TimeoutError, match="p has not ended"):
                completion.wait(timeout)
        assert parked(completion) == 0

    @pytest.mark.parametrize("bad", [-1, float("nan")])
    def test_a_timeout_that_is_none(self, bad: float) -> None:
        with pytest.raises(ValueError, match="timeout is"):
            Completion(1).wait(bad)

    async def test_it_is_refused_in_a_loop_while_pending(self) -> None:
        completion = Completion(1)
        with pytest.raises(LoopRunning, match="await completion"):
            completion.wait()
        assert await anyio.to_thread.run_sync(lambda: completion.done()) is False
        completion.settle()
        assert completion.wait() == 1


class TestCallbacks:
    def test_each_is_called_once_in_order(self) -> None:
        completion, called = Completion(1), []
        for number in range(5):
            completion.add_done_callback(lambda got, number=number: called.append((number, got)))
        completion.settle()
        until_blocking(lambda: len(called) == 5)
        assert called == [(number, completion) for number in range(5)]

    def test_at_once_when_done(self) -> None:
        completion, called = Completion(1), []
        completion.settle()
        completion.add_done_callback(called.append)
        assert called == [completion]

    async def test_never_on_the_thread_of_a_loop(self) -> None:
        before, after, threads = Completion(1), Completion(1), []
        before.settle()
        before.add_done_callback(lambda _: threads.append(threading.get_ident()))
        after.add_done_callback(lambda _: threads.append(threading.get_ident()))
        after.settle()
        with anyio.fail_after(10):
            await until(lambda: len(threads) == 2)
        assert threading.get_ident() not in threads

    def test_one_that_raises_is_logged_and_hurts_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        completion, called = Completion(1, name="p"), []
        completion.add_done_callback(lambda _: {}["missing"])
        completion.add_done_callback(called.append)
        completion.settle()
        until_blocking(lambda: called)
        assert completion.wait() == 1
        assert [record.levelno for record in caplog.records] == [logging.ERROR]

    def test_one_that_exits_takes_none_along(self, caplog: pytest.LogCaptureFixture) -> None:
        def leave(completion: Completion[Any]) -> None:
            raise SystemExit(3)

        completion, called = Completion(1), []
        completion.add_done_callback(leave)
        completion.add_done_callback(called.append)
        completion.settle()
        until_blocking(lambda: called)
        with pytest.raises(SystemExit):
            completion.add_done_callback(leave)
        completion.add_done_callback(called.append)
        until_blocking(lambda: len(called) == 2)

    def test_without_a_thread_to_be_had_they_are_called_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(job: Any) -> None:
            raise StateError("no thread could be started")

        completion, called = Completion(1), []
        completion.add_done_callback(called.append)
        with monkeypatch.context() as patch:
            patch.setattr(workers, "start", refuse)
            completion.settle()
            assert called == [completion]
        completion.add_done_callback(called.append)
        until_blocking(lambda: len(called) == 2)

    def test_one_may_wait_for_what_comes_behind_it(self) -> None:
        first, second, seen = Completion(1), Completion(2), []
        first.add_done_callback(lambda _: seen.append(second.wait(10)))
        first.settle()
        second.settle()
        until_blocking(lambda: seen == [2])

    def test_what_cannot_be_called(self) -> None:
        with pytest.raises(TypeError, match="done callback"):
            Completion(1).add_done_callback(3)  # type: ignore[arg-type]


class TestLeaving:
    """`leave_when_done` and its blocking twin."""

    async def test_it_gives_the_result(self) -> None:
        completion = Completion(7)
        threading.Timer(0.01, completion.settle).start()
        assert await leave_when_done(completion) == 7

    async def test_a_cancel_stops_once_and_leaves_at_the_end(self) -> None:
        stops: list[int] = []
        completion, left = Completion(1), []

        async def go() -> None:
            try:
                await leave_when_done(completion, lambda: stops.append(1))
            finally:
                left.append(completion.done())

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(go)
                await until(lambda: parked(completion))
                group.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await until(lambda: stops)
                    for _ in range(10):
                        await anyio.sleep(0.001)
                    assert left == []
                    completion.settle()
        assert (stops, left) == ([1], [True])

    @pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})])
    async def test_native_cancels_change_nothing(self, silence: list[Any]) -> None:
        stops: list[int] = []
        completion = Completion(1)
        task = asyncio.ensure_future(leave_when_done(completion, lambda: stops.append(1)))
        await until(lambda: parked(completion))
        for _ in range(5):
            task.cancel()
            await asyncio.sleep(0.002)
        assert not task.done()
        completion.settle()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 10)
        assert stops == [1]

    @pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})])
    async def test_a_cancel_before_it_begins_is_seen(self) -> None:
        completion, stops = Completion(1), []
        task = asyncio.ensure_future(leave_when_done(completion, lambda: (stops.append(1), completion.settle())[0]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 10)
        assert stops == [1]

    async def test_an_error_of_the_work_is_no_cancel(self) -> None:
        completion, stops = Completion(1), []
        completion.settle(KeyError("mine"))
        with pytest.raises(KeyError):
            await leave_when_done(completion, lambda: stops.append(1))
        assert stops == []

    async def test_a_coroutine_that_is_thrown_away_stops_its_work(self) -> None:
        completion, stops = Completion(1), []
        coroutine = leave_when_done(completion, lambda: stops.append(1))
        coroutine.send(None)
        coroutine.close()
        assert stops == [1]
        completion.settle()

    def test_without_a_loop(self) -> None:
        completion = Completion("result")
        threading.Timer(0.01, completion.settle).start()
        assert wait_to_end(completion) == "result"
        assert wait_to_end(completion) == "result"

    def test_an_interrupt_stops_and_leaves_at_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        completion, stops, blocks = Completion(1), [], []
        block = Completion._block

        def interrupted(self: Completion[Any], timeout: float | None) -> bool:
            blocks.append(1)
            if len(blocks) < 3:
                raise KeyboardInterrupt
            return block(self, timeout)

        monkeypatch.setattr(Completion, "_block", interrupted)
        threading.Timer(0.02, completion.settle).start()
        with pytest.raises(KeyboardInterrupt):
            wait_to_end(completion, lambda: stops.append(1))
        assert (stops, completion.settled) == ([1], True)

    def test_driving_takes_completions_only(self) -> None:
        async def other() -> None:
            await asyncio.sleep(0)

        with pytest.raises(StateError, match="needs an event loop"):
            drive(other())


class TestFork:
    def test_what_was_pending_fails_in_the_child(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pending, ended = Completion(1, name="p"), Completion(2)
        ended.settle()
        monkeypatch.setattr(completions, "_epoch", completions._epoch + 1)  # what the hook of os.fork does
        with pytest.raises(StateError, match=r"p was in flight.*spawn"):
            pending.wait()
        assert ended.wait() == 2

    def test_a_new_one_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(completions, "_epoch", completions._epoch + 1)
        completion = Completion(1)
        completion.settle()
        assert completion.wait() == 1


def test_stop_reaches_the_producer_while_it_is_pending() -> None:
    stops: list[int] = []
    completion = Completion(1, stop=lambda: stops.append(1))
    completion.stop()
    completion.settle()
    completion.stop()
    assert stops == [1]
    Completion(1).stop()


def test_hooks_run_in_the_thread_that_settles() -> None:
    completion, seen = Completion(1), []
    completion.when_settled(lambda: seen.append(threading.get_ident()))
    assert seen == []
    in_thread(completion.settle).join()
    completion.when_settled(lambda: seen.append(threading.get_ident()))
    assert len(seen) == 2
    assert seen[0] != seen[1] == threading.get_ident()


def test_its_repr_says_where_it_is() -> None:
    completion = Completion(1, name="p")
    assert repr(completion) == "<Completion of 'p': pending>"
    completion.settle(KeyError("x"))
    assert repr(completion) == "<Completion of 'p': failed: KeyError('x')>"


@pytest.mark.parametrize("timeout", ["x", True, 1j, [1]])
def test_a_timeout_that_is_no_number(timeout: Any) -> None:
    with pytest.raises(TypeError, match="timeout"):
        Completion(1).wait(timeout)


def test_a_timeout_beyond_every_clock() -> None:
    completion = Completion(1)
    workers.start(completion.settle)
    assert completion.wait(10**400) == 1
