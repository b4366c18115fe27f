"""Building units from hawk kernels: a content-addressed store that threads and processes may share.

A unit's folder is named by a digest of everything its code depends on (the traced kernels, precision, targets, hawk's
version, this CPU), so a second deploy finds it and compiles nothing. Units are built under a private name and renamed
into place; a reader sees a whole unit or none. Every unit is checked against its digests before use, and one that is
damaged, or was built for another CPU, is moved aside and built again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from eagle.errors import ArtifactError, BackendUnavailable
from eagle.kernels.fork_lock import ForkLock
from eagle.kernels.unit import Unit, check_record, cpu_identity, read_unit, write_record

log = logging.getLogger("eagle")
_key_locks: dict[str, ForkLock] = {}


def cache_root(cache_dir: str | os.PathLike[str] | None) -> Path:
    """The folder units are kept under: ``cache_dir``, $HAWK_CACHE_DIR, $XDG_CACHE_HOME/hawk or ~/.cache/hawk.

    Raises:
        TypeError: ``cache_dir`` is no path.
        ValueError: It is empty.
    """
    if cache_dir is not None:
        named = os.fspath(cache_dir) if isinstance(cache_dir, os.PathLike) else cache_dir
        if not isinstance(named, str):
            raise TypeError(f"cache_dir={cache_dir!r}: expected a folder's path as a str or a Path, or None")
        if not named:
            raise ValueError("cache_dir is empty; name a folder, or leave it out for $HAWK_CACHE_DIR or ~/.cache/hawk")
        return Path(named).expanduser().absolute()  # the program may change its folder before the next build
    chosen = os.environ.get("HAWK_CACHE_DIR")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).absolute() if base else Path.home() / ".cache") / "hawk"


def is_hawk_kernel(value: object) -> bool:
    """Whether ``value`` is a hawk kernel, without importing hawk."""
    return type(value).__module__.partition(".")[0] == "hawk" and hasattr(value, "walk") and hasattr(value, "planes")


@lru_cache(maxsize=256)  # kernels are told apart by identity, and never change once they are traced
def lowered_dispatch(kernel: Any) -> Any:
    """A hawk kernel with each dispatch whose policy it leaves to the runtime lowered as a switch.

    Raises:
        ValueError: It declares a dispatch as segmented: hawk then builds a kernel per branch, which no plan runs.
    """
    policies = {dispatch.name: dispatch.policy for dispatch in kernel.walk.dispatches}
    segmented = [name for name, policy in policies.items() if policy == "segmented"]
    if segmented:
        raise ValueError(
            f"{kernel.name!r} declares {', '.join(segmented)} as segmented, which makes a kernel of every branch; use "
            "policy='switch', 'predicated' or 'auto'"
        )
    undecided = {name: "switch" for name, policy in policies.items() if policy == "auto"}
    if not undecided:
        return kernel
    from hawk import resolve_dispatch

    return resolve_dispatch(kernel, undecided)


def _kernel_text(kernel: Any) -> str:
    """Everything about a traced kernel that its code depends on."""
    from hawk.artifact.unit_cache import declaration_digest

    parts = (
        kernel.name,
        kernel.walk.digest,
        declaration_digest(kernel),
        kernel.source_digest,
        repr(kernel.walk.finish),
        repr(kernel.kind),
        kernel.group,
        kernel.lane_space,
    )
    return "|".join(str(part) for part in parts)


@cache
def _hawk_version() -> str:
    return importlib.metadata.version("raptor-hawk")


def unit_key(kernels: Sequence[Any], scalar_type: str, target: str, arch: str = "") -> str:
    """The digest that names a unit's folder.

    Args:
        kernels: hawk kernels, in the order of the bundle.
        scalar_type: Precision of the build.
        target: "host" or "cuda".
        arch: Device architecture, for "cuda".
    """
    environment = [os.environ.get(name, "") for name in ("HAWK_HOST_PROFILE", "HAWK_OPT_LEVEL", "HAWK_CXX", "CXX")]
    parts = [_hawk_version(), scalar_type, target, arch, cpu_identity(), *environment]
    parts += [_kernel_text(kernel) for kernel in kernels]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def require_compiler() -> None:
    """Refuse a host build where no C++ compiler can be found.

    Raises:
        BackendUnavailable: Neither $HAWK_CXX, $CXX, g++ nor the ziglang wheel is here; says what to install.
    """
    named = [os.environ.get(name, "").split(" ")[0] for name in ("HAWK_CXX", "CXX")]
    if any(shutil.which(name) for name in [*filter(None, named), "g++"]) or importlib.util.find_spec("ziglang"):
        return
    raise BackendUnavailable(
        "building a kernel for the CPU needs a C++ compiler and none was found; install g++ (apt-get install g++) "
        "or `pip install ziglang`, or name one in $HAWK_CXX"
    )


@contextlib.contextmanager
def _sole_builder(bundles: Path, key: str) -> Iterator[None]:
    """One builder of a unit at a time, among this process's threads and among processes where the system has flock."""
    with _key_locks.setdefault(f"{bundles}/{key}", ForkLock()), contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            import fcntl

            # The folder itself carries the lock, so no lock file is left behind.
            descriptor = os.open(bundles, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            with contextlib.suppress(OSError):  # a file system without locks: builders then race, and one rename wins
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # Closing would not do: a child forked meanwhile shares the lock, and would keep it for its whole life.
                stack.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        yield


def _usable(folder: Path, key: str) -> Unit | None:
    if not folder.exists():
        return None
    try:
        check_record(folder, key)
        return read_unit(folder)
    except ArtifactError as error:
        log.info("rebuilding a cached unit: %s", error)
        return None


def build_unit(
    kernels: Sequence[Any],
    *,
    target: str,
    scalar_type: str,
    cache_dir: str | os.PathLike[str] | None,
    arch: str = "",
    rebuild: bool = False,
) -> Unit:
    """The unit of ``kernels``, from the store or built now.

    Args:
        kernels: hawk kernels; one bundle.
        target: "host" or "cuda".
        scalar_type: "float64" or "float32".
        cache_dir: The store's folder, or None for the default.
        arch: Device architecture ("sm_90"), for "cuda".
        rebuild: Build again although the stored unit looks whole (it did not load).

    Raises:
        BackendUnavailable: No compiler can be found.
        hawk.ir.HawkError: hawk cannot build these kernels.
        PermissionError: The store cannot be written.
    """
    key = unit_key(kernels, scalar_type, target, arch)
    bundles = cache_root(cache_dir) / "bundles"
    folder = bundles / key
    unit = None if rebuild else _usable(folder, key)
    if unit is not None:
        return unit
    if target == "host":
        require_compiler()
    _make_store(bundles)
    options: dict[str, Any] = {"mode": scalar_type, "targets": (target,)}
    if target == "cuda":
        options |= {"device_arch": arch, "defines": ("HAWK_FAST_ENTRIES=1",)}
    same: Any = {"target": target, "scalar_type": scalar_type, "cache_dir": cache_dir, "arch": arch}
    for kernel, primal in _derivatives(kernels):
        options.setdefault("derivative", {})[kernel.name] = (primal.name, build_unit([primal], **same).digest)
    with _sole_builder(bundles, key):
        unit = None if rebuild else _usable(folder, key)  # another builder may have finished meanwhile
        return unit or _build(kernels, bundles, folder, key, options)


def _derivatives(kernels: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Derivative kernels whose primal is neither in the bundle nor named by its unit, each with its primal."""
    names = {kernel.name for kernel in kernels}
    for kernel in kernels:
        primal = getattr(kernel.sinks, "source", None)
        if primal is not None and kernel.sinks.primal_unit is None and primal.name not in names:
            yield kernel, primal


def _make_store(bundles: Path) -> None:
    try:
        bundles.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=bundles):
            pass
    except OSError as error:
        why = f"kernels cannot be built: {bundles} is not writable; pass cache_dir= or set $HAWK_CACHE_DIR"
        raise PermissionError(errno.EACCES, f"{why} ({error.strerror})") from error


def _build(kernels: Sequence[Any], bundles: Path, folder: Path, key: str, options: Mapping[str, Any]) -> Unit:
    import hawk

    private = Path(tempfile.mkdtemp(prefix=".tmp-", dir=bundles))
    try:
        # hawk maps what its compile cache holds unchecked, and a damaged file there kills the process; a private
        # cache holds only what this build has written.
        hawk.build(list(kernels), private / "unit", cache_dir=private / "compile", **options)
        write_record(private / "unit", key)
        if folder.exists():
            os.rename(folder, private / "replaced")
        with contextlib.suppress(OSError):  # a builder without locks won: its unit is as good as ours
            os.rename(private / "unit", folder)
    finally:
        shutil.rmtree(private, ignore_errors=True)
    return read_unit(folder)
