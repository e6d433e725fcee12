"""Computes what `tessera.Pipeline` calls back for, with the modules of stages and autograd.

A micro-batch of a stage:

    forward --> what its backward needs is in `_kept` --> backward: gradients are in `.grad`, `_kept` has let go
            the same, split: backward_input (the graph stays) --> backward_weight

Modules get copies of what arrives, because programs may hold tensors for longer than the library's memory is theirs:
in hooks, in caches, or as a `.grad` that autograd made out of an incoming gradient. Everything runs on the thread
that calls the schedule's `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStageInfo
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TheirDDP
from torch.nn.parallel.distributed import _find_tensors
from torch.utils._pytree import tree_map_only

from ...errors import InvalidArgument, Unsupported
from ...pipeline import StageCall
from ...tensor import DType
from ..ddp import DistributedDataParallel
from ..tensors import CORE, dtype_name, of_core
from .declared import check_declared
from .routes import Routes
from .split import finish_weights, grads_of_inputs

__all__ = ["Batch", "Runner"]


class Batch(NamedTuple):
    """What a step computes with, by micro-batch. Ranks without the first or last stage lack some of it."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]]
    targets: list[Any] | None
    loss_kwargs: dict[str, Any]
    keep_outputs: bool
    reduce: bool
    """Whether gradients of FSDP are reduced at the end."""


class Kept(NamedTuple):
    """What a backward needs."""

    inputs: list[Any]
    roots: list[Any]
    """Where gradients begin: the loss, or each output that has a gradient."""
    grads_at: list[list[int]]
    """For each of these outputs, where its gradients are among those that arrive. Empty on the last stage."""
    outputs: Any
    """Only for PyTorch's DDP, which looks for unused parameters from there."""


class Runner:
    """The callbacks of a pipeline. It must not know the pipeline, so that both are freed at once.

    Attributes
    ----------
    refusal : Exception or None
        What is wrong with the batch on this rank; the first callback raises it, so that the step fails everywhere.
    outputs, losses : dict
        On the last stage, by micro-batch.
    """

    def __init__(self, stages: Sequence[Any], loss_fn: Any, scale: float, routes: Routes) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._loss_fn = loss_fn
        self._scale = scale
        self._routes = routes
        self._kept: dict[tuple[int, int], Kept] = {}
        # Between the parts of a backward: the gradients of roots, with which it begins again, or what is left of it.
        self._grads: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._weight_runs: dict[tuple[int, int], Callable[[], None]] = {}
        self._backwards: dict[int, int] = {}  # by stage, how many gave their gradients to the weights
        self._batch: Batch | None = None
        self.refusal: Exception | None = None
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, torch.Tensor] = {}

    def begin(self, batch: Batch | None) -> None:
        """A step or an evaluation begins; without a batch, it is to fail."""
        self.end()
        self._batch = batch

    def end(self) -> None:
        """Let go of everything."""
        for some in (self._kept, self._grads, self._weight_runs, self._backwards, self.outputs, self.losses):
            some.clear()
        self._batch = self.refusal = None

    # ------------------------------------------------------------ callbacks

    def forward(self, call: StageCall) -> None:
        """Compute the outputs and, on the last stage, the loss."""
        with _told(call):
            self._check()
            self._forward(call)

    def backward(self, call: StageCall) -> None:
        """Add to the gradients of the weights, and write those of the inputs."""
        with _told(call):
            self._check()
            kept = self._pop(call)
            self._backward(call, kept, self._root_grads(call, kept))
            _write_grads(call, kept)
            builder = self._stages[call.stage].dw_builder
            if builder is not None:
                builder()()

    def backward_input(self, call: StageCall) -> None:
        """Write the gradients of the inputs."""
        with _told(call):
            self._check()
            cell, stage = (call.stage, call.microbatch), self._stages[call.stage]
            kept = self._kept[cell]
            grads = self._root_grads(call, kept)
            if stage.dw_builder is not None or _shards_of(stage):  # FSDP reduces at the end of each backward
                self._backward(call, self._pop(call), grads)
                _write_grads(call, kept)
                self._weight_runs[cell] = _nothing if stage.dw_builder is None else stage.dw_builder()
                return
            if call.stage == 0 or not kept.roots:
                self._grads[cell] = grads  # nobody waits: everything comes later
                return
            with torch.enable_grad():
                found, rest = grads_of_inputs(kept.roots, grads, kept.inputs, stage.submod.parameters())
            for grad, array in zip(found, call.input_grads, strict=True):
                _write(grad, array)
            if rest is None or _has_ddp(stage):
                self._grads[cell] = grads
            else:
                self._pop(call)
                self._weight_runs[cell] = partial(finish_weights, rest)

    def backward_weight(self, call: StageCall) -> None:
        """Add to the gradients of the weights."""
        with _told(call):
            self._check()
            cell = (call.stage, call.microbatch)
            if cell in self._weight_runs:
                self._weight_runs.pop(cell)()
            else:
                self._backward(call, self._pop(call), self._grads.pop(cell))

    # ------------------------------------------------------------ their parts

    def _check(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def _pop(self, call: StageCall) -> Kept:
        return self._kept.pop((call.stage, call.microbatch))

    def _forward(self, call: StageCall) -> None:
        batch, stage, which = self._batch, self._stages[call.stage], call.microbatch
        assert batch is not None
        # The first stage gets nothing from others, so these are activations.
        received = [
            _copied(array, dtype, stage.device)
            for array, dtype in zip(call.inputs, call._dtypes["inputs"], strict=True)
        ]
        for one in received:
            one.requires_grad_(call.training and one.dtype in _WITH_GRADIENT)
        args = batch.args[which] if call.stage == 0 else self._routes.args_of(call.stage, tuple(received))
        check_declared(stage, "input", args)
        with torch.enable_grad() if call.training else torch.no_grad():
            output = self._compute(stage, which, args, batch.kwargs[which])
        check_declared(stage, "output", output)
        if stage.is_last:
            self._finish(call, stage, received, output)
            return
        outputs = tuple(output) if type(output) in (list, tuple) else (output,)
        for i, one in enumerate(outputs):
            _send(call, i, one)
        if call.training:
            numbers = [i for i, one in enumerate(outputs) if one.requires_grad]
            roots = [get_gradient_edge(outputs[i]) for i in numbers]
            places = self._routes.grads_at(call.stage, len(outputs))
            self._keep(call, stage, received, roots, [places[i] for i in numbers], outputs)

    @staticmethod
    def _compute(stage: Any, which: int, args: Any, kwargs: Any) -> Any:
        if not stage._forward_contexts:
            return stage.forward_maybe_with_nosync(*args, **kwargs)
        info = PipelineStageInfo(stage_index=stage.stage_index, microbatch_index=which)
        return stage._call_with_forward_context(info, stage.forward_maybe_with_nosync, *args, **kwargs)

    def _finish(self, call: StageCall, stage: Any, received: list[Any], output: Any) -> None:
        """The last stage."""
        batch, which = self._batch, call.microbatch
        assert batch is not None
        if batch.keep_outputs:
            self.outputs[which] = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        if batch.targets is None or self._loss_fn is None:
            return
        with torch.enable_grad() if call.training else torch.no_grad():
            loss = self._loss_fn(output, batch.targets[which], **batch.loss_kwargs)
        self.losses[which] = loss.detach() if isinstance(loss, torch.Tensor) else loss
        if call.training:
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
                raise InvalidArgument(f"loss_fn returned {what}; it must return a tensor with one element")
            self._keep(call, stage, received, [loss] if loss.requires_grad else [], [], loss)

    def _keep(
        self, call: StageCall, stage: Any, inputs: list[Any], roots: list[Any], places: list[list[int]], outputs: Any
    ) -> None:
        searched = outputs if isinstance(stage.submod, TheirDDP) else None
        self._kept[call.stage, call.microbatch] = Kept(inputs, roots, places, searched)

    def _root_grads(self, call: StageCall, kept: Kept) -> list[torch.Tensor]:
        """The gradients with which a backward begins. To scale them is to scale the loss."""
        stage = self._stages[call.stage]
        if stage.is_last:
            return [torch.full_like(loss, self._scale) for loss in kept.roots]
        grads = []
        for places in kept.grads_at:
            some = [_copied(call.output_grads[at], call._dtypes["output_grads"][at], stage.device) for at in places]
            grads.append(some[0] if len(some) == 1 else torch.stack(some).sum(0))
        return grads

    def _backward(self, call: StageCall, kept: Kept, grads: list[torch.Tensor]) -> None:
        """Accumulate into the gradients of weights and of inputs."""
        done = self._backwards[call.stage] = self._backwards.get(call.stage, 0) + 1
        stage, batch = self._stages[call.stage], self._batch
        assert batch is not None
        is_last = done == call.microbatches
        for shards in _shards_of(stage):  # which stay unsharded until then
            shards.set_is_last_backward(is_last and batch.reduce)
            shards.set_requires_gradient_sync(is_last and batch.reduce)
            shards.set_reshard_after_backward(is_last and batch.reduce)
        with torch.enable_grad(), _reduced_by_ddp(stage.submod, kept.outputs, is_last):
            if kept.roots:
                torch.autograd.backward(kept.roots, grads)


_WITH_GRADIENT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _nothing() -> None:
    """The weights' part of a backward that had both."""


@contextmanager
def _told(call: StageCall) -> Iterator[None]:
    """Errors in the block also tell where they came from."""
    try:
        yield
    except Exception as error:
        error.add_note(f"stage {call.stage}, micro-batch {call.microbatch}, {call.work}")
        raise


def _shards_of(stage: Any) -> list[Any]:
    """The modules of a stage that FSDP shards, Tessera's or PyTorch's."""
    return [module for module in stage.submod.modules() if isinstance(module, FSDPModule)]


def _has_ddp(stage: Any) -> bool:
    """Whether DDP counts the backwards of a stage, so that each must be a single one."""
    return any(isinstance(module, TheirDDP) for module in stage.submod.modules())


def _reduced_by_ddp(module: Any, outputs: Any, is_last: bool) -> AbstractContextManager[None]:
    """The block in which a module's backward runs. Its forward ran without synchronisation, so DDP hears only now that
    this backward is to reduce."""
    if not isinstance(module, TheirDDP):
        return nullcontext()
    if not is_last:
        without: AbstractContextManager[None] = module.no_sync()
        return without
    if isinstance(module, DistributedDataParallel):
        module._gradients.begin(True)
    else:
        module.reducer.prepare_for_backward(list(_find_tensors(outputs)))
    return nullcontext()


# ------------------------------------------------------------ tensors and the library's memory


def _copied(array: Any, dtype: DType | None, device: Any) -> torch.Tensor:
    """A tensor with the values of an array of the library."""
    assert dtype is not None
    made = torch.empty(array.shape, dtype=of_core(dtype))
    _bytes_of(made)[:] = array.reshape(-1).view(np.uint8)
    return made.to(device)


def _write(values: torch.Tensor | None, array: Any) -> None:
    """Write a tensor into an array of the library."""
    if values is not None:
        array.reshape(-1).view(np.uint8)[:] = _bytes_of(values.detach().resolve_conj().resolve_neg().cpu().contiguous())


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8).numpy()


def _send(call: StageCall, number: int, output: Any) -> None:
    """Hand an output of a stage to the library."""
    what = f"output {number} of stage {call.stage}"
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"{what} is a {type(output).__name__}; a stage before the last must return a tensor or a tuple of tensors"
        )
    if isinstance(output, DTensor) or output.layout is not torch.strided or output.is_quantized:
        kind = "DTensor" if isinstance(output, DTensor) else str(output.layout)
        raise Unsupported(
            f"{what} is a {kind}; stages exchange dense plain tensors: return its to_local() or to_dense()"
        )
    if output.dtype not in CORE or (output.is_complex() and output.requires_grad):
        gradient = " with a gradient" if output.requires_grad else ""
        raise Unsupported(f"{what} is {dtype_name(output.dtype)}{gradient}, which stages cannot exchange")
    _write(output, call.output(output.shape, CORE[output.dtype]))


def _write_grads(call: StageCall, kept: Kept) -> None:
    """The gradients that a backward accumulated in the inputs."""
    for one, array in zip(kept.inputs, call.input_grads, strict=True):
        _write(one.grad, array)
