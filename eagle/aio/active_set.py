"""Active sets: which samples of a batch are live, as an ascending map, so that kernels visit no others.

A kernel built with ``Guard(active_set=True)`` runs slots ``map[0] .. map[count - 1]`` only. A reordering set also moves
the planes it owns, so that live samples lie side by side: samples then live in *slots*, ``perm`` says which sample a
slot holds and ``inv`` where a sample went. The work itself is in `HostCompaction` and `DeviceCompaction`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle.aio.active_set_arguments import (
    check_array,
    check_cadence,
    check_counter,
    check_mask,
    check_movable,
    check_out,
    check_override,
    check_plane,
    check_step,
    theta_of,
)
from eagle.aio.compaction import DEFAULT_THETA, MIN_EVERY, MIN_REORDER_SPAN, THETA_RANGE, Compaction, Word
from eagle.aio.guards import RepeatWhile, SkipGuard, Skippable
from eagle.aio.owned_planes import Claim, claim
from eagle.errors import BackendUnavailable, NotBuilt
from eagle.kernels.device import is_cupy

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("DEFAULT_THETA", "MIN_EVERY", "MIN_REORDER_SPAN", "THETA_RANGE", "ActiveSet", "compaction_body")


class ActiveSet:
    """The live samples of a mask, as an ascending index map and a count.

    Made for one mask, held by reference and read where it is at every compaction. All arrays are allocated here and
    keep their addresses for the set's life, so that captured graphs and bound plans may hold them. A new set is the
    identity whatever the mask says: every sample live until the first `compact`. On a device all work is enqueued on
    CuPy's current stream; on the host it is done when the call returns.

    Args:
        mask: Shape (n,), bool or uint8, C-contiguous, NumPy or CuPy; nonzero = finished. A reordering set owns it.
        reorder: None or False: planes never move. True or a number in `THETA_RANGE` (True is `DEFAULT_THETA`): the
            set moves the planes given to `own`, once its live samples fill less than that share of the 32-slot
            groups that they touch. It pays on large, irregularly thinning batches, from about 1e5 samples.
        _lazy_scratch: Leave the device scratch to `prepare_compaction` (for runs that may never compact).
        _lazy_map: Leave the map to `materialize_map`; until then it has shape (0,).

    Attributes:
        mask: The mask itself.
        n: Samples, int.
        map: int32, shape (n,): ``map[:live]`` are the live slots, ascending; the rest is undefined.
        count: uint32, shape (1,): the live samples.
        theta: The locality threshold, float; None for a set that does not reorder, and so are those below.
        perm: int32, shape (n,): slot -> sample.
        inv: int32, shape (n,): sample -> slot.
        span: uint32, shape (1,): the slots in front that hold every live sample (n before the first reorder).
        fire: uint32, shape (1,): 1 when the last compaction asks for a reorder.
        live32: uint32, shape (1,): the 32-slot groups with a live sample in them.
        reorders: uint32, shape (1,): reorders since the last `reset`.

    Raises:
        TypeError: The mask is no NumPy or CuPy array, or `reorder` no number.
        ValueError: The mask has another dtype or shape, holds more than 2**31 - 1 samples, or belongs to another
            living reordering set; or `reorder` is outside its range.
        BackendUnavailable: A CuPy mask under stream capture.
    """

    def __init__(
        self,
        mask: Any,
        *,
        reorder: float | bool | None = None,
        _lazy_scratch: bool = False,
        _lazy_map: bool = False,
    ) -> None:
        theta = theta_of(reorder)
        check_mask(mask, moved=theta is not None)
        self.mask = mask
        self.n = int(mask.size)
        self.theta = theta
        self._arm = _arm_for(mask, theta, defer_map=_lazy_map, defer_scratch=_lazy_scratch)
        self._planes: list[Any] = []
        self._indirect: list[Any] = []
        self._baselines: list[Any] = []
        self._fixed = False
        self._map_deferred = bool(_lazy_map)
        self.map = self._arm.map
        self.count = self._cell(Word.COUNT)
        self.perm, self.inv = self._arm.perm, self._arm.inv
        moving = theta is not None
        self.span = self._cell(Word.SPAN) if moving else None
        self.fire = self._cell(Word.FIRE) if moving else None
        self.live32 = self._cell(Word.LIVE32) if moving else None
        self.reorders = self._cell(Word.REORDERS) if moving else None
        if moving:
            claim(self, [self._claim(mask, "the mask")])

    def __repr__(self) -> str:
        where = "host" if self._arm.device(self.mask) is None else f"cuda:{self._arm.device(self.mask)}"
        return f"<ActiveSet n={self.n} {where}{'' if self.theta is None else f' reorder={self.theta:g}'}>"

    def __call__(self) -> None:
        """Recompute the map and the count; the same as `compact`."""
        self.compact()

    @property
    def live(self) -> int:
        """The live samples as a Python int; a device set waits for the current stream."""
        return self._arm.read(Word.COUNT)

    @property
    def permuted(self) -> bool:
        """Whether a reorder ran since the last `restore` or `reset`; a device set waits for the current stream."""
        return self.theta is not None and bool(self._arm.read(Word.MOVED))

    def planes(self) -> dict[str, Any]:
        """The two reserved planes, ``active_map`` and ``active_count``, as keywords of a plan's ``bind``."""
        return {"active_map": self.map, "active_count": self.count}

    def compact(self) -> None:
        """Recompute the map and the count from the mask, and for a reordering set `live32` and `fire`.

        On a device: enqueued on the current stream, legal under capture once `prepare_compaction` has run.

        Raises:
            NotBuilt: The map is deferred; call `materialize_map` first.
            BackendUnavailable: Under capture, with nothing prepared.
        """
        self._require_map("compact()")
        self._arm.compact()

    def prepare_compaction(self) -> None:
        """Allocate the device scratch of compaction (and reorder), once; call it before a capture of either.

        `compact` and `reorder` do it themselves when they run outside a capture. Nothing to do on the host.
        """
        self._arm.prepare(self._planes)

    def materialize_map(self) -> bool:
        """Allocate a deferred map, the identity.

        Returns:
            True when it was deferred: `map` is another array now, point every bound plan at it. False otherwise.
        """
        if not self._map_deferred:
            return False
        self._arm.make_map()
        self.map = self._arm.map
        self._map_deferred = False
        return True

    def when_finished(self, finished: Any) -> Skippable:
        """A compaction that runs only when a counter moved since it last ran.

        Args:
            finished: uint32, shape (k,), where the mask lies; its first word is compared with the value at the last
                compaction of this step (0 at first and after `reset`), on the device under a graph.

        Returns:
            The guarded step.

        Raises:
            TypeError: `finished` is no array of the mask's module.
            ValueError: It has another dtype or shape, or lies on another device.
        """
        self._require_map("when_finished()")
        check_counter(self._arm, finished)
        self._arm.prepare(self._planes)
        arm, baseline = self._arm, self._arm.counter()
        self._baselines.append(baseline)

        def compact() -> None:
            arm.compact(finished, baseline)

        compact.__qualname__ = "ActiveSet.compact"  # what graphs show
        return Skippable(compact, SkipGuard(finished, 0, baseline, 0))

    def own(self, *planes: Any) -> ActiveSet:
        """Hand the set per-sample planes that move with the mask at every reorder.

        Args:
            *planes: Each of shape (n,) or (D, n), C-contiguous, of 1, 2, 4, 8 or 16 bytes an item, where the mask
                lies. The set holds them as long as it lives; a kernel bound to the set must have every plane that it
                reads or writes per sample either here or in `indirect`.

        Returns:
            This set.

        Raises:
            TypeError: One is no array of the mask's module; no plane was taken.
            ValueError: One has another shape, layout or item size, or overlaps what this set or another living one
                owns; or the set is fixed (it was bound, reordered, or gave its reorder step). No plane was taken.
        """
        self._require_reorder("own()")
        if self._fixed:
            raise ValueError(
                "own() comes too late: this set was bound, has reordered, or gave out its reorder step, which moves "
                "the planes known then; give it every plane first"
            )
        claims = []
        for index, plane in enumerate(planes):
            what = f"plane {index} of own()"
            check_plane(self._arm, plane, what)
            check_movable(self._arm, plane, what)
            claims.append(self._claim(plane, what))
        claim(self, claims)
        self._planes.extend(planes)
        return self

    def indirect(self, *planes: Any) -> ActiveSet:
        """Declare bound per-sample planes that stay in sample order (their kernel reads sample ``perm[slot]``).

        Args:
            *planes: Each of shape (n,) or (D, n), where the mask lies.

        Returns:
            This set.

        Raises:
            TypeError: One is no array of the mask's module.
            ValueError: One has another shape.
        """
        self._require_reorder("indirect()")
        for index, plane in enumerate(planes):
            check_plane(self._arm, plane, f"plane {index} of indirect()")
        self._indirect.extend(planes)
        return self

    def fix(self, **planes: Any) -> None:
        """Bind per-sample planes of a kernel to this set: from now on it takes no others.

        Whoever binds a plan to `planes()` of a reordering set calls this. A set that does not reorder has no rules.

        Args:
            **planes: The kernel's per-sample planes by name, the mask too.

        Raises:
            ValueError: One is neither owned nor declared indirect, so a reorder would tear it from the others.
        """
        if self.theta is None:
            return
        known = [self.mask, *self._planes, *self._indirect]
        for name, plane in planes.items():
            if not any(self._same(plane, other) for other in known):
                raise ValueError(
                    f"plane {name!r} is bound to a reordering set that does not know it; call own() with it, or "
                    "indirect() if its kernel reads it through perm"
                )
        self._fixed = True

    def reorder(self) -> None:
        """Reorder now, if the last compaction fired.

        The mask, the owned planes and `perm` move so that live samples come first, in sample order; then ``span ==
        count``, the map is the identity, `inv` follows `perm`, `fire` is 0 and `reorders` one more. On a device:
        enqueued on the current stream and decided there, legal under capture once `prepare_compaction` has run.

        Raises:
            ValueError: The set does not reorder.
            BackendUnavailable: Under capture, with nothing prepared.
        """
        self._require_reorder("reorder()")
        self._require_map("reorder()")
        self._arm.prepare(self._planes)
        self._fixed = True
        self._arm.reorder(self._planes)

    def reorder_if_degraded(self) -> Skippable:
        """`reorder` as a step guarded by `fire`: one IF node in a graph, an eager check elsewhere. Fixes the planes.

        Raises:
            ValueError: The set does not reorder.
        """
        self._require_reorder("reorder_if_degraded()")
        self._require_map("reorder_if_degraded()")
        self._arm.prepare(self._planes)
        self._fixed = True
        return Skippable(self.reorder, SkipGuard.nonzero(self.fire))

    def in_sample_order(self, plane: Any, *, out: Any = None) -> Any:
        """A copy of an owned plane in sample order, ``plane[..., inv]``; the plane itself stays as it is.

        Args:
            plane: The mask or a plane given to `own`.
            out: Where to write, like `plane`; None allocates. Under capture give an array that outlives the graph.

        Returns:
            `out`, or the new array. On a device: enqueued on the current stream.

        Raises:
            TypeError: `plane` is no array of the mask's module.
            ValueError: The set does not reorder or does not own `plane`, or `out` does not fit.
        """
        self._require_reorder("in_sample_order()")
        check_array(self._arm, plane, "the plane of in_sample_order()")
        if not any(self._same(plane, other) for other in (self.mask, *self._planes)):
            raise ValueError(
                "in_sample_order() got a plane that this set does not own and never moves; read it as it is"
            )
        if out is not None:
            check_out(self._arm, out, plane)
        return self._arm.in_sample_order(plane, out)

    def restore(self) -> None:
        """Put the mask and every owned plane back in sample order; a set that does not reorder has nothing to do.

        `perm` and `inv` are the identity again, ``span == n``, the map is recomputed; `reorders` keeps counting. On a
        device: enqueued on the current stream.

        Raises:
            BackendUnavailable: Under stream capture; the set is as it was.
        """
        if self.theta is None:
            return
        if self._arm.capturing():
            raise BackendUnavailable(
                "restore() is eager and the current stream is being captured; call it after the launch instead"
            )
        self._arm.restore(self._planes)
        if not self._map_deferred:
            self._arm.compact()

    def reset(self) -> None:
        """Back to the identity: every sample live, and for a reordering set ``span == n`` and no reorders counted.

        Planes and mask stay as they are: what a reorder moved is not moved back (see `restore`). To be called between
        launches, never recorded.
        """
        self._arm.reset(self._baselines)

    def _cell(self, word: Word) -> Any:
        return self._arm.words[word : word + 1]

    def _claim(self, array: Any, what: str) -> Claim:
        start = self._arm.address(array)
        return Claim(start, start + int(array.nbytes), what)

    def _same(self, one: Any, other: Any) -> bool:
        return one is other or (
            self._arm.is_array(one)
            and self._arm.address(one) == self._arm.address(other)
            and one.shape == other.shape
            and one.dtype == other.dtype
            and bool(one.flags.c_contiguous)
        )

    def _require_reorder(self, what: str) -> None:
        if self.theta is None:
            raise ValueError(f"{what} needs a reordering set; make it with ActiveSet(mask, reorder=True)")

    def _require_map(self, what: str) -> None:
        if self._map_deferred:
            raise NotBuilt(
                f"{what} needs the map, which is deferred; call materialize_map() and rebind the plans first"
            )


def compaction_body(
    step: Callable[[], Any],
    active: ActiveSet,
    *,
    every: int = 16,
    finished: Any = None,
    reorder: bool | None = None,
    steps_per_call: int = 1,
) -> tuple[Callable[[], Any], ...]:
    """The body of a `repeat_while` that steps, then compacts, and reorders where that pays.

    The loop's guard is looked at once per body, so a run may go up to ``every * steps_per_call - 1`` steps past the
    last sample's end; size ``max_iters`` as ``ceil(max_steps / (every * steps_per_call))``.

    Args:
        step: Called `every` times; a `Skippable` keeps its guard.
        active: The set to compact.
        every: Calls of `step` between compactions.
        finished: uint32, shape (1,): compact only when it moved (see `ActiveSet.when_finished`); None: always.
        reorder: None: reorder when the set does and holds at least `MIN_REORDER_SPAN` samples; True or False overrides.
        steps_per_call: The steps that one call of `step` advances (a fused kernel's K).

    Returns:
        The parts, in order: the steps, the compaction, and the reorder if there is one.

    Raises:
        TypeError: `step` is no plain callable, `active` no ActiveSet, or a number no int.
        ValueError: ``every * steps_per_call`` is below `MIN_EVERY`, `steps_per_call` below 1, or `reorder` is True for
            a set that does not reorder.
    """
    check_step(step)
    if not isinstance(active, ActiveSet):
        raise TypeError(f"active is a {type(active).__name__}, expected an eagle.ActiveSet")
    check_cadence(every, steps_per_call)
    check_override(reorder, active.theta)
    if reorder is None:
        reorder = active.theta is not None and active.n >= MIN_REORDER_SPAN
    compact = active.compact if finished is None else active.when_finished(finished)
    active.prepare_compaction()
    tail = (active.reorder_if_degraded(),) if reorder else ()
    return (*_repeated(step, every), compact, *tail)


def _repeated(step: Callable[[], Any], every: int) -> tuple[Callable[[], Any], ...]:
    if isinstance(step, (Skippable, RepeatWhile)):  # a graph must see each, to weave its node
        return (step,) * every

    def steps() -> None:
        for _ in range(every):
            step()

    steps.__qualname__ = getattr(step, "__qualname__", type(step).__qualname__)
    return (steps,)


def _arm_for(mask: Any, theta: float | None, *, defer_map: bool, defer_scratch: bool) -> Compaction:
    if is_cupy(mask):
        from eagle.aio.device_compaction import DeviceCompaction

        return DeviceCompaction(mask, theta, defer_map=defer_map, defer_scratch=defer_scratch)
    from eagle.aio.host_compaction import HostCompaction

    return HostCompaction(mask, theta, defer_map=defer_map)
