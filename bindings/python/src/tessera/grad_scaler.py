"""Dynamic loss scaling, so that small float16 gradients are not lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from . import _core, _options
from ._base import Closable, checked
from ._base_optimizer import Optimizer
from ._given import raw, takes

if TYPE_CHECKING:
    from ._options import GradScalerOptions

__all__ = ["GradScaler"]

_Loss = TypeVar("_Loss")


@takes(_options.GRAD_SCALER)
class GradScaler(Closable):
    """A dynamic scale for the loss, like `torch.amp.GradScaler`.

    A step whose gradients hold an infinity or NaN (over an `FSDP`: on any rank) is skipped, on all ranks, and the scale
    shrinks. After `growth_interval` successful steps in a row it grows. As a part of a `State` it is saved and loaded
    with its options, under the names of PyTorch's ``state_dict``.

    Parameters
    ----------
    <options>

    Examples
    --------
    >>> scaler = ts.GradScaler()  # doctest: +SKIP
    >>> with fsdp.backward("fc2") as (params, grads):  # doctest: +SKIP
    ...     grads["w2"][...] = scaler.scale(error).T @ hidden
    >>> fsdp.wait()  # doctest: +SKIP
    >>> scaler.step(opt)  # doctest: +SKIP
    True
    >>> scaler.update()  # doctest: +SKIP
    """

    _handle: _core.GradScaler

    def __init__(self, **options: Unpack[GradScalerOptions]) -> None:
        self._handle = _core.grad_scaler_create(**raw(_options.GRAD_SCALER, options))

    def get_scale(self) -> float:
        """The factor for losses."""
        return _core.grad_scaler_scale(self._handle)

    def scale(self, loss: _Loss) -> _Loss:
        """A loss (or an array or tensor where backward begins) times the scale."""
        of_any_kind: Any = loss
        scaled: _Loss = of_any_kind * self.get_scale()
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale before the step, for example to clip them. At most once between updates.

        Collective over an `FSDP`.
        """
        _core.grad_scaler_unscale(self._handle, checked(optimizer, Optimizer, "optimizer")._handle)

    def step(self, optimizer: Optimizer) -> bool:
        """Divide the gradients by the scale, unless `unscale_` has, and step the optimizer if all are finite.

        Collective over an `FSDP`.

        Returns
        -------
        bool
            Whether the optimizer stepped; the same on every rank.

        Raises
        ------
        InvalidState
            A second step before `update`, the gradients are being reduced, or the optimizer steps in backward.
        """
        return _core.grad_scaler_step(self._handle, checked(optimizer, Optimizer, "optimizer")._handle)

    def update(self) -> None:
        """End the iteration: update the scale according to the gradients of all optimizers."""
        _core.grad_scaler_update(self._handle)

    def close(self) -> None:
        """Refuse further calls."""
        _core.grad_scaler_destroy(self._handle)

    def __repr__(self) -> str:
        return "<tessera.GradScaler (closed)>" if self.closed else f"<tessera.GradScaler of {self.get_scale():g}>"
