"""Data-parallel training: the trainer says which gradients are ready, the library averages them meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from . import _core, _options
from ._base import Closable, checked, there_are
from ._given import raw, takes
from .comm import Comm
from .errors import InvalidArgument, NotFound, UserError
from .tensor import ArrayLike, array_over, is_array, tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._base_optimizer import Optimizer
    from ._options import DDPOptions

__all__ = ["DDP", "Bucket", "BucketStats", "Grads", "Params"]

Params = Mapping[str, ArrayLike] | Sequence[tuple[str, ArrayLike]] | Sequence[ArrayLike]
"""Named arrays: a mapping, (name, array) pairs, or bare arrays, which are named "0", "1", ..."""


def named(params: Params | Iterable[Any], what: str = "params") -> tuple[list[str], list[Any]]:
    """Names and arrays of parameters, in their order."""
    if isinstance(params, Mapping):
        for name in params:
            if not isinstance(name, str):
                raise TypeError(f"{what} has the key {name!r}; parameters are named by str")
        return list(params), list(params.values())
    if is_array(params) or isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
        raise TypeError(f"{what} is a {type(params).__name__}; a dict of arrays is wanted, {{'weight': weight, ...}}")
    names, arrays = [], []
    for number, param in enumerate(params):
        pair = isinstance(param, tuple) and len(param) == 2 and isinstance(param[0], str)
        names.append(param[0] if pair else str(number))
        arrays.append(param[1] if pair else param)
    return names, arrays


def parameter(name: str, array: ArrayLike) -> _core.Tensor:
    """An array as the library takes it; what is wrong with it is said of the parameter. One that is not contiguous is
    for the library to refuse: it tells all ranks."""
    try:
        return _core.Tensor(array, strided=True)
    except (InvalidArgument, TypeError) as error:
        raise type(error)(f"parameter {name!r}: {error}") from None


class Grads(Mapping[str, "npt.NDArray[Any]"]):
    """Gradients by name: views of where they are to be written. Assigning to a name copies into the view."""

    __slots__ = ("_of", "_views")

    def __init__(self, views: Mapping[str, npt.NDArray[Any]], of: str) -> None:
        self._views = views
        self._of = of  # in messages: "the model"

    def _no(self, name: object) -> str:
        return f"{self._of} has no gradient of {name!r}; {there_are(name, self._views)}"

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._views:
            raise KeyError(self._no(name))
        return self._views[name]

    def __setitem__(self, name: str, value: ArrayLike) -> None:
        """Copy an array of the gradient's shape and dtype into it."""
        if name not in self._views:
            raise NotFound(self._no(name))
        view = self._views[name]
        if value is view:  # grads[name] += ... has written already
            return
        array = np.asarray(value)
        if array.shape != view.shape or array.dtype != view.dtype:
            raise InvalidArgument(
                f"the gradient of {name!r} has shape {view.shape} and dtype {view.dtype}; given was shape "
                f"{array.shape} and dtype {array.dtype}. grads[{name!r}][...] = value converts and broadcasts"
            )
        view[...] = array

    def __contains__(self, name: object) -> bool:  # also where a view is lent no more
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __repr__(self) -> str:
        return f"<gradients of {', '.join(self._views)}>"


class BucketStats(NamedTuple):
    """A bucket in the last step that was reduced. Times are nanoseconds since the step's first `ready` on this rank."""

    size_bytes: int
    """Padding included."""
    params: int
    """How many parameters it holds."""
    ready_ns: int
    """Its last gradient was ready."""
    start_ns: int
    """Its reduction began."""
    end_ns: int
    """Its reduction was done."""
    exposed_ns: int
    """Of the time of `DDP.wait`, what was spent waiting for this bucket: not hidden by backward."""


@dataclass(frozen=True)
class Bucket:
    """A bucket whose gradients are all there, for the length of a hook's call."""

    index: int
    names: tuple[str, ...]
    """Of its parameters."""
    grads: tuple[npt.NDArray[Any], ...]
    """Their gradients, to be changed in place."""
    comm: Comm
    """The model's ranks: its synchronous collectives run at once; asynchronous ones raise `InvalidState`."""


@takes(_options.DDP)
class DDP(Closable):
    """A model registered for data-parallel training. Collective: afterwards every rank has rank 0's values.

    A step: write the gradients into `grads`, say `ready` for each as soon as it is written (or `ready_all` at the end),
    then `wait`; now they are the average over the ranks, and an optimizer may step.

    Parameters
    ----------
    comm : Comm
        The ranks that hold a replica.
    params : mapping of str to array, or sequence
        The parameters, the same on every rank and in the same order: contiguous floating-point arrays. Their memory is
        used until this object is gone. A leading ``module.`` or ``_orig_mod.`` of a name is stripped.
    <options>

    Raises
    ------
    Mismatch
        The ranks registered different parameters; the first difference is named.
    InvalidArgument
        An array is not contiguous, not of a floating-point type, or a name occurs twice.
    Unsupported
        `share_params` with what it cannot be combined with, which is named.
    """

    _handle: _core.DDP
    _names: tuple[str, ...] = ()
    _syncs = True

    def __init__(
        self,
        comm: Comm,
        params: Params,
        **options: Unpack[DDPOptions],
    ) -> None:
        handle = checked(comm, Comm, "comm", params)._handle
        names, arrays = named(params)
        self._handle = _core.ddp_create(
            handle,
            names,
            [parameter(name, array) for name, array in zip(names, arrays, strict=True)],
            **raw(_options.DDP, options),
        )
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
        """The arrays that were registered, by name; with `share_params`, NumPy views into the host's copy.

        Views are written by the optimizer and by loads alone.
        """
        return self._params

    @property
    def grads(self) -> Grads:
        """The gradient of each parameter: a NumPy view into a bucket, of the parameter's dtype and shape.

        Zeros at first; the same memory at every step. ``grads["w"] = g`` copies `g`, which must have the same shape and
        dtype, into the view; ``grads["w"][...] = g`` broadcasts and converts as NumPy does. Not to be touched between
        `ready` and the end of `wait`.
        """
        return self._grads

    def ready(self, *which: str | int) -> None:
        """Say that gradients are written, by name or by number; in any order, each once a step.

        Raises
        ------
        InvalidState
            A gradient was said ready twice.
        NotFound
            There is no such parameter.
        """
        for one in which:
            _core.ddp_ready(self._handle, self._number(one))

    def _number(self, one: str | int) -> int:
        if isinstance(one, str):
            number = self._index.get(one)
        else:
            try:
                number = index(one)
            except TypeError:
                raise TypeError(
                    f"{one!r} is a {type(one).__name__}; names and numbers of parameters are taken, one by one"
                ) from None
        if number is None or not 0 <= number < len(self._names):
            raise NotFound(f"there is no parameter {one!r}; {there_are(one, self._names)}")
        return number

    def ready_all(self) -> None:
        """Say that every gradient not yet said is written. Once a step: `wait` ends it."""
        _core.ddp_ready_all(self._handle)

    def wait(self) -> None:
        """End the backward pass: returns when every gradient is the average (or sum) over the ranks. Collective.

        Without synchronisation (see `no_sync`) it returns at once.

        Raises
        ------
        InvalidState
            Some parameters were never said ready; they are named, and the step may be completed and waited for again.
        TesseraTimeout, PeerLost, Aborted
            A rank is late or lost; it is named.
        UserError
            A hook failed; what it raised is the cause.
        """
        self._with_hook_failure(_core.ddp_wait, self._handle)

    def _with_hook_failure(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except UserError as error:
            raise error from (self._hook_failure[0] if self._hook_failure else None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps in this block reduce nothing: the trainer adds to the gradients that are in the views.

        The first step after it reduces the sums. A parameter that had a gradient in any of these steps counts
        as used. To be entered and left between steps, on every rank alike.
        """
        former = self._syncs
        self.set_sync(False)
        try:
            yield
        finally:
            self.set_sync(former)

    def set_sync(self, sync: bool) -> None:
        """Whether the following steps reduce; see `no_sync`.

        Raises
        ------
        InvalidState
            In the middle of a step.
        """
        _core.ddp_set_sync(self._handle, sync)
        self._syncs = bool(sync)

    def used(self, which: str | int) -> bool:
        """Whether any rank used a parameter in the last step that was reduced; if none did, its gradient was kept."""
        return _core.ddp_used(self._handle, self._number(which))

    def stats(self) -> list[BucketStats]:
        """What became of each bucket, in the order of reduction, in the last step that was reduced.

        Times are 0 before the first step, and after one that rebuilt the buckets.
        """
        return [BucketStats(*_core.ddp_stats(self._handle, i)) for i in range(_core.ddp_bucket_count(self._handle))]

    def set_hook(self, hook: Callable[[Bucket], object] | None) -> None:
        """Let `hook` reduce the buckets of the following steps in place of what the options say; None: as they say.

        It leaves in ``bucket.grads`` what every rank shall have (it averages itself), by collectives of ``bucket.comm``
        that are the same on every rank. It runs on a thread of the library, bucket after bucket; on a rank that has
        joined with gradients of zero. What it raises fails the step on every rank.

        Raises
        ------
        InvalidState
            In the middle of a step.
        """
        if hook is None:
            _core.ddp_set_hook(self._handle, None)
            return
        if not callable(hook):
            raise TypeError(f"the hook is {hook!r}; a function of a Bucket is wanted")
        model = weakref.ref(self)  # the library keeps the callback, which must not keep the model
        failure = self._hook_failure
        names, hook_fn = self._names, hook

        def reduce(bucket: int, params: list[int], handle: _core.Comm) -> None:
            comm = Comm._adopt(handle)
            try:
                ddp = model()
                if ddp is None:
                    raise RuntimeError("the model is gone")
                some = tuple(names[i] for i in params)
                hook_fn(Bucket(bucket, some, tuple(ddp.grads[name] for name in some), comm))
            except BaseException as error:
                failure.append(error)
                raise
            finally:
                _core.comm_destroy(handle)  # lent for this call

        _core.ddp_set_hook(self._handle, reduce)

    def step_in_backward(self, optimizer: Optimizer) -> None:
        """Let an optimizer of this model update the parameters of a bucket as soon as it is reduced, in the background.

        After `wait` all are updated, to the same bits as by ``optimizer.step()`` afterwards, which is refused
        from now on. Parameters must not be used between the `ready` of their gradient and the end of `wait`.

        Raises
        ------
        InvalidArgument
            The optimizer was not made of this model.
        InvalidState
            In the middle of a step, or another optimizer steps already.
        """
        _core.ddp_step_in_backward(self._handle, optimizer._handle)

    def shared_step(self) -> int:
        """The step, counted from the model's creation, that the copy of this host's ranks is of as a whole.

        For the survivors of a rank's death, who ask once they have met again, all of them. If it is whole and of one
        step on all hosts it may be saved, or registered anew; otherwise it is discarded and the last checkpoint loaded.

        Raises
        ------
        Corrupt
            Slices are of different steps, which the message tells.
        InvalidState
            The model was created without `share_params`, or is in the middle of a step.
        """
        return _core.ddp_shared_step(self._handle)

    def register_buffers(self, buffers: Params) -> None:
        """Register what the model has besides parameters: running means, counters. Once. Collective.

        Every rank gets the values of rank 0.

        Parameters
        ----------
        buffers : mapping of str to array, or sequence
            Contiguous arrays of any dtype, the same on every rank. Their memory is used until this object is gone.

        Raises
        ------
        Mismatch
            The ranks registered different ones; the first difference is named.
        """
        names, arrays = named(buffers, "buffers")
        _core.ddp_register_buffers(self._handle, names, [tensor(array) for array in arrays])

    def broadcast_buffers(self) -> None:
        """Give every rank the buffers of rank 0, or of the lowest that has not joined, in one broadcast. Collective."""
        _core.ddp_broadcast_buffers(self._handle)

    def join(self, *, sync_params: bool = True) -> None:
        """This rank has no data left: take part in the steps of the others, adding zeros, until all ranks have joined.

        Every rank calls it once it has no data, however many steps it made; then a new round of steps may begin.
        Gradients are zero afterwards.

        Parameters
        ----------
        sync_params : bool
            If ranks made different numbers of steps, all get the parameters and buffers of the lowest rank
            that made most.

        Raises
        ------
        InvalidState
            The model was created without `join`, or in the middle of a step.
        TesseraTimeout, PeerLost, Aborted
            A rank is late, also between two of its steps, or lost; it is named.
        """
        self._with_hook_failure(_core.ddp_join, self._handle, sync_params)

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        _core.ddp_zero_grad(self._handle)

    def close(self) -> None:
        """Refuse further calls. The memory is freed when no gradient view and no optimizer uses it any longer."""
        _core.ddp_destroy(self._handle)

    def __repr__(self) -> str:
        return f"<tessera.DDP of {len(self._names)} parameters{' (closed)' if self.closed else ''}>"
