"""The parallel styles. `ColwiseParallel`, `RowwiseParallel` and `SequenceParallel` differ from PyTorch's: they are
subclasses of its classes, so PyTorch's `parallelize_module` accepts them too. The other styles are PyTorch's own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel as _TheirColwise
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from torch.distributed.tensor.parallel import RowwiseParallel as _TheirRowwise
from torch.distributed.tensor.parallel import SequenceParallel as _TheirSequence

from ....errors import InvalidArgument
from .embedding import can_look_up, spread_lookup
from .indices import share_of
from .names import name_of
from .sequence import check_later, check_part

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]


class ColwiseParallel(_TheirColwise):
    """Shard a `Linear` along its outputs, or an `Embedding` along the columns of its table.

    Each rank has ``out_features / N`` rows of the `Linear` weight and bias, or ``embedding_dim / N`` columns of the
    table (the last ranks fewer or none if the number is not divisible), and computes that part of the output.

    Parameters
    ----------
    input_layouts : Placement, optional
        What the input is if it is a plain tensor, by default ``Replicate()``.
    output_layouts : Placement, optional
        What the output will be, by default ``Shard(-1)``.
    use_local_output : bool
        Return the output's local part as a plain tensor instead of a DTensor.
    heads : int, optional
        The number of attention heads in the outputs: `parallelize_module` raises an error if the ranks do not divide
        it. Not in PyTorch.

    Raises
    ------
    InvalidArgument
        `heads` is not a number from 1.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        heads: int | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.heads = _checked_heads(heads)

    def __repr__(self) -> str:
        return _with_heads(super().__repr__(), self.heads)

    def _partition_linear_fn(self, name: str, module: nn.Linear, device_mesh: DeviceMesh) -> None:
        """On one rank an output of one column stays replicated, which is the same there: PyTorch's backward of the bias
        cannot remove a sharded dimension."""
        if device_mesh.size() > 1 or module.out_features > 1:
            super()._partition_linear_fn(name, module, device_mesh)


class RowwiseParallel(_TheirRowwise):
    """Shard a `Linear` along its inputs, or an `Embedding` along its vocabulary.

    Each rank has ``in_features / N`` columns of the `Linear` weight, or ``num_embeddings / N`` rows of the `Embedding`
    table (the last ranks fewer or none if the number is not divisible), and computes a partial result of the full
    output shape. The sum over the ranks is one all-reduce, or one reduce-scatter if `output_layouts` is a `Shard`.

    Parameters
    ----------
    input_layouts : Placement, optional
        What the input is if it is a plain tensor. By default ``Shard(-1)`` for a `Linear`, as `ColwiseParallel` leaves
        it, and ``Replicate()`` for an `Embedding`, whose ids are the same on all ranks. (PyTorch's default is
        ``Shard(-1)`` for both.)
    output_layouts : Placement, optional
        What the output will be, by default ``Replicate()``.
    use_local_output : bool
        Return the output's local part as a plain tensor instead of a DTensor.
    heads : int, optional
        The number of attention heads in the inputs: `parallelize_module` raises an error if the ranks do not divide it.
        Not in PyTorch.

    Raises
    ------
    InvalidArgument
        `heads` is not a number from 1. In forward: a plain input that is sharded on its last dimension has other than
        this rank's number of columns.
    IndexOutOfRange
        In forward, on every rank: an id is not in the vocabulary.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        heads: int | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self._default_input = input_layouts is None
        self.heads = _checked_heads(heads)

    def __repr__(self) -> str:
        return _with_heads(super().__repr__(), self.heads)

    @staticmethod
    def _prepare_input_fn(
        input_layouts: tuple[Placement, ...],
        desired_input_layouts: tuple[Placement, ...],
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> Any:
        x, layout = inputs[0], input_layouts[0]
        is_plain = isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
        if is_plain and isinstance(mod, nn.Linear) and layout.is_shard() and layout.dim in (-1, x.ndim - 1):
            inputs = (_columns(mod, x, device_mesh), *inputs[1:])
        return _TheirRowwise._prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style = copy.copy(self)  # the same style may be applied to a Linear too
        if isinstance(module, nn.Embedding):
            if self._default_input:
                style.input_layouts = (Replicate(),)
            if can_look_up(module):
                spread_lookup(module)
        return super(RowwiseParallel, style)._apply(module, device_mesh)


def _checked_heads(heads: int | None) -> int | None:
    if heads is not None and (isinstance(heads, bool) or not isinstance(heads, int) or heads < 1):
        raise InvalidArgument(f"heads is {heads!r}; it must be a number from 1")
    return heads


def _with_heads(text: str, heads: int | None) -> str:
    return text if heads is None else f"{text[:-1]}, heads={heads})"


def _columns(module: nn.Linear, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The input of this rank's columns: a DTensor if their number differs between the ranks.

    PyTorch would multiply this rank's number by the number of ranks, and then find that the product is not the number
    of the weight's columns.
    """
    whole, ranks = module.in_features, mesh.size()
    _, own = share_of(whole, ranks, mesh.get_local_rank())
    if x.shape[-1] != own:
        hint = "; it is not sharded: pass input_layouts=Replicate()" if x.shape[-1] == whole else ""
        raise InvalidArgument(
            f"{name_of(module)}: the input has {x.shape[-1]} columns, but this rank has {own} of the {whole} that are "
            f"sharded over {ranks} ranks{hint}"
        )
    if whole % ranks == 0:
        return x
    shape = torch.Size((*x.shape[:-1], whole))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x.contiguous(), mesh, [Shard(x.ndim - 1)], run_check=False, shape=shape, stride=stride)


class SequenceParallel(_TheirSequence):
    """Compute a module on parts of the sequence, with replicated parameters: for `LayerNorm`, `RMSNorm`, `Dropout`.

    Parameters and buffers get the values of `src_data_rank`, as under the other styles, and keep `requires_grad`.
    (PyTorch keeps each rank's values, and makes frozen parameters trainable.) A plain input is taken as this rank's
    part, ``(batch, sequence / N, hidden)`` for ``sequence_dim=1``; a DTensor is sharded if it is not yet.

    The gradients of the parameters are partial sums, ``Partial()`` DTensors, until an optimizer, `clip_grad_norm_` or
    ``grad.full_tensor()`` adds them up.

    Parameters
    ----------
    sequence_dim : int
        The dimension of the input that is the sequence.
    use_local_output : bool
        Return this rank's part as a plain tensor instead of a DTensor.

    Raises
    ------
    InvalidArgument
        In the first forward, on every rank: all ranks got the same input, so the sequence is not sharded; or the parts
        have different lengths. The comparison is one small all-gather.
    """

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        del name
        for key, param in list(module._parameters.items()):
            if param is not None and not isinstance(param, DTensor):
                spread = distribute_tensor(param, device_mesh, [Replicate()], src_data_rank=self.src_data_rank)
                module.register_parameter(key, nn.Parameter(spread, requires_grad=param.requires_grad))
        for key, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                module._buffers[key] = distribute_tensor(
                    buffer, device_mesh, [Replicate()], src_data_rank=self.src_data_rank
                )

    @staticmethod
    def _prepare_input_fn(
        sequence_sharding: tuple[Placement, ...], mod: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh
    ) -> Any:
        x = inputs[0]
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
            check_part(mod, x, sequence_sharding[0].dim, device_mesh)
        first = _TheirSequence._prepare_input_fn(sequence_sharding, mod, inputs, device_mesh)
        return (first, *inputs[1:])

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_later(module)
        return super()._apply(module, device_mesh)
