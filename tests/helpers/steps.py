"""Steps of pipelines that mean the same on both targets: they work on small arrays of the target, and count.

On the host a step is Python that works on NumPy arrays; on the GPU it launches a kernel on CuPy ones.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

import eagle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SOURCE = r"""
extern "C" __global__ void tick(unsigned int* word) { *word += 1u; }
extern "C" __global__ void put(unsigned int* word, unsigned int value) { *word = value; }
extern "C" __global__ void countdown(unsigned int* left, unsigned int* ran) { if (*left) *left -= 1u; *ran += 1u; }
extern "C" __global__ void append(unsigned int* log, unsigned int value) { log[0] += 1u; log[log[0]] = value; }
extern "C" __global__ void hold(volatile unsigned int* gate, volatile unsigned int* inside, unsigned int* passed) {
    *inside = 1u;
    while (*gate == 0u) __nanosleep(1000);
    *passed += 1u;
}
"""
_ARGUMENTS = {"tick": 1, "put": 1, "countdown": 2, "append": 1, "hold": 3}  # words; put and append take a value, too
_kernels: dict[str, Any] = {}
LIMIT_S = 15.0


class Latch:
    """A step that says it is inside and stays there until it is opened."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._entered, self._open = threading.Event(), threading.Event()
        self._words = [steps.words(0) for _ in range(3)]  # gate, inside, passed
        self._side = steps.side_stream()

    def __call__(self) -> None:
        if self._steps.target == "cuda":
            self._steps.call("hold", *self._words)
            return
        self._entered.set()
        if not self._open.wait(LIMIT_S):
            raise TimeoutError("the test never opened this latch")
        self._words[2][0] += 1

    @property
    def entered(self) -> bool:
        """Whether the step has been inside."""
        return self._entered.is_set() or (self._steps.target == "cuda" and self._read(1) == 1)

    @property
    def passed(self) -> int:
        """How often it was left."""
        return self._read(2)

    def open(self) -> None:
        """Let it pass, now and later."""
        self._open.set()
        if self._steps.target == "cuda":
            with self._side:
                self._words[0][...] = 1
            self._side.synchronize()

    def _read(self, which: int) -> int:
        word = self._words[which]
        return int(word[0]) if self._side is None else int(word.get(stream=self._side)[0])


class Steps:
    """Makes arrays and steps for one target."""

    def __init__(self, target: str) -> None:
        self.target = target
        if target == "cuda":
            import cupy

            self._xp: Any = cupy
            _load(cupy)
        else:
            self._xp = np

    def words(self, *values: int) -> Any:
        """A uint32 array of the target."""
        array = self._xp.asarray(np.array(values, np.uint32))
        self.settle()
        return array

    def log(self) -> Any:
        """What `append` writes to: its length, then the values."""
        return self.words(*[0] * 64)

    def read(self, array: Any) -> list[int]:
        """The words as Python ints."""
        return [int(word) for word in (array.get() if self.target == "cuda" else array)]

    def logged(self, log: Any) -> list[int]:
        """The values that `append` wrote."""
        words = self.read(log)
        return words[1 : 1 + words[0]]

    def write(self, array: Any, *values: int) -> None:
        """Write the words, and wait until they are there."""
        array[...] = self._xp.asarray(np.array(values, np.uint32))
        self.settle()

    def settle(self) -> None:
        """Wait for the device."""
        if self.target == "cuda":
            self._xp.cuda.get_current_stream().synchronize()

    def side_stream(self) -> Any:
        """A stream of its own; None on the host."""
        return self._xp.cuda.Stream(non_blocking=True) if self.target == "cuda" else None

    def tick(self, word: Any) -> Callable[[], None]:
        """Count in a word."""
        return lambda: self.call("tick", word)

    def put(self, word: Any, value: int) -> Callable[[], None]:
        """Set a word."""
        return lambda: self.call("put", word, value=value)

    def countdown(self, left: Any, ran: Any) -> Callable[[], None]:
        """Count one word down and another up."""
        return lambda: self.call("countdown", left, ran)

    def append(self, log: Any, value: int) -> Callable[[], None]:
        """Write a value behind the others."""
        return lambda: self.call("append", log, value=value)

    def latch(self) -> Latch:
        """A step that holds the replay."""
        return Latch(self)

    def pipeline(self, *steps: Any, name: str | None = None) -> eagle.GraphPipeline:
        """A built pipeline of these steps."""
        pipe = eagle.GraphPipeline(name, self.target)
        for step in steps:
            pipe.add(step)
        return pipe.build()

    def call(self, kernel: str, *words: Any, value: int | None = None) -> None:
        """Do on the target what the kernel's name says."""
        if self.target == "cuda":
            arguments = words if value is None else (*words, np.uint32(value))
            _kernels[kernel]((1,), (1,), arguments)
        elif kernel == "tick":
            words[0][0] += 1
        elif kernel == "put":
            words[0][0] = value
        elif kernel == "countdown":
            words[0][0] -= 1 if words[0][0] else 0
            words[1][0] += 1
        elif kernel == "append":
            words[0][0] += 1
            words[0][words[0][0]] = value


@contextmanager
def held(*latches: Latch) -> Iterator[None]:
    """Open the latches when the block ends, also when it fails."""
    try:
        yield
    finally:
        for latch in latches:
            latch.open()


async def until(check: Callable[[], object]) -> None:
    """Wait for what another thread or the device does; the test's deadline bounds it."""
    while not check():
        await anyio.sleep(0.001)


def until_blocking(check: Callable[[], object]) -> None:
    """The same without a loop, with a limit of its own."""
    end = time.monotonic() + LIMIT_S
    while not check():
        assert time.monotonic() < end, "this never came about"
        time.sleep(0.001)


def _load(cupy: Any) -> None:
    if _kernels:
        return
    module = cupy.RawModule(code=_SOURCE)
    gates = cupy.ones(64, cupy.uint32)  # a raised gate lets `hold` pass
    for name, words in _ARGUMENTS.items():
        kernel = _kernels[name] = module.get_function(name)
        value = (np.uint32(0),) if name in ("put", "append") else ()
        gates[0] = 1 if name == "hold" else 0
        kernel((1,), (1,), (*(gates[i:] for i in range(words)), *value))  # loaded here: a capture forbids it
    cupy.cuda.get_current_stream().synchronize()
