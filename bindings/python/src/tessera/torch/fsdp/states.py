"""Saving and loading the states of `FullyShardedDataParallel`.

A sharded parameter and the optimizer state of its shape are DTensors. A state holds the DTensor or the full tensor.
Names are those of the modules without their wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from ...errors import InvalidArgument
from .hooks import unit_of
from .sharded import Sharded

__all__ = [
    "INNER",
    "KEY",
    "after_state_dict",
    "before_load",
    "converter_of",
    "grouped_as",
    "named",
    "names_of",
    "settings_of",
    "sharded_like",
]

INNER = "_fsdp_wrapped_module"
KEY = f"{INNER}."
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def settings_of(
    kind: StateDictType, config: StateDictConfig | None = None, optim_config: OptimStateDictConfig | None = None
) -> StateDictSettings:
    """The settings for this kind of state, with configurations of the same kind."""
    own, optim = _CONFIGS[kind]
    for given, wanted in ((config, own), (optim_config, optim)):
        if given is not None and not isinstance(given, wanted):
            raise InvalidArgument(f"{kind.name} takes a {wanted.__name__}, got a {type(given).__name__}")
    return StateDictSettings(kind, config or own(), optim_config or optim())


def converter_of(kind: StateDictType, config: Any) -> tuple[Callable[[Any], Any], bool]:
    """The conversion of a sharded value, and whether this rank keeps the result."""
    if kind is not StateDictType.FULL_STATE_DICT:
        return lambda value: value, True
    kept = not getattr(config, "rank0_only", False) or dist.get_rank() == 0

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        full = value.full_tensor()
        return full if kept else None

    return whole, kept


def after_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """A state dict hook: strips the wrapper from names and converts values according to its settings."""
    settings: Any = module._settings
    convert, kept = converter_of(settings.state_dict_type, settings.state_dict_config)
    for key in [key for key in state if key.startswith(f"{prefix}{KEY}")]:
        value = convert(state.pop(key))
        if kept:
            state[f"{prefix}{key[len(prefix) + len(KEY) :]}"] = value


def before_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A load hook: converts a state made by `after_state_dict` to what the wrapped module loads."""
    params = named(module)
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(f"{prefix}{KEY}")]:
        name = key[len(prefix) :]
        value = state.pop(key)
        if name.replace(KEY, "") in params:
            value = sharded_like(value, params[name.replace(KEY, "")])
        state[f"{prefix}{KEY}{name}"] = value


def named(model: nn.Module) -> dict[str, Sharded]:
    """The sharded parameters by all their names, without the wrappers' names."""
    names = {one: name.replace(KEY, "").removesuffix(INNER).rstrip(".") for name, one in model.named_modules()}
    found = {}
    for one in model.modules():
        unit = unit_of(one)
        for param in () if unit is None else unit.params:
            for module, attribute in param.places:
                found[f"{names[module]}.{attribute}".lstrip(".")] = param
    return found


def names_of(model: nn.Module, optim: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in its order."""
    names = {id(param): name.replace(KEY, "") for name, param in model.named_parameters()}
    try:
        return [names[id(param)] for group in optim.param_groups for param in group["params"]]
    except KeyError:
        raise InvalidArgument(
            "the optimizer has a parameter that the model does not currently show; create the optimizer after the "
            "wrapper, and call this between steps"
        ) from None


def grouped_as(
    optim: torch.optim.Optimizer, names: Sequence[str], groups: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The groups of a state in the order of the optimizer's groups and parameters. An optimizer loads parameters by
    position, but states of PyTorch's FSDP have another order."""
    unknown = [name for group in groups for name in group["params"] if name not in names]
    if unknown:
        raise InvalidArgument(f"the optimizer has no parameter {unknown[0]!r}, but the state does")
    found, rest, left = [], iter(names), list(groups)
    for number, group in enumerate(optim.param_groups):
        own = [next(rest) for _ in group["params"]]
        saved = next((one for one in left if set(one["params"]) == set(own)), None)
        if saved is None:
            raise InvalidArgument(
                f"the state has no group with the parameters of the optimizer's group {number}: {', '.join(own)}"
            )
        left.remove(saved)  # there may be several without parameters
        found.append({**saved, "params": own})
    return found


def sharded_like(value: Any, param: Sharded) -> Any:
    """A copy of a value with a parameter's shape (full, this rank's rows or sharded) as a DTensor; else unchanged."""
    if isinstance(value, ShardedTensor):
        local = [shard.tensor for shard in value.local_shards()]
        return param.distributed(local[0].clone() if local else torch.empty(param.own_shape, dtype=value.dtype))
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, DTensor) and value.ndim > 0:
        if tuple(value.shape) == param.shape:
            return param.distributed(param.part_of(value).clone())
        if tuple(value.shape) == param.own_shape:
            return param.distributed(value.clone())
    return value.clone()
