"""Cross-entropy of logits that are sharded along their classes.

`loss_parallel` replaces DTensor's kernels for the two halves of `cross_entropy`, as PyTorch's function does.
Log-softmax needs the maximum and the sum over all classes, and the loss needs the log-probability of the target: three
all-reduces of one number per target. The backward of the loss computes the gradient of both halves, without
communication, and the backward of log-softmax only passes it on. Therefore only the loss may use the log-probabilities,
which excludes label smoothing and targets that are probabilities.

Invariant: every rank of the tensor-parallel dimension takes part in every all-reduce, even one that has no classes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.overrides import TorchFunctionMode

from ....errors import InvalidArgument, Unsupported
from .indices import check_range, share_of

__all__ = ["loss_parallel"]

_MEAN, _SUM = 1, 2  # at::Reduction; 0 is none


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute `cross_entropy` and its backward on DTensors that are sharded along their classes, without gathering.

    Inside, use `torch.nn.functional.cross_entropy` or `CrossEntropyLoss`, and call ``backward()``:

    - The input is a DTensor of shape ``(classes,)``, ``(batch, classes)`` or ``(batch, classes, ...)``. Exactly one
      dimension of its mesh shards the classes. Others may shard the batch or replicate it. The number of classes may be
      any: ranks may have fewer, or none.
    - The target is a tensor of class indices, the same on all ranks; a DTensor if a mesh dimension shards the batch.
      Its placements are the input's without the class dimension.
    - `weight` is the same on all ranks. `ignore_index` and the reductions ``"none"``, ``"sum"`` and ``"mean"`` are
      supported on meshes of any number of dimensions.

    The result is a DTensor: replicated for ``"mean"``; placed like the target for ``"none"``; for ``"sum"`` replicated,
    and partial (not summed yet) over mesh dimensions that shard the batch.

    Blocks may be nested. The kernels are restored however the last block ends. Kernels are per process, so DTensors in
    other threads use them too.

    Raises
    ------
    InvalidArgument
        The placements of the input, target or weight are others.
    IndexOutOfRange
        A target is not a class and not `ignore_index`, on every rank that has it.
    Unsupported
        Label smoothing, or targets that are probabilities.
    """
    _install()
    try:
        with _OnlyClassIndices():
            yield
    finally:
        _remove()


# ---------------------------------------------------------------- which kernels DTensor uses

Kernel = Callable[[Any, tuple[Any, ...], dict[str, Any]], object]

_lock = threading.Lock()  # guards the two below
_blocks = 0
_before: dict[Any, Kernel | None] = {}


def _install() -> None:
    global _blocks
    with _lock:
        handlers = DTensor._op_dispatcher._custom_op_handlers
        if _blocks == 0:
            _before.update({op: handlers.get(op) for op in _KERNELS})
        _blocks += 1
        handlers.update(_KERNELS)


def _remove() -> None:
    global _blocks
    with _lock:
        _blocks -= 1
        if _blocks:
            return
        handlers = DTensor._op_dispatcher._custom_op_handlers
        for op, kernel in _before.items():
            if kernel is None:
                handlers.pop(op, None)
            else:
                handlers[op] = kernel
        _before.clear()


class _OnlyClassIndices(TorchFunctionMode):
    """Refuses what the kernels cannot see: they would get the same calls, and a wrong gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.cross_entropy:
            _check_call(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _check_call(input: Any, target: Any, *_: Any, label_smoothing: float = 0.0, **__: Any) -> None:
    if not isinstance(input, DTensor):
        return
    if label_smoothing:
        raise Unsupported(f"loss_parallel() does not support label_smoothing, got {label_smoothing}; use 0")
    if target.is_floating_point():
        raise Unsupported(
            f"loss_parallel() does not support targets that are probabilities, got {target.dtype}; pass class indices"
        )


# ---------------------------------------------------------------- where the classes are


@dataclass(frozen=True)
class _Classes:
    """The dimension that is sharded, and this rank's part of it."""

    spec: DTensorSpec
    dim: int
    mesh_dim: int
    first: int
    count: int

    @classmethod
    def of(cls, input: Any, dim: int) -> _Classes:
        spec = input._spec
        mesh_dims = [i for i, placement in enumerate(spec.placements) if placement.is_shard(dim)]
        others = [one for i, one in enumerate(spec.placements) if i not in mesh_dims]
        if len(mesh_dims) != 1 or not all(one.is_shard() or one.is_replicate() for one in others):
            raise InvalidArgument(
                f"loss_parallel() needs an input whose classes, dimension {dim}, are sharded by exactly one mesh "
                f"dimension; the others may shard the batch or replicate. The input is placed as {spec.placements}"
            )
        (mesh_dim,) = mesh_dims
        ranks, rank = spec.mesh.size(mesh_dim), spec.mesh.get_local_rank(mesh_dim)
        return cls(spec, dim, mesh_dim, *share_of(input.shape[dim], ranks, rank))

    @property
    def mesh(self) -> DeviceMesh:
        return self.spec.mesh

    def target_placements(self) -> tuple[Placement, ...]:
        """Those of the input without this dimension."""
        return tuple(
            Replicate() if i == self.mesh_dim else Shard(one.dim - 1) if one.is_shard() and one.dim > self.dim else one
            for i, one in enumerate(self.spec.placements)
        )

    def batch_dims(self) -> list[int]:
        """The mesh dimensions that shard something else."""
        return [i for i, one in enumerate(self.spec.placements) if i != self.mesh_dim and one.is_shard()]

    def all_reduce(self, values: torch.Tensor, op: str) -> torch.Tensor:
        return funcol.all_reduce(values, op, (self.mesh, self.mesh_dim))

    def local(self, tensor: Any, placements: tuple[Placement, ...], what: str) -> torch.Tensor:
        """This rank's part of the target or weight."""
        if isinstance(tensor, DTensor):
            if tensor.placements != placements:
                raise InvalidArgument(f"loss_parallel() needs a {what} placed as {placements}, got {tensor.placements}")
            return tensor._local_tensor
        if any(one.is_shard() for one in placements):
            raise InvalidArgument(
                f"loss_parallel() needs a {what} that is a DTensor placed as {placements}: the mesh also shards the "
                "batch, and a plain tensor does not say whether it is complete"
            )
        return tensor

    def placed(self, local: torch.Tensor, placements: tuple[Placement, ...], shape: torch.Size) -> Any:
        """A DTensor. Autograd is above this level."""
        stride = torch.empty(shape, device="meta").stride()
        spec = DTensorSpec(self.mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
        return DTensor(local, spec, requires_grad=False)


@dataclass(frozen=True)
class _Targets:
    """The targets of one call, and what is known of them on this rank; all tensors have the target's shape."""

    valid: torch.Tensor  # not ignored
    here: torch.Tensor  # this rank has the class
    index: torch.Tensor  # of the class among this rank's; 0 if it is another rank's
    weight: torch.Tensor  # 0 if ignored

    @classmethod
    def of(cls, classes: _Classes, target: Any, weight: Any, ignore_index: int, dtype: torch.dtype) -> _Targets:
        target = classes.local(target, classes.target_placements(), "target")
        valid = target != ignore_index
        target = torch.where(valid, target, 0)
        check_range(target, classes.spec.shape[classes.dim], "the target")
        if weight is None:
            weights = valid.to(dtype)
        else:
            whole = classes.local(weight, (Replicate(),) * classes.mesh.ndim, "weight")
            weights = torch.where(valid, whole.to(dtype)[target], 0)
        here = (target >= classes.first) & (target < classes.first + classes.count)
        return cls(valid, here, torch.where(here, target - classes.first, 0), weights)


# ---------------------------------------------------------------- the kernels


def _log_softmax(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> object:
    input, dim, half_to_float = args
    classes = _Classes.of(input, dim % input.dim())
    dtype = torch.float32 if half_to_float else input.dtype
    values = input._local_tensor.to(_wide(input.dtype), memory_format=torch.contiguous_format)
    if classes.count:
        largest = values.amax(classes.dim, keepdim=True)
    else:
        largest = values.sum(classes.dim, keepdim=True) - torch.inf
    shifted = values - classes.all_reduce(largest, "max")
    total = classes.all_reduce(shifted.exp().sum(classes.dim, keepdim=True), "sum")
    return classes.placed((shifted - total.log()).to(dtype), classes.spec.placements, input.shape)


def _log_softmax_backward(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> object:
    """The gradient is complete: see `_loss_backward`."""
    grad, _output, _dim, dtype = args
    return grad.to(dtype)


def _loss(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> object:
    """Returns the loss, and the sum of the targets' weights, which backward needs for the mean."""
    input, target, weight, reduction, ignore_index = args
    classes = _Classes.of(input, _class_dim(input))
    local = input._local_tensor
    dtype = _wide(local.dtype)
    targets = _Targets.of(classes, target, weight, ignore_index, dtype)
    if classes.count:
        found = local.gather(classes.dim, targets.index.unsqueeze(classes.dim)).squeeze(classes.dim)
        found = torch.where(targets.here, found, 0)
    else:
        found = local.new_zeros(targets.index.shape)
    found = classes.all_reduce(found, "sum").to(dtype)
    losses = torch.where(targets.valid, -found * targets.weight, 0)
    if reduction not in (_MEAN, _SUM):
        placements = classes.target_placements()
        shape = torch.Size(size for i, size in enumerate(input.shape) if i != classes.dim)
        if losses.ndim:
            return classes.placed(losses.to(local.dtype), placements, shape), losses.new_zeros(())
        return classes.placed(losses.to(local.dtype), placements, shape), targets.weight.sum()
    sums = torch.stack([losses.sum(), targets.weight.sum()])
    if reduction == _SUM:
        batch_dims = classes.batch_dims()
        partly = tuple(Partial() if i in batch_dims else Replicate() for i in range(classes.mesh.ndim))
        return classes.placed(sums[0].to(local.dtype), partly, torch.Size()), sums[1]
    for mesh_dim in classes.batch_dims():
        sums = funcol.all_reduce(sums, "sum", (classes.mesh, mesh_dim))
    mean = (sums[0] / sums[1]).to(local.dtype)
    return classes.placed(mean, (Replicate(),) * classes.mesh.ndim, torch.Size()), sums[1]


def _loss_backward(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> object:
    """The gradient of the logits: the softmax minus one at the target, times the gradient of the target's loss."""
    grad, input, target, weight, reduction, ignore_index, total_weight = args
    classes = _Classes.of(input, _class_dim(input))
    local = input._local_tensor
    dtype = _wide(local.dtype)
    targets = _Targets.of(classes, target, weight, ignore_index, dtype)
    if reduction not in (_MEAN, _SUM) and grad.placements != classes.target_placements():
        grad = grad.redistribute(classes.mesh, classes.target_placements())
    of_loss = grad._local_tensor.to(dtype)
    if reduction == _MEAN:
        of_loss = of_loss / total_weight
    of_target = torch.where(targets.valid, of_loss * targets.weight, 0).unsqueeze(classes.dim)
    result = local.to(dtype).exp() * of_target
    if classes.count:
        at_target = torch.where(targets.here.unsqueeze(classes.dim), -of_target, 0)
        result.scatter_add_(classes.dim, targets.index.unsqueeze(classes.dim), at_target)
    return classes.placed(result.to(local.dtype), classes.spec.placements, input.shape)


def _class_dim(input: Any) -> int:
    return 1 if input.dim() > 1 else 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


_aten = torch.ops.aten
_KERNELS: dict[Any, Kernel] = {
    _aten._log_softmax.default: _log_softmax,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
    _aten.nll_loss_forward.default: _loss,
    _aten.nll_loss2d_forward.default: _loss,
    _aten.nll_loss_backward.default: _loss_backward,
    _aten.nll_loss2d_backward.default: _loss_backward,
}
