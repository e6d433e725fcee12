"""Compares the tensors of each micro-batch with those that a stage declares by `input_args` and `output_args`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.distributed.pipelining._utils import extract_tensor_meta
from torch.utils._pytree import tree_leaves

from ...errors import InvalidArgument

__all__ = ["check_declared"]


def check_declared(stage: Any, kind: Literal["input", "output"], values: Any) -> None:
    """Compare the tensors in `values` with those that the program declared for the stage; all is well if it declared
    none. Dimension 0 may be shorter, because a batch need not divide.

    Raises
    ------
    InvalidArgument
        The number of tensors, a dtype or a shape differs.
    """
    meta = getattr(stage, "_user_meta", None)  # traced stages have none
    declared = getattr(meta, f"{kind}s", None)
    if declared is None:
        return
    found = [extract_tensor_meta(one) for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
    if len(found) != len(declared):
        raise InvalidArgument(
            f"stage {stage.stage_index} has {len(found)} {kind}s, but its {kind}_args declare {len(declared)}"
        )
    for i, (one, expected) in enumerate(zip(found, declared, strict=True)):
        if not _fits(one, expected):
            raise InvalidArgument(
                f"{kind} {i} of stage {stage.stage_index} is {_text(one)}, but its {kind}_args declare "
                f"{_text(expected)} (or less along dimension 0)"
            )


def _fits(one: Any, expected: Any) -> bool:
    if type(one) is not type(expected) or one.dtype is not expected.dtype or len(one.shape) != len(expected.shape):
        return False
    return bool(one.shape[1:] == expected.shape[1:] and one.shape[:1] <= expected.shape[:1])


def _text(meta: Any) -> str:
    kind = "DTensor" if hasattr(meta, "placements") else "tensor"
    return f"a {kind} of {meta.dtype} with shape {tuple(meta.shape)}"
