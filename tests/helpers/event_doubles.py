"""Stand-ins for CUDA events: ended when told to, never, late, or failing like a lost device."""

from __future__ import annotations

import threading
import time


class FakeEvent:
    """Ends when `finish` is called; with an error, every later query raises it."""

    def __init__(self, *, after_s: float | None = None) -> None:
        self._ends_at = None if after_s is None else time.monotonic() + after_s
        self._error: Exception | None = None
        self._ended = False
        self.queries = 0
        self.threads: set[int] = set()

    @property
    def done(self) -> bool:
        self.queries += 1
        self.threads.add(threading.get_ident())
        if self._error is not None:
            raise self._error
        return self._ended or (self._ends_at is not None and time.monotonic() >= self._ends_at)

    def finish(self) -> None:
        """The work before the event has ended."""
        self._ended = True

    def fail(self, error: Exception) -> None:
        """The device is lost."""
        self._error = error
