"""A plan: one kernel that runs where its data lives. Call it like the kernel, or bind it once and launch it often."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.kernels.binding import BoundPlan, own_words
from eagle.kernels.interop import let_frameworks_wait
from eagle.kernels.layout import marked, unmarked
from eagle.kernels.planes import Planes, bind_planes, callers_level, real_number
from eagle.kernels.residency import Residency, host_view, residency_of
from eagle.kernels.roles import RESERVED, Arg
from eagle.kernels.signature import Signature, bind_call, companions

if TYPE_CHECKING:
    from eagle.kernels.plugin import Plugin
    from eagle.kernels.sidecar import Sidecar


class Plan:
    """One built kernel, run where its data lives: NumPy arrays on the CPU, CuPy arrays on their GPU.

    Made by `deploy`. Arrays of other frameworks are taken over DLPack, and results come back in the caller's framework.

    Attributes:
        plugin: The built kernel behind it; `deploy` accepts it again.
    """

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self._signature: Signature | None = None

    def __repr__(self) -> str:
        return f"<Plan {self.name!r}>"

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.plugin.name

    @property
    def __name__(self) -> str:
        return self.plugin.name

    @property
    def sidecar(self) -> Sidecar:
        """The kernel's sidecar."""
        return self.plugin.sidecar

    @property
    def signature(self) -> Signature:
        """How the kernel is called."""
        return self.plugin.signature if self._signature is None else self._signature

    def by_name(self) -> Plan:
        """The same kernel, called by names only, as a prebuilt plan is in `simulate`."""
        plan = Plan(self.plugin)
        plan._signature = replace(self.signature, names=None, outputs=(), returns=None, parts={}, unused=())
        return plan

    def side(self, residency: Residency) -> Any:
        """The loaded kernel of the side that data of this residency needs."""
        return self.plugin.host() if residency.device is None else self.plugin.device(residency.device)

    def bind(self, **planes: Any) -> BoundPlan:
        """Bind every plane and number by name; nothing is converted or allocated, except the loop's own planes.

        Args:
            **planes: Each name of the kernel's ``arg_spec``. Planes have the kernel's dtype and are C-contiguous or a
                transposed view; they are held by reference. The mask and the loop's planes (``finished_count``,
                ``fused_steps``, ``active_map``, ``active_count``) may be left out: nobody finished, one step.

        Returns:
            The bound plan; ``launch()`` runs it once, in place, and may be a step of a `GraphPipeline`.

        Raises:
            ValueError: A name is missing or unknown, or a plane is wrong; nothing was written.
            TypeError: A number is no real number.
        """
        self._check_names(planes, allow_words=True)
        own = companions(self.sidecar.args)
        missing = [
            arg.name
            for arg in self.sidecar.args
            if arg.name not in planes
            and not arg.reserved
            and arg.role not in ("terminated", "nsamples")
            and arg.name not in own
        ]
        if missing:
            raise ValueError(
                f"{self.name!r} was not given {', '.join(map(repr, missing))}; bind every plane and number by name"
            )
        n = self.sidecar.samples_of(planes)
        residency = residency_of(planes.items())
        args = {arg.name for arg in self.sidecar.args if not arg.reserved}
        given = {name: value for name, value in planes.items() if name in args}
        bound = bind_planes(self.sidecar.args, given, xp=residency.xp, extents=self.signature.extents, n=n)
        self.sidecar.check_samples(bound.n)
        self.signature.check_promises(bound.planes)
        words = own_words(self.sidecar, bound.n, bound.xp, _masks(bound))
        words |= {
            name: self._word(name, planes[name], words[name]) for name in words if name in planes and name in RESERVED
        }
        return BoundPlan(self, bound, words, self.side(residency))

    @staticmethod
    def _word(name: str, value: Any, like: Any) -> Any:
        fits = isinstance(value, type(like)) and value.dtype == like.dtype and value.shape == like.shape
        if not fits or not value.flags.c_contiguous or not getattr(value.flags, "writeable", True):
            raise ValueError(
                f"{name!r} must be a contiguous, writable {like.dtype} array of shape {like.shape}; got a "
                f"{type(value).__name__} {getattr(value, 'dtype', '')} {getattr(value, 'shape', '')}"
            )
        return value

    def _check_names(self, given: Mapping[str, Any], *, allow_words: bool = False) -> None:
        known: set[str | None] = {arg.name for arg in self.sidecar.args if allow_words or not arg.reserved}
        known |= set(self.signature.names or ()) | set(self.signature.outputs) | {self.sidecar.open_axis}
        unknown = [name for name in given if name not in known]
        if unknown:
            takes = ", ".join(self.signature.names or sorted(filter(None, known)))
            raise ValueError(f"{self.name!r} has no argument {', '.join(map(repr, unknown))}; it takes {takes}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel once, called exactly like the kernel itself; blocking.

        Inputs may be lists, numbers, integer or strided arrays, or (with a warning) of another float precision: they
        are converted. What the kernel writes is given as an array of its dtype and written in place, or
        left out and made.

        Returns:
            What the kernel returns (a value, or a tuple, list or dict of them); for a kernel that only assigns, its one
            output or a dict of them by name. New arrays come in the caller's framework; numbers in, a NumPy scalar out.

        Raises:
            ValueError: An argument is missing, unknown, given twice, or of the wrong shape or dtype.
            TypeError: A parameter is no real number, or an array.
        """
        given = bind_call([self.signature], args, kwargs)
        self._check_names(given)
        for arg in self.sidecar.args:
            if arg.name not in given and self._needed(arg):
                raise ValueError(f"{self.name!r} is missing its argument {arg.name!r}")
        for name in self.signature.unused:
            if name not in given:
                raise ValueError(f"{self.name!r} is missing its argument {name!r}")
        n = self.sidecar.samples_of(given)
        residency = residency_of(given.items())
        xp = residency.xp
        values = {arg.name: self._converted(arg, given[arg.name], xp) for arg in self.sidecar.args if arg.name in given}
        self._separate(values, xp)
        bound = bind_planes(self.sidecar.args, values, xp=xp, extents=self.signature.extents, n=n)
        self.sidecar.check_samples(bound.n)
        self.signature.check_promises(bound.planes)
        words = own_words(self.sidecar, bound.n, bound.xp, _masks(bound))
        BoundPlan(self, bound, words, self.side(residency)).launch()
        bound.write_back()
        if residency.device is not None:  # frameworks with streams of their own must not read before the kernel ends
            let_frameworks_wait(
                (unmarked(given[name])[0], plane.native) for name, plane in bound.planes.items() if name in given
            )
        return self._results(bound, given, residency)

    def _needed(self, arg: Arg) -> bool:
        if arg.reserved or arg.role in ("terminated", "nsamples", "accum_out", "out"):
            return False
        return arg.prior

    @staticmethod
    def _converted(arg: Arg, value: Any, xp: Any) -> Any:
        """An input as an array of the kernel's dtype; what the kernel writes is left as it is."""
        bare, mark = unmarked(value)
        if arg.role == "uniform":
            if getattr(bare, "ndim", 0) or isinstance(bare, (list, tuple)):
                raise TypeError(f"parameter {arg.name!r} is one number; got an array or list, pass a number")
            return bare
        if arg.written or bare is None or real_number(bare):
            return value
        array = _readable(arg, bare, xp)
        if array is None:
            return value
        kind, wanted = array.dtype.kind, arg.dtype
        if kind in "iu" and wanted.kind in "iu" and array.dtype != wanted:
            limits = np.iinfo(wanted)  # type: ignore[type-var]
            if array.size and not limits.min <= int(array.min()) <= int(array.max()) <= limits.max:
                raise ValueError(f"{arg.name!r} holds values that do not fit the kernel's {wanted}; pass smaller ones")
            array = array.astype(wanted)
        elif kind in "iub" and wanted.kind == "f":
            array = array.astype(wanted)
        elif array.dtype == np.float32 and wanted == np.float64:
            warnings.warn(
                f"{arg.name!r} is float32 and is converted to the kernel's float64", stacklevel=callers_level()
            )
            array = array.astype(wanted)
        elif array.dtype == wanted:
            array = _in_order(array, xp)
        return marked(array, mark)

    def _separate(self, values: dict[str, Any], xp: Any) -> None:
        """Copy an input that shares memory with an output, so that ``kernel(x, out=x)`` reads what the caller gave."""
        if xp is not np:
            return
        outputs = [unmarked(values[a.name])[0] for a in self.sidecar.args if a.written and a.name in values]
        written = [array for array in map(host_view, outputs) if array is not None]
        for arg in self.sidecar.args:
            value, mark = unmarked(values.get(arg.name))
            if arg.written or not isinstance(value, np.ndarray):
                continue
            if any(np.may_share_memory(value, array) for array in written):
                values[arg.name] = marked(value.copy(order="K"), mark)

    def _results(self, bound: Planes, given: Mapping[str, Any], residency: Residency) -> Any:
        hidden = companions(self.sidecar.args)

        def result(name: str) -> Any:
            if name in self.signature.parts:
                return residency.hand_back(bound.xp.stack([bound.planes[p].given for p in self.signature.parts[name]]))
            plane = bound.planes[name]
            if name in given and not real_number(unmarked(given[name])[0]):
                return plane.given
            if bound.single and not plane.arg.shape and residency.origin.name == "numpy":
                return plane.given[()]
            return residency.hand_back(plane.given)

        def shaped(returns: Any) -> Any:
            if isinstance(returns, str):
                return result(returns)
            if isinstance(returns, Mapping):
                return {key: shaped(part) for key, part in returns.items()}
            return type(returns)(shaped(part) for part in returns)

        if self.signature.returns is not None:
            return shaped(self.signature.returns)
        names = [
            arg.name
            for arg in self.sidecar.args
            if arg.written and arg.role != "terminated" and arg.name in bound.planes and arg.name not in hidden
        ]
        ordered = [n for n in (self.signature.names or names) if n in names] or names
        if len(ordered) == 1:
            return result(ordered[0])
        return {name: result(name) for name in ordered}


def _readable(arg: Arg, value: Any, xp: Any) -> Any:
    """What the kernel only reads, as an array of ``xp`` where that costs no copy of a tensor; None for a stranger."""
    if isinstance(value, (list, tuple)):
        try:
            return xp.asarray(np.asarray(value))
        except ValueError as error:
            raise ValueError(f"{arg.name!r} is no rectangular list of numbers ({error})") from error
    if isinstance(value, xp.ndarray):
        return None if isinstance(value, np.ma.MaskedArray) else value
    return host_view(value) if xp is np else None


def _in_order(array: Any, xp: Any) -> Any:
    """``array``, or a copy where its elements lie where a kernel cannot read them."""
    if xp is np and not array.flags.aligned:
        return array.copy()
    if array.flags.c_contiguous or (array.ndim == 2 and array.T.flags.c_contiguous):
        return array
    return xp.ascontiguousarray(array)


def _masks(bound: Planes) -> dict[str, Any]:
    return {name: plane.native for name, plane in bound.planes.items() if plane.arg.role == "terminated"}
