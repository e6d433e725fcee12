"""Data-parallel training: the trainer marks gradients as ready, and the library averages them in the background."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from . import _core, _options
from ._base import Closable, checked, there_are
from ._given import raw, takes
from ._params import Grads, Params, named, parameter
from .comm import Comm
from .errors import NotFound, UserError
from .tensor import array_over, tensor
from .work import Stream, stream_of

if TYPE_CHECKING:
    from ._base_optimizer import Optimizer
    from ._options import DDPOptions
    from .tp import TensorParallel

__all__ = ["DDP", "Bucket", "BucketStats", "Grads", "Params"]


class BucketStats(NamedTuple):
    """A bucket in the last reduced step. Times are in nanoseconds since the step's first `ready` on this rank."""

    size_bytes: int
    """Size, including padding."""
    params: int
    """Number of parameters."""
    ready_ns: int
    """When its last gradient was ready."""
    start_ns: int
    """When its reduction began."""
    end_ns: int
    """When its reduction was done."""
    exposed_ns: int
    """Time that `DDP.wait` spent waiting for this bucket, which backward did not hide."""


@dataclass(frozen=True)
class Bucket:
    """A bucket whose gradients are all ready. Valid only during the hook's call."""

    index: int
    names: tuple[str, ...]
    """The names of its parameters."""
    grads: tuple[Any, ...]
    """Their gradients, to be changed in place: NumPy arrays, or on a device `CudaArray`."""
    comm: Comm
    """The model's ranks. Synchronous collectives run at once; asynchronous ones raise `InvalidState`."""
    stream: int = 0
    """Of gradients on a device: the address of the CUDA stream on which they are written and must be reduced, with
    ``bucket.comm.on_stream(bucket.stream)`` and kernels on that stream."""


@takes(_options.DDP)
class DDP(Closable):
    """A model registered for data-parallel training. Collective: every rank then has rank 0's values.

    In each step, write the gradients into `grads`, call `ready` for each as soon as it is written (or `ready_all` at
    the end), then `wait`. The gradients are then averaged over the ranks, and an optimizer may step.

    Parameters
    ----------
    comm : Comm
        The ranks that hold a replica.
    params : mapping of str to array, or sequence
        The parameters, the same in the same order on every rank: contiguous floating-point arrays, all in CPU memory or
        all on the communicator's CUDA device (see `set_stream`). Their memory is used until this object is freed. A
        leading ``module.`` or ``_orig_mod.`` of a name is stripped.
    tp : TensorParallel, optional
        The model whose slices the parameters are: ``DDP(mesh["dp"], tp.slices, tp=tp)``. `comm` has the ranks with the
        same slices. Optimizers, norms and states are then those of the whole model.
    <options>

    Raises
    ------
    Mismatch
        The ranks registered different parameters; the message names the first difference.
    InvalidArgument
        An array is not contiguous or not floating-point, or a name occurs twice.
    Unsupported
        `share_params` is combined with an option or dtype that does not allow it, or an option is not available for
        parameters on a CUDA device; the message names it.
    """

    _handle: _core.DDP
    _names: tuple[str, ...] = ()
    _syncs = True

    def __init__(
        self,
        comm: Comm,
        params: Params,
        *,
        tp: TensorParallel | None = None,
        **options: Unpack[DDPOptions],
    ) -> None:
        handle = checked(comm, Comm, "comm", params)._handle
        names: list[str] = []
        arrays: list[Any] = []

        def arguments() -> tuple[list[str], list[_core.Tensor], _core.TensorParallel | None, dict[str, Any]]:
            nonlocal names, arrays
            names, arrays = named(params)
            tensors = [parameter(name, array) for name, array in zip(names, arrays, strict=True)]
            return names, tensors, None if tp is None else tp._handle, raw(_options.DDP, options)

        self._handle = _core.ddp_create(handle, arguments)
        self._hook_failure: list[BaseException] = []
        count = _core.ddp_param_count(self._handle)
        self._names = tuple(_core.ddp_param(self._handle, i)[0] for i in range(count))
        self._index = {name: i for i, name in enumerate(names)} | {name: i for i, name in enumerate(self._names)}
        if options.get("share_params"):
            arrays = [array_over(*_core.ddp_shared_param(self._handle, i)) for i in range(count)]
        self._params = MappingProxyType(dict(zip(self._names, arrays, strict=True)))
        views = {name: array_over(*_core.ddp_grad(self._handle, i)) for i, name in enumerate(self._names)}
        self._grads = Grads(views, "the model")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of registration."""
        return self._names

    @property
    def params(self) -> Mapping[str, Any]:
        """The registered arrays by name; with `share_params`, NumPy views of the host's shared parameters.

        Only the optimizer and loads may write to these views.
        """
        return self._params

    @property
    def grads(self) -> Grads:
        """The gradient of each parameter: a view into a bucket, of the parameter's dtype and shape.

        A NumPy array, or for parameters on a CUDA device an object that shares its memory by DLPack:
        ``param.grad = torch.from_dlpack(ddp.grads[name])``. Initially zero; the same memory in every step.
        ``grads["w"] = g`` copies `g`, which must have the same shape and dtype, into the view; ``grads["w"][...] = g``
        broadcasts and converts as NumPy does. Do not touch a gradient between `ready` and the end of `wait`.
        """
        return self._grads

    def ready(self, *which: str | int) -> None:
        """Mark gradients as ready, by name or number, in any order, each once per step.

        Raises
        ------
        InvalidState
            A gradient was marked ready twice.
        NotFound
            There is no such parameter.
        UserError
            A hook has failed; its exception is the cause.
        """
        try:
            for one in which:
                _core.ddp_ready(self._handle, self._number(one))
        except UserError as error:
            raise error from self._hook_error()

    def _number(self, one: str | int) -> int:
        if isinstance(one, str):
            number = self._index.get(one)
        else:
            try:
                number = index(one)
            except TypeError:
                raise TypeError(
                    f"{one!r} is a {type(one).__name__}; pass names or numbers of parameters, one by one"
                ) from None
        if number is None or not 0 <= number < len(self._names):
            raise NotFound(f"there is no parameter {one!r}; {there_are(one, self._names)}")
        return number

    def ready_all(self) -> None:
        """Mark all remaining gradients as ready. Call it once per step, before `wait`."""
        try:
            _core.ddp_ready_all(self._handle)
        except UserError as error:
            raise error from self._hook_error()

    def wait(self) -> None:
        """End the backward pass: return when every gradient is the average (or sum) over the ranks. Collective.

        Without synchronisation (see `no_sync`) it returns immediately.

        Raises
        ------
        InvalidState
            Some gradients were never marked ready; the message names them. Mark them and call `wait` again.
        TesseraTimeout, PeerLost, Aborted
            A rank is late or lost; the message names it.
        UserError
            A hook failed; its exception is the cause.
        """
        try:
            _core.ddp_wait(self._handle)
        except UserError as error:
            raise error from self._hook_error()

    def _hook_error(self) -> BaseException | None:
        return self._hook_failure[0] if self._hook_failure else None

    def set_stream(self, stream: Stream = None) -> None:
        """Name the CUDA stream on which the trainer writes gradients and uses the reduced ones.

        For parameters on a device, everything is in its order: a gradient that is marked ready is what this stream has
        written by then, and what it gets after `wait` sees the reduced gradients. No call of a step waits for the
        device.

        Parameters
        ----------
        stream : stream, optional
            PyTorch's, CuPy's, any object with ``__cuda_stream__``, or an address. None, as at first, is the device's
            default stream. It must exist until another one is set. A new one continues after what the model did on the
            previous one.

        Raises
        ------
        InvalidArgument
            The stream is of another device, or the parameters are on the CPU.
        InvalidState
            In the middle of a step.
        """
        _core.ddp_set_stream(self._handle, stream_of(stream))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps in this block reduce nothing; the trainer adds to the gradients in the views.

        The first step after the block reduces the sums. A parameter that had a gradient in any of these steps counts
        as used. Enter and leave the block between steps, on every rank alike.
        """
        former = self._syncs
        self.set_sync(False)
        try:
            yield
        finally:
            self.set_sync(former)

    def set_sync(self, sync: bool) -> None:
        """Set whether the following steps reduce; see `no_sync`.

        Raises
        ------
        InvalidState
            In the middle of a step.
        """
        _core.ddp_set_sync(self._handle, sync)
        self._syncs = bool(sync)

    def used(self, which: str | int) -> bool:
        """Whether any rank used a parameter in the last reduced step; if none did, its gradient was kept."""
        return _core.ddp_used(self._handle, self._number(which))

    def stats(self) -> list[BucketStats]:
        """Statistics of each bucket in the last reduced step, in the order of reduction.

        Times are 0 before the first step and after a step that rebuilt the buckets. On a device they are
        by the device's clock, and the first call after a step waits for it.
        """
        return [BucketStats(*_core.ddp_stats(self._handle, i)) for i in range(_core.ddp_bucket_count(self._handle))]

    def set_hook(self, hook: Callable[[Bucket], object] | None) -> None:
        """Let `hook` reduce the buckets of the following steps; None restores the reduction that the options select.

        The hook writes the final reduced gradients in place into ``bucket.grads``, with collectives of ``bucket.comm``
        that are the same on every rank. It does its own averaging. It runs on a thread of the library, one bucket after
        another; on a rank that has joined, with zero gradients. An exception fails the step on every rank.

        Raises
        ------
        InvalidState
            In the middle of a step.
        """
        if hook is None:
            _core.ddp_set_hook(self._handle, None)
            return
        if not callable(hook):
            raise TypeError(f"the hook is {hook!r}; it must be a function that takes a Bucket")
        model = weakref.ref(self)  # the library keeps the callback, which must not keep the model
        failure = self._hook_failure
        names, hook_fn = self._names, hook

        def reduce(bucket: int, params: list[int], handle: _core.Comm, stream: int) -> None:
            comm = Comm._adopt(handle)
            try:
                ddp = model()
                if ddp is None:
                    raise RuntimeError("the model was garbage-collected")
                some = tuple(names[i] for i in params)
                hook_fn(Bucket(bucket, some, tuple(ddp.grads[name] for name in some), comm, stream))
            except BaseException as error:
                failure.append(error)
                raise
            finally:
                _core.comm_destroy(handle)  # lent for this call

        _core.ddp_set_hook(self._handle, reduce)

    def step_in_backward(self, optimizer: Optimizer) -> None:
        """Let an optimizer of this model update the parameters of each bucket in the background, once it is reduced.

        After `wait` all parameters are updated, with the same bits as ``optimizer.step()`` would give, which is refused
        from now on. Do not use a parameter between the `ready` of its gradient and the end of `wait`.

        Raises
        ------
        InvalidArgument
            The optimizer was not created from this model.
        InvalidState
            In the middle of a step, or another optimizer already steps in backward.
        """
        _core.ddp_step_in_backward(self._handle, optimizer._handle)

    def shared_step(self) -> int:
        """The step, counted from the model's creation, of this host's shared parameters if they are consistent.

        For the survivors of a rank's death: all of them call it once they have formed a new communicator. If the
        parameters are consistent and of the same step on all hosts, they may be saved or registered again; otherwise
        discard them and load the last checkpoint.

        Raises
        ------
        Corrupt
            Slices are of different steps; the message names them.
        InvalidState
            The model was created without `share_params`, or is in the middle of a step.
        """
        return _core.ddp_shared_step(self._handle)

    def register_buffers(self, buffers: Params) -> None:
        """Register the model's buffers, such as running means and counters. Collective; may be called once.

        Every rank gets the values of rank 0.

        Parameters
        ----------
        buffers : mapping of str to array, or sequence
            Contiguous arrays of any dtype, the same on every rank, in CPU memory or on the parameters' device. Their
            memory is used until this object is freed.

        Raises
        ------
        Mismatch
            The ranks registered different buffers; the message names the first difference.
        """
        names, arrays = named(buffers, "buffers")
        _core.ddp_register_buffers(self._handle, names, [tensor(array) for array in arrays])

    def broadcast_buffers(self) -> None:
        """Broadcast the buffers of rank 0, or of the lowest rank that has not joined, in one operation. Collective."""
        _core.ddp_broadcast_buffers(self._handle)

    def join(self, *, sync_params: bool = True) -> None:
        """Join the steps of the other ranks with zero gradients until all ranks have joined.

        Every rank calls it when it has no data left, however many steps it made. A new round of steps may begin
        afterwards. Gradients are then zero.

        Parameters
        ----------
        sync_params : bool
            If ranks made different numbers of steps, all get the parameters and buffers of the lowest rank that made
            the most steps.

        Raises
        ------
        InvalidState
            The model was created without `join`, or is in the middle of a step.
        TesseraTimeout, PeerLost, Aborted
            A rank is lost, or late, even between two of its steps; the message names it.
        """
        try:
            _core.ddp_join(self._handle, sync_params)
        except UserError as error:
            raise error from self._hook_error()

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        _core.ddp_zero_grad(self._handle)

    def close(self) -> None:
        """Refuse further calls. The memory is freed once no gradient view and no optimizer uses it."""
        _core.ddp_destroy(self._handle)

    def __repr__(self) -> str:
        return f"<tessera.DDP of {len(self._names)} parameters{' (closed)' if self.closed else ''}>"
