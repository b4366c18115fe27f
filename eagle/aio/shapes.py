"""Which entry runs an automatic kernel on a device, and with which geometry: the rule, and the figures behind it.

Measured on one NVIDIA H200 (132 multiprocessors), RK4 oscillators of 1,000 steps at most, µs of one launch:

=========  ==========  ==================  ============================
samples    stop steps  range entry         persist entry (block, threads per multiprocessor, chunk)
=========  ==========  ==================  ============================
1e4        any         54 (block 64)       72
1e5        spread      184                 111 (64, 256, 32)
1e5        uniform     197                 183 (256, 512, 128)
1e6        spread      1,574               422 (256, 512, 32)
1e6        uniform     1,849               1,706 (256, 1024, 128)
=========  ==========  ==================  ============================

So: one thread a sample while the batch leaves lanes of the device empty (nothing can be claimed then); warps that claim
samples above that. Samples that end together want more threads and rare claims, samples that end at very different
steps fewer threads and frequent claims; the first run tells which they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from eagle.kernels.device_kernel import DeviceKernel

# A batch of fewer samples than that per multiprocessor is all in flight at once.
_RESIDENT = 256
# Mean over largest step count: above, samples count as ending together.
UNIFORM = 0.7
# Below this many samples per multiprocessor a small grid claims faster than a full one.
_LARGE = 2048


@dataclass(frozen=True, slots=True)
class Shape:
    """One launch shape.

    Attributes:
        entry: The kernel entry it launches.
        block: Threads of a block.
        threads_per_sm: Threads the grid gives each multiprocessor (persist only, else 0).
        chunk: Trips between two claims (persist only, else 0).
        counts_lanes: Whether a persist launch counts its lanes' use, which costs it up to a quarter of its time.
    """

    entry: Literal["step", "range", "persist"]
    block: int
    threads_per_sm: int = 0
    chunk: int = 0
    counts_lanes: bool = False

    @property
    def mode(self) -> str:
        """The published word for it."""
        return "persist" if self.entry == "persist" else "fused_one"


def choose(kernel: DeviceKernel, n: int, evenness: float | None) -> Shape:
    """The shape for one launch of an automatic kernel.

    Args:
        kernel: Its entries on the device.
        n: Samples.
        evenness: Mean over largest step count of an earlier run, or None.
    """
    if kernel.persist is None or n < _RESIDENT * kernel.sm_count:
        return Shape("step" if kernel.ranged is None else "range", 64 if n < 128 * kernel.sm_count else 128)
    even = evenness is not None and evenness > UNIFORM
    probing = evenness is None
    if n < _LARGE * kernel.sm_count:
        return Shape("persist", 256, 512, 128) if even else Shape("persist", 64, 256, 32, probing)
    return Shape("persist", 256, 1024, 128) if even else Shape("persist", 256, 512, 32, probing)
