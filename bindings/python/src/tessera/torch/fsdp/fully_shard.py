"""`fully_shard` and the methods of the modules that it was called for."""

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
from .sharded import Sharded, check, dimension_of, places_of

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
    """Shard the parameters of a module that no former call on a module below it has sharded, or PyTorch's `replicate`
    has. On all ranks alike.

    Each rank keeps its rows of every parameter, or its part along another dimension, in the module as a DTensor. While
    the module computes, forward and backward, its parameters are whole, in one copy that the ranks of a host share.
    Gradients are reduced into the shards while backward goes on. Nothing is sent before the first forward of the root,
    the module that is called by the program itself.

    Parameters
    ----------
    module : Module or list of Module
        With a list, they are whole together. The modules are changed in place and get the class `FSDPModule` beside
        their own.
    mesh : DeviceMesh, optional
        The ranks: of one dimension, or of two, replicas by shards. By default all ranks of `torch.distributed`.
    reshard_after_forward : bool or int, optional
        False: parameters stay whole between forward and backward. By default the root's do. A number: they are kept
        among each so many ranks that follow each other, whole on each host if those fit on one.
    shard_placement_fn : callable, optional
        Gets each parameter, once, and says along which of its dimensions it is cut: ``Shard(1)`` gives each rank
        columns; None are rows, as `Shard(0)` is. Ranks need not divide the dimension. While such a parameter is whole
        it has other strides than a contiguous one: ``weight.reshape`` takes these, ``weight.view`` does not.
    mp_policy : MixedPrecisionPolicy, optional
        Dtypes of whole parameters, of gradients on their way, of outputs; whether inputs are cast.
    offload_policy : OffloadPolicy, optional
        Without effect: shards are in the CPU's memory.
    ignored_params : set of Parameter, optional
        Left as they are, on each rank its own.
    dp_mesh_dims
        None.

    Returns
    -------
    The module, or the list.

    Raises
    ------
    InvalidArgument, Unsupported
        A parameter cannot be cut, or an option cannot be; it is named.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules or not all(isinstance(one, nn.Module) for one in modules):
        raise InvalidArgument(f"fully_shard takes a module or modules, not {module!r}")
    for one in modules:
        if unit_of(one) is not None:
            raise InvalidArgument(f"fully_shard was called for this {type(one).__name__} before")
        if _is_replicated(one):
            raise InvalidArgument(f"replicate was called for this {type(one).__name__} before")
        if isinstance(one, (nn.ModuleList, nn.ModuleDict)):
            raise InvalidArgument(f"a {type(one).__name__} does not compute itself: call fully_shard for its members")
    if dp_mesh_dims is not None:
        raise Unsupported("dp_mesh_dims is not supported: give the mesh of the data-parallel ranks")
    if getattr(mp_policy, "param_dtype_override_fn", None) is not None:  # of PyTorch 2.15
        raise Unsupported("param_dtype_override_fn is not supported: param_dtype is of all parameters of a call")
    mesh = mesh if mesh is not None else init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    if mesh.ndim not in (1, 2):
        raise InvalidArgument(f"the mesh has {mesh.ndim} dimensions; one, or two for replicas by shards, is wanted")
    if mesh.device_type != "cpu":
        raise Unsupported(f"the mesh is of {mesh.device_type}; parameters in the CPU's memory are sharded")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        ranks = mesh.size(mesh.ndim - 1)
        if not isinstance(reshard_after_forward, int) or reshard_after_forward < 1 or ranks % reshard_after_forward:
            raise InvalidArgument(
                f"reshard_after_forward is {reshard_after_forward!r}; it is True, False, or a number of which "
                f"the {ranks} ranks that parameters are cut among are a multiple"
            )
        if reshard_after_forward in (1, ranks):
            reshard_after_forward = reshard_after_forward != 1
    del offload_policy
    places = places_of(
        modules, lambda child: unit_of(child) is not None or _is_replicated(child), ignored_params or set()
    )
    names = {id(one): name for top in modules for name, one in top.named_parameters(remove_duplicate=False)}
    dims = []
    for param in places:  # all of them, before one is changed
        name = names[id(param)]
        check(name, param)
        dims.append(dimension_of(name, param, None if shard_placement_fn is None else shard_placement_fn(param)))
    params = [
        Sharded(names[id(param)], param, where, mesh, dim)
        for (param, where), dim in zip(places.items(), dims, strict=True)
    ]
    unit = HookedUnit(modules, params, mesh, mp_policy, reshard_after_forward)
    for one in modules:
        one.__dict__[ATTRIBUTE] = unit
        one.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()
        one.__class__ = _sharded_class(type(one))
    return module


def _is_replicated(module: nn.Module) -> bool:
    """Whether PyTorch's `replicate` has the module, as DDP has one."""
    return "replicate" in module.__dict__.get(REGISTRY_KEY, ())


def _sharded_class(own: type) -> type:
    """That of the modules of a class; one alone, so that what torch.compile makes for one of them fits all."""
    bases: tuple[type, ...] = (FSDPModule, own)
    below: list[type] = own.__subclasses__()
    known = (one for one in below if one.__bases__ == bases)
    return next(known, None) or type(f"FSDP{own.__name__}", bases, {"__module__": own.__module__})


class UnshardHandle:
    """A unit on its way."""

    def __init__(self, unit: HookedUnit) -> None:
        self._unit: HookedUnit | None = unit

    @torch.compiler.disable
    def wait(self) -> None:
        """Return when the module's parameters are whole. Once."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.engine is not None and unit.params:
            unit.engine.wait_for(unit)


class FSDPModule(_TorchFSDPModule):
    """What `fully_shard` adds to a module. A subclass of PyTorch's; none of PyTorch's code beneath it runs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Indexing a container, or copying, makes an object of the original class."""
        original: Any = next(one for one in cls.__mro__ if not issubclass(one, _TorchFSDPModule))
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise Unsupported("a module cannot be copied after fully_shard; copy it before")

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
        """Make the module's parameters whole. Collective.

        Parameters
        ----------
        async_op : bool
            Begin with it, and return a handle whose `wait` ends it.
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
        """Give the memory of the module's whole parameters back. Not while it computes, which is with these."""
        unit = self._unit
        if unit.engine is None or not unit.params:
            return
        if unit.computing > 0:
            raise InvalidState(
                f"{unit.name!r} is in its forward, which needs its parameters whole; if that ended with an error, "
                "reset_iter_state() gives the step up"
            )
        unit.engine.reshard(unit)

    @torch.compiler.disable
    def reset_iter_state(self) -> None:
        """Give up a step in which something was raised: parameters are sharded, gradients that were on their way lost.
        Collective."""
        if self._unit.engine is not None:
            self._unit.engine.abandon()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Without effect: every backward ends with its gradients reduced."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the following backward passes reduce gradients, or add them up whole on each rank. For all modules of
        a root alike."""
        for unit in self._units(recurse):
            unit.syncs = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With replicas: whether the following backward passes reduce over these, too. For all of a root alike."""
        for unit in self._units(recurse):
            unit.all_reduces = bool(requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """As the argument of `fully_shard`."""
        if not isinstance(reshard_after_forward, bool):
            raise InvalidArgument(f"reshard_after_forward is {reshard_after_forward!r}; a bool is wanted")
        for unit in self._units(recurse):
            unit.reshards = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: whole parameters keep their memory after the following backward passes, and are used again by the next
        forward, unless a shard was changed on some rank since. Modules show their shards in between."""
        if not isinstance(reshard_after_backward, bool):
            raise InvalidArgument(f"reshard_after_backward is {reshard_after_backward!r}; a bool is wanted")
        for unit in self._units(recurse):
            unit.reshards_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """The modules that are on their way while this one computes, in forward."""
        self._unit.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """The same in backward."""
        self._unit.backward_prefetch = _units_of(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Gradients of this module, without those below it that have units of their own, are divided by this instead of
        by the number of ranks."""
        if not factor > 0:
            raise InvalidArgument(f"the factor is {factor}; it is above 0")
        self._unit.factor = self._unit.mesh.size() / factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """As `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """True: backward needs whole parameters."""
        _only(unshard_in_backward is True, "set_unshard_in_backward(False)")

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """False: every backward ends with its gradients reduced."""
        _only(not enabled, "set_manual_backward_finalization(True)")

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Without effect: it is for transports that have no other reduction."""

    def set_post_optim_event(self, event: Any) -> None:
        """Without effect: it is for streams of a GPU."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Without effect: memory is always the communicator's."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Without effect: gradients always have a communicator of their own."""

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Without effect: the memory of whole parameters is always kept, and goes from unit to unit."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Without effect: a gradient that a rank does not have counts as zeros."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Without effect: two units' gradients are on their way at once."""

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Refused: gradients of replicas are reduced by the core."""
        _only(False, "set_all_reduce_hook")

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refused: the core makes parameters whole."""
        _only(False, "set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refused: the core reduces gradients."""
        _only(False, "set_custom_reduce_scatter")

    def set_symm_mem_for_comm(self, backend: Any = "NCCL") -> None:
        """Refused: it is for GPUs."""
        _only(False, "set_symm_mem_for_comm")

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Without effect: units are always on their way in the background."""

    def finalize_backward(self, *, async_op: bool = False) -> NoReturn:
        """Refused: backward itself ends the step."""
        raise InvalidState("backward() itself has ended the step: there is nothing to finalize")

    def _get_fsdp_state(self) -> NoReturn:
        raise Unsupported("this module is sharded by Tessera; it has no state of PyTorch's FSDP")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Dtypes and devices may change until the first forward."""
        if any(unit.engine is not None for unit in self._units(True)):
            tensors = [*self.parameters(), *self.buffers()]
            own = [one.to_local() if isinstance(one, DTensor) else one.detach() for one in tensors]
            if all(fn(one) is one for one in own):
                return self
            raise InvalidState("dtypes and devices of a module under fully_shard change before its first forward")
        return super(_TorchFSDPModule, self)._apply(fn, recurse)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method compute as ``forward`` does: with whole parameters. Nothing for other modules."""
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
    """Without effect: it is for streams of a GPU."""
    if not all(unit_of(module) for module in modules):
        raise InvalidArgument("share_comm_ctx takes modules that fully_shard was called for")


def _units_of(modules: list[Any]) -> list[HookedUnit]:
    units = [unit_of(module) for module in modules]
    if not all(units):
        raise InvalidArgument("modules to prefetch are those that fully_shard was called for")
    return [unit for unit in units if unit is not None and unit.params]


def _only(given: bool, what: str) -> None:
    if not given:
        raise Unsupported(f"{what} is not supported by Tessera's fully_shard; docs/TORCH.md tells what is")
