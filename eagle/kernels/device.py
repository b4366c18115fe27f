"""The CUDA device: whether one can be used, what it is, which device holds an array, and whether it has failed.

Nothing here imports CuPy until a device is asked for, so the host half works without it. A device that reported an
unrecoverable error is remembered: from then on `check_device` raises that `DeviceFault` at once, instead of the
unrelated-looking errors CUDA gives for every later call.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from eagle.errors import BackendUnavailable, DeviceFault

if TYPE_CHECKING:
    from types import ModuleType

INSTALL = "pip install 'eagle-aio[cuda12]' (or 'eagle-aio[cuda13]')"
SUCCESS, NOT_READY = 0, 600

# CUDA's sticky errors: the context is lost, and only a new process gets another. Numbers are cudaError_t / CUresult,
# which agree on these.
UNRECOVERABLE = frozenset(
    {
        4,  # the runtime is unloading / the driver is deinitialised
        214,  # uncorrectable ECC error
        220,  # uncorrectable NVLink error
        226,  # contained
        700,  # illegal memory access
        702,  # launch timeout
        709,  # context is destroyed
        710,  # device-side assertion
        714,  # hardware stack error
        715,  # illegal instruction
        716,  # misaligned address
        717,  # invalid address space
        718,  # invalid program counter
        719,  # unspecified launch failure
        721,  # tensor memory leak
        723,  # external device failure
        999,  # unknown: seen after driver resets, never recovered from
    }
)

# Single-precision lanes of one multiprocessor by compute capability, from NVIDIA's programming guide; the driver does
# not report them. An architecture newer than this table gets its last entry.
_LANES_PER_SM = {(5, 0): 128, (6, 0): 64, (6, 1): 128, (7, 0): 64, (8, 0): 64, (8, 6): 128, (9, 0): 128, (10, 0): 128}

_faults: dict[int, DeviceFault] = {}
_lock = threading.Lock()
_importing = threading.RLock()
_imported: set[str] = set()  # whole modules of CUDA's; one in `sys.modules` may be half made
_touched = False  # this process has used CUDA through eagle
_forked = False  # this process is a fork of one that had


@dataclass(frozen=True)
class DeviceProps:
    """What one CUDA device is: raw properties, and the peaks that follow from them.

    Attributes:
        name: The device's name.
        cc_major: Compute capability, major.
        cc_minor: Compute capability, minor.
        sm_count: Multiprocessors.
        clock_rate_khz: Peak core clock, kHz.
        memory_clock_rate_khz: Peak memory clock, kHz.
        memory_bus_width_bits: Memory bus width, bits.
        shared_mem_per_block: Shared memory of one block, bytes.
        shared_mem_per_sm: Shared memory of one multiprocessor, bytes.
        regs_per_block: 32-bit registers of one block.
        regs_per_sm: 32-bit registers of one multiprocessor.
        warp_size: Threads of one warp.
        peak_bytes_per_s: Memory bandwidth: two transfers a memory clock over the whole bus.
        peak_flops_sp: float32 peak: a fused multiply-add a lane and clock.
        peak_flops_dp: float64 peak: ``peak_flops_sp * fp64_ratio``.
        fp64_ratio: float64 over float32 throughput.
        ridge_flops_per_byte_sp: ``peak_flops_sp / peak_bytes_per_s``.
        ridge_flops_per_byte_dp: ``peak_flops_dp / peak_bytes_per_s``.
    """

    name: str
    cc_major: int
    cc_minor: int
    sm_count: int
    clock_rate_khz: int
    memory_clock_rate_khz: int
    memory_bus_width_bits: int
    shared_mem_per_block: int
    shared_mem_per_sm: int
    regs_per_block: int
    regs_per_sm: int
    warp_size: int
    peak_bytes_per_s: float
    peak_flops_sp: float
    peak_flops_dp: float
    fp64_ratio: float
    ridge_flops_per_byte_sp: float
    ridge_flops_per_byte_dp: float

    def ridge_flops_per_byte(self, dtype: str) -> float:
        """The flops per byte at which this device balances for ``dtype``.

        Args:
            dtype: "float32" or "float64".

        Raises:
            ValueError: ``dtype`` is any other word.
        """
        if dtype == "float32":
            return self.ridge_flops_per_byte_sp
        if dtype == "float64":
            return self.ridge_flops_per_byte_dp
        raise ValueError(f"ridge_flops_per_byte: dtype is {dtype!r}; use 'float32' or 'float64'")


@lru_cache(maxsize=1)
def _probe() -> str | None:
    try:
        import cupy
    except Exception as error:  # a broken installation raises what it likes
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return f"CuPy is not installed; {INSTALL}"
        return f"CuPy cannot be imported ({type(error).__name__}: {error}); repair it with {INSTALL}"
    if not _has_cuda_core():
        return f"CuPy is installed but cuda-core is not; {INSTALL}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"no CUDA driver, or none that CuPy can use ({error}); install or update the NVIDIA driver"
    if count == 0:
        return "the CUDA driver shows no device; see nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def _has_cuda_core() -> bool:
    try:
        return find_spec("cuda.core") is not None
    except ModuleNotFoundError:  # no "cuda" namespace at all
        return False


def unusable_reason() -> str | None:
    """Why no GPU can be used here, with what to do about it; None when one can. Found once per process."""
    global _touched
    if _forked:
        return (
            "this process was forked after its parent used CUDA, which does not survive a fork; "
            "start it with multiprocessing's 'spawn' method"
        )
    reason = _probe()
    if reason is None:
        _touched = True
    return reason


def require_cupy() -> Any:
    """The CuPy module.

    Raises:
        BackendUnavailable: No GPU can be used; the message says why and what to install.
    """
    reason = unusable_reason()
    if reason is not None:
        raise BackendUnavailable(reason)
    import cupy

    return cupy


def import_cuda(name: str) -> ModuleType:
    """A module of cuda-core or cuda-bindings.

    They import one another, and of two threads that each wait for a module of the other Python shows one a half-made
    module: so one thread at a time imports them.

    Args:
        name: The module's full name.

    Raises:
        BackendUnavailable: It is not installed, or cannot be imported.
    """
    module = sys.modules.get(name) if name in _imported else None
    if module is not None:
        return module
    with _importing:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise BackendUnavailable(f"cuda-core is not installed ({error}); {INSTALL}") from error
        _imported.add(name)
    return module


def is_cupy(x: object) -> bool:
    """Whether ``x`` is a CuPy array. Imports nothing."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, getattr(cupy, "ndarray", ()))


def _lanes_per_sm(major: int, minor: int) -> int:
    known = [lanes for capability, lanes in _LANES_PER_SM.items() if capability <= (major, minor)]
    return known[-1] if known else 128


def device_props(device: int = 0) -> DeviceProps:
    """Query one device's properties.

    Args:
        device: Its CUDA ordinal.

    Raises:
        BackendUnavailable: No GPU can be used, or there is no device of that number.
    """
    if isinstance(device, bool) or not isinstance(device, int):
        raise TypeError(f"device_props: device is {device!r}, expected a device number such as 0")
    cupy = require_cupy()
    count = cupy.cuda.runtime.getDeviceCount()
    if not 0 <= device < count:
        raise BackendUnavailable(f"device_props: there is no device {device}; devices 0 to {count - 1} are visible")
    raw = cupy.cuda.runtime.getDeviceProperties(device)
    attributes = cupy.cuda.Device(device).attributes
    clock = int(attributes["ClockRate"])
    memory_clock, bus = int(attributes["MemoryClockRate"]), int(attributes["GlobalMemoryBusWidth"])
    major, minor, sm_count = int(raw["major"]), int(raw["minor"]), int(raw["multiProcessorCount"])
    bandwidth = 2.0 * memory_clock * 1e3 * bus / 8.0
    single = 2.0 * sm_count * _lanes_per_sm(major, minor) * clock * 1e3
    ratio = 1.0 / max(1, int(attributes.get("SingleToDoublePrecisionPerfRatio") or 1))
    name = raw["name"]
    return DeviceProps(
        name=name.decode() if isinstance(name, bytes) else str(name),
        cc_major=major,
        cc_minor=minor,
        sm_count=sm_count,
        clock_rate_khz=clock,
        memory_clock_rate_khz=memory_clock,
        memory_bus_width_bits=bus,
        shared_mem_per_block=int(raw["sharedMemPerBlock"]),
        shared_mem_per_sm=int(raw["sharedMemPerMultiprocessor"]),
        regs_per_block=int(raw["regsPerBlock"]),
        regs_per_sm=int(raw["regsPerMultiprocessor"]),
        warp_size=int(raw["warpSize"]),
        peak_bytes_per_s=bandwidth,
        peak_flops_sp=single,
        peak_flops_dp=single * ratio,
        fp64_ratio=ratio,
        ridge_flops_per_byte_sp=single / bandwidth if bandwidth else 0.0,
        ridge_flops_per_byte_dp=single * ratio / bandwidth if bandwidth else 0.0,
    )


def cuda_code(error: BaseException) -> int | None:
    """CUDA's number of an error that CuPy or cuda-core raised; None for any other exception."""
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return int(status)
    if type(error).__name__ != "CUDAError" or not error.args:
        return None
    # cuda-core words its errors "CUDA_ERROR_NAME: explanation" and keeps no number.
    driver = import_cuda("cuda.bindings.driver")
    word = str(error.args[0]).split(":", 1)[0].strip()
    value = getattr(driver.CUresult, word, None)
    return None if value is None else int(value)


def is_unrecoverable(code: int | None) -> bool:
    """Whether a CUDA error of that number leaves the device unusable for the rest of the process."""
    return code in UNRECOVERABLE


def describe(code: int) -> str:
    """CUDA's own words for an error number ("cudaErrorIllegalAddress: an illegal memory access ...")."""
    try:
        return str(require_cupy().cuda.runtime.CUDARuntimeError(code))
    except Exception:  # the words are a courtesy; a dying driver may refuse them
        return f"CUDA error {code}"


def report_fault(device: int, code: int, *, during: str | None = None) -> DeviceFault:
    """Remember that ``device`` has failed; every later use of it raises what this returns.

    Args:
        device: The device.
        code: CUDA's error number.
        during: Name of the pipeline or simulation whose work was in flight.

    Returns:
        A fault that names ``during``. The first fault of a device is the one remembered: later ones are its echoes.
    """
    work = f" while {during!r} was in flight" if during else ""
    fault = DeviceFault(
        f"CUDA device {device} failed{work}: {describe(code)}. This process cannot use the device again; "
        "start a new process, and run the kernel under compute-sanitizer to find the access",
        during,
        code,
    )
    with _lock:
        _faults.setdefault(device, fault)
    return fault


def fault_from(error: BaseException, device: int, *, during: str | None = None) -> DeviceFault | None:
    """The `DeviceFault` that ``error`` stands for, reported; None when the device survives it."""
    if isinstance(error, DeviceFault):
        return error
    code = cuda_code(error)
    if code is None or not is_unrecoverable(code):
        return None
    return report_fault(device, code, during=during)


def check_device(device: int) -> None:
    """Raise at once when ``device`` cannot be used (cheap: called before every use).

    Raises:
        DeviceFault: It has failed before; names what was in flight then.
        BackendUnavailable: This process is a fork of one that used CUDA.
    """
    if _forked:
        raise BackendUnavailable(str(unusable_reason()))
    if _faults:
        fault = _faults.get(device)
        if fault is not None:
            raise DeviceFault(str(fault), fault.pipeline, fault.code)


def has_failed(device: int) -> bool:
    """Whether a fault of ``device`` was reported."""
    return device in _faults


def healthy() -> bool:
    """False once any device has failed in this process: its CUDA work needs a new one."""
    return not _faults


def _after_fork() -> None:
    global _forked, _lock, _importing
    _lock, _importing = threading.Lock(), threading.RLock()
    _forked = _forked or _touched
    _probe.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
