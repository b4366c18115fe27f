"""The two kernels that cross frameworks in the interop tests: one with a new result, one that writes its argument."""

import hawk
from hawk import Mutable, Param, Scalar


@hawk.kernel
def scale(x: Scalar, a: Param, b: Param) -> Scalar:
    return a * x + b


@hawk.kernel
def drift(v: Scalar, dt: Param, x: Mutable[Scalar]):
    x = x + dt * v
