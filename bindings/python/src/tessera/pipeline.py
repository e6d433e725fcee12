"""Pipeline-parallel training: the trainer computes stages in callbacks, and the library runs them by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, get_args

import numpy as np

from . import _core, _options
from ._base import Closable, checked, stays
from ._given import raw, takes
from .comm import Comm
from .errors import InvalidArgument, InvalidState
from .tensor import ArrayLike, DType, DTypeLike, array_over, dtype_of, tensor
from .work import Stream, stream_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._options import PipelineOptions

    Arrays = tuple[npt.NDArray[Any] | Any, ...]  # | Any: some may be None, which those of floating point never are

__all__ = ["Pipeline", "PipelineStats", "StageCall"]

Work = Literal["forward", "backward", "backward_input", "backward_weight"]
_WORKS: tuple[Work, ...] = get_args(Work)
_VIEWS = ("inputs", "targets", "outputs", "output_grads", "input_grads")


class PipelineStats(NamedTuple):
    """The last step or evaluation on this rank. Times are in nanoseconds."""

    wall_ns: int
    """The entire call."""
    busy_ns: int
    """In callbacks."""
    waited_ns: int
    """For messages and, at the end, for the other ranks."""
    longest_ns: int
    """Of that, for the stage whose messages this rank awaited longest."""
    longest_stage: int | None
    """That stage; None if this rank awaited none."""
    longest_rank: int | None
    """The rank that has it."""
    peak_activations: int
    """The most micro-batches of a stage that were between their forward and backward."""
    peak_bytes: int
    """The most memory of the library that tensors were in."""


class StageCall:
    """What a callback of a `Pipeline` computes with. Valid during the call, except for its numbers.

    Arrays are NumPy views without a copy, read-only except `input_grads`. You may keep `inputs`, `outputs`,
    `output_grads` and `targets` until the backward of the micro-batch returns (`backward_weight`, if it is split; in an
    evaluation, the forward), and `input_grads` until the call returns. An array of the library that is held longer
    fails the step, because its memory is used again; delete it, or keep a copy. The batch and the targets are your own
    memory and may be held.

    With ``on_device=True`` they are objects that share memory of the device by DLPack, as in
    ``torch.from_dlpack(call.inputs[0])``. Use them on the stream of the pipeline. What shares their memory counts as
    held.

    Attributes
    ----------
    work : {"forward", "backward", "backward_input", "backward_weight"}
        What to compute.
    stage : int
        The stage.
    microbatch : int
        The micro-batch, from 0.
    microbatches : int
        The number of micro-batches of a step.
    training : bool
        True in `Pipeline.step`, False in `Pipeline.eval`.
    is_last_backward : bool
        After this call the gradients of this stage's weights are complete for this step.
    weight : float
        On the last stage, the factor of this micro-batch's loss. Scale the loss by it before its backward, never
        gradients afterwards. 0 on other stages.
    """

    __slots__ = (
        "_dtypes",
        "_handle",
        "_made",
        "_views",
        "is_last_backward",
        "microbatch",
        "microbatches",
        "stage",
        "training",
        "weight",
        "work",
    )
    work: Work
    stage: int
    microbatch: int
    microbatches: int
    training: bool
    is_last_backward: bool
    weight: float
    _handle: _core.Pipeline
    _views: dict[str, Arrays] | None
    _made: list[Any]
    _dtypes: dict[str, list[DType | None]]
    __reduce_ex__ = stays

    def __init__(self) -> None:
        raise TypeError("a Pipeline makes the StageCall of its callbacks")

    @classmethod
    def _of(cls, handle: _core.Pipeline, facts: tuple[Any, ...], views: tuple[list[Any], ...]) -> StageCall:
        call = cls.__new__(cls)
        work, call.stage, call.microbatch, call.microbatches, call.training, call.is_last_backward, call.weight = facts
        call.work = _WORKS[work - 1]
        call._handle = handle
        call._made = []
        call._dtypes = {
            name: [DType(view[1]) if view else None for view in some] for name, some in zip(_VIEWS, views, strict=True)
        }
        call._views = {
            name: tuple(array_over(*view) if view else None for view in some)
            for name, some in zip(_VIEWS, views, strict=True)
        }
        return call

    def _end(self) -> None:
        """Others share the outputs now, so they become read-only."""
        for array in self._made:
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
            else:
                array.freeze()
        self._made = []
        self._views = None

    def _get(self, name: str) -> Arrays:
        if self._views is None:
            raise InvalidState(
                f"{name} of {self._place()}: the call has ended; keep the arrays that its backward needs, not the call"
            )
        return self._views[name]

    def _place(self) -> str:
        return f"stage {self.stage}, micro-batch {self.microbatch}, {self.work}"

    @property
    def inputs(self) -> Arrays:
        """On stage 0 this micro-batch's rows of the batch; on others what the previous stage sent, then what came along
        each edge that ends here, in the order of the edges."""
        return self._get("inputs")

    @property
    def targets(self) -> Arrays:
        """On the last stage, this micro-batch's rows of the targets."""
        return self._get("targets")

    @property
    def outputs(self) -> Arrays:
        """What the forward made. Empty in a forward."""
        return self._get("outputs")

    @property
    def output_grads(self) -> Arrays:
        """In a backward, the gradients of the outputs that went to the next stage, then of each edge that begins here.

        None for outputs that are not floating-point. Empty on the last stage.
        """
        return self._get("output_grads")

    @property
    def input_grads(self) -> Arrays:
        """In a backward, arrays of zeros for the gradients of the inputs: write into them, or return the gradients.

        None for inputs that are not floating-point. Empty on stage 0 and in `backward_weight`.
        """
        return self._get("input_grads")

    def output(self, shape: int | Sequence[int], dtype: DTypeLike) -> Any:
        """In a forward: an uninitialised array in the library's memory for the next output, to write into.

        It needs no copy, unlike an array that the forward returns, and on a device it is the only way. It becomes
        read-only when the call returns.

        Raises
        ------
        InvalidState
            Not in a forward.
        InvalidArgument
            A size is negative, or the output is larger than `max_message_bytes`.
        """
        self._get("outputs")
        sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        array = array_over(*_core.pipeline_output(self._handle, int(dtype_of(dtype)), sizes))
        self._made.append(array)
        return array

    def loss(self, loss: float) -> None:
        """On the last stage: report the loss of the micro-batch, without its weight. The last value counts.

        Raises
        ------
        InvalidState
            Not on the last stage.
        """
        self._get("targets")
        _core.pipeline_loss(self._handle, loss)

    def _take(self, result: Any) -> None:
        """What the callback returned."""
        given = result if isinstance(result, tuple) else () if result is None else (result,)
        if self.work == "forward":
            self._take_outputs(given)
        elif self.work == "backward_weight":
            if given:
                raise TypeError(
                    f"{self._place()} returned a {type(result).__name__}; the gradients of weights are the trainer's "
                    "own, and backward_weight returns None"
                )
        elif given and self.stage > 0:
            self._take_grads(given)

    def _take_outputs(self, given: tuple[Any, ...]) -> None:
        for one in given:
            if isinstance(one, (int, float, np.generic)):
                self.loss(float(one))
                continue
            source = self._source(one, "an output")
            dtype = DType(source.dtype)
            _core.copy_elements(source, tensor(self.output(source.shape, dtype), dtype))

    def _take_grads(self, given: tuple[Any, ...]) -> None:
        grads = self.input_grads
        if len(given) != len(grads):
            raise InvalidArgument(
                f"{self._place()} returned {len(given)} gradients; the stage has {len(grads)} inputs: return a tuple "
                "with one gradient for each, None for one that needs none"
            )
        for i, (value, grad, dtype) in enumerate(zip(given, grads, self._dtypes["input_grads"], strict=True)):
            if value is None or value is grad:
                continue
            if dtype is None:
                raise InvalidArgument(
                    f"{self._place()} returned a gradient of input {i}, which is not floating-point; return None for it"
                )
            source = self._source(value, f"the gradient of input {i}")
            if source.dtype != dtype or source.shape != grad.shape:
                raise InvalidArgument(
                    f"{self._place()}: the gradient of input {i} must have shape {grad.shape} and dtype {dtype.numpy}, "
                    f"as the input; got shape {source.shape} and dtype {DType(source.dtype).numpy}"
                )
            _core.copy_elements(source, tensor(grad, dtype))

    def _source(self, array: Any, what: str) -> _core.Tensor:
        try:
            return tensor(np.asarray(array, order="C") if isinstance(array, np.ndarray) else array, writable=False)
        except (InvalidArgument, TypeError) as error:
            raise type(error)(f"{self._place()} returned {what} that cannot be used: {error}") from None

    def __repr__(self) -> str:
        ended = " (ended)" if self._views is None else ""
        return f"<tessera.StageCall {self._place()}{ended}>"


Callback = Callable[[StageCall], Any]


class _Callbacks:
    """Runs the trainer's callbacks. The library's handle keeps it, so it must not keep the pipeline."""

    def __init__(self, *fns: Callback | None) -> None:
        for name, fn in zip(_WORKS, fns, strict=True):
            if not (callable(fn) or (fn is None and name != "forward")):
                raise TypeError(f"{name} is {fn!r}; it must be a function that takes a StageCall")
        self.fns = fns

    def __call__(self, handle: _core.Pipeline, facts: tuple[Any, ...], views: tuple[list[Any], ...]) -> None:
        fn = self.fns[facts[0] - 1]
        assert fn is not None  # the library does not call those that it was not given
        call = StageCall._of(handle, facts, views)
        try:
            call._take(fn(call))
        finally:
            call._end()


@takes(_options.PIPELINE)
class Pipeline(Closable):
    """A model that is cut into stages, of which each rank has one or more. Collective.

    `step` cuts a batch into micro-batches and passes them through the stages. The library calls the callbacks in the
    order of the schedule, on the thread that called `step`, and moves activations and gradients between the ranks.
    Gradients of weights are the trainer's own, which it adds up over the micro-batches. An exception in a callback
    fails the step on every rank, and `step` raises this exception on its own rank; the pipeline then has ended.

    With ``on_device=True`` activations and gradients stay on the communicator's CUDA device. Callbacks put their work
    on one stream (`set_stream`) and write into `StageCall.output` and `StageCall.input_grads`: arrays that they return
    are not copied there. The host does not wait for the device; see docs/PIPELINE.md for the exceptions.

    Parameters
    ----------
    comm : Comm
        The ranks of the pipeline.
    stages : sequence of int
        This rank's stages, where the schedule puts them: the rank itself, or with several stages per rank, those with
        ``stage % world_size == rank``; for "zbv" and "dualpipev" ``[rank, 2 * world_size - 1 - rank]``.
    forward : callable
        Takes a `StageCall` and returns the outputs for the next stage: an array or a tuple of arrays, which are copied.
        On the last stage it returns the micro-batch's loss, a number, without its weight; a tuple ``(array, loss)``
        also keeps arrays for the backward, as `StageCall.outputs`. Returns None if it used `StageCall.output` and
        `StageCall.loss` instead.
    backward : callable, optional
        Adds the gradients of the weights to the trainer's own and returns those of the inputs: an array or a tuple with
        one for each input, of its shape and dtype. Returns None if it wrote into `StageCall.input_grads` instead. What
        it returns on stage 0 is ignored. Required unless the schedule splits every backward.
    backward_input, backward_weight : callable, optional
        The same in two parts, for schedules that split backwards: "interleaved_zero_bubble", "zb_h2", "zbv" and
        "dualpipev".
    microbatches : int, default 0
        The number of micro-batches, at least 1; 0: as many as `schedule_csv` has.
    schedule_csv : str, optional
        A schedule of your own instead of `schedule`: PyTorch's CSV, one line per rank, with cells like ``2F0``.
    edges : sequence of (int, int, int), default ()
        Skip connections ``(from_stage, output, to_stage)``: the output goes along its edges only. Outputs without an
        edge go to the next stage.
    <options>

    Raises
    ------
    InvalidArgument
        On every rank: a stage is missing, on two ranks or on the wrong one; the schedule does not work with this number
        of micro-batches, or needs a callback; or an edge is wrong.
    Unsupported
        ``on_device`` is True, and the communicator has no device: create it with ``backend="cpu:auto,cuda:nccl"``.
    Mismatch
        The ranks have different options; the message names the first difference.

    Examples
    --------
    >>> def forward(call):  # doctest: +SKIP
    ...     hidden = np.tanh(call.inputs[0] @ weight)
    ...     return hidden if call.stage == 0 else (hidden, np.mean((hidden - call.targets[0]) ** 2))
    >>> with ts.Pipeline(comm, [comm.rank], forward, backward, microbatches=8) as pipe:  # doctest: +SKIP
    ...     losses = pipe.step(batch, targets)
    """

    _handle: _core.Pipeline
    _stages: tuple[int, ...] = ()

    def __init__(
        self,
        comm: Comm,
        stages: Sequence[int],
        forward: Callback,
        backward: Callback | None = None,
        *,
        backward_input: Callback | None = None,
        backward_weight: Callback | None = None,
        microbatches: int | None = None,
        schedule_csv: str | None = None,
        edges: Iterable[tuple[int, int, int]] = (),
        **options: Unpack[PipelineOptions],
    ) -> None:
        handle = checked(comm, Comm, "comm", stages)._handle
        own: list[Any] = []

        def arguments() -> tuple[list[Any], _Callbacks, tuple[bool, bool, bool, bool], list[Any], dict[str, Any]]:
            own.extend(_numbers(stages, "stages"))
            compute = _Callbacks(forward, backward, backward_input, backward_weight)
            lines: list[Any] = [tuple(edge) for edge in edges]
            for line in lines:
                if len(line) != 3:
                    raise InvalidArgument(f"the edge {line} must be (from_stage, output, to_stage)")
            has = (True, backward is not None, backward_input is not None, backward_weight is not None)
            given = {"microbatches": microbatches, "schedule_csv": schedule_csv, **raw(_options.PIPELINE, options)}
            return own, compute, has, lines, given

        self._handle = _core.pipeline_create(handle, arguments)
        self._microbatches = _core.pipeline_microbatches(self._handle)
        self._stages = tuple(sorted(int(stage) for stage in own))
        self._is_first = 0 in self._stages
        self._is_last = _core.pipeline_stages(self._handle) - 1 in self._stages
        comm._own(self)

    @property
    def stages(self) -> tuple[int, ...]:
        """This rank's stages, in ascending order."""
        return self._stages

    @property
    def microbatches(self) -> int:
        """The number of micro-batches of a step."""
        return self._microbatches

    def step(
        self,
        batch: ArrayLike | Sequence[ArrayLike] = (),
        targets: ArrayLike | Sequence[ArrayLike] = (),
        weights: Sequence[float] | npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[np.float64]:
        """Train on one batch: forward and backward of all micro-batches. Collective.

        Parameters
        ----------
        batch : array or sequence of arrays, default ()
            Cut along their first dimension, like ``torch.tensor_split``. Used on the rank of stage 0, ignored on
            others. On the CPU or, with ``on_device``, on the device, where they must stay until the stream has done
            what callbacks put there. May be empty if the callback of stage 0 has its own data.
        targets : array or sequence of arrays, default ()
            The same for the rank of the last stage.
        weights : sequence of float, optional
            The factors of the micro-batches' losses; used on the rank of the last stage. By default each one's share of
            the rows of the targets (without targets, of the micro-batches), so that a mean over rows stays one.

        Returns
        -------
        array of float64
            The loss of each micro-batch, without its weight, the same on every rank; NaN if none was reported.

        Raises
        ------
        TesseraTimeout
            A stage did not send within the communicator's timeout; the message names it.
        Aborted
            Another rank failed; the message names its stage and micro-batch.
        InvalidState
            Arrays of a micro-batch are still held after its backward; or it is called in a callback.
        InvalidArgument, TypeError
            The batch or the targets cannot be used.

        Every failure ends the pipeline on every rank; later calls raise `Aborted`.
        """
        return self._pass(_core.pipeline_step, batch, targets, weights)

    def eval(
        self,
        batch: ArrayLike | Sequence[ArrayLike] = (),
        targets: ArrayLike | Sequence[ArrayLike] = (),
        weights: Sequence[float] | npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[np.float64]:
        """Evaluate one batch: only the forwards. Collective. Otherwise as `step`."""
        return self._pass(_core.pipeline_eval, batch, targets, weights)

    def _pass(self, run: Callable[..., None], batch: Any, targets: Any, weights: Any) -> npt.NDArray[np.float64]:
        inputs: list[_core.Tensor] = []
        goals: list[_core.Tensor] = []
        factors = refusal = None
        try:
            if self._is_first:
                inputs = _tensors(batch, "batch")
            if self._is_last:
                goals = _tensors(targets, "targets")
                factors = None if weights is None else self._factors(weights)
        except Exception as error:  # the call fails on every rank, not only here
            refusal = error
        losses = np.empty(self._microbatches)
        run(self._handle, inputs, goals, factors, tensor(losses), refusal)
        return losses

    @staticmethod
    def _factors(weights: Any) -> _core.Tensor:
        numbers = np.ascontiguousarray(weights, np.float64)
        if numbers.ndim != 1:
            raise InvalidArgument(f"weights has shape {numbers.shape}; it must be one number for each micro-batch")
        return tensor(numbers, writable=False)

    def sum_tied(self, grad: ArrayLike, stages: Sequence[int]) -> None:
        """After a step: sum the gradient of a parameter that several stages share, such as a tied embedding.

        Each rank that has one of the stages calls it once for each such parameter, in the same order; no other rank
        does. A rank that has several of them has one gradient for them.

        Parameters
        ----------
        grad : array
            Floating-point, the same dtype and number of elements on every rank. It becomes the sum over these ranks,
            added in the order of the stages. One on a device is summed on the host: the call waits for the stream.
        stages : sequence of int
            In ascending order, the same on every rank.
        """
        _core.pipeline_sum_tied(self._handle, _core.Tensor(grad, strided=True), _numbers(stages, "stages"))

    def set_stream(self, stream: Stream = None) -> None:
        """Name the CUDA stream on which callbacks compute, with ``on_device=True``.

        Parameters
        ----------
        stream : stream, optional
            PyTorch's, CuPy's, any object with ``__cuda_stream__``, or an address. None, as at first, is the device's
            default stream. It must exist until another one is set. A new one continues after what the previous one had.

        Raises
        ------
        InvalidArgument
            The stream is of another device, or the pipeline is on the CPU.
        InvalidState
            In a callback.
        """
        _core.pipeline_set_stream(self._handle, stream_of(stream))

    def stats(self) -> PipelineStats:
        """Statistics of the last step or evaluation on this rank; zeros before the first."""
        stats = PipelineStats(*_core.pipeline_stats(self._handle))
        return stats if stats.longest_stage != -1 else stats._replace(longest_stage=None, longest_rank=None)

    def close(self) -> None:
        """Refuse further calls. The memory is freed once no array of it is held. Ranks that wait for this one fail."""
        _core.pipeline_destroy(self._handle)

    def __repr__(self) -> str:
        closed = " (closed)" if self.closed else ""
        return f"<tessera.Pipeline with stages {', '.join(map(str, self._stages)) or 'unknown'} here{closed}>"


def _numbers(given: Any, what: str) -> list[int]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(f"{what} is {given!r}; it must be a sequence of int, such as [{given!r}]")
    return list(given)


def _tensors(given: Any, what: str) -> list[_core.Tensor]:
    arrays = given if isinstance(given, (list, tuple)) else [given]
    found = []
    for i, array in enumerate(arrays):
        try:
            found.append(_core.Tensor(array, 0, False, strided=True))
        except (InvalidArgument, TypeError) as error:
            name = f"{what}[{i}]" if arrays is given else what
            raise type(error)(f"{name}: {error}") from None
    return found
