"""An array of no framework that eagle knows."""

from __future__ import annotations

from typing import Any

import numpy as np


class Producer:
    """A DLPack producer of no known framework, over a NumPy array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()
