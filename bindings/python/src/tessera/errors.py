"""Exceptions: one class per status code of the C library, each a `RuntimeError` and, where one fits, another builtin.

The message of an exception states what failed, with which value, on which rank, and what to do. Exceptions carry these
facts as attributes, keep the chain of causes as ``__cause__``, and can be pickled, so that they survive a process pool.
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


class Named(IntEnum):
    """Base of the enumerations: integers that print as a program writes them, ``DType.F32``."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class Code(Named):
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
    """The underlying code of an error.

    Attributes
    ----------
    domain : str
        ``"errno"``, ``"cuda"``, ``"nccl"`` or ``"user"``.
    code : int
        An errno, a CUDA or NCCL result, or the value that a callback returned.
    """

    domain: str
    code: int


_DOMAINS = {1: "errno", 2: "cuda", 3: "nccl", 4: "user"}


class TesseraError(RuntimeError):
    """Base of all exceptions that Tessera raises; ``except ts.TesseraError`` catches every failure of the library.

    A `RuntimeError`, as usual for failures of native libraries in Python, including PyTorch's process groups.

    Attributes
    ----------
    code : Code
        The status code.
    rank : int or None
        The rank on which the error occurred.
    peer : int or None
        The rank that the error is about: the dead, late or differing one.
    operation : str or None
        The operation that failed, such as ``"all_reduce"``.
    sequence : int or None
        The number of the failed collective, counted from 1 per communicator; sends and receives count separately.
    native : NativeCode or None
        The underlying code: errno, CUDA, NCCL or a callback's value.
    retriable : bool
        Whether the same call may succeed if repeated without rebuilding anything.
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
    """An argument has an invalid value."""

    code = Code.INVALID_ARGUMENT


class InvalidState(TesseraError):
    """The call is not valid in the current state; also any call on a closed object, or in a forked child."""

    code = Code.INVALID_STATE


class TesseraTimeout(TesseraError, TimeoutError):
    """A deadline passed; the message names the ranks that were waited for."""

    code = Code.TIMEOUT


class Aborted(TesseraError):
    """The communicator failed earlier; ``__cause__`` is the reason."""

    code = Code.ABORTED


class PeerLost(TesseraError, ConnectionError):
    """A rank died; ``peer`` names it."""

    code = Code.PEER_LOST


class Mismatch(TesseraError, ValueError):
    """The ranks, or a checkpoint and a state, differ; the message names every difference."""

    code = Code.MISMATCH


class TesseraIOError(TesseraError, OSError):
    """An operating system call failed; ``errno`` and ``native`` hold the reason."""

    code = Code.IO


class Corrupt(TesseraError, ValueError):
    """Data fails its checksum or its format; the message names file and offset."""

    code = Code.CORRUPT


class NotFound(TesseraError, LookupError):
    """The key, tensor, dimension or checkpoint does not exist."""

    code = Code.NOT_FOUND


class NotReady(TesseraError, TimeoutError):
    """A wait expired; the operation continues and may be waited for again."""

    code = Code.NOT_READY


class Interrupted(TesseraError, InterruptedError):
    """A blocking call was interrupted. Ctrl-C raises `KeyboardInterrupt` instead."""

    code = Code.INTERRUPTED


class CommitUnknown(TesseraError):
    """A rank was lost after the votes of a save; the save is committed if its manifest exists."""

    code = Code.COMMIT_UNKNOWN


class NoMemory(TesseraError, MemoryError):
    """An allocation failed."""

    code = Code.NO_MEMORY


class Unsupported(TesseraError, NotImplementedError):
    """A valid call that this build or machine does not support."""

    code = Code.UNSUPPORTED


class VersionMismatch(TesseraError):
    """A library, peer or checkpoint format has another version."""

    code = Code.VERSION


class PermissionDenied(TesseraError, PermissionError):
    """The job token is wrong or missing, or the operating system denied access."""

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
    """A bug in Tessera. Please report it."""

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
    """Build the exception for an error of the C library. Called only by ``_core``."""
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
    """The status for an exception of a callback; -1, which the library returns as `UserError`, if none fits."""
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
