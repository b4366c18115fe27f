"""A compiled device artifact (PTX, cubin or fatbin), loaded by the driver and checked against our binary interface.

Loading an artifact runs its code sooner or later: load only what you would also run.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from eagle.errors import AbiMismatch, ArtifactError
from eagle.kernels.abi import check_layout
from eagle.kernels.device import check_device, fault_from, require_cupy
from eagle.kernels.device_call import attribute, cuda_driver
from eagle.kernels.device_image import check_image

LEGACY_ENTRY = "raptor_kernel"
_TAG, _SIZES = "eagle_abi_tag", "eagle_layout_sizes"
_DEVICE_TO_HOST = 2
_NOT_FOUND = 500


class DeviceModule:
    """One artifact; the driver loads it on each device that first asks for an entry of it.

    Args:
        content: The artifact's bytes.
        name: The artifact, for error messages.
        abi: The ABI tag its sidecar declares; what the artifact itself exports must agree.

    Raises:
        ArtifactError: The bytes are no complete device image.
    """

    def __init__(self, content: bytes, *, name: str, abi: str) -> None:
        check_image(content, name)
        # The driver reads PTX up to a NUL; the binary formats carry their own length.
        self._content = content if content.endswith(b"\0") else content + b"\0"
        self._loaded: dict[int, Any] = {}
        self._functions: dict[tuple[int, str], Any] = {}
        self._lock = threading.Lock()
        self.name = name
        self.abi = abi

    def function(self, entry: str) -> Any:
        """The entry's function on the current device, loaded and ready to be captured.

        Raises:
            BackendUnavailable: No GPU can be used.
            AbiMismatch: The artifact exports another tag or other struct sizes than ours; holds both values.
            ArtifactError: The driver refuses the artifact, or it has no such entry.
        """
        device = require_cupy().cuda.runtime.getDevice()
        known = self._functions.get((device, entry))
        if known is not None:
            return known
        with self._lock:
            function = self._find(self._module(device), entry)
            # With lazy loading the code reaches the device at the first launch, which a capture would forbid.
            attribute(function, "num_regs")
            self._functions[device, entry] = function
        return function

    def has(self, entry: str) -> bool:
        """Whether the artifact has an entry of that name."""
        try:
            self.function(entry)
        except ArtifactError as error:
            if isinstance(error, AbiMismatch) or not isinstance(error.__cause__, Exception):
                raise
            return False
        return True

    def _module(self, device: int) -> Any:
        module = self._loaded.get(device)
        if module is None:
            check_device(device)
            module = require_cupy().cuda.function.Module()
            try:
                module.load(self._content)
            except Exception as error:
                fault = fault_from(error, device)
                raise (fault or ArtifactError(self._refusal(error))) from error
            tag = _global(module, _TAG, self.name).split(b"\0", 1)[0].decode("ascii", "replace")
            check_layout(tag, np.frombuffer(_global(module, _SIZES, self.name), np.uint64).tolist(), name=self.name)
            if tag != self.abi:
                raise AbiMismatch(
                    f"{self.name} exports eagle_abi_tag {tag!r} and its sidecar declares {self.abi!r}; they are not of "
                    "one build: rebuild the unit",
                    tag,
                    self.abi,
                )
            self._loaded[device] = module
        return module

    def _refusal(self, error: Exception) -> str:
        return (
            f"the CUDA driver refuses {self.name} ({error}); it may be damaged, built for another architecture, or by "
            "a CUDA newer than the driver: rebuild it for this device"
        )

    def _find(self, module: Any, entry: str) -> Any:
        try:
            return module.get_function(entry)
        except Exception as error:
            if getattr(error, "status", None) != _NOT_FOUND:
                raise
            raise ArtifactError(f"{self.name} has no entry {entry!r}; rebuild the unit with its sidecar") from error


def _global(module: Any, symbol: str, name: str) -> bytes:
    """The bytes of one global of a loaded module."""
    status, address, size = cuda_driver().cuModuleGetGlobal(module.ptr, symbol.encode())
    if int(status) != 0:
        raise AbiMismatch(f"{name} exports no {symbol}; expected one, so it was not built for eagle", None, symbol)
    content = np.empty(int(size), np.uint8)
    require_cupy().cuda.runtime.memcpy(content.ctypes.data, int(address), int(size), _DEVICE_TO_HOST)
    return content.tobytes()
