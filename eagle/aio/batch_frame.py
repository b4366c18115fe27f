"""Frames: bound batch arrays of one capacity, filled with the planes of many requests, run, and copied out again.

Binding (and on a device capturing) costs far more than a small run, so frames are bound once and used for batch after
batch: one of fewer samples than the capacity leaves the tail marked as finished, and kernels skip it. A request that
must run alone gets a frame of its own, over copies of the planes that are written and over its own arrays for the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from eagle.aio.batch_result import Outputs
from eagle.aio.completion import Completion, drained, leave_when_done
from eagle.aio.host_loop import HostLoop
from eagle.aio.host_run import HostRun, cut
from eagle.aio.report import RunReport
from eagle.aio.runner import Runner, RunOptions
from eagle.kernels.team import core_count

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from eagle.aio.batch_request import Intake, Request
    from eagle.kernels.residency import Residency

# The smallest capacity, and the distance between two: what a tail costs is little beside binding one more frame.
_SMALLEST, _FACTOR = 256, 4
# A long batch is looked at that often for requests that have finished already: twice a host slice.
_LOOK_S = 0.01


class Frame(ABC):
    """Batch arrays, bound.

    Args:
        intake: The step and what its requests share.
        device: CUDA device id, or None for the host.
        given: The per-sample planes (or, for a request that runs alone, all planes), native.
        max_steps: Steps a sample may take.

    Attributes:
        capacity: Samples it was bound for.
        runner: The runner that runs it.
    """

    def __init__(self, intake: Intake, device: int | None, given: dict[str, Any], max_steps: int) -> None:
        step = intake.step
        self.runner = Runner.of_step(
            step,
            {**intake.shared_on(device), **given},
            max_steps=max_steps,
            every=None,
            reorder=None,
            layout="samples_last",  # they are native, whatever a square shape may look like
            options=RunOptions(),
        )
        planes = self.runner.bound.planes
        self.capacity = planes.n
        self._state = intake.state
        self._columns = frozenset(name for name in planes.planes if step.args[name].per_sample)
        self._natives = {name: plane.native for name, plane in planes.planes.items()}
        self._filled = [(name, step.args[name].dtype.type(step.args[name].default or 0)) for name in intake.filled]

    @property
    def on_host(self) -> bool:
        """Whether copies are made by the thread that asks for them."""
        return self.runner.target == "host"

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of all planes of one sample."""
        return self.runner.bound.bytes_per_sample

    @abstractmethod
    def fill(self, requests: Sequence[Request], total: int) -> None:
        """Copy the planes of requests side by side, in the places that their ``start`` names, and mark the tail."""

    @abstractmethod
    async def follow(self, run: Any, work: Completion[Any], look: Callable[[Any], None] | None) -> None:
        """Wait for a piece of a run's work.

        Args:
            run: The run.
            work: What its ``next()`` gave.
            look: Called now and then, while the run goes on, with a host mask of the samples that nothing will touch
                any more; None when nobody would be answered early.

        Cancellation: the run is stopped and its end awaited, then it leaves.
        """

    @abstractmethod
    def mask(self, total: int) -> np.ndarray[Any, Any]:
        """The finished samples of an ended run, on the host."""

    @abstractmethod
    def report_so_far(self, run: Any) -> RunReport:
        """The report of a run that goes on; its samples are the caller's to count."""

    def copy(self, start: int, n: int, *, done: bool) -> Outputs:
        """Copies of the state of some samples, for results.

        Args:
            start: The first of them.
            n: How many.
            done: Whether all of them have finished.
        """
        arrays = {name: self._natives[name][..., start : start + n].copy() for name in self._state}
        return Outputs(arrays, None if done else self.runner.bound.mask[start : start + n].copy(), self._columns)

    def own(self) -> Outputs:
        """The frame's own arrays: the frame will not be used again."""
        return Outputs({name: self._natives[name] for name in self._state}, self.runner.bound.mask, self._columns)

    @abstractmethod
    def rest(self) -> None:
        """The batch has ended: let go of what belongs to its requests."""


def side_by_side(target: np.ndarray[Any, Any], name: str, default: Any, requests: Sequence[Request]) -> None:
    """Copy one plane of requests into a host array, each to its own place; the default where a request left it out."""
    parts = [r.arrays[name] for r in requests if name in r.arrays]
    if len(parts) == len(requests):
        np.concatenate(parts, axis=-1, out=target)
        return
    target[...] = default
    for request in requests:
        if name in request.arrays:
            target[..., request.start : request.start + request.n] = request.arrays[name]


class HostFrame(Frame):
    """A frame of NumPy arrays."""

    def __init__(self, intake: Intake, device: int | None, given: dict[str, Any], max_steps: int) -> None:
        super().__init__(intake, device, given, max_steps)
        loop = self.runner.bound
        assert isinstance(loop, HostLoop)
        self._loop = loop
        self._settled = np.zeros(self.capacity, np.bool_)
        # Where a lane of a full vector and one of the remainder may round differently, each request keeps the ranges
        # that it would have alone.
        self._piecewise = any(bound.host.vector_math for bound in loop.bound)

    def fill(self, requests: Sequence[Request], total: int) -> None:
        """Copy the planes in, one pass for each plane."""
        for name, default in self._filled:
            side_by_side(self._natives[name][..., :total], name, default, requests)
        loop = self._loop
        loop.mask[:total] = False
        loop.mask[total:] = True
        if loop.active is not None:
            loop.active.reset()
        loop.settled = self._settled if len(requests) > 1 else None
        self._settled[...] = False
        if self._piecewise:
            bytes_each, ops, cores = loop.bytes_per_sample, loop.ops, core_count()
            loop.pieces = [(r.start + at, n) for r in requests for at, n in cut(r.n, cores, bytes_each, ops)]

    async def follow(self, run: Any, work: Completion[Any], look: Callable[[Any], None] | None) -> None:
        """Look at the settled samples every 10 ms."""
        if look is None:
            await leave_when_done(work)
            return
        try:
            while True:
                with anyio.move_on_after(_LOOK_S):
                    await work
                    return
                look(self._settled)
        except GeneratorExit:
            work.stop()
            raise
        except BaseException:
            if not work.done():
                work.stop()
                await drained(work)
            raise

    def mask(self, total: int) -> np.ndarray[Any, Any]:
        """The mask itself."""
        mask: np.ndarray[Any, Any] = self._loop.mask[:total]
        return mask

    def report_so_far(self, run: HostRun) -> RunReport:
        """By the range that has taken most steps."""
        most = run.so_far()
        return RunReport(
            n=self.capacity,
            finished=0,
            done=False,
            launches=most.launches,
            steps=most.steps,
            compactions=self._loop.compactions,
            reorders=0,
            build_s=0.0,
            launches_by_k=dict(most.by_k),
        )

    def rest(self) -> None:
        """Nothing is held: the planes were copied when `fill` returned."""


class Frames:
    """The frames of one device or of the host, by capacity.

    Args:
        intake: The step and what its requests share.
        residency: Where they lie.
        max_steps: Steps a sample may take.
        max_samples: The largest capacity.
        upload: Whether requests lie on the host although these frames are a device's.
    """

    def __init__(
        self, intake: Intake, residency: Residency, max_steps: int, max_samples: int, *, upload: bool = False
    ) -> None:
        self._intake = intake
        self._residency = residency
        self._upload = upload
        self._max_steps = max_steps
        self._max_samples = max_samples
        self._at_rest: dict[int, list[Frame]] = {}
        self.merges = intake.merges

    def prepare(self) -> None:
        """Build and load the kernels of this side; blocking, once."""
        sides = [plan.side(self._residency) for plan in self._intake.step.plans]
        if self._residency.device is None and self._intake.step.active_set:
            # A compacted sample changes lanes whenever others finish, and rounds differently there.
            self.merges = self.merges and not any(side.vector_math for side in sides)

    def take(self, total: int) -> Frame | None:
        """A frame at rest that holds so many samples, or None: build one, then."""
        at_rest = self._at_rest.get(self._capacity(total))
        return at_rest.pop() if at_rest else None

    def give(self, frame: Frame) -> None:
        """Take a frame back whose batch has ended."""
        frame.rest()
        self._at_rest.setdefault(frame.capacity, []).append(frame)

    def build(self, total: int) -> Frame:
        """A new frame for at least so many samples; blocking."""
        capacity, xp = self._capacity(total), self._residency.xp
        with self._there():
            given = {
                name: xp.zeros((arg.width, capacity) if arg.shape else capacity, arg.dtype)
                for name, arg in self._intake.step.args.items()
                if arg.per_sample and arg.role != "terminated"
            }
            return self._frame(given)

    def build_alone(self, request: Request) -> Frame:
        """A frame of one request's own; blocking."""
        args = self._intake.step.args
        with self._there():
            if request.seed is not None:
                self._residency.xp.cuda.get_current_stream().wait_event(request.seed)
            if self._upload:
                return self._frame({name: self._residency.xp.array(a) for name, a in request.arrays.items()})
            return self._frame({n: a.copy() if args[n].written else a for n, a in request.arrays.items()})

    def _there(self) -> AbstractContextManager[object]:
        device = self._residency.device
        return nullcontext() if device is None else self._residency.xp.cuda.Device(device)

    def _frame(self, given: dict[str, Any]) -> Frame:
        device = self._residency.device
        if device is None:
            return HostFrame(self._intake, None, given, self._max_steps)
        if self._upload:
            from eagle.aio.batch_upload import UploadedFrame

            return UploadedFrame(self._intake, device, given, self._max_steps)
        from eagle.aio.batch_device import GatheredFrame

        return GatheredFrame(self._intake, device, given, self._max_steps)

    def _capacity(self, total: int) -> int:
        capacity = _SMALLEST
        while capacity < total:
            capacity *= _FACTOR
        return min(capacity, self._max_samples)
