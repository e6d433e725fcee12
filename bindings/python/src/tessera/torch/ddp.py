"""`DistributedDataParallel` with PyTorch's name and signature, on Tessera's own DDP.

    from tessera.torch import DistributedDataParallel          # was: from torch.nn.parallel import ...
    model = DistributedDataParallel(net)

Gradients are in buckets that the ranks of a host share; buckets are averaged while backward runs. docs/TORCH.md lists
the differences from PyTorch's class.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as _TorchDDP

from .. import _core
from ..comm import Comm
from ..ddp import Bucket, BucketStats
from ..errors import InvalidArgument, InvalidState, Unsupported
from ..tensor import DType
from .gradients import Gradients, closed, kept
from .meeting import own_communicator
from .slices import check_slice, compare_slices, is_slice, local
from .tensors import CORE
from .views import Views

__all__ = ["DistributedDataParallel", "GradBucket"]

_MIB = 1 << 20


class DistributedDataParallel(_TorchDDP):
    """A module whose gradients are averaged over the ranks. Collective: all ranks get rank 0's parameters and buffers.

    A subclass of PyTorch's class, so that programs and libraries recognise it, but it runs none of PyTorch's code. Not
    thread-safe. Errors are Tessera's, which are also the builtins that PyTorch raises.

    If the ranks are the default process group, `torch.save` and `copy.deepcopy` support the model. A loaded model or
    copy connects to the other ranks on first use; each rank then keeps its own parameters.

    Parameters
    ----------
    module : Module
        Its parameters must be in CPU memory, and at least one must require a gradient. They may be DTensors: their
        slices are averaged, and their gradients are DTensors of the same placements.
    device_ids, output_device
        Must be None: they are for GPUs.
    dim : int
        As in PyTorch; for modules on several GPUs.
    broadcast_buffers : bool, optional
        If False, each rank keeps its own buffers. Otherwise each forward pass begins with rank 0's.
    init_sync : bool
        If False, each rank keeps its parameters and buffers. The ranks' modules are still compared.
    process_group : ProcessGroup or Comm, optional
        The ranks: a `torch.distributed` group of any backend, by default the default group, or a Tessera communicator,
        which needs no `torch.distributed`. The model makes its own communicator. For a module with DTensor parameters
        (`parallelize_module`), the ranks with other data that hold the same slices.
    bucket_cap_mb : float, optional
        MiB of gradients that are reduced together; by default 25, and 1 in the first bucket.
    find_unused_parameters : bool
        Allow parameters that do not contribute to the loss: this rank adds zeros. Those that no rank uses keep their
        gradient. Without it, such a parameter is an error in the step in which it occurs.
    check_reduction
        No effect, as in PyTorch.
    gradient_as_bucket_view : bool
        No effect: gradients are always views of the buckets.
    static_graph : bool
        Every step uses the same parameters as the first one, equally often.
    delay_all_reduce_named_params, param_to_hook_all_reduce
        Names and parameters that are reduced together once the latter parameter has its gradient. Their gradients may
        be accumulated any number of times before.
    mixed_precision
        Only `reduce_dtype` is supported: the dtype in which gradients are sent. Use `torch.autocast` for arithmetic.
    device_mesh : DeviceMesh, optional
        One-dimensional mesh, instead of `process_group`: ``mesh["dp"]``.
    skip_all_reduce_unused_params : bool
        Same as `find_unused_parameters`, which leaves such parameters unchanged on all ranks.
    bucket_cap_mb_list
        Not supported: all buckets but the first have the same size.
    batched_grad_copy, lazy_bucket_allocation : bool
        No effect: there are no such copies, and `grad` is a view of a bucket.
    forward_sync_buffers : bool, optional
        If False, buffers are rank 0's only at the beginning.

    Raises
    ------
    InvalidArgument, Unsupported
        An argument is not supported, or a parameter is not a dense floating-point tensor in CPU memory; the message
        names it. (Gradients of embeddings may be sparse.) Or a DTensor parameter is cut over ranks that are among those
        whose gradients are averaged, or is placed otherwise than by `Shard` and `Replicate`.
    Mismatch
        The ranks' modules or options differ, or they hold other slices of DTensors; the message names the first
        difference.
    TesseraTimeout, PeerLost, Aborted
        A rank is late or lost; the message names it.
    """

    _core_options: Mapping[str, Any] = {}
    """More options of `tessera.DDP`, of a subclass."""

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        if "_modules" not in self.__dict__:  # else it is unpickled
            torch.nn.Module.__init__(self)
        self._arguments = {
            "dim": dim,
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "forward_sync_buffers": forward_sync_buffers,
        }
        del check_reduction, batched_grad_copy, lazy_bucket_allocation
        if device_ids or output_device is not None:
            raise InvalidArgument(
                f"device_ids is {device_ids} and output_device is {output_device}; they must be None for a module in "
                "CPU memory"
            )
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise InvalidArgument("delay_all_reduce_named_params and param_to_hook_all_reduce must be passed together")
        find_unused = bool((find_unused_parameters or skip_all_reduce_unused_params) and not static_graph)
        options = {
            **_limits(bucket_cap_mb, bucket_cap_mb_list),
            "find_unused": find_unused,
            "static_graph": bool(static_graph),
            "rebuild_buckets": not find_unused,  # steps that differ have no order
            "reduce_dtype": _reduce_dtype(mixed_precision),
            **self._core_options,
        }
        self.process_group = _ranks(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        params = _checked(module, self.parameters_to_ignore)
        trained = {name: param for name, param in params.items() if param.requires_grad and param.numel() > 0}
        self._known = {param for param in module.parameters() if param.requires_grad}
        sparse = _with_sparse_gradients(module, list(trained.values()))
        delayed = dict(delay_all_reduce_named_params or ())
        for name, param in delayed.items():
            if not any(param is one for one in trained.values()):
                raise InvalidArgument(f"delay_all_reduce_named_params names {name!r}, which is not averaged")

        self.module = module
        self.dim = dim
        self.device, self.device_type = torch.device("cpu"), "cpu"
        self.device_ids = self.output_device = None
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.mixed_precision = mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        of_old = broadcast_buffers is None or broadcast_buffers  # the deprecated argument
        self.forward_sync_buffers = of_old if forward_sync_buffers is None else forward_sync_buffers
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._throws = False
        self._has_hook = False
        self._shared_buffers: _Buffers | None = None

        comm = own_communicator(self.process_group, "DistributedDataParallel")
        try:
            compare_slices(comm, params)
            with nullcontext() if init_sync else kept([local(param.detach()) for param in trained.values()]):
                self._gradients = Gradients(
                    comm, trained, options, sparse, list(delayed.values()), param_to_hook_all_reduce
                )
            self._end = weakref.finalize(self, closed, comm, self._gradients.hooks)
            buffers = _Buffers(module, self.parameters_to_ignore, self._gradients)
            if init_sync:
                _broadcast(comm, [local(param) for param in params.values() if not param.requires_grad] + sparse)
                if of_old or forward_sync_buffers is not None:
                    _broadcast(comm, list(buffers.now().values()))
            if self.forward_sync_buffers and buffers.now():
                buffers.register()
                self._shared_buffers = buffers
        except BaseException:
            comm.close()
            raise

    # ------------------------------------------------------------ a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. The synchronisation set now applies to the backward pass that follows: see `no_sync`."""
        grad = torch.is_grad_enabled()
        for param in self.module.parameters():
            if hasattr(param, "_in_backward_optimizers"):
                raise Unsupported(
                    "apply_optimizer_in_backward steps before gradients are averaged; step after backward(), or use a "
                    "Tessera optimizer that steps in backward (tessera.DDP.step_in_backward)"
                )
            if grad and param.requires_grad and param not in self._known:
                self._refuse_unknown()
        if self._throws:
            self._tell_of_data(True)
        if grad:
            self._gradients.begin(self.require_backward_grad_sync)
        if self._shared_buffers is not None and self.will_sync_module_buffers():
            self._shared_buffers.from_rank_0()
        output = self.module(*inputs, **kwargs)
        self.require_forward_param_sync = grad and self.require_backward_grad_sync
        if grad:
            # Before any gradient of a parameter, and in the outermost of nested passes.
            for tensor in _tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._gradients.backward_begins)
        return output

    def _refuse_unknown(self) -> None:
        unknown = [
            repr(name)
            for name, param in self.module.named_parameters()
            if param.requires_grad and param not in self._known and name not in self.parameters_to_ignore
        ]
        if unknown:
            more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
            raise InvalidState(
                f"the gradients of {', '.join(unknown[:8])}{more} would not be averaged: the parameters were added, "
                "replaced or unfrozen after the module was wrapped; wrap it again, or freeze them"
            )

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass begins with rank 0's buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and self._shared_buffers is not None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes of forward passes in this block average nothing; gradients accumulate.

        The first pass after the block averages the sums. Use it on all ranks alike.
        """
        former, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = former

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether a backward pass is ended by `finalize_backward` instead of automatically. Set between steps."""
        return self._gradients.manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self._gradients.check_between_steps()
        self._gradients.manual = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` must be called after ``backward``."""
        return self._gradients.manual

    def finalize_backward(self) -> None:
        """Call it after ``backward``: returns when all gradients are averaged. Collective.

        Raises
        ------
        InvalidState
            `require_manual_backward_finalization` is not set, or gradients are missing; the message names them.
        """
        if not self._gradients.manual:
            raise InvalidState("backward() has already ended the step; set require_manual_backward_finalization first")
        self._gradients.ended()

    def stats(self) -> list[BucketStats]:
        """Statistics of each bucket in the last step: see `tessera.DDP.stats`. Not part of PyTorch's API."""
        return self._gradients.ddp.stats()

    # ------------------------------------------------------------ uneven inputs

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """A block around the training loop of ranks that may have different numbers of steps. Collective.

        At its end a rank joins the steps of the others with zero gradients until all have reached the end. Then all
        ranks have the parameters and buffers of the lowest rank that made the most steps, and gradients are zero.

        Parameters
        ----------
        divide_by_initial_world_size : bool
            If False, sums are divided by the number of ranks that still have data.
        enable : bool
            If False, the block has no effect.
        throw_on_early_termination : bool
            Instead of the above, raise on all ranks as soon as one has no data left.

        Raises
        ------
        InvalidState
            With `throw_on_early_termination`; the message names the ranks without data.
        Unsupported
            The model has sparse gradients.
        """
        if not enable:
            yield
        elif throw_on_early_termination:
            self._throws = True
            try:
                yield
            finally:
                self._throws = False
            self._tell_of_data(False)
        else:
            mode = "divide_by_world" if divide_by_initial_world_size else "divide_by_active"
            if self._gradients.allow_join(mode) and self._shared_buffers is not None:
                self._shared_buffers.register()
            yield
            with nullcontext() if self._shared_buffers is None else self._shared_buffers.in_place():
                self._gradients.join()

    def _tell_of_data(self, left: bool) -> None:
        comm = self._gradients.comm
        everyone = np.zeros(comm.world_size, np.uint8)
        comm.all_gather(np.array([left], np.uint8), everyone)
        without = [str(rank) for rank, has in enumerate(everyone) if not has]
        if 0 < len(without) < comm.world_size:
            raise InvalidState(f"ranks without data left: {', '.join(without)}; other ranks still have data")

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Not supported: `torch.distributed.algorithms.Join` shadows a model's collectives one by one; use `join`."""
        raise Unsupported("torch.distributed.algorithms.Join does not support this model; use model.join()")

    @property
    def join_device(self) -> torch.device:
        """The CPU."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The ranks, as passed to the constructor."""
        return self.process_group

    # ------------------------------------------------------------ hooks

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], torch.futures.Future[Any]]) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket of gradients. Supports PyTorch's own hooks. Once per model.

        The hook gets a `GradBucket` and returns a future of the final reduced gradients; it does its own averaging. It
        runs on a thread of the library, one bucket after another in the same order on all ranks, while backward runs.
        If the program also calls collectives in the backward pass, give the hook its own process group. A sparse
        gradient is a separate bucket after all others; for it the hook runs on the thread of backward.

        Raises
        ------
        TypeError, InvalidArgument
            The hook has a wrong type or signature.
        InvalidState
            The model already has a hook, or is in the middle of a step.
        """
        _check_hook(hook)
        if self._has_hook:
            raise InvalidState("the model already has a communication hook; only one can be registered")
        model = weakref.ref(self)

        def reduce(bucket: Bucket) -> None:
            this = model()
            if this is None:
                raise RuntimeError("the model was garbage-collected")
            gradients, known = this._gradients, this._gradients.in_buckets
            params = [known[name][0] for name in bucket.names if name in known]
            views = [known[name][1] for name in bucket.names if name in known]
            is_last = bucket.index == gradients.last_bucket and not gradients.has_sparse
            given = GradBucket(bucket.index, params, views, is_last)
            given.put_back(hook(state, given).wait(), views)

        def reduce_sparse(index: int, is_last: bool, param: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
            given = GradBucket(index, [param], [gradient], is_last)
            return _one_tensor(hook(state, given).wait(), gradient.numel())

        self._gradients.set_hook(reduce, reduce_sparse)
        self._has_hook = True

    # ------------------------------------------------------------ what PyTorch's has beside that

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """As for any module."""
        torch.nn.Module.train(self, mode)
        return self

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> NoReturn:
        """Not supported: it is for modules on several GPUs."""
        raise Unsupported("scatter is only for modules on several GPUs")

    def gather(self, outputs: Any, output_device: Any) -> NoReturn:
        """Not supported: it is for modules on several GPUs."""
        raise Unsupported("gather is only for modules on several GPUs")

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> NoReturn:
        """Not supported: it is for modules on GPUs."""
        raise Unsupported("to_kwargs is only for modules on GPUs")

    @property
    def broadcast_buffers(self) -> bool:
        """The old name of `forward_sync_buffers`."""
        return bool(self.forward_sync_buffers)

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _set_static_graph(self) -> None:
        """Sets `static_graph`, for programs that predate the argument. Collective."""
        if self.static_graph:
            return
        self._gradients.make_static()
        self.static_graph = self._arguments["static_graph"] = True
        if self._shared_buffers is not None:
            self._shared_buffers.register()

    def _get_ddp_logging_data(self) -> NoReturn:
        """Not supported: a prototype of PyTorch's that describes its reducer."""
        raise Unsupported("this model has no DDP logging data; use stats(), which has statistics of each bucket")

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> NoReturn:
        """Not supported, like the data."""
        raise Unsupported("this model has no DDP logging data; use stats(), which has statistics of each bucket")

    def __getstate__(self) -> dict[str, Any]:
        """The module and the options, without a hook. An unpickled model or copy connects to the other ranks on first
        use."""
        if self.process_group is not torch.distributed.group.WORLD:
            raise TypeError(
                "a model whose ranks are not the default process group cannot be pickled or copied; save or copy "
                "model.module, or its state_dict()"
            )
        made = self.__dict__.keys() - torch.nn.Module().__dict__.keys()
        return {"module": self.module, "arguments": self._arguments, "made": made, "training": self.training}

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.nn.Module.__init__(self)
        self.module, self.training = state["module"], state["training"]
        self._unpickled = {name: state[name] for name in ("arguments", "made")}

    def __getattr__(self, name: str) -> Any:
        unpickled = self.__dict__.get("_unpickled")
        if unpickled is not None and name in unpickled["made"]:
            del self._unpickled
            try:
                self.__init__(self.module, init_sync=False, **unpickled["arguments"])  # type: ignore[misc]
            except BaseException:
                self._unpickled = unpickled
                raise
            return getattr(self, name)
        return super().__getattr__(name)


class GradBucket:
    """A bucket of gradients for a communication hook, like PyTorch's: a flat tensor and its parts, or a sparse one."""

    def __init__(
        self, index: int, params: list[torch.nn.Parameter], gradients: list[torch.Tensor], is_last: bool
    ) -> None:
        self._index = index
        self._params = params
        self._shapes = [gradient.shape for gradient in gradients]
        self._is_last = is_last
        is_sparse = gradients[0].is_sparse
        self._buffer = gradients[0] if is_sparse else torch.cat([gradient.reshape(-1) for gradient in gradients])

    def index(self) -> int:
        """Its number, in the order of reduction."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last bucket of a step."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """The gradients, concatenated."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace `buffer` by another tensor."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """The gradients as parts of `buffer`."""
        return [self._buffer] if self._buffer.is_sparse else _parts(self._buffer, self._shapes)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in the order of `gradients`."""
        return self._params

    def put_back(self, result: Any, gradients: list[torch.Tensor]) -> None:
        """Write the result of a hook's future into the gradients."""
        flat = _one_tensor(result, sum(map(torch.numel, gradients))).reshape(-1)
        with torch.no_grad():
            for gradient, part in zip(gradients, _parts(flat, self._shapes), strict=True):
                gradient.copy_(part)


class _Buffers:
    """A module's buffers, which are broadcast from rank 0 at the beginning and before forward passes.

    The core gets memory that does not change; a buffer that is not contiguous, or was replaced in the module, is copied
    to it.
    """

    def __init__(self, module: torch.nn.Module, ignored: set[str], gradients: Gradients) -> None:
        self._module = module
        self._ignored = ignored
        self._gradients = gradients
        self._memory = {name: buffer.detach().contiguous() for name, buffer in self.now().items()}

    def now(self) -> dict[str, torch.Tensor]:
        """The module's buffers, by name; of DTensors this rank's slices."""
        return {name: local(buffer) for name, buffer in self._module.named_buffers() if name not in self._ignored}

    def register(self) -> None:
        """Register the memory with the core without changing values. Collective."""
        with kept(list(self._memory.values())):
            self._gradients.ddp.register_buffers(self._memory)

    def from_rank_0(self) -> None:
        """Broadcast rank 0's buffers. Collective."""
        with self.in_place():
            self._gradients.ddp.broadcast_buffers()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which the core's memory holds the buffers' values."""
        moved = []
        for name, buffer in self.now().items():
            memory = self._memory.get(name)
            if memory is None or memory.shape != buffer.shape or memory.dtype != buffer.dtype:
                raise InvalidState(f"buffer {name!r} was added, or changed shape or dtype, after the model was wrapped")
            if memory.data_ptr() != buffer.data_ptr() or memory.stride() != buffer.stride():
                memory.copy_(buffer.detach())
                moved.append((buffer.data, memory))  # the values change as the core's writes do: unseen by autograd
        yield
        for data, memory in moved:
            data.copy_(memory)


def _broadcast(comm: Comm, tensors: Sequence[torch.Tensor]) -> None:
    """Broadcast rank 0's values."""
    views = Views()
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        of_dtype = [views.updates(tensor.detach()) for tensor in tensors if tensor.dtype is dtype]
        _core.comm_broadcast(comm._handle, of_dtype, 0, False)
    views.finish()


def _checked(module: torch.nn.Module, ignored: set[str]) -> dict[str, torch.nn.Parameter]:
    """The parameters that are not ignored, by name."""
    params = {name: param for name, param in module.named_parameters() if name not in ignored}
    for name, param in params.items():
        if isinstance(param, torch.nn.parameter.UninitializedParameter):
            raise InvalidState(f"parameter {name!r} has no shape yet; run the module once before wrapping it")
        if is_slice(param):
            check_slice(name, param)
    for name, buffer in module.named_buffers():
        if name not in ignored and (not buffer.is_cpu or buffer.dtype not in CORE):
            raise Unsupported(f"buffer {name!r} is {buffer.dtype} on {buffer.device} and cannot be broadcast")
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise Unsupported(f"{name!r} is a SyncBatchNorm, which PyTorch supports only on GPUs")
    if not any(param.requires_grad and param.numel() > 0 for param in params.values()):
        raise InvalidArgument("no parameter of the module requires a gradient, so there is nothing to average")
    return params


def _with_sparse_gradients(module: torch.nn.Module, trained: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """The parameters of embeddings with sparse=True, found as PyTorch does."""
    tables = [part for part in module.modules() if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
    sparse = {id(param) for part in tables if part.sparse for param in part.parameters(recurse=False)}
    return [param for param in trained if id(param) in sparse]


def _ranks(group: Any, mesh: Any) -> Any:
    if mesh is None:
        return torch.distributed.group.WORLD if group is None else group
    if group is not None:
        raise InvalidArgument("process_group and device_mesh are both given; pass only one of them")
    if mesh.ndim != 1:
        raise InvalidArgument(f"device_mesh has {mesh.ndim} dimensions; it must have one, such as mesh['dp']")
    return mesh.get_group(mesh_dim=0)


def _limits(cap_mb: float | None, caps: Sequence[float] | None) -> dict[str, int]:
    if caps is not None:
        raise Unsupported(f"bucket_cap_mb_list is {list(caps)}, but all buckets have one size; use bucket_cap_mb")
    if cap_mb is None:
        return {}
    if not cap_mb > 0:
        raise InvalidArgument(f"bucket_cap_mb is {cap_mb}; it must be positive")
    size = max(1, int(cap_mb * _MIB))
    return {"bucket_bytes": size, "first_bucket_bytes": size}


def _reduce_dtype(policy: Any) -> DType | None:
    if policy is None:
        return None
    for field in ("param_dtype", "buffer_dtype"):
        if getattr(policy, field, None) is not None:
            raise Unsupported(
                f"mixed_precision.{field} is {getattr(policy, field)}; only reduce_dtype is supported: the module "
                "computes in its own dtypes, or in those of torch.autocast"
            )
    dtype = getattr(policy, "reduce_dtype", None)
    if dtype is not None and dtype not in CORE:
        raise Unsupported(f"mixed_precision.reduce_dtype is {dtype}; it must be float16, bfloat16, float32 or float64")
    return None if dtype is None else CORE[dtype]


def _check_hook(hook: Any) -> None:
    if not callable(hook):
        raise TypeError(f"the communication hook is a {type(hook).__name__}; expected a function hook(state, bucket)")
    try:
        signature = inspect.signature(hook)
        signature.bind(None, None)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the communication hook cannot be called as hook(state, bucket): {error}") from None
    try:
        signature = inspect.signature(hook, eval_str=True)
    except Exception:  # an annotation with names that do not exist at run time
        return
    taken = [one.annotation for one in signature.parameters.values()]
    if len(taken) > 1 and taken[1] not in (inspect.Signature.empty, Any, torch.distributed.GradBucket, GradBucket):
        raise InvalidArgument(f"the bucket of the communication hook is annotated as {taken[1]}; expected GradBucket")
    given = signature.return_annotation
    future = torch.futures.Future
    if given not in (inspect.Signature.empty, Any, future, future[Any], future[torch.Tensor]):
        raise InvalidArgument(
            f"the result of the communication hook is annotated as {given}; expected torch.futures.Future[torch.Tensor]"
        )


def _one_tensor(result: Any, elements: int) -> torch.Tensor:
    """The tensor in the result of a communication hook's future."""
    if isinstance(result, (list, tuple)) and len(result) == 1:
        (result,) = result
    if not isinstance(result, torch.Tensor) or result.numel() != elements:
        raise TypeError(
            f"the future of a communication hook holds {_in_short(result)}; expected one tensor of {elements} elements"
        )
    return result


def _parts(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    return [part.view(shape) for part, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]


def _in_short(value: Any) -> str:
    return f"a tensor of {value.numel()}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from _tensors_in(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))
