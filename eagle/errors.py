"""Every exception and warning of eagle.

Each class is an `EagleError` and also the built-in that fits, so code that guards with ``except RuntimeError`` or
``except ValueError`` keeps working. Numbers and names are fields; all classes survive pickling. Messages say what was
given, what was expected and what to do.
"""

from __future__ import annotations

__all__ = (
    "AbiMismatch",
    "ArtifactError",
    "BackendUnavailable",
    "Busy",
    "DeviceFault",
    "EagleError",
    "LayoutWarning",
    "LoopRunning",
    "NonToggleableMemberError",
    "NotBuilt",
    "StateError",
    "UnknownMemberError",
    "UnsupportedSchema",
)


class EagleError(Exception):
    """Root of everything that eagle raises or warns with, except plain TypeError / ValueError for wrong arguments."""


class BackendUnavailable(EagleError, RuntimeError):
    """The device backend cannot serve this call; the message says why and what to install."""


class DeviceFault(EagleError, RuntimeError):
    """The CUDA device failed while work was in flight; the process can no longer use that device.

    Attributes:
        pipeline: Name of the pipeline or simulation whose work was in flight, or None.
        code: CUDA's error code as an int, or None when the driver gave none.
    """

    def __init__(self, message: str, pipeline: str | None = None, code: int | None = None) -> None:
        super().__init__(message, pipeline, code)
        self.pipeline = pipeline
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class NotBuilt(EagleError, RuntimeError):
    """The object must be built first; call its ``build()``."""


class Busy(EagleError, RuntimeError):
    """The object is running already; await the running call first."""


class StateError(EagleError, RuntimeError):
    """The object or the process is past the point where the call makes sense: built already, forked, exiting."""


class LoopRunning(StateError):
    """A blocking call was made in a thread whose event loop runs; the message names the coroutine to await."""


class ArtifactError(EagleError, ValueError):
    """A kernel artifact, sidecar or manifest cannot be used; the message names the file."""


class AbiMismatch(ArtifactError):
    """An artifact speaks another binary interface than this eagle.

    Attributes:
        found: What the artifact declares.
        expected: What this eagle accepts.
    """

    def __init__(self, message: str, found: object = None, expected: object = None) -> None:
        super().__init__(message, found, expected)
        self.found = found
        self.expected = expected

    def __str__(self) -> str:
        return str(self.args[0])


class UnsupportedSchema(ArtifactError):
    """A document names a schema version, role, pattern or format that this eagle does not know."""


class UnknownMemberError(EagleError, KeyError):
    """No member has that name or index.

    Attributes:
        member: The name or index that was asked for.
    """

    def __init__(self, message: str, member: object = None) -> None:
        super().__init__(message, member)
        self.member = member

    def __str__(self) -> str:
        return str(self.args[0])


class NonToggleableMemberError(EagleError, RuntimeError):
    """The member holds more than kernel, memcpy and memset nodes and cannot be switched off.

    Attributes:
        member: The member's name or index.
    """

    def __init__(self, message: str, member: object = None) -> None:
        super().__init__(message, member)
        self.member = member

    def __str__(self) -> str:
        return str(self.args[0])


class LayoutWarning(EagleError, UserWarning):
    """A sample-major plane was copied into the component-major layout that kernels read.

    Filterable like any warning; make it an error with
    ``warnings.filterwarnings("error", category=eagle.LayoutWarning)``.
    """
