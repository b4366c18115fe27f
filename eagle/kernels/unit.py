"""Deployment units on disk: digests checked before anything maps a file, and our record of the CPU a unit needs.

hawk stamps a unit with ``.hawk_unit``: the unit's digest and a sha256 per file. `read_unit` refuses a unit whose files
differ from their stamp. Units that `deploy` builds carry ``.eagle_unit`` too: the machine and the CPU features they
were compiled for, since ``-march=native`` code dies with SIGILL on an older CPU.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eagle.errors import AbiMismatch, ArtifactError
from eagle.kernels.sidecar import Manifest, ManifestEntry, Sidecar, read_document, read_manifest, read_sidecar

STAMP = ".hawk_unit"
RECORD = ".eagle_unit"
RECORD_VERSION = 1


@dataclass(frozen=True, slots=True)
class Unit:
    """A deployment unit whose files match their digests.

    Attributes:
        folder: Where it lies.
        digest: hawk's content identity of the unit.
        manifest: Its manifest.
        digests: sha256 (hex) of each file, by name.
        sidecars: Enabled kernels' sidecars by id, in manifest order.
    """

    folder: Path
    digest: str
    manifest: Manifest
    digests: Mapping[str, str]
    sidecars: Mapping[str, Sidecar]

    def entry(self, id_: str) -> ManifestEntry:
        """The manifest entry of that id."""
        return next(entry for entry in self.manifest.entries if entry.id == id_)

    def read(self, path: Path) -> bytes:
        """The bytes of one of the unit's files, checked against its digest as they are read.

        Raises:
            ArtifactError: The file is gone or its digest differs.
        """
        try:
            content = path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: no name that a file can have
            raise ArtifactError(f"{path!s:.200} cannot be read ({error}); rebuild the unit") from error
        expected = self.digests.get(path.name)
        found = hashlib.sha256(content).hexdigest()
        if found != expected:
            raise ArtifactError(
                f"{path} is changed or truncated: sha256 {found[:16]}..., its {STAMP} says {str(expected)[:16]}...; "
                "rebuild the unit with hawk.build, or delete its folder"
            )
        return content


def read_unit(folder: Path) -> Unit:
    """Read a unit and check every file it stamps.

    Raises:
        ArtifactError: There is no stamp, a file is missing, changed or truncated, or a document is damaged.
    """
    stamp_path = folder / STAMP
    try:
        stamp = read_document(stamp_path)
        files = stamp["files"]
        if not isinstance(files, dict):
            raise TypeError(f"'files' is a {type(files).__name__}")
        digests: dict[str, Any] = files
        digest = str(stamp["unit"])
    except FileNotFoundError as error:
        raise ArtifactError(f"{folder} holds no {STAMP}: it is no complete deployment unit; rebuild it") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"{stamp_path} is damaged ({error}); rebuild the unit") from error
    unit = Unit(folder, digest, _EMPTY, digests, {})
    for name in digests:
        if Path(name).name != name:
            raise ArtifactError(f"{stamp_path} names {name!r}, which lies outside the unit's folder; rebuild the unit")
        unit.read(folder / name)
    try:
        manifest = read_manifest(folder / "manifest.json")
        read = [manifest.path, *(entry.sidecar for entry in manifest.entries if entry.enabled)]
        loose = [path.name for path in read if path.parent != folder or path.name not in digests]
        if loose:
            raise ArtifactError(f"{stamp_path} gives no digest of {', '.join(loose)}; rebuild the unit")
        sidecars = {entry.id: read_sidecar(entry.sidecar) for entry in manifest.entries if entry.enabled}
    except FileNotFoundError as error:
        raise ArtifactError(f"{folder}: {Path(str(error.filename)).name} is missing; rebuild the unit") from error
    return Unit(folder, digest, manifest, digests, sidecars)


_EMPTY = Manifest(Path(), "pure", "", 0, (), {})


@cache
def cpu_features() -> frozenset[str]:
    """The feature flags of this machine's CPU, empty where the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


@cache
def cpu_identity() -> str:
    """A short digest of the machine type and its CPU features: part of every cache key."""
    text = f"{platform.machine()} {' '.join(sorted(cpu_features()))}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_record(folder: Path, key: str) -> None:
    """Write our record of what a unit built here needs."""
    record = {
        "record_version": RECORD_VERSION,
        "key": key,
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu_features": sorted(cpu_features()),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1))


def check_record(folder: Path, key: str) -> None:
    """Refuse a cached unit that was built for another machine, another CPU or by another eagle.

    Raises:
        AbiMismatch: The record is missing or differs from this machine; `deploy` rebuilds the unit then.
    """
    try:
        record: dict[str, Any] = read_document(folder / RECORD)
    except (OSError, ArtifactError) as error:
        raise AbiMismatch(f"{folder}: no readable {RECORD} ({error}); the unit must be rebuilt") from error
    expected = {
        "record_version": RECORD_VERSION,
        "key": key,
        "machine": platform.machine(),
        "system": platform.system(),
    }
    for field, want in expected.items():
        if record.get(field) != want:
            raise AbiMismatch(
                f"{folder}: {field} is {record.get(field)!r}, this machine needs {want!r}; the unit must be rebuilt",
                record.get(field),
                want,
            )
    features = record.get("cpu_features")
    if not isinstance(features, list) or not all(isinstance(feature, str) for feature in features):
        raise AbiMismatch(f"{folder}: {RECORD} lists no CPU features; the unit must be rebuilt")
    missing = set(features) - cpu_features()
    if missing:
        raise AbiMismatch(
            f"{folder}: built for a CPU with {', '.join(sorted(missing))}; the unit must be rebuilt", missing
        )
