"""A checkpoint opened for reading as PyTorch sees it: names with paths, tensors with PyTorch's dtypes, and objects.

Supports all that the core reads: native checkpoints of any language, PyTorch's directories, and files of torch.save.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

from ... import _core
from ...checkpoint import Checkpoint, ProgressFn, settle_progress, watch_progress
from ...comm import Comm
from ...errors import Corrupt, NotFound, Unsupported
from ...layout import Box, Layout
from ...tensor import tensor as core_tensor
from ...values import decode
from ..tensors import bits_of, named_dtype, of_core
from .data import refusal
from .dcp_metadata import METADATA, read_metadata, whole_tensor
from .record import RECORD, Record, core_name, of_one_rank
from .rows import Path as KeyPath

__all__ = ["Contents", "Saved", "Wanted"]


class Saved(NamedTuple):
    """A tensor of the checkpoint: its name in the core, and its dtype and shape in PyTorch."""

    core_name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Wanted(NamedTuple):
    """A box of a saved tensor, and contiguous CPU memory for it, of the dtype as which the core reads the tensor."""

    saved: Saved
    box: Box
    into: torch.Tensor


class Contents:
    """The contents of a checkpoint. `verify` checks the checksum of every block read; `progress` is called on reads."""

    def __init__(
        self, path: str | os.PathLike[str], *, verify: bool = True, progress: ProgressFn | None = None
    ) -> None:
        self._checkpoint_id = path
        self._checkpoint = Checkpoint(path)
        self._verify = verify
        self._progress = watch_progress(progress)
        manifest = self._checkpoint.manifest
        values = {name: value for name, value in manifest.get("values", {}).items() if not of_one_rank(name)}
        record = manifest.get("values", {}).get(RECORD)
        self._record = Record() if record is None else Record.parse(json.dumps(record))
        self.tensors: dict[str, Saved] = {}
        self.pickles: dict[str, Saved] = {}
        names = {core_name(name): name for name in self._record.paths if name not in values}
        for core, info in self._checkpoint.tensors.items():
            name = names.get(core, core)
            dtype = named_dtype(self._record.dtypes[name]) if name in self._record.dtypes else of_core(info.dtype)
            kind = self.pickles if name in self._record.pickles else self.tensors
            kind[name] = Saved(core, dtype, info.shape)
        self.values, paths = flat_values({name: decode(json.dumps(value)) for name, value in values.items()})
        self.paths: dict[str, KeyPath] = {**paths, **self._record.paths}
        self._places: dict[str, Any] = {}  # of PyTorch's own archives of objects, whose types the core may not keep
        self._save_id = self._record.save_id
        self._foreign = dict(self._checkpoint.unreadable)
        if manifest.get("format") == "torch_dcp" and (Path(self._checkpoint.path) / METADATA).exists():
            self._know(read_metadata(self._checkpoint.path))

    def _know(self, metadata: Metadata) -> None:
        """Use the parts of PyTorch's own metadata that the core does not read."""
        self._save_id = getattr(metadata.storage_meta, "save_id", None)
        if isinstance(metadata.planner_data, dict):
            self.paths |= metadata.planner_data
        for name, kind in metadata.state_dict_metadata.items():
            if isinstance(kind, BytesStorageMetadata):
                self._places[name] = metadata.storage_data[MetadataIndex(name)]

    @property
    def path(self) -> str:
        """The directory or file that was opened."""
        return self._checkpoint.path

    def metadata(self) -> Metadata:
        """The metadata for PyTorch's planners. Each tensor is one chunk, because the core reads any box of it."""
        known: dict[str, Any] = {name: whole_tensor(saved.shape, saved.dtype) for name, saved in self.tensors.items()}
        for name in (*self.values, *self.pickles, *self._places):
            known[name] = BytesStorageMetadata()
        paths = {name: self.paths.get(name, (name,)) for name in known}
        storage = StorageMeta(checkpoint_id=self._checkpoint_id, save_id=self._save_id)
        return Metadata(known, planner_data=paths, storage_data={}, storage_meta=storage, version="1.0.0")

    def why_unreadable(self, name: str) -> str | None:
        """Why a name of the checkpoint is not in its contents; None if it is, or is not a name of the checkpoint."""
        return None if name in self._places else self._foreign.get(name)

    def read(self, wanted: list[Wanted], comm: Comm | None = None) -> None:
        """Read boxes in place. With a `comm` collective: ranks of a host read data that several of them need once."""
        rounds: list[dict[str, list[Wanted]]] = []
        whole: list[Wanted] = []
        for want in wanted:
            if want.saved.core_name != core_name(want.saved.core_name):
                whole.append(want)
            elif 0 not in want.box.sizes:
                _place(rounds, want)
        states = [_state_of(boxes) for boxes in rounds]
        if comm is not None:
            most = np.array([len(states)], np.int64)
            comm.all_reduce(most, op="max")
            states += [_core.state_create() for _ in range(int(most[0]) - len(states))]
        handle = None if comm is None else comm._handle
        for state in states:
            _core.checkpoint_load(
                self._checkpoint._handle,
                state,
                verify=self._verify,
                allow_unexpected=True,
                progress=self._progress,
                comm=handle,
            )
        for want in whole:
            self._read_whole(want)
        settle_progress(self._progress)

    def _read_whole(self, want: Wanted) -> None:
        """Read a tensor whose name a state of the core cannot have, because it strips the wrappers' parts."""
        whole = torch.empty(want.saved.shape, dtype=bits_of(want.saved.dtype))
        _core.checkpoint_read(self._checkpoint._handle, want.saved.core_name, core_tensor(whole))
        want.into.copy_(whole[want.box.slices])

    def object(self, name: str, *, weights_only: bool) -> io.BytesIO:
        """A value or pickle as torch.save writes it.

        Raises
        ------
        Unsupported
            The pickle holds more than data, and `weights_only` is set. Nothing was executed.
        """
        if name in self.values and name not in self._places:
            return _saved(self.values[name])
        content = self._pickle(name)
        refused = refusal(content) if weights_only else None
        if refused is None:
            return io.BytesIO(content)
        if name in self.values:
            return _saved(self.values[name])
        raise Unsupported(
            f"{name!r} of {self.path} is a pickle that holds more than data: {refused} If you trust its source, use "
            "FileSystemReader(path, weights_only=False), which executes the pickle"
        )

    def _pickle(self, name: str) -> bytes:
        if name in self.pickles:
            saved = self.pickles[name]
            data = torch.empty(saved.shape, dtype=torch.uint8)
            self.read([Wanted(saved, Box((0,), saved.shape), data)])
            return data.numpy().tobytes()
        if name not in self._places:
            raise NotFound(f"{self.path} has no object {name!r}")
        place = self._places[name]
        if getattr(place, "transform_descriptors", None):
            raise Unsupported(
                f"{name!r} of {self.path} was written with the transforms {place.transform_descriptors}, which are not "
                "supported"
            )
        inside = PurePath(str(getattr(place, "relative_path", "..")))
        if inside.is_absolute() or ".." in inside.parts or not (Path(self.path) / inside).is_file():
            raise Corrupt(f"{name!r} of {self.path} is in {str(inside)!r}, which is not a file of the checkpoint")
        with (Path(self.path) / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return file.read(place.length)

    def close(self) -> None:
        """Close the checkpoint."""
        self._checkpoint.close()


def _saved(value: object) -> io.BytesIO:
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content


def _state_of(boxes: dict[str, list[Wanted]]) -> _core.State:
    state = _core.state_create()
    for name, parts in boxes.items():
        layout = Layout.from_boxes(parts[0].saved.shape, [[part.box for part in parts]])
        pieces = [core_tensor(part.into) for part in parts]
        _core.state_add_sharded(state, name, layout._handle, pieces[0].dtype, pieces, 0)
    return state


def _place(rounds: list[dict[str, list[Wanted]]], want: Wanted) -> None:
    """A load of the core takes each box of a tensor once; the same box again goes into another load."""
    for boxes in rounds:
        parts = boxes.setdefault(want.saved.core_name, [])
        if all(part.box != want.box for part in parts):
            parts.append(want)
            return
    rounds.append({want.saved.core_name: [want]})


def flat_values(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Values with PyTorch's names: dicts, and lists that hold dicts, are flattened."""
    flat: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    for name, value in values.items():
        if not isinstance(value, (dict, list)):
            flat[name] = value
            continue
        planner = DefaultSavePlanner()
        planner.set_up_planner({name: value})
        for inner, member in planner.state_dict.items():
            if inner in values and inner != name:
                continue  # that name is taken
            flat[inner] = member
            paths[inner] = planner.mappings[inner]
    return flat, paths
