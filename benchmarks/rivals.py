"""The cases in other engines: array operations under a mask (CuPy, NumPy), and JAX. Also what one step counts for."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

_LOOK_EVERY = 16  # steps between two looks whether anything still runs


def masked(case: Any, xp: Any, given: dict[str, Any], *, limit_s: float) -> dict[str, Any] | None:
    """Every sample to its end: all samples take every step, and those that have finished keep their state.

    Args:
        case: The case.
        xp: NumPy or CuPy.
        given: The input planes as its arrays; left as they are.
        limit_s: After so many seconds it gives up.

    Returns:
        The planes at the end, or None.
    """
    arrays, until = dict(given), time.perf_counter() + limit_s
    live = xp.ones(given[case.STATE[0]].shape, np.bool_)
    for at in range(case.MAX_STEPS + _LOOK_EVERY):
        if at % _LOOK_EVERY == 0:
            if not bool(live.any()):
                return arrays
            if time.perf_counter() > until:
                return None
        new = case.advance(xp, arrays)
        for name in case.STATE:
            arrays[name] = xp.where(live, new[name], arrays[name])
        live &= ~new["terminated"]
    return None


def jax_run(case: Any) -> tuple[Any, Any]:
    """Return (put, run): planes to JAX's device, and ``jit(vmap(while_loop))`` over them, which waits for the end."""
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    def one(given: dict[str, Any]) -> dict[str, Any]:
        start = {**given, "terminated": jnp.array(False)}
        return jax.lax.while_loop(
            lambda arrays: ~arrays["terminated"], lambda arrays: {**arrays, **case.advance(jnp, arrays)}, start
        )

    compiled = jax.jit(jax.vmap(one))

    def put(given: dict[str, np.ndarray]) -> dict[str, Any]:
        return jax.block_until_ready({name: jax.device_put(plane) for name, plane in given.items()})

    return put, lambda arrays: jax.block_until_ready(compiled(arrays))


class _Counted:
    """A number that counts the floating-point operations made with it."""

    made = 0

    def _count(self, *_: object) -> _Counted:
        _Counted.made += 1
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _count
    __ge__ = __le__ = __gt__ = __lt__ = _count

    def __neg__(self) -> _Counted:
        return self  # a sign is free


class _CountedMath:
    @staticmethod
    def sqrt(x: _Counted) -> _Counted:
        return x._count()

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return (a if isinstance(a, _Counted) else b)._count()

    maximum = minimum

    @staticmethod
    def where(_condition: Any, a: Any, b: Any) -> Any:
        return a if isinstance(a, _Counted) else b


def operations(case: Any) -> int:
    """Floating-point operations of one step of one sample, as the source writes them.

    A division or a square root counts as one, although it is some ten instructions, and a select as none; what a
    compiler may hoist or share is counted where it is written. So it is a lower bound up to that.
    """
    _Counted.made = 0
    case.advance(_CountedMath, _Everything())
    return _Counted.made


class _Everything(dict[str, Any]):
    def __missing__(self, name: str) -> _Counted:
        return _Counted()
