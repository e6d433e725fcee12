"""The ranks of a job and their collectives, over arrays in place, synchronous or as `Work`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from . import _core
from ._base import Closable, Timeout, checked, given, milliseconds
from .errors import InvalidArgument, TesseraError
from .store import Store
from .tensor import ArrayLike, DTypeLike, array_over, dtype_of, tensor, tensors
from .work import Work

__all__ = ["Comm", "ReduceOp", "init"]

ReduceOp = Literal["sum", "avg", "min", "max", "prod"]
"""Reductions; ``"avg"`` divides the sum by the number of ranks."""

_OPS = {"sum": 1, "avg": 2, "min": 3, "max": 4, "prod": 5}


def op_of(op: str) -> int:
    """The library's number of a reduction."""
    if op not in _OPS:
        raise InvalidArgument(f"op {op!r}; {', '.join(_OPS)} are known")
    return _OPS[op]


def _options(timeout: Timeout, spin_count: int | None, backend: str | None, name: str | None) -> dict[str, object]:
    return given(
        timeout_ms=None if timeout is None else milliseconds(timeout),
        spin_count=spin_count,
        backend=backend,
        name=name,
    )


def init(
    *,
    timeout: Timeout = None,
    backend: str | None = None,
    spin_count: int | None = None,
    name: str | None = None,
) -> Comm:
    """Join the job that the environment describes.

    ``tessera run`` and torchrun, mpirun and srun are understood; with none of them the job is this process alone.
    Collective: returns when all ranks have come.

    Parameters
    ----------
    timeout : float or timedelta, optional
        Deadline of each collective, in seconds; by default ``TESSERA_TIMEOUT_MS`` or 600.
    backend : str, optional
        ``"auto"``, ``"shm"``, ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``; by default ``TESSERA_BACKEND`` or auto.
    spin_count : int, optional
        Busy turns before a waiting rank yields; -1 takes it from ranks and cores.
    name : str, optional
        In messages and logs.

    Returns
    -------
    Comm
        Best used in a ``with`` block: at its end the ranks part in order; if it is left by an exception the peers are
        told at once.

    Raises
    ------
    TesseraTimeout
        A rank never came.
    PermissionDenied
        There is no job token, or it was refused.
    """
    return Comm._adopt(_core.comm_from_env(_options(timeout, spin_count, backend, name)))


class Comm(Closable):
    """The ranks of a group. Made by `init`, `Comm.create`, `split` or a `Mesh`.

    Collectives must be called by all ranks in the same order. They work in place or into arrays that the caller gives,
    which must be contiguous and lie in the CPU's memory: NumPy arrays, anything with the buffer protocol,
    ``__array_interface__`` or ``__dlpack__``. Arrays from `empty` and `buffer` are reached by the peers without a copy.

    With ``async_op=True`` a collective returns a `Work` at once; the arrays must not be touched until it is done.

    Each collective may raise

    - `InvalidArgument`: a dtype, shape or device that it cannot take
    - `Mismatch`: the ranks call different things, noticed before data moves
    - `TesseraTimeout`: a rank did not come in time; it is named
    - `PeerLost`: a rank died; it is named
    - `Aborted`: an earlier failure, which is the ``__cause__``
    - `InvalidState`: this object is closed

    ``dtype=`` says what the bits of an array are where the array cannot: bfloat16 in a ``uint16`` array.
    """

    _handle: _core.Comm
    _children: list[weakref.ref[Closable]]
    _rank: int
    _world_size: int
    _warns = True

    def __init__(self) -> None:
        raise TypeError("use tessera.init(), Comm.create(), comm.split() or a Mesh")

    @classmethod
    def _adopt(cls, handle: _core.Comm) -> Comm:
        comm = cls.__new__(cls)
        comm._handle = handle
        comm._children = []
        comm._rank = _core.comm_rank(handle)
        comm._world_size = _core.comm_world_size(handle)
        return comm

    @classmethod
    def create(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout: Timeout = None,
        backend: str | None = None,
        spin_count: int | None = None,
        name: str | None = None,
    ) -> Comm:
        """Join `world_size` ranks that use the same store. Collective.

        Parameters
        ----------
        store : Store
            Used until the communicator is closed.
        rank : int
            0 to ``world_size - 1``, each once.
        world_size : int
            1 to 4096.
        timeout, backend, spin_count, name
            As `init` takes them.

        Raises
        ------
        TesseraTimeout
            A rank never came; the message names it.
        """
        options = _options(timeout, spin_count, backend, name)
        return cls._adopt(_core.comm_create(checked(store, Store)._handle, rank, world_size, options))

    @property
    def rank(self) -> int:
        """This rank's number, 0 to ``world_size - 1``."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    @property
    def transport(self) -> str:
        """The transport in use: ``"shm"``, ``"gloo"`` or ``"self"``."""
        return _core.comm_transport(self._handle)

    @property
    def error(self) -> TesseraError | None:
        """What failed the communicator; None while it is well."""
        return _core.comm_error(self._handle)

    def split(
        self,
        color: int,
        key: int = 0,
        *,
        timeout: Timeout = None,
        backend: str | None = None,
        spin_count: int | None = None,
        name: str | None = None,
    ) -> Comm | None:
        """Divide the ranks into groups; those of one `color` form one, ordered by `key`, then by rank. Collective.

        Parameters
        ----------
        color : int
            The group; negative: this rank joins none.
        key : int
            The order inside the group.
        timeout, backend, spin_count, name
            As `init` takes them; by default those of this communicator.

        Returns
        -------
        Comm or None
            This rank's group, which does not need this communicator any longer; None for a negative color.
        """
        handle = _core.comm_split(self._handle, color, key, _options(timeout, spin_count, backend, name))
        return None if handle is None else self._own(Comm._adopt(handle))

    def buffer(self, size: int) -> npt.NDArray[np.uint8]:
        """Allocate bytes that the peers reach without a copy. Collective.

        Parameters
        ----------
        size : int
            Bytes, the same on every rank.

        Returns
        -------
        ndarray of uint8, shape (size,)
            Zeros. The memory lives as long as the array or any view of it.
        """
        handle = _core.buffer_create(self._handle, size)
        return array_over(_core.buffer_data(handle), 6, (size,))

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> npt.NDArray[Any]:
        """Allocate an array that the peers reach without a copy. Collective.

        Parameters
        ----------
        shape : int or sequence of int
            The same on every rank.
        dtype : DType, NumPy type or name
            The same on every rank.

        Returns
        -------
        ndarray
            Zeros, contiguous, aligned to 4096 bytes.
        """
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = dtype_of(dtype)
        items = 1
        for length in dims:
            items *= length
        handle = _core.buffer_create(self._handle, items * kind.numpy.itemsize)
        return array_over(_core.buffer_data(handle), kind, dims)

    @overload
    def all_reduce(
        self,
        tensors: ArrayLike | Sequence[ArrayLike],
        op: ReduceOp = "sum",
        *,
        async_op: Literal[False] = False,
        dtype: DTypeLike | None = None,
    ) -> None: ...
    @overload
    def all_reduce(
        self,
        tensors: ArrayLike | Sequence[ArrayLike],
        op: ReduceOp = "sum",
        *,
        async_op: Literal[True],
        dtype: DTypeLike | None = None,
    ) -> Work: ...
    def all_reduce(
        self,
        tensors: ArrayLike | Sequence[ArrayLike],
        op: ReduceOp = "sum",
        *,
        async_op: bool = False,
        dtype: DTypeLike | None = None,
    ) -> Work | None:
        """Reduce arrays over the ranks, in place; every rank gets the same bits.

        Parameters
        ----------
        tensors : array or sequence of arrays
            Of one dtype, in the same order and of the same sizes on every rank.
        op : {"sum", "avg", "min", "max", "prod"}
            The reduction.
        """
        return _work(_core.comm_all_reduce(self._handle, _tensors(tensors, dtype), op_of(op), async_op))

    @overload
    def reduce_scatter(
        self,
        input: ArrayLike,
        output: ArrayLike,
        op: ReduceOp = "sum",
        *,
        async_op: Literal[False] = False,
        dtype: DTypeLike | None = None,
    ) -> None: ...
    @overload
    def reduce_scatter(
        self,
        input: ArrayLike,
        output: ArrayLike,
        op: ReduceOp = "sum",
        *,
        async_op: Literal[True],
        dtype: DTypeLike | None = None,
    ) -> Work: ...
    def reduce_scatter(
        self,
        input: ArrayLike,
        output: ArrayLike,
        op: ReduceOp = "sum",
        *,
        async_op: bool = False,
        dtype: DTypeLike | None = None,
    ) -> Work | None:
        """Reduce `input` and leave the r-th of ``world_size`` equal parts on rank r.

        Parameters
        ----------
        input : array
            ``world_size`` times as many elements as `output`.
        output : array
            May be the r-th part of `input`.
        op : {"sum", "avg", "min", "max", "prod"}
            The reduction.
        """
        return _work(
            _core.comm_reduce_scatter(self._handle, _input(input, dtype), _tensor(output, dtype), op_of(op), async_op)
        )

    @overload
    def all_gather(
        self, input: ArrayLike, output: ArrayLike, *, async_op: Literal[False] = False, dtype: DTypeLike | None = None
    ) -> None: ...
    @overload
    def all_gather(
        self, input: ArrayLike, output: ArrayLike, *, async_op: Literal[True], dtype: DTypeLike | None = None
    ) -> Work: ...
    def all_gather(
        self, input: ArrayLike, output: ArrayLike, *, async_op: bool = False, dtype: DTypeLike | None = None
    ) -> Work | None:
        """Concatenate all ranks' `input` in rank order.

        Parameters
        ----------
        input : array
            The same number of elements on every rank.
        output : array
            ``world_size`` times as many elements; `input` may be its r-th part.
        """
        return _work(_core.comm_all_gather(self._handle, _input(input, dtype), _tensor(output, dtype), async_op))

    @overload
    def all_gather_v(
        self,
        input: ArrayLike,
        outputs: Sequence[ArrayLike],
        *,
        async_op: Literal[False] = False,
        dtype: DTypeLike | None = None,
    ) -> None: ...
    @overload
    def all_gather_v(
        self, input: ArrayLike, outputs: Sequence[ArrayLike], *, async_op: Literal[True], dtype: DTypeLike | None = None
    ) -> Work: ...
    def all_gather_v(
        self, input: ArrayLike, outputs: Sequence[ArrayLike], *, async_op: bool = False, dtype: DTypeLike | None = None
    ) -> Work | None:
        """Gather inputs of different lengths.

        Parameters
        ----------
        input : array
            Any number of elements.
        outputs : sequence of ``world_size`` arrays
            ``outputs[r]`` receives rank r's input; the same lengths on every rank.
        """
        return _work(
            _core.comm_all_gather_v(self._handle, _input(input, dtype), _tensors(list(outputs), dtype), async_op)
        )

    @overload
    def broadcast(
        self,
        tensors: ArrayLike | Sequence[ArrayLike],
        root: int = 0,
        *,
        async_op: Literal[False] = False,
        dtype: DTypeLike | None = None,
    ) -> None: ...
    @overload
    def broadcast(
        self,
        tensors: ArrayLike | Sequence[ArrayLike],
        root: int = 0,
        *,
        async_op: Literal[True],
        dtype: DTypeLike | None = None,
    ) -> Work: ...
    def broadcast(
        self,
        tensors: ArrayLike | Sequence[ArrayLike],
        root: int = 0,
        *,
        async_op: bool = False,
        dtype: DTypeLike | None = None,
    ) -> Work | None:
        """Give every rank the root's arrays, in place.

        Parameters
        ----------
        tensors : array or sequence of arrays
            Of one dtype, of the same sizes on every rank.
        root : int
            The rank whose values all get.
        """
        return _work(_core.comm_broadcast(self._handle, _tensors(tensors, dtype), root, async_op))

    @overload
    def reduce(
        self,
        input: ArrayLike,
        output: ArrayLike | None = None,
        op: ReduceOp = "sum",
        root: int = 0,
        *,
        async_op: Literal[False] = False,
        dtype: DTypeLike | None = None,
    ) -> None: ...
    @overload
    def reduce(
        self,
        input: ArrayLike,
        output: ArrayLike | None = None,
        op: ReduceOp = "sum",
        root: int = 0,
        *,
        async_op: Literal[True],
        dtype: DTypeLike | None = None,
    ) -> Work: ...
    def reduce(
        self,
        input: ArrayLike,
        output: ArrayLike | None = None,
        op: ReduceOp = "sum",
        root: int = 0,
        *,
        async_op: bool = False,
        dtype: DTypeLike | None = None,
    ) -> Work | None:
        """Reduce `input`; the result is on the root alone.

        Parameters
        ----------
        input : array
            The same number of elements on every rank.
        output : array, optional
            Read on the root only; None there reduces into `input`.
        op : {"sum", "avg", "min", "max", "prod"}
            The reduction.
        root : int
            The rank that gets the result.
        """
        in_place = output is None and root == self._rank
        source = _tensor(input, dtype) if in_place else _input(input, dtype)
        target = source if in_place else None if output is None or root != self._rank else _tensor(output, dtype)
        return _work(_core.comm_reduce(self._handle, source, target, op_of(op), root, async_op))

    @overload
    def gather(
        self,
        input: ArrayLike,
        output: ArrayLike | None = None,
        root: int = 0,
        *,
        async_op: Literal[False] = False,
        dtype: DTypeLike | None = None,
    ) -> None: ...
    @overload
    def gather(
        self,
        input: ArrayLike,
        output: ArrayLike | None = None,
        root: int = 0,
        *,
        async_op: Literal[True],
        dtype: DTypeLike | None = None,
    ) -> Work: ...
    def gather(
        self,
        input: ArrayLike,
        output: ArrayLike | None = None,
        root: int = 0,
        *,
        async_op: bool = False,
        dtype: DTypeLike | None = None,
    ) -> Work | None:
        """Concatenate all ranks' `input` on the root.

        Parameters
        ----------
        input : array
            The same number of elements on every rank.
        output : array, optional
            Needed on the root only: ``world_size`` times as many elements.
        root : int
            The rank that gets the result.
        """
        target = None if output is None or root != self._rank else _tensor(output, dtype)
        return _work(_core.comm_gather(self._handle, _input(input, dtype), target, root, async_op))

    @overload
    def scatter(
        self,
        input: ArrayLike | None,
        output: ArrayLike,
        root: int = 0,
        *,
        async_op: Literal[False] = False,
        dtype: DTypeLike | None = None,
    ) -> None: ...
    @overload
    def scatter(
        self,
        input: ArrayLike | None,
        output: ArrayLike,
        root: int = 0,
        *,
        async_op: Literal[True],
        dtype: DTypeLike | None = None,
    ) -> Work: ...
    def scatter(
        self,
        input: ArrayLike | None,
        output: ArrayLike,
        root: int = 0,
        *,
        async_op: bool = False,
        dtype: DTypeLike | None = None,
    ) -> Work | None:
        """Give rank r the r-th of ``world_size`` equal parts of the root's `input`.

        Parameters
        ----------
        input : array or None
            Needed on the root only: ``world_size`` times as many elements as `output`.
        output : array
            Receives this rank's part.
        root : int
            The rank that has the input.
        """
        source = None if input is None or root != self._rank else _input(input, dtype)
        return _work(_core.comm_scatter(self._handle, source, _tensor(output, dtype), root, async_op))

    @overload
    def all_to_all(
        self, input: ArrayLike, output: ArrayLike, *, async_op: Literal[False] = False, dtype: DTypeLike | None = None
    ) -> None: ...
    @overload
    def all_to_all(
        self, input: ArrayLike, output: ArrayLike, *, async_op: Literal[True], dtype: DTypeLike | None = None
    ) -> Work: ...
    def all_to_all(
        self, input: ArrayLike, output: ArrayLike, *, async_op: bool = False, dtype: DTypeLike | None = None
    ) -> Work | None:
        """Send the r-th of ``world_size`` equal parts of `input` to rank r; parts arrive in rank order.

        Parameters
        ----------
        input : array
            As many elements as `output`.
        output : array
            Receives part r from rank r.
        """
        return _work(_core.comm_all_to_all(self._handle, _input(input, dtype), _tensor(output, dtype), async_op))

    @overload
    def send(
        self,
        tensor: ArrayLike,
        peer: int,
        tag: int = 0,
        *,
        async_op: Literal[False] = False,
        dtype: DTypeLike | None = None,
    ) -> None: ...
    @overload
    def send(
        self, tensor: ArrayLike, peer: int, tag: int = 0, *, async_op: Literal[True], dtype: DTypeLike | None = None
    ) -> Work: ...
    def send(
        self, tensor: ArrayLike, peer: int, tag: int = 0, *, async_op: bool = False, dtype: DTypeLike | None = None
    ) -> Work | None:
        """Send an array to `peer`, which receives it with the same tag. Not collective.

        Parameters
        ----------
        tensor : array
            What is sent.
        peer : int
            A rank other than this one.
        tag : int
            0 to 2**31 - 1.
        """
        return _work(_core.comm_send(self._handle, _input(tensor, dtype), peer, tag, async_op))

    @overload
    def recv(
        self,
        tensor: ArrayLike,
        peer: int,
        tag: int = 0,
        *,
        async_op: Literal[False] = False,
        dtype: DTypeLike | None = None,
    ) -> None: ...
    @overload
    def recv(
        self, tensor: ArrayLike, peer: int, tag: int = 0, *, async_op: Literal[True], dtype: DTypeLike | None = None
    ) -> Work: ...
    def recv(
        self, tensor: ArrayLike, peer: int, tag: int = 0, *, async_op: bool = False, dtype: DTypeLike | None = None
    ) -> Work | None:
        """Receive an array from `peer`. Not collective.

        Parameters
        ----------
        tensor : array
            Of the dtype and number of elements that were sent.
        peer : int
            A rank other than this one.
        tag : int
            That of the `send`.
        """
        return _work(_core.comm_recv(self._handle, _tensor(tensor, dtype), peer, tag, async_op))

    @overload
    def barrier(self, *, async_op: Literal[False] = False) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True]) -> Work: ...
    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return when every rank has called it."""
        return _work(_core.comm_barrier(self._handle, async_op))

    def finalize(self) -> None:
        """Wait for all ranks and all issued work; no collective may follow. Collective."""
        _core.comm_finalize(self._handle)

    def abort(self, reason: str | None = None) -> None:
        """Fail every waiting and later operation, here and at the peers, with `Aborted`. From any thread.

        Parameters
        ----------
        reason : str, optional
            Told to the peers.
        """
        _core.comm_abort(self._handle, reason)

    def close(self) -> None:
        """Leave the communicator; what is still running is aborted. Local: see `finalize` for the orderly end."""
        _core.comm_destroy(self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Part from the other ranks.

        After an exception the peers are told with `abort`. Otherwise savers made from this communicator finish what
        they are saving, then all ranks wait for each other. In both cases savers, meshes and groups made from it are
        closed with it.
        """
        if self.closed or self._handle.foreign:  # a forked child leaves the block: the job is its parent's
            return
        try:
            if error is not None:
                self.abort(f"{type(error).__name__}: {error}")
            else:
                for child in self._living():
                    child._finish()
                self.finalize()
        finally:
            for child in self._living():
                child.close()
            self.close()

    def _own(self, child: Any) -> Any:
        """Close `child` when this communicator's with block ends."""
        self._children = [ref for ref in self._children if ref() is not None]
        self._children.append(weakref.ref(child))
        return child

    def _living(self) -> list[Closable]:
        children = [ref() for ref in reversed(self._children)]
        return [child for child in children if child is not None and not child.closed]

    def __repr__(self) -> str:
        if self.closed:
            return f"<tessera.Comm rank {self._rank} of {self._world_size} (closed)>"
        return f"<tessera.Comm rank {self._rank} of {self._world_size}>"


def _work(handle: _core.Work | None) -> Work | None:
    return None if handle is None else Work(handle)


def _input(source: ArrayLike, dtype: DTypeLike | None) -> _core.Tensor:
    return tensor(source, dtype, writable=False)


_tensor = tensor
_tensors = tensors
