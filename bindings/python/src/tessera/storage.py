"""Checkpoints outside the local file system: in an object store, or anything that keeps named objects.

    import fsspec
    storage = ts.storage.from_fsspec(fsspec.filesystem("s3"), "bucket/team")
    saver = ts.Saver(comm, "runs/a", storage=storage)

A storage needs few features. It need not rename, lock, append, write at arbitrary offsets, or have directories. A save
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
    from ._fsspec import storage_of  # most programs do without it

    return storage_of(filesystem, prefix)
