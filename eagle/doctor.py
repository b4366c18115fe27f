"""``python -m eagle doctor``: what is installed, which targets work, why not, and what to do about it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import eagle
from eagle.errors import BackendUnavailable
from eagle.kernels.build import cache_root, require_compiler
from eagle.kernels.team import core_count

__all__ = ("doctor",)

# A first build through the ziglang wheel takes about a minute; a hang is a hang after three.
_SELF_TEST_S = 180.0

# What eagle needs, then what extends it, each with the extra that brings it.
_NEEDED = ("numpy", "anyio", "uvloop", "raptor-core")
_OPTIONAL = (
    ("raptor-hawk", "kernels are written and built with it", "eagle-aio[hawk]"),
    ("cuda-core", "CUDA graphs", "eagle-aio[cuda12]' or '[cuda13]"),
    ("tqdm", "progress bars", "eagle-aio[progress]"),
    ("matplotlib", "plots of the examples", "eagle-aio[plot]"),
    ("torch", "its tensors pass through DLPack", None),
    ("jax", "its arrays pass through DLPack", None),
)
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


@dataclass(frozen=True)
class _Verdict:
    """What became of one target: does it work, should it, and the lines to print."""

    target: str
    works: bool
    expected: bool
    lines: tuple[str, ...]


def doctor() -> int:
    """Print the report on standard output and return the exit status: 1 when a target that should work does not.

    The host should always work; the device when CuPy is installed. Takes about a second a target, more when a kernel
    has to be built first.
    """
    print(f"eagle {eagle.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    _heading("Packages")
    for line in _packages():
        print("  " + line)
    _heading("Machine")
    for line in _machine():
        print("  " + line)
    _heading("Targets")
    verdicts = [_examine("host", expected=True), _examine("cuda", expected=_cupy() is not None)]
    for verdict in verdicts:
        mark = "works" if verdict.works else "DOES NOT WORK" if verdict.expected else "not set up"
        print(f"  {verdict.target:<5} {mark}")
        for line in verdict.lines:
            print("        " + line)
    broken = [verdict.target for verdict in verdicts if verdict.expected and not verdict.works]
    print()
    print(f"{' and '.join(broken)} should work and does not; see above." if broken else "All that should work does.")
    return 1 if broken else 0


def _heading(text: str) -> None:
    print()
    print(text)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cupy() -> tuple[str, str] | None:
    """Return the name and version of the CuPy distribution that is installed."""
    for name in _CUPY:
        version = _version(name)
        if version is not None:
            return name, version
    return None


def _packages() -> list[str]:
    lines = [f"{name:<14} {_version(name) or 'MISSING; pip install eagle-aio brings it'}" for name in _NEEDED]
    cupy = _cupy()
    missing = "not installed (the GPU; pip install 'eagle-aio[cuda12]' or '[cuda13]')"
    lines.append(f"{'cupy':<14} {missing if cupy is None else f'{cupy[1]} ({cupy[0]})'}")
    for name, purpose, extra in _OPTIONAL:
        hint = f"{purpose}; pip install '{extra}'" if extra else purpose
        lines.append(f"{name:<14} {_version(name) or f'not installed ({hint})'}")
    return lines


def _machine() -> list[str]:
    root = cache_root(None)
    return [
        f"{'cores':<14} {core_count()} usable of {os.cpu_count()}",
        f"{'compiler':<14} {_compiler()}",
        f"{'CUDA driver':<14} {_driver()}",
        f"{'kernel cache':<14} {root}: {_size_of(root)}",
    ]


def _compiler() -> str:
    """Say which C++ compiler a host build would use, in the order of preference."""
    for variable in ("HAWK_CXX", "CXX"):
        if os.environ.get(variable):
            return f"{os.environ[variable]} (from ${variable})"
    found = shutil.which("g++")
    if found is not None:
        return f"{found} ({_first_line([found, '--version'])})"
    try:
        require_compiler()
    except BackendUnavailable:
        return "none; install g++ or pip install ziglang"
    return f"zig {_version('ziglang')} (the ziglang wheel; a first build takes about a minute)"


def _first_line(command: list[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run: {error}"
    return answer.partition("\n")[0].strip()


def _driver() -> str:
    """Ask the driver library for its version; that neither needs CuPy nor starts anything on the device."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        version = ctypes.c_int()
        status = ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return f"none ({name} is not there)"
    return _cuda_version(version.value) if status == 0 else f"{name} answers with error {status}"


def _cuda_version(number: int) -> str:
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def _size_of(root: pathlib.Path) -> str:
    if not root.exists():
        return "empty, made at the first build"
    files, size = 0, 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                size += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # another process has just replaced it
                continue
            files += 1
    units = sum(1 for _ in root.glob("bundles/*/manifest.json"))
    return f"{size / 2**20:,.1f} MiB in {files:,} files, {units} built units"


def _examine(target: str, *, expected: bool) -> _Verdict:
    answer = _self_test(target)
    if "ok" in answer:
        return _Verdict(target, True, expected, tuple(_praise(answer["ok"])))
    reason = answer.get("unusable") or answer.get("failed") or "the self-test gave no answer"
    return _Verdict(target, False, expected, tuple(str(reason).splitlines()))


def _self_test(target: str) -> dict[str, Any]:
    """Run the self-test in a process of its own and return its answer, or what became of it instead."""
    home = str(pathlib.Path(eagle.__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([home, *filter(None, sys.path)])}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "eagle.selftest", target],
            capture_output=True,
            text=True,
            timeout=_SELF_TEST_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"the self-test did not end within {_SELF_TEST_S:.0f} s and was stopped"}
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    if not isinstance(answer, dict) or ended.returncode != 0:
        tail = "\n".join(ended.stderr.splitlines()[-5:])
        return {"failed": f"the self-test's process ended with status {ended.returncode}\n{tail}".rstrip()}
    return answer


def _praise(about: dict[str, Any]) -> list[str]:
    lines = []
    if "device" in about:
        others = f", one of {about['devices']}" if about["devices"] > 1 else ""
        lines.append(
            f"{about['device']} (compute capability {about['compute']}{others}), "
            f"driver {_cuda_version(about['driver'])}, runtime {_cuda_version(about['runtime'])}"
        )
    lines.append("a pipeline replayed right")
    if "best_ms" in about:
        lines.append(
            f"{about['samples']:,} oscillators: first run with its build {about['first_s']:.2f} s, then "
            f"{about['best_ms']:.2f} ms at best of {about['runs']}, within {about['worst']:.0e} of the closed form"
        )
    else:
        lines.append("kernels were not tried: hawk is not installed (pip install 'eagle-aio[hawk]')")
    return lines
