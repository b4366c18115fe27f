"""A kernel's entries on one device: the step entry, and for automatic kernels the range and the persistent one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.errors import ArtifactError
from eagle.kernels.device import require_cupy
from eagle.kernels.device_call import PackedLaunch, block_for, grid_for
from eagle.kernels.module import DeviceModule

if TYPE_CHECKING:
    from eagle.kernels.sidecar import Sidecar
    from eagle.kernels.unit import Unit


def architecture() -> str:
    """The current device's architecture, as hawk names it ("sm_90").

    Raises:
        BackendUnavailable: No GPU can be used.
    """
    return f"sm_{require_cupy().cuda.Device().compute_capability}"


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKernel:
    """The loaded entries of one kernel on one device.

    Attributes:
        sidecar: The kernel's sidecar.
        device: CUDA device id.
        sm_count: Its multiprocessors.
        step: The entry of one launch: one thread a sample.
        ranged: One launch runs each sample to its end or its budget, one thread a sample; None where hawk emitted none.
        persist: The same by warps that claim samples until none is left; None where hawk emitted none.
    """

    sidecar: Sidecar
    device: int
    sm_count: int
    step: Any
    ranged: Any
    persist: Any

    def packed(self, values: list[Any], n: int, *, keep: Any) -> PackedLaunch:
        """One launch of the step entry over all samples, packed.

        Args:
            values: The role arguments by value.
            n: Samples.
            keep: What must live as long as the launch.
        """
        block = block_for(self.step, n, self.sm_count)
        return PackedLaunch(self.step, [*values, *self._partition(n)], grid_for(n, block), block, keep=keep)

    def packed_range(
        self, values: list[Any], n: int, *, steps: int, step_sum: int, block: int, keep: Any
    ) -> PackedLaunch:
        """One launch of the range entry.

        Args:
            values: The role arguments by value.
            n: Samples.
            steps: Address of the uint32 that takes the largest step count, or 0.
            step_sum: Address of the uint64 that takes the sum of step counts, or 0.
            block: Threads of a block.
            keep: What must live as long as the launch.
        """
        tail = [np.uint64(steps), np.uint64(step_sum)]
        return PackedLaunch(self.ranged, [*values, *self._partition(n), *tail], grid_for(n, block), block, keep=keep)

    def packed_persist(
        self,
        values: list[Any],
        n: int,
        *,
        claim: int,
        util: int,
        steps: int,
        step_sum: int,
        block: int,
        threads_per_sm: int,
        chunk: int,
        keep: Any,
    ) -> PackedLaunch:
        """One launch of the persistent entry.

        Args:
            values: The role arguments by value.
            n: Samples.
            claim: Address of the uint32 claim counter, which must be 0 at every launch.
            util: Address of two uint64 (active lanes, lane slots), or 0.
            steps: Address of the uint32 that takes the largest step count, or 0.
            step_sum: Address of the uint64 that takes the sum of step counts, or 0.
            block: Threads of a block.
            threads_per_sm: Threads that the grid gives each multiprocessor.
            chunk: Trips between two claims, a power of two.
            keep: What must live as long as the launch.
        """
        grid = min(max(1, self.sm_count * threads_per_sm // block), grid_for(n, block)) if n else 0
        tail = [np.uint64(claim), np.uint64(util), np.uint64(steps), np.uint64(step_sum), np.uint32(chunk)]
        return PackedLaunch(self.persist, [*values, *self._partition(n), *tail], grid, block, keep=keep)

    def _partition(self, n: int) -> list[Any]:
        # aether-abi/2 entries take the range they run; the legacy generation always runs the whole view
        return [] if self.sidecar.abi == "aether-abi/1" else [np.int64(0), np.int64(n), np.int64(n)]


def load_device_kernel(unit: Unit, name: str, device: int) -> DeviceKernel:
    """Load one kernel of a device unit on a device.

    Args:
        unit: The unit; its digests are checked as the artifact is read.
        name: The kernel's id in the unit.
        device: CUDA device id.

    Raises:
        ArtifactError: The artifact is damaged, or its entry is missing.
        AbiMismatch: It exports another ABI tag or other struct sizes than ours.
        BackendUnavailable: No GPU can be used.
    """
    cupy = require_cupy()
    sidecar = unit.sidecars[name]
    entry = unit.entry(name)
    module = DeviceModule(unit.read(entry.artifact), name=str(entry.artifact), abi=sidecar.abi)
    with cupy.cuda.Device(device):
        symbol = "raptor_kernel" if sidecar.abi == "aether-abi/1" else sidecar.name
        automatic = sidecar.finish is not None and sidecar.finish.steps == "auto" and not sidecar.active_set
        optional = {suffix: _optional(module, f"{symbol}_{suffix}") for suffix in ("range", "persist") if automatic}
        return DeviceKernel(
            sidecar=sidecar,
            device=device,
            sm_count=int(cupy.cuda.Device(device).attributes["MultiProcessorCount"]),
            step=module.function(symbol),
            ranged=optional.get("range"),
            persist=optional.get("persist"),
        )


def _optional(module: DeviceModule, symbol: str) -> Any:
    try:
        return module.function(symbol)
    except ArtifactError:
        return None  # the unit was built without this entry
