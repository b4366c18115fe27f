"""Launching one kernel on the GPU by argument names: the capturable primitive, and the door that coerces first.

`launch` takes CuPy arrays as they are and may run inside a capture. `pure_prepare` takes what a user has (NumPy arrays,
other frameworks' tensors, numbers) and makes device buffers of it. Both describe the entry by the same `Arg` records
that a sidecar gives, so a loaded artifact and a kernel compiled in the process cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.kernels.abi import assemble_args
from eagle.kernels.coerce import check_names, coerce, is_native, number_of, samples_of
from eagle.kernels.device import is_cupy, require_cupy
from eagle.kernels.device_call import PackedLaunch, block_for, grid_for, parameter_sizes
from eagle.kernels.roles import Arg, struct_of

if TYPE_CHECKING:
    from collections.abc import Iterable

KINDS = ("vector", "pure")
_COMMON_EXTRA = frozenset(
    {"matrix_inputs", "wide_inputs", "wide_outputs", "wide_out_exempt", "mat_shapes", "vec_widths"}
)
_EXTRA = {"vector": _COMMON_EXTRA | {"out"}, "pure": _COMMON_EXTRA | {"mutables_decl"}}
_VECTOR_WIDTH = 3
# The default dtypes of arguments that no declaration types.
_ROLE_DTYPES = {"terminated": np.dtype(np.bool_), "nsamples": np.dtype(np.int64)}


def _field(declared: Any, name: str, default: Any = None) -> Any:
    return declared.get(name, default) if isinstance(declared, Mapping) else getattr(declared, name, default)


def _named(items: Iterable[Any] | None) -> dict[str, Any]:
    """Declarations by name; a bare name declares nothing else."""
    return {item if isinstance(item, str) else _field(item, "name"): item for item in items or ()}


def describe_args(
    arg_spec: Sequence[Sequence[str]],
    *,
    params: Iterable[Any] = (),
    mutables: Iterable[Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    mat_shapes: Mapping[str, Sequence[int]] | None = None,
    vec_widths: Mapping[str, int] | None = None,
    readonly_mask: bool = False,
    dt: Any = np.float64,
) -> tuple[Arg, ...]:
    """The `Arg` records of a signature that has no sidecar.

    Args:
        arg_spec: (role, name) pairs in the order of the entry's parameters.
        params: Names of the uniforms, or declarations with ``name`` and ``dtype`` ("float" or "int").
        mutables: Declarations of the Mutables: ``name``, ``dtype``, ``width``, ``shape``.
        defaults: Declared fills of omitted Mutables by name.
        mat_shapes: (R, C) of the matrix inputs by name.
        vec_widths: Components of vector planes by name; 3 where absent.
        readonly_mask: Whether the kernel never writes its mask.
        dt: The dtype of Real.

    Raises:
        UnsupportedSchema: A role is unknown (named).
    """
    declared, uniforms, real = _named(mutables), _named(params), np.dtype(dt)
    args = []
    for role, name in arg_spec:
        block = declared.get(name)
        word = str(_field(block, "dtype", "scalar")) if role == "mutable" else "scalar"
        struct = struct_of(role, word, where="arg_spec")
        integer = word.startswith(("int", "uint")) or str(_field(uniforms.get(name), "dtype", "")) == "int"
        shape: tuple[int, ...] = ()
        if role == "mat_in":
            shape = tuple((mat_shapes or {}).get(name) or (_VECTOR_WIDTH, _VECTOR_WIDTH))
        elif struct == "gref":
            shape = tuple(_field(block, "shape") or ())
            shape = shape or (int(_field(block, "width") or (vec_widths or {}).get(name) or _VECTOR_WIDTH),)
        dtype = np.dtype(np.int64 if word == "int" else word) if integer and role == "mutable" else real
        dtype = np.dtype(np.int64) if integer and role == "uniform" else _ROLE_DTYPES.get(role, dtype)
        default = (defaults or {}).get(name)
        args.append(Arg(name, role, dtype, shape, struct, False, default, readonly_mask and role == "terminated"))
    return tuple(args)


def _check_plane(arg: Arg, array: Any) -> None:
    """Refuse what the entry would misread: it takes addresses, not arrays."""
    if not is_cupy(array):
        raise TypeError(
            f"{arg.name!r} is a {type(array).__name__}; launch takes CuPy arrays only, because it may be captured: "
            "convert it first with eagle.to_cupy"
        )
    want = f"({arg.width}, n)" if arg.struct == "gref" else "(n,)"
    if arg.per_sample and not is_native(arg, array):
        raise ValueError(f"{arg.name!r} has shape {array.shape}, expected {want}")
    if arg.role != "lookup" and array.dtype != arg.dtype:
        mask = arg.role == "terminated" and array.dtype.itemsize == 1
        if not mask and arg.role not in ("wide_in", "wide_out", "accum_out"):
            raise ValueError(f"{arg.name!r} has dtype {array.dtype}, expected {arg.dtype}; convert it first")
    if not array.flags.c_contiguous:
        raise ValueError(f"{arg.name!r} is not contiguous; pass cupy.ascontiguousarray({arg.name})")


def by_value(args: Sequence[Arg], values: Mapping[str, Any], n: int) -> list[Any]:
    """The by-value argument list of an entry over bound planes and numbers (`assemble_args` by `Arg` records)."""

    def of(role: str) -> dict[str, Any]:
        return {arg.name: values[arg.name] for arg in args if arg.role == role}

    mutables = of("mutable")
    planes = {arg.name for arg in args if arg.struct == "gref"}
    out = next((values[arg.name] for arg in args if arg.role == "out"), None)
    mask = next((values[arg.name] for arg in args if arg.role == "terminated"), None)
    return assemble_args(
        [(arg.role, arg.name) for arg in args],
        out=out,
        vec=of("vec_in"),
        per_sample=of("per_sample"),
        terminated=mask,
        uniforms=of("uniform"),
        n=n,
        tables=of("lookup"),
        mutables={name: array for name, array in mutables.items() if name not in planes},
        mutable_vec={name: array for name, array in mutables.items() if name in planes},
        mats=of("mat_in"),
        wide_in=of("wide_in"),
        wide_out={**of("wide_out"), **of("accum_out")},
    )


def issue(
    function: Any, args: Sequence[Arg], values: Mapping[str, Any], n: int, *, grid: Any = None, block: Any = None
) -> None:
    """Launch one entry over all its samples on the current stream. Capture-legal: nothing is allocated on the device.

    Args:
        function: The compiled kernel.
        args: Its signature.
        values: CuPy planes and numbers by name.
        n: Samples.
        grid: Blocks; None gives every sample a thread.
        block: Threads of a block; None picks them from the kernel's attributes and the device.
    """
    packed = by_value(args, values, n)
    sizes = parameter_sizes(function)
    if sizes is not None and len(sizes) == len(packed) + 3:  # an aether-abi/2 entry takes a partition as well
        packed += [np.int64(0), np.int64(n), np.int64(n)]
    if block is None:
        device = require_cupy().cuda.Device()
        block = block_for(function, n, device.attributes["MultiProcessorCount"])
    if grid is None:
        grid = grid_for(n, int(np.prod(block)))
    PackedLaunch(function, packed, grid, block).launch()


def _check_kind(kind: str, extra: Mapping[str, Any]) -> None:
    if kind not in KINDS:
        raise ValueError(f"launch: kind is {kind!r}, expected one of {', '.join(map(repr, KINDS))}")
    unknown = [name for name in extra if name not in _EXTRA[kind]]
    if unknown:
        raise TypeError(
            f"launch of a {kind} kernel takes no {', '.join(map(repr, unknown))}; "
            f"it takes {', '.join(sorted(_EXTRA[kind]))}"
        )


def launch(
    kind: str,
    fn: Any,
    arg_spec: Sequence[Sequence[str]],
    vector_inputs: Sequence[str],
    params: Sequence[Any],
    per_sample: Sequence[str],
    *,
    kw: Mapping[str, Any],
    grid: Any,
    block: Any,
    dt: Any = np.float64,
    **extra: Any,
) -> Any:
    """Issue one capturable launch of a kernel on the current stream.

    Args:
        kind: "vector" (accumulates into ``out``) or "pure" (updates its Mutables).
        fn: The compiled kernel: a cupy.RawKernel or a function of a CuPy module.
        arg_spec: (role, name) pairs in the order of the entry's parameters.
        vector_inputs: Names of the state vectors, each (W, n).
        params: Names of the uniforms.
        per_sample: Names of the scalar planes, each (n,).
        kw: Every argument by name: CuPy arrays of the final dtype, contiguous, and numbers for the uniforms.
        grid: Blocks; None gives every sample a thread.
        block: Threads of a block; None picks them.
        dt: The dtype of Real.
        **extra: ``out`` (vector) or ``mutables_decl`` (pure); for both ``matrix_inputs``, ``wide_inputs``,
            ``wide_outputs``, ``wide_out_exempt``, ``mat_shapes`` and ``vec_widths``.

    Returns:
        ``out``, or the Mutables merged with the wide outputs, by name: the arrays that were passed.

    Raises:
        ValueError: ``kind`` is another word; a plane has the wrong shape, dtype, length or layout.
        TypeError: An argument is missing, unknown, or no CuPy array.
        BackendUnavailable: No GPU can be used.
    """
    _check_kind(kind, extra)
    require_cupy()
    mutables = extra.get("mutables_decl")
    shapes, widths = extra.get("mat_shapes") or _shapes_of(extra.get("matrix_inputs")), extra.get("vec_widths")
    args = describe_args(arg_spec, params=params, mutables=mutables, mat_shapes=shapes, vec_widths=widths, dt=dt)
    return launch_bound(
        fn,
        args,
        kw,
        out=extra.get("out"),
        grid=grid,
        block=block,
        exempt=extra.get("wide_out_exempt") or (),
        what="launch",
    )


def _shapes_of(matrix_inputs: Any) -> dict[str, Any]:
    if isinstance(matrix_inputs, Mapping):
        return dict(matrix_inputs)
    return {name: _field(item, "shape") for name, item in _named(matrix_inputs).items() if _field(item, "shape")}


def launch_bound(
    fn: Any,
    args: Sequence[Arg],
    kw: Mapping[str, Any],
    *,
    out: Any = None,
    grid: Any = None,
    block: Any = None,
    exempt: Iterable[str] = (),
    what: str,
) -> Any:
    """`launch` by `Arg` records: check the CuPy planes in ``kw``, issue, return ``out`` or the written planes."""
    check_names(args, kw, what=what)
    values: dict[str, Any] = {}
    for arg in args:
        if arg.role == "nsamples":
            continue
        given = out if arg.role == "out" else kw.get(arg.name)
        if given is None:
            raise TypeError(f"{what} needs {arg.name!r}: pass it by name, allocated beforehand")
        if arg.struct == "value":
            values[arg.name] = number_of(arg, given)
        else:
            _check_plane(arg, given)
            values[arg.name] = given
    n = samples_of(args, values, exempt)
    if n is None:
        raise TypeError(f"{what}: no argument carries the number of samples; pass at least one per-sample plane")
    issue(fn, args, values, n, grid=grid, block=block)
    return out if out is not None else written(args, values)


def written(args: Sequence[Arg], values: Mapping[str, Any]) -> dict[str, Any]:
    """The Mutables merged with the wide and accumulating outputs, by name."""
    return {arg.name: values[arg.name] for arg in args if arg.role in ("mutable", "wide_out", "accum_out")}


def pure_prepare(
    fn: Any,
    arg_spec: Sequence[Sequence[str]],
    *,
    vector_inputs: Sequence[str],
    per_sample: Sequence[str],
    params: Sequence[Any],
    mutables_decl: Sequence[Any],
    mutable_defaults: Mapping[str, Any],
    lookup_counts: Mapping[str, int],
    kw: Mapping[str, Any],
    mat_shapes: Mapping[str, Sequence[int]] | None = None,
    vec_widths: Mapping[str, int] | None = None,
    wide_inputs: Any = None,
    wide_outputs: Any = None,
    wide_out_exempt: Iterable[str] = (),
    dt: Any = np.float64,
    readonly_mask: bool = False,
) -> dict[str, Any]:
    """Coerce the inputs, allocate what is missing and launch a pure kernel, without synchronising.

    Args:
        fn: The compiled kernel.
        arg_spec: (role, name) pairs in the order of the entry's parameters.
        vector_inputs: Names of the state vectors, (W, n).
        per_sample: Names of the scalar planes, (n,); a number is spread over the samples.
        params: Names of the uniforms.
        mutables_decl: Declarations of the Mutables (``name``, ``dtype``, ``width``, ``shape``).
        mutable_defaults: Fill of an omitted Mutable by name; None means zeros.
        lookup_counts: Elements of each lookup table by name.
        kw: The arguments by name, arrays of any framework. Mutables given as CuPy arrays are updated in place.
        mat_shapes: (R, C) of the matrix inputs; each plane is flat, (R*C, n).
        vec_widths: Components of the vector planes by name; 3 where absent.
        wide_inputs: Names of the wide inputs, (rows, n).
        wide_outputs: Names of the wide outputs, (rows, n), written in place; never allocated here.
        wide_out_exempt: Those of them whose last axis is not the sample axis.
        dt: The dtype of Real.
        readonly_mask: Whether an omitted mask may be a shared all-false one.

    Returns:
        The Mutable buffers merged with the wide outputs, CuPy arrays by name.

    Raises:
        TypeError: An argument is missing or unknown, or none carries the number of samples.
        ValueError: A plane has the wrong shape, length or dtype.
        BackendUnavailable: No GPU can be used.
    """
    args = describe_args(
        arg_spec,
        params=params,
        mutables=mutables_decl,
        defaults=mutable_defaults,
        mat_shapes=mat_shapes,
        vec_widths=vec_widths,
        readonly_mask=readonly_mask,
        dt=dt,
    )
    values, n = coerce(args, kw, counts=lookup_counts, exempt=wide_out_exempt, what="pure_prepare")
    issue(fn, args, values, n)
    return written(args, values)
