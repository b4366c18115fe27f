"""The bar that ``progress=True`` shows. It never hurts the run: no call raises, blocks or leaves a thread.

On a terminal tqdm draws a bar where it is installed, else a plain line is redrawn; a log gets a line now and then. The
first failure of any kind (standard error closed or missing, a pipe without a reader, a stream whose write raises or
that lacks ``isatty``) switches it off, silently and for good.
"""

from __future__ import annotations

import math
import os
import select
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle.aio.progress import Progress

__all__ = ("Display",)

# A terminal is redrawn ten times a second; a log file or a pipe gets a line every five.
_TERMINAL_S = 0.1
_LOG_S = 5.0
# What a pipe that is ready takes in one piece (POSIX: 512 at least; longer than any line of ours).
_PIECE = 512


class Display:
    """A progress bar on standard error for one run.

    Make it off the event loop: on a terminal the first one imports tqdm.

    Args:
        label: What the bar says in front.
        stream: Where to draw; None is ``sys.stderr`` as it is now.
    """

    def __init__(self, label: str = "eagle", stream: Any = None) -> None:
        self._outlet = _Outlet(sys.stderr if stream is None else stream)
        self._label = label
        self._bar_class = _quiet_tqdm() if self._outlet.open and self._outlet.terminal else None
        self._face: _PlainLine | _TqdmBar | None = None
        self._due = 0.0
        self._shown: Progress | None = None

    def show(self, value: Progress) -> None:
        """Draw `value`, unless the last drawing is too recent; costs a clock reading then."""
        now = time.perf_counter()
        if now < self._due or not self._outlet.open:
            return
        # A log has no use for the start, where nothing has happened.
        first = self._due == 0.0
        self._due = now + (_TERMINAL_S if self._outlet.terminal else _LOG_S)
        if self._outlet.terminal or not first:
            self._draw(value, last=False)

    def close(self, value: Progress | None = None) -> None:
        """Draw the final value (None: the last one shown) and end the line. Closing twice is fine."""
        final = value if value is not None else self._shown
        if final is not None and self._outlet.open:
            self._draw(final, last=True)
        self._outlet.open = False
        self._face = None

    def _draw(self, value: Progress, *, last: bool) -> None:
        try:
            self._shown = value
            if self._face is None:
                self._face = self._new_face(value)
            self._face.draw(value, last=last)
        except Exception:  # whatever a stream or a foreign bar may raise: the run is worth more than its display
            self._outlet.open = False

    def _new_face(self, value: Progress) -> _PlainLine | _TqdmBar:
        if self._bar_class is not None:
            try:
                return _TqdmBar(self._bar_class, self._outlet, self._label, value)
            except Exception:  # a version that we do not know how to call
                self._bar_class = None
        return _PlainLine(self._outlet, self._label)


class _Outlet:
    """A stream that swallows its failures, and never waits for a reader that is slow or stopped."""

    def __init__(self, stream: Any) -> None:
        self.open = False
        self.terminal = False
        self.encoding = "ascii"
        self._stream = stream
        self._fd: int | None = None
        try:
            self.terminal = bool(stream.isatty())
            self.encoding = getattr(stream, "encoding", None) or "ascii"
            # Past the buffer of the process's own standard error: text that cannot be delivered would stay in there,
            # fail once more when the interpreter exits, and turn a good exit status into 120.
            own = sys.__stderr__
            if own is not None and stream is own:
                own.flush()
                self._fd = own.fileno()
            self.open = True
        except Exception:  # None, closed, or not much of a stream
            self.terminal = False

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        """Nothing is held back."""

    def write(self, text: str) -> int:
        if self.open:
            try:
                self._deliver(text)
            except Exception:  # broken pipe, closed file, a write of the user's own that raises
                self.open = False
        return len(text)

    def _deliver(self, text: str) -> None:
        if self._fd is None:
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode(self.encoding, "replace")
        for at in range(0, len(data), _PIECE):
            if sys.platform != "win32" and not select.select([], [self._fd], [], 0.0)[1]:
                return  # nobody reads at the moment: this drawing is left out, the next may pass
            os.write(self._fd, data[at : at + _PIECE])


class _PlainLine:
    """One line that is redrawn in place on a terminal, and written anew into a log."""

    def __init__(self, outlet: _Outlet, label: str) -> None:
        self._outlet = outlet
        self._label = label
        self._width = 0

    def draw(self, value: Progress, *, last: bool) -> None:
        line = f"{self._label}: {describe(value)}"
        if not self._outlet.terminal:
            self._outlet.write(line + "\n")
            return
        padded, self._width = line.ljust(self._width), len(line)
        self._outlet.write("\r" + padded + ("\n" if last else ""))


class _TqdmBar:
    """The same, drawn by tqdm."""

    def __init__(self, bar_class: Any, outlet: _Outlet, label: str, value: Progress) -> None:
        self._bar = bar_class(total=value.n, desc=label, unit=" samples", file=outlet, dynamic_ncols=True)

    def draw(self, value: Progress, *, last: bool) -> None:
        bar = self._bar
        bar.n = value.finished
        bar.set_postfix_str(f"{value.steps:,} steps", refresh=False)
        bar.refresh()
        if last:
            bar.close()


def describe(value: Progress) -> str:
    """Say a `Progress` in one line."""
    share = 100.0 if value.n == 0 else 100.0 * value.finished / value.n
    left = "" if not math.isfinite(value.eta_s) else f", {value.eta_s:.1f} s left"
    return (
        f"{value.finished:,} of {value.n:,} samples finished ({share:.0f} %), {value.steps:,} steps, "
        f"{value.elapsed_s:.1f} s{left}"
    )


def _quiet_tqdm() -> Any:
    """Return tqdm's bar without its monitor thread and its lock between processes, or None where there is no tqdm."""
    try:
        from tqdm import tqdm

        class Bar(tqdm):  # type: ignore[misc]
            monitor_interval = 0

        Bar.set_lock(threading.RLock())
    except Exception:  # not installed, or broken: the plain line serves
        return None
    return Bar
