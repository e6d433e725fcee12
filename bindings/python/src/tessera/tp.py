"""Tensor-parallel training: each rank computes with a slice of every large parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict, Unpack, overload

import numpy as np

from . import _core, _options
from ._base import Closable, checked, there_are
from ._given import raw, takes
from ._params import Deferred, Grads, Params, named, parameter_or_deferred
from .comm import Comm
from .errors import InvalidArgument, NotFound
from .layout import Layout, Replicate, Shard
from .mesh import Mesh
from .tensor import DTypeLike, array_over, dtype_of, tensor
from .work import Stream, Work, stream_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._options import TensorParallelOptions

__all__ = ["TensorParallel"]

Style = (
    Literal["replicate", "column", "row", "vocabulary", "sequence"]
    | tuple[Literal["column", "row"], int]
    | Replicate
    | Shard
    | Layout
)
Array = "npt.NDArray[Any]"
if TYPE_CHECKING:
    Activation = npt.NDArray[Any] | Any  # of NumPy, or on a CUDA device
Arrays = Mapping[str, "npt.NDArray[Any]"]

_STYLES = {"replicate": 1, "column": 2, "row": 3, "vocabulary": 4, "sequence": 5}
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


class _Now(TypedDict, total=False):
    """Keywords of every operation: return when the result is complete."""

    async_op: Literal[False]


class _Later(TypedDict, total=False):
    """The same, for returning immediately."""

    async_op: Required[Literal[True]]


def _rule(pattern: str, style: Style) -> tuple[str, int, int, _core.Layout | None, int]:
    heads = 0
    if isinstance(style, Layout):
        return pattern, 7, 0, style._handle, heads
    if isinstance(style, Shard):
        return pattern, 6, style.dim, None, heads
    if isinstance(style, Replicate):
        return pattern, _STYLES["replicate"], 0, None, heads
    name: object = style
    if isinstance(style, tuple) and len(style) == 2 and style[0] in ("column", "row"):
        name, heads = style
        if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
            raise InvalidArgument(f"the style of {pattern!r} has {heads!r} heads; it must be a number from 1")
    number = _STYLES.get(name) if isinstance(name, str) else None
    if number is None:
        raise InvalidArgument(
            f"the style of {pattern!r} is {style!r}; it must be one of {', '.join(map(repr, _STYLES))}, "
            '("column", heads), ("row", heads), a Shard, a Replicate or a Layout'
        )
    return pattern, number, 0, None, heads


def _is_on_device(array: Any) -> bool:
    place = None if isinstance(array, np.ndarray) else getattr(array, "__dlpack_device__", None)
    return place is not None and int(place()[0]) == 2


def _contiguous(array: Any) -> Any:
    return array if _is_on_device(array) else np.ascontiguousarray(array)


def _needs(where: str, array: Any) -> InvalidArgument:
    return InvalidArgument(f"the {type(array).__name__} is on a CUDA device; pass {where}, made there, for the result")


def _dim(dim: int | None, ndim: int) -> int:
    """A dimension of an activation as the library counts it; negative numbers count from the end."""
    if dim is None:
        return -1
    if not -ndim <= dim < ndim:
        raise InvalidArgument(f"dim is {dim}; an activation of {ndim} dimensions has {-ndim} to {ndim - 1}")
    return dim % ndim


@takes(_options.TP)
class TensorParallel(Closable):
    """A model of which each rank holds slices, for tensor-parallel training. Collective.

    Styles are ``"column"`` (weights, [outputs, inputs], and biases are cut along dimension 0: each rank computes some
    outputs), ``"row"`` (weights are cut along dimension 1: each rank takes some inputs; biases are whole, and `leave`
    adds them), ``"vocabulary"`` (an embedding's weight [words, features], cut along dimension 0; see `embed`),
    ``"sequence"`` (whole, used where each rank has a part of the sequence; `sum_grads` sums the gradient) and
    ``"replicate"`` (whole, like all parameters that no pattern matches). Sizes need not divide by the number of ranks:
    they are cut like ``torch.chunk``, and a slice may be empty.

    Parameters
    ----------
    mesh : Mesh
        Its dimension `dim` has the ranks over which parameters are cut.
    params : mapping of str to array, or sequence
        The whole parameters, as for `DDP`, or `Deferred` ones, whose slices are zeros until a checkpoint is loaded.
        They are read here and not used later; only rank 0's values count, unless `sync_values` is False. All in CPU
        memory, or all on the communicator's CUDA device (see `set_stream`), where they are read in the order of the
        default stream. Slices, gradients and activations are then there too: slices and gradients are `CudaArray`s, and
        calls need `out`.
    plan : mapping of str to style
        A pattern for each dotted part of a name, such as ``"layers.*.attn.w[qkv]"``, and the style of the parameters,
        or of all parameters of the modules, that it matches; ``("column", heads)`` or ``("row", heads)``, which cut
        between attention heads and give each rank the same number; a placement, ``Shard(d)`` or ``Replicate()``; or a
        `Layout` over the ranks of `dim`, for weights that join several.
    dim : str, optional
        The name of the dimension; by default the only one of `mesh`.
    <options>

    Raises
    ------
    InvalidArgument
        A pattern matches nothing, several match a parameter, a parameter cannot have its style, or the ranks do not
        divide its heads; on all ranks.
    Mismatch
        The plans of the ranks differ; the message names the first difference.

    Examples
    --------
    >>> tp = ts.TensorParallel(mesh, params, {"fc1": "column", "fc2": "row"}, dim="tp")  # doctest: +SKIP
    >>> h = np.tanh(tp.enter(x) @ tp["fc1.weight"].T + tp["fc1.bias"])  # doctest: +SKIP
    >>> y = tp.leave(h @ tp["fc2.weight"].T, bias=tp["fc2.bias"])  # doctest: +SKIP
    """

    _handle: _core.TensorParallel

    def __init__(
        self,
        mesh: Mesh,
        params: Params | Mapping[str, Deferred],
        plan: Mapping[str, Style],
        *,
        dim: str | None = None,
        **options: Unpack[TensorParallelOptions],
    ) -> None:
        whole = checked(mesh, Mesh, "mesh", params)
        part = whole if dim is None else whole[(dim,)]

        def arguments() -> tuple[list[str], list[_core.Tensor], list[Any], dict[str, Any]]:
            if not isinstance(plan, Mapping):
                raise TypeError(f"plan is a {type(plan).__name__}; it must be a dict such as {{'fc1': 'column'}}")
            names, arrays = named(params)
            tensors = [parameter_or_deferred(name, array) for name, array in zip(names, arrays, strict=True)]
            return names, tensors, [_rule(pattern, style) for pattern, style in plan.items()], raw(_options.TP, options)

        of_dim = part[part.names[0]]._handle if len(part.names) == 1 else None
        self._handle = _core.tp_create(part._handle, of_dim, arguments)
        ranks = part[part.names[0]]
        self._rank, self._ranks = ranks.rank, ranks.world_size
        self._known = [_core.tp_param(self._handle, i) for i in range(_core.tp_param_count(self._handle))]
        self._index = {one[0]: i for i, one in enumerate(self._known)}
        self._slices = MappingProxyType(
            {name: array_over(*_core.tp_slice(self._handle, i)) for name, i in self._index.items()}
        )
        self._grads: Grads | None = None
        self._stream = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(self._index)

    @property
    def slices(self) -> Arrays:
        """This rank's slice of each parameter, which the optimizer updates and checkpoints save: NumPy views of memory
        that never changes. A slice may be empty."""
        return self._slices

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """The slice of a parameter: ``tp["fc1.weight"]``."""
        return self._slices[self._known[self._number(name)][0]]

    @property
    def grads(self) -> Grads:
        """The gradients of the slices of floating-point parameters: views to write them into, initially zero."""
        if self._grads is None:
            floating = {1, 2, 3, 4}
            views = {
                name: array_over(*_core.tp_grad(self._handle, i))
                for name, i in self._index.items()
                if self._known[i][2] in floating
            }
            self._grads = Grads(views, "the model")
        return self._grads

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole parameter."""
        return self._known[self._number(name)][1]

    def cut(self, name: str) -> int | None:
        """The dimension along which a parameter is cut; None: every rank has all of it."""
        dim = self._known[self._number(name)][4]
        return None if dim < 0 else dim

    def layout(self, name: str) -> Layout:
        """Which rank holds which part of a parameter: all ranks of the communicator that the mesh was made from."""
        number = self._number(name)
        return Layout._adopt(_core.tp_layout(self._handle, number), self.shape(name))

    def _number(self, name: str) -> int:
        number = self._index.get(name)
        if number is None:
            raise NotFound(f"there is no parameter {name!r}; {there_are(name, self._index)}")
        return number

    def _part(self, size: int) -> int:
        """This rank's share of a dimension that is cut like torch.chunk."""
        most = -(-size // self._ranks)
        return max(0, min(size - self._rank * most, most))

    # ------------------------------------------------------------------ activations

    def set_stream(self, stream: Stream = None) -> None:
        """Name the CUDA stream on which the trainer computes, for a model whose parameters are on a device.

        Every operation on arrays of the device is then in its order: it returns once it is on the stream, and what the
        stream gets later sees the result. With ``async_op=True`` it runs on another stream, after what this one has
        then; `Work.order` makes the stream wait for it.

        Parameters
        ----------
        stream : stream, optional
            PyTorch's, CuPy's, any object with ``__cuda_stream__``, or an address. None, as at first, is the device's
            default stream. It must exist until another one is set. A new one continues after what the previous one had.

        Raises
        ------
        InvalidArgument
            The stream is of another device, or the parameters are on the CPU.
        """
        address = stream_of(stream)
        _core.tp_set_stream(self._handle, address)
        self._stream = address

    @overload
    def enter(
        self, x: Activation, dim: int | None = None, out: Activation | None = None, **how: Unpack[_Now]
    ) -> npt.NDArray[Any]: ...
    @overload
    def enter(self, x: Activation, dim: int | None = None, *, out: Activation, **how: Unpack[_Later]) -> Work: ...
    def enter(
        self,
        x: Activation,
        dim: int | None = None,
        out: Activation | None = None,
        *,
        async_op: bool = False,
    ) -> npt.NDArray[Any] | Work:
        """Enter a region, in which every rank has all of an activation: forward. Collective with `dim`.

        Parameters
        ----------
        x : array
            This rank's part of the activation along `dim`, or all of it.
        dim : int, optional
            The dimension along which the activation is cut over the ranks outside of the region.
        out : array, optional
            Where to write the whole activation; needed with `dim` if its size along it does not divide by the number of
            ranks, since a part does not show the whole.
        async_op : bool, default False
            Return a `Work` instead; needs `out`. Do not touch `x` and `out` until it is done.

        Returns
        -------
        array
            The whole activation; `x` itself without `dim` and `out`.
        """
        if dim is None and out is None and not async_op:
            return x
        return self._moved(_core.tp_enter, x, dim, out, async_op, "gathered")

    @overload
    def enter_backward(
        self, grad: Activation, dim: int | None = None, out: Activation | None = None, **how: Unpack[_Now]
    ) -> npt.NDArray[Any]: ...
    @overload
    def enter_backward(
        self, grad: Activation, dim: int | None = None, *, out: Activation, **how: Unpack[_Later]
    ) -> Work: ...
    def enter_backward(
        self,
        grad: Activation,
        dim: int | None = None,
        out: Activation | None = None,
        *,
        async_op: bool = False,
    ) -> npt.NDArray[Any] | Work:
        """The adjoint of `enter`: the sum over the ranks of their gradients of the activation; with `dim` this rank's
        part of it. Collective.

        Parameters
        ----------
        grad : array
            This rank's gradient of the whole activation.
        dim : int, optional
            As in forward.
        out : array, optional
            Where to write the result; by default a new array, or without `dim` `grad` itself.
        async_op : bool, default False
            Return a `Work` instead; needs `out`.
        """
        return self._moved(_core.tp_enter_backward, grad, dim, out, async_op, "cut")

    @overload
    def leave(
        self,
        y: Activation,
        dim: int | None = None,
        out: Activation | None = None,
        *,
        bias: Activation | None = None,
        **how: Unpack[_Now],
    ) -> npt.NDArray[Any]: ...
    @overload
    def leave(
        self,
        y: Activation,
        dim: int | None = None,
        *,
        out: Activation,
        bias: Activation | None = None,
        **how: Unpack[_Later],
    ) -> Work: ...
    def leave(
        self,
        y: Activation,
        dim: int | None = None,
        out: Activation | None = None,
        *,
        bias: Activation | None = None,
        async_op: bool = False,
    ) -> npt.NDArray[Any] | Work:
        """Leave a region, in which each rank computed a summand of an activation: forward. Collective.

        Parameters
        ----------
        y : array
            This rank's summand.
        dim : int, optional
            Each rank gets only its part of the sum along this dimension.
        out : array, optional
            Where to write the result; by default a new array, or without `dim` `y` itself.
        bias : array, optional
            Added once, after the sum; as many elements as the last dimension of the result.
        async_op : bool, default False
            Return a `Work` instead; needs `out`.
        """

        added = None if bias is None else tensor(bias, writable=False)
        return self._moved(
            lambda handle, source, at, to, on, later: _core.tp_leave(handle, source, at, added, to, on, later),
            y,
            dim,
            out,
            async_op,
            "cut",
        )

    @overload
    def leave_backward(
        self, grad: Activation, dim: int | None = None, out: Activation | None = None, **how: Unpack[_Now]
    ) -> npt.NDArray[Any]: ...
    @overload
    def leave_backward(
        self, grad: Activation, dim: int | None = None, *, out: Activation, **how: Unpack[_Later]
    ) -> Work: ...
    def leave_backward(
        self,
        grad: Activation,
        dim: int | None = None,
        out: Activation | None = None,
        *,
        async_op: bool = False,
    ) -> npt.NDArray[Any] | Work:
        """The adjoint of `leave`: the gradient of every rank's summand. Collective with `dim`.

        Parameters
        ----------
        grad : array
            The gradient of what `leave` returned.
        dim : int, optional
            As in forward.
        out : array, optional
            As for `enter`.
        async_op : bool, default False
            Return a `Work` instead; needs `out`.
        """
        if dim is None and out is None and not async_op:
            return grad
        return self._moved(_core.tp_leave_backward, grad, dim, out, async_op, "gathered")

    def enter_parts(
        self,
        x: Activation,
        dim: int,
        compute: Callable[[slice, npt.NDArray[Any]], object],
        out: Activation | None = None,
    ) -> npt.NDArray[Any]:
        """`enter` with a dimension, overlapped: compute with one rank's part while the next ones are on their way.

        Parameters
        ----------
        x : array
            This rank's part along `dim`.
        dim : int
            The dimension along which the activation is cut.
        compute : callable
            ``compute(where, part)``, called for each rank's part in order, except empty ones. `where` are its indices
            along `dim`, `part` is a view of the result; on a device a `CudaArray` that is there in the order of the
            stream (`set_stream`), for what `compute` puts onto it. It must not use this model.
        out : array, optional
            Receives the result; required if the ranks' parts differ in size.

        Returns
        -------
        array
            The complete activation.
        """
        at = _dim(dim, len(x.shape))
        on_device = _is_on_device(x)
        if out is None:
            if on_device:
                raise _needs("out", x)
            out = np.empty((*x.shape[:at], x.shape[at] * self._ranks, *x.shape[at + 1 :]), x.dtype)
        whole = out

        def on_part(begin: int, view: Any) -> None:
            where = slice(begin, begin + view[2][at])
            compute(where, array_over(*view) if on_device else whole[(slice(None),) * at + (where,)])

        source = tensor(_contiguous(x), writable=False)
        _core.tp_enter_parts(self._handle, source, at, tensor(out), self._stream, on_part)
        return out

    def leave_parts(
        self,
        shape: Sequence[int],
        dim: int,
        compute: Callable[..., Any],
        dtype: DTypeLike = np.float32,
        bias: Activation | None = None,
        out: Activation | None = None,
    ) -> npt.NDArray[Any]:
        """`leave` with a dimension, overlapped: compute the summand of one rank's part while the one before is summed.

        Parameters
        ----------
        shape : sequence of int
            That of the complete activation.
        dim : int
            The dimension along which it is cut.
        compute : callable
            ``compute(where)`` returns this rank's summand of the part that has the indices `where` along `dim`. Called
            for each rank's part in order, except empty ones. If it raises, the communicator ends on every rank. It must
            not use this model. On a device it is ``compute(where, part)``, which writes the summand into `part`, a
            `CudaArray`, by what it puts onto the stream (`set_stream`).
        dtype : default float32
            Of the activation.
        bias : array, optional
            Added once, after the sum; as many elements as the last dimension.
        out : array, optional
            Receives the result; required on a device.

        Returns
        -------
        array
            This rank's part of the sum.
        """
        at = _dim(dim, len(shape))
        if out is None:
            out = np.empty((*shape[:at], self._part(shape[at]), *shape[at + 1 :]), dtype_of(dtype).numpy)
        on_device = _is_on_device(out)

        def on_part(begin: int, view: Any) -> None:
            where = slice(begin, begin + view[2][at])
            if on_device:
                compute(where, array_over(*view))
                return
            made = np.ascontiguousarray(compute(where))
            _core.copy_elements(tensor(made, writable=False), tensor(array_over(*view)))

        added = None if bias is None else tensor(bias, writable=False)
        _core.tp_leave_parts(self._handle, shape[at], at, added, tensor(out), self._stream, on_part)
        return out

    @overload
    def gather(
        self, x: Activation, dim: int, out: Activation | None = None, **how: Unpack[_Now]
    ) -> npt.NDArray[Any]: ...
    @overload
    def gather(self, x: Activation, dim: int, *, out: Activation, **how: Unpack[_Later]) -> Work: ...
    def gather(
        self, x: Activation, dim: int, out: Activation | None = None, *, async_op: bool = False
    ) -> npt.NDArray[Any] | Work:
        """Gather an activation that is cut along `dim` in a region: outputs of a ``"column"`` weight. Collective.

        Its adjoint is `split` if every rank then computes the same, otherwise `enter_backward`. Parameters are those of
        `enter`.
        """
        return self._moved(_core.tp_gather, x, dim, out, async_op, "gathered")

    def split(self, x: Activation, dim: int, out: Activation | None = None) -> npt.NDArray[Any]:
        """This rank's part along `dim` of an activation that every rank has. Local; its adjoint is `gather`.

        `out` receives it, if given; on a device it must be.
        """
        at = _dim(dim, len(x.shape))
        if out is None:
            if _is_on_device(x):
                raise _needs("out", x)
            out = np.empty((*x.shape[:at], self._part(x.shape[at]), *x.shape[at + 1 :]), x.dtype)
        _core.tp_split(self._handle, tensor(_contiguous(x), writable=False), at, tensor(out), self._stream)
        return out

    def _moved(
        self,
        call: Any,
        x: Activation,
        dim: int | None,
        out: Activation | None,
        later: bool,
        becomes: Literal["gathered", "cut"],
    ) -> npt.NDArray[Any] | Work:
        source = _contiguous(x) if out is None else x
        at = _dim(dim, len(source.shape))
        if later and out is None:
            raise InvalidArgument("async_op needs out, the array that receives the result")
        if out is None and at < 0:
            out = source
        elif out is None:
            if _is_on_device(source):
                raise _needs("out", source)
            size = source.shape[at]
            if becomes == "cut":
                size = self._part(size)
            else:
                size *= self._ranks
            out = np.empty((*source.shape[:at], size, *source.shape[at + 1 :]), source.dtype)
        work = call(self._handle, tensor(source, writable=out is source), at, tensor(out), self._stream, later)
        return out if work is None else Work(work)

    # ------------------------------------------------------------------ the vocabulary

    def embed(
        self, name: str, ids: Activation, dim: int | None = None, out: Activation | None = None
    ) -> npt.NDArray[Any]:
        """Look up words in an embedding that is cut over the ranks (``"vocabulary"``) or whole. Collective.

        Parameters
        ----------
        name : str
            The parameter, [words, features].
        ids : array of int32 or int64
            The same on every rank.
        dim : int, optional
            Each rank gets only its part of the result along this dimension.
        out : array, optional
            Receives the result; required on a device.

        Returns
        -------
        array
            The shape of `ids` and the features.

        Raises
        ------
        InvalidArgument
            An id is outside of the vocabulary. On a device the call cannot see that: such a row is zeros, and once the
            device is done the communicator fails with this error.
        """
        number = self._number(name)
        whole = (*ids.shape, *self._known[number][1][1:])
        at = _dim(dim, len(whole))
        if out is None:
            if _is_on_device(ids):
                raise _needs("out", ids)
            shape = whole if at < 0 else (*whole[:at], self._part(whole[at]), *whole[at + 1 :])
            out = np.empty(shape, self._slices[name].dtype)
        _core.tp_embed(self._handle, number, tensor(ids, writable=False), at, tensor(out), self._stream, False)
        return out

    def embed_backward(self, name: str, ids: Activation, grad: Activation, dim: int | None = None) -> None:
        """The adjoint of `embed`: adds the gradients of this rank's words to ``grads[name]``. Collective with `dim`.

        Parameters
        ----------
        name, ids, dim
            As in forward.
        grad : array
            The gradient of what `embed` returned.
        """
        number = self._number(name)
        into = self.grads[name]
        at = _dim(dim, len(ids.shape) + 1)
        words, given = tensor(ids, writable=False), tensor(_contiguous(grad), writable=False)
        _core.tp_embed_backward(self._handle, number, words, given, at, tensor(into), self._stream, False)

    def cross_entropy(
        self,
        logits: Activation,
        targets: Activation,
        vocabulary: int,
        *,
        class_weights: Activation | None = None,
        ignore_index: int | None = None,
        reduction: Literal["none", "mean", "sum"] | None = None,
        label_smoothing: float | None = None,
        grad_scale: float | None = None,
        data_ranks: Comm | None = None,
        loss: Activation | None = None,
        grad: Activation | None = None,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Cross-entropy of logits whose vocabulary is cut over the ranks (Shoeybi et al. 2019), and its gradient.
        Collective.

        The arguments are those of `torch.nn.functional.cross_entropy`, over the whole vocabulary.

        Parameters
        ----------
        logits : array of float16, bfloat16, float32 or float64, [..., classes of this rank]
            The vocabulary is cut like ``torch.chunk``, and a rank may have no classes.
        targets : array of int32 or int64, [...]
            The same on every rank.
        vocabulary : int
            The number of classes over all ranks.
        class_weights : array of float32 or float64, optional
            A weight for each class of the whole vocabulary.
        ignore_index : int, default -100
            Rows with this target do not count.
        reduction : {"mean", "sum", "none"}
            How the losses of the rows are joined; by default "mean", over no rows NaN.
        label_smoothing : float, default 0
            Between 0 and 1.
        grad_scale : float, default 1
            Multiplies the gradient.
        data_ranks : Comm, optional
            The ranks that have other rows of the batch: the mean is then over the rows of all of them, each rank's loss
            is its own rows' part, and losses and gradients of these ranks add up (reduce them by "sum", not "avg").
        loss, grad : array, optional
            Receive the results; required on a device. `grad` may be `logits`.

        Returns
        -------
        loss : array
            Of float32, or float64 for float64 logits: of no dimension, or with "none" of the targets' shape.
        grad : array
            The gradient of the loss ("none": of each row's loss) by this rank's logits.

        Raises
        ------
        InvalidArgument
            A target is neither a class nor `ignore_index`. On a device the call cannot see that: such a row counts as
            ignored, and once the device is done the communicator fails with this error.
        """
        if reduction is not None and reduction not in _REDUCTIONS:
            raise InvalidArgument(f"reduction is {reduction!r}; it must be one of {', '.join(map(repr, _REDUCTIONS))}")
        source = _contiguous(logits)
        if _is_on_device(source) and (loss is None or grad is None):
            raise _needs("loss and grad", source)
        if grad is None:
            grad = np.empty_like(source)
        if loss is None:
            dtype = np.float64 if source.dtype == np.float64 else np.float32
            loss = np.empty(targets.shape if reduction == "none" else (), dtype)
        _core.tp_cross_entropy(
            self._handle,
            tensor(source, writable=grad is source),
            vocabulary,
            tensor(targets, writable=False),
            None if class_weights is None else tensor(class_weights, writable=False),
            None if data_ranks is None else checked(data_ranks, Comm, "data_ranks")._handle,
            tensor(loss),
            tensor(grad),
            self._stream,
            False,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=None if reduction is None else _REDUCTIONS[reduction],
            grad_scale=grad_scale,
        )
        return loss, grad

    # ------------------------------------------------------------------ gradients

    def sum_grads(self) -> None:
        """Sum over the ranks the gradients of which each rank has a part. Collective.

        Call it once per step, before clipping and the optimizer's step.

        These are the gradients of ``"sequence"`` parameters and, with `sequence_parallel`, of the biases of ``"row"``.
        All others are complete on their rank. On a device it is done in the order of `set_stream`'s stream.
        """
        _core.tp_sum_grads(self._handle, False)

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        _core.tp_zero_grad(self._handle)

    def close(self) -> None:
        """Free the model. Optimizers and states keep what they need of it."""
        _core.tp_destroy(self._handle)
