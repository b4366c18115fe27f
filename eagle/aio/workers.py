"""Threads for host work: ordered queues borrow one from a pool while they are not empty.

A `WorkQueue` is in one of these states::

    empty --put--> served (a thread runs its jobs in order) --last job ended--> empty
                   served --its next job waits for a completion--> held --settled--> served

So ten thousand queues are not ten thousand threads, and the jobs of one queue never run at the same time. The pool
grows to `LIMIT` threads; idle ones leave after `IDLE_S`. All of them are daemons: at interpreter exit the running jobs
end, what has not begun is dropped, nothing is printed. A forked child starts with an empty pool and empty queues.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from eagle.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

__all__ = ("IDLE_S", "LIMIT", "WorkQueue", "blocking", "building", "is_closing", "start")

LIMIT = 256
IDLE_S = 5.0

_log = logging.getLogger("eagle")


class Settles(Protocol):
    """What a job may wait for: a Completion."""

    def when_settled(self, fn: Callable[[], object]) -> None:
        """Call `fn` once: now when settled, else in the thread that settles it."""


class _Job:
    __slots__ = ("after", "run", "stop")

    def __init__(self, run: Callable[[], object], after: Sequence[Settles], stop: Callable[[], object] | None) -> None:
        self.run, self.after, self.stop = run, after, stop


class WorkQueue:
    """Jobs that run one after the other, in the order they were put, on a thread borrowed from the pool."""

    __slots__ = ("_jobs", "_pool", "_served", "_stop")

    def __init__(self) -> None:
        self._pool = _pool
        self._jobs: deque[_Job] = deque()
        self._served = False
        self._stop: Callable[[], object] | None = None  # of the job that runs

    def put(
        self,
        job: Callable[[], object],
        after: Sequence[Settles] = (),
        stop: Callable[[], object] | None = None,
    ) -> None:
        """Run `job` behind the earlier ones, and not before everything in `after` has settled.

        Args:
            job: Takes nothing; what it returns is ignored, what it raises is logged.
            after: Completions to wait for. No thread is kept while the job waits for them.
            stop: Asks the running job to end early; called when the interpreter exits.

        Raises:
            StateError: The interpreter is exiting, or no thread could be started; the job was not taken.
        """
        with _pool.lock:
            if self._pool is not _pool:  # in a forked child: the parent's jobs are the parent's
                self._pool, self._served = _pool, False
                self._jobs.clear()
            _pool.refuse_when_closing()
            self._jobs.append(_Job(job, after, stop))
            if self._served:
                return
            self._served = True
            try:
                _pool.serve(self)
            except BaseException:
                self._served = False
                self._jobs.pop()
                raise

    def run_jobs(self) -> None:
        """Run what is here until it is empty, held, or others wait for a thread. Called by the pool's threads."""
        job = self._next()
        while job is not None:
            try:
                job.run()
            except BaseException:
                _log.exception("a job of a work queue raised; the queue goes on")
            del job  # or its arrays live until the next one comes
            job = self._next(ran=True)

    def stop_running(self) -> None:
        """Ask the running job to end early."""
        if self._stop is not None:
            self._stop()

    def _next(self, ran: bool = False) -> _Job | None:
        """Take the next job that may run; None when this thread is to leave the queue."""
        pool = self._pool
        while True:
            with pool.lock:
                self._stop = None
                pool.running.discard(self)
                if pool.closing:
                    self._jobs.clear()
                if not self._jobs:
                    self._served = False
                    return None
                if ran and pool.waiting:  # every thread is busy: take turns
                    pool.waiting.append(self)
                    return None
                job = self._jobs[0]
                if not job.after:
                    self._stop = job.stop
                    pool.running.add(self)
                    return self._jobs.popleft()
            if not self._clear(job):
                return None

    def _clear(self, job: _Job) -> bool:
        """Whether the first job may run now; otherwise the last one it waits for brings the queue back to the pool."""
        after, job.after = job.after, ()
        left = len(after) + 1

        def passed() -> bool:
            nonlocal left
            with _pool.lock:
                left -= 1
                return left == 0

        def settled() -> None:
            if passed():
                self._resume()

        for one in after:
            one.when_settled(settled)
        return passed()

    def _resume(self) -> None:
        with _pool.lock:
            if self._pool is not _pool or _pool.closing:
                return
            try:
                _pool.serve(self)
            except StateError:  # no thread can be had now: whoever is free next takes it
                _pool.waiting.append(self)


class _Worker(threading.Thread):
    """One thread of the pool: serves queues, rests between them, leaves when it has rested long enough."""

    def __init__(self, pool: _Pool, queue: WorkQueue, number: int) -> None:
        super().__init__(name=f"eagle-worker-{number}", daemon=True)
        self.pool = pool
        self.queue: WorkQueue | None = queue
        self.gate = threading.Lock()
        self.gate.acquire()

    def run(self) -> None:
        while (queue := self.queue) is not None:
            queue.run_jobs()
            del queue
            self.queue = None
            if not self.pool.take(self):
                self._rest()

    def _rest(self) -> None:
        if not self.gate.acquire(timeout=IDLE_S):
            self.pool.leave(self)


class _Pool:
    """The threads of this process, and the queues that found every thread busy."""

    def __init__(self) -> None:
        # Reentrant: a finaliser that the garbage collector runs in here may put a job, too.
        self.lock = threading.RLock()
        self.ended = threading.Condition(self.lock)
        self.idle: list[_Worker] = []
        self.waiting: deque[WorkQueue] = deque()
        self.running: set[WorkQueue] = set()
        self.threads = 0
        self.lent = 0  # threads that block for other host work: each may be stood in for
        self.building = 0  # threads that build something: they do not count towards the limit
        self.started = 0
        self.closing = False

    def refuse_when_closing(self) -> None:
        """Raise StateError once the interpreter exits."""
        if self.closing:
            raise StateError("the interpreter is exiting: host work issued now would never run; issue it earlier")

    def serve(self, queue: WorkQueue) -> None:
        """Give the queue a thread, or let it wait for one. The caller holds the lock."""
        if self.idle:
            worker = self.idle.pop()  # the one that rested least: the others may leave
            worker.queue = queue
            worker.gate.release()
        elif self._may_grow():
            self._grow(queue)
        else:
            self.waiting.append(queue)

    def _may_grow(self) -> bool:
        return self.threads - self.lent - self.building < LIMIT

    def _grow(self, queue: WorkQueue) -> None:
        self.started += 1
        self.threads += 1
        try:
            _Worker(self, queue, self.started).start()
        except RuntimeError as error:
            self.threads -= 1
            if self.threads - self.lent > 0:
                self.waiting.append(queue)
                return
            raise StateError(f"no thread could be started for host work ({error}); free some threads") from error

    def take(self, worker: _Worker) -> bool:
        """Hand the worker a waiting queue; False when there is none and it rests."""
        with self.lock:
            if self.closing:
                self.ended.notify_all()
            if self.waiting:
                worker.queue = self.waiting.popleft()
                return True
            self.idle.append(worker)
            return False

    def leave(self, worker: _Worker) -> None:
        """Let a rested worker go, unless it was handed a queue at the last moment."""
        with self.lock:
            if worker in self.idle:
                self.idle.remove(worker)
                self.threads -= 1
            else:
                worker.gate.acquire()  # released in the same breath as the queue was handed over

    def lend(self, change: int) -> None:
        """Note a thread that blocks for other work (+1) or goes on (-1)."""
        with self.lock:
            self.lent += change
            if self.closing:
                self.ended.notify_all()
            else:
                self._stand_in()

    def build(self, change: int) -> None:
        """Note a thread that begins to build something (+1) or has built it (-1)."""
        with self.lock:
            self.building += change
            self._stand_in()

    def _stand_in(self) -> None:
        """A thread more for a queue that waits, where there may be one. The caller holds the lock."""
        if self.closing or not self.waiting or not self._may_grow():
            return
        queue = self.waiting.popleft()
        try:
            self._grow(queue)
        except StateError:  # no thread can be had: the next one that is free takes it
            self.waiting.appendleft(queue)

    def close(self) -> None:
        """Drop what has not begun and wait for what runs; threads that wait for dropped work are not waited for."""
        with self.lock:
            self.closing = True
            self.waiting.clear()
            for queue in self.running:
                queue.stop_running()
            while self.threads - len(self.idle) - self.lent > 0:
                self.ended.wait()


class _Noted:
    def __init__(self, note: Callable[[int], None]) -> None:
        self._note = note

    def __enter__(self) -> None:
        self._note(+1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note(-1)


_pool = _Pool()
_NOTHING: AbstractContextManager[None] = nullcontext()


def start(job: Callable[[], object], stop: Callable[[], object] | None = None) -> None:
    """Run `job` on a thread of the pool, unordered; what it raises is logged. See `WorkQueue.put` for `stop`.

    Raises:
        StateError: The interpreter is exiting, or no thread could be started.
    """
    WorkQueue().put(job, stop=stop)


def is_closing() -> bool:
    """Whether the interpreter exits, so that nothing more is taken."""
    return _pool.closing


def blocking() -> AbstractContextManager[None]:
    """Mark a block in which the calling thread waits for host work.

    In a thread of the pool another may stand in for it, so that jobs that wait for jobs never use up the pool.
    """
    worker = threading.current_thread()
    return _Noted(worker.pool.lend) if isinstance(worker, _Worker) else _NOTHING


def building() -> AbstractContextManager[None]:
    """Mark a block in which a thread of the pool builds something, mostly waiting for a compiler.

    However many builds hang, host work finds its threads; at interpreter exit they are waited for like other jobs.
    """
    worker = threading.current_thread()
    return _Noted(worker.pool.build) if isinstance(worker, _Worker) else _NOTHING


def _after_fork() -> None:
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _pool.close())
