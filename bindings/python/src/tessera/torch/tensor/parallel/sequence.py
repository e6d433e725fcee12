"""A check of inputs that are taken as shards of a sequence: what a plain tensor does not say.

A plain tensor that a style takes as this rank's part of the sequence may be the complete sequence, by mistake. Then
every rank computes the same, and a later gather repeats the sequence once per rank, without an error. This is certain
if all ranks have the same values and these vary along the sequence: real parts of a sequence would have to be equal to
the bit. If the values do not vary (zeros of a trial run, a sequence of one token), equal parts prove nothing.
"""

from __future__ import annotations

import hashlib
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from ....errors import InvalidArgument
from .agreement import gathered, ranks_of
from .names import name_of

__all__ = ["check_later", "check_part"]

_ATTEMPTS = 4  # forward passes that are looked at while equal parts prove nothing
_DIMS = 8  # an input with more is not compared

_attempts_left: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def check_later(module: nn.Module) -> None:
    """Let `check_part` look at the module's first inputs."""
    _attempts_left[module] = _ATTEMPTS


def check_part(module: nn.Module, part: torch.Tensor, dim: int, mesh: DeviceMesh) -> None:
    """Compare this rank's part of a sequence with those of the other ranks. Collective in the module's first forward,
    later free.

    Raises
    ------
    InvalidArgument
        On every rank: the parts are the same, their lengths differ, or another dimension does.
    """
    if torch.compiler.is_compiling() or mesh.size() == 1 or not _attempts_left.get(module):
        return
    if dist.get_backend(mesh.get_group()) == "fake":  # the other ranks are pretended, with this rank's values
        return
    if isinstance(part, AsyncCollectiveTensor):
        part = part.wait()
    part = part.detach()
    if type(part) is not torch.Tensor or part.is_meta or part.ndim > _DIMS or not -part.ndim <= dim < part.ndim:
        return
    dim %= part.ndim
    rows = gathered(mesh, _facts(part, dim))
    _attempts_left[module] -= 1
    shapes = [row[: part.ndim + 1].tolist() for row in rows]
    if any(shape != shapes[0] for shape in shapes):
        _refuse_shapes(module, mesh, shapes, dim)
    if any(not row.equal(rows[0]) for row in rows):
        del _attempts_left[module]  # they are parts
        return
    if bool(rows[0][-1]):
        raise InvalidArgument(
            f"{name_of(module)}: all {mesh.size()} ranks got the same input of shape {tuple(part.shape)}, which "
            f"SequenceParallel takes as different parts of dimension {dim}; shard the sequence first, for example with "
            f"output_layouts=Shard({dim}) in the module before, or pass a DTensor"
        )


def _facts(part: torch.Tensor, dim: int) -> torch.Tensor:
    """Shape, hash, and whether the values vary along the dimension, as integers."""
    data = part.cpu().contiguous()
    digest = hashlib.blake2b(data.reshape(-1).view(torch.uint8).numpy(), digest_size=16).digest()
    hashed = [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]
    shape = [part.ndim, *part.shape][: _DIMS + 1]
    varies = part.numel() > 0 and not bool((part == part.narrow(dim, 0, 1)).all())
    return torch.tensor([*shape, *[0] * (_DIMS + 1 - len(shape)), *hashed, int(varies)], dtype=torch.int64)


def _refuse_shapes(module: nn.Module, mesh: DeviceMesh, shapes: list[list[int]], dim: int) -> None:
    """`shapes` begin with the number of dimensions."""
    others = [shape[: dim + 1] + shape[dim + 2 :] for shape in shapes]
    if any(other != others[0] for other in others):
        told = "; ".join(f"rank {rank}: {tuple(shape[1:])}" for rank, shape in zip(ranks_of(mesh), shapes, strict=True))
        raise InvalidArgument(
            f"{name_of(module)}: the inputs of the ranks may differ only along dimension {dim}, their sequence, but "
            f"have the shapes {told}"
        )
    lengths = [shape[dim + 1] for shape in shapes]
    raise InvalidArgument(
        f"{name_of(module)}: the ranks' parts of dimension {dim} have the lengths {', '.join(map(str, lengths))}, but "
        f"a plain tensor must be one of {len(lengths)} equal parts; pad the sequence of {sum(lengths)} to a multiple "
        f"of {len(lengths)}, or pass DTensors (use_local_output=False in the module before)"
    )
