"""One save of joined rows into a checkpoint's directory, by the core's saver.

A checkpoint_id is a root of the core's saver that holds one save at a time. A new save is written next to the previous
one and replaces it when it is committed, so a failure before that leaves the previous one intact. In PyTorch's format
rank 0 then replaces the directory's `.metadata`, which makes the new save visible to PyTorch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from ... import _core
from ..._base import Timeout, milliseconds, sync_directory
from ...checkpoint import ProgressFn, settle_progress, watch_progress
from ...comm import Comm
from ...errors import InvalidArgument, InvalidState, TesseraError, TesseraIOError, Unsupported
from ..ranks import Ranks, agree
from ..tensors import bits_of, named_dtype
from .data import refusal
from .dcp_metadata import METADATA, metadata_over, whole_tensor, write_metadata
from .joined import State, join
from .record import RECORD, Record, of_one_rank
from .rows import Entry, Row

__all__ = ["FORMATS", "Save", "is_url", "local_directory"]

FORMATS = ("tessera", "torch_dcp")
_WRITER = "pytorch"
_LOW_PRIORITY = 10  # the nice value that the core gives its own threads
_REMOVED = ".removed-"
_HEAD = re.compile(rb'^\{"format":"[^"]*","version":\d+,"sequence":(\d+),')


def is_url(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint_id is a URL, not a path."""
    return "://" in os.fsdecode(checkpoint_id)


def local_directory(checkpoint_id: str | os.PathLike[str]) -> Path:
    """The absolute path of a checkpoint_id. Raises InvalidArgument for URLs."""
    text = os.fsdecode(checkpoint_id)
    if is_url(text):
        raise InvalidArgument(
            f"{text} is a URL; Tessera's FileSystemWriter and FileSystemReader need a path, use PyTorch's FsspecWriter "
            "and FsspecReader for URLs"
        )
    return Path(text).absolute()


class Save:
    """A save into a directory in one format. Used once."""

    def __init__(
        self,
        ranks: Ranks,
        directory: Path,
        *,
        save_id: str,
        format: str = "tessera",
        step: int = 0,
        overwrite: bool = True,
        timeout: Timeout = None,
        progress: ProgressFn | None = None,
        low_priority: bool = False,
        write_bytes_per_s: int | None = None,
        check_replicas: bool = False,
    ) -> None:
        if format not in FORMATS:
            raise InvalidArgument(f"format is {format!r}; it must be one of {', '.join(FORMATS)}")
        self._ranks = ranks
        self._directory = directory
        self._save_id = save_id  # rank 0's, once the ranks have met
        self._format = format
        self._step = step
        self._overwrite = overwrite
        self._timeout = milliseconds(timeout)
        self._progress = watch_progress(progress)
        self._low_priority = low_priority
        self._write_bytes_per_s = write_bytes_per_s
        self._check_replicas = check_replicas

    def now(self, rows: Callable[[], list[Row]]) -> Metadata:
        """Save and return when the checkpoint is committed. Collective; all ranks raise if one fails."""
        self._ranks.wait()
        entries, state, saver = self._begin(self._ranks.comm, rows)
        try:
            _core.saver_save(saver, self._step, state.handle)
            self._end(self._ranks.comm, entries)
        finally:
            _core.saver_destroy(saver)
        settle_progress(self._progress)
        return self._described(entries)

    def later(self, rows: Callable[[], list[Row]], *, staged: bool = False) -> Future[Metadata]:
        """Return once training may continue; the future is done when the checkpoint is committed. Collective.

        With `staged`, nothing changes the rows' memory before the future is done, so nothing is copied.
        """
        self._ranks.wait()
        # A separate communicator for agreement in the background.
        comm = None if self._ranks.comm is None else self._ranks.comm.split(0, name="torch.checkpoint.async")
        saver = work = None
        try:
            entries, state, saver = self._begin(self._ranks.comm, rows)
            if not staged:
                work = _core.saver_save_async(saver, self._step, state.handle)
        except BaseException:
            self._free(saver, comm)
            raise
        future: Future[Metadata] = Future()
        future.set_running_or_notify_cancel()
        self._ranks.runs(future)

        def finish() -> None:
            try:
                try:
                    if work is None:
                        _core.saver_save(saver, self._step, state.handle)
                    else:
                        _core.saver_wait(saver)
                    self._end(comm, entries)
                finally:
                    self._free(saver, comm)
                settle_progress(self._progress)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(self._described(entries))

        def in_background() -> None:
            if self._low_priority and work is None:  # this thread and the threads it starts write
                with contextlib.suppress(OSError):
                    thread_id = threading.get_native_id()
                    os.setpriority(
                        os.PRIO_PROCESS, thread_id, max(os.getpriority(os.PRIO_PROCESS, thread_id), _LOW_PRIORITY)
                    )
            finish()

        # Not a daemon thread, so that the program waits for its last save before it exits.
        thread = threading.Thread(target=in_background, name="tessera-async-save")
        try:
            thread.start()
        except RuntimeError:  # no thread is available, but the other ranks depend on this one
            finish()
        return future

    @staticmethod
    def _free(saver: Any, comm: Comm | None) -> None:
        if saver is not None:
            _core.saver_destroy(saver)
        if comm is not None:
            comm.close()

    def _begin(self, comm: Comm | None, rows: Callable[[], list[Row]]) -> tuple[list[Entry], State, Any]:
        """The joined state and a saver for it. A failure on one rank fails all ranks, before a byte is written."""
        error: BaseException | None = None
        own: list[Row] = []
        try:
            own = rows()
            self._check(own)
        except Exception as failure:
            error = failure
        agree(comm, error)
        entries, self._save_id = join(comm, own, self._save_id)
        state = None
        try:
            state = State(entries, self._ranks.rank)
            if self._format == "tessera" and self._ranks.rank == 0:
                _core.state_set_value(state.handle, RECORD, Record.of(entries, self._save_id).json())
        except Exception as failure:
            error = failure
        agree(comm, error)
        assert state is not None
        warn_of_more_than_data(entries)
        saver = _core.saver_create(
            None if comm is None else comm._handle,
            str(self._directory),
            keep_latest=0,
            format=self._format,
            timeout_ms=self._timeout,
            low_priority=self._low_priority,
            write_bytes_per_s=self._write_bytes_per_s,
            check_replicas=self._check_replicas,
            progress=self._progress,
            writer=_WRITER,
            writer_version=torch.__version__,
        )
        return entries, state, saver

    def _check(self, rows: list[Row]) -> None:
        if self._ranks.rank == 0 and (self._directory / "manifest.json").exists():
            raise InvalidState(
                f"{self._directory} is a single save in a checkpoint's directory; save into {self._directory.parent}"
            )
        if not self._overwrite and self._ranks.rank == 0 and holds_checkpoint(self._directory):
            raise InvalidState(f"{self._directory} already holds a checkpoint, and overwrite is False")
        for row in rows:
            if of_one_rank(row.name):
                raise InvalidArgument(
                    f"{row.name!r}: names under rank/<r>/ are reserved for values of a single rank; save it under "
                    "another name"
                )
            if row.kind != "tensor" or self._format != "torch_dcp" or not row.dtype:
                continue
            if bits_of(named_dtype(row.dtype)) != named_dtype(row.dtype):
                raise Unsupported(f"{row.name!r} is {row.dtype}, which only the format 'tessera' supports")

    @property
    def _storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self._directory), save_id=self._save_id)

    def _described(self, entries: list[Entry]) -> Metadata:
        """The result of PyTorch's `save`: names, sizes and dtypes, without the location of the data."""
        known = {
            entry.name: whole_tensor(entry.shape, named_dtype(entry.dtype))
            if entry.kind == "tensor"
            else BytesStorageMetadata()
            for entry in entries
        }
        paths = {entry.name: entry.path for entry in entries}
        return Metadata(known, planner_data=paths, storage_meta=self._storage_meta, version="1.0.0")

    def _end(self, comm: Comm | None, entries: list[Entry]) -> None:
        """After the commit: write what PyTorch reads, and remove previous saves."""
        error: BaseException | None = None
        if self._ranks.rank == 0:
            try:
                settle(self._directory, entries if self._format == "torch_dcp" else None, self._storage_meta)
            except OSError as failure:
                error = TesseraIOError(f"{self._directory}: the save is committed, but cleaning up failed: {failure}")
            except Exception as failure:
                error = failure if isinstance(failure, TesseraError) else TesseraError(str(failure))
        agree(comm, error)


def warn_of_more_than_data(entries: list[Entry]) -> None:
    """Warn on the rank that saves such an object, while it can still be saved in another way."""
    pickles = ((entry.name, entry.pieces[0]) for entry in entries if entry.kind == "pickle" and entry.pieces)
    refused = {name: refusal(content.numpy().tobytes()) for name, content in pickles}
    told = [f"{name!r} ({why})" for name, why in refused.items() if why is not None]
    if told:
        warnings.warn(
            "the checkpoint is saved, but load will refuse these objects, which hold more than data; to load them, use "
            f"FileSystemReader(path, weights_only=False): {', '.join(told)}",
            stacklevel=2,
        )


def holds_checkpoint(directory: Path) -> bool:
    """Whether a save into the directory would replace one."""
    return any((directory / name).exists() for name in (METADATA, "manifest.json")) or bool(saves_in(directory))


def saves_in(directory: Path) -> list[tuple[int, Path]]:
    """The committed saves in a directory, oldest commit first."""
    found = []
    for save in directory.glob("step-*"):
        try:
            with (save / "manifest.json").open("rb") as file:
                head = _HEAD.match(file.read(200))
        except OSError:
            continue
        if head is not None:
            found.append((int(head[1]), save))
    return sorted(found)


def settle(directory: Path, entries: list[Entry] | None, storage: StorageMeta) -> None:
    """Keep only the newest of our saves; in PyTorch's format write `entries` to the directory's `.metadata`."""
    saves = saves_in(directory)
    newest = saves[-1][1]
    if entries is not None:
        write_metadata(directory, metadata_over(newest, entries, storage))
    elif (directory / METADATA).exists():
        (directory / METADATA).unlink()
        sync_directory(directory)
    # Held open, so that swapping a directory for a link or another directory cannot make us remove anything else.
    with opened(directory) as root, opened(newest.name, root) as own:
        for sequence, former in saves[:-1]:
            remove(root, former.name, sequence)
        for left in directory.glob(f"{_REMOVED}step-*"):  # left by a process that died here
            with contextlib.suppress(NotADirectoryError), opened(left.name, root) as gone:
                if os.fstat(gone).st_uid == os.fstat(own).st_uid:
                    empty(gone)
                    os.rmdir(left.name, dir_fd=root)


@contextlib.contextmanager
def opened(name: str | os.PathLike[str], root: int | None = None) -> Iterator[int]:
    """A directory's descriptor; in `root` the name must not be a link."""
    link = 0 if root is None else os.O_NOFOLLOW
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | link, dir_fd=root)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def empty(directory: int) -> None:
    for name in os.listdir(directory):
        try:
            os.unlink(name, dir_fd=directory)
        except IsADirectoryError:
            shutil.rmtree(name, dir_fd=directory)


def remove(root: int, name: str, sequence: int) -> None:
    """Remove our save with this sequence number, unless it is open for reading or its directory is a link, whose target
    is not ours to empty."""
    if stat.S_ISLNK(os.stat(name, dir_fd=root, follow_symlinks=False).st_mode):
        return
    with (
        opened(name, root) as save,
        open("manifest.json", "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=save)) as manifest,
    ):
        text = manifest.read()
        head = _HEAD.match(text)
        if head is None or int(head[1]) != sequence or writer_in(text) != _WRITER:
            return
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            pass  # a file system without locks protects no reader
        gone = _REMOVED + name  # atomic: from here on it is not a save, even if this process dies
        os.rename(name, gone, src_dir_fd=root, dst_dir_fd=root)
        if not os.path.samestat(os.fstat(save), os.stat(gone, dir_fd=root, follow_symlinks=False)):
            os.rename(gone, name, src_dir_fd=root, dst_dir_fd=root)
            return
        os.fsync(root)
        empty(save)
        os.rmdir(gone, dir_fd=root)


def writer_in(manifest: bytes) -> object:
    """The language that a manifest names; None in a damaged one."""
    try:
        return json.loads(manifest)["writer"]["language"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
