"""What all optimizers share. A model and a `GradScaler` take any of them."""

from __future__ import annotations

from . import _core
from ._base import Closable

__all__ = ["Optimizer"]


class Optimizer(Closable):
    """What `SGD`, `Adam` and `AdamW` share.

    A load, `Saver.resume` too, replaces the settings, `lr` among them, by those that were saved: set `lr` after it.
    """

    _handle: _core.Optimizer

    def __init__(self) -> None:
        raise TypeError("use SGD, Adam or AdamW")

    def step(self) -> None:
        """Update every parameter from its gradient; gradients stay as they are.

        Raises
        ------
        InvalidState
            The gradients of its `DDP` are being reduced, or none were since the last step (but in `DDP.no_sync`); a
            unit of its `FSDP` is whole.
        """
        _core.optimizer_step(self._handle)

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        _core.optimizer_zero_grad(self._handle)

    def clip_grad_norm(self, max_norm: float, p: float = 2.0) -> float:
        """Scale all gradients so that their norm is at most `max_norm`; before `step`.

        Over an `FSDP` it is the norm of all shards, and every rank scales alike: collective then. Over a `DDP`, whose
        gradients are the same on every rank, it is local.

        Parameters
        ----------
        max_norm : float
            At least 0.
        p : float, default 2
            Which norm: 1 or more, or ``math.inf`` for the largest magnitude.

        Returns
        -------
        float
            The norm as it was; infinite if there are infinities or NaN, which are left as they are.
        """
        return _core.optimizer_clip_grad_norm(self._handle, max_norm, p)

    def clip_grad_value(self, most: float) -> None:
        """Bring every gradient into [-most, most]; NaN stays."""
        _core.optimizer_clip_grad_value(self._handle, most)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return _core.optimizer_lr(self._handle)

    @lr.setter
    def lr(self, lr: float) -> None:
        _core.optimizer_set_lr(self._handle, lr)

    @property
    def steps(self) -> int:
        """How many steps were made, those before a checkpoint included."""
        return _core.optimizer_steps(self._handle)

    def close(self) -> None:
        """Refuse further calls; the moments are freed when no state uses them any longer."""
        _core.optimizer_destroy(self._handle)
