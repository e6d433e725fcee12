"""PyTorch's schedules, run by `tessera.Pipeline`.

Each class is a subclass of PyTorch's of the same name, which checks the arguments, splits the batch and merges the
outputs. What lies between, `_step_microbatches`, is replaced. The ranks connect in the first `step` or `eval`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Literal, NoReturn

import torch
from torch.distributed.pipelining import schedules as _theirs

from ... import _core
from ...comm import Comm
from ...errors import InvalidArgument, Unsupported
from ...pipeline import Pipeline, PipelineStats
from ..meeting import own_communicator
from .routes import routes_of
from .runner import Batch, Runner

__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "get_schedule_class",
]

_comms: weakref.WeakKeyDictionary[Any, Comm] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards the above


def _communicator_of(group: Any) -> Comm:
    """A communicator for the pipelines of a process group, kept as long as the group. Collective the first time."""
    chosen = torch.distributed.group.WORLD if group is None else group
    with _lock:
        comm = _comms.get(chosen)
        if comm is None or comm.closed:
            comm = _comms[chosen] = own_communicator(chosen, "pipelines")
            weakref.finalize(chosen, comm.close)
    return comm


class _Run(_theirs._PipelineSchedule):
    """What replaces PyTorch's execution of a schedule."""

    _order: str | None = None
    """The schedule's name in `tessera.Pipeline`; None: `pipeline_order`, which the program has loaded."""
    _pipe: Pipeline | None = None
    _runner: Runner
    _refusal: Exception | None = None

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Train on one batch. Collective over the ranks of the pipeline.

        Parameters
        ----------
        *args
            The batch, on the rank of the first stage; other ranks' are ignored. Tensors are split along dimension 0
            (or by `args_chunk_spec`) into `n_microbatches` parts, which need not have the same size.
        target : Tensor, optional
            On the rank of the last stage: split like the batch and passed to `loss_fn`.
        losses : list, optional
            On the rank of the last stage: cleared, then filled with the loss of each micro-batch, in order, not scaled.
        return_outputs : bool
            Whether the rank of the last stage returns the outputs.
        loss_kwargs : dict, optional
            Further arguments of `loss_fn`.
        arg_mbs, kwarg_mbs, target_mbs : list, optional
            Instead of the batch and the target: one tuple, dict or target for each micro-batch.
        finalize_gradients : bool
            False: the gradients of FSDP stages are not reduced in this step, but added to those of the next.
        **kwargs
            Arguments for the stages of this rank, split like the batch.

        Returns
        -------
        On the rank of the last stage the outputs, merged along dimension 0 (or by `output_merge_spec`); else None.

        Raises
        ------
        RuntimeError
            There is a `loss_fn`, and gradients are disabled: call `eval`.
        InvalidArgument, ValueError, TypeError, AssertionError
            The batch cannot be split, a target is missing, or there is one without a `loss_fn`. The step then fails on
            every rank.
        Aborted
            Another rank failed; the message names its stage and micro-batch.

        An exception in a stage or in `loss_fn` fails the step on every rank, and is raised on its own rank. After a
        failure the schedule cannot be used again; make a new one.
        """
        self._refusal = None
        return super().step(
            *args,
            target=target,
            losses=losses,
            return_outputs=return_outputs,
            loss_kwargs=loss_kwargs,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=target_mbs,
            finalize_gradients=finalize_gradients,
            **kwargs,
        )

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run only the forwards, without gradients. Collective. Arguments as those of `step`; without a target, no
        losses are computed."""
        return super().eval(
            *args,
            target=target,
            losses=losses,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target_mbs=target_mbs,
            **kwargs,
        )

    def stats(self) -> PipelineStats:
        """Statistics of the last step or evaluation on this rank. Not part of PyTorch's API."""
        return self._pipeline().stats()

    def _own_stages(self) -> list[Any]:
        raise NotImplementedError

    def _get_microbatch_inputs(self, *given: Any) -> tuple[Any, Any, Any]:
        """As PyTorch's. An error is kept for the first callback, because the other ranks wait for this one."""
        try:
            found: tuple[Any, Any, Any] = super()._get_microbatch_inputs(*given)
        except Exception as error:
            self._refusal = error
            return None, None, None
        return found

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        pipe, runner = self._pipeline(), self._runner
        last = next((stage for stage in self._own_stages() if stage.is_last), None)
        batch = None
        if self._refusal is None:
            try:
                self._check_target(last, target_mbs, losses)
                args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
                batch = Batch(args, kwargs, target_mbs, loss_kwargs or {}, return_outputs, self._finalize_gradients)
            except Exception as error:
                self._refusal = error
        runner.begin(batch)
        runner.refusal, self._refusal = self._refusal, None
        try:
            if self._has_backward:
                pipe.step()
            else:
                pipe.eval()
            if last is None:
                return
            last.output_chunks = [runner.outputs[which] for which in sorted(runner.outputs)]
            self._internal_losses = [runner.losses[which] for which in sorted(runner.losses)]
            self._update_losses(last, losses)
            self._internal_losses = []
        finally:
            runner.end()

    def _check_target(self, last: Any, targets: list[Any] | None, losses: list[Any] | None) -> None:
        if last is None:
            return
        if targets is not None and self._loss_fn is None:
            raise InvalidArgument("there is a target, but the schedule has no loss_fn; pass loss_fn to its constructor")
        if targets is None and self._has_backward:
            raise InvalidArgument("the rank of the last stage has no target; pass target= or target_mbs=")
        if losses is not None and targets is None:
            raise InvalidArgument("losses needs a target, and a schedule with a loss_fn")

    def _pipeline(self) -> Pipeline:
        """Collective at first."""
        if self._pipe is None:
            stages = self._own_stages()
            routes = routes_of(stages[0])
            scale = 1 / self._n_microbatches if self.scale_grads else 1.0
            self._runner = runner = Runner(stages, self._loss_fn, scale, routes)
            order: dict[str, Any] = {"schedule": self._order} if self._order else {"schedule_csv": self._csv()}
            pipe = Pipeline(
                _communicator_of(stages[0].group),
                [stage.stage_index for stage in stages],
                runner.forward,
                runner.backward,
                backward_input=runner.backward_input,
                backward_weight=runner.backward_weight,
                microbatches=self._n_microbatches,
                edges=routes.edges,
                **order,
            )
            number = _core.pipeline_stages(pipe._handle)
            for stage in stages:
                if stage.num_stages != number:
                    pipe.close()
                    raise InvalidArgument(
                        f"stage {stage.stage_index} was made with num_stages={stage.num_stages}, but the ranks have "
                        f"{number} stages together"
                    )
            self._pipe = pipe
        return self._pipe

    def _csv(self) -> str:
        order = self.pipeline_order
        if not order:
            raise InvalidArgument(f"{type(self).__name__} has no order; load one by _load_csv, or use another schedule")
        return "".join(
            ",".join("" if one is None else _cell(one) for one in order[rank]) + "\n" for rank in sorted(order)
        )


def _cell(action: Any) -> str:
    return str(action).replace("BACKWARD_INPUT", "I").replace("BACKWARD_WEIGHT", "W")


class PipelineScheduleSingle(_Run, _theirs.PipelineScheduleSingle):
    """The base class of schedules with one stage per rank: stage i is on rank i.

    Parameters
    ----------
    stage : PipelineStage
        This rank's.
    n_microbatches : int
        The number of parts of a batch; it need not divide the batch.
    loss_fn : callable, optional
        ``loss_fn(output, target, **loss_kwargs)`` of a micro-batch, a tensor with one element. Without it, `step` only
        computes outputs.
    args_chunk_spec, kwargs_chunk_spec : optional
        How arguments are split, by `TensorChunkSpec`; by default tensors along dimension 0.
    output_merge_spec : optional
        How outputs are merged.
    scale_grads : bool
        Gradients are those of the mean of the losses of the micro-batches; if False, of their sum. The losses are
        scaled before their backward, never the gradients, so gradients may add up over several steps.
    """

    def _own_stages(self) -> list[Any]:
        return [self._stage]


class PipelineScheduleMulti(_Run, _theirs.PipelineScheduleMulti):
    """The base class of schedules with several stages per rank.

    Parameters
    ----------
    stages : list of PipelineStage
        This rank's: those with ``stage_index % ranks == rank``, or for `ScheduleZBVZeroBubble` and `ScheduleDualPipeV`
        ``[rank, 2 * ranks - 1 - rank]``.
    n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads
        As of `PipelineScheduleSingle`.
    **options
        PyTorch's other options, which concern its own execution, have no effect.
    """

    def _own_stages(self) -> list[Any]:
        return list(self._stages)

    def _prepare_schedule_with_comms(self, actions: dict[int, list[Any]], format: str = "compute_only") -> None:
        """Leave out all communication: the executor sends when something is computed."""
        if format == "compute_comms":
            self.pipeline_order = {rank: [one for one in some if one.is_compute_op] for rank, some in actions.items()}
            self._validate_and_set_stage_mapping(self.pipeline_order)

    def _load_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only") -> None:
        """Load an order of computations, in either format of PyTorch. Call it before the first step."""
        super()._load_csv(filename, format)
        self._order = None

    def register_custom_function(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported."""
        raise Unsupported("custom functions of schedules are not supported")


class _PipelineScheduleRuntime(PipelineScheduleMulti, _theirs._PipelineScheduleRuntime):
    """An order that the program loads by `_load_csv`."""


class _ScheduleForwardOnly(PipelineScheduleSingle, _theirs._ScheduleForwardOnly):
    """Only forwards; it has no `loss_fn`."""

    _order = "gpipe"


class ScheduleGPipe(PipelineScheduleSingle, _theirs.ScheduleGPipe):
    """All forwards, then all backwards."""

    _order = "gpipe"


class Schedule1F1B(PipelineScheduleSingle, _theirs.Schedule1F1B):
    """Forwards and backwards alternate: a rank keeps as many activations as there are stages from its own on."""

    _order = "1f1b"


class ScheduleLoopedBFS(PipelineScheduleMulti, _theirs.ScheduleLoopedBFS):
    """All forwards of a rank's first stage, then of its next; then all backwards."""

    _order = "looped_bfs"


class ScheduleInterleaved1F1B(PipelineScheduleMulti, _theirs.ScheduleInterleaved1F1B):
    """1F1B with several stages per rank, which shortens the bubbles."""

    _order = "interleaved_1f1b"


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti, _theirs.ScheduleInterleavedZeroBubble):
    """Interleaved 1F1B with a split backward."""

    _order = "interleaved_zero_bubble"


class ScheduleZBVZeroBubble(PipelineScheduleMulti, _theirs.ScheduleZBVZeroBubble):
    """Two stages per rank in a V, with a split backward."""

    _order = "zbv"


class ScheduleDualPipeV(PipelineScheduleMulti, _theirs.ScheduleDualPipeV):
    """Two stages per rank in a V; part of the backwards are split."""

    _order = "dualpipev"


def get_schedule_class(schedule_name: str) -> Any:
    """The class of a schedule.

    Parameters
    ----------
    schedule_name : str
        One of PyTorch's names, in any case, such as "1F1B" or "ZBVZeroBubble".

    Raises
    ------
    ValueError
        There is no such schedule; the message lists all.
    """
    return globals()[_theirs.get_schedule_class(schedule_name).__name__]


def __getattr__(name: str) -> Any:
    """Names that PyTorch's module has besides, of whatever version is installed."""
    if name.startswith("__") or not hasattr(_theirs, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_theirs, name)
