"""Whether the styles of a plan can be applied: checked for all modules before the first one is changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from torch.distributed.tensor.parallel import RowwiseParallel as _TheirRowwise
from torch.distributed.tensor.parallel import SequenceParallel as _TheirSequence

from ....errors import InvalidArgument, InvalidState, Unsupported
from .embedding import can_look_up
from .indices import share_of
from .plan import Place
from .style import ColwiseParallel as OurColwise
from .style import RowwiseParallel, SequenceParallel

__all__ = ["Shared", "check", "describe_modules", "shared_parameters"]

_HOOKS_ONLY = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
_SHARDING = {  # by the method that a subclass may replace
    ColwiseParallel._apply: ColwiseParallel,
    _TheirRowwise._apply: _TheirRowwise,
    RowwiseParallel._apply: _TheirRowwise,
    _TheirSequence._apply: _TheirSequence,
    SequenceParallel._apply: _TheirSequence,
}

Slot = tuple[nn.Module, str]  # a module and the name of its own parameter


def check(root: nn.Module, places: Sequence[Place], mesh: DeviceMesh) -> None:
    """Return if every style can be applied to its module.

    Raises
    ------
    Unsupported
        Modules are not a `Linear` or `Embedding`, which their styles need.
    InvalidState
        FSDP manages parameters already, or a style was applied before.
    InvalidArgument
        Two styles shard one parameter; the ranks do not divide attention heads; a table has too few rows for the ranks.
    """
    wrong = [
        f"{place}: {type(place.style).__name__} of a {type(place.module).__name__}"
        for place in places
        if _kind(place) in (ColwiseParallel, _TheirRowwise) and not isinstance(place.module, (nn.Linear, nn.Embedding))
    ]
    if wrong:
        raise Unsupported(f"only nn.Linear and nn.Embedding can be sharded by columns or rows: {'; '.join(wrong)}")
    _check_order(root, places, mesh)
    _check_once(places)
    _check_heads(places, mesh)
    for place in places:
        _check_rows(place, mesh)


def _kind(place: Place) -> type | None:
    """The style of PyTorch that decides how parameters are sharded; None for styles without one."""
    return _SHARDING.get(type(place.style)._apply)


def _check_order(root: nn.Module, places: Sequence[Place], mesh: DeviceMesh) -> None:
    managed = _fsdp_modules(root)
    for place in places:
        if isinstance(place.style, _HOOKS_ONLY):
            continue
        above = next(
            (one for one in managed if place.name == one or one == "" or place.name.startswith(f"{one}.")), None
        )
        if above is not None:
            raise InvalidState(_order(f"{place} is in {f'the module {above!r}' if above else 'a module'} of FSDP"))
        for name, param in place.module.named_parameters():
            if getattr(param, "_fsdp_flattened", False):
                raise InvalidState(_order(f"{place}: its parameter {name!r} is managed by FSDP"))
            if isinstance(param, DTensor) and param.device_mesh != mesh:
                raise InvalidState(_order(f"{place}: its parameter {name!r} is a DTensor of another mesh"))


def _order(found: str) -> str:
    return (
        f"{found}. Tensor parallelism comes first: call parallelize_module with mesh['tp'], then fully_shard with "
        "mesh['dp']"
    )


def _fsdp_modules(root: nn.Module) -> list[str]:
    theirs = sys.modules.get("torch.distributed.fsdp")  # a program with such modules has imported it
    if theirs is None:
        return []
    kinds = (theirs.FSDPModule, theirs.FullyShardedDataParallel)
    return [name for name, module in root.named_modules() if isinstance(module, kinds)]


def _check_once(places: Sequence[Place]) -> None:
    taken: dict[tuple[int, str], Place] = {}
    for place in places:
        if _kind(place) is None:
            continue
        if getattr(place.module, "_distribute_module_applied", False):
            raise InvalidState(f"{place}: parallelize_module was already called for this {type(place.module).__name__}")
        for (module, name), placement in _placements(place):
            param = module._parameters[name]
            if isinstance(param, DTensor) and param.placements != (placement,):
                raise InvalidState(f"{place}: its parameter {name!r} is already sharded, as {param.placements}")
            other = taken.setdefault((id(module), name), place)
            if other is not place:
                raise InvalidArgument(f"two styles shard the parameter {name!r} of {place}: the other is of {other}")


def _check_heads(places: Sequence[Place], mesh: DeviceMesh) -> None:
    wrong = []
    for place in places:
        heads = place.style.heads if isinstance(place.style, (OurColwise, RowwiseParallel)) else None
        if heads is None:
            continue
        size = next(
            module._parameters[name].shape[placement.dim]
            for (module, name), placement in _placements(place)
            if name == "weight"
        )
        if size % heads != 0:
            wrong.append(f"{place} has {size} features, which do not divide into {heads} heads")
        elif heads % mesh.size() != 0:
            wrong.append(f"{place} has {heads} heads, which do not divide over {mesh.size()} ranks")
    if wrong:
        raise InvalidArgument(f"each rank must have the same number of complete attention heads: {'; '.join(wrong)}")


def _check_rows(place: Place, mesh: DeviceMesh) -> None:
    """Refuse an `Embedding` whose lookup is PyTorch's and would fail in forward on a rank without rows. (If there are
    fewer rows than ranks, PyTorch gathers the table, which works.)"""
    module = place.module
    if _kind(place) is not _TheirRowwise or not isinstance(module, nn.Embedding):
        return
    if isinstance(place.style, RowwiseParallel) and can_look_up(module):
        return
    ranks = mesh.size()
    if module.num_embeddings >= ranks and share_of(module.num_embeddings, ranks, ranks - 1)[1] == 0:
        raise InvalidArgument(
            f"{place}: {module.num_embeddings} rows leave some of {ranks} ranks without any. Only tessera's "
            "RowwiseParallel supports this, for an nn.Embedding without max_norm, sparse and scale_grad_by_freq; add "
            "rows, or use ColwiseParallel"
        )


def _placements(place: Place) -> Iterator[tuple[Slot, Placement]]:
    """How a style of PyTorch places the parameters of its module."""
    kind, module = _kind(place), place.module
    if kind is _TheirSequence:
        for one in module.modules():
            yield from (((one, name), Replicate()) for name, param in one._parameters.items() if param is not None)
        return
    by_rows = (kind is _TheirRowwise) == isinstance(module, nn.Embedding)
    for name, param in module._parameters.items():
        if param is not None:
            whole = kind is _TheirRowwise and isinstance(module, nn.Linear) and name != "weight"
            yield (module, name), Replicate() if whole else Shard(0 if by_rows else 1)


# ---------------------------------------------------------------- what the ranks compare


def describe_modules(places: Sequence[Place]) -> Iterator[str]:
    """A line for each parameter and buffer of the modules."""
    for place in places:
        module = f"{place.name!r} is a {type(place.module).__name__}" if place.name else type(place.module).__name__
        yield f"module {module}"
        for kind, tensors in (("parameter", place.module.named_parameters()), ("buffer", place.module.named_buffers())):
            for name, one in tensors:
                frozen = "" if one.requires_grad or kind == "buffer" else ", frozen"
                yield f"{kind} {_join(place.name, name)!r} has shape {tuple(one.shape)}, {one.dtype}{frozen}"


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)


# ---------------------------------------------------------------- shared parameters


@dataclass
class Shared:
    """A parameter that several modules use, such as the table of tied embeddings."""

    slots: list[Slot]
    names: list[str]
    fits: bool  # whether all modules will place it the same way, as far as their styles say

    def __str__(self) -> str:
        return " and ".join(map(repr, self.names))

    def share_again(self) -> bool:
        """Let the modules use one parameter again, once the styles are applied. False if they place it differently."""
        first, *others = (module._parameters[name] for module, name in self.slots)
        if any(_spec(one) != _spec(first) for one in others):
            return False
        for module, name in self.slots:
            module._parameters[name] = first
        return True


def _spec(param: Any) -> Any:
    return (param.device_mesh, param.placements) if isinstance(param, DTensor) else None


def shared_parameters(root: nn.Module, places: Sequence[Place]) -> list[Shared]:
    """The parameters that modules share, at least one of which is in the plan. PyTorch gives each module its own."""
    slots: dict[int, list[tuple[Slot, str]]] = {}
    for path, module in root.named_modules():
        for name, param in module._parameters.items():
            if param is not None and not isinstance(param, DTensor):
                slots.setdefault(id(param), []).append(((module, name), _join(path, name)))
    known: dict[tuple[int, str], Placement | None] = {}
    for place in places:
        if _kind(place) is not None:
            known.update({(id(module), name): placement for (module, name), placement in _placements(place)})
        elif not isinstance(place.style, _HOOKS_ONLY):  # a program's own style
            known.update({(id(module), name): None for module in place.module.modules() for name in module._parameters})
    found = []
    for of_param in slots.values():
        keys = [(id(module), name) for (module, name), _ in of_param]
        if len(keys) > 1 and any(key in known for key in keys):
            ends = {known.get(key, "not in the plan") for key in keys} - {None}
            found.append(Shared([slot for slot, _ in of_param], [name for _, name in of_param], len(ends) <= 1))
    return found
