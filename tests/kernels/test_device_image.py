"""Device images are checked before a driver that believes their lengths sees them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from eagle.errors import ArtifactError
from eagle.kernels.device_image import check_image, read_artifact

if TYPE_CHECKING:
    import pathlib

SECTION = 64


def elf(*, machine: int = 190, payload: int = 100, cut: int = 0) -> bytes:
    """A small ELF image: header, payload, and two sections, one of which occupies no bytes."""
    at = 64 + payload
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHI", 2, machine, 1)
    header += struct.pack("<QQQ", 0, 0, at) + struct.pack("<I", 0) + struct.pack("<HHHHHH", 64, 56, 0, SECTION, 2, 0)
    data = struct.pack("<IIQQQQ", 0, 1, 0, 0, 64, payload).ljust(SECTION, b"\0")
    empty = struct.pack("<IIQQQQ", 0, 8, 0, 0, 64, 1 << 40).ljust(SECTION, b"\0")
    image = header + bytes(payload) + data + empty
    return image[: len(image) - cut]


def fatbin(size: int, content: int) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, size) + bytes(content)


@pytest.mark.parametrize(
    "image", [elf(), elf(payload=0), fatbin(20, 20), fatbin(20, 24), b"// c\n.version 8.0\n", b".version 8.0\0"]
)
def test_whole_images_pass(image: bytes) -> None:
    check_image(image, "k")


@pytest.mark.parametrize(
    "image",
    [
        elf(cut=1),
        elf(cut=SECTION),
        elf(cut=2 * SECTION + 50),
        elf()[:64],
        elf()[:20],
        fatbin(20, 19),
        fatbin(20, 0)[:6],
    ],
)
def test_cut_images_are_named(image: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"k\.cubin.*(truncated|damaged)"):
        check_image(image, "k.cubin")


@pytest.mark.parametrize("image", [b"", b"not a module", b"//", b".version 8.0\0\0junk\0x", b"PK\x03\x04"])
def test_what_is_no_image_is_named(image: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"k\.ptx.*neither PTX"):
        check_image(image, "k.ptx")


def test_a_host_library_is_told_where_to_go() -> None:
    with pytest.raises(ArtifactError, match=r"machine 62.*deploy"):
        check_image(elf(machine=62), "k.so")


def test_lengths_that_point_outside_are_not_followed() -> None:
    image = bytearray(elf())
    for offset in (32, 40):
        struct.pack_into("<Q", image, offset, 2**63)
        with pytest.raises(ArtifactError, match="truncated"):
            check_image(bytes(image), "k") if offset == 40 else check_image(bytes(image[:64]), "k")


def test_a_missing_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_artifact(tmp_path / "k.ptx")
