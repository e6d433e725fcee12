"""PyTorch's own functions to convert between models or optimizers and states, under PyTorch's module name.

For Tessera's `FullyShardedDataParallel` they work as for PyTorch's: with sharded states, or full ones by their options,
whatever its own `state_dict_type` is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch.distributed.checkpoint import state_dict as _theirs
from torch.distributed.checkpoint.state_dict import StateDictOptions

__all__ = [
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def _with_sharded_states(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    @functools.wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with _sharded(args[0] if args else kwargs.get("model")):
            return function(*args, **kwargs)

    return call


def _sharded(model: Any) -> AbstractContextManager[None]:
    fsdp = sys.modules.get("tessera.torch.fsdp")  # a program with such a model has imported it
    if fsdp is None or not isinstance(model, nn.Module) or not fsdp.FullyShardedDataParallel.fsdp_modules(model):
        return nullcontext()
    kind: AbstractContextManager[None] = fsdp.FullyShardedDataParallel.state_dict_type(
        model, fsdp.StateDictType.SHARDED_STATE_DICT
    )
    return kind


get_state_dict = _with_sharded_states(_theirs.get_state_dict)
get_model_state_dict = _with_sharded_states(_theirs.get_model_state_dict)
get_optimizer_state_dict = _with_sharded_states(_theirs.get_optimizer_state_dict)
set_state_dict = _with_sharded_states(_theirs.set_state_dict)
set_model_state_dict = _with_sharded_states(_theirs.set_model_state_dict)
set_optimizer_state_dict = _with_sharded_states(_theirs.set_optimizer_state_dict)
