"""A kind of package for both faces, whose functions may be called like the modules that hold them."""

from __future__ import annotations

from types import ModuleType

__all__ = ("FunctionsFirst",)


class FunctionsFirst(ModuleType):
    """A package in which the function `simulation` keeps its name although a module of that name is loaded."""

    __all__: tuple[str, ...]

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and name in self.__all__:
            value = getattr(value, name)
        super().__setattr__(name, value)
