"""What a request of a Batcher gets back: its own part of a batch's state, as new arrays made on first access."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from eagle.aio.report import RunReport, SimResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from types import ModuleType

    from eagle.aio.batch_request import Request


class Outputs:
    """State planes of some requests, copied out of a batch that has ended or will not touch them any more.

    Args:
        arrays: Native arrays by name: (n,), (w, n), or a plane without a sample axis of a request that ran alone.
        mask: The finished samples, (n,) bool; None when all have finished.
        per_sample: Names of the planes with a sample axis.
        place: Gives a block in which their device is current, and its current stream waits for them.
    """

    __slots__ = ("_arrays", "_mask", "_per_sample", "place")

    def __init__(
        self,
        arrays: Mapping[str, Any],
        mask: Any,
        per_sample: frozenset[str],
        place: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._arrays = arrays
        self._mask = mask
        self._per_sample = per_sample
        self.place = place

    def plane(self, name: str, offset: int, n: int) -> Any:
        """One request's plane, native."""
        array = self._arrays[name]
        return array if name not in self._per_sample else _part(array, offset, n)

    def finished(self, offset: int, n: int, xp: ModuleType) -> Any:
        """One request's mask, as an array of ``xp``."""
        return xp.ones(n, bool) if self._mask is None else _part(self._mask, offset, n)


def _part(array: Any, offset: int, n: int) -> Any:
    """A contiguous part along the samples.

    On the host a copy, so that a small result does not keep a whole batch alive; on a device, where a copy costs a
    launch, a view while that is contiguous.
    """
    on_host = type(array).__module__ == "numpy"
    if array.shape[-1] == n and (array.base is None or not on_host):  # a view may be of page-locked memory
        return array
    part = array[..., offset : offset + n]
    return part if part.flags.c_contiguous and not on_host else part.copy()


class BatchResult(SimResult):
    """A request's `SimResult`: `n`, `finished`, `done`, `status` and the state are its own, `report` is its batch's.

    Arrays are new and made on first access, in the request's framework and shape. ``wall_s`` is the request's own wait.

    Args:
        request: The answered request.
        names: Its state planes.
    """

    def __init__(self, request: Request, names: tuple[str, ...]) -> None:
        assert request.report is not None
        self.report: RunReport = request.report
        self.wall_s = request.ended - request.began
        self.allocated = request.omitted
        self._request: Request | None = request
        self._names = names
        self._n = request.n
        self._done = request.finished == request.n
        self._made: dict[str, Any] = {}
        self._mask: Any = None

    @property
    def done(self) -> bool:
        """Whether every sample of the request finished."""
        return self._done

    @property
    def status(self) -> str:
        """The word "finished", or "max_steps" when the cap ended the request."""
        return "finished" if self._done else "max_steps"

    @property
    def n(self) -> int:
        """Samples of the request."""
        return self._n

    @property
    def state(self) -> dict[str, Any]:  # type: ignore[override]
        """Each state plane by name, in signature order."""
        return {name: self._plane(name) for name in self._names}

    @property
    def finished(self) -> Any:
        """The mask, one bool per sample."""
        if self._mask is None:
            request, outputs = self._source()
            with outputs.place():
                mask = outputs.finished(request.offset, request.n, request.residency.xp)
                self._mask = request.residency.hand_back(mask.reshape(()) if request.single else mask)
            self._let_go()
        return self._mask

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_names", ()):
            return self._plane(name)
        planes = ", ".join(self.__dict__.get("_names", ()))
        raise AttributeError(f"this result has no state plane or field {name!r}; its planes are {planes}")

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(f"no state plane {name!r}; the planes are {', '.join(self._names)}")
        return self._plane(name)

    def __repr__(self) -> str:
        names = ", ".join(self._names)
        return (
            f"<SimResult {self.status}, n={self.n} in a batch of {self.report.n}, steps={self.steps}, state: {names}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        _ = self.state, self.finished  # a copy or a pickle holds arrays, not the batch
        return self.__dict__

    def _plane(self, name: str) -> Any:
        array = self._made.get(name)
        if array is None:
            request, outputs = self._source()
            shape, first = request.shapes.get(name) or (None, False)
            with outputs.place():
                array = outputs.plane(name, request.offset, request.n)
                if first:
                    array = array.T.copy()
                array = request.residency.hand_back(array if shape is None else array.reshape(shape))
            self._made[name] = array
            self._let_go()
        return array

    def _source(self) -> tuple[Request, Outputs]:
        request = self._request
        assert request is not None, "arrays are made before the batch is let go"
        outputs = request.outputs
        assert outputs is not None, "the request was answered"
        return request, outputs

    def _let_go(self) -> None:
        """Drop the batch once everything of it was made."""
        if self._mask is not None and len(self._made) == len(self._names):
            self._request = None
