"""The poller: one thread per process that asks pending CUDA events whether they have ended, off every event loop.

An event is anything whose ``done`` property answers at once and raises when the device has failed; test doubles fit.
Events of one lane (a stream) end in order, so only the oldest of each lane is asked. The thread is in one of three
moods::

    idle  --track--> dozing    sleeps until rung; nothing is pending
    dozing --observe--> hot    looks 20 times a second: work is pending, nobody waits for it
    hot --nobody waits--> dozing --a second without work--> idle

What would wait for the device, such as destroying a graph, is left to this thread for a moment without pending work
(`when_idle`).

Hot, it looks again after about one hundredth of the time that the newest waiter has waited (10 µs to 1 ms, and up to
6 ms beside waits of seconds). A round wakes each event loop once. No Python runs in a CUDA callback, and an event that
raises settles its completion.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from eagle.aio.completion import Completion
from eagle.aio.wake import Parked, nap_after, wake_all
from eagle.errors import DeviceFault, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ("Event", "Watch", "before_polling", "endless_coming", "fault_of", "follow", "start", "track", "when_idle")

T = TypeVar("T")

_DOZE_S = 0.05
_MOST_JOBS = 1024
_CALM_S = 0.01  # longer than any issue takes that has begun already
_STAY_S = 1.0  # between bursts of replays the thread keeps dozing, so that issuing one never has to ring it
_log = logging.getLogger("eagle")


class Event(Protocol):
    """What the poller asks."""

    @property
    def done(self) -> bool:
        """Whether the work before the event has ended: answers at once, from any thread; raises on a failed device."""


def track(
    result: T,
    event: Event,
    *,
    name: str,
    lane: object = None,
    device: int = 0,
    release: Callable[[Any], object] | None = None,
    stop: Callable[[], None] | None = None,
) -> Completion[T]:
    """Make the Completion of work that ends with `event`, and keep it (and its result) alive until then.

    Args:
        result: What awaiting gives back.
        event: Recorded behind the work already.
        name: Of the pipeline or simulation, for messages.
        lane: Hashable name of the stream; events of one lane must be tracked in the order they were recorded.
            None: a lane of its own.
        device: The CUDA device, for the fault report.
        release: Called once with the event when it is needed no more (gives it back to its pool); quick, never raises.
        stop: See `Completion`.

    Raises:
        StateError: The interpreter is exiting.
    """
    return follow(result, _Released(event, device, lane, release), name=name, stop=stop)


def follow(result: T, watch: Watch, *, name: str, stop: Callable[[], None] | None = None) -> Completion[T]:
    """`track` for a watch of the caller's own kind."""
    completion = watch.completion = Completion(result, name=name, source=watch, stop=stop)
    _poller.add(watch)
    return completion


def start() -> None:
    """Start the thread; call it before any work is issued.

    So a failure to start leaves nothing behind, and `when_idle` knows that work is coming.

    Raises:
        StateError: No thread could be started, or the interpreter is exiting.
    """
    _poller.start()


def before_polling(fn: Callable[[], object]) -> None:
    """Run `fn` once in the poller's thread before it asks an event: to set up the thread for the driver."""
    _setups.append(fn)


def when_idle(job: Callable[[], object]) -> None:
    """Run `job` in the poller's thread at a moment when no tracked work is pending.

    For calls that wait for the device and hold the driver's lock meanwhile: beside a loop that waits to be stopped, or
    a stream that waits for the host, they would never return, and nobody else could call the driver. Under a load that
    never pauses so many jobs may wait (`_MOST_JOBS`); more are run all the same, unless work is pending that ends only
    when it is told to (`Watch.endless`). At interpreter exit they are dropped.

    Args:
        job: Takes nothing; what it raises is logged.
    """
    _poller.add_job(job)


@contextmanager
def endless_coming() -> Iterator[None]:
    """In this block work is issued and tracked that may wait for the host: no job is forced on it meanwhile.

    Enter it before `start`: so either the poller sees that it comes, or `start` waits for the poller's job.
    """
    poller = _poller
    with poller.lock:
        poller.coming += 1
    try:
        yield
    finally:
        with poller.lock:
            poller.coming -= 1


class Watch:
    """The source of one completion: its event, until that has ended. A subclass gives the event back in `ended`.

    Args:
        event: Recorded behind the work.
        device: The CUDA device, for the fault report.
        lane: See `track`.
    """

    __slots__ = ("completion", "device", "event", "lane", "observed")

    endless = False  # whether the work may wait for the host to end it: a long loop, a stream that watches a word
    polled = True  # a blocking thread asks the event itself: it notices the end sooner than it could be woken

    def __init__(self, event: Any, device: int, lane: object) -> None:
        self.completion: Completion[Any]
        self.event, self.device = event, device
        self.lane = self if lane is None else lane
        self.observed = False

    def ended(self) -> None:
        """The event is needed no more: called once, by the thread that saw its end; quick, never raises."""

    def check(self, woken: list[Parked] | None = None) -> bool:
        """Ask the event from whatever thread; True when settled.

        Args:
            woken: Takes whom to wake; None wakes them at once.
        """
        completion = self.completion
        if completion.settled:
            return True
        try:
            # The event may be another replay's by now when a second thread settled this one: then settling is a no-op.
            if not self.event.done:
                return False
            error: BaseException | None = None
        except Exception as caught:
            error = fault_of(caught, self.device, completion.name)
        waiters = completion.conclude(error)
        if waiters is None:
            return True
        try:
            self.ended()
        except Exception:  # the waiters must be woken all the same
            _log.exception("an event could not be given back to its pool")
        if woken is not None:
            woken += waiters
        elif waiters:
            wake_all(waiters)
        return True

    def observe(self) -> None:
        """Somebody waits."""
        _poller.observe(self)


class _Released(Watch):
    """Calls a function with the event when it has ended."""

    __slots__ = ("_release",)

    def __init__(self, event: Event, device: int, lane: object, release: Callable[[Any], object] | None) -> None:
        super().__init__(event, device, lane)
        self._release = release

    def ended(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release(self.event)


def fault_of(caught: Exception, device: int, name: str | None) -> DeviceFault:
    """The fault of a device whose event raised.

    Args:
        caught: What asking the event raised.
        device: The device.
        name: Of the pipeline whose work was in flight.
    """
    from eagle.kernels.device import fault_from

    try:
        fault = fault_from(caught, device, during=name)
    except Exception:  # a dying driver may refuse to say more; the waiters must be woken all the same
        fault = None
    if fault is None:
        fault = DeviceFault(
            f"CUDA device {device} failed while {name!r} was in flight: {caught}. "
            "Its buffers are undefined; start a new process if the next call fails, too",
            name,
            None,
        )
    if fault is not caught:
        fault.__cause__ = caught
    return fault


class _Poller:
    """The thread and what it watches. Every field is guarded by `lock`, but for `mood`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant: a finaliser may come in between
        self.bell = threading.Lock()
        self.bell.acquire()
        self.new: deque[Watch] = deque()
        self.jobs: deque[Callable[[], object]] = deque()  # for a moment without pending work
        self.waited_for = 0  # observed watches that are pending
        self.newest = 0.0  # when the last of them was observed
        self.thread: threading.Thread | None = None
        self.started_at = 0.0
        self.at_rest = threading.RLock()  # held while jobs run, which may drop what adds another
        self.busy = False
        self.coming = 0  # issues on their way of work that may wait for the host
        self.mood = "idle"
        self.closing = False
        self.ready = 0  # setups that have run
        self.lanes: dict[object, deque[Watch]] = {}  # the thread's own

    # ---- from any thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Have the thread running, and no jobs; work is about to be issued."""
        self.started_at = perf_counter()
        if self.busy:
            with self.at_rest:
                pass
        if self.thread is not None:
            return
        with self.lock:
            if self.closing:
                raise StateError("the interpreter is exiting: device work issued now would never be awaited")
            if self.thread is None:
                thread = threading.Thread(target=self._run, name="eagle-poller", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise StateError(
                        f"the poller's thread could not be started ({error}); free some threads"
                    ) from error
                self.thread = thread

    def add(self, watch: Watch) -> None:
        """Take a watch; rings only an idle thread."""
        self.start()
        self.new.append(watch)
        if self.mood == "idle":
            self.ring()

    def add_job(self, job: Callable[[], object]) -> None:
        """Take a job for `when_idle`; called by finalisers, so it starts no thread and never raises."""
        self.jobs.append(job)
        if self.thread is None and not self.closing:
            self._run_jobs()  # nothing was ever issued
        elif self.mood == "idle":
            self.ring()

    def observe(self, watch: Watch) -> None:
        """Note that somebody waits for it, from now on."""
        with self.lock:
            self.newest = perf_counter()
            if not watch.observed and not watch.completion.settled:
                watch.observed = True
                self.waited_for += 1
        if self.mood != "hot":
            self.ring()

    def ring(self) -> None:
        """Wake the thread; harmless when it is awake."""
        try:
            self.bell.release()
        except RuntimeError:  # rung already
            pass

    def close(self) -> None:
        """End the thread (at interpreter exit)."""
        with self.lock:
            self.closing = True
            thread, self.thread = self.thread, None
        self.ring()
        if thread is not None:
            thread.join(1.0)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        _sharpen_sleep()
        last_work = perf_counter()
        while not self.closing:
            try:
                self._round()
            except Exception:  # a setup or a release that breaks its promise must not stop the others' wake-ups
                _log.exception("the poller goes on after an error")
            now = perf_counter()
            if self.lanes or self.new:
                last_work = now
            if self.jobs:
                self._run_jobs()
            if self.waited_for:
                self.mood = "hot"
                time.sleep(nap_after(now - self.newest))
                continue
            # First the mood, then a look at what came meanwhile: whoever comes later sees the mood and rings.
            self.mood = "dozing" if self.lanes or self.jobs or now - last_work < _STAY_S else "idle"
            if self._missed():
                continue
            self.bell.acquire(timeout=_DOZE_S if self.mood == "dozing" else -1)

    def _run_jobs(self) -> None:
        """Run what waits for an idle moment, if this is one.

        `start` is called before work is issued, `add` behind it. First this raises its flag, then it looks at the time
        of the last `start`; `start` notes the time, then looks at the flag. So one of the two sees the other.
        """
        with self.at_rest:
            self.busy = True
            try:
                while self.jobs and (self._is_calm() or (len(self.jobs) > _MOST_JOBS and not self._is_endless())):
                    self.jobs.popleft()()
            except Exception:
                _log.exception("a job for an idle moment raised; the poller goes on")
            finally:
                self.busy = False

    def _is_calm(self) -> bool:
        pending = bool(self.lanes or self.new) or perf_counter() - self.started_at <= _CALM_S
        return self.thread is None or not pending

    def _is_endless(self) -> bool:
        """Whether something pending may wait for the host, which could not reach it while a job holds the driver."""
        if self.coming:
            return True
        pending = (tuple(watches) for watches in (self.new, *self.lanes.values()))
        return any(watch.endless for watches in pending for watch in watches)

    def _missed(self) -> bool:
        """Whether something came before the mood could be seen."""
        return self.waited_for > 0 or (self.mood == "idle" and bool(self.new or self.jobs))

    def _round(self) -> None:
        while self.ready < len(_setups):
            self.ready += 1
            _setups[self.ready - 1]()
        while self.new:
            watch = self.new.popleft()
            self.lanes.setdefault(watch.lane, deque()).append(watch)
        woken: list[Parked] = []
        for lane in list(self.lanes):
            self._ask(lane, woken)
        wake_all(woken)

    def _ask(self, lane: object, woken: list[Parked]) -> None:
        watches = self.lanes[lane]
        while watches:
            if not watches[0].check(woken):
                return
            watch = watches.popleft()
            with self.lock:
                if watch.observed:
                    watch.observed = False
                    self.waited_for -= 1
        del self.lanes[lane]


def _sharpen_sleep() -> None:
    """Let this thread's naps end when they should: Linux adds 50 µs of slack by default."""
    if sys.platform != "linux":
        return
    try:
        import ctypes

        ctypes.CDLL(None).prctl(29, ctypes.c_ulong(1000), 0, 0, 0)  # PR_SET_TIMERSLACK, in ns
    except (OSError, AttributeError):  # only slower
        pass


_setups: list[Callable[[], object]] = []
_poller = _Poller()


def _after_fork() -> None:
    global _poller
    _poller = _Poller()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _poller.close())
