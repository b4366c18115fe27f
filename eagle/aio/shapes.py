"""Which entry runs an automatic kernel on a device, and with which geometry: the rule, and the figures behind it.

Measured on one NVIDIA H200 (132 multiprocessors), one launch; persist entries as (block, threads per multiprocessor,
chunk). *RK4* are oscillators of 1,000 steps at most, in µs; *orbit* a heavy adaptive step, in ms:

=====  =======  ========  =============  ============  ============  =============  =============
case   samples  evenness  range entry    (64,256,32)   (64,512,32)   (256,512,128)  (256,1024,128)
=====  =======  ========  =============  ============  ============  =============  =============
RK4    1e4      any       54 (block 64)  72
RK4    1e5      0.15      192            114           149           146            185
RK4    1e5      1.0       202            238           194           190            197
RK4    3e5      0.15      513            210           202           222            297
RK4    3e5      1.0       570            677           544           528            533
RK4    1e6      0.15      1,574          422 with (256,512,32)
RK4    1e6      1.0       1,849                                                     1,706
orbit  1e4      any       6.12           6.17          6.17          6.79           6.80
orbit  1e5      0.18      15.0           9.3           10.2          10.1           10.1
orbit  1e5      0.65      8.3            9.4           7.8           8.4            8.4
=====  =======  ========  =============  ============  ============  =============  =============

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
# Mean over largest step count: above, most lanes of a warp work to its end; and above, samples end together.
EVEN, UNIFORM = 0.5, 0.9
# From so many runs at once on each gets a grid of its share, where together they are far more than the device holds
# (2048 threads per multiprocessor) and their samples end at different steps: a warp with one thread a sample lasts as
# long as its longest one. 64 launches of 1e4 RK4 samples took 413 instead of 1047 µs that way; awaited from one event
# loop, whose Python takes longer than either, it made nothing faster, hence the border.
CROWD, _MOST_CROWDED, _CROWDED = 8, 256, 4 * 2048
# Threads per multiprocessor that all of them get together: what was best for one spread run of as many samples.
_SHARED = 512
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


def crowd_of(load: int, n: int, sm_count: int) -> int:
    """How many runs the device is to be shared between: 1 while it has lanes for all of them, else a power of two.

    Args:
        load: Runs in flight at once, this one included.
        n: Samples of each.
        sm_count: The device's multiprocessors.
    """
    if load < CROWD or load * n < _CROWDED * sm_count:
        return 1
    return min(1 << (load - 1).bit_length(), _MOST_CROWDED)


def choose(kernel: DeviceKernel, n: int, evenness: float | None, crowd: int = 1) -> Shape:
    """The shape for one launch of an automatic kernel.

    Args:
        kernel: Its entries on the device.
        n: Samples.
        evenness: Mean over largest step count of an earlier run, or None.
        crowd: Runs that share the device; see `crowd_of`.
    """
    if crowd > 1 and kernel.persist is not None and evenness is not None and evenness <= EVEN:
        if n < _RESIDENT * kernel.sm_count:
            return Shape("persist", 32, max(_SHARED // crowd, 1), 32)
    if kernel.persist is None or n < _RESIDENT * kernel.sm_count:
        return Shape("step" if kernel.ranged is None else "range", 64 if n < 128 * kernel.sm_count else 128)
    probing = evenness is None
    level = 0 if evenness is None else (evenness > EVEN) + (evenness > UNIFORM)
    if n < _LARGE * kernel.sm_count:
        return (
            Shape("persist", 64, 256, 32, probing),
            Shape("persist", 64, 512, 32),
            Shape("persist", 256, 512, 128),
        )[level]
    return Shape("persist", 256, 1024, 128) if level else Shape("persist", 256, 512, 32, probing)


def same_shape(before: float, now: float) -> bool:
    """Whether two measured evennesses ask for the same shape."""
    return (before > EVEN, before > UNIFORM) == (now > EVEN, now > UNIFORM)
