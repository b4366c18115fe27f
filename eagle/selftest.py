"""A self-test of one target, run by ``python -m eagle doctor`` in a process of its own.

A process of its own, because what is broken on a machine may crash or hang instead of raising. Prints one line of
JSON: ``{"ok": ...}`` with what was done, ``{"unusable": reason}``, or ``{"failed": message}``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from typing import Any

import numpy as np

__all__ = ("main", "self_test")

_SECONDS = 1.0
_SAMPLES = 10_000
_TOLERANCE = 1e-6


def self_test(target: str) -> dict[str, Any]:
    """Test `target` ("host" or "cuda") for about a second and return what `main` prints."""
    about: dict[str, Any] = {}
    if target == "cuda":
        from eagle.kernels.device import unusable_reason

        reason = unusable_reason()
        if reason is not None:
            return {"unusable": reason}
        about = _device()
    try:
        _check_pipeline(target)
        about["checked"] = ["pipeline"]
        if importlib.util.find_spec("hawk") is not None:
            about |= _check_kernels(target)
            about["checked"] = ["pipeline", "kernels"]
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    return {"ok": about}


def _check_pipeline(target: str) -> None:
    """Replay a two-step graph and compare."""
    import eagle.sync

    xp: Any = np
    if target == "cuda":
        from eagle.kernels.device import require_cupy

        xp = require_cupy()
    plane = xp.zeros(4)

    def add() -> None:
        xp.add(plane, 1.0, out=plane)

    def double() -> None:
        xp.multiply(plane, 2.0, out=plane)

    pipeline = eagle.sync.GraphPipeline("self-test", target=target)
    pipeline.add(add)
    pipeline.add(double)
    if target == "cuda":
        add()  # CuPy compiles at the first call, which a capture would not survive
        double()
        plane.fill(0.0)
    pipeline.build()
    pipeline.launch(3)
    got = plane if target == "host" else plane.get()
    if not np.array_equal(got, np.full(4, 14.0)):
        raise AssertionError(f"a pipeline of x + 1 and 2 x, replayed 3 times from 0, gave {got} instead of 14")


def _check_kernels(target: str) -> dict[str, Any]:
    """Build the oscillators, compare with their closed form, then run them until the second is over."""
    import eagle.sync
    from eagle import oscillators

    start = time.perf_counter()
    given = oscillators.planes(_SAMPLES)
    planes = _on(target, given)
    simulation = eagle.sync.simulation(
        oscillators.oscillate, **planes, dt=oscillators.DT, max_steps=oscillators.LONGEST
    )
    result = simulation.run()
    built_s = time.perf_counter() - start
    worst = float(np.abs(_to_host(result.x) - oscillators.exact(given)).max())
    if not result.done or not worst < _TOLERANCE:
        raise AssertionError(
            f"{_SAMPLES} oscillators ended {result.status}, off their closed form by {worst:.3g} (at most {_TOLERANCE})"
        )
    again = _on(target, given)
    runs, best = 0, float("inf")
    while time.perf_counter() - start - built_s < _SECONDS:
        for name in ("x", "v", "k"):
            planes[name][...] = again[name]
        simulation.reset()
        begun = time.perf_counter()
        simulation.run()
        best = min(best, time.perf_counter() - begun)
        runs += 1
    return {"first_s": built_s, "best_ms": best * 1e3, "runs": runs, "samples": _SAMPLES, "worst": worst}


def _on(target: str, given: dict[str, np.ndarray]) -> dict[str, Any]:
    if target == "host":
        return {name: plane.copy() for name, plane in given.items()}
    from eagle.kernels.interop import to_cupy

    return {name: to_cupy(plane) for name, plane in given.items()}


def _to_host(plane: Any) -> np.ndarray:
    return np.asarray(plane.get() if hasattr(plane, "get") else plane)


def _device() -> dict[str, Any]:
    from eagle.kernels.device import device_props, require_cupy

    cupy = require_cupy()
    props = device_props()
    return {
        "device": props.name,
        "devices": int(cupy.cuda.runtime.getDeviceCount()),
        "compute": f"{props.cc_major}.{props.cc_minor}",
        "runtime": int(cupy.cuda.runtime.runtimeGetVersion()),
        "driver": int(cupy.cuda.runtime.driverGetVersion()),
    }


def main(target: str) -> None:
    """Print the outcome of `self_test` as one line of JSON."""
    sys.stdout.write(json.dumps(self_test(target)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
