"""`load` and the older `load_state_dict`, as PyTorch has them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Container, Iterable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from ...comm import Comm
from ...errors import InvalidArgument, Mismatch, TesseraError
from ..ranks import ranks_of
from .reader import FileSystemReader, Target
from .record import core_name
from .saves import is_url
from .saving import CheckpointId, StateDict, check_coordinator, of_url, storage_may_be_second, unwrapped

__all__ = ["load", "load_state_dict"]


@storage_may_be_second
def load(
    state_dict: StateDict,
    *,
    checkpoint_id: CheckpointId = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> None:
    """Load a checkpoint into a state: tensors in place, objects into their dicts. Collective.

    Supports checkpoints of any world size, layout and language: each rank gets the boxes of its state. Ranks of a host
    read data that several of them need once (from 8 MiB on) and share it through shared memory.

    Parameters
    ----------
    state_dict : dict
        The allocated state. ``state_dict()`` of `Stateful` members is called before, ``load_state_dict()`` after.
    checkpoint_id : path
        A checkpoint of Tessera or of PyTorch's `dcp`, or a file of `torch.save`. A URL such as ``s3://`` is read by
        PyTorch through fsspec, which executes pickles.
    storage_reader : StorageReader, optional
        A `FileSystemReader`. With any other reader PyTorch loads.
    planner : LoadPlanner, optional
        ``DefaultLoadPlanner(allow_partial_load=True)`` leaves names that the checkpoint lacks unchanged. With a custom
        planner PyTorch plans.
    process_group : ProcessGroup or tessera.Comm, optional
        The ranks that load.
    no_dist : bool
        Load into this process alone.

    Raises
    ------
    Mismatch
        The checkpoint lacks names, or sizes differ; the message lists all, and nothing was loaded.
    NotFound, Corrupt, VersionMismatch, TesseraIOError
        The checkpoint cannot be read. Raised on all ranks if one fails.
    Unsupported
        An object is a pickle that needs ``FileSystemReader(path, weights_only=False)``.
    """
    _load(state_dict, _reader(storage_reader, checkpoint_id), planner, process_group, no_dist, 0)


def _load(
    state_dict: StateDict, reader: StorageReader, planner: Any, group: Any, no_dist: bool, coordinator: int
) -> None:
    if not isinstance(reader, FileSystemReader) or not (planner is None or type(planner) is DefaultLoadPlanner):
        _pytorch(state_dict, reader, planner, group, no_dist, coordinator)
        return
    ranks = ranks_of(group, no_dist)
    check_coordinator(coordinator, ranks)
    keys = sorted(state_dict)
    own = planner if isinstance(planner, DefaultLoadPlanner) else DefaultLoadPlanner()

    def begin() -> tuple[StateDict, list[Target]]:
        # state_dict() of a model may be a collective, so every rank calls all of them before it looks at the files.
        parts = {key: _state_of(state_dict[key]) for key in keys}
        return parts, reader.begin(_plan(parts, reader, own, ranks.rank == coordinator), own)

    def read() -> None:
        reader.contents.read([target.want for target in targets], ranks.comm)
        reader.finish(own, targets)

    try:
        parts, targets = ranks.together(begin)
        ranks.together(read)
    finally:
        reader.close()
    _hand_over(parts, state_dict)


def _hand_over(parts: StateDict, state_dict: StateDict) -> None:
    for key, part in parts.items():
        if isinstance(state_dict[key], Stateful):
            state_dict[key].load_state_dict(part)
        else:
            state_dict[key] = part


def load_state_dict(
    state_dict: StateDict,
    storage_reader: StorageReader,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """PyTorch's name of `load` before 2.2. Planners get the coordinator."""
    storage_reader.reset()
    _load(state_dict, storage_reader, planner, process_group, no_dist, coordinator_rank)


def _plan(parts: StateDict, reader: FileSystemReader, planner: DefaultLoadPlanner, is_coordinator: bool) -> LoadPlan:
    metadata = reader.read_metadata()
    planner.set_up_planner(parts, metadata, is_coordinator)
    _know_wrapped_names(planner, metadata, reader)
    try:
        return planner.create_local_plan()
    except (RuntimeError, ValueError) as error:
        raise _differences(planner, metadata, reader, error) from error


def _know_wrapped_names(planner: DefaultLoadPlanner, metadata: Metadata, reader: FileSystemReader) -> None:
    """Let a wrapped model find tensors saved without the wrapper and vice versa, if the names are unambiguous."""
    tensors = reader.contents.tensors
    saved, lacking = (
        _by_core_name(names) for names in (tensors.keys() - planner.state_dict, _lacking(planner, tensors))
    )
    for core, names in lacking.items():
        if len(names) == len(saved.get(core, [])) == 1:
            (name,), (same,) = names, saved[core]
            tensors[name] = tensors[same]
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata[same]


def _lacking(planner: DefaultLoadPlanner, saved: Container[str]) -> list[str]:
    """The state's tensors that were not saved under exactly their names."""
    return [name for name, value in planner.state_dict.items() if isinstance(value, torch.Tensor) and name not in saved]


def _by_core_name(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(core_name(name), []).append(name)
    return found


def _differences(
    planner: DefaultLoadPlanner, metadata: Metadata, reader: FileSystemReader, error: Exception
) -> TesseraError:
    """All differences, which PyTorch's planner would report one at a time."""
    found = []
    for name, value in planner.state_dict.items():
        saved = metadata.state_dict_metadata.get(name)
        if saved is None:
            why = reader.contents.why_unreadable(name)
            if why is not None or not planner.allow_partial_load:
                missing = f"{name!r} is missing in the checkpoint{_twins(planner, reader, name)}"
                found.append(missing if why is None else f"{name!r} cannot be read: {why}")
        elif isinstance(saved, TensorStorageMetadata) and isinstance(value, torch.Tensor):
            size = tuple(getattr(value, "global_shape", None) or value.size())
            if tuple(saved.size) != size:
                found.append(f"{name!r}: saved with shape {tuple(saved.size)}, the state has {size}")
    if not found:
        return InvalidArgument(f"{reader.path} cannot be loaded into the state: {error}")
    shown = found[:50] + ([f"and {len(found) - 50} more"] if len(found) > 50 else [])
    listed = "".join(f"\n  {line}" for line in shown)
    count = f"{len(found)} difference{'s' if len(found) > 1 else ''}"
    return Mismatch(f"{reader.path} does not fit the state; {count}:{listed}")


def _twins(planner: DefaultLoadPlanner, reader: FileSystemReader, name: str) -> str:
    """Why a name that differs from a saved one only by wrapper names does not load it."""
    wanted, saved = (
        " and ".join(repr(other) for other in names if core_name(other) == core_name(name))
        for names in (planner.state_dict, reader.contents.tensors)
    )
    return f" (it has {saved}; {wanted} of the state differ only by wrapper names)" if saved else ""


def _state_of(part: Any) -> Any:
    return part.state_dict() if isinstance(part, Stateful) else part


def _reader(reader: StorageReader | None, checkpoint_id: str | os.PathLike[str] | None) -> StorageReader:
    if reader is None:
        if checkpoint_id is None:
            raise InvalidArgument("nothing to load; pass checkpoint_id or storage_reader")
        return of_url(FsspecReader, checkpoint_id) if is_url(checkpoint_id) else FileSystemReader(checkpoint_id)
    if checkpoint_id is not None:
        reader.reset(checkpoint_id)
    return reader


def _pytorch(
    state_dict: StateDict, reader: StorageReader, planner: Any, group: Any, no_dist: bool, coordinator: int
) -> None:
    if isinstance(group, Comm):
        raise InvalidArgument("PyTorch plans this load; pass a process_group of PyTorch, not a tessera.Comm")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            if coordinator == 0:
                dcp.load(state_dict, storage_reader=reader, planner=planner, process_group=group, no_dist=no_dist)
                return
            warnings.filterwarnings("ignore", r".*load_state_dict. is deprecated", FutureWarning)
            parts = {key: _state_of(state_dict[key]) for key in sorted(state_dict)}
            dcp.load_state_dict(parts, reader, group, coordinator, no_dist, planner)
            _hand_over(parts, state_dict)
    except dcp.CheckpointException as failed:
        raise unwrapped(failed) from failed
