"""One parameter under `fully_shard`: sharded, it is a DTensor; whole, a plain parameter at an address of its own.

Which of the two a module shows is the unit's to say. A parameter that several modules share is shown by all of them.

The core cuts by rows. A parameter that is cut along another dimension has that one first there: its memory is seen
through views, which have other strides than PyTorch's shards. So such a shard and its gradient are copies, which the
program and its optimizer may take for what PyTorch's are: contiguous.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from ... import _core
from ...errors import InvalidArgument, Unsupported
from ..tensors import CORE, of_core

__all__ = ["Sharded", "check", "dimension_of", "over", "places_of"]

Place = tuple[nn.Module, str]

_TRAINED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# The parameters that were cut, as long as their units are there: a module of no unit yet may still have one.
_cut: Any = WeakTensorKeyDictionary()


def over(memory: _core.Memory, dtype: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over memory of the library, which it keeps alive."""
    known = of_core(dtype)
    if not len(memory):
        return torch.empty(shape, dtype=known)
    return torch.frombuffer(memory, dtype=known).view(shape)


class Sharded:
    """A parameter of a unit.

    Parameters
    ----------
    name : str
        In messages, until the model has a root.
    param : Parameter
        Whole; `check` has seen it. Its rows of this rank are copied; nothing is sent.
    places : sequence of (Module, str)
        The modules that have it, each with its name there.
    mesh : DeviceMesh
        Of one dimension, or of replicas by shards.
    dim : int
        The dimension that is cut.
    """

    def __init__(self, name: str, param: nn.Parameter, places: Sequence[Place], mesh: DeviceMesh, dim: int) -> None:
        self.name = name
        self.places = places
        self.mesh = mesh
        self.dim = dim
        self.placements: tuple[Placement, ...] = (Shard(dim),) if mesh.ndim == 1 else (Replicate(), Shard(dim))
        self.shape = tuple(param.shape)
        self.stride = param.stride()
        self.trained = param.requires_grad
        self.number = -1  # in the core's model; from its beginning on
        self.whole: nn.Parameter | None = None
        self._accumulator: Any = None  # autograd's node that adds to the gradient of `whole`
        self.accumulated: Callable[[Sharded], None] | None = None  # called whenever it has
        self._shown_trained = False
        self.grad: DTensor | None = None  # of the shard
        ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        size = self.shape[dim]
        chunk = -(-size // ranks)
        self.begin_at = min(rank * chunk, size)
        self.own_size = min((rank + 1) * chunk, size) - self.begin_at
        self.own_shape = (*self.shape[:dim], self.own_size, *self.shape[dim + 1 :])
        own = self.part_of(param).clone(memory_format=torch.contiguous_format)
        _cut[param] = weakref.ref(self)
        self.show(nn.Parameter(self.distributed(own), requires_grad=param.requires_grad))

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of something of the parameter's shape."""
        return whole.detach().narrow(self.dim, self.begin_at, self.own_size)

    def distributed(self, own: torch.Tensor) -> DTensor:
        """The DTensor of which this rank has `own`."""
        return DTensor.from_local(
            own,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )

    @property
    def shown(self) -> nn.Parameter:
        """What the modules have now."""
        module, attribute = self.places[0]
        return module._parameters[attribute]

    def show(self, param: nn.Parameter) -> None:
        """Have the modules show this."""
        for module, attribute in self.places:
            module._parameters[attribute] = param

    # ------------------------------------------------------------ from the core's model on

    @property
    def core_shape(self) -> tuple[int, ...]:
        """As the core has it."""
        return (self.shape[self.dim], *self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @property
    def core_name(self) -> str:
        """Tells the core of a rank that cuts it along another dimension."""
        return self.name if self.dim == 0 else f"{self.name} (Shard({self.dim}))"

    def _seen(self, memory: _core.Memory, dtype: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor over memory of the core's, with the dimensions where the parameter has them."""
        return over(memory, dtype, shape).movedim(0, self.dim)

    def begin(self, handle: _core.FSDP, number: int) -> None:
        """The core has memory for the shard: it takes the values, and is what the DTensor has from now on."""
        self.number = number
        self.whole = self._accumulator = None
        self.sharded = self.shown
        self.trained = self.sharded.requires_grad
        if not isinstance(self.sharded, DTensor):
            raise InvalidArgument(
                f"parameter {self.name!r} is a {type(self.sharded).__name__}, no DTensor any more: change modules "
                "before fully_shard"
            )
        self._check_replaced(self.sharded)
        local = self.sharded._local_tensor
        if local.device.type == "meta":
            raise InvalidArgument(
                f"parameter {self.name!r} has no values yet: it is on the meta device. Call to_empty(device='cpu') on "
                "the module, and initialise or load its parameters, before the first forward"
            )
        self.own = self._seen(*_core.fsdp_shard(handle, number))
        self._take(self.sharded)
        if self.trained:
            self.own_grad = self._seen(*_core.fsdp_shard_grad(handle, number))
            self.grad = self.distributed(self.own_grad.contiguous())

    def _take(self, sharded: nn.Parameter) -> None:
        with torch.no_grad():
            self.own.copy_(sharded._local_tensor)
        sharded._local_tensor = self.own.contiguous()  # itself, if it is that
        self.sharded = sharded

    def bring(self) -> None:
        """Of a shard that is a copy the core gets what the program has made of it."""
        with torch.no_grad():
            _copy_unless_same(self.own, self.sharded._local_tensor)

    def adopt(self) -> None:
        """Another DTensor may have been put in its place since: its values count, and it is the shard."""
        shown = self.shown
        if shown is not self.sharded and shown is not self.whole:
            self._check_replaced(shown)
            self._take(shown)

    def _check_replaced(self, by: nn.Parameter) -> None:
        told = f"a {type(by).__name__} of shape {tuple(by.shape)}"
        if isinstance(by, DTensor) and tuple(by.shape) == self.shape:
            if tuple(by.placements) == self.placements:
                return
            told = f"a DTensor that is placed as {by.placements} says, and not {self.placements}"
        raise InvalidArgument(f"parameter {self.name!r} was replaced by {told}")

    def make_whole(self, handle: _core.FSDP) -> None:
        """Show it whole. Its unit is."""
        self._shown_trained = trained = self.trained and self.sharded.requires_grad
        if self.whole is None:
            view = self._seen(*_core.fsdp_whole(handle, self.number, counted=False))
            self.whole = nn.Parameter(view, requires_grad=trained)
        if self.whole.requires_grad is not trained:  # it was frozen, or unfrozen, since
            self.whole.requires_grad_(trained)
        if trained and self._accumulator is None:
            self._accumulator = get_gradient_edge(self.whole).node
            own = weakref.ref(self)  # the collector does not see what autograd keeps of a hook

            def hook(_: torch.Tensor) -> None:
                if (param := own()) is not None and param.accumulated is not None:
                    param.accumulated(param)

            self.whole.register_post_accumulate_grad_hook(hook)
        self.show(self.whole)

    def will_get_gradient(self) -> bool:
        """Whether the pass of autograd that runs will add to the gradient of the whole parameter, or has."""
        if self._accumulator is None:
            return False
        try:
            return bool(torch._C._will_engine_execute_node(self._accumulator))
        except RuntimeError:  # autograd.grad() takes it
            return False

    def make_sharded(self) -> None:
        """Show this rank's rows. They are trained as the whole parameter is, which the program may have changed."""
        if self.whole is not None and self.whole.requires_grad is not self._shown_trained:
            self.sharded.requires_grad_(self.whole.requires_grad)
        self.show(self.sharded)

    @property
    def is_unfrozen(self) -> bool:
        """Whether it is to be trained, and the core has no gradient of it."""
        return not self.trained and self.shown.requires_grad

    def hand_over(self, handle: _core.FSDP, adds: bool, factor: float) -> None:
        """Autograd's gradient, if there is one, becomes the core's; `adds`: to what is there."""
        whole = self.whole
        grad = None if whole is None else whole.grad
        if whole is None or grad is None:
            _core.fsdp_unused(handle, self.number)
            return
        whole.grad = None
        if grad.layout is not torch.strided:
            raise Unsupported(f"the gradient of {self.name!r} is {grad.layout}; dense ones are reduced")
        view = self._seen(*_core.fsdp_grad(handle, self.number, counted=False))
        with torch.no_grad():
            if adds:
                view.add_(grad, alpha=factor)
            else:
                view.copy_(grad)
                if factor != 1:
                    view.mul_(factor)

    def check_own_gradient(self) -> None:
        """A gradient that stands is what is added to: it lies where the core adds."""
        given = self.sharded.grad
        if self.grad is None:
            return
        if given is None:
            self.own_grad.zero_()
        else:
            _copy_unless_same(self.own_grad, given._local_tensor if isinstance(given, DTensor) else given)

    def give_gradient(self, handle: _core.FSDP) -> None:
        """The shard's gradient is reduced. One that no rank had stays None."""
        if self.sharded.requires_grad and (self.sharded.grad is not None or _core.fsdp_used(handle, self.number)):
            assert self.grad is not None
            _copy_unless_same(self.grad._local_tensor, self.own_grad)
            self.sharded.grad = self.grad


def _copy_unless_same(to: torch.Tensor, of: torch.Tensor) -> None:
    if to.data_ptr() != of.data_ptr():
        to.copy_(of)


def check(name: str, param: nn.Parameter) -> None:
    """Whether a parameter of this name can be cut.

    Raises
    ------
    InvalidArgument, Unsupported
        It cannot be; its name says which one it is.
    """
    former = _cut[param]() if param in _cut else None
    if former is not None:
        module, attribute = former.places[0]
        raise InvalidArgument(
            f"parameter {name!r} is also {attribute!r} of a {type(module).__name__}, which a former fully_shard has in "
            "another unit: a parameter that modules share is in one unit. Call fully_shard for these modules together, "
            "as a list, or for none of them, so that it is in the unit of a module above them"
        )
    if isinstance(param, DTensor):
        raise Unsupported(
            f"parameter {name!r} is a DTensor already: fully_shard cuts plain parameters. Call it for inner modules "
            "first"
        )
    if param.device.type not in ("cpu", "meta"):
        raise Unsupported(f"parameter {name!r} is on {param.device}; those in the CPU's memory are sharded")
    if param.ndim == 0:
        raise InvalidArgument(f"parameter {name!r} has no dimension to be cut along; give it the shape [1]")
    if not param.is_contiguous():
        raise InvalidArgument(f"parameter {name!r} has strides {param.stride()}: a contiguous one is wanted")
    if param.dtype not in CORE or (param.requires_grad and param.dtype not in _TRAINED):
        raise Unsupported(
            f"parameter {name!r} is {param.dtype}; float16, bfloat16, float32 and float64 are sharded, and other "
            "dtypes of parameters without a gradient"
        )


def dimension_of(name: str, param: nn.Parameter, placement: Any) -> int:
    """Along which a parameter is cut where `shard_placement_fn` has returned `placement` for it.

    Raises
    ------
    InvalidArgument, Unsupported
        It has no such dimension, or that is no `Shard`.
    """
    if placement is None:
        return 0
    if hasattr(placement, "mesh_info"):
        raise Unsupported(
            f"parameter {name!r}: shard_placement_fn returned a {type(placement).__name__}; all parameters of a call "
            "have its mesh, so that it may return a Shard alone"
        )
    if type(placement) is not Shard:
        raise InvalidArgument(f"parameter {name!r}: shard_placement_fn returned {placement!r}, no Shard and not None")
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
    """The parameters of modules and those below, each with all its places; not below a module that is skipped."""
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
