"""The thread team: one process-wide set of threads that runs the pieces of every host run, fairly.

A `Job` is cut into pieces; a team thread takes a piece, works on it for at most a slice, and puts it back when it is
not finished. Jobs stand in one queue and are served in turn, so a long run never keeps a short one waiting for more
than a slice. Foreign calls release the GIL: the team uses every core while Python goes on. A blocking caller may
join the team for its own job (`Team.join`), which spares short runs a change of threads.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Generic, TypeVar

from eagle.errors import StateError

P = TypeVar("P")
IDLE_S = 10.0  # an idle thread leaves after that long; a service that pauses keeps its team
MAX_THREADS = 256
EXIT_WAIT_S = 5.0  # at interpreter exit, running pieces get that long to reach the end of their slice


@cache
def core_count() -> int:
    """Cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _find_core() -> Callable[[], int] | None:
    try:
        find: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):  # not Linux
        return None
    return find if hasattr(os, "sched_setaffinity") else None


_current_core = _find_core()


class Job(ABC, Generic[P]):
    """Work cut into pieces that several threads may run at once.

    Pieces come in rounds: when every piece of a round is finished, `turn` gives the next round's, and no pieces end the
    job. A job that is stopped ends when the pieces being worked on reach the end of their slice.

    Args:
        width: Threads that may work on it at once.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.stopping = False
        self.whole_rounds = False  # whether a stopped job still works off the round it is in
        self.queued = False  # whether it stands in the team's queue; the team's lock guards it
        self._lock = threading.Lock()
        self._ready: deque[P] = deque()
        self._running = 0
        self._ended = False
        self._abandoned = False
        self._cores: dict[int, int] = {}  # where each thread last worked on it
        self._error: BaseException | None = None

    @abstractmethod
    def advance(self, piece: P) -> bool:
        """Work on ``piece`` for at most a slice; True when it is finished. Called without any lock."""

    @abstractmethod
    def turn(self) -> Iterable[P]:
        """The pieces of the next round; none end the job. Called by one thread, while no piece is being worked on."""

    @abstractmethod
    def end(self, error: BaseException | None) -> None:
        """Called once, by the last thread to leave; ``error`` is what a piece or `turn` raised."""

    def start(self) -> bool:
        """Set up the first round; False when the job has ended: nothing to do, or stopped before."""
        with self._lock:
            if self._ended:
                return False
            self._running = 1  # a stop meanwhile leaves the end to this thread
        return self._next_round()

    def stop(self) -> None:
        """Ask the job to end at the next slice. Pieces that no thread works on are dropped."""
        with self._lock:
            self.stopping = True
            if not self.whole_rounds:
                self._ready.clear()
            last = self._running == 0 and not self._ready and not self._ended
            self._ended = self._ended or last
        if last:
            self.end(self._error)

    def give_up(self, error: BaseException) -> None:
        """End the job with an error, in the middle of a round if need be: no thread will work on it any more."""
        with self._lock:
            self._error = self._error or error
            self.whole_rounds = False
        self.stop()

    def abandon(self) -> None:
        """Let nobody work on the job any more, and never end it (interpreter exit): who waits for it stays parked."""
        with self._lock:
            self._abandoned = self.stopping = True
            self._ready.clear()
            self._ended = self._ended or self._running == 0

    def spread(self) -> None:
        """Give the calling thread a core of its own, where another thread works on the job on this one.

        Linux may wake a thread on the core of whoever woke it and leave both there for some 10 ms, a short run's whole
        life, while other cores idle. The thread's affinity is as before at the end; only its core has changed.
        """
        if _current_core is None or self.width < 2:
            return
        me, core = threading.get_ident(), _current_core()
        taken = {other for thread, other in self._cores.copy().items() if thread != me}
        if core in taken:
            with contextlib.suppress(OSError):  # a sandbox may forbid it: then the system decides alone
                allowed = os.sched_getaffinity(0)
                free = allowed - taken
                if free:
                    os.sched_setaffinity(0, free)
                    os.sched_setaffinity(0, allowed)
                    core = _current_core()
        self._cores[me] = core

    def work(self) -> bool:
        """Work on one piece for a slice; False when there was none to take."""
        with self._lock:
            if not self._ready:
                return False
            piece = self._ready.popleft()
            self._running += 1
        error: BaseException | None = None
        finished = True
        try:
            finished = self.advance(piece)
        except BaseException as caught:
            error = caught
        with self._lock:
            if error is not None:
                self._error, self.stopping = error, True
            if self._error is not None or self._abandoned or (self.stopping and not self.whole_rounds):
                self._ready.clear()
            elif not finished:
                self._ready.appendleft(piece)  # its data is warm in this core's cache
            if self._running > 1 or self._ready:
                self._running -= 1
                return True
        self._next_round()  # still counted as running, so a stop meanwhile leaves the end to this thread
        return True

    def _next_round(self) -> bool:
        """Fill the queue with the next round, or end the job. One thread at a time."""
        pieces: tuple[P, ...] = ()
        try:
            if not self.stopping:
                pieces = tuple(self.turn())
        except BaseException as error:
            self._error = error
        with self._lock:
            self._running = 0
            if pieces and not self.stopping:
                self._ready.extend(pieces)
                return True
            self._ended = True
        if not self._abandoned:
            self.end(self._error)
        return False

    @property
    def waiting(self) -> int:
        """Pieces that no thread works on."""
        return len(self._ready)

    def has_room(self) -> bool:
        """Whether one more thread could take a piece now."""
        return bool(self._ready) and self._running < self.width


class Team:
    """Daemon threads that serve jobs in turn; threads come when there is work and leave when idle."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._jobs: deque[Job[Any]] = deque()
        self._threads = 0
        self._idle = 0
        self._busy = 0
        self._limit = core_count()
        self._closing = False

    def idle_cores(self) -> int:
        """Cores that no thread of the team works on now."""
        return core_count() - self._busy

    def submit(self, job: Job[Any]) -> None:
        """Start a job; it ends on a team thread (or at once, when there is nothing to do).

        Raises:
            StateError: The interpreter is exiting, or no thread could be started.
        """
        if self._closing:
            raise StateError("the interpreter is exiting: a host run issued now would never end; issue it earlier")
        if job.start():
            self._offer(job)

    def join(self, job: Job[Any]) -> None:
        """Start a job and work on it in the calling thread until nothing of it is left to take.

        Threads of the team work beside it where the job is wide enough. The job may still be running when this returns.
        """
        if job.start():
            job.spread()
            self._offer(job, besides_caller=True)
            while job.work():
                self._offer(job, besides_caller=True)

    def _offer(self, job: Job[Any], besides_caller: bool = False) -> None:
        """Let threads of the team take pieces of ``job``, when it has room for one more than the caller."""
        spare = min(job.width, job.waiting) - int(besides_caller)
        if spare < 1 or not job.has_room():
            return
        if self._closing:
            if not besides_caller:  # a caller that joined does all of it
                job.abandon()
            return
        with self._condition:
            if job.queued:
                return
            job.queued = True
            self._jobs.append(job)
            self._condition.notify(spare)
            self._limit = max(self._limit, min(job.width, MAX_THREADS))
            for _ in range(min(spare - self._idle, self._limit - self._threads)):
                if not self._start_thread():
                    break
            if self._threads == 0 and not besides_caller:
                self._jobs.remove(job)
                job.queued = False
                raise StateError("no thread could be started for a run; the process is at its limit of threads")

    def _start_thread(self) -> bool:
        try:
            threading.Thread(target=self._serve, name="eagle-team", daemon=True).start()
        except RuntimeError:  # the system's limit of threads; those that run, and a caller that joins, do the work
            return False
        self._threads += 1
        return True

    def _serve(self) -> None:
        while (job := self._take()) is not None:
            job.spread()
            job.work()
            self._offer(job)
            del job  # an idle thread must not keep the last job's arrays alive
            with self._condition:
                self._busy -= 1
                if self._closing:
                    self._condition.notify_all()

    def _take(self) -> Job[Any] | None:
        with self._condition:
            while True:
                while self._jobs:
                    job = self._jobs.popleft()
                    job.queued = False
                    if not job.has_room():
                        del job
                        continue  # the thread that leaves it offers it again when there is room
                    if job.waiting > 1 and job.has_room():
                        job.queued = True
                        self._jobs.append(job)
                    self._busy += 1
                    return job
                self._idle += 1
                woken = self._condition.wait(IDLE_S)
                self._idle -= 1
                if not woken and not self._jobs:
                    self._threads -= 1
                    return None

    def close(self) -> None:
        """Abandon every job and wait for the running slices to end (interpreter exit).

        Only daemon threads can wait for one now, and they go with the process: an error would print a traceback there.
        """
        with self._condition:
            self._closing = True
            for job in self._jobs:
                job.abandon()
            self._jobs.clear()
            self._condition.wait_for(lambda: self._busy == 0, EXIT_WAIT_S)


_team = Team()


def team() -> Team:
    """The process's team."""
    return _team


def _after_fork() -> None:
    global _team
    _team = Team()  # the parent's threads do not exist in the child, nor do its jobs


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _team.close())
