"""`FullyShardedDataParallel`, PyTorch's FSDP1 API, on top of `fully_shard`.

A wrapper runs its module and uses the module's own names in states, in `named_parameters` and for attributes.
Parameters are always the original ones, as DTensors: there is no flat parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from ...errors import InvalidArgument, Unsupported
from ..norm import clip_grad_norm_
from .fully_shard import fully_shard
from .hooks import unit_of
from .sharded import Sharded, is_shard, places_of
from .states import (
    INNER,
    KEY,
    after_state_dict,
    before_load,
    converter_of,
    grouped_as,
    named,
    names_of,
    settings_of,
    sharded_like,
)
from .wrapping import from_rank_0, give_values, ignored_of, mesh_of, wrap_below

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(nn.Module):
    """A module whose parameters, gradients and optimizer state are sharded over the ranks. Use it on all ranks alike.

    Parameters
    ----------
    module : Module
        Its parameters must be in CPU memory. Those that no wrapper below wraps form one unit, unsharded together.
    process_group : ProcessGroup, optional
        The ranks; by default all of `torch.distributed`.
    sharding_strategy : ShardingStrategy, optional
        FULL_SHARD (the default), SHARD_GRAD_OP (parameters stay unsharded between forward and backward), NO_SHARD
        (every rank has all parameters), or, with `device_mesh`, HYBRID_SHARD.
    cpu_offload
        No effect: shards are in CPU memory.
    auto_wrap_policy : callable or policy of `torch.distributed.fsdp.wrap`, optional
        Selects the submodules that get their own wrapper.
    backward_prefetch, forward_prefetch, limit_all_gathers
        No effect: the next unit is always unsharded while one computes.
    mixed_precision : MixedPrecision, optional
        `param_dtype`, `reduce_dtype`, `buffer_dtype`; `cast_root_forward_inputs` casts the inputs of the root. Must be
        the same for all wrappers of a root.
    ignored_modules, ignored_states : iterable of Module or Parameter, optional
        Parameters that are left unchanged.
    param_init_fn : callable, optional
        Called with each module that has parameters on the meta device, to initialise them.
    device_id
        None, or the CPU.
    sync_module_states : bool
        If True, begin with rank 0's parameters and buffers.
    use_orig_params : bool
        No effect: parameters are always the original ones.
    device_mesh : DeviceMesh, optional
        Instead of `process_group`; a two-dimensional mesh is replicas by shards.

    Raises
    ------
    InvalidArgument, Unsupported
        An argument is not supported, or a parameter cannot be sharded; the message names it.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        del cpu_offload, backward_prefetch, forward_prefetch, limit_all_gathers, use_orig_params
        if device_id is not None and torch.device(device_id).type != "cpu":
            raise Unsupported(f"device_id is {device_id}; only CPU memory is supported")
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        mesh = mesh_of(strategy, process_group, device_mesh)
        ignored = ignored_of(ignored_modules, ignored_states)
        options = {
            "sharding_strategy": strategy,
            "mixed_precision": mixed_precision,
            "ignored_states": list(ignored),
            "device_mesh": mesh,
            "sync_module_states": sync_module_states,
            "param_init_fn": param_init_fn,
        }
        if auto_wrap_policy is not None:
            wrap_below(module, auto_wrap_policy, options, ignored, FullyShardedDataParallel)
        give_values(module, param_init_fn, ignored)
        if sync_module_states:
            from_rank_0(module, mesh, ignored)
        policy = mixed_precision or MixedPrecision()
        if policy.buffer_dtype is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(policy.buffer_dtype)
        reshards = strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        if unit_of(module) is None or not isinstance(module, FullyShardedDataParallel):  # wrapped again: the same unit
            places = places_of([module], lambda child: unit_of(child) is not None, ignored)
            if any(isinstance(param, DTensor) and not is_shard(param) for param in places):
                raise Unsupported(
                    "FullyShardedDataParallel does not support DTensor parameters, which parallelize_module makes; use "
                    "fully_shard"
                )
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=None if reshards else False,
                mp_policy=MixedPrecisionPolicy(
                    policy.param_dtype,
                    policy.reduce_dtype,
                    cast_forward_inputs=policy.cast_forward_inputs or policy.cast_root_forward_inputs,
                ),
                ignored_params=ignored,
            )
        self.add_module(INNER, module)
        self.sharding_strategy = strategy
        self.mixed_precision = policy
        self._settings = settings_of(StateDictType.FULL_STATE_DICT)
        self.register_state_dict_post_hook(after_state_dict)
        self.register_load_state_dict_pre_hook(before_load)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._modules[INNER]

    def __getattr__(self, name: str) -> Any:
        """An attribute of the wrapper, or else of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(INNER), name)

    def __getitem__(self, key: Any) -> Any:
        """A member of the module, if that is a container."""
        return self.module[key]

    def _fqn_modifiers(self) -> dict[str, str]:
        """For PyTorch's state functions: the child that holds a name which states have without that child."""
        inner = self.module
        return dict.fromkeys((*inner._modules, *inner._parameters, *inner._buffers), INNER)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    # ------------------------------------------------------------ parameters

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own, without the wrappers' names."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield name.replace(KEY, ""), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `named_parameters`."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(KEY, ""), buffer

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers at and below a module, or only those without another one above."""
        found = [one for one in module.modules() if isinstance(one, FullyShardedDataParallel)]
        if not root_only:
            return found
        below = {id(inner) for one in found for inner in one.modules() if inner is not one}
        return [one for one in found if id(one) not in below]

    def check_is_root(self) -> bool:
        """Whether no other wrapper is above. Known after the first forward begins."""
        unit = unit_of(self.module)
        return unit is not None and unit.is_root

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block reduce nothing; each rank accumulates unsharded gradients."""
        inner: Any = self.module
        inner.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            inner.set_requires_gradient_sync(True)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`. Collective. Returns the norm before scaling."""
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` with each module, with unsharded parameters; its changes are kept. Collective."""
        with self.summon_full_params(self):
            super().apply(fn)
        return self

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Not supported: the core reduces gradients."""
        raise Unsupported("register_comm_hook is not supported by Tessera's FullyShardedDataParallel")

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Unshard parameters, as copies private to this rank. Collective.

        Parameters
        ----------
        module : Module
            A wrapper, or a module with wrappers below.
        recurse : bool
            If False, only this wrapper's parameters.
        writeback : bool
            Keep changes made in the block: this rank's rows of each parameter.
        rank0_only : bool
            Only on rank 0; the others keep their shards. Cannot be combined with `writeback`.
        offload_to_cpu : bool
            No effect: they are in CPU memory.
        with_grads : bool
            Also unshard gradients; with `writeback`, changes to existing ones are kept.
        """
        del offload_to_cpu
        if rank0_only and writeback:
            raise InvalidArgument(
                "summon_full_params: writeback with rank0_only is not supported, because other ranks would keep their "
                "old rows"
            )
        units = [unit_of(one.module) for one in FullyShardedDataParallel.fsdp_modules(module)]
        if not recurse:
            units = units[:1]
        shown: list[tuple[Sharded, nn.Parameter, nn.Parameter]] = []
        for unit in units:
            assert unit is not None
            if unit.engine is not None and unit.params:
                unit.engine.reshard(unit)
            for param in unit.params:
                sharded = param.shown
                if not isinstance(sharded, DTensor):
                    continue  # in a block of a module above
                whole = nn.Parameter(sharded.full_tensor().detach(), requires_grad=sharded.requires_grad)
                if with_grads and sharded.grad is not None:
                    whole.grad = sharded.grad.full_tensor()
                if not rank0_only or dist.get_rank() == 0:
                    shown.append((param, sharded, whole))
        for param, _, whole in shown:
            param.show(whole)
        try:
            yield
        finally:
            for param, sharded, whole in shown:
                if writeback:
                    with torch.no_grad():
                        sharded.to_local().copy_(param.part_of(whole))
                        if with_grads and whole.grad is not None and sharded.grad is not None:
                            sharded.grad.to_local().copy_(param.part_of(whole.grad))
                param.show(sharded)

    # ------------------------------------------------------------ states

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the kind of states of the wrappers at and below a module.

        FULL_STATE_DICT, the default: full tensors, on every rank or, by its config, only on rank 0; gathered
        collectively, one parameter at a time. SHARDED_STATE_DICT and LOCAL_STATE_DICT: DTensors, which know the offsets
        of their rows; nothing is sent.

        Returns
        -------
        The previous settings.
        """
        settings = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        former = FullyShardedDataParallel.get_state_dict_type(module)
        for one in FullyShardedDataParallel.fsdp_modules(module):
            one._settings = settings
        return former

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of the wrappers at and below a module.

        Raises
        ------
        InvalidArgument
            There is no wrapper, or the settings differ.
        """
        found = [one._settings for one in FullyShardedDataParallel.fsdp_modules(module)]
        if not found:
            raise InvalidArgument("there is no FullyShardedDataParallel at or below this module")
        if any(one != found[0] for one in found):
            raise InvalidArgument("the wrappers below this module have different state_dict_types")
        return found[0]

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """`set_state_dict_type` inside a block."""
        former = FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for one in FullyShardedDataParallel.fsdp_modules(module):
                one._settings = former

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """An optimizer's state by parameter names, with tensors as set by `set_state_dict_type`. Collective for full
        tensors.

        Parameters
        ----------
        optim_state_dict : dict, optional
            The optimizer's state by parameter numbers; by default its current state.

        Returns
        -------
        dict
            ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``; empty on ranks other than 0
            with ``rank0_only``.
        """
        del group
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        given = optim.state_dict() if optim_state_dict is None else optim_state_dict
        names = names_of(model, optim)
        convert, kept = converter_of(settings.state_dict_type, settings.optim_state_dict_config)
        state = {
            names[number] if isinstance(number, int) else number: {
                key: convert(value) for key, value in of_param.items()
            }
            for number, of_param in given["state"].items()
        }
        if not kept:
            return {}
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in given["param_groups"]]
        return {"state": state, "param_groups": groups}

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Convert a state of `optim_state_dict` to one for ``optim.load_state_dict``.

        Parameters
        ----------
        is_named_optimizer : bool
            Whether the optimizer's own state is by names.
        load_directly : bool
            Also load the state.
        """
        del group
        settings = FullyShardedDataParallel.get_state_dict_type(model)
        if settings.state_dict_type is StateDictType.FULL_STATE_DICT and getattr(
            settings.optim_state_dict_config, "rank0_only", False
        ):
            holder: list[Any] = [optim_state_dict if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(holder, src=0)
            optim_state_dict = holder[0]
        names = names_of(model, optim)
        params = named(model)
        state: dict[Any, Any] = {}
        for number, name in enumerate(names):
            if name not in optim_state_dict["state"]:
                continue
            param = params.get(name)
            state[name if is_named_optimizer else number] = {
                key: value if param is None else sharded_like(value, param)
                for key, value in optim_state_dict["state"][name].items()
            }
        groups = grouped_as(optim, names, optim_state_dict["param_groups"])
        if not is_named_optimizer:
            known = {name: number for number, name in enumerate(names)}
            groups = [{**group_, "params": [known[name] for name in group_["params"]]} for group_ in groups]
        loaded = {"state": state, "param_groups": groups}
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """`optim_state_dict` with full tensors. Collective."""
        del optim_input, group
        config = FullOptimStateDictConfig(rank0_only=rank0_only)
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config
        ):
            return FullyShardedDataParallel.optim_state_dict(model, optim)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """`optim_state_dict` with DTensors."""
        del group
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return FullyShardedDataParallel.optim_state_dict(model, optim)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` for full tensors that every rank has."""
        del optim_input
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return FullyShardedDataParallel.optim_state_dict_to_load(model, _given(optim), full_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` for full tensors that rank 0 has. Collective."""
        del optim_input, group
        config = FullOptimStateDictConfig(rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config
        ):
            return FullyShardedDataParallel.optim_state_dict_to_load(model, _given(optim), full_optim_state_dict or {})

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` for DTensors or ShardedTensors."""
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return FullyShardedDataParallel.optim_state_dict_to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert the keys of an optimizer's state from names to numbers or from numbers to names."""
        del optim_input
        names = [name.replace(KEY, "") for name, _ in model.named_parameters()]
        if optim is not None:
            names = names_of(model, optim)
        new: dict[Any, Any] = dict(enumerate(names))
        by_number = optim_state_key_type is OptimStateKeyType.PARAM_ID
        if by_number:
            new = {name: number for number, name in new.items()}
        groups = []
        for group in optim_state_dict["param_groups"]:
            keys = [new[key] for key in group["params"]]
            groups.append({**group, "params": sorted(keys) if by_number else keys})
        return {"state": {new[key]: value for key, value in optim_state_dict["state"].items()}, "param_groups": groups}


def _given(optim: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if optim is None:
        raise InvalidArgument("optim is missing; pass the optimizer to whose parameters the state's numbers refer")
    return optim
