"""The interface of a storage: what users subclass or implement, and what the adapters of this package build on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, Protocol

__all__ = ["ObjectStatus", "Reader", "Storage", "Upload"]


class ObjectStatus(NamedTuple):
    """What a key is."""

    is_directory: bool = False
    """Whether it is no object, but other keys go on after it: ``runs/a`` if there is ``runs/a/latest``."""
    size: int = 0
    """Bytes."""
    modified: float = 0.0
    """Seconds since 1970 by the storage's clock; 0 if it does not tell. Then the lease of a job that died on another
    machine must be removed by hand."""


class Reader(Protocol):
    """An object opened for reading; called from several threads at once."""

    @property
    def size(self) -> int:
        """Bytes."""

    def read(self, offset: int, into: memoryview) -> int:
        """Fill `into` from byte `offset` on. How many bytes: fewer only at the object's end."""

    def close(self) -> None:
        """Called once, last."""


class Upload(Protocol):
    """A large object while it is written."""

    def part(self, index: int, offset: int, data: memoryview) -> None:
        """Part `index`, from 0, beginning at byte `offset`. `data` is borrowed for the call.

        Called from several threads and in any order if the storage says `parts_in_any_order`, else one after the other.
        """

    def finish(self) -> None:
        """All parts were there: the object appears, whole and durable."""

    def drop(self) -> None:
        """Called once, last. Unless `finish` returned, nothing may be left of the object."""


class Storage(ABC):
    """A storage for checkpoints, to be subclassed: what `Saver` and `Checkpoint` take as `storage`.

    Keys are texts, parts joined by ``/`` without one at either end. An object appears at once and whole when `put` or
    an upload's `finish` returns, and every later call, from any process, sees it.

    Every method may be called from several threads at once, also from threads of the library, and must not use the
    saver or checkpoint that it serves. What it raises becomes the error of the save or load: a `TesseraError` of the
    same kind for OSErrors and TesseraErrors, else `UserError`; all ranks get it. It should have deadlines of its own.
    """

    parts_in_any_order: bool = False
    """Whether an upload's parts may come in any order and at once. If not, a save looks at its data twice."""
    puts_if_absent: bool = False
    """Whether `put` with `if_absent` is atomic."""
    part_bytes: int = 0
    """The least size of all parts but the last; 0: 8 MiB. Parts are larger where there would be more than 10,000."""

    @abstractmethod
    def status(self, key: str) -> ObjectStatus | None:
        """What `key` is; None if it is nothing."""

    @abstractmethod
    def open(self, key: str) -> Reader | None:
        """Open an object for reading; None if there is none."""

    @abstractmethod
    def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        """Put a small object, whole. `data` is borrowed for the call.

        With `if_absent`, asked for only of what `puts_if_absent`, an object that is there stays, and False is returned.
        """

    @abstractmethod
    def begin(self, key: str, size: int) -> Upload:
        """Begin a large object of `size` bytes, or up to 4095 less; one that is there is replaced."""

    @abstractmethod
    def list(self, key: str) -> Iterable[str]:
        """The names directly below `key`; none if there is nothing. An empty key is the top."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    def remove_directory(self, key: str) -> None:  # noqa: B027  # most storages have none
        """Remove an empty directory, where there are such."""

    # What the library's callbacks read: plain numbers, and a missing object without an exception's cost.

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
