"""What a run did: RunReport, and SimResult, which adds the state it left behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, init=False)
class RunReport:
    """What one `Runner.run` did.

    Attributes:
        n: Samples of the batch.
        finished: Samples whose mask is set when the run ends.
        done: ``finished == n``.
        launches: Iterations of the loop.
        steps: Steps that the loop ran: ``launches * K``, or the sum of k over the launches of an automatic kernel (on
            the host, of the range that took longest). At least the longest sample's steps; a Python int, never wraps.
        compactions: Compactions that ran.
        reorders: Physical reorders that ran.
        build_s: Seconds of the one-time capture, 0 on the host.
        launches_by_k: Launches of each step count k.
        exact_steps: ``steps`` is exactly what the longest sample took, or was allowed: K = 1, or an automatic kernel
            that launched nothing, hit the cap, or ended on a one-step launch.
        lane_utilisation: Active lanes over lane slots of a persist run that counted them, in (0, 1]; else None.
        mode: The shape of the run: "fused_one", "persist" or "band".
        probe: True for a run that timed a shape the batch is not using.
        entry: Kernel entry of a one-launch run on a device: "step", "range" or "persist"; else "".
        block: Threads of a block of that launch, or 0.
        threads_per_sm: Threads that a persist grid gave each multiprocessor, or 0.
        chunk: Trips between two claims of a persist run, or 0.
    """

    n: int
    finished: int
    done: bool
    launches: int
    steps: int
    compactions: int
    reorders: int
    build_s: float
    launches_by_k: dict[int, int] = field(default_factory=dict)
    exact_steps: bool = False
    lane_utilisation: float | None = None
    mode: str = "band"
    probe: bool = False
    entry: str = ""
    block: int = 0
    threads_per_sm: int = 0
    chunk: int = 0

    def __init__(
        self,
        n: int,
        finished: int,
        done: bool,
        launches: int,
        steps: int,
        compactions: int,
        reorders: int,
        build_s: float,
        launches_by_k: dict[int, int] | None = None,
        exact_steps: bool = False,
        lane_utilisation: float | None = None,
        mode: str = "band",
        probe: bool = False,
        entry: str = "",
        block: int = 0,
        threads_per_sm: int = 0,
        chunk: int = 0,
    ) -> None:
        # The generated one of a frozen class sets field by field: 4 µs, a tenth of the shortest run.
        self.__dict__.update(
            n=n,
            finished=finished,
            done=done,
            launches=launches,
            steps=steps,
            compactions=compactions,
            reorders=reorders,
            build_s=build_s,
            launches_by_k={} if launches_by_k is None else launches_by_k,
            exact_steps=exact_steps,
            lane_utilisation=lane_utilisation,
            mode=mode,
            probe=probe,
            entry=entry,
            block=block,
            threads_per_sm=threads_per_sm,
            chunk=chunk,
        )

    @classmethod
    def of(cls, fields: dict[str, Any]) -> RunReport:
        """A report of a shallow copy of all the fields; whoever completes it replaces the mutable ones, too."""
        report = cls.__new__(cls)
        report.__dict__.update(fields)
        return report


class SimResult:
    """What one `Simulation.run` produced. Each state plane is an attribute and an item too: ``r.x is r["x"]``.

    Attributes:
        state: Each state plane's array by name, in signature order; the caller's own arrays, written in place.
        finished: The mask, one bool per sample.
        done: Whether every sample finished.
        steps: The report's steps.
        status: "finished" or "max_steps".
        report: The whole `RunReport`.
        n: Samples.
        wall_s: Wall time of the run, seconds.
        allocated: Names of the planes that were made because the caller left them out.
    """

    FIELDS = ("state", "finished", "done", "steps", "status", "report", "n", "wall_s", "allocated")

    def __init__(
        self, *, state: dict[str, Any], finished: Any, report: RunReport, wall_s: float, allocated: tuple[str, ...]
    ) -> None:
        self.state = state
        self.finished = finished
        self.report = report
        self.wall_s = wall_s
        self.allocated = allocated

    @property
    def done(self) -> bool:
        """Whether every sample finished."""
        return self.report.done

    @property
    def steps(self) -> int:
        """The report's steps."""
        return self.report.steps

    @property
    def status(self) -> str:
        """Either "finished", or "max_steps" when the cap ended the run."""
        return "finished" if self.report.done else "max_steps"

    @property
    def n(self) -> int:
        """Samples."""
        return self.report.n

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state", {})
        if name in state:
            return state[name]
        raise AttributeError(f"this result has no state plane or field {name!r}; its planes are {', '.join(state)}")

    def __getitem__(self, name: str) -> Any:
        try:
            return self.state[name]
        except KeyError:
            raise KeyError(f"no state plane {name!r}; the planes are {', '.join(self.state)}") from None

    def __repr__(self) -> str:
        return f"<SimResult {self.status}, n={self.n}, steps={self.steps}, state: {', '.join(self.state)}>"
