"""What all optimizers share. A model and a `GradScaler` take any of them."""

from __future__ import annotations

from . import _core
from ._base import Closable, checked
from .comm import Comm
from .work import Stream, stream_of

__all__ = ["Optimizer"]


class Optimizer(Closable):
    """Base of `SGD`, `Adam`, `AdamW`, `Adagrad`, `Lion` and `Lamb`.

    A load, including `Saver.resume`, replaces the settings, including `lr`, by the saved ones: set `lr` after it.
    """

    _handle: _core.Optimizer

    def __init__(self) -> None:
        raise TypeError("use SGD, Adam, AdamW, Adagrad, Lion or Lamb")

    @staticmethod
    def _adopt(handle: _core.Optimizer) -> Optimizer:
        optimizer = Optimizer.__new__(Optimizer)
        optimizer._handle = handle
        return optimizer

    def step(self) -> None:
        """Update every parameter from its gradient; gradients are unchanged.

        With `Lamb` over an `FSDP` or a `TensorParallel` it is collective.

        Raises
        ------
        InvalidState
            The gradients of its `DDP` are being reduced, or none were reduced since the last step (except in
            `DDP.no_sync`); or a unit of its `FSDP` is unsharded.
        """
        _core.optimizer_step(self._handle)

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        _core.optimizer_zero_grad(self._handle)

    def join(self, comm: Comm) -> None:
        """Join the optimizers of ranks that have different parameters, such as the stages of a pipeline.

        From now on, `clip_grad_norm` and `GradScaler.unscale` take the gradients of all of them into account and are
        collective. A parameter that several stages share under the same name counts once. Collective, once.

        Parameters
        ----------
        comm : Comm
            One rank of each stage, such as those of the pipeline.

        Raises
        ------
        InvalidArgument
            Two ranks hold different parts of a parameter.
        InvalidState
            A rank has joined its optimizer already.
        """
        _core.optimizer_join(self._handle, checked(comm, Comm, "comm")._handle)

    def clip_grad_norm(self, max_norm: float, p: float = 2.0) -> float:
        """Scale all gradients so that their norm is at most `max_norm`. Call it before `step`.

        Over an `FSDP` or a `TensorParallel` it uses the norm of all shards or slices and is collective. Over a `DDP`,
        whose gradients are the same on every rank, it is local unless `join` was called.

        Parameters
        ----------
        max_norm : float
            At least 0.
        p : float, default 2
            The norm's order: at least 1, or ``math.inf`` for the largest magnitude.

        Returns
        -------
        float
            The norm before scaling; infinite if there are infinities or NaN, which are left unchanged.
        """
        return _core.optimizer_clip_grad_norm(self._handle, max_norm, p)

    def clip_grad_value(self, most: float) -> None:
        """Clamp every gradient to [-most, most]; NaN is unchanged."""
        _core.optimizer_clip_grad_value(self._handle, most)

    def set_stream(self, stream: Stream) -> None:
        """Run all later calls in the order of a CUDA stream, for parameters on a device.

        Before the first call they run on the device's default stream. `step` and `zero_grad` return once they are on
        the stream; calls that return a number wait for it.

        Parameters
        ----------
        stream : stream
            Of the parameters' device, as for `Comm.on_stream`; None is the default stream. Keep it, and the previous
            one until this call has returned.

        Raises
        ------
        InvalidArgument
            The stream is of another device, or the parameters are in CPU memory.
        """
        _core.optimizer_set_stream(self._handle, stream_of(stream))

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return _core.optimizer_lr(self._handle)

    @lr.setter
    def lr(self, lr: float) -> None:
        _core.optimizer_set_lr(self._handle, lr)

    @property
    def steps(self) -> int:
        """Number of steps made, including those before a loaded checkpoint."""
        return _core.optimizer_steps(self._handle)

    def close(self) -> None:
        """Refuse further calls. The moments are freed once no state uses them."""
        _core.optimizer_destroy(self._handle)
