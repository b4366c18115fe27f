"""Who follows a run: the feed behind `progress()`, and the display that ``progress=True`` asks for."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from eagle.aio.progress import Feed, Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from eagle.aio.display import Display

_LOOK_S = 0.1  # between two looks of a display at a run that publishes nothing


class Watchers:
    """Hands each figure of a run to the feed and, while there is one, to the display.

    Attributes:
        display: The display, for one run.
        short: Set while a run is in progress that nobody has looked at yet: it begins for the feed when somebody does.
    """

    def __init__(self) -> None:
        self._feed = Feed()
        self.display: Display | None = None
        self._ticker: _Ticker | None = None
        self.short = False
        self._coming = threading.Lock()  # between somebody who comes and a short run that ends

    @property
    def wanted(self) -> bool:
        """Whether anybody looks: the display, or an iterator."""
        return self.display is not None or bool(self._feed.watches)

    def begin(self, value: Progress | None = None, look: Callable[[], Progress | None] | None = None) -> None:
        """A run begins; without a value when nobody looks yet. ``look`` as in `Feed.begin`."""
        self._feed.begin(value, look)
        if self.display is None:
            return
        if value is not None:
            self.display.show(value)
        if look is not None:
            self._ticker = _Ticker(self.display, look)

    def publish(self, value: Progress) -> None:
        """The run has come further."""
        self._feed.publish(value)
        if self.display is not None:
            self.display.show(value)

    def end(self, value: Progress | None = None) -> None:
        """The run is over; the display ends its line. Without a value when nobody has looked."""
        self._feed.end(value)
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.end()
        display, self.display = self.display, None
        if display is not None:
            display.close(value)

    def watch(self, interval: float) -> AsyncIterator[Progress]:
        """An iterator over the run in progress, or over the next one."""
        with self._coming:
            if self.short:
                self._feed.begin()
                self.short = False
            return self._feed.watch(interval)

    def end_short(self) -> None:
        """A short run is over, which began when `short` was set."""
        with self._coming:
            if self.short:
                self.short = False
                return
        self.end()


class _Ticker:
    """A thread that shows how far a run is, while the run is one graph that says nothing before its end."""

    def __init__(self, display: Display, look: Callable[[], Progress | None]) -> None:
        self._display, self._look = display, look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eagle-display", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread to be had: the run is worth more than its display
            self._over.set()

    def end(self) -> None:
        """Show nothing more, from now on."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            value = self._look()
            if value is not None:
                self._display.show(value)
