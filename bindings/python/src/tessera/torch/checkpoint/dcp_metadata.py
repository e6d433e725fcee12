"""The `.metadata` of a checkpoint in PyTorch's format: read without executing it, and written for any PyTorch.

The core writes a save into its own directory below the checkpoint's. The `.metadata` that PyTorch reads is in the
checkpoint's directory, refers to the save, and is replaced by one rename, which makes the new save visible to PyTorch.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..._base import sync_directory
from ...errors import Corrupt, NotFound, TesseraIOError, Unsupported
from .record import core_name
from .rows import Entry

__all__ = ["METADATA", "metadata_over", "read_metadata", "whole_tensor", "write_metadata"]

METADATA = ".metadata"
_MODULES = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class _Unpickler(pickle.Unpickler):
    """Accepts only the classes of a `.metadata`."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _MODULES and name.lstrip("_")[:1].isupper() and "." not in name:
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePath
        if module in ("builtins", "__builtin__") and name == "getattr":  # the second up to protocol 2
            return _enum_member
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a {METADATA}")


def _enum_member(owner: Any, name: str) -> Any:
    """Python 3.11.0 to 3.11.3 pickle an enum's member with getattr."""
    if owner is not _MEM_FORMAT_ENCODING and getattr(owner, "__name__", "") != "MEM_FORMAT_ENCODING":
        raise pickle.UnpicklingError(f"getattr of {owner!r} is not allowed in a {METADATA}")
    return owner[name]


def read_metadata(directory: str | os.PathLike[str]) -> Metadata:
    """The metadata of a directory in PyTorch's format.

    Raises
    ------
    NotFound
        The file does not exist.
    Corrupt
        It is not PyTorch's metadata. Nothing was executed.
    """
    path = Path(directory) / METADATA
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist") from None
    except OSError as error:
        raise TesseraIOError(f"cannot read {path}: {error}") from error
    except Exception as error:
        raise Corrupt(f"{path} is not the metadata of a PyTorch checkpoint: {error}") from error
    if not isinstance(found, Metadata):
        raise Corrupt(f"{path} holds a {type(found).__name__}, expected Metadata")
    return found


def metadata_over(save: Path, entries: list[Entry], storage: StorageMeta) -> Metadata:
    """The metadata of a checkpoint whose data the core wrote into `save`, a directory below the checkpoint's."""
    inner = read_metadata(save)
    pickles = {entry.name for entry in entries if entry.kind == "pickle"}
    by_core_name = {core_name(entry.name) if entry.kind != "value" else entry.name: entry.name for entry in entries}
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for index, info in inner.storage_data.items():
        name = by_core_name.get(index.fqn)
        if name is None:
            raise Unsupported(f"the core wrote {index.fqn!r}, which is not a name of the state")
        place = replace(info, relative_path=f"{save.name}/{info.relative_path}")
        if name in pickles:
            described[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _content_of(save, info, place)
        else:
            described[name] = inner.state_dict_metadata[index.fqn]
            places[replace(index, fqn=name)] = place
    for name, tensor in inner.state_dict_metadata.items():  # tensors without elements have no data
        described.setdefault(by_core_name.get(name, name), tensor)
    paths = {entry.name: entry.path for entry in entries}
    return Metadata(described, planner_data=paths, storage_data=places, storage_meta=storage, version="1.0.0")


def _content_of(save: Path, info: _StorageInfo, place: _StorageInfo) -> _StorageInfo:
    """Where the bytes of a uint8 tensor start in its archive: they are the archive that PyTorch would have written."""
    with (save / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        archive = file.read(info.length)
    with zipfile.ZipFile(io.BytesIO(archive)) as parts:
        entry = next(part for part in parts.infolist() if part.filename.endswith("/data/0"))
    begin = entry.header_offset + 30
    begin += sum(int.from_bytes(archive[entry.header_offset + at : entry.header_offset + at + 2], "little")
                 for at in (26, 28))  # fmt: skip
    return replace(place, offset=info.offset + begin, length=entry.file_size)


class _Pickler(pickle.Pickler):
    """Writes what PyTorch 2.4 and newer read: newer versions add a sixth field to tensor properties."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is TensorProperties:
            state = (obj.dtype, obj.layout, obj.requires_grad, _MEM_FORMAT_ENCODING(0), obj.pin_memory)
            return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]
        return NotImplemented


def write_metadata(directory: Path, metadata: Metadata) -> None:
    """Replace a directory's metadata, durably and in one step."""
    temporary = directory / f"{METADATA}.tmp-{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            _Pickler(file, protocol=2).dump(metadata)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / METADATA)
        sync_directory(directory)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TesseraIOError(f"cannot write {directory / METADATA}: {error}") from error


def whole_tensor(size: tuple[int, ...], dtype: torch.dtype) -> TensorStorageMetadata:
    """The metadata of a tensor for a planner: one chunk, because the core reads any box of it."""
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), [whole])
