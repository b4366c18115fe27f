"""What may be a step, a hook and a number of replays, checked before a pipeline or a composer changes."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from eagle.aio.guards import RepeatWhile, Skippable, plain_steps

if TYPE_CHECKING:
    from eagle.aio.target import Member

__all__ = ("check_hook", "check_replays", "check_step", "refuse_nested_loop")


def check_step(step: object, what: str = "a step") -> None:
    """Refuse what cannot be called without arguments, or would return a coroutine.

    Args:
        step: A callable, a `Skippable` or a `RepeatWhile`.
        what: What to call it in the message.

    Raises:
        TypeError: It is not a step.
    """
    for plain in plain_steps(step):
        if not callable(plain):
            raise TypeError(f"{what} is {plain!r}; give a callable without arguments, a Skippable or a RepeatWhile")
        kind = _kind_of_async(plain)
        if kind is not None:
            raise TypeError(
                f"{what} is the {kind} function {plain!r}, whose body a call does not run; give a "
                "plain function, and await the Completion"
            )
        try:
            signature = inspect.signature(plain)
        except (TypeError, ValueError):  # built in; it will say so itself
            continue
        try:
            signature.bind()
        except TypeError as error:
            raise TypeError(
                f"{what} is {plain!r}, which cannot be called without arguments ({error}); "
                "bind them with functools.partial or a lambda"
            ) from None


def check_hook(pre_launch: object) -> None:
    """Refuse a ``pre_launch`` that is no plain callable (quick: it is checked at every enqueue).

    Raises:
        TypeError: It cannot be called, or is a coroutine function.
    """
    if not callable(pre_launch) or _kind_of_async(pre_launch) is not None:
        raise TypeError(f"pre_launch is {pre_launch!r}; give a plain callable without arguments")


def _kind_of_async(step: Any) -> str | None:
    """What kind of function only begins when it is called, "coroutine" or "generator"; None for a plain one."""
    while isinstance(step, partial):
        step = step.func
    for function in (step, inspect.getattr_static(type(step), "__call__", None)):  # or an object with an async __call__
        if inspect.iscoroutinefunction(function):
            return "coroutine"
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            return "generator"
        if inspect.isroutine(step):  # the type's own __call__ says nothing about it
            break
    return None


def refuse_nested_loop(member: Member, pipeline: str) -> None:
    """Refuse a loop inside a guard or another loop.

    Args:
        member: The member to look at.
        pipeline: Name of its pipeline, for the message.

    Raises:
        ValueError: It holds a `RepeatWhile` inside.
    """
    step = member.step
    if isinstance(step, RepeatWhile):
        inner = [part for part in step.parts if _holds_loop(part)]
    else:
        inner = [step] if isinstance(step, Skippable) and _holds_loop(step) else []
    if inner:
        raise ValueError(
            f"{member} of pipeline {pipeline!r} has a RepeatWhile inside a {type(step).__name__}; loops do not nest: "
            "add the loop as a member of its own, or loop inside one kernel"
        )


def _holds_loop(step: object) -> bool:
    return isinstance(step, RepeatWhile) or (isinstance(step, Skippable) and _holds_loop(step.step))


def check_replays(n: object) -> int:
    """The number of replays as an int.

    Raises:
        TypeError: `n` is no int.
        ValueError: It is negative.
    """
    if type(n) is int and n >= 0:
        return n
    count = None if isinstance(n, bool) else getattr(n, "__index__", None)
    if count is None:
        raise TypeError(f"n is {n!r}; give the number of replays as an int")
    number: int = count()
    if number < 0:
        raise ValueError(f"n is {number}; give the number of replays, at least 0")
    return number
