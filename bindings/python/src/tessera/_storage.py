"""The interface of a storage: what users subclass or implement, and what the adapters of this package build on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, Protocol

__all__ = ["ObjectStatus", "Reader", "Storage", "Upload"]


class ObjectStatus(NamedTuple):
    """The status of a key."""

    is_directory: bool = False
    """Whether it is not an object but a prefix of other keys: ``runs/a`` if ``runs/a/latest`` exists."""
    size: int = 0
    """Size in bytes."""
    modified: float = 0.0
    """Modification time in seconds since 1970 by the storage's clock; 0 if unknown. Then the lease of a job that died
    on another machine must be removed by hand."""


class Reader(Protocol):
    """An object opened for reading. Called from several threads at once."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def read(self, offset: int, into: memoryview) -> int:
        """Fill `into` from byte `offset` on. Returns the number of bytes, fewer only at the object's end."""

    def close(self) -> None:
        """Called once, last."""


class Upload(Protocol):
    """A large object that is being written."""

    def part(self, index: int, offset: int, data: memoryview) -> None:
        """Write part `index`, counted from 0, at byte `offset`. `data` is valid only during the call.

        Called from several threads and in any order if the storage sets `parts_in_any_order`, else in sequence.
        """

    def finish(self) -> None:
        """Called after all parts: the object appears, complete and durable."""

    def drop(self) -> None:
        """Called once, last. Unless `finish` returned, remove everything that was written."""


class Storage(ABC):
    """Base class of storages for checkpoints: `Saver` and `Checkpoint` take one as `storage`. Subclass it.

    Keys are strings of parts joined by ``/``, without a leading or trailing one. An object appears atomically and
    complete when `put` or an upload's `finish` returns, and every later call, from any process, sees it.

    Every method may be called from several threads at once, including threads of the library, and must not use the
    saver or checkpoint that it serves. An exception becomes the error of the save or load on all ranks: a
    `TesseraError` of the same kind for OSErrors and TesseraErrors, else `UserError`. Methods should have their own
    deadlines.
    """

    parts_in_any_order: bool = False
    """Whether an upload's parts may come in any order and concurrently. If not, a save reads its data twice."""
    puts_if_absent: bool = False
    """Whether `put` with `if_absent` is atomic."""
    part_bytes: int = 0
    """The minimum size of all parts but the last; 0 for 8 MiB. Parts are larger if there would be more than 10,000."""

    @abstractmethod
    def status(self, key: str) -> ObjectStatus | None:
        """The status of `key`; None if it does not exist."""

    @abstractmethod
    def open(self, key: str) -> Reader | None:
        """Open an object for reading; None if it does not exist."""

    @abstractmethod
    def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        """Write a small object atomically. `data` is valid only during the call.

        With `if_absent`, which is used only if `puts_if_absent`, keep an existing object and return False.
        """

    @abstractmethod
    def begin(self, key: str, size: int) -> Upload:
        """Begin a large object of `size` bytes, or up to 4095 fewer. It replaces an existing object."""

    @abstractmethod
    def list(self, key: str) -> Iterable[str]:
        """The names directly below `key`; empty if there are none. An empty key is the top level."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove an object. It is not an error if it does not exist."""

    def remove_directory(self, key: str) -> None:  # noqa: B027  # most storages have none
        """Remove an empty directory, in storages that have directories."""

    # For the library's callbacks: plain numbers, and no exception for a missing object.

    def _status(self, key: str) -> tuple[bool, int, int] | None:
        try:
            found = self.status(key)
        except FileNotFoundError:
            return None
        return None if found is None else (found.is_directory, found.size, int(found.modified * 1000))

    def _open(self, key: str) -> Reader | None:
        try:
            return self.open(key)
        except FileNotFoundError:
            return None
