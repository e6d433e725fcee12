"""Conversion between checkpoints and files of torch.save, under PyTorch's names."""

from __future__ import annotations

import os
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner

from ...errors import Unsupported
from .reader import FileSystemReader
from .saving import save

__all__ = ["BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp"]


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:
    """Convert a checkpoint of any format that `load` supports to a file of torch.save.

    Raises
    ------
    Unsupported
        The checkpoint has pickles that hold more than data. Nothing was executed.
    """
    reader = FileSystemReader(dcp_checkpoint_dir)
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    try:
        planner.set_up_planner(state, reader.read_metadata(), is_coordinator=True)
        reader.read_data(planner.create_local_plan(), planner).wait()
    finally:
        reader.close()
    torch.save(state, torch_save_path)


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str], *, format: str | None = None
) -> None:
    """Convert a file of torch.save to a checkpoint.

    Raises
    ------
    Unsupported
        The file holds more than torch.load(weights_only=True) accepts. Nothing was executed.
    """
    try:
        state = torch.load(torch_save_path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise Unsupported(
            f"{os.fsdecode(torch_save_path)} holds more than torch.load(weights_only=True) accepts. If you trust its "
            "source, use save(torch.load(path, weights_only=False), checkpoint_id=...), which executes its pickle"
        ) from error
    save(state, checkpoint_id=dcp_checkpoint_dir, no_dist=True, format=format)
