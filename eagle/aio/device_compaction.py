"""The device arm of an active set: launches of the kernels in active_set.cu on CuPy's current stream.

All arguments are packed when the set is made or prepared, so a compaction or a reorder is a row of launches and nothing
else: it may be captured into a graph.
"""

# ruff: noqa: D102 - what each method does is said once, in Compaction
from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eagle.aio.compaction import MIN_REORDER_SPAN, Compaction, Word
from eagle.errors import BackendUnavailable
from eagle.kernels.device import check_device, is_cupy, require_cupy
from eagle.kernels.interop import is_capturing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# As in active_set.cu.
_BLOCK = (256,)
_TILE = 256 * 8
_SCAN_BLOCK = (1024,)
_ONE = (1,)
_WIDTHS = (1, 2, 4, 8, 16)
_NULL = np.uint64(0)

_loaded: dict[int, _Loaded] = {}
_loading = threading.Lock()


class _Loaded(NamedTuple):
    kernels: dict[str, Any]
    multiprocessors: int


class _Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Any, ...]

    def issue(self) -> None:
        self.kernel(self.grid, self.block, self.arguments)


class DeviceCompaction(Compaction):
    """The arm over CuPy arrays of one device; see `Compaction`. Work goes to that device's current stream."""

    def __init__(self, mask: Any, theta: float | None, *, defer_map: bool, defer_scratch: bool) -> None:
        self.mask = mask
        self.n = int(mask.size)
        self.theta = theta
        self._device = int(mask.device.id)
        check_device(self._device)
        self._cupy = require_cupy()
        self._refuse_capture("an ActiveSet allocates its arrays")
        with self._on_device():
            self._kernels, multiprocessors = _loaded_on(self._device)
            self._grid = (max(1, min(-(-self.n // 256), 8 * multiprocessors)),)  # enough to fill the device
            self._tiles: Any = None
            self._scratch: Any = None
            self._source: Any = None
            self.map = self._cupy.empty(0 if defer_map else self.n, np.int32)
            self.perm = None if theta is None else self._cupy.empty(self.n, np.int32)
            self.inv = None if theta is None else self._cupy.empty(self.n, np.int32)
            self.words = self._cupy.empty(len(Word), np.uint32)
            self._compaction: tuple[_Launch, ...] = ()
            self._reorder: tuple[_Launch, ...] = ()
            self._restore: tuple[_Launch, ...] = ()
            self._prepared_planes = -1
            self.reset(())
            if not defer_scratch:
                self._prepare_compaction()

    def is_array(self, x: object) -> bool:
        return is_cupy(x)

    def device(self, x: Any) -> int:
        return int(x.device.id)

    def address(self, x: Any) -> int:
        return int(x.data.ptr)

    def counter(self) -> Any:
        with self._on_device():
            return self._cupy.zeros(1, np.uint32)

    def make_map(self) -> None:
        self._refuse_capture("materialize_map() allocates the map")
        with self._on_device():
            self.map = self._cupy.empty(self.n, np.int32)
            self._identity(None, None, self.map).issue()
        # Launches packed so far hold the address of the placeholder.
        self._compaction = ()
        self._prepared_planes = -1

    def prepare(self, planes: Sequence[Any]) -> None:
        if not self._compaction:
            self._refuse_capture("the scratch memory of this set's compaction is not there yet")
            with self._on_device():
                self._prepare_compaction()
        if self.perm is not None and self._prepared_planes != len(planes):
            self._refuse_capture("the scratch memory of this set's reorder is not there yet")
            with self._on_device():
                self._prepare_moves(planes)

    def capturing(self) -> bool:
        with self._on_device():
            return is_capturing()

    def compact(self, finished: Any = None, baseline: Any = None) -> None:
        if not self._compaction:
            self._refuse_capture("the scratch memory of this set's compaction is not there yet")
            with self._on_device():
                self._prepare_compaction()
        check_device(self._device)
        count, scan, scatter = self._compaction
        if baseline is not None:
            scan = scan._replace(arguments=(*scan.arguments[:-2], finished, baseline))
        with self._on_device():
            count.issue()
            scan.issue()
            scatter.issue()

    def reorder(self, planes: Sequence[Any]) -> None:
        self.prepare(planes)
        self._issue(self._reorder)

    def restore(self, planes: Sequence[Any]) -> None:
        self.prepare(planes)
        self._issue(self._restore)

    def reset(self, baselines: Sequence[Any]) -> None:
        check_device(self._device)
        with self._on_device():
            self._identity(self.perm, self.inv, self.map if self.map.size else None).issue()
            self._home(fresh=True).issue()
            for baseline in baselines:
                baseline.fill(0)

    def in_sample_order(self, plane: Any, out: Any) -> Any:
        check_device(self._device)
        with self._on_device():
            if out is None:
                out = self._cupy.empty_like(plane)
            take = self._kernels[f"eagle_take_{plane.itemsize}"]
            size = self._word(Word.SIZE)
            for row, result in zip(_rows(plane), _rows(out), strict=True):
                take(self._grid, _BLOCK, (row, self.inv, result, size, size))
        return out

    def read(self, word: Word) -> int:
        check_device(self._device)
        with self._on_device():
            return int(self._word(word).get()[0])

    def _prepare_compaction(self) -> None:
        tiles = max(1, -(-self.n // _TILE))
        if self._tiles is None:
            self._tiles = self._cupy.empty(tiles, np.uint32)
        n, theta = np.uint32(self.n), np.float64(self.theta or 0.0)
        scan = (self._tiles, np.uint32(tiles), self.words, theta, np.uint32(MIN_REORDER_SPAN), _NULL, _NULL)
        self._compaction = (
            _Launch(self._kernels["eagle_count"], (tiles,), _BLOCK, (self.mask, n, self._tiles)),
            _Launch(self._kernels["eagle_scan"], _ONE, _SCAN_BLOCK, scan),
            _Launch(self._kernels["eagle_scatter"], (tiles,), _BLOCK, (self.mask, n, self._tiles, self.map)),
        )

    def _prepare_moves(self, planes: Sequence[Any]) -> None:
        """Pack the launches that move the mask and `planes`; the scratch row fits the widest of them."""
        widest = max(4, *(plane.itemsize for plane in planes)) if planes else 4
        if self._scratch is None or self._scratch.size < widest * self.n:
            self._scratch = self._cupy.empty(widest * self.n, np.uint8)
        if self._source is None:
            self._source = self._cupy.empty(self.n, np.int32)
        moved = (self.mask, *planes)
        fire, extent, size = self._word(Word.FIRE), self._word(Word.EXTENT), self._word(Word.SIZE)
        permute = [move for plane in moved for move in self._move(plane, self._source, fire, extent)]
        back = [move for plane in moved for move in self._move(plane, self.inv, self._word(Word.MOVED), size)]
        n = np.uint32(self.n)
        self._reorder = (
            self._over_slots("eagle_source", self.map, n, self.words, self._source),
            *permute,
            self._over_slots("eagle_take_4", self.perm, self._source, self._scratch, fire, extent),
            self._over_slots("eagle_adopt", self._scratch, self.perm, self.inv, self.map, self.words),
            _Launch(self._kernels["eagle_close"], _ONE, _ONE, (self.words,)),
        )
        self._restore = (*back, self._identity(self.perm, self.inv, None), self._home(fresh=False))
        self._prepared_planes = len(planes)

    def _move(self, plane: Any, index: Any, guard: Any, length: Any) -> Iterator[_Launch]:
        for row in _rows(plane):
            yield self._over_slots(f"eagle_take_{plane.itemsize}", row, index, self._scratch, guard, length)
            yield self._over_slots(f"eagle_put_{plane.itemsize}", self._scratch, row, guard, length)

    def _over_slots(self, kernel: str, *arguments: Any) -> _Launch:
        return _Launch(self._kernels[kernel], self._grid, _BLOCK, arguments)

    def _identity(self, *arrays: Any) -> _Launch:
        perm, inv, map_ = (_NULL if array is None else array for array in arrays)
        return self._over_slots("eagle_identity", perm, inv, map_, np.uint32(self.n))

    def _home(self, *, fresh: bool) -> _Launch:
        return _Launch(self._kernels["eagle_home"], _ONE, _ONE, (self.words, np.uint32(self.n), np.uint32(fresh)))

    def _word(self, word: Word) -> Any:
        return self.words[word : word + 1]

    def _issue(self, launches: Sequence[_Launch]) -> None:
        check_device(self._device)
        with self._on_device():
            for launch in launches:
                launch.issue()

    def _on_device(self) -> Any:
        return self._cupy.cuda.Device(self._device)

    def _refuse_capture(self, why: str) -> None:
        if self.capturing():
            raise BackendUnavailable(
                f"{why}, which a stream capture does not allow; make the set, own its planes and call "
                "prepare_compaction() before the capture"
            )


def _rows(plane: Any) -> Iterator[np.uint64]:
    """The addresses of the rows of a plane; its owner keeps the memory."""
    pitch = plane.shape[-1] * plane.itemsize
    for row in range(plane.shape[0] if plane.ndim > 1 else 1):
        yield np.uint64(plane.data.ptr + row * pitch)


def _loaded_on(device: int) -> _Loaded:
    """The kernels of active_set.cu on the current device, `device`; compiled once per process and device.

    CuPy keeps the compiled code on disk, so another process only loads it.
    """
    loaded = _loaded.get(device)
    if loaded is not None:
        return loaded
    with _loading:
        if device not in _loaded:
            attributes = require_cupy().cuda.Device(device).attributes
            _loaded[device] = _Loaded(_load(), int(attributes["MultiProcessorCount"]))
        return _loaded[device]


def _load() -> dict[str, Any]:
    cupy = require_cupy()
    module = cupy.RawModule(code=Path(__file__).with_name("active_set.cu").read_text(encoding="utf-8"))
    names = ["count", "scan", "scatter", "source", "adopt", "close", "identity", "home"]
    names += [f"{move}_{width}" for move in ("take", "put") for width in _WIDTHS]
    kernels = {f"eagle_{name}": module.get_function(f"eagle_{name}") for name in names}
    # CUDA loads a kernel's code at its first launch, which a capture does not allow: each is launched here, on nothing.
    nothing, zero = cupy.zeros(16, np.uint32), np.uint32(0)
    arguments: dict[str, tuple[Any, ...]] = {
        "count": (nothing, zero, nothing),
        "scan": (nothing, zero, nothing, np.float64(0), zero, _NULL, _NULL),
        "scatter": (nothing, zero, nothing, nothing),
        "source": (nothing, zero, nothing, nothing),
        "adopt": (nothing, nothing, nothing, nothing, nothing),
        "close": (nothing,),
        "identity": (_NULL, _NULL, _NULL, zero),
        "home": (nothing, zero, zero),
        "take": (nothing, nothing, nothing, nothing, nothing),
        "put": (nothing, nothing, nothing, nothing),
    }
    for name in names:
        block = _SCAN_BLOCK if name == "scan" else _BLOCK
        kernels[f"eagle_{name}"](_ONE, block, arguments[name.split("_")[0]])
    return kernels
