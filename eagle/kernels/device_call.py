"""One kernel launch, packed once and issued many times.

CuPy converts every argument of a RawKernel at each call, 50 to 100 µs for nine by-value structs on the machine the
project was measured on. Packed into one buffer beforehand, with the driver's array of argument pointers beside it, the
same launch costs about 5 µs, nearly all of it the driver's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from eagle.errors import ArtifactError
from eagle.kernels.device import import_cuda, require_cupy
from eagle.kernels.host import ParamBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_GRID_X = 2**31 - 1


def function_handle(function: Any) -> int:
    """The raw CUfunction of a CuPy RawKernel, a CuPy Function, or an int handle."""
    if isinstance(function, int):
        return function
    compiled = getattr(function, "kernel", function)
    handle = getattr(compiled, "ptr", None)
    if not isinstance(handle, int):
        raise TypeError(
            f"expected a compiled kernel (cupy.RawKernel, a function of a cupy.RawModule, or a raw handle), "
            f"got {type(function).__name__}"
        )
    return handle


def parameter_sizes(function: Any) -> list[int] | None:
    """Bytes of each parameter of a kernel entry; None where the driver (before 12.4) cannot say."""
    driver = cuda_driver()
    query = getattr(driver, "cuFuncGetParamInfo", None)
    if query is None:
        return None
    handle = function_handle(function)
    sizes: list[int] = []
    while True:
        status, _, size = query(handle, len(sizes))
        if int(status) != 0:
            # Past the last parameter the driver answers "invalid value"; anything else means it cannot say.
            return sizes if int(status) == 1 else None
        sizes.append(int(size))


def cuda_driver() -> Any:
    """The driver module of cuda-bindings, which cuda-core brings along.

    Raises:
        BackendUnavailable: It is not installed.
    """
    return import_cuda("cuda.bindings.driver")


def attribute(function: Any, name: str) -> int:
    """One attribute of a kernel, by the name CuPy gives it ("num_regs", "max_threads_per_block", ...)."""
    driver = require_cupy().cuda.driver
    code = getattr(driver, f"CU_FUNC_ATTRIBUTE_{name.upper()}")
    return int(driver.funcGetAttribute(code, function_handle(function)))


def block_for(function: Any, n: int, sm_count: int) -> int:
    """Threads of a block for one thread a sample.

    128 keeps occupancy on every architecture of the table; a batch that would leave multiprocessors idle gets blocks of
    64, which spread it further (54 against 69 µs for 10,000 samples of the RK4 case on an H200).

    Args:
        function: The compiled kernel.
        n: Samples.
        sm_count: The device's multiprocessors.
    """
    block = 128 if n > 128 * sm_count else 64
    return min(block, attribute(function, "max_threads_per_block"))


def grid_for(n: int, block: int) -> int:
    """Blocks that give every one of ``n`` samples a thread.

    Raises:
        ValueError: More blocks than a launch may have.
    """
    if block < 1:
        raise ValueError(f"block is {block}; a block needs at least one thread")
    grid = -(-n // block)
    if grid > _MAX_GRID_X:
        raise ValueError(
            f"{n:,} samples in blocks of {block} are {grid:,} blocks, and a launch has at most {_MAX_GRID_X:,}; "
            "use larger blocks or split the batch"
        )
    return grid


def as_dim3(value: Any, what: str) -> tuple[int, int, int]:
    """Three extents from an int or a tuple of one to three.

    Raises:
        TypeError: It is neither.
        ValueError: An extent is negative, or there are more than three.
    """
    try:
        extents = (int(value),) if isinstance(value, (int, np.integer)) else tuple(int(v) for v in value)
    except TypeError:
        raise TypeError(f"{what} is {value!r}, expected an int or a tuple of up to three") from None
    if not 1 <= len(extents) <= 3 or min(extents) < 0:
        raise ValueError(f"{what} is {value!r}, expected one to three extents >= 0")
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


def by_value(arg: Any) -> Any:
    """One kernel argument as the NumPy scalar or struct whose bytes the entry reads.

    Raises:
        TypeError: It is neither a NumPy scalar or struct, nor a number, nor a CuPy array.
    """
    if isinstance(arg, np.generic):
        return arg
    if isinstance(arg, np.ndarray) and arg.ndim == 0:
        return arg[()]
    if isinstance(arg, (bool, float)):
        return np.asarray(arg)[()]
    if isinstance(arg, int):
        return np.uint64(arg) if arg > 2**63 - 1 else np.int64(arg)
    pointer = getattr(getattr(arg, "data", None), "ptr", None)  # a CuPy array goes as its address
    if isinstance(pointer, int):
        return np.uint64(pointer)
    raise TypeError(
        f"a kernel argument is a {type(arg).__name__}; expected a NumPy scalar or struct, "
        "a Python number or a CuPy array"
    )


class PackedLaunch:
    """A kernel with its arguments and geometry, ready to be issued on any stream of its device.

    `launch` allocates nothing, uploads nothing and never synchronises, so it may be captured into a graph.

    Args:
        function: A cupy.RawKernel, a function of a CuPy module, or a raw CUfunction handle; it is kept alive.
        args: NumPy scalars and structs (passed by value), Python numbers (int64, float64) and CuPy arrays (addresses).
        grid: Blocks: an int or a tuple of up to three. With a zero extent `launch` does nothing.
        block: Threads of a block, likewise.
        shared_bytes: Dynamic shared memory of a block, bytes.
        keep: Objects that must live as long as this one (the arrays behind the structs).

    Raises:
        TypeError: An argument or the function is of no kind that can be passed.
        ArtifactError: The entry takes another number of parameters, or larger ones, than ``args`` hold.
        BackendUnavailable: No GPU can be used.
    """

    __slots__ = ("_address", "_current", "_dims", "_function", "_issue", "_keep")

    def __init__(
        self,
        function: Any,
        args: Sequence[Any],
        grid: Any,
        block: Any,
        *,
        shared_bytes: int = 0,
        keep: Any = (),
    ) -> None:
        cupy = require_cupy()
        handle = function_handle(function)
        values = [by_value(arg) for arg in args]
        _check_parameters(handle, values)
        block_of_params = ParamBlock(values)
        self._address = block_of_params.address
        self._dims = (*as_dim3(grid, "grid"), *as_dim3(block, "block"), int(shared_bytes))
        self._function = handle
        self._issue = cupy.cuda.driver.launchKernel
        self._current = cupy.cuda.get_current_stream
        self._keep = (function, block_of_params, tuple(args), keep)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks in each direction."""
        return self._dims[0], self._dims[1], self._dims[2]

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block in each direction."""
        return self._dims[3], self._dims[4], self._dims[5]

    def launch(self, stream_ptr: int | None = None) -> None:
        """Issue the kernel.

        Args:
            stream_ptr: The raw stream; None is CuPy's current stream.
        """
        dims = self._dims
        if dims[0] and dims[1] and dims[2]:
            stream = self._current().ptr if stream_ptr is None else stream_ptr
            self._issue(self._function, *dims, stream, self._address, 0)

    __call__ = launch


def _check_parameters(handle: int, values: Sequence[Any]) -> None:
    """Refuse arguments the entry would read past the end of: the driver itself cannot notice."""
    sizes = parameter_sizes(handle)
    if sizes is None:
        return
    if len(sizes) != len(values):
        raise ArtifactError(f"the kernel entry takes {len(sizes)} parameters, and {len(values)} arguments were given")
    for index, (size, value) in enumerate(zip(sizes, values, strict=True)):
        if value.nbytes < size:
            raise ArtifactError(f"parameter {index} of the kernel entry takes {size} bytes; {value.nbytes} were given")
