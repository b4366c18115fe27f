"""The poller, with doubles of CUDA events: no GPU is needed to see every fate an event can have."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from eagle.aio import poller
from eagle.errors import DeviceFault
from tests.helpers.event_doubles import FakeEvent
from tests.helpers.steps import until, until_blocking

if TYPE_CHECKING:
    from eagle.aio.completion import Completion


def track(event: Any, name: str = "p", **options: Any) -> Completion[str]:
    return poller.track("result", event, name=name, **options)


class TestAnEvent:
    @pytest.mark.parametrize("after_s", [0.0, 20e-6, 1e-3, 0.1])
    async def test_it_is_awaited(self, after_s: float) -> None:
        with anyio.fail_after(10):
            assert await track(FakeEvent(after_s=after_s)) == "result"

    async def test_a_short_one_is_noticed_without_the_poller(self) -> None:
        event = FakeEvent()
        event.finish()
        assert await track(event) == "result"
        assert event.threads == {threading.get_ident()}

    async def test_a_long_one_is_asked_off_the_loop(self) -> None:
        event = FakeEvent()
        completion = track(event)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:

                async def wait() -> None:
                    await completion

                group.start_soon(wait)
                await until(lambda: len(event.threads) == 2)
                event.finish()
        assert threading.get_ident() in event.threads

    def test_it_is_waited_for(self) -> None:
        assert track(FakeEvent(after_s=0.02)).wait(10) == "result"

    def test_one_that_never_ends_times_out(self) -> None:
        event = FakeEvent()
        completion = track(event)
        with pytest.raises(TimeoutError):
            completion.wait(0.02)
        assert not completion.done()
        event.finish()
        assert completion.done()

    def test_callbacks_come_without_a_waiter(self) -> None:
        called: list[object] = []
        completion = track(FakeEvent(after_s=0.02))
        completion.add_done_callback(called.append)
        until_blocking(lambda: called == [completion])

    def test_nobody_has_to_look(self) -> None:
        given_back: list[object] = []
        event = FakeEvent(after_s=0.01)
        track(event, release=given_back.append)
        until_blocking(lambda: given_back == [event])

    async def test_it_is_given_back_once(self) -> None:
        given_back: list[object] = []
        for _ in range(50):
            event = FakeEvent(after_s=1e-4)
            await track(event, release=given_back.append)
        assert len(given_back) == 50
        last = FakeEvent(after_s=0.01)
        track(last, release=given_back.append)  # by then the poller has looked at all of them itself
        await until(lambda: last in given_back)
        assert len(given_back) == 51

    async def test_a_pool_that_refuses_it_hurts_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        def refuse(event: object) -> None:
            raise KeyError

        assert await track(FakeEvent(after_s=0.01), release=refuse) == "result"
        assert "given back" in caplog.text


class TestALane:
    async def test_only_the_oldest_is_asked(self) -> None:
        first, second = FakeEvent(), FakeEvent()
        completions = [track(first, lane="lane"), track(second, lane="lane")]
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                await completions[0]

            group.start_soon(wait)
            await until(lambda: first.queries > 20)
            assert second.queries == 0
            second.finish()
            first.finish()
        with anyio.fail_after(10):
            await completions[1]

    async def test_lanes_do_not_wait_for_each_other(self) -> None:
        stuck, free = FakeEvent(), FakeEvent(after_s=0.01)
        track(stuck, lane="a")
        with anyio.fail_after(10):
            assert await track(free, lane="b") == "result"
        stuck.finish()


class TestAFault:
    async def test_every_waiter_gets_it_by_name(self) -> None:
        event, cause = FakeEvent(), ValueError("the card fell off the bus")
        completion, got = track(event, "orbit"), []

        async def wait() -> None:
            try:
                await completion
            except DeviceFault as fault:
                got.append(fault)

        with anyio.fail_after(1):
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(wait)
                await until(lambda: event.queries > 10)
                event.fail(cause)
        assert len(got) == 5
        assert all(fault.pipeline == "orbit" and fault.__cause__ is cause for fault in got)
        assert "'orbit'" in str(got[0])
        assert "fell off the bus" in str(got[0])

    def test_blocking_waiters_and_callbacks_get_it(self) -> None:
        event, called = FakeEvent(), []
        completion = track(event)
        completion.add_done_callback(called.append)
        threading.Timer(0.02, event.fail, [ValueError("lost")]).start()
        with pytest.raises(DeviceFault, match="lost"):
            completion.wait(10)
        until_blocking(lambda: called == [completion])

    async def test_one_behind_another_gets_its_own(self) -> None:
        first, second = FakeEvent(), FakeEvent()
        completions = [track(first, "one", lane="lane"), track(second, "two", lane="lane")]
        first.fail(ValueError("lost"))
        second.fail(ValueError("lost"))
        for completion, name in zip(completions, ("one", "two"), strict=True):
            with pytest.raises(DeviceFault) as caught:
                await completion
            assert caught.value.pipeline == name

    async def test_the_others_go_on(self) -> None:
        bad, good = FakeEvent(), FakeEvent(after_s=0.02)
        bad.fail(ValueError("lost"))
        broken, whole = track(bad), track(good)
        with anyio.fail_after(10):
            assert await whole == "result"
        with pytest.raises(DeviceFault):
            await broken


class TestIdleMoments:
    def test_a_job_waits_until_nothing_is_pending(self) -> None:
        event, ran = FakeEvent(), []
        completion = track(event)
        poller.when_idle(lambda: ran.append(threading.get_ident()))
        with pytest.raises(TimeoutError):
            completion.wait(0.15)  # some rounds of the poller
        assert ran == []
        event.finish()
        until_blocking(lambda: ran)
        assert ran[0] != threading.get_ident()

    def test_it_comes_while_the_poller_rests(self) -> None:
        track(FakeEvent(after_s=0.0)).wait(10)
        until_blocking(lambda: poller._poller.mood == "idle")
        ran = threading.Event()
        poller.when_idle(ran.set)
        assert ran.wait(10)

    def test_before_anything_was_issued_it_runs_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(poller, "_poller", poller._Poller())
        ran: list[int] = []
        poller.when_idle(lambda: ran.append(threading.get_ident()))
        assert ran == [threading.get_ident()]
        assert poller._poller.thread is None

    def test_one_that_raises_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        ran = threading.Event()
        track(FakeEvent(after_s=0.0)).wait(10)
        poller.when_idle(lambda: {}["missing"])
        poller.when_idle(ran.set)
        assert ran.wait(10)
        assert "missing" in caplog.text

    def test_work_that_is_about_to_be_issued_waits_for_a_running_job(self) -> None:
        inside, leave, issued = threading.Event(), threading.Event(), threading.Event()
        track(FakeEvent(after_s=0.0)).wait(10)
        poller.when_idle(lambda: (inside.set(), leave.wait(10)))
        assert inside.wait(10)
        thread = threading.Thread(target=lambda: (poller.start(), issued.set()))
        thread.start()
        assert not issued.wait(0.02)
        leave.set()
        assert issued.wait(10)
        thread.join()

    def test_under_a_load_that_never_pauses_they_run_all_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(poller, "_MOST_JOBS", 3)
        event, ran = FakeEvent(), []
        track(event)
        for number in range(5):
            poller.when_idle(lambda number=number: ran.append(number))
        until_blocking(lambda: ran == [0, 1])
        event.finish()
        until_blocking(lambda: ran == [0, 1, 2, 3, 4])

    def test_beside_work_that_waits_for_the_host_they_wait_however_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They would hold the driver until the work ends, which ends only when the driver is told to end it."""
        monkeypatch.setattr(poller, "_MOST_JOBS", 3)

        class Endless(poller.Watch):
            __slots__ = ()
            endless = True

        loop, other, ran = FakeEvent(), FakeEvent(), []
        completion = poller.follow("loop", Endless(loop, 0, "a"), name="p")
        track(other)
        for number in range(9):
            poller.when_idle(lambda number=number: ran.append(number))
        other_end = track(FakeEvent(after_s=0.1))  # the poller has gone round by then
        other_end.wait(10)
        assert ran == []
        loop.finish()
        completion.wait(10)
        until_blocking(lambda: ran == [0, 1, 2, 3, 4, 5])
        other.finish()
        until_blocking(lambda: ran == list(range(9)))

    def test_beside_such_work_that_is_being_issued_they_wait_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(poller, "_MOST_JOBS", 3)
        event, ran = FakeEvent(), []
        with poller.endless_coming():
            track(event)
            for number in range(5):
                poller.when_idle(lambda number=number: ran.append(number))
            track(FakeEvent(after_s=0.1)).wait(10)
            assert ran == []
        until_blocking(lambda: ran == [0, 1])
        event.finish()
        until_blocking(lambda: ran == [0, 1, 2, 3, 4])


class TestTheThread:
    def test_there_is_one(self) -> None:
        completions = [track(FakeEvent(after_s=0.02)) for _ in range(20)]
        for completion in completions:
            completion.wait(10)
        assert [thread.name for thread in threading.enumerate()].count("eagle-poller") == 1

    def test_setups_run_in_it_before_it_asks(self) -> None:
        threads: list[int] = []
        poller.before_polling(lambda: threads.append(threading.get_ident()))
        event = FakeEvent()
        track(event)
        until_blocking(lambda: event.queries > 0)
        event.finish()
        assert threads == list(event.threads)

    def test_a_setup_that_raises_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        def broken() -> None:
            raise KeyError("setup")

        poller.before_polling(broken)
        assert track(FakeEvent(after_s=0.3)).wait(10) == "result"
        event = FakeEvent(after_s=0.01)
        called: list[object] = []
        track(event).add_done_callback(called.append)
        until_blocking(lambda: called)
        assert "setup" in caplog.text

    def test_it_rests_while_nothing_is_pending(self) -> None:
        until_blocking(lambda: poller._poller.mood == "idle")
        assert track(FakeEvent(after_s=0.02)).wait(10) == "result"

    async def test_a_loop_is_rung_once_a_round(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from eagle.aio.wake import mailbox

        rings, completion_count = [], 40
        box = mailbox()
        assert box is not None
        ring = box._ring
        monkeypatch.setattr(box, "_ring", lambda: (rings.append(1), ring()))
        gate = FakeEvent()
        completions = [track(gate) for _ in range(completion_count)]

        async def wait(completion: Completion[str]) -> None:
            await completion

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                for completion in completions:
                    group.start_soon(wait, completion)
                await until(lambda: all(completion._waiters for completion in completions))
                gate.finish()
        # The event ends in the middle of one round: its second half comes in that round, the first in the next.
        assert 1 <= len(rings) <= 3
