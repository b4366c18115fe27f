from __future__ import annotations

import threading

import anyio
import pytest

from eagle.aio import poller
from eagle.aio.completion import Completion
from eagle.aio.overlap import all_of
from tests.helpers.event_doubles import FakeEvent
from tests.helpers.steps import until


class TestAllOf:
    async def test_it_ends_with_the_last_however_they_end(self) -> None:
        several = [Completion(number) for number in range(3)]
        together = all_of(several, "result")
        several[2].settle()
        several[0].settle(KeyError("only an end"))
        assert not together.done()
        several[1].settle()
        assert together.done()
        assert await together == "result"

    async def test_none_is_done(self) -> None:
        assert await all_of([], "result") == "result"

    async def test_a_task_is_woken_by_the_last(self) -> None:
        several = [Completion(number) for number in range(20)]
        together, got = all_of(several, "result"), []

        async def wait() -> None:
            got.append(await together)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(wait)
                await until(lambda: together._waiters and len(together._waiters) == 3)
                threads = [threading.Thread(target=completion.settle) for completion in several]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        assert got == ["result"] * 3

    @pytest.mark.parametrize("on_device", [False, True])
    def test_a_thread_waits_for_it(self, on_device: bool) -> None:
        if on_device:
            several = [poller.track(1, FakeEvent(after_s=after), name="p") for after in (0.0, 0.01, 0.03)]
        else:
            several = [Completion(number) for number in range(3)]
            for completion in several:
                threading.Timer(0.01, completion.settle).start()
        together = all_of(several, "result")
        assert together.source is not None
        assert together.source.polled is on_device
        assert together.wait(10) == "result"

    def test_it_ends_for_those_who_only_listen(self) -> None:
        several, called = [Completion(1), Completion(2)], threading.Event()
        all_of(several, None).when_settled(called.set)
        several[0].settle()
        assert not called.is_set()
        several[1].settle()
        assert called.is_set()
