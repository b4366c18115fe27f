"""One step of a model: the plans that run in order over one namespace of planes, and the rules they must share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from eagle.kernels.planes import Planes, bind_planes
from eagle.kernels.residency import Residency, residency_of
from eagle.kernels.roles import RESERVED, Arg
from eagle.kernels.signature import companions

if TYPE_CHECKING:
    from eagle.kernels.layout import Layout
    from eagle.kernels.plan import Plan

MAX_SAMPLES = 2**32 - 1  # finished_count is a uint32
MAX_MAPPED_SAMPLES = 2**31 - 1  # active_map is int32


@dataclass(frozen=True, slots=True)
class Step:
    """The plans of one step, checked.

    Attributes:
        plans: In launch order.
        args: Every argument by name; the first plan that has it declares it, and a writer wins over a reader.
        steps: Steps of one launch: K, or "auto" for one automatic kernel.
        steps_max: Largest step count of one launch under the band policy.
        active_set: Whether the kernels walk an active-set map.
        guarded: Whether every kernel has a mask, so that finished samples are left alone.
        local: Whether every kernel touches its own sample only, so that ranges are independent.
        mask: Name of the mask.
        placed: Whether a sample's result depends on its number in the batch, so that none may change places; None when
            nobody can know.
    """

    plans: tuple[Plan, ...]
    args: Mapping[str, Arg]
    steps: int | Literal["auto"]
    steps_max: int
    active_set: bool
    guarded: bool
    local: bool
    mask: str
    placed: bool | None

    @property
    def name(self) -> str:
        """The kernels' names."""
        return " + ".join(plan.name for plan in self.plans)

    @property
    def hidden(self) -> frozenset[str]:
        """Compensation terms, which callers never see."""
        return companions(list(self.args.values()))


def step_of(plans: Sequence[Plan]) -> Step:
    """Check that plans form one step.

    Raises:
        ValueError: No plan, no finishing plan, plans that mix active-set guards, a plan of several steps a launch among
            others, or one name that is two kinds of plane.
    """
    if not plans:
        raise ValueError("a model needs at least one kernel or plan; got an empty list")
    sidecars = [plan.sidecar for plan in plans]
    names = ", ".join(plan.name for plan in plans)
    finishing = [s for s in sidecars if s.finish is not None]
    if not finishing:
        raise ValueError(
            f"{names} never finishes a sample: no kernel assigns its Terminated parameter, so the run would not end; "
            "add one that does (until=...)"
        )
    masked = [s for s in sidecars if any(arg.role == "terminated" for arg in s.args)]
    guards = {s.active_set for s in masked}
    if len(guards) > 1:
        listed = ", ".join(f"{s.name} {'has' if s.active_set else 'lacks'} one" for s in masked)
        raise ValueError(
            f"the kernels of a step share one active-set guard, and here {listed}; build all with or without"
        )
    grouped = [f"{s.name} (group={s.group})" for s in masked if s.active_set and s.group > 1]
    if grouped:
        raise ValueError(
            f"{', '.join(grouped)} drops finished samples in whole groups, which eagle's active set does not do; "
            "build it with group=1, or without Guard(active_set=True)"
        )
    if len(plans) > 1:
        several = [s.name for s in finishing if s.finish is not None and s.finish.steps not in (1, "auto")]
        if several:
            raise ValueError(
                f"{', '.join(several)} takes several steps a launch; in a model of several kernels each takes one "
                "(decorate it with steps=1 or leave steps out)"
            )
    args = _shared_args(plans)
    finish = finishing[0].finish
    assert finish is not None
    alone = len(plans) == 1
    return Step(
        plans=tuple(plans),
        args=args,
        steps=finish.steps if alone else 1,
        steps_max=finish.steps_max if alone else 1,
        active_set=any(guards) and True in guards,
        guarded=len(masked) == len(sidecars),
        local=all(s.access in ("sample_local", "cross_sample_read") for s in sidecars),
        mask=next(arg.name for arg in finishing[0].args if arg.role == "terminated"),
        placed=_placed(plans),
    )


def _placed(plans: Sequence[Plan]) -> bool | None:
    answers = {plan.plugin.placed for plan in plans}
    answers |= {True for p in plans if p.sidecar.group > 1 or any(extent for _, extent in p.sidecar.grid)}
    return True if True in answers else None if None in answers else False


def _shared_args(plans: Sequence[Plan]) -> dict[str, Arg]:
    args: dict[str, Arg] = {}
    owners: dict[str, str] = {}
    for plan in plans:
        for arg in plan.sidecar.args:
            known = args.get(arg.name)
            if known is None:
                args[arg.name], owners[arg.name] = arg, plan.name
                continue
            same = known.per_sample == arg.per_sample and known.width == arg.width and known.dtype == arg.dtype
            if not same or (known.role == "uniform") != (arg.role == "uniform"):
                raise ValueError(
                    f"{arg.name!r} is a {_kind(known)} in {owners[arg.name]} and a {_kind(arg)} in {plan.name}; "
                    "one name is one plane for all kernels of a step"
                )
            if arg.written and not known.written:
                args[arg.name] = arg
    return args


def _kind(arg: Arg) -> str:
    if arg.role == "uniform":
        return "number" if arg.dtype.kind == "f" else "whole number"
    if not arg.per_sample:
        return f"shared {arg.dtype} plane"
    width = f" of {arg.width} components" if arg.shape else ""
    return f"{arg.dtype} plane{width} per sample"


def check_names(step: Step, given: Mapping[str, Any], *, mask: bool) -> None:
    """Refuse names that no kernel of the step takes, and planes that the loop owns.

    Args:
        step: The step.
        given: The caller's values by name.
        mask: Whether the mask may be among them.

    Raises:
        ValueError: Names the first offender of each kind.
    """
    reserved = [name for name in given if name in RESERVED]
    if reserved:
        raise ValueError(f"{', '.join(map(repr, reserved))} is owned by the running loop; leave it out")
    if not mask and step.mask in given:
        raise ValueError(f"{step.mask!r} is the mask of finished samples, which the run makes; never pass it")
    hidden = step.hidden
    known = {name for name, arg in step.args.items() if not arg.reserved and name not in hidden}
    known |= {name for plan in step.plans for name in (*plan.signature.unused, plan.sidecar.open_axis) if name}
    unknown = [name for name in given if name not in known]
    if unknown:
        takes = ", ".join(name for name in known if mask or name != step.mask)
        raise ValueError(f"{step.name} has no argument {', '.join(map(repr, unknown))}; it takes {takes}")


def missing_names(step: Step, given: Mapping[str, Any], *, allocate: bool) -> list[str]:
    """Names the caller must still give, each with the kernel that needs it.

    Args:
        step: The step.
        given: The caller's values by name.
        allocate: Whether planes that are written before they are read may be left out.
    """
    hidden = step.hidden
    missing = []
    for plan in step.plans:
        unused = [] if plan.signature.names is None else list(plan.signature.unused)
        for arg in plan.sidecar.args:
            own = arg.reserved or arg.name in hidden or arg.role in ("terminated", "nsamples")
            shared = step.args[arg.name]
            optional = allocate and shared.written and (not shared.prior or arg.role == "accum_out")
            if not own and not optional:
                unused.append(arg.name)
        missing += [f"{name!r} (of {plan.name})" for name in unused if name not in given]
    return list(dict.fromkeys(missing))


def bind_step(
    step: Step, given: Mapping[str, Any], *, layout: Layout | None, allocate: bool, read_only: bool = False
) -> tuple[Planes, Residency]:
    """Bind the step's planes; see `bind_planes` for the rules.

    Args:
        step: The step.
        given: The caller's values by name.
        layout: Which axis holds the samples where a shape reads both ways.
        allocate: Whether planes that are written before they are read may be left out.
        read_only: Whether what is given is only looked at and copied, never run on: it may be read-only then.

    Raises:
        ValueError: A name is missing, or a plane is wrong; nothing was written.
        TypeError: A number is no real number.
    """
    missing = missing_names(step, given, allocate=allocate)
    if missing:
        raise ValueError(f"missing {', '.join(missing)}; give every plane and number by name or in order")
    residency = residency_of((name, value) for name, value in given.items() if name in step.args)
    extents = {name: extent for plan in step.plans for name, extent in plan.signature.extents.items()}
    values = {name: value for name, value in given.items() if name in step.args}
    args = [replace(arg, readonly=True) if read_only else arg for arg in step.args.values()]
    n = next((p.sidecar.samples_of(given) for p in step.plans if p.sidecar.open_axis in given), None)
    planes = bind_planes(args, values, xp=residency.xp, layout=layout, extents=extents, n=n)
    for plan in step.plans:
        plan.sidecar.check_samples(planes.n)
        plan.signature.check_promises(planes.planes)
    limit = MAX_MAPPED_SAMPLES if step.active_set else MAX_SAMPLES
    if planes.n > limit:
        raise ValueError(f"{planes.n:,} samples: at most {limit:,} fit the counters of {step.name}; split the batch")
    _bind_mask(step, planes)
    return planes, residency


def _bind_mask(step: Step, planes: Planes) -> None:
    given = planes.planes.get(step.mask)
    if given is None:
        return
    mask = given.native
    if mask.dtype != np.bool_ or mask.shape != (planes.n,) or getattr(given.given, "ndim", 1) > 1:
        raise ValueError(
            f"the mask {step.mask!r} must be a bool array of shape ({planes.n},); got {mask.dtype} {mask.shape}"
        )
