"""Kernels loaded from a device artifact and the sidecar beside it, called by argument names. No compiler is needed.

`LoadedVector` accumulates a contribution, `LoadedPure` updates its Mutables in place. Each can be called (arrays of any
framework, result in the same one) and launched (CuPy arrays only, capture-legal). Loading an artifact runs its code
sooner or later: load only what you would also run.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle.errors import ArtifactError
from eagle.kernels.coerce import coerce
from eagle.kernels.device import is_cupy, require_cupy
from eagle.kernels.device_image import read_artifact
from eagle.kernels.interop import detect, origin_adapter, to_cupy
from eagle.kernels.launch import issue, launch_bound, written
from eagle.kernels.module import LEGACY_ENTRY, DeviceModule
from eagle.kernels.sidecar import Sidecar, read_sidecar

if TYPE_CHECKING:
    from os import PathLike

    from eagle.kernels.roles import Arg


class LoadedKernel:
    """What both kinds of loaded kernel share: the sidecar, the ABI checks and the driver's module.

    Args:
        ptx_path: The artifact (.ptx, .cubin or .fatbin); its sidecar is the .json of the same name beside it.
        abi_kind: The pattern the sidecar must have, "vector" or "pure".

    Attributes:
        abi_tag: The artifact's ABI generation ("aether-abi/1" or "aether-abi/2").
        param_names: Names of the uniforms, in order.
        sidecar: The parsed sidecar.

    Raises:
        FileNotFoundError: The sidecar or the artifact is missing.
        AbiMismatch: Its ABI tag or struct sizes are not ours; found in the sidecar before the driver is asked.
        ArtifactError: The sidecar is damaged or of another pattern, or the driver refuses the artifact.
        BackendUnavailable: No GPU can be used.
    """

    def __init__(self, ptx_path: str | PathLike[str], *, abi_kind: str) -> None:
        path = Path(ptx_path)
        self.sidecar: Sidecar = read_sidecar(path.with_suffix(".json"), kind=f"{abi_kind} plugin")
        if self.sidecar.pattern != abi_kind:
            raise ArtifactError(
                f"{path}: its sidecar declares a {self.sidecar.pattern!r} kernel, this loads {abi_kind!r} ones; use "
                f"{'LoadedVector' if self.sidecar.pattern == 'vector' else 'LoadedPure'} or eagle.load_manifest"
            )
        self._meta = self.sidecar.meta
        self.abi_tag = self.sidecar.abi
        self.param_names = tuple(arg.name for arg in self.sidecar.args if arg.role == "uniform")
        self.__name__ = path.stem if self.sidecar.name == LEGACY_ENTRY else self.sidecar.name
        self._counts = {b["name"]: int(b["count"]) for b in self._meta.get("buffers") or () if b.get("count")}
        accumulated = {arg.name for arg in self._args if arg.role == "accum_out"}
        self._exempt = accumulated | {
            str(name) for name in self._meta.get("accum_outputs") or () if isinstance(name, str)
        }
        require_cupy()
        self._module = DeviceModule(read_artifact(path), name=str(path), abi=self.abi_tag)
        self._function()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.__name__!r} ({self.abi_tag})>"

    @property
    def _args(self) -> tuple[Arg, ...]:
        return self.sidecar.args

    def _function(self) -> Any:
        return self._module.function(self.sidecar.name)

    def _placed(self, given: dict[str, Any]) -> Any:
        """A context on the device that holds the arrays; planes on two devices are refused by name."""
        found: dict[int, str] = {}
        for name, value in given.items():
            adapter = detect(value)
            device = None if adapter is None else adapter.device_id(value)
            if device is not None:
                found.setdefault(device, name)
        if len(found) > 1:
            where = ", ".join(f"{name!r} on device {device}" for device, name in found.items())
            raise ValueError(f"{self.__name__}: planes on several devices ({where}); move them to one")
        return require_cupy().cuda.Device(next(iter(found))) if found else nullcontext()


class LoadedVector(LoadedKernel):
    """A precompiled vector kernel: it adds its contribution to ``out``, a (W, n) plane.

    Args:
        ptx_path: The artifact; see `LoadedKernel`, also for what it raises.
    """

    def __init__(self, ptx_path: str | PathLike[str]) -> None:
        super().__init__(ptx_path, abi_kind="vector")
        self._out = next((arg for arg in self._args if arg.role == "out"), None)
        if self._out is None:
            raise ArtifactError(f"{ptx_path}: a vector kernel needs an 'out' role in its arg_spec; rebuild the unit")

    def __call__(self, *, out: Any = None, **kw: Any) -> Any:
        """Allocate, launch and return the contribution in the caller's framework.

        Blocking when the result is a NumPy array; otherwise queued on the current stream, and the framework's own
        stream waits for it.

        Args:
            out: A device buffer (W, n) to fill instead of a new one: a CuPy array or another framework's CUDA tensor.
            **kw: The kernel's arguments by name, arrays of any framework and numbers.

        Returns:
            ``out`` itself when given, else a new (W, n) array.

        Raises:
            TypeError: An argument is missing or unknown, or ``out`` is no device buffer.
            ValueError: A plane has the wrong shape, dtype or length.
        """
        what, declared = self.__name__, self._out
        assert declared is not None
        with self._placed(kw if out is None else {**kw, "out": out}):
            target = None if out is None else self._out_buffer(out)
            n = None if target is None else int(target.shape[1])
            values, n = coerce(self._args, kw, counts=self._counts, exempt=self._exempt, n=n, what=what)
            cupy = require_cupy()
            if target is None:
                target = cupy.zeros((declared.width, n), declared.dtype)
            else:
                target.fill(0)
            values[declared.name] = target
            issue(self._function(), self._args, values, n)
            if out is None:
                return origin_adapter(self._candidates(kw)).from_cupy(target)
            _hand_back(out, target)
        return out

    def launch(self, *, out: Any, grid: Any = None, block: Any = None, **kw: Any) -> Any:
        """One launch on the current stream that adds into ``out``; allocates nothing and may be captured.

        Args:
            out: The (W, n) CuPy plane.
            grid: Blocks; None gives every sample a thread.
            block: Threads of a block; None picks them from the kernel's attributes and the device.
            **kw: The kernel's arguments by name: CuPy arrays of the final dtype, and numbers.

        Returns:
            ``out``.
        """
        return launch_bound(
            self._function(),
            self._args,
            kw,
            out=out,
            grid=grid,
            block=block,
            exempt=self._exempt,
            what=f"{self.__name__}.launch",
        )

    def _candidates(self, kw: dict[str, Any]) -> list[Any]:
        return [kw[arg.name] for arg in self._args if arg.role in ("vec_in", "mat_in", "per_sample") and arg.name in kw]

    def _out_buffer(self, out: Any) -> Any:
        """The CuPy alias of a given ``out``: the same memory, or a refusal."""
        declared, adapter = self._out, detect(out)
        assert declared is not None
        if adapter is None or not adapter.is_device(out) or not adapter.writable(out):
            raise TypeError(
                f"{self.__name__}: out is a {type(out).__name__}; pass a writable device buffer, or leave it out"
            )
        alias = to_cupy(out)
        fits = alias.ndim == 2 and alias.shape[0] == declared.width and alias.dtype == declared.dtype
        if not fits or not alias.flags.c_contiguous:
            raise ValueError(
                f"{self.__name__}: out has shape {alias.shape} and dtype {alias.dtype}, expected a contiguous "
                f"({declared.width}, n) plane of {declared.dtype}"
            )
        return alias


class LoadedPure(LoadedKernel):
    """A precompiled pure kernel: it updates its Mutables, which are its result.

    Args:
        ptx_path: The artifact; see `LoadedKernel`, also for what it raises.
    """

    def __init__(self, ptx_path: str | PathLike[str]) -> None:
        super().__init__(ptx_path, abi_kind="pure")

    def __call__(self, **kw: Any) -> dict[str, Any]:
        """Launch and return the updated Mutables, in the caller's framework.

        Device arrays are updated in place and returned as they are; what was given as a NumPy array comes back as a new
        one. Blocking when the result is NumPy; otherwise queued on the current stream.

        Args:
            **kw: The kernel's arguments by name. A number for a Mutable fills it; one left out gets its declared
                default, or zeros where the kernel does not read it first.

        Raises:
            TypeError: An argument is missing or unknown, or none carries the number of samples.
            ValueError: A plane has the wrong shape, dtype or length.
        """
        with self._placed(kw):
            values, n = coerce(self._args, kw, counts=self._counts, exempt=self._exempt, what=self.__name__)
            issue(self._function(), self._args, values, n)
            adapter = origin_adapter(value for name, value in kw.items() if name in values)
            results = {}
            for name, array in written(self._args, values).items():
                given = detect(kw.get(name))
                if given is not None and given.is_device(kw[name]):
                    _hand_back(kw[name], array)
                    results[name] = kw[name]
                else:
                    results[name] = adapter.from_cupy(array)
        return results

    def launch(self, *, grid: Any = None, block: Any = None, **kw: Any) -> Any:
        """One launch on the current stream; allocates nothing and may be captured.

        Args:
            grid: Blocks; None gives every sample a thread.
            block: Threads of a block; None picks them from the kernel's attributes and the device.
            **kw: Every argument by name: CuPy arrays of the final dtype (the mask too), and numbers.

        Returns:
            The Mutables by name: the arrays that were passed, updated in place.
        """
        return launch_bound(
            self._function(),
            self._args,
            kw,
            grid=grid,
            block=block,
            exempt=self._exempt,
            what=f"{self.__name__}.launch",
        )


def _hand_back(given: Any, alias: Any) -> None:
    """Let the framework that owns a buffer wait for the kernel that wrote it."""
    adapter = detect(given)
    if adapter is not None and not is_cupy(given):
        adapter.wait_for(alias)


def load_kernel(path: str | PathLike[str], pattern: str) -> LoadedKernel:
    """The loaded kernel of a pattern, "vector" or "pure".

    Raises:
        ArtifactError: The pattern has no loader.
    """
    if pattern == "vector":
        return LoadedVector(path)
    if pattern == "pure":
        return LoadedPure(path)
    raise ArtifactError(f"{path}: no kernel of pattern {pattern!r} is launched by name; use eagle.load_manifest")
