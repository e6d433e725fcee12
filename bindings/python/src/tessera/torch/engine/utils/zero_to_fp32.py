"""DeepSpeed's `utils.zero_to_fp32`: the complete module of a checkpoint, ours or DeepSpeed's."""

from __future__ import annotations

import os
from typing import TypeVar

import torch

from ..saves import full_state_dict as get_fp32_state_dict_from_zero_checkpoint

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

_Module = TypeVar("_Module", bound=torch.nn.Module)


def load_state_dict_from_zero_checkpoint(
    model: _Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> _Module:
    """Load a checkpoint into a module that is not sharded, in this process alone."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag))
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_file: str | os.PathLike[str], tag: str | None = None
) -> None:
    """Write the complete module's state by ``torch.save``."""
    torch.save(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), output_file)
