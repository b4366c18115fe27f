"""GraphComposer in blocking form."""

from __future__ import annotations

from typing import TypeVar

from eagle.aio.composer import GraphComposer as AsyncGraphComposer
from eagle.sync.blocking import run

__all__ = ("GraphComposer",)

C = TypeVar("C", bound="GraphComposer")


class GraphComposer(AsyncGraphComposer):
    """`eagle.GraphComposer` whose `launch` blocks; plain callables run in the calling thread."""

    def launch(self: C, n: int = 1) -> C:  # type: ignore[override]
        """Launch the active members `n` times and block until all have ended.

        Ctrl-C stops them and waits for what runs; then KeyboardInterrupt leaves.

        Args:
            n: How many replays; a plain callable is called `n` times.

        Returns:
            The composer.

        Raises:
            LoopRunning: An event loop runs in this thread: ``await`` the launch of an `eagle.GraphComposer` there.
            NotBuilt: Call `build` first.
            Exception: What the one failed member raised, with a note that names it.
            ExceptionGroup: Several members failed.
        """
        launch = super().launch
        return run(lambda: launch(n), "GraphComposer.launch()", "await composer.launch() of an eagle.GraphComposer")
