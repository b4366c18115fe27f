"""Arrays of other frameworks: which one an object belongs to, and how it crosses to NumPy or CuPy and back.

No framework is imported here. An object is recognised by the classes of modules that are loaded already (an object of a
framework cannot exist before its module does), everything else by the DLPack protocol. Crossings share memory wherever
the framework lets them; those of device arrays are ordered by the DLPack stream exchange: what the producer has queued
runs before eagle's work on CuPy's current stream, and that before what the caller's framework queues next.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from eagle.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ("Adapter", "detect", "is_capturing", "let_frameworks_wait", "origin_adapter", "to_cupy")

# DLPack's device types: memory a CPU can read as it is, and memory CuPy can.
_HOST_TYPES = (1, 3)  # CPU, CUDA pinned host memory
_CUDA_TYPES = (2, 13)  # CUDA, CUDA managed memory


class Adapter(ABC):
    """How arrays of one framework cross to NumPy and CuPy and back; one instance a framework, without state.

    Attributes:
        name: "numpy", "cupy", "torch", "jax", "tensorflow", "warp" or "dlpack".
        strong: Whether results go back to this framework whatever else is among the arguments.
    """

    name: ClassVar[str]
    strong: ClassVar[bool] = False

    def is_device(self, x: Any) -> bool:
        """Whether `x` lies in CUDA memory."""
        return _dlpack_device(x)[0] in _CUDA_TYPES

    def device_id(self, x: Any) -> int | None:
        """The CUDA ordinal of the device that holds `x`, None for host memory."""
        kind, index = _dlpack_device(x)
        return index if kind in _CUDA_TYPES else None

    def writable(self, x: Any) -> bool:
        """Whether a kernel may write into `x`; False for arrays that are immutable or read-only."""
        return True

    @abstractmethod
    def to_numpy(self, x: Any) -> np.ndarray:
        """A NumPy view of `x` where it lies on the host, read-only where `x` is; a copy when it lies on a device."""

    @abstractmethod
    def from_numpy(self, array: np.ndarray) -> Any:
        """`array` as a host array of this framework, sharing memory unless the framework's arrays are immutable."""

    def to_cupy(self, x: Any) -> Any:
        """`x` as a CuPy array: the same memory when it lies on a device, an upload to the current device otherwise.

        Raises:
            BackendUnavailable: No GPU can be used, or the current stream is being captured.
        """
        cupy = _cupy_outside_capture(self.name)
        if not self.is_device(x):
            return cupy.asarray(self.to_numpy(x))
        # CuPy asks the producer with the current stream of this device: the array is safe to use on that one.
        with cupy.cuda.Device(self.device_id(x)):
            return cupy.from_dlpack(x)

    @abstractmethod
    def from_cupy(self, array: Any) -> Any:
        """`array` in this framework, the same memory where it can; the framework waits for CuPy's current stream."""

    def wait_for(self, array: Any) -> None:  # noqa: B027 - frameworks that share CuPy's stream have nothing to do
        """Let this framework's own stream wait for work on `array` that CuPy's current stream holds.

        Called with the CuPy alias of an argument that a kernel wrote in place: what the caller then queues in the
        framework reads the new values.
        """


class _NumPy(Adapter):
    name = "numpy"

    def is_device(self, x: Any) -> bool:
        return False

    def device_id(self, x: Any) -> int | None:
        return None

    def writable(self, x: Any) -> bool:
        return isinstance(x, np.ndarray) and x.flags.writeable

    def to_numpy(self, x: Any) -> np.ndarray:
        return x if isinstance(x, np.ndarray) else np.asarray(x)

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def to_cupy(self, x: Any) -> Any:
        return _upload(x)

    def from_cupy(self, array: Any) -> np.ndarray:
        host: np.ndarray = array.get()
        return host


class _CuPy(Adapter):
    name = "cupy"

    def is_device(self, x: Any) -> bool:
        return True

    def device_id(self, x: Any) -> int | None:
        return int(x.device.id)

    def to_numpy(self, x: Any) -> np.ndarray:
        host: np.ndarray = x.get()
        return host

    def from_numpy(self, array: np.ndarray) -> Any:
        return _upload(array)

    def to_cupy(self, x: Any) -> Any:
        return x

    def from_cupy(self, array: Any) -> Any:
        return array


class _Torch(Adapter):
    name = "torch"
    strong = True

    def is_device(self, x: Any) -> bool:
        return bool(x.is_cuda)

    def device_id(self, x: Any) -> int | None:
        return int(x.device.index) if x.is_cuda else None

    def to_numpy(self, x: Any) -> np.ndarray:
        _check_torch(x)
        host: np.ndarray = (x.cpu() if x.is_cuda else x).numpy()
        return host

    def from_numpy(self, array: np.ndarray) -> Any:
        # torch has no read-only tensors: one over read-only memory would write where the owner forbade it.
        return _module("torch").from_numpy(array if array.flags.writeable else array.copy())

    def to_cupy(self, x: Any) -> Any:
        _check_torch(x)
        torch = _module("torch")
        if not x.is_cuda or x.dtype is not torch.bool:
            return super().to_cupy(x)
        # Not every release of the two exchanges booleans; the bytes are the same.
        return super().to_cupy(x.view(torch.uint8)).view(np.bool_)

    def from_cupy(self, array: Any) -> Any:
        torch = _module("torch")
        if array.dtype != np.bool_:
            return torch.from_dlpack(array)
        return torch.from_dlpack(array.view(np.uint8)).view(torch.bool)

    def wait_for(self, array: Any) -> None:
        self.from_cupy(array)


class _Jax(Adapter):
    name = "jax"
    strong = True

    def is_device(self, x: Any) -> bool:
        _check_jax(x)
        return super().is_device(x)

    def device_id(self, x: Any) -> int | None:
        _check_jax(x)
        return super().device_id(x)

    def writable(self, x: Any) -> bool:
        return False

    def to_numpy(self, x: Any) -> np.ndarray:
        _check_jax(x)
        return np.asarray(x)

    def from_numpy(self, array: np.ndarray) -> Any:
        # A JAX array never changes, so it may not share memory that a later run writes. Without jax_enable_x64 JAX
        # has no float64 and narrows, here as everywhere.
        return _module("jax").numpy.array(array, copy=True)

    def from_cupy(self, array: Any) -> Any:
        if not array.flags.c_contiguous:
            array = array.copy(order="C")
        return _module("jax").dlpack.from_dlpack(array)


class _TensorFlow(Adapter):
    name = "tensorflow"
    strong = True

    def is_device(self, x: Any) -> bool:
        _check_tensorflow(x)
        return "GPU:" in x.device

    def device_id(self, x: Any) -> int | None:
        return int(x.device.rsplit("GPU:", 1)[1]) if self.is_device(x) else None

    def writable(self, x: Any) -> bool:
        return False

    def to_numpy(self, x: Any) -> np.ndarray:
        _check_tensorflow(x)
        return np.asarray(x.numpy())

    def from_numpy(self, array: np.ndarray) -> Any:
        return _module("tensorflow").constant(array)  # immutable as JAX's arrays are, and copied for the same reason

    def to_cupy(self, x: Any) -> Any:
        cupy = _cupy_outside_capture(self.name)
        if not self.is_device(x):
            return cupy.asarray(self.to_numpy(x))
        # TensorFlow's exchange has no stream argument, so its queue is emptied first.
        experimental = _module("tensorflow").experimental
        experimental.sync_devices()
        with cupy.cuda.Device(self.device_id(x)):
            return cupy.from_dlpack(experimental.dlpack.to_dlpack(x))

    def from_cupy(self, array: Any) -> Any:
        with array.device:
            _cupy().cuda.get_current_stream().synchronize()
            return _module("tensorflow").experimental.dlpack.from_dlpack(array.__dlpack__())


class _Warp(Adapter):
    name = "warp"

    def is_device(self, x: Any) -> bool:
        return bool(x.device.is_cuda)

    def device_id(self, x: Any) -> int | None:
        return int(x.device.ordinal) if x.device.is_cuda else None

    def to_numpy(self, x: Any) -> np.ndarray:
        host: np.ndarray = x.numpy()
        return host

    def from_numpy(self, array: np.ndarray) -> Any:
        warp = _module("warp")
        return warp.from_dlpack(array) if array.flags.writeable else warp.from_numpy(array, device="cpu")

    def from_cupy(self, array: Any) -> Any:
        return _module("warp").from_dlpack(array)

    def wait_for(self, array: Any) -> None:
        self.from_cupy(array)


class _DLPack(Adapter):
    """Any other producer of the protocol; there is no way back into it, so results are NumPy or CuPy arrays."""

    name = "dlpack"

    def writable(self, x: Any) -> bool:
        if self.is_device(x):
            interface = getattr(x, "__cuda_array_interface__", None)
            return not (isinstance(interface, dict) and interface["data"][1])
        return bool(self.to_numpy(x).flags.writeable)

    def to_numpy(self, x: Any) -> np.ndarray:
        if self.is_device(x):
            host: np.ndarray = self.to_cupy(x).get()
            return host
        return np.from_dlpack(x)

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def from_cupy(self, array: Any) -> Any:
        return array


_NUMPY = _NumPy()
_DLPACK = _DLPack()
_FRAMEWORKS: tuple[tuple[str, str, Adapter], ...] = (
    ("cupy", "ndarray", _CuPy()),
    ("torch", "Tensor", _Torch()),
    ("jax", "Array", _Jax()),
    ("tensorflow", "Tensor", _TensorFlow()),
    ("warp", "array", _Warp()),
)
# What has been recognised once; negative answers are not kept, since a framework may be loaded later.
_seen: weakref.WeakKeyDictionary[type, Adapter] = weakref.WeakKeyDictionary()


def detect(x: object) -> Adapter | None:
    """Say which framework `x` is an array of, importing none.

    Args:
        x: Anything.

    Returns:
        The framework's adapter; the generic one for any other object with ``__dlpack__``; None for what is no array
        (numbers, strings, lists, None). NumPy arrays and NumPy scalars share one adapter.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return _NUMPY
    kind = type(x)
    adapter = _seen.get(kind)
    if adapter is None:
        adapter = _recognise(x)
        if adapter is not None:
            _seen[kind] = adapter
    return adapter


def origin_adapter(candidates: Iterable[object]) -> Adapter:
    """Pick the adapter that a kernel's results go back through.

    Args:
        candidates: The state-vector inputs in signature order; what is no array is passed over.

    Returns:
        The strong framework (torch, jax, tensorflow) among them; else that of the first one on a device (a Warp array
        counts wherever it lies); else NumPy's.

    Raises:
        TypeError: Two strong frameworks are mixed; it names both.
    """
    strong: Adapter | None = None
    device: Adapter | None = None
    for x in candidates:
        adapter = detect(x)
        if adapter is None or adapter is _NUMPY:
            continue
        if adapter.strong:
            if strong is not None and strong is not adapter:
                raise TypeError(
                    f"arrays of {strong.name} and of {adapter.name} are mixed in one call; results can go back to one "
                    f"of them only: convert all arguments to {strong.name} or all to {adapter.name}"
                )
            strong = adapter
        elif device is None and (adapter.name == "warp" or adapter.is_device(x)):
            device = adapter
    return strong or device or _NUMPY


def to_cupy(x: object) -> Any:
    """Import an array of any framework as a CuPy array.

    Args:
        x: A CuPy array (returned as it is), an array of another framework, any DLPack or ``__cuda_array_interface__``
            producer, or numbers (nested lists too).

    Returns:
        The same memory when `x` lies on a device, safe to use on CuPy's current stream; else an upload to the current
        device.

    Raises:
        BackendUnavailable: No GPU can be used, or the current stream is being captured and `x` is no CuPy array.
        TypeError: `x` holds no numbers.
    """
    _cupy()  # without a device every argument is refused alike
    adapter = detect(x)
    if adapter is not None:
        return adapter.to_cupy(x)
    if hasattr(x, "__cuda_array_interface__") and not isinstance(x, type):
        return _cupy_outside_capture(type(x).__name__).asarray(x)
    return _upload(x)


def let_frameworks_wait(arguments: Iterable[tuple[object, Any]]) -> None:
    """Let every framework among the arguments of a device call wait for what CuPy's current stream holds.

    Called behind the launch, for arguments that no result hands back: what was written in place is then seen by the
    framework's next operation, and memory that it frees is not used again under the running kernel.

    Args:
        arguments: Each argument as the caller gave it, with a CuPy array on the device of the call.
    """
    told: set[str] = set()
    for given, alias in arguments:
        adapter = detect(given)
        if adapter is not None and adapter.name not in told and adapter.is_device(given):
            told.add(adapter.name)
            adapter.wait_for(alias)


def is_capturing() -> bool:
    """Whether CuPy's current stream is being captured into a graph, so that it takes no upload and no wait."""
    cupy = _cupy()
    try:
        return bool(cupy.cuda.runtime.streamIsCapturing(cupy.cuda.get_current_stream().ptr))
    except cupy.cuda.runtime.CUDARuntimeError:
        return True  # the legacy stream while a stream that it waits for is captured: the answer is an error


def _recognise(x: object) -> Adapter | None:
    if isinstance(x, type):
        return None
    for module, name, adapter in _FRAMEWORKS:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and isinstance(x, kind):
            return adapter
    return _DLPACK if hasattr(x, "__dlpack__") else None


def _dlpack_device(x: Any) -> tuple[int, int]:
    """DLPack's (device type, index) of `x`; refuses what neither the CPU nor CUDA can read."""
    ask = getattr(x, "__dlpack_device__", None)
    if ask is None:
        raise TypeError(f"{type(x).__name__} has __dlpack__ but no __dlpack_device__; pass it as a NumPy array instead")
    try:
        kind, index = ask()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"__dlpack_device__ of {type(x).__name__} gives no pair of device type and index; pass it as a NumPy array"
        ) from error
    if int(kind) not in _HOST_TYPES + _CUDA_TYPES:
        raise TypeError(
            f"{type(x).__name__} lies on a device of DLPack type {int(kind)}; eagle reads host memory (1, 3) and CUDA "
            "memory (2, 13): copy it there first"
        )
    return int(kind), int(index)


def _check_torch(x: Any) -> None:
    if x.requires_grad:
        raise ValueError("this torch tensor requires grad and eagle records no gradients; pass x.detach()")
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"this torch tensor lies on {x.device}; move it to 'cpu' or 'cuda' first")
    if x.layout is not _module("torch").strided:
        raise ValueError(f"this torch tensor has layout {x.layout}; pass x.to_dense()")


def _check_jax(x: Any) -> None:
    if any(base.__name__ == "Tracer" for base in type(x).__mro__):
        raise TypeError(
            f"{type(x).__name__} is a value that JAX is tracing, not an array: call eagle outside of jax.jit, vmap and "
            "grad, or through jax.pure_callback"
        )
    if len(x.devices()) != 1:
        raise ValueError(
            f"this JAX array is spread over {len(x.devices())} devices; gather it on one with jax.device_put first"
        )


def _check_tensorflow(x: Any) -> None:
    if not hasattr(x, "numpy"):
        raise TypeError("this TensorFlow tensor is symbolic; call eagle outside of tf.function")


def _module(name: str) -> Any:
    return sys.modules[name]


def _cupy() -> Any:
    from eagle.kernels.device import require_cupy

    return require_cupy()


def _cupy_outside_capture(what: str) -> Any:
    cupy = _cupy()
    if is_capturing():
        raise BackendUnavailable(
            f"the current stream is being captured into a graph, and importing a {what} array may upload or wait; call "
            "eagle.to_cupy before the capture and use the CuPy array in it"
        )
    return cupy


def _upload(x: object) -> Any:
    host = np.asarray(x)
    if host.dtype.kind not in "biufc":
        raise TypeError(
            f"{type(x).__name__} gives a NumPy array of {host.dtype}, which no device holds; pass an array or a nested "
            "list of numbers"
        )
    return _cupy_outside_capture("numpy").asarray(host)
