"""Checkpoints outside the local file system: in an object store, or anything that keeps named objects.

    import fsspec
    storage = ts.storage.from_fsspec(fsspec.filesystem("s3"), "bucket/team")
    saver = ts.Saver(comm, "runs/a", storage=storage)

A storage needs few features. It need not rename, lock, append, write at arbitrary offsets, or have directories. A save
is committed by its manifest, an object that is put last; see docs/STORAGE.md.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from . import _core
from .errors import InvalidArgument

__all__ = ["ObjectStatus", "Reader", "Storage", "Upload", "from_fsspec"]


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


@contextlib.contextmanager
def in_library(storage: Storage | None) -> Iterator[_core.Storage | None]:
    """The library's handle for a storage; objects made with it keep the storage alive."""
    if storage is None:
        yield None
        return
    if not isinstance(storage, Storage):
        raise InvalidArgument(
            f"storage is {storage!r}; it must be a tessera.Storage, such as tessera.storage.from_fsspec(filesystem)"
        )
    handle = _core.storage_create(
        storage,
        parts_in_any_order=bool(storage.parts_in_any_order),
        puts_if_absent=bool(storage.puts_if_absent),
        part_bytes=storage.part_bytes,
    )
    try:
        yield handle
    finally:
        _core.storage_destroy(handle)


def from_fsspec(filesystem: Any, prefix: str = "") -> Storage:
    """A storage over an fsspec file system: ``memory``, ``s3``, ``gs``, ``abfs``, ``file`` and others.

    Parameters
    ----------
    filesystem : fsspec.AbstractFileSystem
        With ``s3fs``, parts are sent concurrently and puts are conditional; others write a file sequentially. On
        directory-like file systems (local, SFTP, HDFS, SMB) objects are written to a temporary name and renamed.
    prefix : str
        Prefix of all keys, such as ``"bucket/team"``.

    Returns
    -------
    Storage
        For `Saver` and `Checkpoint`.
    """
    from ._fsspec import storage_of

    return storage_of(filesystem, prefix)
