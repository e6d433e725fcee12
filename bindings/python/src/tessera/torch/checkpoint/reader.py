"""A StorageReader through which PyTorch's own `dcp.load` reads any checkpoint that Tessera's engine supports."""

from __future__ import annotations

import io
import os
import uuid
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan, LoadPlanner, Metadata, ReadItem, StorageReader
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from ...checkpoint import ProgressFn
from ...errors import InvalidArgument
from ...layout import Box
from ..tensors import bits_of
from .contents import Contents, Saved, Wanted
from .saves import is_url, local_directory

__all__ = ["FileSystemReader"]


class Target(NamedTuple):
    """The target of a plan's item: the planner's tensor, and the tensor that the core reads into."""

    item: ReadItem
    tensor: torch.Tensor
    into: torch.Tensor
    want: Wanted


class FileSystemReader(StorageReader):
    """Reads checkpoints of Tessera (from any language), of PyTorch's `dcp`, and files of `torch.save`.

    Parameters
    ----------
    path : path
        The checkpoint; `checkpoint_id` of a load replaces it.
    verify : bool
        Verify the checksum of every block that is read.
    weights_only : bool
        Accept only pickled objects that ``torch.load(weights_only=True)`` accepts. False executes pickles.
    progress : callable, optional
        As for `tessera.Checkpoint.load`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = True,
        weights_only: bool = True,
        progress: ProgressFn | None = None,
    ) -> None:
        super().__init__()
        self.path = local_directory(path)
        self.verify = verify
        self.weights_only = weights_only
        self.progress = progress
        self.load_id = str(uuid.uuid4())
        self._contents: Contents | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the opened checkpoint."""
        return {**self.__dict__, "_contents": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, of `checkpoint_id` if given."""
        self.close()
        self.load_id = str(uuid.uuid4())
        if checkpoint_id:
            self.path = local_directory(checkpoint_id)

    def close(self) -> None:
        """Close the opened checkpoint; the next load opens it again."""
        if self._contents is not None:
            self._contents.close()
            self._contents = None

    @property
    def contents(self) -> Contents:
        """The opened checkpoint."""
        if self._contents is None:
            self._contents = Contents(self.path, verify=self.verify, progress=self.progress)
        return self._contents

    def read_metadata(self) -> Metadata:
        """Names, sizes and dtypes for PyTorch's planners. Opens the checkpoint again."""
        self.close()
        metadata = self.contents.metadata()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by PyTorch. Does nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged, because the core reads any box."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of a plan in place and verify the data."""
        targets = self.begin(plan, planner)
        self.contents.read([target.want for target in targets])
        self.finish(planner, targets)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def begin(self, plan: LoadPlan, planner: LoadPlanner) -> list[Target]:
        """Read the objects of a plan and return the targets of its tensors."""
        targets: list[Target] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                value = self.contents.object(item.storage_index.fqn, weights_only=self.weights_only)
                load_object(planner, item, value)
                continue
            saved = self.contents.tensors[item.storage_index.fqn]
            target = planner.resolve_tensor(item)
            box = _box(item)
            if tuple(target.shape) != box.sizes:
                raise InvalidArgument(
                    f"{item.dest_index.fqn!r}: the planner returned memory of shape {tuple(target.shape)}, expected "
                    f"{box.sizes}"
                )
            into = _memory(target.detach(), saved)
            targets.append(Target(item, target, into, Wanted(saved, box, _as_bits(into))))
        return targets

    def finish(self, planner: LoadPlanner, targets: list[Target]) -> None:
        """Pass the data to the planner."""
        casts: list[str] = []
        for item, target, into, want in targets:
            with torch.no_grad():
                if into.data_ptr() != target.data_ptr() or into.dtype != target.dtype:
                    target.detach().copy_(into)
            planner.commit_tensor(item, target)
            if target.dtype != want.saved.dtype:
                casts.append(f"{item.dest_index.fqn!r} from {want.saved.dtype} to {target.dtype}")
        if casts:
            warnings.warn(f"{self.contents.path}: cast while loading: {', '.join(casts)}", stacklevel=3)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The checkpoint."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is a path, not a URL."""
        return not is_url(checkpoint_id)


def load_object(planner: LoadPlanner, item: ReadItem, content: io.BytesIO) -> None:
    """Pass an object to the planner. A flattened name has dict keys as strings, so PyTorch's own planner would add a
    second item next to one whose key is a number; here the object replaces that item."""
    if type(planner).load_bytes is DefaultLoadPlanner.load_bytes and planner.flatten_state_dict:
        *path, last = planner.mappings[item.dest_index.fqn]
        inner: Any = planner.original_state_dict
        try:
            for part in path:
                inner = inner[_key(inner, part)]
            key = _key(inner, last)
        except (KeyError, IndexError):
            pass  # a planner that creates its state while loading
        else:
            inner[key] = torch.load(content, weights_only=False)
            return
    planner.load_bytes(item, content)


def _key(container: Any, part: str | int) -> Any:
    """The dict key for a string in a flattened name; a list index is returned unchanged."""
    if isinstance(container, Mapping) and part not in container:
        return next((key for key in container if str(key) == part), part)
    return part


def _box(item: ReadItem) -> Box:
    """The box of an item in the tensor: the metadata's only chunk begins at offset 0."""
    return Box(tuple(item.storage_offsets), tuple(item.lengths))


def _memory(target: torch.Tensor, saved: Saved) -> torch.Tensor:
    """The target itself if the core can read into it; else new memory."""
    fits = target.dtype == saved.dtype and target.device.type == "cpu" and target.is_contiguous()
    lazy = target.is_conj() or target.is_neg()  # its memory holds other values than it shows
    return target if fits and not lazy else torch.empty(target.shape, dtype=saved.dtype)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    travels = bits_of(tensor.dtype)
    return tensor if travels is tensor.dtype else tensor.view(travels)
