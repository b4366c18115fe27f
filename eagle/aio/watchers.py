"""Who follows a run: the feed behind `progress()`, and the display that ``progress=True`` asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from eagle.aio.progress import Feed, Progress

if TYPE_CHECKING:
    from eagle.aio.display import Display


class Watchers:
    """Hands each figure of a run to the feed and, while there is one, to the display."""

    def __init__(self) -> None:
        self._feed = Feed()
        self.display: Display | None = None

    @property
    def wanted(self) -> bool:
        """Whether anybody looks: the display, or an iterator."""
        return self.display is not None or self._feed.watched

    def begin(self, value: Progress | None = None) -> None:
        """A run begins; without a value when nobody looks yet."""
        self._feed.begin(value)
        if self.display is not None and value is not None:
            self.display.show(value)

    def publish(self, value: Progress) -> None:
        """The run has come further."""
        self._feed.publish(value)
        if self.display is not None:
            self.display.show(value)

    def end(self, value: Progress | None = None) -> None:
        """The run is over; the display ends its line. Without a value when nobody has looked."""
        self._feed.end(value)
        display, self.display = self.display, None
        if display is not None:
            display.close(value)

    def watch(self, interval: float) -> AsyncIterator[Progress]:
        """An iterator over the run in progress, or over the next one."""
        return self._feed.watch(interval)
