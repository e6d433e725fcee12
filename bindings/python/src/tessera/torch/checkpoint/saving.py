"""`save`, `async_save` and the older `save_state_dict`, as PyTorch has them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlanner, StorageWriter
from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import _api_bc_check
from torch.nn.parameter import is_lazy

from ...comm import Comm
from ...errors import InvalidArgument, TesseraError, Unsupported
from ..ranks import Ranks, ranks_of
from ..tensors import Copies
from .rows import Row, rows_of
from .saves import is_url
from .writer import FileSystemWriter

__all__ = ["async_save", "save", "save_state_dict"]

StateDict = dict[str, Any]
CheckpointId = str | os.PathLike[str] | None
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_Storage = TypeVar("_Storage", FsspecReader, FsspecWriter)


def storage_may_be_second(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """As in PyTorch, with its warning: a second positional argument is the storage_writer or storage_reader."""
    taken: Callable[_Given, _Result] = _api_bc_check(function)
    return taken


@storage_may_be_second
def save(
    state_dict: StateDict,
    *,
    checkpoint_id: CheckpointId = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    format: str | None = None,
) -> Metadata:
    """Save a state of tensors, DTensors, ShardedTensors and objects; each rank saves its part. Collective.

    Parameters
    ----------
    state_dict : dict
        Nested as in PyTorch; ``state_dict()`` of `Stateful` members is called.
    checkpoint_id : path
        The checkpoint's directory. An existing checkpoint is replaced when the new one is committed. A URL such as
        ``s3://`` is written by PyTorch through fsspec, in PyTorch's format.
    storage_writer : StorageWriter, optional
        A `FileSystemWriter`. With any other writer PyTorch saves.
    planner : SavePlanner, optional
        With a custom planner PyTorch plans, which gathers all plans on one rank; by default no plan is sent.
    process_group : ProcessGroup or tessera.Comm, optional
        The ranks that save; by default all of `torch.distributed`, or this process alone if it is not initialised.
    no_dist : bool
        Save only this process's state.
    use_collectives : bool
        Must be True.
    format : {"tessera", "torch_dcp"}, optional
        Tessera's own format (the default), or PyTorch's, which an unmodified PyTorch loads.

    Returns
    -------
    Metadata
        Names, sizes and dtypes of what was saved.

    Raises
    ------
    Mismatch
        Ranks have tensors of the same name with different dtypes or shapes.
    TesseraIOError, TesseraTimeout, PeerLost, CommitUnknown
        The save failed. All ranks raise, and the previous checkpoint is untouched.
    """
    writer = _writer(storage_writer, checkpoint_id, format)
    if not isinstance(writer, FileSystemWriter) or not _ours(planner) or not use_collectives:
        return _pytorch(
            dcp.save,
            state_dict,
            writer,
            planner=planner,
            process_group=_torch_group(process_group),
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    return _save(writer, state_dict, planner, process_group, no_dist, 0)


def _save(
    writer: FileSystemWriter, state_dict: StateDict, planner: Any, group: Any, no_dist: bool, coordinator: int
) -> Metadata:
    ranks = ranks_of(group, no_dist)
    check_coordinator(coordinator, ranks)
    return writer.saving(ranks).now(_rows(state_dict, planner, ranks, group, coordinator))


def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: CheckpointId = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    format: str | None = None,
) -> Future[Metadata] | AsyncSaveResponse:
    """Copy a state, return, and save the copy in the background. Collective.

    Only one save is in flight at a time: the next one waits for it. The program waits for its last save before it
    exits. Unlike PyTorch's, the ranks need no CPU backend.

    Parameters
    ----------
    state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist, use_collectives, format
        As for `save`. A `FileSystemWriter` with ``cache_staged_state_dict`` reuses the memory of the copy.
    async_checkpointer_type : AsyncCheckpointerType
        With PROCESS, PyTorch saves from a separate process.
    async_stager : AsyncStager, optional
        Makes the copy, as in PyTorch.

    Returns
    -------
    Future
        ``result()`` returns or raises what `save` would. With a stager that works in the background this is an
        `AsyncSaveResponse`, as in PyTorch.
    """
    writer = _writer(storage_writer, checkpoint_id, format)
    theirs = async_stager is not None or async_checkpointer_type != AsyncCheckpointerType.THREAD
    if theirs or not isinstance(writer, FileSystemWriter) or not _ours(planner) or not use_collectives:
        return _pytorch(
            dcp.async_save,
            state_dict,
            writer,
            planner=planner,
            process_group=_torch_group(process_group),
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    ranks = ranks_of(process_group, no_dist)
    ranks.wait()
    copies = writer.copies
    if copies is None:
        return writer.saving(ranks).later(_rows(state_dict, planner, ranks, process_group, 0))
    if writer.reads_copies is not None:  # possibly for other ranks
        writer.reads_copies.exception()
    rows = _rows(state_dict, planner, ranks, process_group, 0, copies)
    writer.reads_copies = writer.saving(ranks).later(rows, staged=True)
    return writer.reads_copies


def save_state_dict(
    state_dict: StateDict,
    storage_writer: StorageWriter,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """PyTorch's name of `save` before 2.2. Planners get the coordinator; the saved data does not depend on it."""
    storage_writer.reset()
    if isinstance(storage_writer, FileSystemWriter) and _ours(planner):
        return _save(storage_writer, state_dict, planner, process_group, no_dist, coordinator_rank)
    return _pytorch(
        dcp.save_state_dict,
        plain_state(state_dict),
        storage_writer,
        planner=planner,
        process_group=_torch_group(process_group),
        no_dist=no_dist,
        coordinator_rank=coordinator_rank,
    )


def check_coordinator(rank: int, ranks: Ranks) -> None:
    """Raise InvalidArgument if the rank does not exist; a single rank coordinates itself, as in PyTorch."""
    if ranks.world_size > 1 and not 0 <= rank < ranks.world_size:
        raise InvalidArgument(f"coordinator_rank is {rank}; it must be 0 to {ranks.world_size - 1}")


def plain_state(state_dict: StateDict) -> StateDict:
    """The state with its `Stateful` members replaced by their states."""
    return {key: part.state_dict() if isinstance(part, Stateful) else part for key, part in state_dict.items()}


def _rows(
    state_dict: StateDict, planner: Any, ranks: Ranks, group: Any, coordinator: int, copies: Copies | None = None
) -> Callable[[], list[Row]]:
    def rows() -> list[Row]:
        chosen = DefaultSavePlanner() if planner is None else planner
        chosen.set_up_planner(plain_state(state_dict), is_coordinator=ranks.rank == coordinator)
        _refuse_lazy(getattr(chosen, "state_dict", None))
        return rows_of(chosen.create_local_plan(), chosen, _world(ranks, group), copies)

    return rows


def _refuse_lazy(state: Any) -> None:
    """Refuse lazy parameters by name; PyTorch's planner would refuse them without it."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if is_lazy(value):
            raise InvalidArgument(f"{name!r} is a lazy parameter without a shape; run a forward pass first")


def _world(ranks: Ranks, group: Any) -> list[int]:
    """The global ranks of `torch.distributed`."""
    if ranks.world_size == 1 or isinstance(group, Comm) or not dist.is_initialized():
        return list(range(ranks.world_size))
    return list(dist.get_process_group_ranks(group))


def _ours(planner: SavePlanner | None) -> bool:
    """Whether the planner needs nothing of PyTorch's own planning."""
    return planner is None or (type(planner) is DefaultSavePlanner and not planner._enable_plan_caching)


def _writer(writer: StorageWriter | None, checkpoint_id: CheckpointId, format: str | None) -> StorageWriter:
    if writer is None:
        if checkpoint_id is None:
            raise InvalidArgument("nowhere to save; pass checkpoint_id or storage_writer")
        if is_url(checkpoint_id):
            if format not in (None, "torch_dcp"):
                raise Unsupported(f"{checkpoint_id!r} is a URL; only PyTorch's own format is supported, not {format!r}")
            return of_url(FsspecWriter, checkpoint_id)
        return FileSystemWriter(checkpoint_id, format=format or "tessera")
    if format is not None:
        raise InvalidArgument("the storage_writer decides the format; use FileSystemWriter(path, format=...)")
    if checkpoint_id is not None:
        writer.reset(checkpoint_id)
    return writer


def of_url(kind: type[_Storage], url: str | os.PathLike[str]) -> _Storage:
    """PyTorch's own writer or reader for fsspec file systems."""
    try:
        if kind.validate_checkpoint_id(url):
            return kind(url)
        why = "fsspec does not know this file system"
    except ImportError as missing:
        why = str(missing)
    raise InvalidArgument(f"{url!r} is a URL that cannot be opened: {why}")


def _torch_group(group: Any) -> Any:
    if isinstance(group, Comm):
        raise InvalidArgument("PyTorch plans this save; pass a process_group of PyTorch, not a tessera.Comm")
    return group


def _pytorch(function: Any, state_dict: StateDict, writer: StorageWriter, **how: Any) -> Any:
    """Call PyTorch's own function. A Tessera error that all ranks share is raised as itself."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            warnings.filterwarnings("ignore", r".*save_state_dict. is deprecated", FutureWarning)
            return function(state_dict, storage_writer=writer, **how)
    except dcp.CheckpointException as failed:
        raise unwrapped(failed) from failed


def unwrapped(failed: Any) -> BaseException:
    """The first Tessera error of any rank; else PyTorch's error of all ranks."""
    errors = [failure[0] for _, failure in sorted(failed.failures.items())]
    return next((error for error in errors if isinstance(error, TesseraError)), failed)
