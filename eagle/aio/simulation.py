"""simulate: run a model on every sample until each one finishes, called exactly like the kernel itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import anyio  # noqa: TC002  (the hints of public functions resolve at run time)

from eagle.aio.offload import built_off_loop
from eagle.aio.report import RunReport, SimResult
from eagle.aio.runner import OWN_OPTIONS, Runner, RunOptions, check_max_steps, take_options
from eagle.kernels.build import is_hawk_kernel
from eagle.kernels.deploy import deploy_for
from eagle.kernels.layout import Layout, check_layout_word
from eagle.kernels.plan import Plan
from eagle.kernels.residency import side_of
from eagle.kernels.roles import FUSED_STEPS
from eagle.kernels.signature import bind_call
from eagle.kernels.step import Step, check_names, step_of

if TYPE_CHECKING:
    from eagle.aio.active_set import ActiveSet
    from eagle.aio.guards import RepeatWhile
    from eagle.aio.progress import Progress

PUBLISHED_OPTIONS = ("until", "every", "max_steps", "reorder", "scalar_type", "layout")
_OPTIONS = frozenset((*PUBLISHED_OPTIONS, *OWN_OPTIONS))


def model_step(model: Any, until: Any, scalar_type: str | None, side: str | None = None) -> Step:
    """The step of a model: its kernels deployed, its plans taken as they are, ``until`` placed last.

    Args:
        model: A hawk kernel, a plan, or a list or tuple of them.
        until: The kernel or plan that finishes the samples, or None.
        scalar_type: Precision the kernels are built in.
        side: Where the data lies, "host" or "cuda", if that is known: what the kernels are built for.

    Raises:
        ValueError: The model holds something else, or its kernels form no step.
    """
    members = list(model) if isinstance(model, (list, tuple)) else [model]
    if not members:
        raise ValueError("the model is an empty list; pass a hawk kernel, or a list of the kernels of one step")
    for member in members:
        if not (is_hawk_kernel(member) or isinstance(member, Plan)):
            raise ValueError(
                "a model is a hawk kernel, a plan of eagle.deploy, or a list of them; "
                f"got {type(member).__name__} {member!r:.60}"
            )
    if until is not None:
        if not (is_hawk_kernel(until) or isinstance(until, Plan)):
            raise ValueError(
                f"until={until!r:.60} is no kernel; pass the hawk kernel (or plan) that finishes the samples"
            )
        members.append(until)
    prebuilt = [member for member in members if isinstance(member, Plan)]
    if prebuilt and scalar_type is not None:
        raise ValueError(
            f"scalar_type={scalar_type!r}: {prebuilt[0].name!r} is a prebuilt plan, whose precision is set; "
            "give scalar_type to eagle.deploy instead"
        )
    step = step_of(_deployed(members, scalar_type, side))
    _check_parameter_names(step)
    return step


def _deployed(members: Sequence[Any], scalar_type: str | None, side: str | None) -> list[Plan]:
    several = len(members) > 1
    kernels = [_one_step(member) if several else member for member in members if is_hawk_kernel(member)]
    built = iter(deploy_for(side, kernels, scalar_type) if kernels else ())
    return [next(built) if is_hawk_kernel(member) else member.by_name() for member in members]


def _one_step(kernel: Any) -> Any:
    """An automatic kernel takes one step a launch beside others, and then reads no state it does not need."""
    automatic = any(name == FUSED_STEPS for _, name in kernel.arg_spec)
    return kernel.one_step if automatic else kernel


def _check_parameter_names(step: Step) -> None:
    for plan in step.plans:
        names = set(plan.signature.names or ()) | {arg.name for arg in plan.sidecar.args}
        clash = names.intersection(PUBLISHED_OPTIONS)
        if clash:
            raise ValueError(
                f"{plan.name} has a parameter called {', '.join(sorted(clash))}, an option of simulate; rename it"
            )
    written = {name for name, arg in step.args.items() if arg.written and arg.role != "terminated"}
    fields = written.intersection(SimResult.FIELDS)
    if fields:
        raise ValueError(
            f"{step.name} has a state plane called {', '.join(sorted(fields))}, a field of SimResult; rename it"
        )


class Simulation:
    """A bound, built simulation: `run` runs it, `reset` starts the batch over. Made by `simulation`.

    Args:
        model: A hawk kernel, a plan of `deploy`, or a list of them: one step, in order.
        args: The kernel's own positional arguments.
        kwargs: The kernel's own keyword arguments.
        until: The kernel that finishes the samples, placed last.
        max_steps: Steps a sample may take in one run; an int >= 1.
        every: Steps between two compactions of a fixed-K active-set kernel.
        reorder: Threshold of the physical reorder (0.25 to 0.75, or True for 0.5), active-set kernels only.
        scalar_type: "float64" (None) or "float32": the precision the kernels are built in.
        layout: "samples_first" or "samples_last", for planes whose shape reads both ways.
        limiter: Bounds what is in flight (`anyio.CapacityLimiter`).
        priority: CUDA stream priority, lower is more urgent.
        order: A per-sample cost estimate, or "learn".
        progress: Whether every run shows a progress bar.

    Raises:
        ValueError: The model, a name, a plane or an option is wrong; nothing was written.
        TypeError: A number or ``max_steps`` is of the wrong type.
    """

    _runner_class = Runner

    def __init__(
        self,
        model: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        until: Any = None,
        max_steps: int,
        every: int | None = None,
        reorder: float | bool | None = None,
        scalar_type: str | None = None,
        layout: Layout | None = None,
        limiter: anyio.CapacityLimiter | None = None,
        priority: int | None = None,
        order: Any = None,
        progress: bool = False,
    ) -> None:
        check_max_steps(max_steps)
        check_layout_word(layout)
        step = model_step(model, until, scalar_type, side_of((*args, *kwargs.values())))
        given = bind_call([plan.signature for plan in step.plans], args, kwargs)
        options = take_options(
            step, given, {"limiter": limiter, "priority": priority, "order": order, "progress": progress}
        )
        check_names(step, given, mask=False)
        self._runner = self._runner_class.of_step(
            step, given, max_steps=max_steps, every=every, reorder=reorder, layout=layout, options=RunOptions(**options)
        )
        bound = self._runner.bound
        hidden = step.hidden
        planes = bound.planes
        self._allocated = tuple(name for name in planes.allocated if name not in hidden)
        order_of = {name: i for i, name in enumerate(names_in_order(step))}
        names = sorted(
            (n for n in planes.planes if n not in hidden), key=lambda name: order_of.get(name, len(order_of))
        )
        self._state = {
            name: bound.residency.hand_back(planes.planes[name].given)
            if name in self._allocated
            else planes.planes[name].given
            for name in names
            if planes.planes[name].arg.written and name != step.mask
        }
        params = [name for name in order_of if name not in self._state and name not in hidden]
        self.names: dict[str, tuple[str, ...]] = {
            "state": tuple(name for name in self._state if name not in self._allocated),
            "params": (*params, step.mask) if step.mask not in params else tuple(params),
            "allocated": self._allocated,
        }
        mask = bound.mask.reshape(()) if planes.single else bound.mask
        self._finished = bound.residency.hand_back(mask)

    @classmethod
    def of_call(cls, model: Any, args: Sequence[Any], call: Mapping[str, Any]) -> Self:
        """Build from a call of `simulate`: our options are told from the kernel's own arguments by their names."""
        options = {name: value for name, value in call.items() if name in _OPTIONS}
        kwargs = {name: value for name, value in call.items() if name not in _OPTIONS}
        return cls(model, args, kwargs, **options)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._runner.bound.name}, n={self.n}>"

    @property
    def runner(self) -> Runner:
        """The runner that drives the model."""
        return self._runner

    @property
    def loop(self) -> RepeatWhile:
        """The runner's loop."""
        return self._runner.loop

    @property
    def pipeline(self) -> Any:
        """The device `GraphPipeline`, built on the first run; None on the host and before."""
        return self._runner.pipeline

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each kernel."""
        return self._runner.bound.step.plans

    @property
    def n(self) -> int:
        """Samples."""
        return self._runner.n

    @property
    def active(self) -> ActiveSet | None:
        """The active set, or None."""
        return self._runner.active

    @property
    def finished(self) -> Any:
        """Samples finished, a (1,) uint32 array."""
        return self._runner.finished

    @property
    def terminated(self) -> Any:
        """The mask of finished samples."""
        return self._runner.terminated

    @property
    def every(self) -> int | None:
        """Steps between two looks at the counters; None for an automatic kernel."""
        return self._runner.every

    async def run(self, *, progress: bool = False) -> SimResult:
        """Run until every sample finishes or has taken ``max_steps``; the state is written in place.

        A second call continues from the current state with a fresh budget.

        Args:
            progress: Show a progress bar of this run.

        Returns:
            The `SimResult`; reaching ``max_steps`` is a result, not an error.

        Raises:
            Busy: Another run of this object is in progress.

        Cancellation: the run ends within a slice (10 ms on the host), then the cancellation leaves; planes, mask and
        counters agree, and another `run` continues.
        """
        began = perf_counter()
        report = await self._runner.run(progress=progress)
        return self.result(report, perf_counter() - began)

    def reset(self) -> None:
        """Clear the mask (and the active set): the next `run` starts the batch over; the caller re-seeds the state.

        Raises:
            Busy: A run is in progress.
        """
        self._runner.reset()

    def progress(self, interval: float = 0.1) -> AsyncIterator[Progress]:
        """Follow the run in progress, or the next one: ``async for p in sim.progress(): ...``. Starts nothing.

        Which run that is, is settled by this call: make the iterator before the run begins, and hand it to the task
        that follows. A task that calls this itself may start only when a short run is over, and waits for the next.

        Args:
            interval: Seconds between two values.

        Returns:
            An iterator that ends with the run's final value; leaving it early needs no clean-up.
        """
        return self._runner.progress(interval)

    def result(self, report: RunReport, wall_s: float) -> SimResult:
        """The result that a report of this simulation stands for."""
        return SimResult(
            state=dict(self._state), finished=self._finished, report=report, wall_s=wall_s, allocated=self._allocated
        )


def names_in_order(step: Step) -> list[str]:
    """The names of a step as a call gives them: those of its kernels in order of first appearance."""
    names: dict[str, None] = {}
    for plan in step.plans:
        names.update(dict.fromkeys(plan.signature.names or ()))
        names.update(dict.fromkeys(a.name for a in plan.sidecar.args if not a.reserved and a.name not in step.hidden))
    return list(names)


async def simulation(
    model: Any,
    *args: Any,
    until: Any = None,
    max_steps: int,
    every: int | None = None,
    reorder: float | bool | None = None,
    scalar_type: str | None = None,
    layout: Layout | None = None,
    limiter: anyio.CapacityLimiter | None = None,
    priority: int | None = None,
    order: Any = None,
    progress: bool = False,
    **kwargs: Any,
) -> Simulation:
    """Bind and build ``model`` once, off the event loop; see `simulate` for the arguments.

    Returns:
        The `Simulation`, whose ``run()`` runs it, again after ``reset()``, without rebuilding.

    Cancellation leaves at once; a compilation that has begun goes on and fills the cache.
    """

    def build() -> Simulation:
        return Simulation(
            model,
            args,
            kwargs,
            until=until,
            max_steps=max_steps,
            every=every,
            reorder=reorder,
            scalar_type=scalar_type,
            layout=layout,
            limiter=limiter,
            priority=priority,
            order=order,
            progress=progress,
        )

    return await built_off_loop(build)


async def simulate(
    model: Any,
    *args: Any,
    until: Any = None,
    max_steps: int,
    every: int | None = None,
    reorder: float | bool | None = None,
    scalar_type: str | None = None,
    layout: Layout | None = None,
    limiter: anyio.CapacityLimiter | None = None,
    priority: int | None = None,
    order: Any = None,
    progress: bool = False,
    **kwargs: Any,
) -> SimResult:
    """Run ``model`` on every sample until each one finishes, or has taken ``max_steps``.

    The call is the kernel's own: ``*args`` and ``**kwargs`` bind to its parameters as a call to the kernel would, with
    the mask left out. A Mutable plane is the state, written in place; one that is written before it is read may be
    left out. A Param is one number; other planes hold one value per sample. NumPy runs on the CPU, CuPy on its GPU,
    other frameworks over DLPack.

    Args:
        model: A hawk kernel, a list of them (one step, in order), or plans of `deploy`.
        *args: The kernel's own arguments, by position.
        until: The kernel that finishes the samples, placed last.
        max_steps: Steps a sample may take; reaching it is a result.
        every: Steps between two compactions of a fixed-K active-set kernel.
        reorder: Threshold of the physical reorder, active-set kernels only.
        scalar_type: "float64" (None) or "float32".
        layout: "samples_first" or "samples_last", for planes whose shape reads both ways.
        limiter: Bounds what is in flight (`anyio.CapacityLimiter`); None is the default of target and event loop.
        priority: CUDA stream priority, lower is more urgent.
        order: A per-sample cost estimate, or "learn".
        progress: Show a progress bar.
        **kwargs: The kernel's own arguments, by name.

    Returns:
        The `SimResult`.

    Raises:
        ValueError: The model, a name, a plane or an option is wrong; nothing was written.
        TypeError: A number or ``max_steps`` is of the wrong type.

    Cancellation: see `Simulation.run`.
    """
    built = await simulation(
        model,
        *args,
        until=until,
        max_steps=max_steps,
        every=every,
        reorder=reorder,
        scalar_type=scalar_type,
        layout=layout,
        limiter=limiter,
        priority=priority,
        order=order,
        progress=progress,
        **kwargs,
    )
    return await built.run()
