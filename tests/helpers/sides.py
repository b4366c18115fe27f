"""The two targets behind one set of array calls, so that one test body runs on both."""

from __future__ import annotations

from typing import Any

import numpy as np


class Side:
    """Arrays of one target.

    Args:
        target: "host" or "cuda".
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.cuda = target == "cuda"
        self.xp: Any = np
        if self.cuda:
            import cupy

            self.xp = cupy

    def put(self, planes: dict[str, Any]) -> dict[str, Any]:
        """Copies of host planes on the target; numbers stay what they are."""
        return {name: self.xp.array(v) if isinstance(v, np.ndarray) else v for name, v in planes.items()}

    def get(self, array: Any) -> np.ndarray:
        """A host copy, made when everything on the target has ended."""
        self.settle()
        return array.get() if self.cuda else np.array(array)

    def settle(self) -> None:
        """Wait for the target."""
        if self.cuda:
            self.xp.cuda.runtime.deviceSynchronize()
