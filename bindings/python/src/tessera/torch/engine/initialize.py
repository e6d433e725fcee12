"""`initialize`, and the program's arguments for it."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...engine import resolve_config
from ...errors import InvalidArgument, Mismatch, Unsupported
from ...lr_schedule import LRSchedule
from ..ranks import Ranks, ranks_of
from ..slices import is_slice
from .comm import init_distributed
from .loader import DeepSpeedDataLoader
from .models import make_model
from .optimizers import make_optimizer
from .pipe import PipelineEngine, PipelineModule, check_pipeline
from .runtime import DeepSpeedEngine
from .schedules import Schedule, make_scheduler
from .settings import Settings

__all__ = ["add_config_arguments", "initialize"]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments to a parser: ``--deepspeed`` and ``--deepspeed_config PATH``, and their older names."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's configuration")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train by the engine")
    group.add_argument("--deepspeed_config", default=None, type=str, metavar="PATH", help="the ds_config")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Make an engine of a module. Collective: all ranks begin with rank 0's parameters and buffers.

    Parameters
    ----------
    args : optional
        An object with ``deepspeed_config`` (a path), unless `config` is given, and perhaps ``local_rank``.
    model : Module
        In CPU memory. From stage 1 on, or with fp16 or bf16, its parameters become DTensors: do not keep the old ones.
    optimizer : optional
        An optimizer over the module's parameters that has made no step, or a function that makes one of parameters. It
        replaces that of the configuration.
    model_parameters : optional
        Parameters or groups of them for the optimizer; by default those of the module that require a gradient.
    training_data : Dataset, optional
        Makes the loader: micro-batches of this rank's samples.
    lr_scheduler : optional
        A scheduler of `optimizer`, which must then be an object too, or a function that makes one of the optimizer, or
        a `tessera.LRSchedule`. It replaces that of the configuration.
    distributed_port, dist_init_required
        As for `init_distributed`.
    mpu : optional
        The data-parallel ranks, if they are not all: an object with ``get_data_parallel_group()``, or one dimension of
        a mesh (``mesh["dp"]``) for a module whose parameters `parallelize_module` made DTensors.
    collate_fn : callable, optional
        For the loader.
    config : dict or path, optional
        The ds_config.
    mesh_param
        Not supported.
    config_params
        Another name of `config`.

    Returns
    -------
    The engine, the optimizer, the loader and the scheduler; None for what there is not. For a `PipelineModule` the
    engine is a `PipelineEngine`.

    Raises
    ------
    InvalidArgument, Unsupported
        The configuration or an argument is wrong, contradicts another one or is not supported; the message names it.
    Mismatch
        The ranks' configurations or modules differ; the message names the first difference.
    """
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    ranks = ranks_of(None, False)

    def check() -> tuple[Any, DeviceMesh | None, Settings]:
        if model is None:
            raise InvalidArgument("deepspeed.initialize requires a model")
        if mesh_param is not None:
            raise Unsupported(f"mesh_param is {mesh_param!r}; sequence parallelism is not supported, leave it out")
        given = _config_of(args, config if config is not None else config_params)
        _check_local_rank(args)
        group, mesh = _data_parallel(model, mpu)
        settings = Settings.of(resolve_config(given, dist.get_world_size(group)))
        _check_arguments(model, optimizer, lr_scheduler, settings, mpu, group)
        return group, mesh, settings

    group, mesh, settings = ranks.together(check)
    assert model is not None
    is_pipeline = isinstance(model, PipelineModule)
    if is_pipeline and settings.stage == 0:
        mesh = model.mesh["dp", "alone"]
    _compare(ranks, settings, None if is_pipeline else model)
    if ranks.rank == 0:
        _report(settings)
    names = {param: name for name, param in model.named_parameters()}
    params = ranks.together(lambda: _params(model, model_parameters, optimizer, settings))
    if isinstance(model, PipelineModule):
        model.tie()
    run = make_model(model, group, settings, mesh)
    after = dict(model.named_parameters())
    made = ranks.together(lambda: _optimizer(optimizer, params, settings, names, after))
    scheduler = ranks.together(lambda: _scheduler(lr_scheduler, made, settings))
    loader = ranks.together(
        lambda: None if training_data is None else DeepSpeedDataLoader(training_data, settings, group, collate_fn)
    )
    kind = PipelineEngine if is_pipeline else DeepSpeedEngine
    engine = kind(model, run, made, scheduler, loader, settings, ranks, group, mpu)
    if settings.dumps_state and ranks.rank == 0:
        engine.print_state()
    return engine, made, loader, scheduler


def _config_of(args: Any, config: Any) -> Any:
    of_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and of_args is not None:
        raise InvalidArgument(
            f"the configuration is given twice: in the arguments ({of_args!r}), and to initialize(); leave one out"
        )
    found = config if config is not None else of_args
    if found is None:
        raise InvalidArgument("DeepSpeed requires --deepspeed_config to specify configuration file; or pass config=")
    return found


def _check_local_rank(args: Any) -> None:
    given, known = getattr(args, "local_rank", None), os.environ.get("LOCAL_RANK")
    if isinstance(given, int) and given >= 0 and known is not None and str(given) != known:
        raise InvalidArgument(f"Mismatch in local rank setting, args.local_rank={given} but env['LOCAL_RANK']={known}.")


def _data_parallel(model: Any, mpu: Any) -> tuple[Any, DeviceMesh | None]:
    """The group of the data-parallel ranks, and their mesh if it is one dimension of several."""
    if isinstance(model, PipelineModule):
        return model.data_parallel_group, model.mesh["dp"]
    if mpu is None:
        return dist.group.WORLD, None
    if isinstance(mpu, DeviceMesh):
        if mpu.ndim != 1:
            raise InvalidArgument(
                f"mpu is a mesh of {mpu.ndim} dimensions; pass that of the ranks with other data: mesh['dp']"
            )
        return mpu.get_group(), mpu
    if not hasattr(mpu, "get_data_parallel_group"):
        raise InvalidArgument(f"mpu is a {type(mpu).__name__}; it must have get_data_parallel_group(), or be a mesh")
    return mpu.get_data_parallel_group(), None


def _check_arguments(model: Any, optimizer: Any, lr_scheduler: Any, settings: Settings, mpu: Any, group: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"the model is a {type(model).__name__}; it must be a torch.nn.Module")
    if isinstance(model, PipelineModule):
        check_pipeline(settings)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InvalidArgument("the model is wrapped for DDP already; pass the module itself, which initialize() wraps")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise InvalidArgument(
            f"the optimizer is a {type(optimizer).__name__}; pass an object of torch.optim, or a function"
        )
    is_object = lr_scheduler is not None and not callable(lr_scheduler) and not isinstance(lr_scheduler, LRSchedule)
    if is_object and not hasattr(lr_scheduler, "step"):
        raise InvalidArgument(f"lr_scheduler is a {type(lr_scheduler).__name__}, which has no step()")
    if is_object and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(
            "lr_scheduler is an object, which belongs to an optimizer: pass that too, or a function that makes the "
            "scheduler of the engine's optimizer"
        )
    sliced = any(is_slice(param) for param in model.parameters())
    if mpu is not None and dist.get_world_size(group) < dist.get_world_size() and not sliced:
        raise Unsupported(
            f"mpu has {dist.get_world_size(group)} data-parallel ranks of {dist.get_world_size()}, but the model's "
            "parameters are plain tensors, of which a checkpoint cannot tell whose they are; make them DTensors with "
            "parallelize_module, and pass mpu=mesh['dp']"
        )


def _compare(ranks: Ranks, settings: Settings, model: nn.Module | None) -> None:
    """Raise on all ranks if configurations or modules differ. Collective."""
    lines = [f"the configuration's {key!r} {json.dumps(value)}" for key, value in settings.resolved.items()]
    for name, param in model.named_parameters() if model is not None else ():
        lines.append(f"parameter {name!r} {param.dtype} {tuple(param.shape)} requires_grad={param.requires_grad}")
    told = [json.loads(one) for one in ranks.gather(json.dumps(lines).encode())]
    for rank, other in enumerate(told):
        for one, theirs in zip(told[0], other, strict=False):
            if one != theirs:
                raise Mismatch(f"the ranks differ: {one} on rank 0, {theirs} on rank {rank}")
        if len(other) != len(told[0]):
            raise Mismatch(
                f"the ranks differ: rank 0 has {len(told[0])} settings and parameters, rank {rank} {len(other)}"
            )


def _report(settings: Settings) -> None:
    for report in settings.resolved["reports"]:
        warnings.warn(report["text"], stacklevel=3)


def _params(model: nn.Module, given: Any, optimizer: Any, settings: Settings) -> list[Any]:
    """What the optimizer gets."""
    own = [param for param in model.parameters() if param.requires_grad]
    if optimizer is None and settings.optimizer is None and not own:
        raise InvalidArgument("no parameter of the model requires a gradient, so there is nothing to train")
    return own if given is None else list(given)


def _optimizer(
    optimizer: Any,
    params: Sequence[Any],
    settings: Settings,
    names: Mapping[torch.Tensor, str],
    after: Mapping[str, nn.Parameter],
) -> Any:
    """The engine's optimizer, over the parameters that the module has now."""

    def now(param: Any) -> Any:
        name = names.get(param)
        if name is None:
            raise InvalidArgument(
                f"the optimizer gets a {type(param).__name__} of shape {tuple(getattr(param, 'shape', ()))} that is "
                "not a parameter of the model"
            )
        return after.get(name, param)

    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            new = [now(param) for param in group["params"]]
            moved = [old for old, one in zip(group["params"], new, strict=True) if old is not one]
            if any(optimizer.state.get(old) for old in moved):
                raise InvalidArgument(
                    "the optimizer has a state already, of parameters that the engine shards; pass a function that "
                    "makes the optimizer of parameters, and load its state by load_checkpoint()"
                )
            group["params"] = new
        return optimizer
    groups = [
        {**one, "params": [now(param) for param in _listed(one["params"])]} if isinstance(one, dict) else now(one)
        for one in params
    ]
    if optimizer is not None:
        made = optimizer(groups)
        if not isinstance(made, torch.optim.Optimizer):
            raise InvalidArgument(
                f"the optimizer's function made a {type(made).__name__}; it must be an object of torch.optim"
            )
        return made
    return None if settings.optimizer is None else make_optimizer(settings, groups)


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _scheduler(lr_scheduler: Any, optimizer: Any, settings: Settings) -> Any:
    if isinstance(lr_scheduler, LRSchedule):
        return Schedule(optimizer, lr_scheduler)
    if lr_scheduler is not None:
        return lr_scheduler(optimizer) if callable(lr_scheduler) else lr_scheduler
    return None if settings.scheduler is None or optimizer is None else make_scheduler(settings, optimizer)
