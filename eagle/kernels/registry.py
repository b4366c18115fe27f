"""Launchables by name: a registry, and the loading of a whole deployment unit from its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from raptor.schema.blocks import NEURAL_BLOCK_PATTERN, NEURAL_EXEC_REF_FIELDS, validate_neural_block_descriptor

from eagle.errors import ArtifactError, UnknownMemberError, UnsupportedSchema
from eagle.kernels.loaded import LoadedKernel, load_kernel
from eagle.kernels.sidecar import DEVICE_FORMATS, Manifest, ManifestEntry, read_manifest, read_sidecar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from os import PathLike


class KernelRegistry:
    """A map from names to launchables; a duplicate name is refused, and items are added with `register` only.

    Args:
        kernels: Launchables to register under their own names, in order.

    Raises:
        ValueError: One has no usable ``__name__``, or two have the same.
    """

    def __init__(self, kernels: Iterable[Any] | None = None) -> None:
        self._kernels: dict[str, Any] = {}
        for kernel in kernels or ():
            self.register(kernel)

    def register(self, kernel: Any, name: str | None = None) -> str:
        """Add one launchable.

        Args:
            kernel: Anything with the call and launch protocol; it is not checked.
            name: Its key; None takes its ``__name__``.

        Returns:
            The key.

        Raises:
            ValueError: The name is taken, or there is none.
        """
        key = getattr(kernel, "__name__", None) if name is None else name
        if not isinstance(key, str) or not key:
            raise ValueError(f"a {type(kernel).__name__} has no usable __name__ ({key!r}); pass name=")
        if key in self._kernels:
            raise ValueError(f"a kernel is registered as {key!r} already; pass another name=")
        self._kernels[key] = kernel
        return key

    def get(self, name: str, default: Any = None) -> Any:
        """The launchable registered under ``name``, or ``default``."""
        return self._kernels.get(name, default)

    def names(self) -> list[str]:
        """The registered names in the order of registration; a copy."""
        return list(self._kernels)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._kernels[name]
        except (KeyError, TypeError):
            known = ", ".join(self._kernels) or "none"
            raise KeyError(f"no kernel is registered as {name!r}; registered: {known}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._kernels

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)

    def __repr__(self) -> str:
        return f"KernelRegistry({self.names()})"


@dataclass(frozen=True)
class NeuralBlock:
    """One block of a neural layer.

    Attributes:
        kernel: Its wire identity.
        execs: The loaded kernel of each exec reference ("forward_exec", "vjp_exec", "jvp_exec") it has.
        meta: Its descriptor, read-only.
    """

    kernel: str
    execs: Mapping[str, LoadedKernel]
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class LoadedNeuralLayer:
    """A neural deployment unit: its blocks in order, resolved against the unit's kernels.

    It is recognised and checked, but not certified for launching, so it is no `KernelRegistry`.

    Attributes:
        path: The manifest it came from.
        blocks: The blocks, in order.
    """

    path: Path
    blocks: tuple[NeuralBlock, ...]


def load_manifest(path: str | PathLike[str]) -> KernelRegistry | LoadedNeuralLayer:
    """Load a deployment unit by its ``manifest.json``. Loading an artifact runs its code.

    Args:
        path: The manifest.

    Returns:
        For the patterns "vector" and "pure" a registry of the enabled entries, keyed by their ids in launch order
        (files of disabled ones are not opened); for "neural_block" a frozen layer record.

    Raises:
        FileNotFoundError: The manifest, a sidecar or an artifact is missing.
        ArtifactError: The manifest is damaged, or an entry is for the host (named; `eagle.deploy` runs those).
        AbiMismatch: An ABI tag is not ours.
        UnsupportedSchema: A schema version, pattern or format is unknown.
        UnknownMemberError: A neural block refers to a kernel that the unit does not have.
        BackendUnavailable: No GPU can be used, and an entry is enabled.
    """
    manifest = read_manifest(Path(path))
    _refuse_host_entries(manifest)
    if manifest.pattern == NEURAL_BLOCK_PATTERN:
        return _neural_layer(manifest)
    registry = KernelRegistry()
    for entry in manifest.entries:
        if entry.enabled:
            registry.register(_load_entry(entry, manifest.pattern), entry.id)
    return registry


def _refuse_host_entries(manifest: Manifest) -> None:
    for entry in manifest.entries:
        if entry.format not in DEVICE_FORMATS:
            raise ArtifactError(
                f"{manifest.path}: entry {entry.id!r} has format {entry.format!r}, and load_manifest loads device "
                f"formats ({', '.join(sorted(DEVICE_FORMATS))}); run host kernels with eagle.deploy"
            )


def _load_entry(entry: ManifestEntry, pattern: str) -> LoadedKernel:
    if entry.sidecar != entry.artifact.with_suffix(".json"):
        raise ArtifactError(
            f"entry {entry.id!r}: the sidecar {entry.sidecar.name!r} is not beside its artifact "
            f"{entry.artifact.name!r} under the same name; expected {entry.artifact.with_suffix('.json').name!r}"
        )
    return load_kernel(entry.artifact, pattern)


def _neural_layer(manifest: Manifest) -> LoadedNeuralLayer:
    blocks = manifest.meta.get("blocks")
    if not isinstance(blocks, list):
        raise ArtifactError(f"{manifest.path}: a neural unit needs its inline 'blocks' list; got {blocks!r}")
    entries = {entry.id: entry for entry in manifest.entries if entry.enabled}
    where = str(manifest.path)
    wanted = [(block, _references(block, entries, where)) for block in blocks]
    loaded: dict[str, LoadedKernel] = {}
    for _, references in wanted:
        for id_ in references.values():
            if id_ not in loaded:
                loaded[id_] = _load_entry(entries[id_], read_sidecar(entries[id_].sidecar).pattern)
    return LoadedNeuralLayer(
        manifest.path,
        tuple(
            NeuralBlock(
                block["kernel"],
                MappingProxyType({field: loaded[id_] for field, id_ in references.items()}),
                MappingProxyType(block),
            )
            for block, references in wanted
        ),
    )


def _references(block: Any, entries: Mapping[str, ManifestEntry], where: str) -> dict[str, str]:
    """The kernel id of each exec reference of a block, checked before anything is loaded."""
    try:
        validate_neural_block_descriptor(block, name=where)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnsupportedSchema(f"{where}: a neural block is not valid: {error}") from error
    references = {}
    for field in sorted(NEURAL_EXEC_REF_FIELDS):
        reference = block.get(field)
        if reference is None:
            continue
        id_ = reference["kernel"]
        if id_ not in entries:
            raise UnknownMemberError(
                f"{where}: block {block['kernel']!r} refers to kernel {id_!r} in {field}, and the unit's enabled "
                f"kernels are: {', '.join(entries) or 'none'}",
                id_,
            )
        references[field] = id_
    return references
