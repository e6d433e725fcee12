"""The gradients of a module in the buckets of a `tessera.DDP`, driven by autograd.

A step of the core is one backward pass:

    a gradient is accumulated --> it is in its view of a bucket: `ready`          many times, in any order
    the backward pass ends    --> `wait`; gradients that only other ranks had are set; sparse gradients are averaged

`param.grad` is the view itself. If autograd made another tensor (after ``zero_grad()``, which drops the view), its
values are first copied into the view. A sparse gradient has no view: the core sees its parameter as one without
elements, which is compared, marked ready and reported as missing like any other. The core sees this rank's
slice of a DTensor parameter, whose `grad` is a DTensor over the view. Everything runs on the thread that calls
``backward``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from .. import _core
from ..comm import Comm
from ..ddp import DDP, Bucket
from ..errors import InvalidState, Unsupported
from .slices import accumulate_as_placed, is_slice, like, local
from .sparse import sum_of_ranks
from .tensors import CORE, of_core

__all__ = ["Gradients", "closed", "kept"]


class Gradients:
    """The gradients of `params`, averaged over the ranks of `comm`. Collective: parameters become those of rank 0.

    Parameters
    ----------
    comm : Comm
        Not used for anything else.
    params : mapping of str to Parameter
        In the order of registration; all have elements.
    options : mapping
        Options of `tessera.DDP`.
    sparse : sequence of Parameter
        Those of `params` with sparse gradients, which are averaged after all others. These parameters are unchanged.
    delayed : sequence of Parameter
        Those of `params` that become ready when `trigger` has its gradient.
    trigger : Parameter, optional
        See `delayed`.
    """

    def __init__(
        self,
        comm: Comm,
        params: Mapping[str, torch.nn.Parameter],
        options: Mapping[str, Any],
        sparse: Sequence[torch.nn.Parameter] = (),
        delayed: Sequence[torch.nn.Parameter] = (),
        trigger: torch.nn.Parameter | None = None,
    ) -> None:
        self._comm = comm
        self._names = list(params)
        self._params = list(params.values())
        self._options = dict(options)
        few = {id(param) for param in sparse}
        self._is_sparse = [id(param) in few for param in self._params]
        self._memory = [
            _no_memory(name, param) if is_sparse else _in_memory(name, local(param))
            for (name, param), is_sparse in zip(params.items(), self._is_sparse, strict=True)
        ]
        late = {id(param) for param in delayed}
        self._delayed = [i for i, param in enumerate(self._params) if id(param) in late]
        self._is_delayed = [id(param) in late for param in self._params]
        self._static = bool(options.get("static_graph"))
        self._fires: list[int] | None = None  # static graph: how often each gradient is accumulated; None before
        self._counts = [0] * len(self._params)  # this step
        # Static graph: the gradients in the order in which they were complete in the first step.
        self._order = dict.fromkeys(range(len(self._params)))
        self._came = bytearray(len(self._params))  # since the last step that was reduced
        self._said = bytearray(len(self._params))  # this step
        self._running = False  # a backward pass is under way, and its end will be noticed
        self._sync = True
        self._begun = False  # there was a forward pass
        self._hook: Callable[[Bucket], object] | None = None
        self._sparse_hook: Callable[[int, bool, torch.nn.Parameter, torch.Tensor], torch.Tensor] | None = None
        self.last_bucket = -1  # that a hook is called for; with a hook
        self.manual = False  # the program ends steps itself
        self._views: list[torch.Tensor] = []  # of the buckets
        self._grads: list[torch.Tensor] = []  # the views as gradients of the parameters: themselves, or DTensors
        self._make()
        self.hooks = [
            param.register_post_accumulate_grad_hook(partial(_accumulated, weakref.ref(self), i))
            for i, param in enumerate(self._params)
        ]
        self.hooks += [accumulate_as_placed(param) for param in self._params if is_slice(param)]
        if trigger is not None:
            self.hooks.append(trigger.register_post_accumulate_grad_hook(partial(_triggered, weakref.ref(self))))

    def _make(self) -> None:
        former, former_grads = self._views, self._grads
        self.ddp = DDP(self._comm, dict(zip(self._names, self._memory, strict=True)), **self._options)
        self._ready = partial(_core.ddp_ready, self.ddp._handle)
        self._views = [
            torch.empty(0) if self._is_sparse[i] else _view_of(self.ddp, i, local(param))
            for i, param in enumerate(self._params)
        ]
        self._grads = [like(param, view) for param, view in zip(self._params, self._views, strict=True)]
        for old, new in zip(former, self._views, strict=False):
            new.copy_(old)
        for before, after, param in zip(former_grads, self._grads, self._params, strict=False):
            if param.grad is before:
                param.grad = after
        if self._hook is not None:
            self.ddp.set_hook(self._hook)
            self._find_last_bucket()
        if not self._sync:
            self.ddp.set_sync(False)

    # ------------------------------------------------------------ between steps

    @property
    def comm(self) -> Comm:
        """The ranks."""
        return self._comm

    @property
    def in_buckets(self) -> Mapping[str, tuple[torch.nn.Parameter, torch.Tensor]]:
        """Parameters and their gradients by the names that hooks get, without sparse ones."""
        every = zip(self.ddp.names, self._params, self._views, self._is_sparse, strict=True)
        return {name: (param, view) for name, param, view, is_sparse in every if not is_sparse}

    @property
    def has_sparse(self) -> bool:
        """Whether any gradient is sparse."""
        return any(self._is_sparse)

    def set_hook(
        self,
        hook: Callable[[Bucket], object],
        sparse_hook: Callable[[int, bool, torch.nn.Parameter, torch.Tensor], torch.Tensor],
    ) -> None:
        """Let `hook` reduce the buckets and `sparse_hook` the sparse gradients. The latter gets a bucket's number,
        whether it is the last one, the parameter and its gradient, and returns the final reduced gradient."""
        self.ddp.set_hook(hook)
        self._hook, self._sparse_hook = hook, sparse_hook
        self._find_last_bucket()

    def _find_last_bucket(self) -> None:
        self.last_bucket = max((i for i, bucket in enumerate(self.ddp.stats()) if bucket.size_bytes), default=-1)

    def begin(self, sync: bool) -> None:
        """A forward pass begins; `sync` is whether its backward pass reduces."""
        if any(self._counts) and torch._C._current_graph_task_id() >= 0:
            return  # a checkpointed part of the running pass
        self.check_between_steps()
        self._begun = True
        if sync != self._sync:
            self.ddp.set_sync(sync)
            self._sync = sync

    def check_between_steps(self) -> None:
        """Raise if the last backward pass did not end."""
        if self._running and not any(self._counts):
            self._running = False  # it failed before it touched a parameter
        if not any(self._counts):
            return
        missing = [name for name, said in zip(self._names, self._said, strict=True) if not said]
        what = (
            "call finalize_backward() after each backward pass"
            if self.manual
            else "the last backward pass ended with an error, so its gradients were never reduced, and the peers wait "
            "for them until their deadline; restart from a checkpoint"
        )
        raise InvalidState(
            f"rank {self._comm.rank}: the last step lacks {len(missing)} of {len(self._names)} gradients: {what}"
        )

    def allow_join(self, mode: str) -> bool:
        """Allow ranks to have different numbers of steps. False if that was already allowed; else collective."""
        if self._options.get("join", "off") == mode:
            return False
        if self.has_sparse:
            raise Unsupported(
                f"{self._names[self._is_sparse.index(True)]!r} has sparse gradients, which cannot be averaged once a "
                "rank has no data left; use sparse=False, or join(throw_on_early_termination=True)"
            )
        self.check_between_steps()
        self._options["join"] = mode
        with kept(self._memory):
            self._make()
        return True

    def make_static(self) -> None:
        """Set `static_graph` as if it had been among the options. Collective; call it before the first step."""
        if self._begun:
            raise InvalidState(
                "_set_static_graph() should be called before training loop starts; the constructor takes "
                "static_graph=True"
            )
        self._options.update(static_graph=True, find_unused=False, rebuild_buckets=True)
        self._static = True
        with kept(self._memory):
            self._make()

    def join(self) -> None:
        """Join the steps of the other ranks until all have joined."""
        for name, param, memory in zip(self._names, self._params, self._memory, strict=True):
            if local(param).data_ptr() != memory.data_ptr():
                raise InvalidState(f"the memory of parameter {name!r} was replaced after the model was wrapped")
        self.ddp.join()
        self._came = bytearray(len(self._params))

    # ------------------------------------------------------------ in backward

    def backward_begins(self, _grad: torch.Tensor) -> None:
        """A hook of the module's outputs."""
        self.expect_end()

    def expect_end(self) -> None:
        """Register for the end of the running backward pass, the outermost one if they are nested."""
        if not self._running and not self.manual:
            self._running = True
            Variable._execution_engine.queue_callback(partial(_ended, weakref.ref(self)))

    def accumulated(self, i: int) -> None:
        """Gradient `i` was set or added to."""
        self._counts[i] += 1
        if self._static and self._fires is None:
            self._order[i] = self._order.pop(i)
        if self._said[i] and self._sync:
            raise InvalidState(
                f"rank {self._comm.rank}: the gradient of {self._names[i]!r} was written again in the same step, when "
                "its reduction may have begun; checkpointed activations need use_reentrant=False or static_graph=True, "
                "and parameters used after the delayed all-reduce cannot be delayed"
            )
        self._move_in(i)
        if self._is_delayed[i] or self._said[i]:
            return
        if self._static and self._sync and (self._fires is None or self._counts[i] < self._fires[i]):
            return
        self._say(i)

    def reduce_delayed(self) -> None:
        """The gradients that wait for the trigger are complete."""
        for i in self._delayed:
            if not self._said[i]:
                if self._params[i].grad is None and not self._is_sparse[i]:
                    self._views[i].zero_()
                    self._params[i].grad = self._grads[i]
                self._move_in(i)
                self._counts[i] += 1
                self._say(i)

    def _say(self, i: int) -> None:
        self._ready(i)
        self._said[i] = self._came[i] = 1

    def _move_in(self, i: int) -> None:
        param, view = self._params[i], self._views[i]
        grad = param.grad
        if grad is self._grads[i] or grad is None:
            return
        if grad.layout is not (torch.sparse_coo if self._is_sparse[i] else torch.strided):
            raise Unsupported(
                f"rank {self._comm.rank}: the gradient of {self._names[i]!r} is {grad.layout}; parameters of an "
                "Embedding or EmbeddingBag with sparse=True must have sparse gradients (torch.sparse_coo) and must not "
                "be used elsewhere, and all others must have dense ones"
            )
        if self._is_sparse[i]:
            return
        with torch.no_grad():
            view.copy_(local(grad))
        param.grad = self._grads[i]

    def ended(self) -> None:
        """The backward pass is over: return when the gradients are reduced."""
        self._running = False
        if not any(self._counts) and not self._may_lack:
            return  # it was not a pass of this model
        if any(self._counts[i] for i in self._delayed):
            self.reduce_delayed()
        rest = [i for i, said in enumerate(self._said) if not said]
        if rest and self._sync:
            self._settle(rest)
        self.ddp.wait()
        if self._sync:
            self._average_sparse()
            if self._hook is not None:
                self._find_last_bucket()  # the first step has rebuilt the buckets
        self._after(rest)

    def _average_sparse(self) -> None:
        """Average the sparse gradients one after the other; a rank without a gradient contributes no entries."""
        number, sparse = self.last_bucket, [i for i, is_sparse in enumerate(self._is_sparse) if is_sparse]
        for i in sparse:
            self._move_in(i)
            param = self._params[i]
            own = _no_entries(param) if param.grad is None else param.grad
            used = self.ddp.used(i)
            if self._sparse_hook is not None:
                number += 1
                average = self._sparse_hook(number, i == sparse[-1], param, own)
            elif used:
                average = sum_of_ranks(self._comm._handle, own) / self._comm.world_size
            if used:
                param.grad = average

    @property
    def _may_lack(self) -> bool:
        """Whether gradients may be missing in this step."""
        return bool(self._options.get("find_unused")) or (self._static and self._fires is None)

    def _settle(self, rest: Sequence[int]) -> None:
        """Handle the gradients that were not marked ready: they are complete now, or unused in this step."""
        missing = []
        for i in [i for i in self._order if not self._said[i]]:
            if self._static and self._counts[i]:
                self._say(i)
            elif self._came[i]:  # steps without synchronisation left something to be reduced
                if self._params[i].grad is None:
                    self._views[i].zero_()
                self._move_in(i)
            elif self._fires is not None:
                missing += [i] * (self._fires[i] > 0)
            elif not self._may_lack:
                missing.append(i)
            elif not self._static and self._params[i].grad is not None:
                self._move_in(i)  # what was there before counts, as beside the ranks that add to it
                self._say(i)
        if missing:
            names = ", ".join(repr(self._names[i]) for i in missing[:8])
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            what = (
                "the first step had them, and with static_graph=True every step must"
                if self._static
                else "the loss does not depend on these parameters; use find_unused_parameters=True if that is intended"
            )
            raise InvalidState(
                f"rank {self._comm.rank}: {len(missing)} of {len(self._names)} gradients are missing after this "
                f"backward pass: {names}{more}; {what}"
            )

    def _after(self, rest: Sequence[int]) -> None:
        if self._sync:
            for i in rest:
                if not self._said[i] and self.ddp.used(i) and not self._is_sparse[i]:
                    grad = self._params[i].grad
                    if grad is not None and grad is not self._grads[i] and bool(local(grad).count_nonzero()):
                        raise Unsupported(
                            f"the gradient of {self._names[i]!r} was kept over a step in which only other ranks used "
                            "it, which static_graph does not support; call zero_grad() before each step, or use "
                            "find_unused_parameters"
                        )
                    self._params[i].grad = self._grads[i]
            if self._static and self._fires is None:
                self._fires = list(self._counts)
            self._came = bytearray(len(self._params))
        self._counts = [0] * len(self._params)
        self._said = bytearray(len(self._params))


@contextmanager
def kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """A block that writes tensors; their previous values are restored after it."""
    values = [tensor.detach().clone() for tensor in tensors]
    yield
    for tensor, value in zip(tensors, values, strict=True):
        tensor.detach().copy_(value)


def closed(comm: Comm, hooks: Sequence[Any]) -> None:
    """Clean up when the model is freed or the process ends."""
    for hook in hooks:
        hook.remove()
    comm.close()


# Callbacks that PyTorch keeps: they must not keep the model alive.


def _accumulated(self: weakref.ref[Gradients], i: int, _param: torch.Tensor) -> None:
    if (gradients := self()) is not None:
        gradients.expect_end()
        gradients.accumulated(i)


def _triggered(self: weakref.ref[Gradients], _param: torch.Tensor) -> None:
    if (gradients := self()) is not None:
        gradients.expect_end()
        gradients.reduce_delayed()


def _ended(self: weakref.ref[Gradients]) -> None:
    if (gradients := self()) is not None:
        gradients.ended()


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions from the outermost in memory to the innermost."""
    if tensor.is_contiguous():
        return list(range(tensor.ndim))
    return sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride(dim), dim))


def _in_memory(name: str, param: torch.Tensor) -> torch.Tensor:
    """A parameter's elements in memory order, with the dimensions permuted so that they are contiguous."""
    plain = param.detach()
    if type(plain) not in (torch.Tensor, torch.nn.Parameter):
        raise Unsupported(f"parameter {name!r} is a {type(param).__name__}; only plain tensors are supported")
    if not plain.is_cpu:
        raise Unsupported(f"parameter {name!r} is on {plain.device}; parameters must be in CPU memory")
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    elif not plain.is_floating_point() or plain.dtype not in CORE:
        raise Unsupported(f"parameter {name!r} is {plain.dtype}; it must be a floating-point tensor")
    plain = plain.permute(_order(plain))
    if not plain.is_contiguous():
        raise Unsupported(
            f"parameter {name!r} has strides {param.stride()} for shape {tuple(param.shape)}: its memory has gaps"
        )
    return plain


def _no_memory(name: str, param: torch.nn.Parameter) -> torch.Tensor:
    """What the core sees of a parameter with a sparse gradient: its shape, but no elements."""
    if is_slice(param):
        raise Unsupported(f"parameter {name!r} is a DTensor, whose gradient cannot be sparse; use sparse=False")
    plain = _in_memory(name, param)
    return torch.empty((0, *plain.shape), dtype=plain.dtype)


def _no_entries(param: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of an unused embedding."""
    rows = torch.empty((0, *param.shape[1:]), dtype=param.dtype)
    return torch.sparse_coo_tensor(torch.empty((1, 0), dtype=torch.int64), rows, param.shape, check_invariants=True)


def _view_of(ddp: DDP, i: int, param: torch.Tensor) -> torch.Tensor:
    """The gradient's memory as a tensor with the parameter's layout."""
    memory, dtype, shape = _core.ddp_grad(ddp._handle, i)
    if not param.numel():  # a slice that has nothing
        return torch.empty_like(param, requires_grad=False)
    flat = torch.frombuffer(memory, dtype=of_core(dtype))
    like = torch.view_as_real(param.detach()) if param.is_complex() else param
    order = _order(like)
    view = flat.view(shape).permute([order.index(dim) for dim in range(like.ndim)])
    return torch.view_as_complex(view) if param.is_complex() else view
