from __future__ import annotations

import asyncio
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from eagle.aio import wake
from eagle.errors import LoopRunning, StateError
from tests.helpers.steps import until


class TestTheMailbox:
    async def test_there_is_one_for_a_loop(self) -> None:
        box = wake.mailbox()
        assert box is not None
        assert wake.mailbox() is box

    def test_each_loop_has_its_own(self, anyio_backend: tuple[str, dict[str, Any]]) -> None:
        async def get() -> wake.Mailbox | None:
            return wake.mailbox()

        boxes = [anyio.run(get, backend=anyio_backend[0], backend_options=anyio_backend[1]) for _ in range(3)]
        assert len(set(boxes)) == 3

    async def test_a_hundred_letters_ring_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        box, woken, rings = wake.mailbox(), [], []
        assert box is not None
        ring = box._ring
        monkeypatch.setattr(box, "_ring", lambda: (rings.append(1), ring()))

        def post() -> None:
            for number in range(100):
                box.post([wake.Hook(lambda number=number: woken.append(number))])

        post()  # without a turn of the loop in between
        with anyio.fail_after(10):
            await until(lambda: len(woken) == 100)
        assert woken == list(range(100))
        assert len(rings) == 1

    async def test_posts_from_many_threads_all_arrive_on_the_loops_thread(self) -> None:
        box, woken = wake.mailbox(), []
        assert box is not None

        def post() -> None:
            for _ in range(500):
                box.post([wake.Hook(lambda: woken.append(threading.get_ident()))])

        threads = [threading.Thread(target=post) for _ in range(4)]
        for thread in threads:
            thread.start()
        with anyio.fail_after(20):
            await until(lambda: len(woken) == 2000)
        for thread in threads:
            thread.join()
        assert set(woken) == {threading.get_ident()}

    def test_a_closed_loop_is_ignored(self, anyio_backend: tuple[str, dict[str, Any]], silence: list[Any]) -> None:
        async def get() -> tuple[wake.Mailbox | None, Any]:
            await anyio.lowlevel.checkpoint()
            return wake.mailbox(), None if anyio_backend[0] == "trio" else asyncio.get_running_loop()

        box, _loop = anyio.run(get, backend=anyio_backend[0], backend_options=anyio_backend[1])
        assert box is not None
        for _ in range(3):
            box.post([wake.Hook(lambda: None)])

    def test_a_loop_that_closes_at_any_moment(
        self, anyio_backend: tuple[str, dict[str, Any]], silence: list[Any]
    ) -> None:
        stop = threading.Event()
        boxes: list[wake.Mailbox] = []

        def post() -> None:
            while not stop.is_set():
                for box in boxes[-2:]:
                    box.post([wake.Hook(lambda: None)])

        async def live(turns: int) -> None:
            box = wake.mailbox()
            assert box is not None
            boxes.append(box)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()

        thread = threading.Thread(target=post)
        thread.start()
        try:
            for turns in range(15):
                anyio.run(live, turns, backend=anyio_backend[0], backend_options=anyio_backend[1])
        finally:
            stop.set()
            thread.join(10)
        assert not thread.is_alive()

    @pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})])
    async def test_a_trio_loop_that_is_guest_of_asyncio(self) -> None:
        trio = pytest.importorskip("trio")
        loop, ended = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        async def guest() -> tuple[Any, Any]:
            return type(wake.mailbox()).__name__, wake.loop_runs_here()

        trio.lowlevel.start_guest_run(
            guest, run_sync_soon_threadsafe=loop.call_soon_threadsafe, done_callback=ended.set_result
        )
        with anyio.fail_after(10):
            outcome = await ended
        assert outcome.unwrap() == ("_TrioMailbox", True)
        assert type(wake.mailbox()).__name__ == "_AsyncioMailbox"


class TestParking:
    async def test_a_task_is_woken_once_and_late_wakes_are_harmless(self) -> None:
        box = wake.mailbox()
        assert box is not None
        parked = box.park()
        box.post([parked, parked])
        with anyio.fail_after(10):
            await parked.wait()
        box.post([parked])
        await anyio.sleep(0.001)

    async def test_a_cancelled_task_is_not_woken(self) -> None:
        box = wake.mailbox()
        assert box is not None
        parked = box.park()
        with anyio.move_on_after(0.01) as scope:
            await parked.wait()
        assert scope.cancelled_caught
        box.post([parked])
        await anyio.sleep(0.001)

    def test_a_thread(self) -> None:
        parked = wake.ParkedThread()
        assert not parked.wait(0.0)
        assert not parked.wait(0.01)
        parked.wake()
        assert parked.wait(10)

    def test_a_thread_on_a_system_that_does_not_interrupt_locks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wake, "_STEP_S", 0.001)
        parked = wake.ParkedThread()
        assert not parked.wait(0.01)
        threading.Timer(0.02, parked.wake).start()
        assert parked.wait(None)


class TestRefusing:
    async def test_in_a_loop_with_the_coroutine_to_await(self) -> None:
        assert wake.loop_runs_here()
        with pytest.raises(LoopRunning, match=r"sim\.run\(\) blocks.*`await other\.run\(\)`"):
            wake.refuse_in_loop("sim.run()", "await other.run()")

    async def test_not_in_a_thread_beside_the_loop(self) -> None:
        assert not await anyio.to_thread.run_sync(wake.loop_runs_here)

    def test_not_without_a_loop(self) -> None:
        assert not wake.loop_runs_here()
        wake.refuse_in_loop("sim.run()", "await sim.run()")

    def test_no_mailbox_without_a_loop(self) -> None:
        with pytest.raises(StateError, match="asyncio or trio"):
            wake.mailbox()
        with wake.driving():
            assert wake.mailbox() is None
        with pytest.raises(StateError):
            wake.mailbox()

    async def test_a_loop_wins_over_driving(self) -> None:
        with wake.driving():
            assert wake.mailbox() is not None


def test_naps_grow_with_the_wait() -> None:
    assert [wake.nap_after(waited) for waited in (0.0, 1e-3, 0.01, 1.0, 10.0)] == [1e-5, 1e-5, 1e-4, 1e-3, 6e-3]
