"""The collectives of a communicator, in place over arrays, synchronous or as `Work`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Required, TypedDict, Unpack, overload

import numpy as np

from . import _core
from ._base import Closable
from .errors import InvalidArgument
from .plan import Plan
from .tensor import ArrayLike, DTypeLike, tensor, tensors
from .work import Work

__all__ = ["Collectives", "ReduceOp"]

ReduceOp = Literal["sum", "avg", "min", "max", "prod"]
"""Reduction operations; ``"avg"`` divides the sum by the number of ranks."""

_OPS = {"sum": 1, "avg": 2, "min": 3, "max": 4, "prod": 5}

_PLANNED = {
    "barrier": 1,
    "all_reduce": 2,
    "reduce_scatter": 3,
    "all_gather": 4,
    "all_gather_v": 5,
    "broadcast": 6,
    "reduce": 7,
    "gather": 8,
    "scatter": 9,
    "all_to_all": 10,
}


def op_of(op: str) -> int:
    """The library's number for a reduction."""
    number = _OPS.get(op) if isinstance(op, str) else None
    if number is None:
        raise InvalidArgument(f"op is {op!r}; it must be one of {', '.join(_OPS)}")
    return number


Arrays = ArrayLike | Sequence[ArrayLike]


class Now(TypedDict, total=False):
    """Keywords that every collective takes: return when the result is complete."""

    async_op: Literal[False]
    dtype: DTypeLike | None


class Later(TypedDict, total=False):
    """The same, for returning immediately."""

    async_op: Required[Literal[True]]
    dtype: DTypeLike | None


class Collectives(Closable):
    """The collectives, sends and receives of a `Comm`.

    All ranks must call collectives in the same order. They work in place or write into arrays from the caller, which
    must be contiguous: NumPy arrays, or anything with the buffer protocol, ``__array_interface__`` or ``__dlpack__``.
    Peers access arrays from `Comm.empty` and `Comm.buffer` without a copy.

    With ``async_op=True`` a collective immediately returns a `Work`; do not touch the arrays until it is done.
    ``dtype=`` gives the element type if the array cannot: bfloat16 in a ``uint16`` array.

    Arrays on CUDA devices (PyTorch's, CuPy's, JAX's, by ``__dlpack__``) need the backend ``"cpu:auto,cuda:nccl"``.
    Their collectives run in the order of the device's default stream, or of the one given to `Comm.on_stream`, and
    return once they are on it. Messages between two ranks match in their order, whatever their tags.

    Each collective may raise

    - `InvalidArgument`: an unsupported dtype, shape or device
    - `Unsupported`: a reduction of a dtype that cannot be reduced: bool, int16 and the other checkpoint-only dtypes
    - `Mismatch`: the ranks make different calls; detected before data moves
    - `TesseraTimeout`: a rank did not arrive in time; the message names it
    - `PeerLost`: a rank died; the message names it
    - `Aborted`: an earlier failure, which is the ``__cause__``
    - `InvalidState`: this object is closed
    """

    _handle: _core.Comm
    _rank: int
    _stream = 0

    def prepare(
        self,
        collective: str,
        inputs: Sequence[ArrayLike] = (),
        outputs: Sequence[ArrayLike] = (),
        op: ReduceOp = "sum",
        root: int = 0,
        *,
        dtype: DTypeLike | None = None,
    ) -> Plan:
        """Prepare a collective to be launched many times over the same arrays. Local.

        Parameters
        ----------
        collective : str
            The name of one of these methods, except sends and receives: ``"all_reduce"``, ``"broadcast"``, ...
        inputs, outputs : sequence of arrays
            As for the method; arrays used in place are `outputs`. `all_gather` and `reduce_scatter` may have several.
        op : {"sum", "avg", "min", "max", "prod"}
            The reduction, for collectives that reduce.
        root : int
            The root, for collectives that have one.
        """
        number = _PLANNED.get(collective)
        if number is None:
            raise InvalidArgument(f"collective is {collective!r}; it must be one of {', '.join(_PLANNED)}")
        reading = [_input(array, dtype) for array in inputs]
        handle = _core.plan_create(
            self._handle, number, reading, tensors(list(outputs), dtype), op_of(op), root, self._stream
        )
        return Plan._adopt(handle)

    @overload
    def all_reduce(self, tensors: Arrays, op: ReduceOp = "sum", **how: Unpack[Now]) -> None: ...
    @overload
    def all_reduce(self, tensors: Arrays, op: ReduceOp = "sum", **how: Unpack[Later]) -> Work: ...
    def all_reduce(
        self, tensors: Arrays, op: ReduceOp = "sum", *, async_op: bool = False, dtype: DTypeLike | None = None
    ) -> Work | None:
        """Reduce arrays over the ranks, in place; every rank gets the same bits.

        Parameters
        ----------
        tensors : array or sequence of arrays
            Of one dtype, with the same sizes in the same order on every rank.
        op : {"sum", "avg", "min", "max", "prod"}
            The reduction.
        """
        return _work(_core.comm_all_reduce(self._handle, _arrays(tensors, dtype), op_of(op), async_op, self._stream))

    @overload
    def reduce_scatter(self, input: ArrayLike, output: ArrayLike, op: ReduceOp = "sum", **how: Unpack[Now]) -> None: ...
    @overload
    def reduce_scatter(
        self, input: ArrayLike, output: ArrayLike, op: ReduceOp = "sum", **how: Unpack[Later]
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
        """Reduce `input`; rank r gets the r-th of ``world_size`` equal parts of the result.

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
            _core.comm_reduce_scatter(
                self._handle, _input(input, dtype), _output(output, dtype), op_of(op), async_op, self._stream
            )
        )

    @overload
    def all_gather(self, input: ArrayLike, output: ArrayLike, **how: Unpack[Now]) -> None: ...
    @overload
    def all_gather(self, input: ArrayLike, output: ArrayLike, **how: Unpack[Later]) -> Work: ...
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
        return _work(
            _core.comm_all_gather(self._handle, _input(input, dtype), _output(output, dtype), async_op, self._stream)
        )

    @overload
    def reduce_scatter_coalesced(
        self,
        inputs: Sequence[ArrayLike],
        outputs: Sequence[ArrayLike],
        op: ReduceOp = "sum",
        **how: Unpack[Now],
    ) -> None: ...
    @overload
    def reduce_scatter_coalesced(
        self,
        inputs: Sequence[ArrayLike],
        outputs: Sequence[ArrayLike],
        op: ReduceOp = "sum",
        **how: Unpack[Later],
    ) -> Work: ...
    def reduce_scatter_coalesced(
        self,
        inputs: Sequence[ArrayLike],
        outputs: Sequence[ArrayLike],
        op: ReduceOp = "sum",
        *,
        async_op: bool = False,
        dtype: DTypeLike | None = None,
    ) -> Work | None:
        """Several `reduce_scatter` in one operation: the ranks synchronise once, and small arrays are sent together.

        Parameters
        ----------
        inputs, outputs : sequence of arrays
            Of one dtype, in pairs as for `reduce_scatter`. Only the arrays of a pair may share memory.
        op : {"sum", "avg", "min", "max", "prod"}
            The reduction.
        """
        return _work(
            _core.comm_reduce_scatter_coalesced(
                self._handle,
                tensors(list(inputs), dtype),
                tensors(list(outputs), dtype),
                op_of(op),
                async_op,
                self._stream,
            )
        )

    @overload
    def all_gather_coalesced(
        self, inputs: Sequence[ArrayLike], outputs: Sequence[ArrayLike], **how: Unpack[Now]
    ) -> None: ...
    @overload
    def all_gather_coalesced(
        self, inputs: Sequence[ArrayLike], outputs: Sequence[ArrayLike], **how: Unpack[Later]
    ) -> Work: ...
    def all_gather_coalesced(
        self,
        inputs: Sequence[ArrayLike],
        outputs: Sequence[ArrayLike],
        *,
        async_op: bool = False,
        dtype: DTypeLike | None = None,
    ) -> Work | None:
        """Several `all_gather` in one operation: the ranks synchronise once, and small arrays are sent together.

        Parameters
        ----------
        inputs, outputs : sequence of arrays
            Of one dtype, in pairs as for `all_gather`. Only the arrays of a pair may share memory.
        """
        return _work(
            _core.comm_all_gather_coalesced(
                self._handle, tensors(list(inputs), dtype), tensors(list(outputs), dtype), async_op, self._stream
            )
        )

    @overload
    def all_gather_v(self, input: ArrayLike, outputs: Sequence[ArrayLike], **how: Unpack[Now]) -> None: ...
    @overload
    def all_gather_v(self, input: ArrayLike, outputs: Sequence[ArrayLike], **how: Unpack[Later]) -> Work: ...
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
            _core.comm_all_gather_v(
                self._handle, _input(input, dtype), tensors(list(outputs), dtype), async_op, self._stream
            )
        )

    @overload
    def broadcast(self, tensors: Arrays, root: int = 0, **how: Unpack[Now]) -> None: ...
    @overload
    def broadcast(self, tensors: Arrays, root: int = 0, **how: Unpack[Later]) -> Work: ...
    def broadcast(
        self, tensors: Arrays, root: int = 0, *, async_op: bool = False, dtype: DTypeLike | None = None
    ) -> Work | None:
        """Give every rank the root's arrays, in place.

        Parameters
        ----------
        tensors : array or sequence of arrays
            Of one dtype, with the same sizes on every rank.
        root : int
            The rank whose values are sent.
        """
        return _work(_core.comm_broadcast(self._handle, _arrays(tensors, dtype), root, async_op, self._stream))

    @overload
    def reduce(
        self, input: ArrayLike, output: ArrayLike | None = None, op: ReduceOp = "sum", root: int = 0, **how: Unpack[Now]
    ) -> None: ...
    @overload
    def reduce(
        self,
        input: ArrayLike,
        output: ArrayLike | None = None,
        op: ReduceOp = "sum",
        root: int = 0,
        **how: Unpack[Later],
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
        """Reduce `input`; only the root gets the result.

        Parameters
        ----------
        input : array
            The same number of elements on every rank.
        output : array, optional
            Used on the root only; None reduces into `input` there.
        op : {"sum", "avg", "min", "max", "prod"}
            The reduction.
        root : int
            The rank that gets the result.
        """
        in_place = output is None and root == self._rank
        source = _output(input, dtype) if in_place else _input(input, dtype)
        target = source if in_place else None if output is None or root != self._rank else _output(output, dtype)
        return _work(_core.comm_reduce(self._handle, source, target, op_of(op), root, async_op, self._stream))

    @overload
    def gather(self, input: ArrayLike, output: ArrayLike | None = None, root: int = 0, **how: Unpack[Now]) -> None: ...
    @overload
    def gather(
        self, input: ArrayLike, output: ArrayLike | None = None, root: int = 0, **how: Unpack[Later]
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
        target = None if output is None or root != self._rank else _output(output, dtype)
        return _work(_core.comm_gather(self._handle, _input(input, dtype), target, root, async_op, self._stream))

    @overload
    def scatter(self, input: ArrayLike | None, output: ArrayLike, root: int = 0, **how: Unpack[Now]) -> None: ...
    @overload
    def scatter(self, input: ArrayLike | None, output: ArrayLike, root: int = 0, **how: Unpack[Later]) -> Work: ...
    def scatter(
        self,
        input: ArrayLike | None,
        output: ArrayLike,
        root: int = 0,
        *,
        async_op: bool = False,
        dtype: DTypeLike | None = None,
    ) -> Work | None:
        """Send rank r the r-th of ``world_size`` equal parts of the root's `input`.

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
        return _work(_core.comm_scatter(self._handle, source, _output(output, dtype), root, async_op, self._stream))

    @overload
    def all_to_all(self, input: ArrayLike, output: ArrayLike, **how: Unpack[Now]) -> None: ...
    @overload
    def all_to_all(self, input: ArrayLike, output: ArrayLike, **how: Unpack[Later]) -> Work: ...
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
        return _work(
            _core.comm_all_to_all(self._handle, _input(input, dtype), _output(output, dtype), async_op, self._stream)
        )

    @overload
    def send(self, tensor: ArrayLike, peer: int, tag: int = 0, **how: Unpack[Now]) -> None: ...
    @overload
    def send(self, tensor: ArrayLike, peer: int, tag: int = 0, **how: Unpack[Later]) -> Work: ...
    def send(
        self, tensor: ArrayLike, peer: int, tag: int = 0, *, async_op: bool = False, dtype: DTypeLike | None = None
    ) -> Work | None:
        """Send an array to `peer`, which receives it with the same tag. Not collective.

        Parameters
        ----------
        tensor : array
            The data to send.
        peer : int
            A rank other than this one.
        tag : int
            0 to 2**31 - 1.
        """
        return _work(_core.comm_send(self._handle, _input(tensor, dtype), peer, tag, async_op, self._stream))

    @overload
    def recv(self, tensor: ArrayLike, peer: int, tag: int = 0, **how: Unpack[Now]) -> None: ...
    @overload
    def recv(self, tensor: ArrayLike, peer: int, tag: int = 0, **how: Unpack[Later]) -> Work: ...
    def recv(
        self, tensor: ArrayLike, peer: int, tag: int = 0, *, async_op: bool = False, dtype: DTypeLike | None = None
    ) -> Work | None:
        """Receive an array from `peer`. Not collective.

        Parameters
        ----------
        tensor : array
            With the dtype and number of elements that the peer sends.
        peer : int
            A rank other than this one.
        tag : int
            The tag of the `send`.
        """
        return _work(_core.comm_recv(self._handle, _output(tensor, dtype), peer, tag, async_op, self._stream))

    @overload
    def barrier(self, *, async_op: Literal[False] = False) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True]) -> Work: ...
    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Return once every rank has called it."""
        return _work(_core.comm_barrier(self._handle, async_op))


class OnStream(Collectives):
    """The collectives of a `Comm` on a CUDA stream, returned by `Comm.on_stream`."""

    def __init__(self, comm: Collectives, stream: int) -> None:
        self._handle, self._rank, self._stream = comm._handle, comm._rank, stream

    def close(self) -> None:
        """Does nothing: the communicator is closed by its own method."""


def _work(handle: _core.Work | None) -> Work | None:
    return None if handle is None else Work(handle)


def _input(source: ArrayLike, dtype: DTypeLike | None) -> _core.Tensor:
    return tensor(source, dtype, writable=False)


def _arrays(source: Arrays, dtype: DTypeLike | None) -> object:
    """A list of tensors; one array is passed unchanged."""
    if dtype is None and (type(source) is np.ndarray or not isinstance(source, (list, tuple))):
        return source
    return tensors(source, dtype)


_output = tensor  # under another name than the collectives' parameters
