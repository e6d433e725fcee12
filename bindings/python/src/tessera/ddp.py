"""Data-parallel training: the trainer says which gradients are ready, the library averages them meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from . import _core
from ._base import Closable, checked, given
from .comm import Comm, op_of
from .errors import NotFound
from .tensor import ArrayLike, array_over, tensor

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["DDP", "Params"]

Params = Mapping[str, ArrayLike] | Sequence[tuple[str, ArrayLike]] | Sequence[ArrayLike]
"""Named arrays: a mapping, (name, array) pairs, or bare arrays, which are named "0", "1", ..."""


def named(params: Params | Iterable[Any]) -> tuple[list[str], list[Any]]:
    """Names and arrays of parameters, in their order."""
    if isinstance(params, Mapping):
        return list(params), list(params.values())
    names, arrays = [], []
    for index, param in enumerate(params):
        pair = isinstance(param, tuple) and len(param) == 2 and isinstance(param[0], str)
        names.append(param[0] if pair else str(index))
        arrays.append(param[1] if pair else param)
    return names, arrays


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
    bucket_bytes : int, optional
        Bytes after which a bucket of gradients is closed.
    first_bucket_bytes : int, optional
        The same for the first bucket of each dtype.
    op : {"avg", "sum"}, optional
        What becomes of the ranks' gradients.

    Raises
    ------
    Mismatch
        The ranks registered different parameters; the first difference is named.
    InvalidArgument
        An array is not contiguous, not of a floating-point type, or a name occurs twice.
    """

    _handle: _core.Ddp
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
        names, arrays = named(params)
        options = given(
            bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes, op=None if op is None else op_of(op)
        )
        self._handle = _core.ddp_create(
            checked(comm, Comm)._handle, names, [tensor(array) for array in arrays], options
        )
        count = _core.ddp_param_count(self._handle)
        self._names = tuple(_core.ddp_param(self._handle, i)[0] for i in range(count))
        self._index = {name: i for i, name in enumerate(names)} | {name: i for i, name in enumerate(self._names)}
        self._params = MappingProxyType(dict(zip(self._names, arrays, strict=True)))
        self._grads = MappingProxyType(
            {name: array_over(*_core.ddp_grad(self._handle, i)) for i, name in enumerate(self._names)}
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of registration."""
        return self._names

    @property
    def params(self) -> Mapping[str, Any]:
        """The arrays that were registered, by name."""
        return self._params

    @property
    def grads(self) -> Mapping[str, npt.NDArray[Any]]:
        """The gradient of each parameter: a NumPy view into a bucket, of the parameter's dtype and shape.

        Zeros at first; the same memory at every step. Not to be touched between `ready` and the end of `wait`.
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
            index = one if isinstance(one, int) else self._index.get(one)
            if index is None or index < 0:
                raise NotFound(f"there is no parameter {one!r}; there are {', '.join(self._names)}")
            _core.ddp_ready(self._handle, index)

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
