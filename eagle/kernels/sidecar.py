"""Sidecars and manifests: the JSON documents beside a compiled kernel, read into frozen records.

raptor-core owns the schema and checks it; what this file adds is the refusal of words that this eagle cannot act on
(forward-strict), the limits on size and paths, and typed records for the rest of the package.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from raptor.schema.blocks import ALL_PATTERNS, NEURAL_BLOCK_PATTERN
from raptor.schema.manifest import (
    MANIFEST_FORMATS,
    MAX_SCHEMA_VERSION,
    check_execution_axis,
    check_lane_space,
    check_schema_version,
)

from eagle.errors import ArtifactError, UnsupportedSchema
from eagle.kernels.abi import check_aether_abi, np_dtype
from eagle.kernels.roles import Arg, struct_of

MAX_SIDECAR_BYTES = 16 * 1024 * 1024
DEVICE_FORMATS = frozenset({"ptx", "cubin", "fatbin"})


@dataclass(frozen=True, slots=True)
class Finish:
    """How a kernel finishes samples.

    Attributes:
        steps: Steps of one launch: a number, or "auto" when a launch reads it from the ``fused_steps`` word.
        steps_max: Largest step count of one launch under the band policy (automatic kernels).
    """

    steps: int | Literal["auto"]
    steps_max: int = 1


@dataclass(frozen=True, slots=True)
class Sidecar:
    """One kernel's sidecar.

    Attributes:
        path: The file it came from.
        name: The kernel's name.
        pattern: "pure" or "vector".
        abi: Its ABI tag.
        scalar_type: "float64", "float32" or "softdouble".
        args: Its arguments, in the order of the entry's parameters.
        finish: How it finishes samples, or None when it never does.
        host_entry: Symbol of the host entry, or None.
        access: Execution access class ("sample_local", ...), or None before schema 2.
        meta: The whole document, read-only.
    """

    path: Path
    name: str
    pattern: str
    abi: str
    scalar_type: str
    args: tuple[Arg, ...]
    finish: Finish | None
    host_entry: str | None
    access: str | None
    meta: Mapping[str, Any]

    def arg(self, name: str) -> Arg | None:
        """The argument of that name, or None."""
        return next((arg for arg in self.args if arg.name == name), None)

    @property
    def grid(self) -> tuple[tuple[str | None, int | None], ...]:
        """Axes of the lanes, slowest first, each with its fixed extent or None: ((None, None),) for plain samples."""
        axes = self._lane_space.get("axes") or ()
        return tuple((axis.get("label"), axis.get("extent")) for axis in axes)

    @property
    def group(self) -> int:
        """Lanes that stay together whatever is dropped or moved."""
        return int(self._lane_space.get("group") or 1)

    @property
    def open_axis(self) -> str | None:
        """The axis of the grid whose extent a call may give by name (``kernel(..., pair=12)``), or None."""
        label, extent = self.grid[0] if self.grid else (None, None)
        return label if extent is None and self.arg(label or "") is None else None

    def samples_of(self, given: Mapping[str, Any]) -> int | None:
        """Samples that a call asks for by the grid's open axis, or that a closed grid has; None when its planes say.

        Raises:
            TypeError: The extent is no whole number.
            ValueError: It is negative, or nothing tells the extent of an open axis.
        """
        points = math.prod(extent for _, extent in self.grid if extent is not None)
        axis = self.open_axis
        if axis is not None and axis in given:
            extent = given[axis]
            if isinstance(extent, bool) or not hasattr(extent, "__index__"):
                raise TypeError(f"{axis}={extent!r}: expected a whole number, the extent of that axis of the grid")
            if operator.index(extent) < 0:
                raise ValueError(f"{axis}={extent}: expected an extent of at least 0")
            return operator.index(extent) * points
        if any(arg.per_sample and arg.name in given for arg in self.args):
            return None
        if axis is not None:
            raise ValueError(f"{self.name!r} runs over a grid, and no plane tells its extent; pass {axis}=")
        return points if any(label for label, _ in self.grid) else None

    @property
    def _lane_space(self) -> Mapping[str, Any]:
        space: Mapping[str, Any] = (self.meta.get("launch") or {}).get("lane_space") or {}
        return space

    def check_samples(self, n: int) -> None:
        """Refuse a batch that does not fill the grid a kernel runs over.

        Raises:
            ValueError: ``n`` is no multiple of the grid's fixed extents, or not their product where all are fixed.
        """
        fixed = [extent for _, extent in self.grid if extent is not None]
        if not fixed:
            return
        points = math.prod(fixed)
        closed = len(fixed) == len(self.grid)
        if n % points or (closed and n != points):
            axes = ", ".join(f"{label}:{extent or '?'}" for label, extent in self.grid)
            whole = str(points) if closed else f"a multiple of {points}"
            raise ValueError(f"{self.name!r} runs over the grid ({axes}), so it takes {whole} samples; got {n}")

    @property
    def active_set(self) -> bool:
        """Whether the kernel walks an active-set map instead of the whole batch."""
        return self.arg("active_map") is not None


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One kernel of a deployment unit: its id, files and format."""

    id: str
    order: int
    enabled: bool
    artifact: Path
    sidecar: Path
    format: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A deployment unit's ``manifest.json``: entries in launch order, and the whole document."""

    path: Path
    pattern: str
    abi: str
    version: int
    entries: tuple[ManifestEntry, ...]
    meta: Mapping[str, Any]


def read_document(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        FileNotFoundError: There is no such file.
        ArtifactError: It is larger than 16 MiB, not JSON, or not an object.
    """
    size = path.stat().st_size
    if size > MAX_SIDECAR_BYTES:
        raise ArtifactError(
            f"{path}: {size:,} bytes, and at most {MAX_SIDECAR_BYTES:,} (16 MiB) are read; is this a sidecar at all?"
        )
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not valid JSON ({error}); rebuild the unit with hawk.build") from error
    if not isinstance(document, dict):
        raise ArtifactError(f"{path} holds a JSON {type(document).__name__}, expected an object; rebuild the unit")
    return document


def _checked_version(meta: dict[str, Any], where: str, *, manifest: bool) -> int:
    try:
        version = int(check_schema_version(meta, name=where, allow_legacy_version_key=manifest))
        check_execution_axis(meta, version, name=where)
        if "launch" in meta:
            check_lane_space(meta, name=where)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UnsupportedSchema(
            f"{where}: {error} (this eagle reads schema versions 1 to {MAX_SCHEMA_VERSION})"
        ) from error
    return version


def _count(value: object, what: str) -> int:
    """A count of the document: sizes of memory are made of these, so nothing but a sane whole number passes."""
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"{what} is {value!r}, expected a whole number from 1 up")
    return value


def _finish_of(meta: Mapping[str, Any], where: str) -> Finish | None:
    block = meta.get("finish")
    if block is None:
        return None
    steps = block.get("steps", 1)
    if steps == "auto":
        return Finish("auto", _count(block.get("steps_max", 64), "finish.steps_max"))
    if type(steps) is int and 1 <= steps < 2**31:
        return Finish(steps, steps)
    raise UnsupportedSchema(f'{where}: finish.steps is {steps!r}, expected "auto" or a number >= 1; rebuild the kernel')


_DTYPES = ("bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)), "float32", "float64")
_LEGACY_DTYPES = {"float": None, "scalar": None, "vector": None, "matrix": None, "int": "int64", "bool": "bool"}


def _dtype_of(name: str, word: str | None, real: np.dtype[Any], where: str) -> np.dtype[Any]:
    if word is None:
        return real
    if word not in _DTYPES:
        raise UnsupportedSchema(
            f"{where}: plane {name!r} has dtype {word!r}, unknown to this eagle (known: {', '.join(_DTYPES)}); "
            "install a newer eagle-aio or rebuild the unit"
        )
    return np.dtype(word)


def _args_of(meta: Mapping[str, Any], real: np.dtype[Any], where: str) -> tuple[Arg, ...]:
    dtypes: Mapping[str, str] = meta.get("arg_dtypes") or {}
    widths: Mapping[str, int] = meta.get("arg_widths") or {}
    mutables = {declared["name"]: declared for declared in meta.get("mutables") or ()}
    matrices: Mapping[str, Any] = meta.get("mat_shapes") or {}
    vectors: Mapping[str, int] = meta.get("vec_widths") or {}
    integers = {p["name"] for p in meta.get("params") or () if isinstance(p, dict) and p.get("dtype") == "int"}
    args = []
    for pair in meta.get("arg_spec") or ():
        role, name = pair
        declared = mutables.get(name, {})
        struct = struct_of(role, str(declared.get("dtype", "scalar")), where=where)
        width = _count(declared.get("width") or widths.get(name) or vectors.get(name) or 1, f"the width of {name!r}")
        shape: tuple[int, ...] = ()
        if role == "mat_in":
            shape = tuple(matrices.get(name) or (width, 1))
        elif struct == "gref":
            shape = tuple(declared.get("shape") or (width if width > 1 or name in widths else 3,))
        if len(shape) > 2:
            raise ValueError(f"the shape of {name!r} is {shape}, expected one or two axes")
        shape = tuple(_count(extent, f"the shape of {name!r}") for extent in shape)
        default = declared.get("default")
        if default is not None and (isinstance(default, bool) or not isinstance(default, (int, float))):
            raise ValueError(f"the default of {name!r} is {default!r}, expected a number")
        fallback = _LEGACY_DTYPES.get(str(declared.get("dtype")), None)
        word = "bool" if role == "terminated" else dtypes.get(name, fallback)
        dtype = _dtype_of(name, "int64" if role == "nsamples" or name in integers else word, real, where)
        prior = role != "mutable" or bool(declared.get("prior", not dtypes))
        readonly = role == "terminated" and bool(meta.get("terminated_readonly"))
        args.append(Arg(name, role, dtype, shape, struct, prior, default, readonly))
    return tuple(args)


def read_sidecar(path: Path, *, kind: str = "kernel sidecar") -> Sidecar:
    """Read and check one kernel's sidecar.

    Args:
        path: The JSON file.
        kind: What the artifact is, for error messages.

    Raises:
        FileNotFoundError: There is no such file.
        AbiMismatch: Its ABI tag is none that this eagle accepts.
        UnsupportedSchema: A schema version, pattern, role or dtype is unknown.
        ArtifactError: The document is damaged.
    """
    meta = read_document(path)
    name = str(meta.get("kernel") or path.stem)
    check_aether_abi(meta, kind=kind, name=name)
    where = str(path)
    _checked_version(meta, where, manifest=False)
    pattern = _pattern_of(meta, where)
    try:
        real = np_dtype(meta.get("scalar_type", "float64"))
        args = _args_of(meta, real, where)
        finish = _finish_of(meta, where)
        host_entry = meta.get("host_entry")
        if host_entry is not None and not isinstance(host_entry, str):
            raise ValueError(f"host_entry is {host_entry!r}, expected a symbol's name")
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"{where}: the sidecar is damaged ({error!r}); rebuild the unit with hawk.build") from error
    return Sidecar(
        path=path,
        name=name,
        pattern=pattern,
        abi=str(meta["aether_abi"]),
        scalar_type=str(meta.get("scalar_type", "float64")),
        args=args,
        finish=finish,
        host_entry=host_entry,
        access=meta.get("exec_access"),
        meta=MappingProxyType(meta),
    )


def _pattern_of(meta: Mapping[str, Any], where: str) -> str:
    pattern = meta.get("pattern")
    if not isinstance(pattern, str) or pattern not in ALL_PATTERNS:
        raise UnsupportedSchema(
            f"{where}: pattern {pattern!r} is unknown to this eagle (known: {', '.join(sorted(ALL_PATTERNS))}); "
            "install a newer eagle-aio or rebuild the unit"
        )
    return str(pattern)


def _inside(folder: Path, name: object, what: str, where: Path) -> Path:
    """A file of the unit's own folder: a manifest must not reach outside it."""
    if not isinstance(name, str) or not name:
        raise ArtifactError(f"{where}: {what} is {name!r}, expected a file name inside the unit's folder")
    path = folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):
        inside = False
    if not inside:
        raise ArtifactError(f"{where}: {what} {name!r} leaves the unit's folder; only files inside it are read")
    return path


def _entry_of(block: Any, folder: Path, where: Path) -> ManifestEntry:
    if not isinstance(block, dict) or not isinstance(block.get("id"), str):
        raise ArtifactError(f"{where}: a plugin entry needs an 'id'; got {block!r}")
    format_ = block.get("format", "ptx")
    if not isinstance(format_, str) or format_ not in MANIFEST_FORMATS:
        raise UnsupportedSchema(
            f"{where}: entry {block['id']!r} has format {format_!r}, unknown to this eagle "
            f"(known: {', '.join(sorted(MANIFEST_FORMATS))})"
        )
    order = block.get("order", 0)
    if type(order) is not int:
        raise ArtifactError(f"{where}: entry {block['id']!r} has order {order!r}, expected a whole number")
    return ManifestEntry(
        id=block["id"],
        order=order,
        enabled=bool(block.get("enabled", True)),
        artifact=_inside(folder, block.get("artifact"), f"the artifact of {block['id']!r}", where),
        sidecar=_inside(folder, block.get("sidecar"), f"the sidecar of {block['id']!r}", where),
        format=format_,
    )


def read_manifest(path: Path) -> Manifest:
    """Read and check a deployment unit's manifest; entries come in their declared order.

    Raises:
        FileNotFoundError: There is no such file.
        AbiMismatch: Its ABI tag is none that this eagle accepts.
        UnsupportedSchema: A schema version, pattern or format is unknown.
        ArtifactError: It is damaged, has two entries of one id, or names a file outside its folder.
    """
    meta = read_document(path)
    where = str(path)
    version = _checked_version(meta, where, manifest=True)
    pattern = _pattern_of(meta, where)
    if pattern != NEURAL_BLOCK_PATTERN or "aether_abi" in meta:
        check_aether_abi(meta, kind="plugin manifest", name=where)
    blocks = meta.get("plugins")
    if blocks is None:
        blocks = []
    if not isinstance(blocks, list):
        raise ArtifactError(f"{where}: 'plugins' is a {type(blocks).__name__}, expected a list")
    entries = [_entry_of(block, path.parent, path) for block in blocks]
    ids = [entry.id for entry in entries]
    for id_ in ids:
        if ids.count(id_) > 1:
            raise ArtifactError(f"{where}: two entries have the id {id_!r}; ids must differ")
    entries.sort(key=lambda entry: entry.order)
    return Manifest(path, pattern, str(meta.get("aether_abi")), version, tuple(entries), MappingProxyType(meta))
