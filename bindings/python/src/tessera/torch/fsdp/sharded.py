"""A parameter under `fully_shard`: a DTensor while sharded, and at its own address while unsharded.

The unit decides which of the two its modules show. A parameter that several modules share is shown in all of them.

A parameter of tensor parallelism is a DTensor of which this rank holds a slice. Its shard is a part of that slice: a
DTensor on the mesh of both, the data-parallel dimensions first. While it is unsharded it is the DTensor that
`parallelize_module` made. The core sees slices as plain tensors.

The core shards by rows. For a parameter sharded along another dimension, the core sees that dimension first, and the
memory is accessed through views with other strides than PyTorch's shards. Therefore such a shard and its gradient are
copies, contiguous like PyTorch's.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.weak import WeakTensorKeyDictionary

from ... import _core
from ...errors import InvalidArgument, Unsupported
from ..slices import accumulate_as_placed, check_slice, local, ranks_in_both
from ..tensors import CORE, of_core

__all__ = ["Meshes", "Sharded", "check", "dimension_of", "is_shard", "over", "places_of"]

Place = tuple[nn.Module, str]

_TRAINED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The parameters that were sharded, as long as their units exist: a module without a unit may still hold one.
_cut: Any = WeakTensorKeyDictionary()
_all: weakref.WeakSet[Sharded] = weakref.WeakSet()


def over(memory: _core.Memory, dtype: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over memory of the library; it keeps the memory alive."""
    known = of_core(dtype)
    if not len(memory):
        return torch.empty(shape, dtype=known)
    return torch.frombuffer(memory, dtype=known).view(shape)


class Sharded:
    """A parameter of a unit.

    Parameters
    ----------
    name : str
        Name for messages until the model has a root.
    param : Parameter
        The full parameter, or a DTensor, already validated by `check`. This rank's rows are copied; nothing is sent.
    places : sequence of (Module, str)
        The modules that have it, with its name in each.
    meshes : Meshes
        Of the call; its mesh is one-dimensional, or replicas by shards.
    dim : int
        The dimension that is sharded.
    """

    def __init__(self, name: str, param: nn.Parameter, places: Sequence[Place], meshes: Meshes, dim: int) -> None:
        mesh = meshes.given
        self.name = name
        self.places = places
        self.dim = dim
        self.shape = tuple(param.shape)
        self.stride = param.stride()
        self.slice_mesh: DeviceMesh | None = None  # of tensor parallelism
        self.slice_placements: tuple[Placement, ...] = ()
        own_cut: Placement = Shard(dim)
        if isinstance(param, DTensor):
            self.slice_mesh, self.slice_placements = param.device_mesh, param.placements
            parts = _parts_along(dim, param)
            own_cut = _StridedShard(dim, split_factor=parts) if parts > 1 else own_cut
        self.whole_shape = tuple(local(param).shape)  # on this rank
        joined = mesh if self.slice_mesh is None else meshes.joined(self.slice_mesh)
        assert joined is not None
        self.mesh = joined
        self.placements: tuple[Placement, ...] = (*(Replicate(),) * (mesh.ndim - 1), own_cut, *self.slice_placements)
        self.trained = param.requires_grad
        self.number = -1  # in the core's model, once that exists
        self.whole: nn.Parameter | None = None
        self._accumulator: Any = None  # autograd's node that adds to the gradient of `whole`
        self.accumulated: Callable[[Sharded], None] | None = None  # called after each accumulation
        self._shown_trained = False
        self.grad: DTensor | None = None  # of the shard
        ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        size = self.whole_shape[dim]
        chunk = -(-size // ranks)
        self.begin_at = min(rank * chunk, size)
        self.own_size = min((rank + 1) * chunk, size) - self.begin_at
        self.own_shape = (*self.whole_shape[:dim], self.own_size, *self.whole_shape[dim + 1 :])
        own = self.part_of(local(param)).clone(memory_format=torch.contiguous_format)
        _cut[param] = weakref.ref(self)
        self.show(nn.Parameter(self.distributed(own), requires_grad=param.requires_grad))
        _all.add(self)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor with the shape of the unsharded parameter on this rank."""
        return whole.detach().narrow(self.dim, self.begin_at, self.own_size)

    def distributed(self, own: torch.Tensor) -> DTensor:
        """The DTensor whose local tensor is `own`."""
        return DTensor.from_local(
            own,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )

    def _as_slice(self, whole: torch.Tensor) -> torch.Tensor:
        """The unsharded parameter, of which this rank holds `whole`: itself, or a DTensor of tensor parallelism."""
        if self.slice_mesh is None:
            return whole
        return DTensor.from_local(
            whole,
            self.slice_mesh,
            self.slice_placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )

    @property
    def shown(self) -> nn.Parameter:
        """The parameter that the modules have now."""
        module, attribute = self.places[0]
        return module._parameters[attribute]

    def show(self, param: nn.Parameter) -> None:
        """Set the parameter in all its modules."""
        for module, attribute in self.places:
            module._parameters[attribute] = param

    # ------------------------------------------------------------ from the core's model on

    @property
    def core_shape(self) -> tuple[int, ...]:
        """The shape in the core."""
        shape = self.whole_shape
        return (shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :])

    @property
    def core_name(self) -> str:
        """The name in the core, which differs if ranks shard along different dimensions or have different slices."""
        name = self.name if self.dim == 0 else f"{self.name} (Shard({self.dim}))"
        return name if self.slice_mesh is None else f"{name} (slice of {', '.join(map(str, self.slice_placements))})"

    def _seen(self, memory: _core.Memory, dtype: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor over memory of the core, with the dimensions in the parameter's order."""
        return over(memory, dtype, shape).movedim(0, self.dim)

    def begin(self, handle: _core.FSDP, number: int) -> None:
        """Copy the shard's values to the core's memory, which the DTensor uses from now on."""
        self.number = number
        self.whole = self._accumulator = None
        self.sharded = self.shown
        self.trained = self.sharded.requires_grad
        if not isinstance(self.sharded, DTensor):
            raise InvalidArgument(
                f"parameter {self.name!r} was replaced by a {type(self.sharded).__name__}, expected a DTensor; change "
                "modules before fully_shard"
            )
        self._check_replaced(self.sharded)
        local = self.sharded._local_tensor
        if local.device.type == "meta":
            raise InvalidArgument(
                f"parameter {self.name!r} has no values yet: it is on the meta device; call to_empty(device='cpu') on "
                "the module and initialise or load its parameters before the first forward"
            )
        self.own = self._seen(*_core.fsdp_shard(handle, number))
        self._take(self.sharded)
        if self.trained:
            self.own_grad = self._seen(*_core.fsdp_shard_grad(handle, number))
            self.grad = self.distributed(self.own_grad.contiguous())

    def _take(self, sharded: nn.Parameter) -> None:
        with torch.no_grad():
            self.own.copy_(sharded._local_tensor)
        sharded._local_tensor = self.own.contiguous()  # the same tensor if it is contiguous
        self.sharded = sharded

    def bring(self) -> None:
        """If the shard is a copy, copy the program's changes to the core."""
        with torch.no_grad():
            _copy_unless_same(self.own, self.sharded._local_tensor)

    def adopt(self) -> None:
        """If the program replaced the parameter by another DTensor, use that as the shard, with its values."""
        shown = self.shown
        if shown is not self.sharded and shown is not self.whole:
            self._check_replaced(shown)
            self._take(shown)

    def _check_replaced(self, by: nn.Parameter) -> None:
        told = f"a {type(by).__name__} of shape {tuple(by.shape)}, expected a DTensor of shape {self.shape}"
        if isinstance(by, DTensor) and tuple(by.shape) == self.shape:
            if tuple(by.placements) == self.placements:
                return
            told = f"a DTensor with placements {by.placements}, expected {self.placements}"
        raise InvalidArgument(f"parameter {self.name!r} was replaced by {told}")

    def make_whole(self, handle: _core.FSDP) -> None:
        """Show the unsharded parameter. Its unit must be unsharded."""
        self._shown_trained = trained = self.trained and self.sharded.requires_grad
        if self.whole is None:
            view = self._seen(*_core.fsdp_whole(handle, self.number, counted=False))
            self.whole = nn.Parameter(self._as_slice(view), requires_grad=trained)
        if self.whole.requires_grad is not trained:  # it was frozen or unfrozen in the meantime
            self.whole.requires_grad_(trained)
        if trained and self._accumulator is None:
            self._accumulator = get_gradient_edge(self.whole).node
            own = weakref.ref(self)  # the garbage collector does not see references that autograd holds

            def hook(_: torch.Tensor) -> None:
                if (param := own()) is not None and param.accumulated is not None:
                    param.accumulated(param)

            self.whole.register_post_accumulate_grad_hook(hook)
            if self.slice_mesh is not None:
                accumulate_as_placed(self.whole)
        self.show(self.whole)

    def will_get_gradient(self) -> bool:
        """Whether the running autograd pass adds to the gradient of the unsharded parameter."""
        if self._accumulator is None:
            return False
        try:
            return bool(torch._C._will_engine_execute_node(self._accumulator))
        except RuntimeError:  # autograd.grad() takes it
            return False

    def make_sharded(self) -> None:
        """Show this rank's rows, with requires_grad of the unsharded parameter, which the program may have changed."""
        if self.whole is not None and self.whole.requires_grad is not self._shown_trained:
            self.sharded.requires_grad_(self.whole.requires_grad)
        self.show(self.sharded)

    @property
    def is_unfrozen(self) -> bool:
        """Whether it requires a gradient but has none in the core."""
        return not self.trained and self.shown.requires_grad

    def hand_over(self, handle: _core.FSDP, adds: bool, factor: float) -> None:
        """Copy autograd's gradient, if there is one, to the core's; with `adds` add it."""
        whole = self.whole
        grad = None if whole is None else whole.grad
        if whole is None or grad is None:
            _core.fsdp_unused(handle, self.number)
            return
        whole.grad = None
        grad = local(grad)
        if grad.layout is not torch.strided:
            raise Unsupported(f"the gradient of {self.name!r} is {grad.layout}; only dense gradients are supported")
        view = self._seen(*_core.fsdp_grad(handle, self.number, counted=False))
        with torch.no_grad():
            if adds:
                view.add_(grad, alpha=factor)
            else:
                view.copy_(grad)
                if factor != 1:
                    view.mul_(factor)

    def check_own_gradient(self) -> None:
        """Copy an existing gradient of the shard to the core's memory, so that the core adds to it."""
        given = self.sharded.grad
        if self.grad is None:
            return
        if given is None:
            self.own_grad.zero_()
        else:
            _copy_unless_same(self.own_grad, given._local_tensor if isinstance(given, DTensor) else given)

    def give_gradient(self, handle: _core.FSDP) -> None:
        """Set the shard's reduced gradient. It stays None if no rank had one."""
        if self.sharded.requires_grad and (self.sharded.grad is not None or _core.fsdp_used(handle, self.number)):
            assert self.grad is not None
            _copy_unless_same(self.grad._local_tensor, self.own_grad)
            self.sharded.grad = self.grad


def _copy_unless_same(to: torch.Tensor, of: torch.Tensor) -> None:
    if to.data_ptr() != of.data_ptr():
        to.copy_(of)


def _parts_along(dim: int, param: DTensor) -> int:
    """Into how many parts tensor parallelism cuts this dimension."""
    sizes = zip(param.device_mesh.shape, param.placements, strict=True)
    return math.prod(size for size, placement in sizes if isinstance(placement, Shard) and placement.dim == dim)


class Meshes:
    """The mesh of a call of `fully_shard`, joined with those of tensor parallelism; it joins each only once."""

    def __init__(self, given: DeviceMesh) -> None:
        self.given = given
        self.ranks: list[int] = given.mesh.flatten().tolist()
        self._joined: dict[DeviceMesh, DeviceMesh | None] = {}

    def joined(self, other: DeviceMesh) -> DeviceMesh | None:
        """The mesh with the dimensions of both; None if they are not different dimensions of one mesh."""
        if other not in self._joined:
            self._joined[other] = self._join(other)
        return self._joined[other]

    def _join(self, other: DeviceMesh) -> DeviceMesh | None:
        names, others = self.given.mesh_dim_names, other.mesh_dim_names
        if names is None or others is None or set(names) & set(others) or ranks_in_both(other, self.ranks):
            return None
        try:
            joined: DeviceMesh = DeviceMesh._concatenate([self.given, other])
        except RuntimeError:  # of different ranks
            return None
        return joined


def check(name: str, param: nn.Parameter, meshes: Meshes) -> None:
    """Check that a parameter can be sharded over the mesh of a call.

    Raises
    ------
    InvalidArgument, Unsupported
        It cannot be sharded; the message contains `name`.
    """
    former = _cut[param]() if param in _cut else None
    if former is not None:
        module, attribute = former.places[0]
        raise InvalidArgument(
            f"parameter {name!r} is also {attribute!r} of a {type(module).__name__}, which an earlier fully_shard put "
            "in another unit; a shared parameter must be in one unit. Call fully_shard for these modules together, as "
            "a list, or only for a module above them"
        )
    if isinstance(param, DTensor):
        _check_meshes(name, param, meshes)
    if param.device.type not in ("cpu", "meta"):
        raise Unsupported(f"parameter {name!r} is on {param.device}; parameters must be in CPU memory")
    if param.ndim == 0:
        raise InvalidArgument(f"parameter {name!r} has no dimension to shard along; give it the shape [1]")
    if not local(param).is_contiguous():
        raise InvalidArgument(f"parameter {name!r} has strides {param.stride()}; it must be contiguous")
    if param.dtype not in CORE or (param.requires_grad and param.dtype not in _TRAINED):
        raise Unsupported(
            f"parameter {name!r} is {param.dtype}; it must be float16, bfloat16, float32 or float64 (or, without a "
            "gradient, another dtype that Tessera supports)"
        )


def is_shard(param: nn.Parameter) -> bool:
    """Whether `fully_shard` made this parameter."""
    return any(one.shown is param for one in _all)


def _check_meshes(name: str, param: DTensor, meshes: Meshes) -> None:
    """Check that a DTensor can also be sharded over the mesh of a call, as both are different dimensions of one."""
    of_one_mesh = meshes.joined(param.device_mesh) is not None
    if not of_one_mesh and is_shard(param):
        raise Unsupported(
            f"parameter {name!r} is a DTensor already: an earlier fully_shard, of a module above, has sharded it; call "
            "fully_shard for inner modules first"
        )
    check_slice(name, param)
    if of_one_mesh:
        return
    both = ranks_in_both(param.device_mesh, meshes.ranks)
    if both:
        raise InvalidArgument(
            f"parameter {name!r} is already a DTensor over the ranks {param.device_mesh.mesh.flatten().tolist()}; "
            f"fully_shard cannot shard it over {both} again. Pass the mesh of the ranks with other data: mesh['dp'] of "
            "a mesh with dimensions dp and tp, whose mesh['tp'] parallelize_module got"
        )
    raise InvalidArgument(
        f"parameter {name!r} is a DTensor over the mesh {param.device_mesh}, and fully_shard got {meshes.given}; pass "
        "dimensions of one mesh: mesh = init_device_mesh('cpu', (dp, tp), mesh_dim_names=('dp', 'tp')), mesh['tp'] for "
        "parallelize_module and mesh['dp'] for fully_shard"
    )


def dimension_of(name: str, param: nn.Parameter, placement: Any) -> int:
    """The dimension along which a parameter is sharded if `shard_placement_fn` returned `placement` for it.

    Raises
    ------
    InvalidArgument, Unsupported
        The parameter has no such dimension, or `placement` is not a `Shard`.
    """
    if placement is None:
        return 0
    if hasattr(placement, "mesh_info"):
        raise Unsupported(
            f"parameter {name!r}: shard_placement_fn returned a {type(placement).__name__}; it must return a Shard or "
            "None, because all parameters of a call have the same mesh"
        )
    if type(placement) is not Shard:
        raise InvalidArgument(f"parameter {name!r}: shard_placement_fn returned {placement!r}, expected Shard or None")
    dim = placement.dim + param.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < param.ndim:
        raise InvalidArgument(
            f"parameter {name!r}: shard_placement_fn returned {placement!r} for the shape {tuple(param.shape)}, which "
            f"has dimensions from {-param.ndim} to {param.ndim - 1}"
        )
    return dim


def places_of(
    modules: Sequence[nn.Module], skip: Callable[[nn.Module], bool], ignored: set[Any]
) -> dict[Any, list[Place]]:
    """The parameters of modules and their submodules, each with all its places, except below skipped modules."""
    places: dict[Any, list[Place]] = {}
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for attribute, param in module._parameters.items():
            if param is not None and param not in ignored:
                places.setdefault(param, []).append((module, attribute))
        for child in module.children():
            if not skip(child):
                visit(child)

    for module in modules:
        visit(module)
    return places
