"""GraphPipeline in blocking form."""

from __future__ import annotations

from typing import TypeVar

from eagle.aio.pipeline import GraphPipeline as AsyncGraphPipeline
from eagle.sync.blocking import run

__all__ = ("GraphPipeline",)

P = TypeVar("P", bound="GraphPipeline")


class GraphPipeline(AsyncGraphPipeline):
    """`eagle.GraphPipeline` whose `launch` and `synchronize` block; `enqueue` gives the same Completion."""

    def launch(self: P, n: int = 1) -> P:  # type: ignore[override]
        """Replay `n` times and block until the end.

        Ctrl-C drops the host replays that have not begun, ends loops between two iterations and waits for what runs;
        then KeyboardInterrupt leaves.

        Args:
            n: How many replays.

        Returns:
            The pipeline.

        Raises:
            LoopRunning: An event loop runs in this thread: ``await`` the launch of an `eagle.GraphPipeline` there.
            NotBuilt: Call `build` first.
            Exception: What a host step raised.
            DeviceFault: The device failed, now or before.
        """
        launch = super().launch
        return run(lambda: launch(n), "GraphPipeline.launch()", "await pipeline.launch() of an eagle.GraphPipeline")

    def synchronize(self) -> None:  # type: ignore[override]
        """Block until every replay issued so far has ended; Ctrl-C leaves at once and drops nothing.

        Raises:
            LoopRunning: An event loop runs in this thread.
            NotBuilt: Call `build` first.
            Exception: The first error of an earlier replay that nobody awaited.
        """
        run(
            super().synchronize, "GraphPipeline.synchronize()", "await pipeline.synchronize() of an eagle.GraphPipeline"
        )
