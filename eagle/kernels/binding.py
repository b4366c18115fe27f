"""A kernel bound to its planes: by-value arguments packed once, launched many times."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.errors import BackendUnavailable, StateError
from eagle.kernels.abi import make_gref, make_handle
from eagle.kernels.host import HostKernel, ParamBlock
from eagle.kernels.roles import ACTIVE_COUNT, ACTIVE_MAP, FINISHED_COUNT, FUSED_STEPS
from eagle.kernels.team import Job, core_count, team

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eagle.kernels.device_kernel import DeviceKernel
    from eagle.kernels.planes import Planes
    from eagle.kernels.sidecar import Sidecar

# Below this many samples one thread is done before a second one has woken up.
TEAM_MIN_SAMPLES = 65_536


def own_words(sidecar: Sidecar, n: int, xp: Any, shared: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The loop's own planes of a kernel, as one launch outside any loop needs them.

    The counter starts at 0, a launch takes one step, the active set is everybody, no sample has finished.

    Args:
        sidecar: The kernel.
        n: Samples.
        xp: NumPy or CuPy.
        shared: Planes that are there already, by name; they are taken as they are.
    """
    makers = {
        FINISHED_COUNT: lambda: xp.zeros(1, np.uint32),
        FUSED_STEPS: lambda: xp.ones(1, np.int64),
        ACTIVE_MAP: lambda: xp.arange(n, dtype=np.int32),
        ACTIVE_COUNT: lambda: xp.full(1, n, np.uint32),
    }
    shared = shared or {}
    words: dict[str, Any] = {}
    for arg in sidecar.args:
        if arg.name in shared:
            words[arg.name] = shared[arg.name]
        elif arg.reserved:
            words[arg.name] = makers[arg.name]()
        elif arg.role == "terminated":
            words[arg.name] = xp.zeros(n, np.bool_)
    return words


def struct_values(sidecar: Sidecar, planes: Planes, words: Mapping[str, Any]) -> list[Any]:
    """The kernel's arguments by value, in the order of its entry's parameters.

    Args:
        sidecar: The kernel.
        planes: Its bound planes; their arrays must outlive every launch.
        words: The loop's planes by name (counters, active set, mask); they win over ``planes``.
    """
    n = planes.n
    values: list[Any] = []
    for arg in sidecar.args:
        if arg.role == "uniform":
            values.append(planes.numbers[arg.name])
            continue
        if arg.role == "nsamples":
            values.append(np.int64(n))
            continue
        array = words[arg.name] if arg.name in words else planes.planes[arg.name].native
        if arg.struct == "gref":
            values.append(make_gref(array, n))
        else:
            values.append(make_handle(array, n if arg.per_sample else int(array.size)))
    return values


class BoundPlan:
    """A plan bound to its planes. `launch` runs the kernel once over all samples; everything is packed beforehand.

    Attributes:
        plan: The plan it came from.
        planes: The bound planes.
        n: Samples.
        words: The loop's planes by name, where the kernel has them.
        sidecar: The sidecar of the side it runs on.
    """

    def __init__(self, plan: Any, planes: Planes, words: Mapping[str, Any], side: HostKernel | DeviceKernel) -> None:
        self.plan = plan
        self.planes = planes
        self.n = planes.n
        self.words = dict(words)
        self.sidecar: Sidecar = plan.sidecar
        self.side = side
        # A device launch is packed now, since it may be captured; a host run makes argument arrays of its own.
        self._launch = None if isinstance(side, HostKernel) else self._prepare()

    def __repr__(self) -> str:
        return f"<BoundPlan {self.sidecar.name!r}, n={self.n}>"

    def block(self, planes: Planes | None = None, **words: Any) -> ParamBlock:
        """The host entry's argument array, with planes or some of the loop's words replaced (one set per thread)."""
        return ParamBlock(struct_values(self.sidecar, planes or self.planes, {**self.words, **words}))

    @property
    def host(self) -> HostKernel:
        """The host entries.

        Raises:
            BackendUnavailable: The plan is bound to device planes.
        """
        if not isinstance(self.side, HostKernel):
            raise BackendUnavailable(f"{self.sidecar.name!r} is bound to device planes; it has no host entry here")
        return self.side

    def launch(self) -> None:
        """Run the kernel once over all samples, in place.

        On the host it blocks until done; on a device it is issued on CuPy's current stream and may be captured.
        """
        if self._launch is None:
            self._launch = self._prepare()
        self._launch()

    __call__ = launch

    def _prepare(self) -> Any:
        if not isinstance(self.side, HostKernel):
            values, keep = struct_values(self.sidecar, self.planes, self.words), (self.planes, self.words)
            return self.side.packed(values, self.n, keep=keep).launch  # keeping self would be a cycle over big arrays
        entry, block, n = self.side.entry, self.block(), self.n
        width = core_count()
        # Cross-sample kernels add into shared memory: one thread keeps their order, and so their bits.
        if n < TEAM_MIN_SAMPLES or width < 2 or self.sidecar.access != "sample_local":

            def alone() -> None:
                entry(block.address, 0, n, n)

            return alone

        def together() -> None:
            _OneLaunch(entry, block, n, width).run()

        return together


class _OneLaunch(Job[tuple[int, int]]):
    """One launch cut into a range per thread."""

    def __init__(self, entry: Any, block: ParamBlock, n: int, width: int) -> None:
        super().__init__(width)
        size = -(-n // width)
        self._parts: list[tuple[int, int]] = [(base, min(size, n - base)) for base in range(0, n, size)]
        self._entry, self._block, self._n = entry, block, n
        self._done = threading.Event()
        self._failed: BaseException | None = None

    def advance(self, piece: tuple[int, int]) -> bool:
        self._entry(self._block.address, *piece, self._n)
        return True

    def turn(self) -> Iterable[tuple[int, int]]:
        parts, self._parts = self._parts, []
        return parts

    def end(self, error: BaseException | None) -> None:
        if error is None and self.stopping:
            error = StateError("the interpreter is exiting: this launch did not run over all samples; call it earlier")
        self._failed = error
        self._done.set()

    def run(self) -> None:
        """Launch and wait. Whatever interrupts, it leaves when no thread touches the planes any more."""
        try:
            team().submit(self)
            self._done.wait()
        except BaseException:
            self.stop()
            while not self._done.is_set():
                with contextlib.suppress(BaseException):  # a second Ctrl-C; the first one leaves
                    self._done.wait()
            raise
        if self._failed is not None:
            raise self._failed
