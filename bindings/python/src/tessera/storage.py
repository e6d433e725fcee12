"""Checkpoints elsewhere than in a directory of this machine: in an object store, or whatever keeps named objects.

    import fsspec
    storage = ts.storage.from_fsspec(fsspec.filesystem("s3"), "bucket/team")
    saver = ts.Saver(comm, "runs/a", storage=storage)

What a storage must do is little, and what it need not: rename, lock, append, write at random, know directories. A save
is committed by its manifest, an object that is put last; see docs/STORAGE.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from . import _core
from ._storage import ObjectStatus, Reader, Storage, Upload
from .errors import InvalidArgument

__all__ = ["ObjectStatus", "Reader", "Storage", "Upload", "from_fsspec"]


@contextlib.contextmanager
def in_library(storage: Storage | None) -> Iterator[_core.Storage | None]:
    """The library's handle for a storage; whatever is made with it keeps the storage alive."""
    if storage is None:
        yield None
        return
    if not isinstance(storage, Storage):
        raise InvalidArgument(
            f"storage is {storage!r}; a tessera.Storage is wanted, such as tessera.storage.from_fsspec(filesystem)"
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
    """A storage over a file system of fsspec: ``memory``, ``s3``, ``gs``, ``abfs``, ``file`` and others.

    Parameters
    ----------
    filesystem : fsspec.AbstractFileSystem
        Of ``s3fs`` parts are sent at once and puts are conditional; others take a file from its begin to its end. Of
        those that are like a directory (local, SFTP, HDFS, SMB) objects are written under another name and renamed.
    prefix : str
        Where keys begin, such as ``"bucket/team"``.

    Returns
    -------
    Storage
        For `Saver` and `Checkpoint`.
    """
    from ._fsspec import storage_of  # most programs do without it

    return storage_of(filesystem, prefix)
