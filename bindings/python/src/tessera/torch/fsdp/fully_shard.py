"""`fully_shard` and the methods that it adds to modules."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule as _TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from ...errors import InvalidArgument, InvalidState, Unsupported
from .hooks import ATTRIBUTE, HookedUnit, unit_of
from .sharded import Meshes, Sharded, check, dimension_of, places_of

__all__ = [
    "FSDPModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

_AS_THEY_ARE = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = _AS_THEY_ARE,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters of a module, except those already sharded by a call on a module below it, or handled by
    PyTorch's `replicate`. Call it on all ranks alike.

    Each rank keeps its rows of every parameter, or its part along another dimension, in the module as a DTensor. While
    the module computes, forward and backward, its parameters are unsharded, in one copy that the ranks of a host share.
    Gradients are reduced into the shards while backward runs. Nothing is sent before the first forward of the root,
    which is the module that the program calls.

    Parameters that `parallelize_module` made DTensors are sharded slice by slice, over the ranks with other data: the
    shards are DTensors on the mesh of both, and the unsharded parameters are the DTensors of `parallelize_module`.

    Parameters
    ----------
    module : Module or list of Module
        The modules of a list are unsharded together. Modules are changed in place and also get the class `FSDPModule`.
    mesh : DeviceMesh, optional
        The ranks: one-dimensional, or two-dimensional, replicas by shards. By default all ranks of `torch.distributed`.
        With tensor parallelism, other dimensions of its mesh: ``mesh["dp"]``.
    reshard_after_forward : bool or int, optional
        If False, parameters stay unsharded between forward and backward; by default only the root's do. A number keeps
        them in groups of that many consecutive ranks, unsharded on each host if a group fits on one.
    shard_placement_fn : callable, optional
        Called once with each parameter; returns the dimension along which it is sharded: ``Shard(1)`` gives each rank
        columns, None means rows, like ``Shard(0)``. The dimension need not be divisible by the ranks. Such a parameter
        is not contiguous while it is unsharded: ``weight.reshape`` works, ``weight.view`` does not.
    mp_policy : MixedPrecisionPolicy, optional
        Dtypes of unsharded parameters, of gradients when they are reduced, and of outputs; whether inputs are cast.
    offload_policy : OffloadPolicy, optional
        No effect: shards are in CPU memory.
    ignored_params : set of Parameter, optional
        Left unchanged on each rank.
    dp_mesh_dims
        Must be None.

    Returns
    -------
    The module, or the list.

    Raises
    ------
    InvalidArgument, Unsupported
        A parameter or option is not supported; the message names it. Or a parameter is a DTensor whose mesh has ranks
        of `mesh`, or is not of the same mesh, or whose placements are others than `Shard` and `Replicate`.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules or not all(isinstance(one, nn.Module) for one in modules):
        raise InvalidArgument(f"fully_shard takes a module or a list of modules, got {module!r}")
    for one in modules:
        if unit_of(one) is not None:
            raise InvalidArgument(f"fully_shard was already called for this {type(one).__name__}")
        if _is_replicated(one):
            raise InvalidArgument(f"replicate was already called for this {type(one).__name__}")
        if isinstance(one, (nn.ModuleList, nn.ModuleDict)):
            raise InvalidArgument(f"a {type(one).__name__} has no forward; call fully_shard for its members")
    if dp_mesh_dims is not None:
        raise Unsupported("dp_mesh_dims is not supported; pass the mesh of the data-parallel ranks")
    if getattr(mp_policy, "param_dtype_override_fn", None) is not None:  # of PyTorch 2.15
        raise Unsupported("param_dtype_override_fn is not supported; param_dtype applies to all parameters of a call")
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if mesh.ndim not in (1, 2):
        raise InvalidArgument(f"the mesh has {mesh.ndim} dimensions; it must have one, or two for replicas by shards")
    if mesh.device_type != "cpu":
        raise Unsupported(f"the mesh is of device type {mesh.device_type}; only CPU memory is supported")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        ranks = mesh.size(mesh.ndim - 1)
        if not isinstance(reshard_after_forward, int) or reshard_after_forward < 1 or ranks % reshard_after_forward:
            raise InvalidArgument(
                f"reshard_after_forward is {reshard_after_forward!r}; it must be True, False, or a divisor of the "
                f"{ranks} ranks that parameters are sharded over"
            )
        if reshard_after_forward in (1, ranks):
            reshard_after_forward = reshard_after_forward != 1
    del offload_policy
    places = places_of(
        modules, lambda child: unit_of(child) is not None or _is_replicated(child), ignored_params or set()
    )
    names = {id(one): name for top in modules for name, one in top.named_parameters(remove_duplicate=False)}
    meshes, dims = Meshes(mesh), []
    for param in places:  # check all of them before changing any
        name = names[id(param)]
        check(name, param, meshes)
        dims.append(dimension_of(name, param, None if shard_placement_fn is None else shard_placement_fn(param)))
    params = [
        Sharded(names[id(param)], param, where, meshes, dim)
        for (param, where), dim in zip(places.items(), dims, strict=True)
    ]
    unit = HookedUnit(modules, params, mesh, mp_policy, reshard_after_forward)
    for one in modules:
        one.__dict__[ATTRIBUTE] = unit
        one.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()
        one.__class__ = _sharded_class(type(one))
    return module


def _is_replicated(module: nn.Module) -> bool:
    """Whether PyTorch's `replicate` was called for the module."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


def _sharded_class(own: type) -> type:
    """The sharded class for a class of modules; only one, so that torch.compile can reuse compiled code."""
    bases: tuple[type, ...] = (FSDPModule, own)
    below: list[type] = own.__subclasses__()
    known = (one for one in below if one.__bases__ == bases)
    return next(known, None) or type(f"FSDP{own.__name__}", bases, {"__module__": own.__module__})


class UnshardHandle:
    """A unit that is being unsharded."""

    def __init__(self, unit: HookedUnit) -> None:
        self._unit: HookedUnit | None = unit

    @torch.compiler.disable
    def wait(self) -> None:
        """Wait until the module's parameters are unsharded. Call it once."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.engine is not None and unit.params:
            unit.engine.wait_for(unit)


class FSDPModule(_TorchFSDPModule):
    """The methods that `fully_shard` adds to a module. A subclass of PyTorch's class that runs none of its code."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Indexing a container, or copying, creates an object of the original class."""
        original: Any = next(one for one in cls.__mro__ if not issubclass(one, _TorchFSDPModule))
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise Unsupported("a module cannot be copied after fully_shard; copy it before the call")

    @property
    def _unit(self) -> HookedUnit:
        unit = unit_of(self)
        assert unit is not None
        return unit

    def _units(self, recurse: bool) -> list[HookedUnit]:
        if not recurse:
            return [self._unit]
        found = {id(unit): unit for one in self.modules() if (unit := unit_of(one)) is not None}
        return list(found.values())

    @torch.compiler.disable
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard the module's parameters. Collective.

        Parameters
        ----------
        async_op : bool
            Return immediately with a handle whose `wait` completes it.
        """
        unit = self._unit
        engine = unit.begun()
        if engine is not None and unit.params:
            engine.unshard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    @torch.compiler.disable
    def reshard(self) -> None:
        """Free the memory of the module's unsharded parameters. Not allowed while the module computes with them."""
        unit = self._unit
        if unit.engine is None or not unit.params:
            return
        if unit.computing > 0:
            raise InvalidState(
                f"{unit.name!r} is in its forward, which needs unsharded parameters; if the forward failed, call "
                "reset_iter_state() to abandon the step"
            )
        unit.engine.reshard(unit)

    @torch.compiler.disable
    def reset_iter_state(self) -> None:
        """Abandon a step after an exception: parameters are sharded, and gradients that were being reduced are lost.
        Collective."""
        if self._unit.engine is not None:
            self._unit.engine.abandon()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: every backward ends with its gradients reduced."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the following backward passes reduce gradients or accumulate unsharded gradients on each rank.
        Must be the same for all modules of a root."""
        for unit in self._units(recurse):
            unit.syncs = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With replicas: set whether the following backward passes also reduce over them. Must be the same for all
        modules of a root."""
        for unit in self._units(recurse):
            unit.all_reduces = bool(requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Like the argument of `fully_shard`."""
        if not isinstance(reshard_after_forward, bool):
            raise InvalidArgument(f"reshard_after_forward is {reshard_after_forward!r}; it must be a bool")
        for unit in self._units(recurse):
            unit.reshards = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """If False, unsharded parameters keep their memory after the following backward passes, and the next forward
        reuses them unless some rank changed a shard since. Modules show their shards in between."""
        if not isinstance(reshard_after_backward, bool):
            raise InvalidArgument(f"reshard_after_backward is {reshard_after_backward!r}; it must be a bool")
        for unit in self._units(recurse):
            unit.reshards_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Set the modules to unshard while this one computes, in forward."""
        self._unit.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """The same in backward."""
        self._unit.backward_prefetch = _units_of(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the gradients of this module by this factor instead of the number of ranks. Does not apply to modules
        below it that have their own units."""
        if not factor > 0:
            raise InvalidArgument(f"the factor is {factor}; it must be positive")
        self._unit.factor = self._unit.mesh.size() / factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Same as `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Must be True: backward needs unsharded parameters."""
        _only(unshard_in_backward is True, "set_unshard_in_backward(False)")

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Must be False: every backward ends with its gradients reduced."""
        _only(not enabled, "set_manual_backward_finalization(True)")

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: it is for transports that support no other reduction."""

    def set_post_optim_event(self, event: Any) -> None:
        """No effect: it is for GPU streams."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect: memory always belongs to the communicator."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """No effect: gradients always have their own communicator."""

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """No effect: the memory of unsharded parameters is always kept and reused by other units."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """No effect: a gradient that a rank lacks counts as zeros."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """No effect: the gradients of two units are reduced at a time."""

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Not supported: the core reduces the gradients of replicas."""
        _only(False, "set_all_reduce_hook")

    def set_custom_all_gather(self, comm: Any) -> None:
        """Not supported: the core unshards parameters."""
        _only(False, "set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Not supported: the core reduces gradients."""
        _only(False, "set_custom_reduce_scatter")

    def set_symm_mem_for_comm(self, backend: Any = "NCCL") -> None:
        """Not supported: it is for GPUs."""
        _only(False, "set_symm_mem_for_comm")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No effect: units are always unsharded in the background."""

    def finalize_backward(self, *, async_op: bool = False) -> NoReturn:
        """Not supported: backward itself ends the step."""
        raise InvalidState("backward() has already ended the step; there is nothing to finalize")

    def _get_fsdp_state(self) -> NoReturn:
        raise Unsupported("this module is sharded by Tessera and has no state of PyTorch's FSDP")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply a change of dtype or device, which is allowed before the first forward."""
        if any(unit.engine is not None for unit in self._units(True)):
            tensors = [*self.parameters(), *self.buffers()]
            own = [one.to_local() if isinstance(one, DTensor) else one.detach() for one in tensors]
            if all(fn(one) is one for one in own):
                return self
            raise InvalidState(
                "the dtype or device of a module under fully_shard can be changed only before its first forward"
            )
        return super(_TorchFSDPModule, self)._apply(fn, recurse)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method compute like ``forward``, with unsharded parameters. Does nothing for other modules."""
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(type(module), method_name, None)
    if method is None:
        raise InvalidArgument(f"a {type(module).__name__} has no method {method_name!r}")

    @functools.wraps(method)
    def whole(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = unit._pre_forward(self, args, kwargs)
        return unit._post_forward(self, args, method(self, *args, **kwargs))

    setattr(module, method_name, types.MethodType(whole, module))


def share_comm_ctx(modules: list[Any]) -> None:
    """No effect: it is for GPU streams."""
    if not all(unit_of(module) for module in modules):
        raise InvalidArgument("share_comm_ctx got a module that fully_shard was not called for")


def _units_of(modules: list[Any]) -> list[HookedUnit]:
    units = [unit_of(module) for module in modules]
    if not all(units):
        raise InvalidArgument("modules to prefetch include one that fully_shard was not called for")
    return [unit for unit in units if unit is not None and unit.params]


def _only(given: bool, what: str) -> None:
    if not given:
        raise Unsupported(f"{what} is not supported by Tessera's fully_shard; see docs/TORCH.md")
