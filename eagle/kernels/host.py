"""Host artifacts: a kernel's shared library, checked and loaded, and its entries as plain foreign calls.

The bytes that were checked are the bytes that are mapped: a library is copied to a private file of its own name,
mapped, and the copy removed. So a unit that is rebuilt in place neither changes code that runs nor gives back an
older library from the loader's cache of paths. Loading a library runs its code: load units of people you trust.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.errors import ArtifactError
from eagle.kernels.abi import check_layout
from eagle.kernels.fork_lock import ForkLock

if TYPE_CHECKING:
    from eagle.kernels.sidecar import Sidecar
    from eagle.kernels.unit import Unit

# entry(params, base, count, n_samples): params is the address of an array of argument addresses.
Entry = Callable[[int, int, int, int], None]

_ELF_MACHINES = {"x86_64": 62, "AMD64": 62, "aarch64": 183, "arm64": 183}
_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_loaded: dict[tuple[str, str], HostKernel] = {}
_lock = ForkLock()


@dataclass(frozen=True, slots=True, eq=False)
class HostKernel:
    """The entries of one loaded host artifact. They release the GIL and take disjoint ranges at once.

    Attributes:
        entry: Runs one launch of the range [base, base + count).
        run: Runs the range until every sample in it has finished or its ``fused_steps`` budget is spent; None where
            hawk emitted none (fixed kernels, active sets, shared tables).
        vector_math: Whether the code calls vector math of the C library, whose lanes may round differently.
        library: Keeps the mapping alive.
    """

    entry: Entry
    run: Entry | None
    vector_math: bool
    library: ctypes.CDLL


class ParamBlock:
    """The argument array of one entry: each struct or value in place, and their addresses in a row.

    Args:
        values: NumPy structured scalars (GRef, Handle) and numbers, in the order of the entry's parameters.
    """

    __slots__ = ("_addresses", "_storage", "address")

    def __init__(self, values: Sequence[Any]) -> None:
        raws = [np.asarray(value).tobytes() for value in values]
        offsets = []
        size = 0
        for raw in raws:
            offsets.append(size)
            size += (len(raw) + 7) & ~7  # every struct is 8-byte aligned
        self._storage = np.zeros(max(size, 8), np.uint8)
        for offset, raw in zip(offsets, raws, strict=True):
            self._storage[offset : offset + len(raw)] = np.frombuffer(raw, np.uint8)
        base = self._storage.__array_interface__["data"][0]
        self._addresses = np.array([base + offset for offset in offsets] or [0], np.uint64)
        self.address: int = self._addresses.__array_interface__["data"][0]


def check_elf(content: bytes, where: str) -> None:
    """Refuse bytes that are no complete ELF shared library of this machine, before the loader maps them.

    Raises:
        ArtifactError: Not an ELF file, of another machine, or truncated.
    """
    if platform.system() != "Linux":
        return  # the loader of other systems checks its own formats
    if content[:4] != b"\x7fELF" or len(content) < 64:
        raise ArtifactError(f"{where} is no ELF shared library ({len(content)} bytes); rebuild the unit")
    machine = struct.unpack_from("<H", content, 18)[0]
    expected = _ELF_MACHINES.get(platform.machine())
    if content[4] != 2 or (expected is not None and machine != expected):
        raise ArtifactError(
            f"{where} is built for ELF machine {machine} ({content[4] * 32}-bit), this is {platform.machine()} "
            f"({expected}); rebuild the unit here"
        )
    program_offset, section_offset = struct.unpack_from("<QQ", content, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", content, 54)
    needed = max(program_offset + program_size * programs, section_offset + section_size * sections)
    for index in range(programs):
        at = program_offset + index * program_size
        if at + 56 > len(content):
            break  # the table itself is cut off: needed says so below
        file_offset, file_size = (
            struct.unpack_from("<Q", content, at + 8)[0],
            struct.unpack_from("<Q", content, at + 32)[0],
        )
        needed = max(needed, file_offset + file_size)
    if needed > len(content):
        raise ArtifactError(f"{where} is truncated: {len(content)} bytes of at least {needed}; rebuild the unit")


def _map(content: bytes, where: str) -> ctypes.CDLL:
    handle, name = tempfile.mkstemp(prefix="eagle-", suffix=".so")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        return ctypes.CDLL(name)
    except OSError as error:
        reason = str(error).replace(name, where)
        raise ArtifactError(f"{where} cannot be loaded ({reason}); rebuild the unit with hawk.build") from error
    finally:
        os.unlink(name)


def _optional_symbol(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(library, name))
    except ValueError:
        return None


def _symbol(library: ctypes.CDLL, name: str, where: str) -> int:
    address = _optional_symbol(library, name)
    if address is None:
        raise ArtifactError(f"{where} exports no symbol {name!r}; it is no host artifact of hawk, rebuild it")
    return address


def load_host_kernel(unit: Unit, sidecar: Sidecar, artifact: Path) -> HostKernel:
    """Load one kernel's shared library and check that it speaks our ABI.

    Args:
        unit: The unit it belongs to; its digests are checked as the file is read.
        sidecar: The kernel's sidecar.
        artifact: The ``.so``.

    Raises:
        ArtifactError: The file is changed, truncated, foreign, or lacks a symbol.
        AbiMismatch: Its exported ABI tag or struct sizes are not ours.
    """
    content = unit.read(artifact)
    where = str(artifact)
    name = sidecar.host_entry or f"{sidecar.name}_host"
    key = (hashlib.sha256(content).hexdigest(), name)
    with _lock:
        known = _loaded.get(key)
        if known is not None:
            return known
        check_elf(content, where)
        library = _map(content, where)
        tag = (
            ctypes.string_at(_symbol(library, "eagle_abi_tag", where), 64).split(b"\0", 1)[0].decode("ascii", "replace")
        )
        sizes = (ctypes.c_uint64 * 5).from_address(_symbol(library, "eagle_layout_sizes", where))
        check_layout(tag, list(sizes), name=where)
        entry = _PROTOTYPE(_symbol(library, name, where))
        run_address = _optional_symbol(library, f"{name}_run")
        run = None if run_address is None else _PROTOTYPE(run_address)
        kernel = HostKernel(entry, run, b"_ZGV" in content, library)
        _loaded[key] = kernel
        return kernel
