"""Optimizers over a DDP model, or over any parameters and gradients: SGD, Adam, AdamW, as PyTorch defines them.

Settings that are not given have the library's defaults, which are PyTorch's.
"""

from __future__ import annotations

from typing import Any

from . import _core
from ._base import Closable
from .ddp import DDP, Params, named
from .errors import InvalidArgument
from .tensor import tensor

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]


class Optimizer(Closable):
    """What `SGD`, `Adam` and `AdamW` share."""

    _handle: _core.Optimizer

    def __init__(self) -> None:
        raise TypeError("use SGD, Adam or AdamW")

    def step(self) -> None:
        """Update every parameter from its gradient; gradients stay as they are."""
        _core.optimizer_step(self._handle)

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        _core.optimizer_zero_grad(self._handle)

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


def _over(params: DDP | Params, grads: Params | None) -> tuple[Any, ...]:
    """What `_core` makes an optimizer over: a DDP, or names, parameters and gradients."""
    if isinstance(params, DDP):
        if grads is not None:
            raise TypeError(f"grads is {grads!r}, but a DDP brings its gradients; settings are given by name: lr=0.001")
        return (params._handle,)
    names, arrays = named(params)
    if grads is None:
        raise InvalidArgument("gradients are missing: give a DDP, or parameters and gradients")
    grad_names, grad_arrays = named(grads, "grads")
    by_name = dict(zip(grad_names, grad_arrays, strict=True))
    missing = [name for name in names if name not in by_name]
    if missing or len(by_name) != len(names):
        extra = [name for name in grad_names if name not in names]
        raise InvalidArgument(f"parameters and gradients differ: without gradient {missing}, without parameter {extra}")
    return names, [tensor(array) for array in arrays], [tensor(by_name[name], writable=False) for name in names]


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum after Sutskever et al. 2013.

    Parameters
    ----------
    params : DDP, or named arrays as `DDP` takes them
        Contiguous arrays of float32 or float64.
    grads : named arrays, optional
        Needed without a DDP: a gradient for each parameter, by the same name.
    lr : float, default 0.001
        Learning rate.
    momentum, dampening : float, default 0
        Of the running average of gradients.
    weight_decay : float, default 0
        Times the parameter, added to the gradient.
    nesterov : bool, default False
        Needs momentum, and no dampening.
    """

    def __init__(
        self,
        params: DDP | Params,
        grads: Params | None = None,
        *,
        lr: float | None = None,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
    ) -> None:
        self._handle = _core.sgd(
            *_over(params, grads),
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )


class _AdamFamily(Optimizer):
    """The settings that `Adam` and `AdamW` share."""

    @staticmethod
    def _make(*over: Any, **settings: Any) -> _core.Optimizer:
        raise NotImplementedError

    def __init__(
        self,
        params: DDP | Params,
        grads: Params | None = None,
        *,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        self._handle = self._make(*_over(params, grads), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class Adam(_AdamFamily):
    """Adam (Kingma and Ba 2015), with bias correction.

    Parameters
    ----------
    params, grads
        As `SGD` takes them.
    lr : float, default 0.001
        Learning rate.
    betas : pair of float, default (0.9, 0.999)
        Decay of the two moments.
    eps : float, default 1e-8
        Added to the denominator.
    weight_decay : float, default 0
        Times the parameter, added to the gradient.
    """

    @staticmethod
    def _make(*over: Any, **settings: Any) -> _core.Optimizer:
        return _core.adam(*over, **settings)


class AdamW(_AdamFamily):
    """AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay.

    Parameters
    ----------
    params, grads
        As `SGD` takes them.
    lr : float, default 0.001
        Learning rate.
    betas : pair of float, default (0.9, 0.999)
        Decay of the two moments.
    eps : float, default 1e-8
        Added to the denominator.
    weight_decay : float, default 0.01
        Each step multiplies the parameters by ``1 - lr * weight_decay``.
    """

    @staticmethod
    def _make(*over: Any, **settings: Any) -> _core.Optimizer:
        return _core.adamw(*over, **settings)
