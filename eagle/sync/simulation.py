"""simulate, until_done and their classes in blocking form: the same runs, waited for without an event loop.

Ctrl-C ends a run at its next slice and then leaves as KeyboardInterrupt; planes, mask and counters agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

from eagle.aio.completion import wait_to_end
from eagle.aio.display import Display
from eagle.aio.runner import Runner as AsyncRunner
from eagle.aio.runner import check_progress
from eagle.aio.runner import run_until_done as async_run_until_done
from eagle.aio.runner import until_done as async_until_done
from eagle.aio.simulation import Simulation as AsyncSimulation
from eagle.aio.simulation import simulate as async_simulate
from eagle.aio.simulation import simulation as async_simulation
from eagle.aio.wake import refuse_in_loop
from eagle.sync.blocking import blocking_twin
from eagle.sync.interrupt import interrupt_deferred
from eagle.sync.limit import token_of
from eagle.sync.pipeline import GraphPipeline

if TYPE_CHECKING:
    from eagle.aio.report import RunReport, SimResult


_NOTHING: AbstractContextManager[Callable[[], bool]] = nullcontext(lambda: False)


class Runner(AsyncRunner):
    """`eagle.aio.Runner` whose `run` blocks."""

    _pipeline_class = GraphPipeline

    def run(self, *, progress: bool = False) -> RunReport:  # type: ignore[override]
        """Run until every sample is done or has taken ``max_steps``, and report.

        The calling thread works on the run too, which spares short runs a change of threads.

        Raises:
            LoopRunning: An event loop runs in this thread; ``await runner.run()`` of eagle.aio there.
            Busy: Another run of this object is in progress.
        """
        refuse_in_loop("Runner.run()", "await runner.run()")
        return self.drive(progress=progress)

    def drive(self, *, progress: bool) -> RunReport:
        """`run` for a caller that has refused a running loop already."""
        self.claim()
        try:
            if check_progress(progress) or self.options.progress:
                self.bound.watchers.display = Display(self.bound.name)
            limiter = self.options.limiter
            if limiter is None:
                return self._run_claimed()
            with token_of(limiter):
                return self._run_claimed()
        finally:
            self.release()

    def _run_claimed(self) -> RunReport:
        short = self.bound.short(self._max_steps, self.options.priority)
        if short is not None:
            return short.run_blocking()
        # On the host this thread works on the run itself; for a device it only waits.
        with interrupt_deferred(self.stop) if self.target == "host" else _NOTHING as interrupted:
            run = self.start()
            try:
                while not interrupted() and (work := run.next(join=True)) is not None:
                    wait_to_end(work)
            finally:
                run.close()
            return self.told(run)


class Simulation(AsyncSimulation):
    """`eagle.aio.Simulation` whose `run` blocks."""

    _runner_class = Runner

    def run(self, *, progress: bool = False) -> SimResult:
        """Run until every sample finishes or has taken ``max_steps``; the state is written in place.

        Raises:
            LoopRunning: An event loop runs in this thread; ``await sim.run()`` of eagle.aio there.
            Busy: Another run of this object is in progress.
        """
        refuse_in_loop("Simulation.run()", "await sim.run()")
        began = perf_counter()
        runner = self._runner
        assert isinstance(runner, Runner), "a blocking simulation builds a blocking runner"
        return self.result(runner.drive(progress=progress), perf_counter() - began)


@blocking_twin(async_until_done)
def until_done(plan: Any, **options: Any) -> Runner:
    """`eagle.aio.until_done`, blocking."""
    return Runner(plan, **options)


@blocking_twin(async_run_until_done)
def run_until_done(plan: Any, **options: Any) -> RunReport:
    """`eagle.aio.run_until_done`, blocking."""
    return Runner(plan, **options).run()


@blocking_twin(async_simulation)
def simulation(model: Any, *args: Any, **kwargs: Any) -> Simulation:
    """`eagle.aio.simulation`, blocking."""
    return Simulation.of_call(model, args, kwargs)


@blocking_twin(async_simulate)
def simulate(model: Any, *args: Any, **kwargs: Any) -> SimResult:
    """`eagle.aio.simulate`, blocking."""
    return Simulation.of_call(model, args, kwargs).run()
