"""Data-parallel training: the trainer says which gradients are ready, the library averages them meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import _core
from ._base import Closable, checked
from .collectives import op_of
from .comm import Comm
from .errors import InvalidArgument, NotFound
from .tensor import ArrayLike, array_over, is_array, tensor

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["DDP", "Grads", "Params"]

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


def _parameter(name: str, array: ArrayLike) -> _core.Tensor:
    try:
        return tensor(array)
    except (InvalidArgument, TypeError) as error:
        raise type(error)(f"parameter {name!r}: {error}") from None


class Grads(Mapping[str, "npt.NDArray[Any]"]):
    """The gradients of a `DDP` by name: views into its buckets. Assigning to a name copies into the view."""

    __slots__ = ("_views",)

    def __init__(self, views: dict[str, npt.NDArray[Any]]) -> None:
        self._views = views

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._views[name]

    def __setitem__(self, name: str, value: ArrayLike) -> None:
        """Copy an array of the gradient's shape and dtype into it."""
        view = self._views.get(name)
        if view is None:
            raise NotFound(f"there is no parameter {name!r}; there are {', '.join(self._views)}")
        if value is view:  # grads[name] += ... has written already
            return
        array = np.asarray(value)
        if array.shape != view.shape or array.dtype != view.dtype:
            raise InvalidArgument(
                f"the gradient of {name!r} has shape {view.shape} and dtype {view.dtype}; given was shape "
                f"{array.shape} and dtype {array.dtype}. grads[{name!r}][...] = value converts and broadcasts"
            )
        view[...] = array

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __repr__(self) -> str:
        return f"<gradients of {', '.join(self._views)}>"


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
    bucket_bytes : int, default 25 MiB
        Bytes after which a bucket of gradients is closed.
    first_bucket_bytes : int, default 1 MiB
        The same for the first bucket of each dtype, which is reduced first.
    op : {"avg", "sum"}, default "avg"
        What becomes of the ranks' gradients.

    Raises
    ------
    Mismatch
        The ranks registered different parameters; the first difference is named.
    InvalidArgument
        An array is not contiguous, not of a floating-point type, or a name occurs twice.
    """

    _handle: _core.DDP
    _names: tuple[str, ...] = ()

    def __init__(
        self,
        comm: Comm,
        params: Params,
        *,
        bucket_bytes: int | None = None,
        first_bucket_bytes: int | None = None,
        op: Literal["avg", "sum"] | None = None,
    ) -> None:
        handle = checked(comm, Comm, "comm", params)._handle
        names, arrays = named(params)
        self._handle = _core.ddp_create(
            handle,
            names,
            [_parameter(name, array) for name, array in zip(names, arrays, strict=True)],
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            op=None if op is None else op_of(op),
        )
        count = _core.ddp_param_count(self._handle)
        self._names = tuple(_core.ddp_param(self._handle, i)[0] for i in range(count))
        self._index = {name: i for i, name in enumerate(names)} | {name: i for i, name in enumerate(self._names)}
        self._params = MappingProxyType(dict(zip(self._names, arrays, strict=True)))
        self._grads = Grads({name: array_over(*_core.ddp_grad(self._handle, i)) for i, name in enumerate(self._names)})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of registration."""
        return self._names

    @property
    def params(self) -> Mapping[str, Any]:
        """The arrays that were registered, by name."""
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
            if isinstance(one, str):
                number = self._index.get(one)
            else:
                try:
                    number = index(one)
                except TypeError:
                    raise TypeError(
                        f"{one!r} is a {type(one).__name__}; ready takes names and numbers of parameters, one by one"
                    ) from None
            if number is None or not 0 <= number < len(self._names):
                raise NotFound(f"there is no parameter {one!r}; there are {', '.join(self._names)}")
            _core.ddp_ready(self._handle, number)

    def ready_all(self) -> None:
        """Say that every gradient not yet said is written."""
        _core.ddp_ready_all(self._handle)

    def wait(self) -> None:
        """End the backward pass: returns when every gradient is the average (or sum) over the ranks. Collective.

        Raises
        ------
        InvalidState
            Some parameters were never said ready; they are named, and the step may be completed and waited for again.
        TesseraTimeout, PeerLost, Aborted
            A rank is late or lost; it is named.
        """
        _core.ddp_wait(self._handle)

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        _core.ddp_zero_grad(self._handle)

    def close(self) -> None:
        """Refuse further calls. The memory is freed when no gradient view and no optimizer uses it any longer."""
        _core.ddp_destroy(self._handle)

    def __repr__(self) -> str:
        return f"<tessera.DDP of {len(self._names)} parameters{' (closed)' if self.closed else ''}>"
