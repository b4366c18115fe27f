"""How many steps a launch of an automatic kernel takes on the host.

A call should be long enough that Python between calls costs nothing, and short enough that a run can be stopped within
its slice. Within those bounds fewer steps tell the report more exactly when the longest sample finished.
"""

from __future__ import annotations

from typing import Literal, get_args

Policy = Literal["auto", "tiled", "measured", "band"]
POLICIES = get_args(Policy)

NS_PER_OP = 0.5  # a first guess of one scalar operation; measured calls take over from the second on
STEP_NS = 1_000_000  # one step of a range should take no longer than that
_SHORT_NS = 600_000  # below that a call is lengthened: Python and cold planes cost tens of microseconds a call
_LONG_NS = 3_000_000  # above that it is shortened: a slice is 5 ms
_PROBE_EVERY = 64  # sweeps of one step between two probes of the fused side


class Pacing:
    """The step counts of one run's launches.

    Args:
        policy: "tiled" takes the fused side at once, "measured" one-step sweeps until a timed fused probe wins, "band"
            common rounds that lengthen while nothing finishes; "auto" is "tiled".
        steps: K of a kernel with a fixed count; 1 otherwise.
        steps_max: Step count that the fused side is made for.
        ops: Operations of one step of one sample, as the sidecar counts them.
        automatic: Whether launches take as many steps as they are told.
    """

    def __init__(self, policy: str, steps: int, steps_max: int, ops: int, *, automatic: bool) -> None:
        if policy not in POLICIES:
            raise ValueError(f"host_policy is {policy!r}; use one of {', '.join(POLICIES)}")
        self._policy = policy
        self._steps = steps
        self._steps_max = steps_max
        self._ops = ops
        self._automatic = automatic
        self._sweep_ns = 0.0
        self._fused_wins: bool | None = None if policy == "measured" else True

    def first(self, samples: int) -> int:
        """Steps of the first launch over that many samples."""
        if not self._automatic:
            return self._steps
        if self._fused_wins is None:
            return 1
        guess = _LONG_NS / max(samples * self._ops * NS_PER_OP, 1.0)
        return max(1, min(self._steps_max, int(guess)))

    def next(self, k: int, launches: int, took_ns: int) -> int:
        """Steps of the next launch of a range.

        Args:
            k: Steps of the launch that has ended.
            launches: Launches of the range so far.
            took_ns: What the last one took.
        """
        if not self._automatic:
            return self._steps
        if self._fused_wins is not True:
            return self._measured(k, launches, took_ns)
        if took_ns < _SHORT_NS:
            return k * 2
        if took_ns > _LONG_NS:
            return max(1, min(k // 2, int(k * _LONG_NS / took_ns)))
        return k

    def _measured(self, k: int, launches: int, took_ns: int) -> int:
        """One-step sweeps, with a timed probe of the fused side now and then."""
        if k == 1:
            self._sweep_ns = took_ns
            return min(self._steps_max, 8) if launches % _PROBE_EVERY == 1 else 1
        self._fused_wins = took_ns / k < self._sweep_ns
        return k if self._fused_wins else 1

    def next_round(self, k: int, quiet: bool, took_ns: int) -> int:
        """Steps of the next common round: longer while no sample finishes, since a round's end brings nothing then.

        Args:
            k: Steps of the round that has ended.
            quiet: Whether no sample finished in it.
            took_ns: What it took.
        """
        if took_ns > _LONG_NS:
            return max(1, k // 2)
        if k < self._steps_max or quiet:
            return k * 2
        return k
