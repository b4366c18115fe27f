"""The bytes of a device artifact, checked before the driver sees them.

The CUDA driver believes the lengths written inside an image: a cubin cut in half killed the process (SIGSEGV) while it
was loaded. So the digest of a stamped unit is compared first, and the image's own lengths are checked against the file.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from eagle.errors import ArtifactError
from eagle.kernels.unit import STAMP, read_unit

if TYPE_CHECKING:
    from pathlib import Path

_ELF, _FATBIN = b"\x7fELF", struct.pack("<I", 0xBA55ED50)
_CUDA_MACHINE = 190
_NO_BITS = 8  # a section that occupies no bytes of the file


def read_artifact(path: Path) -> bytes:
    """The bytes of an artifact file; in a stamped unit they are checked against their digest.

    Raises:
        FileNotFoundError: There is no such file.
        ArtifactError: It is no complete device image, or its unit has changed since it was built.
    """
    content = path.read_bytes()
    if (path.parent / STAMP).exists():
        content = read_unit(path.parent).read(path)
    check_image(content, str(path))
    return content


def check_image(content: bytes, where: str) -> None:
    """Refuse what is neither PTX text nor a complete cubin or fatbin.

    Args:
        content: The artifact's bytes.
        where: Its name, for the error.

    Raises:
        ArtifactError: It is empty, of no known kind, of another machine, or cut off.
    """
    if content[:4] == _ELF:
        needed = _elf_length(content, where)
    elif content[:4] == _FATBIN:
        header, size = struct.unpack_from("<HQ", content.ljust(16, b"\0"), 6)
        needed = max(16, header + size)
    elif b".version" in content[:65536] and b"\0" not in content.rstrip(b"\0"):
        return
    else:
        raise ArtifactError(
            f"{where} ({len(content)} bytes) is neither PTX, cubin nor fatbin; rebuild the unit for this device"
        )
    if needed > len(content):
        raise ArtifactError(f"{where} is truncated: {len(content)} bytes of at least {needed}; rebuild the unit")


def _elf_length(content: bytes, where: str) -> int:
    """The bytes that a 64-bit ELF image says it has."""
    if len(content) < 64 or content[4] != 2:
        raise ArtifactError(f"{where} holds a damaged ELF header ({len(content)} bytes); rebuild the unit")
    machine = struct.unpack_from("<H", content, 18)[0]
    if machine != _CUDA_MACHINE:
        raise ArtifactError(
            f"{where} is an ELF file of machine {machine}, expected {_CUDA_MACHINE} (CUDA); load host libraries with "
            "eagle.deploy"
        )
    segments_at, sections_at = struct.unpack_from("<QQ", content, 32)
    segment_size, segments, section_size, sections = struct.unpack_from("<HHHH", content, 54)
    needed: int = max(segments_at + segment_size * segments, sections_at + section_size * sections)
    if needed > len(content):
        return needed
    for at in range(segments_at, segments_at + segment_size * segments, segment_size or 1):
        offset, size = struct.unpack_from("<Q16xQ", content, at + 8)
        needed = max(needed, offset + size)
    for at in range(sections_at, sections_at + section_size * sections, section_size or 1):
        kind, offset, size = struct.unpack_from("<I16xQQ", content, at + 4)
        if kind != _NO_BITS:
            needed = max(needed, offset + size)
    return needed
