"""Requests of a Batcher: checked as `simulate` checks its planes, and read into the arrays that a batch copies from.

Nothing here writes into what the caller gave. A request that looks like the last one of its framework (same names,
dtypes and layout) passes a few cheap checks instead of a whole binding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from eagle.aio.simulation import names_in_order
from eagle.kernels.interop import detect
from eagle.kernels.layout import Layout, unmarked
from eagle.kernels.planes import Plane, Planes, bind_number, shared_array
from eagle.kernels.residency import Residency, residency_of
from eagle.kernels.step import Step, bind_step, check_names

if TYPE_CHECKING:
    from eagle.aio.batch_result import Outputs
    from eagle.aio.report import RunReport
    from eagle.aio.wake import ParkedTask
    from eagle.kernels.roles import Arg

# Roles whose planes have a column for each sample and for nobody else: what samples of many requests may share.
_BATCHED_ROLES = frozenset(
    {"uniform", "lookup", "nsamples", "out", "vec_in", "mat_in", "mutable", "per_sample", "terminated"}
)
_READABLE = 0x101  # NumPy's flag bits "C-contiguous" and "aligned"


class Request:
    """One call of `Batcher.simulate`.

    Attributes:
        n: Samples.
        arrays: The planes it gave, component-major (native) arrays by name; let go when the batch has ended.
        residency: Where they lie, and the framework that results go back to.
        shapes: Shape of each result plane that differs from the native one, and whether samples come first.
        omitted: Names of state planes that it left out.
        single: Whether it is one sample without a sample axis.
        began: When it was made, by ``time.perf_counter()``.
        seed: A CUDA event behind the work that made its planes, or None.
        addresses: Device addresses of its planes in the order of `Intake.filled`, 0 for one that it left out.
        parked: The task that waits for it.
        batch: The batch it is in; None while it waits for one.
        start: Its first sample in the batch.
        answered: Whether it needs nothing of its batch any more: answered, failed, or nobody waits.
        error: What it failed with.
        outputs: Arrays that hold its state, once answered.
        offset: Its first sample in them.
        finished: Samples that finished.
        report: The batch's report.
        ended: When it was answered.
    """

    # What most requests never set stands here: making one is a large part of what a request costs.
    seed: Any = None
    addresses: Sequence[int] = ()
    parked: ParkedTask | None = None
    batch: Any = None
    start = 0
    answered = False
    error: BaseException | None = None
    outputs: Outputs | None = None
    offset = 0
    finished = 0
    report: RunReport | None = None
    ended = 0.0

    def __init__(
        self,
        n: int,
        arrays: Mapping[str, Any],
        residency: Residency,
        shapes: Mapping[str, tuple[tuple[int, ...], bool]],
        omitted: tuple[str, ...],
        single: bool,
    ) -> None:
        self.began = perf_counter()
        self.n = n
        self.arrays: Mapping[str, Any] = arrays
        self.residency = residency
        self.shapes = shapes
        self.omitted = omitted
        self.single = single

    def answer(self, outputs: Outputs, offset: int, finished: int, report: RunReport) -> None:
        """Give the state at ``offset`` of ``outputs``, and wake who waits."""
        self.outputs, self.offset, self.finished, self.report = outputs, offset, finished, report
        self._end()

    def fail(self, error: BaseException) -> None:
        """Give an error instead."""
        self.error, self._traceback = error, error.__traceback__
        self._end()

    def raise_error(self) -> NoReturn:
        """Raise what it failed with; each request of a batch starts from the error's own traceback."""
        error = self.error
        assert error is not None, "the request failed"
        try:
            raise error.with_traceback(self._traceback)
        finally:
            del error, self  # or the error would hold this frame, which holds the error

    def let_go(self) -> None:
        """Drop the planes that it gave."""
        self.arrays = _NOTHING

    def _end(self) -> None:
        self.answered = True
        self.ended = perf_counter()
        self.arrays = _NOTHING
        parked, self.parked, self.batch = self.parked, None, None  # or one result would keep all of its batch alive
        if parked is not None:
            parked.wake()


_NOTHING: Mapping[str, Any] = {}


class Form:
    """What a request of plain native arrays looked like, so that the next one of its kind is quickly recognised.

    Args:
        kind: NumPy's or CuPy's array class.
        residency: Where the arrays lie.
        args: The arguments it gave, all of them per-sample planes.
        omitted: The state planes it left out.
        filled: Names of all planes that a batch copies, in the order of its table.
    """

    __slots__ = ("_cuda", "_kind", "_places", "_specs", "_table", "omitted", "residency")

    def __init__(
        self, kind: type, residency: Residency, args: list[Arg], omitted: tuple[str, ...], filled: tuple[str, ...]
    ) -> None:
        self._kind = kind
        ordered = sorted(args, key=lambda arg: bool(arg.shape))  # those of one number a sample first: they say n
        self._specs = tuple((arg.name, arg.dtype, arg.width if arg.shape else 0) for arg in ordered)
        self._places = tuple(filled.index(arg.name) for arg in ordered)
        self._table = [0] * len(filled)
        self._cuda = None if residency.device is None else residency.xp.cuda
        self.residency = residency
        self.omitted = omitted

    def request(self, planes: Mapping[str, Any]) -> Request | None:
        """The request of planes that look the same; None for any others, which are then checked in full."""
        if len(planes) != len(self._specs):
            return None
        addresses: list[int] = [] if self._cuda is None else self._table.copy()
        n = self._samples(planes, addresses)
        if not n:
            return None
        request = Request(n, planes, self.residency, _NOTHING, self.omitted, False)
        if self._cuda is not None:
            request.addresses = addresses
            request.seed = _behind_the_caller(self._cuda)
        return request

    def _samples(self, planes: Mapping[str, Any], addresses: list[int]) -> int:
        """Samples of planes that look the same, else 0; on a device their addresses are noted."""
        kind: Any = self._kind
        device = self.residency.device
        plain: tuple[int, ...] = ()
        for (name, dtype, width), place in zip(self._specs, self._places, strict=True):
            array: Any = planes.get(name)
            if type(array) is not kind or array.dtype is not dtype:
                return 0
            if device is None:
                if array.flags.num & _READABLE != _READABLE:
                    return 0
            else:
                data = array.data
                if not array.flags.c_contiguous or data.device_id != device:
                    return 0
                addresses[place] = data.ptr
            shape = array.shape
            if not plain:
                plain = shape[-1:]
            if shape == plain and shape and not width:
                continue
            if not _fits(shape, width, plain):
                return 0
        return plain[0] if plain else 0


def _fits(shape: tuple[int, ...], width: int, plain: tuple[int, ...]) -> bool:
    """Whether a plane of so many components has a native shape for ``plain`` samples."""
    if not width or not plain:
        return False
    # as many samples as components read both ways
    return len(shape) == 2 and shape[0] == width and shape[1:] == plain and plain[0] != width


class Intake:
    """Takes requests of one step.

    Args:
        step: The step.
        shared: Numbers and lookup tables that all requests share, by name.
        layout: Which axis holds the samples where a shape reads both ways.

    Raises:
        ValueError: A name of ``shared`` is unknown, holds one value per sample, is missing, or a table is wrong.
        TypeError: A number is no real number.

    Attributes:
        state: Names of the planes that results hold, in the order of the kernels' signatures.
        filled: Names of the planes that a batch copies for each request, whether given or not.
        merges: Whether samples of many requests may run as one batch with the same bits: every kernel has a mask and
            touches its own sample only, whatever number that has.
    """

    def __init__(self, step: Step, shared: Mapping[str, Any], layout: Layout | None) -> None:
        self.step = step
        self._layout = layout
        self._shared = dict(shared)
        self._check_shared()
        self._moved: dict[int | None, dict[str, Any]] = {}
        self._forms: dict[type, Form] = {}
        order = {name: index for index, name in enumerate(names_in_order(step))}
        hidden = step.hidden
        written = [a.name for a in step.args.values() if a.written and a.name != step.mask and a.name not in hidden]
        self.state = tuple(sorted(written, key=lambda name: order.get(name, len(order))))
        self.filled = tuple(arg.name for arg in step.args.values() if arg.per_sample and arg.role != "terminated")
        roles = {arg.role for arg in step.args.values()}
        self.merges = step.guarded and step.local and step.placed is False and roles <= _BATCHED_ROLES

    def _check_shared(self) -> None:
        step, shared = self.step, self._shared
        check_names(step, shared, mask=False)
        extents = {name: extent for plan in step.plans for name, extent in plan.signature.extents.items()}
        for name, value in shared.items():
            arg = step.args.get(name)
            if arg is None:
                continue  # a parameter that nothing reads
            if arg.role == "uniform":
                bind_number(arg, value)
            elif arg.role == "lookup":
                shared_array(arg, value, residency_of([(name, value)]).xp, extents.get(name))
            else:
                raise ValueError(
                    f"{name!r} holds a value for every sample, so each request brings its own: give it to "
                    "simulate(...), and to Batcher(...) only numbers and tables that all requests share"
                )
        missing = [
            name
            for name, arg in step.args.items()
            if arg.role in ("uniform", "lookup") and not arg.reserved and name not in shared
        ]
        if missing:
            raise ValueError(
                f"missing {', '.join(map(repr, missing))}: give Batcher(...) the numbers and tables of {step.name} by "
                "name; all requests share them"
            )

    def shared_on(self, device: int | None) -> Mapping[str, Any]:
        """The shared values with tables where the planes lie; moved once for each device."""
        moved = self._moved.get(device)
        if moved is None:
            moved = self._moved[device] = {name: _moved(value, device) for name, value in self._shared.items()}
        return moved

    def request(self, planes: dict[str, Any]) -> Request:
        """A request for planes given by name.

        Raises:
            ValueError: A name or plane is wrong; see `simulate`.
            TypeError: A plane is None.
            BackendUnavailable: A plane lies on a device that cannot be used.
        """
        form = self._forms.get(type(next(iter(planes.values()), None)))
        request = None if form is None else form.request(planes)
        return self._checked(planes) if request is None else request

    def _checked(self, planes: Mapping[str, Any]) -> Request:
        twice = [name for name in planes if name in self._shared]
        if twice:
            raise ValueError(
                f"{', '.join(map(repr, twice))} was given to Batcher(...) already, for all requests; leave it out"
            )
        step = self.step
        check_names(step, planes, mask=False)
        residency = residency_of((name, value) for name, value in planes.items() if name in step.args)
        given = {**self.shared_on(residency.device), **planes}
        bound, _ = bind_step(step, given, layout=self._layout, allocate=True, read_only=True)
        arrays = {name: bound.planes[name].native for name in planes if name in bound.planes}
        if residency.device is not None:
            arrays = {name: bound.xp.asarray(array) for name, array in arrays.items()}  # numbers came as NumPy's
        shapes = {name: shape for name in self.state if (shape := self._shape(bound, planes, name)) is not None}
        omitted = tuple(name for name in self.state if name not in planes)
        kinds = {type(value) for value in planes.values()}
        if not shapes and not bound.single and len(arrays) == len(planes) and kinds == {bound.xp.ndarray}:
            args = [step.args[name] for name in planes]
            if all(arg.per_sample and bound.planes[arg.name].native.shape == planes[arg.name].shape for arg in args):
                kind = bound.xp.ndarray
                self._forms[kind] = Form(kind, residency, args, omitted, self.filled)
        request = Request(bound.n, arrays, residency, shapes, omitted, bound.single)
        if residency.device is not None:
            request.addresses = [arrays[name].data.ptr if name in arrays else 0 for name in self.filled]
            request.seed = _behind_the_caller(bound.xp.cuda)
        return request

    def _shape(self, bound: Planes, planes: Mapping[str, Any], name: str) -> tuple[tuple[int, ...], bool] | None:
        """The shape of a result plane where it is not the native one, and whether its samples come first."""
        plane: Plane = bound.planes[name]
        shape, native = tuple(plane.given.shape), tuple(plane.native.shape)
        first = plane.source is not None or (len(shape) == 2 and shape != native and not bound.single)
        if not first and len(shape) == 2 and shape[0] == shape[1] == bound.n > 1:
            first = (unmarked(planes.get(name))[1] or self._layout) == "samples_first"
        return (shape, first) if first or shape != native else None


def _behind_the_caller(cuda: Any) -> Any:
    """An event behind what the caller's current stream holds; None for the legacy stream, which batches wait for."""
    stream = cuda.get_current_stream()
    if stream.ptr == 0:
        return None
    event = cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def _moved(value: Any, device: int | None) -> Any:
    bare = unmarked(value)[0]
    adapter = detect(bare)
    if adapter is None or isinstance(bare, np.generic) or not getattr(bare, "ndim", 0):
        return value
    if device is None:
        return adapter.to_numpy(bare)
    from eagle.kernels.device import require_cupy

    with require_cupy().cuda.Device(device):
        return adapter.to_cupy(bare)
