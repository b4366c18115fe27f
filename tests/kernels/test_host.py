"""Host libraries: a wrong one is a clear error and never maps; a right one is loaded once per content."""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle
from eagle.kernels.host import ParamBlock, check_elf
from tests.helpers.models import affine, climb
from tests.helpers.units import copy_of, restamp

if TYPE_CHECKING:
    from collections.abc import Callable

linux = pytest.mark.skipif(sys.platform != "linux", reason="host libraries are ELF files on Linux only")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_of(eagle.deploy(affine), tmp_path / "unit")


def run(folder: Path) -> None:
    plan = eagle.deploy(folder)
    assert np.array_equal(plan(x=np.arange(3.0), a=2.0, b=1.0), [1.0, 3.0, 5.0])


def replaced(content: bytes, old: bytes, new: bytes) -> bytes:
    assert old in content
    return content.replace(old, new)


LAYOUTS = [struct.pack("<5Q", 40, 32, 32, index, 24) for index in (4, 8)]


def with_other_sizes(content: bytes) -> bytes:
    (layout,) = [layout for layout in LAYOUTS if layout in content]
    return content.replace(layout, struct.pack("<5Q", 48, 32, 32, 8, 24))


@linux
@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (lambda c: c[: len(c) // 2], eagle.ArtifactError, "truncated"),
        (lambda c: c[:-1], eagle.ArtifactError, "truncated"),
        (lambda c: c[:60], eagle.ArtifactError, "no ELF"),
        (lambda c: b"", eagle.ArtifactError, "no ELF"),
        (lambda c: b"just some text\n" * 100, eagle.ArtifactError, "no ELF"),
        (lambda c: c[:18] + struct.pack("<H", 0xF7) + c[20:], eagle.ArtifactError, "ELF machine 247"),
        (lambda c: c[:4] + b"\x01" + c[5:], eagle.ArtifactError, "32-bit"),
        (lambda c: replaced(c, b"\0affine_host\0", b"\0offine_host\0"), eagle.ArtifactError, "affine_host"),
        (lambda c: replaced(c, b"\0eagle_abi_tag\0", b"\0eagle_abi_bag\0"), eagle.ArtifactError, "eagle_abi_tag"),
        (lambda c: replaced(c, b"eagle_layout_sizes", b"eagle_layout_seals"), eagle.ArtifactError, "eagle_layout"),
        (lambda c: replaced(c, b"aether-abi/2", b"aether-abi/8"), eagle.AbiMismatch, "aether-abi/8.*aether-abi/2"),
        (with_other_sizes, eagle.AbiMismatch, r"48, 32, 32, 8, 24.*40, 32, 32, 4 or 8, 24"),
    ],
    ids="half cut head empty text machine 32-bit entry tag sizes other-tag other-sizes".split(),
)
def test_a_library_that_we_cannot_run(
    folder: Path, damage: Callable[[bytes], bytes], error: type[Exception], named: str
) -> None:
    library = folder / "affine.so"
    library.write_bytes(damage(library.read_bytes()))
    restamp(folder)  # the digests are right: what is refused here is the library itself
    with pytest.raises(error, match=rf"(?s)affine\.so.*{named}"):
        run(folder)
    run(copy_of(eagle.deploy(affine), folder.parent / "second"))  # a normal job still works


@linux
def test_a_foreign_library_is_no_artifact(folder: Path) -> None:
    (folder / "affine.so").write_bytes(Path(np.random.mtrand.__file__).read_bytes())
    restamp(folder)
    with pytest.raises(eagle.ArtifactError, match="eagle_abi_tag"):
        run(folder)


@linux
def test_an_executable_is_no_library(folder: Path) -> None:
    (folder / "affine.so").write_bytes(Path("/proc/self/exe").read_bytes())
    restamp(folder)
    with pytest.raises(eagle.ArtifactError, match=r"affine\.so"):
        run(folder)


@linux
@given(cut=st.integers(0, 20_000), at=st.integers(0, 200), byte=st.integers(0, 255))
def test_the_check_of_the_format_never_crashes(cut: int, at: int, byte: int) -> None:
    """Whatever the header says, the answer is "whole" or a clear error."""
    whole = Path(eagle.deploy(affine).plugin.bundle.unit("host").folder / "affine.so").read_bytes()
    content = bytearray(whole[: len(whole) - cut])
    if at < len(content):
        content[at] = byte
    try:
        check_elf(bytes(content), "affine.so")
    except eagle.ArtifactError as caught:
        error: Exception | None = caught
    else:
        error = None
    assert error is None or "affine.so" in str(error)


def test_one_content_is_mapped_once(folder: Path) -> None:
    first, second = eagle.deploy(folder), eagle.deploy(copy_of(eagle.deploy(affine), folder.parent / "second"))
    assert first.plugin.host() is second.plugin.host()


def test_no_copy_of_a_library_is_left_behind(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nest = tmp_path / "nest"
    nest.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(nest))
    library = folder / "affine.so"
    library.write_bytes(library.read_bytes() + b"tail")  # another content, so it is mapped anew
    restamp(folder)
    run(folder)
    library.write_bytes(library.read_bytes()[:-4096])
    restamp(folder)
    with pytest.raises(eagle.ArtifactError):
        run(folder)
    assert list(nest.iterdir()) == []


def test_automatic_kernels_have_a_range_loop_and_others_have_none() -> None:
    assert eagle.deploy(climb).plugin.host().run is not None
    assert eagle.deploy(affine).plugin.host().run is None


def test_an_argument_block_holds_each_value_8_byte_aligned() -> None:
    block = ParamBlock([np.float32(1.5), np.int64(-3), np.float64(0.25)])
    addresses = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint64 * 3).from_address(block.address))
    assert [int(address) % 8 for address in addresses] == [0, 0, 0]
    read = np.ctypeslib.ctypes.string_at
    raw = [read(int(address), size) for address, size in zip(addresses, (4, 8, 8), strict=True)]
    assert raw == [np.float32(1.5).tobytes(), np.int64(-3).tobytes(), np.float64(0.25).tobytes()]


def test_an_argument_block_of_nothing() -> None:
    assert ParamBlock([]).address
