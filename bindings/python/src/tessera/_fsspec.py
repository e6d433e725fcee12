"""fsspec file systems as storages: plain object stores, S3 with all its features, and directory-like file systems."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from ._base import sync_directory
from ._storage import ObjectStatus, Reader, Storage, Upload

_RENAMING = {"file", "local", "sftp", "ssh", "hdfs", "webhdfs", "arrow_hdfs", "smb", "ftp", "dask"}


def storage_of(filesystem: Any, prefix: str) -> Storage:
    """The adapter that fits the file system."""
    protocols = filesystem.protocol if isinstance(filesystem.protocol, (tuple, list)) else (filesystem.protocol,)
    if "s3" in protocols and hasattr(filesystem, "call_s3"):
        return _S3(filesystem, prefix)
    if _RENAMING.intersection(protocols):
        return _Directory(filesystem, prefix)
    return _ObjectStore(filesystem, prefix)


def _seconds(info: dict[str, Any]) -> float:
    """The modification time of an object, whatever its file system calls it; 0 if unknown."""
    for name in ("LastModified", "mtime", "updated", "last_modified", "modified", "created"):
        when = info.get(name)
        if isinstance(when, (int, float)):
            return float(when)
        if isinstance(when, datetime):
            return when.timestamp()
    return 0.0


class _Range:
    def __init__(self, filesystem: Any, path: str, size: int) -> None:
        self._filesystem = filesystem
        self._path = path
        self.size = size

    def read(self, offset: int, into: memoryview) -> int:
        end = min(offset + len(into), self.size)
        if end <= offset:
            return 0
        data = self._filesystem.cat_file(self._path, start=offset, end=end)
        into[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass


class _Whole:
    """An upload to a file system without parts: buffered in memory and written at once."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._data = bytearray()

    def part(self, index: int, offset: int, data: memoryview) -> None:
        self._data += data

    def finish(self) -> None:
        self._filesystem.pipe_file(self._path, bytes(self._data))

    def drop(self) -> None:
        self._data = bytearray()


class _Written:
    """An upload through an fsspec file, which splits it into parts itself and publishes it when it is closed."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._file = filesystem.open(path, "wb")
        self._done = False

    def part(self, index: int, offset: int, data: memoryview) -> None:
        self._file.write(data)

    def finish(self) -> None:
        self._file.close()
        self._done = True

    def drop(self) -> None:
        if self._done:
            return
        # Closing would complete it.
        self._file.discard()
        self._file.closed = True


class _ObjectStore(Storage):
    def __init__(self, filesystem: Any, prefix: str) -> None:
        self._filesystem = filesystem
        self._prefix = prefix.strip("/") if not self._is_rooted(prefix) else prefix.rstrip("/")

    @staticmethod
    def _is_rooted(prefix: str) -> bool:
        return False

    def _path(self, key: str) -> str:
        return "/".join(part for part in (self._prefix, key) if part)

    def _fresh(self) -> Any:
        """The file system with its listing cache cleared, because other processes write too."""
        self._filesystem.invalidate_cache()
        return self._filesystem

    def status(self, key: str) -> ObjectStatus | None:
        info = self._fresh().info(self._path(key))
        return ObjectStatus(info["type"] == "directory", int(info.get("size") or 0), _seconds(info))

    def open(self, key: str) -> Reader | None:
        path = self._path(key)
        info = self._fresh().info(path)
        return None if info["type"] == "directory" else _Range(self._filesystem, path, int(info["size"]))

    def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        self._filesystem.pipe_file(self._path(key), bytes(data))
        return True

    def begin(self, key: str, size: int) -> Upload:
        if "memory" in self._filesystem.protocol:
            return _Whole(self._filesystem, self._path(key))
        return _Written(self._filesystem, self._path(key))

    def list(self, key: str) -> Iterator[str]:
        path = self._path(key)
        try:
            found = self._fresh().ls(path, detail=False)
        except FileNotFoundError:
            return
        for name in found:
            if name.strip("/") != path.strip("/"):
                yield name.rstrip("/").rpartition("/")[2]

    def remove(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(self._path(key))


class _Parts:
    """A multipart upload to S3."""

    def __init__(self, call: Any, path: tuple[str, str]) -> None:
        self._call = call
        self._where = {"Bucket": path[0], "Key": path[1]}
        self._id = call("create_multipart_upload", **self._where)["UploadId"]
        self._lock = threading.Lock()
        self._tags: dict[int, str] = {}
        self._done = False

    def part(self, index: int, offset: int, data: memoryview) -> None:
        sent = self._call("upload_part", **self._where, UploadId=self._id, PartNumber=index + 1, Body=bytes(data))
        with self._lock:
            self._tags[index + 1] = sent["ETag"]

    def finish(self) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]
        self._call("complete_multipart_upload", **self._where, UploadId=self._id, MultipartUpload={"Parts": parts})
        self._done = True

    def drop(self) -> None:
        if not self._done:
            self._call("abort_multipart_upload", **self._where, UploadId=self._id)


class _S3(_ObjectStore):
    parts_in_any_order = True
    puts_if_absent = True

    def _place(self, key: str) -> tuple[str, str]:
        bucket, name, _ = self._filesystem.split_path(self._path(key))
        return bucket, name

    def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        bucket, name = self._place(key)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            self._filesystem.call_s3("put_object", Bucket=bucket, Key=name, Body=bytes(data), **condition)
        except FileExistsError:
            return False
        except Exception as error:
            if if_absent and _is_refusal(error):
                return False
            raise
        return True

    def begin(self, key: str, size: int) -> Upload:
        return _Parts(self._filesystem.call_s3, self._place(key))


def _is_refusal(error: BaseException | None) -> bool:
    """Whether S3 replied that the object exists (412) or that another writer is putting it (409)."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict) and response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (409, 412):
            return True
        error = error.__cause__
    return False


class _Directory(_ObjectStore):
    """For file systems that show files while they are written: each is written to a temporary name and renamed."""

    @staticmethod
    def _is_rooted(prefix: str) -> bool:
        return prefix.startswith("/")

    def put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        upload = self.begin(key, len(data))
        try:
            upload.part(0, 0, data)
            upload.finish()
        finally:
            upload.drop()
        return True

    def begin(self, key: str, size: int) -> Upload:
        return _Renamed(self._filesystem, self._path(key))

    def remove_directory(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rmdir(self._path(key))


def _descriptor(file: Any) -> int | None:
    """The descriptor of a local file; None for others, which are as durable as closing makes them."""
    try:
        return int(file.fileno())
    except (AttributeError, io.UnsupportedOperation):
        return None


class _Renamed:
    """An upload to a draft that is then renamed. On a local disk the names are durable once it is finished."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem = filesystem
        self._path = path
        self._changed = [path.rpartition("/")[0]]  # directories that get a name
        while self._changed[-1] and not filesystem.exists(self._changed[-1]):
            self._changed.append(self._changed[-1].rpartition("/")[0])
        filesystem.makedirs(self._changed[0], exist_ok=True)
        self._draft = f"{path}.tmp-{uuid.uuid4().hex[:8]}"
        self._file = filesystem.open(self._draft, "wb")
        self._done = False

    def part(self, index: int, offset: int, data: memoryview) -> None:
        self._file.write(data)

    def finish(self) -> None:
        self._file.flush()
        if (descriptor := _descriptor(self._file)) is not None:
            os.fsync(descriptor)
        self._file.close()
        self._filesystem.mv(self._draft, self._path)
        self._done = True
        if descriptor is not None:
            for directory in self._changed:
                sync_directory(directory or "/")

    def drop(self) -> None:
        if self._done:
            return
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm_file(self._draft)
