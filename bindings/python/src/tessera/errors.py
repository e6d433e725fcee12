"""Exceptions: one class a status code of the C library, each a `RuntimeError` and, if another one fits, that builtin.

Every exception says what failed, with which value, on which rank, and what to try; carries the facts as attributes;
keeps the chain of causes as ``__cause__``; and can be pickled, so that it survives a process pool.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

__all__ = [
    "Aborted",
    "Code",
    "CommitUnknown",
    "Corrupt",
    "CudaError",
    "InternalError",
    "Interrupted",
    "InvalidArgument",
    "InvalidState",
    "Mismatch",
    "NativeCode",
    "NcclError",
    "NoMemory",
    "NotFound",
    "NotReady",
    "PeerLost",
    "PermissionDenied",
    "TesseraError",
    "TesseraIOError",
    "TesseraTimeout",
    "Unsupported",
    "UserError",
    "VersionMismatch",
]


class Code(IntEnum):
    """Status codes of the C library; numbers are never reused."""

    INVALID_ARGUMENT = 1
    INVALID_STATE = 2
    TIMEOUT = 3
    ABORTED = 4
    PEER_LOST = 5
    MISMATCH = 6
    IO = 7
    CORRUPT = 8
    NOT_FOUND = 9
    NOT_READY = 10
    INTERRUPTED = 11
    COMMIT_UNKNOWN = 12
    NO_MEMORY = 13
    UNSUPPORTED = 14
    VERSION = 15
    PERMISSION = 16
    CUDA = 17
    NCCL = 18
    USER = 19
    INTERNAL = 20


class NativeCode(NamedTuple):
    """The code beneath an error.

    Attributes
    ----------
    domain : str
        ``"errno"``, ``"cuda"``, ``"nccl"`` or ``"user"``.
    code : int
        An errno, a CUDA or NCCL result, or what a callback returned.
    """

    domain: str
    code: int


_DOMAINS = {1: "errno", 2: "cuda", 3: "nccl", 4: "user"}


class TesseraError(RuntimeError):
    """Base of all that Tessera raises; ``except ts.TesseraError`` catches every failure of the library.

    A `RuntimeError`, as failures of native libraries are for Python programs, PyTorch's of its process groups too.

    Attributes
    ----------
    code : Code
        The status code.
    rank : int or None
        The rank on which the error arose.
    peer : int or None
        The rank that the error is about: the dead, the late or the differing one.
    operation : str or None
        The operation that failed, ``"all_reduce"``.
    sequence : int or None
        The number of the collective that failed; counts from 1 per communicator, sends and receives apart.
    native : NativeCode or None
        The code beneath: errno, CUDA, NCCL or a callback's value.
    retriable : bool
        Whether the same call may succeed if made again with nothing rebuilt.
    """

    code: Code = Code.INTERNAL
    rank: int | None = None
    peer: int | None = None
    operation: str | None = None
    sequence: int | None = None
    native: NativeCode | None = None
    retriable: bool = False
    _launcher_peer: int | None = None  # the launcher's number of `peer`, of an error that Python found

    by_code: ClassVar[dict[int, type[TesseraError]]] = {}

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:
            TesseraError.by_code[int(cls.code)] = cls

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {name: self.__dict__[name] for name in _FACTS if name in self.__dict__}
        return _rebuild, (type(self), self.message, facts, self.__cause__)


_FACTS = ("rank", "peer", "operation", "sequence", "native", "retriable", "errno")


def _rebuild(cls: type[TesseraError], message: str, facts: dict[str, Any], cause: BaseException | None) -> TesseraError:
    error = cls(message)
    for name, value in facts.items():
        setattr(error, name, value)
    error.__cause__ = cause
    return error


class InvalidArgument(TesseraError, ValueError):
    """A value that the call cannot take."""

    code = Code.INVALID_ARGUMENT


class InvalidState(TesseraError):
    """The right value at the wrong moment; also any call of a closed object, or in a forked child."""

    code = Code.INVALID_STATE


class TesseraTimeout(TesseraError, TimeoutError):
    """A deadline passed; the message names who was awaited."""

    code = Code.TIMEOUT


class Aborted(TesseraError):
    """The communicator failed before; ``__cause__`` says how."""

    code = Code.ABORTED


class PeerLost(TesseraError, ConnectionError):
    """A rank died; ``peer`` names it."""

    code = Code.PEER_LOST


class Mismatch(TesseraError, ValueError):
    """The ranks, or a checkpoint and a state, disagree; the message names every difference."""

    code = Code.MISMATCH


class TesseraIOError(TesseraError, OSError):
    """The operating system refused; ``errno`` and ``native`` tell why."""

    code = Code.IO


class Corrupt(TesseraError, ValueError):
    """Data fails its checksum or its format; the message names file and offset."""

    code = Code.CORRUPT


class NotFound(TesseraError, LookupError):
    """There is no such key, tensor, dimension or checkpoint."""

    code = Code.NOT_FOUND


class NotReady(TesseraError, TimeoutError):
    """A wait expired; the work lives on and may be waited for again."""

    code = Code.NOT_READY


class Interrupted(TesseraError, InterruptedError):
    """A blocking call was asked to return. Ctrl-C raises `KeyboardInterrupt` itself instead."""

    code = Code.INTERRUPTED


class CommitUnknown(TesseraError):
    """A rank was lost after the votes of a save: whether the manifest exists decides."""

    code = Code.COMMIT_UNKNOWN


class NoMemory(TesseraError, MemoryError):
    """An allocation failed."""

    code = Code.NO_MEMORY


class Unsupported(TesseraError, NotImplementedError):
    """A right call that this build or this machine cannot do."""

    code = Code.UNSUPPORTED


class VersionMismatch(TesseraError):
    """A library, peer or checkpoint format of another version."""

    code = Code.VERSION


class PermissionDenied(TesseraError, PermissionError):
    """A wrong or missing job token, or access denied by the operating system."""

    code = Code.PERMISSION


class CudaError(TesseraError):
    """CUDA failed; ``native`` holds its result."""

    code = Code.CUDA


class NcclError(TesseraError):
    """NCCL failed; ``native`` holds its result."""

    code = Code.NCCL


class UserError(TesseraError):
    """A callback returned non-zero; ``native`` holds its value."""

    code = Code.USER


class InternalError(TesseraError):
    """A defect of Tessera. Please report it."""

    code = Code.INTERNAL


def _from_native(
    code: int,
    message: str,
    rank: int,
    peer: int,
    operation: str,
    sequence: int,
    domain: int,
    native: int,
    retriable: bool,
    cause: TesseraError | None,
) -> TesseraError:
    """Build the exception for an error of the C library. Called by ``_core`` alone."""
    error = TesseraError.by_code.get(code, TesseraError)(message or f"Tessera failed with status {code}")
    error.rank = rank if rank >= 0 else None
    error.peer = peer if peer >= 0 else None
    error.operation = operation or None
    error.sequence = sequence if sequence >= 0 else None
    error.native = NativeCode(_DOMAINS[domain], native) if domain in _DOMAINS else None
    error.retriable = retriable
    if isinstance(error, OSError) and error.native is not None and error.native.domain == "errno":
        error.errno = native
    error.__cause__ = cause
    return error


def _status_of(error: BaseException) -> int:
    """The status of what a callback raised; -1, which the library returns as `UserError`, if none fits."""
    if isinstance(error, TesseraError):
        return int(error.code)
    for kind, code in (
        (FileNotFoundError, Code.NOT_FOUND),
        (PermissionError, Code.PERMISSION),
        (TimeoutError, Code.TIMEOUT),
        (MemoryError, Code.NO_MEMORY),
        (OSError, Code.IO),
    ):
        if isinstance(error, kind):
            return int(code)
    return -1
