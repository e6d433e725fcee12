"""`clip_grad_norm_` for gradients that the ranks hold in different ways.

Each rank sums the powers of its elements, with one sum for each set of mesh dimensions that shards a gradient. Each sum
is reduced over exactly those dimensions, so every element counts once.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InvalidState
from .slices import is_slice, local

__all__ = ["clip_grad_norm_", "norms"]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their norm is at most `max_norm`. Collective, with the same parameters on all
    ranks.

    Like `torch.nn.utils.clip_grad_norm_`, but gradients may be any mix of plain tensors and DTensors of several meshes,
    and a rank may have no elements of some. Plain gradients must be the same on all ranks.

    Parameters
    ----------
    parameters : Tensor or iterable of Tensor
        Those without a gradient are skipped.
    max_norm : float
        The largest norm after the call.
    norm_type : float
        The p of the norm; may be infinite.
    error_if_nonfinite : bool
        Raise, on all ranks, if the norm is not finite.
    foreach
        No effect.

    Returns
    -------
    The norm of all gradients before scaling, as if they were one vector: a plain scalar, the same on all ranks.

    Raises
    ------
    InvalidState
        With `error_if_nonfinite`, the norm is not finite.
    """
    del foreach
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads: list[Any] = [param.grad for param in given if param.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    norm_type = float(norm_type)
    with torch.no_grad():
        total = _norm(grads, norm_type)
        if error_if_nonfinite and not math.isfinite(total):
            raise InvalidState(f"the norm of order {norm_type} of the gradients is {total}, so they cannot be clipped")
        by = min(1.0, max_norm / (total + 1e-6)) if not math.isnan(total) else total
        for grad in grads if by != 1.0 else ():
            local(grad).mul_(by)
    return torch.tensor(total, dtype=functools.reduce(torch.promote_types, (grad.dtype for grad in grads)))


def norms(tensors: Sequence[Any], p: float) -> list[float]:
    """The norm of each tensor over all ranks. Collective if some are DTensors, once per mesh dimension."""
    summed = [_without_partial_sums(tensor) for tensor in tensors]
    powers = _reduced([_groups_of(one) for one in summed], [_power(local(one), p) for one in summed], p)
    return [_root(float(power), p) for power in powers]


def _norm(grads: list[Any], p: float) -> float:
    """The norm over all ranks."""
    sums: dict[tuple[str, ...], Any] = {}  # by the groups whose ranks have other elements
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for grad in grads:
        summed = _without_partial_sums(grad)
        cut = _groups_of(summed)
        own = _power(local(summed), p)
        key = tuple(cut)
        groups[key] = cut
        sums[key] = own if key not in sums else _joined(sums[key], own, p)
    powers = _reduced([groups[key] for key in sums], list(sums.values()), p)
    return _root(float(functools.reduce(lambda one, other: _joined(one, other, p), powers)), p)


def _reduced(groups: Sequence[dict[str, Any]], powers: list[torch.Tensor], p: float) -> list[torch.Tensor]:
    """The powers over all ranks; each is of the elements that the ranks of its groups hold parts of."""
    operation = dist.ReduceOp.SUM if not math.isinf(p) else dist.ReduceOp.MAX if p > 0 else dist.ReduceOp.MIN
    for name, group in {name: group for cut in groups for name, group in cut.items()}.items():
        which = [i for i, cut in enumerate(groups) if name in cut]
        values = torch.stack([powers[i] for i in which])
        dist.all_reduce(values, operation, group)
        for i, value in zip(which, values, strict=True):
            powers[i] = value
    return powers


def _root(power: float, p: float) -> float:
    return power if math.isinf(p) or p == 0 else power ** (1 / p)


def _without_partial_sums(grad: Any) -> Any:
    """A DTensor without partial placements; any other gradient itself."""
    if not is_slice(grad) or not any(one.is_partial() for one in grad.placements):
        return grad
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    return grad.redistribute(placements=[replicate if one.is_partial() else one for one in grad.placements])


def _groups_of(grad: Any) -> dict[str, Any]:
    """The groups of the mesh dimensions that cut a gradient, by name."""
    if not is_slice(grad):
        return {}
    mesh = grad.device_mesh
    cut = (i for i, one in enumerate(grad.placements) if not one.is_replicate() and mesh.size(i) > 1)
    return {group.group_name: group for group in map(mesh.get_group, cut)}


def _power(own: torch.Tensor, p: float) -> torch.Tensor:
    """The sum of the p-th powers, or the largest or smallest absolute value.

    Sums over tensors are in float64; within a tensor that would take ten times as long.
    """
    if not own.numel():
        return torch.tensor(math.inf if p == -math.inf else 0.0, dtype=torch.float64)
    wide = torch.float32 if own.dtype in (torch.float16, torch.bfloat16) else None
    norm = torch.linalg.vector_norm(own, p, dtype=wide).double()
    return norm if math.isinf(p) or p == 0 else norm.pow(p)


def _joined(one: torch.Tensor, other: torch.Tensor, p: float) -> torch.Tensor:
    if math.isinf(p):
        return torch.maximum(one, other) if p > 0 else torch.minimum(one, other)
    return one + other
