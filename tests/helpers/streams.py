"""A stream for displays that goes bad."""

from __future__ import annotations


class Rude:
    """A stream whose `write` raises from the given call on."""

    encoding = "utf-8"

    def __init__(self, good: int, error: Exception) -> None:
        self.good, self.error, self.calls = good, error, 0

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def write(self, text: str) -> int:
        self.calls += 1
        if self.calls > self.good:
            raise self.error
        return len(text)
