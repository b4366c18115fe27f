"""Batcher: many small requests of one kernel, run as few launches and handed back one by one.

States of a Batcher::

    new --async with--> open --the block ends--> draining --everybody answered--> closed
                        open --the block raises--> closed, with what was pending cancelled
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
import anyio.lowlevel

from eagle.aio.batch_frame import Frames
from eagle.aio.batch_lane import Lane
from eagle.aio.batch_request import Intake, Request
from eagle.aio.batch_result import BatchResult, Outputs
from eagle.aio.offload import built_off_loop, on_the_callers_stream
from eagle.aio.report import RunReport
from eagle.aio.runner import check_max_steps, take_options
from eagle.aio.simulation import model_step
from eagle.aio.wake import Mailbox, mailbox
from eagle.errors import StateError
from eagle.kernels.build import is_hawk_kernel
from eagle.kernels.device import require_cupy
from eagle.kernels.layout import Layout, check_layout_word
from eagle.kernels.plan import Plan
from eagle.kernels.residency import Residency, residency_of
from eagle.kernels.step import MAX_MAPPED_SAMPLES

if TYPE_CHECKING:
    from types import TracebackType

    from anyio.abc import TaskGroup

    from eagle.aio.report import SimResult

# Objects of their own, so that a value that the caller gave is told from the default by identity: where a kernel has a
# parameter of that name, a given value is the kernel's, and a default is nobody's.
_MAX_SAMPLES = int("65536")
_MAX_WAIT = float("0.01")
_FOR_EVER_S = 1e9  # some thirty years: no clock of an event loop overflows with it


class Batcher:
    """Merges concurrent requests for one model into few runs, and hands each its own result.

    Use it as an async context manager, and await `simulate` in any number of tasks of the event loop that entered it::

        async with eagle.Batcher(kernel, max_steps=1000, dt=0.01) as batcher:
            result = await batcher.simulate(x=x, v=v)

    A request starts at once when nothing runs; requests made in one turn of the loop start together. While a batch
    runs, the next one fills; it starts beside the running one when the oldest request in it has waited ``max_wait``,
    when it is full, or when the running one has answered half of its samples. A request is answered as soon as its own
    samples have finished, within a slice (5 ms on a device, about 10 ms on the host) also when others of its batch go
    on. Every result has the bits that running alone would give; kernels for which that cannot be (shared accumulators,
    wide planes, a kernel without a mask) run each request alone, as does a request of more than ``max_samples``.

    NumPy planes run on the host, or with ``target="cuda"`` on the GPU, with one upload and one download for a whole
    batch; CuPy planes run on their GPU, with one launch that gathers a batch, and nothing passing through the host.
    Requests of different sides go to different batches.

    Leaving the block answers everything first. An exception in the block, or a cancellation, stops what runs: requests
    that still wait get a `StateError`. At most 16 batches are in flight; they take no token of a limiter. The batch
    arrays are kept until the block is left. In `eagle.aio.statistics()` a request is queued until its batch starts, and
    a batch is one run.

    Args:
        model: A hawk kernel, a plan of `deploy`, or a list of them: one step, in order.
        until: The kernel that finishes the samples, placed last.
        max_steps: Steps a sample may take; counts for each request.
        max_samples: Samples of a batch, at most.
        max_wait: Seconds that a request waits beside a running batch, at most; ``math.inf`` never starts a second one.
        scalar_type: "float64" (None) or "float32": the precision the kernels are built in.
        layout: "samples_first" or "samples_last", for planes whose shape reads both ways.
        target: Where planes run that lie on the host: "cuda" (the device that is current when the block is entered),
            or "host" (None), which gives the bits of `simulate`. Planes of a device run there.
        **shared: The kernels' numbers and lookup tables, shared by all requests.

    Raises:
        ValueError: An option is wrong; from entering the block also: the model or ``shared`` is wrong.
        BackendUnavailable: From entering the block: ``target="cuda"`` without a usable GPU.
        TypeError: An option or a number is of the wrong type.
    """

    def __init__(
        self,
        model: Any,
        *,
        until: Any = None,
        max_steps: int,
        max_samples: int = _MAX_SAMPLES,
        max_wait: float = _MAX_WAIT,
        scalar_type: str | None = None,
        layout: Layout | None = None,
        target: Literal["host", "cuda"] | None = None,
        **shared: Any,
    ) -> None:
        self._max_steps = check_max_steps(max_steps)
        self._layout = check_layout_word(layout)
        self._model = (model, until, scalar_type)
        self._given: dict[str, Any] = {"max_samples": max_samples, "max_wait": max_wait, "target": target}
        members = [*(model if isinstance(model, list | tuple) else [model]), until]
        if not _has_parameter(members, "max_samples"):
            _checked_max_samples(max_samples)
        if not _has_parameter(members, "max_wait"):
            _checked_max_wait(max_wait)
        if not _has_parameter(members, "target"):
            _checked_target(target)
        self._shared = shared
        self._max_samples, self._max_wait = _MAX_SAMPLES, _MAX_WAIT
        self._state = "new"
        self._token: object = None
        self._box: Mailbox | None = None
        self._group: TaskGroup | None = None
        self._intake: Intake | None = None
        self._lanes: dict[int | None, Lane] = {}
        self._upload: Residency | None = None  # where requests of the host are brought
        self._name = ""

    def __repr__(self) -> str:
        return f"<Batcher of {self._name or self._model[0]!r}, {self._state}>"

    # ---- the block -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Build the model off the loop, and open for requests.

        Cancellation leaves at once; a compilation that has begun goes on and fills the cache.
        """
        if self._state != "new":
            raise StateError(f"{self!r} was entered before; make a new Batcher for a new block")
        self._state = "entered"
        try:
            build = on_the_callers_stream(self._build)
            self._intake = await built_off_loop(build)
        except BaseException:
            self._state = "closed"
            raise
        self._name = self._intake.step.name
        self._token, self._box = anyio.lowlevel.current_token(), mailbox()
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._state = "open"
        return self

    def _build(self) -> Intake:
        step = model_step(*self._model)
        shared = dict(self._shared)
        defaults = {"max_samples": _MAX_SAMPLES, "max_wait": _MAX_WAIT, "target": None}
        given = {name: value for name, value in self._given.items() if value is not defaults[name]}
        options = {**defaults, **take_options(step, shared, given)}
        self._max_samples = _checked_max_samples(options["max_samples"])
        self._max_wait = _checked_max_wait(options["max_wait"])
        if _checked_target(options["target"]) == "cuda":
            cupy = require_cupy()
            self._upload = residency_of([("device", cupy.empty(1))])
        return Intake(step, shared, self._layout)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Answer everything that was asked; after an exception, stop it instead.

        Cancellation: what runs is stopped, and what waits gets a `StateError`.
        """
        group = self._group
        if group is None or self._state != "open":
            raise StateError(f"{self!r} is left without having been entered; use it with `async with`")
        self._state = "draining"
        if error is not None:
            group.cancel_scope.cancel()
        for lane in self._lanes.values():
            lane.close()
        try:
            # Not the block's error: the group would wrap it, and it has been told already.
            await group.__aexit__(None, None, None)
        finally:
            self._state = "closed"
            self._lanes.clear()
            self._intake = None

    # ---- requests ------------------------------------------------------------------------------------------------

    async def simulate(self, /, **planes: Any) -> SimResult:
        """Run the model on the planes of one request, together with others.

        Args:
            **planes: The kernels' per-sample planes by name, as in `eagle.simulate`. They are only read, so they may be
                read-only or share memory; they must not change meanwhile. Write-only ones may be left out.

        Returns:
            The `SimResult`: new arrays, made on first access, in the framework and shape of the request's. Its report
            is the batch's (as far as the batch had come, when others go on); n, finished, done, status and ``wall_s``
            are the request's own.

        Raises:
            ValueError: A name or plane is wrong, as in `eagle.simulate`; no other request is disturbed.
            TypeError: A plane is None.
            StateError: The Batcher is not open, or another event loop opened it.

        Cancellation leaves at once. The request is dropped from its batch, or its result discarded; a batch that nobody
        waits for is stopped.
        """
        box = mailbox()
        if self._state != "open" or box is not self._box:
            self._check_open()
        intake, lanes = self._intake, self._lanes
        assert intake is not None, "the Batcher is open"
        assert box is not None, "an event loop runs the caller"
        request = intake.request(planes)
        if request.n == 0 and intake.merges:
            await anyio.lowlevel.checkpoint()
            return _empty(intake, request)
        lane = lanes.get(request.residency.device) or self._opened(intake, request)
        parked = request.parked = box.park()
        lane.put(request)
        try:
            await parked.wait()
        except BaseException:
            lane.drop(request)
            raise
        if request.error is not None:
            request.raise_error()
        return BatchResult(request, intake.state)

    def _check_open(self) -> None:
        if self._state != "open":
            how = {
                "new": "not open yet: enter it with `async with`",
                "entered": "not open yet: await the entering of its block",
            }
            raise StateError(f"{self!r} is {how.get(self._state, 'closed; make a new one')}")
        if anyio.lowlevel.current_token() != self._token:
            raise StateError(
                f"{self!r} belongs to the event loop that entered it, and simulate() was called in another one; make a "
                "Batcher for each loop"
            )

    def _opened(self, intake: Intake, request: Request) -> Lane:
        """The lane of a side that is used for the first time, or that broke before."""
        group = self._group
        assert group is not None, "the Batcher is open"
        device = request.residency.device
        upload = device is None and self._upload is not None
        residency = self._upload if upload and self._upload is not None else request.residency
        frames = Frames(intake, residency, self._max_steps, self._max_samples, upload=upload)
        lane = Lane(self._name, frames, self._max_samples, self._max_wait, group.start_soon)
        self._lanes[device] = lane
        group.start_soon(partial(self._serve, lane, device))
        return lane

    async def _serve(self, lane: Lane, device: int | None) -> None:
        try:
            await lane.serve()
        finally:
            if lane.broken and self._lanes.get(device) is lane:
                del self._lanes[device]  # the next request tries again


def _has_parameter(members: list[Any], name: str) -> bool:
    """Whether one of these kernels has a parameter of that name, so that an option's value may be meant for it."""
    for member in members:
        if is_hawk_kernel(member) and name in member.planes:
            return True
        if isinstance(member, Plan) and any(arg.name == name for arg in member.sidecar.args):
            return True
    return False


def _checked_max_samples(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"max_samples={value!r}: expected an int, the samples of a batch at most")
    if not 1 <= value <= MAX_MAPPED_SAMPLES:
        raise ValueError(f"max_samples={value}: expected 1 to {MAX_MAPPED_SAMPLES:,}, the samples of a batch at most")
    return value


def _checked_max_wait(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"max_wait={value!r}: expected seconds, at least 0")
    if not value >= 0:
        raise ValueError(f"max_wait={value}: expected seconds, at least 0 (math.inf never starts a second batch)")
    return float(min(value, _FOR_EVER_S))


def _checked_target(value: object) -> str:
    if value is not None and not (isinstance(value, str) and value in ("host", "cuda")):
        raise ValueError(f"target={value!r}: expected 'cuda' or 'host' (None), where planes of the host run")
    return "host" if value is None else str(value)


def _empty(intake: Intake, request: Request) -> SimResult:
    """The result of a request without samples."""
    xp, args = request.residency.xp, intake.step.args
    arrays = {
        name: xp.empty((args[name].width, 0) if args[name].shape else 0, args[name].dtype) for name in intake.state
    }
    report = RunReport(
        n=0, finished=0, done=True, launches=0, steps=0, compactions=0, reorders=0, build_s=0.0, exact_steps=True
    )
    request.answer(Outputs(arrays, xp.empty(0, bool), frozenset(arrays)), 0, 0, report)
    return BatchResult(request, intake.state)
