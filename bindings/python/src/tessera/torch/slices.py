"""Parameters of tensor parallelism under DDP and FSDP: DTensors, of which each rank holds a slice.

DDP and FSDP see a slice as a plain tensor: the DTensor's local one. This module does not import DTensor, which is slow
to import: a program with such parameters has imported it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import unserializable_hook

from ..comm import Comm
from ..errors import InvalidArgument, Mismatch, Unsupported
from .ranks import gather

__all__ = ["accumulate_as_placed", "check_slice", "compare_slices", "is_slice", "like", "local", "ranks_in_both"]


def is_slice(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's slice of a DTensor; any other tensor itself."""
    return tensor._local_tensor if is_slice(tensor) else tensor


def like(param: Any, own: torch.Tensor) -> torch.Tensor:
    """A tensor with a parameter's layout, of which this rank holds `own`; for a plain parameter `own` itself."""
    if not is_slice(param):
        return own
    with torch.no_grad():
        made: torch.Tensor = sys.modules["torch.distributed.tensor"].DTensor.from_local(
            own, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    return made


def accumulate_as_placed(param: Any) -> Any:
    """Let autograd accumulate gradients of a DTensor parameter with the parameter's placements. Returns the handle of
    the hook.

    A gradient may come with other placements, such as the partial sums of `SequenceParallel`. It is redistributed,
    which is collective over the ranks of the parameter's mesh; autograd could not add it to one placed otherwise.
    """
    placements = param.placements

    @unserializable_hook  # a pickled parameter lacks it
    def place(grad: Any) -> Any:
        return grad.redistribute(placements=placements) if grad.placements != placements else grad

    return param.register_hook(place)


def check_slice(name: str, param: Any) -> None:
    """Check the layout of a DTensor parameter.

    Raises
    ------
    InvalidArgument, Unsupported
        This rank is not in its mesh, or its placements are others than `Shard` and `Replicate`.
    """
    if param.device_mesh.get_coordinate() is None:
        raise InvalidArgument(
            f"parameter {name!r} is a DTensor over the ranks {_ranks_of(param.device_mesh)}, but this is rank "
            f"{dist.get_rank()}; each rank must call parallelize_module with a mesh that it is in"
        )
    wrong = [one for one in param.placements if type(one).__name__ not in ("Shard", "Replicate")]
    if wrong:
        raise Unsupported(
            f"parameter {name!r} is a DTensor with the placement {wrong[0]}; only Shard and Replicate work"
        )


def compare_slices(comm: Comm, params: Mapping[str, Any]) -> None:
    """Check that the ranks of `comm` hold the same slices of the DTensors among `params`, and that `comm` has none of
    the other ranks of their meshes. Collective if there is any such parameter.

    Raises
    ------
    InvalidArgument
        A parameter is cut over ranks that are in `comm` too.
    Mismatch
        Ranks of `comm` hold different slices.
    """
    cut = {name: param for name, param in params.items() if is_slice(param)}
    if not cut:
        return
    lines = [
        f"{name}: {param.placements} at {param.device_mesh.get_coordinate()} of {tuple(param.device_mesh.shape)}"
        for name, param in cut.items()
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    told = [json.loads(one) for one in gather(comm, json.dumps([dist.get_rank(), digest, lines[0]]).encode())]
    members = [rank for rank, _, _ in told]
    first_of = {param.device_mesh: name for name, param in reversed(cut.items())}
    for mesh, name in first_of.items():
        both = ranks_in_both(mesh, members)
        if both:
            raise InvalidArgument(
                f"parameter {name!r} is a DTensor over the ranks {_ranks_of(mesh)}, but its gradient would also be "
                f"averaged over {both}; pass the ranks with other data, which hold the same slices: "
                "device_mesh=mesh['dp'] of a mesh with dimensions dp and tp"
            )
    for rank, other, first in told:
        if other != told[0][1]:
            example = f", such as {first} and {told[0][2]}" if first != told[0][2] else ""
            raise Mismatch(
                f"rank {rank} and rank {members[0]} hold other slices of the DTensor parameters{example}; pass the "
                "ranks that hold the same slices: mesh['dp'] of a mesh with dimensions dp and tp"
            )


def ranks_in_both(mesh: Any, members: Sequence[int]) -> list[int]:
    """The ranks that are both in a mesh and among `members`; empty if it is only this one."""
    both = sorted(set(_ranks_of(mesh)) & set(members))
    return both if len(both) > 1 else []


def _ranks_of(mesh: Any) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks
