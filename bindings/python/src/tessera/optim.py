"""Optimizers over a DDP or FSDP model, or over any parameters and gradients: SGD, Adam, AdamW, as PyTorch defines them.

Settings that are not given have the library's defaults, which are PyTorch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from . import _core, _options
from ._base_optimizer import Optimizer
from ._given import raw, takes
from .ddp import DDP, Params, named
from .errors import InvalidArgument
from .fsdp import FSDP
from .tensor import tensor

if TYPE_CHECKING:
    from ._options import SGDOptions

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]


def _over(params: DDP | FSDP | Params, grads: Params | None) -> tuple[Any, ...]:
    """What `_core` makes an optimizer over: a DDP, an FSDP, or names, parameters and gradients."""
    if isinstance(params, (DDP, FSDP)):
        if grads is not None:
            raise TypeError(
                f"grads is {grads!r}, but a {type(params).__name__} brings its gradients; settings are given by name: "
                "lr=0.001"
            )
        return (params._handle,)
    names, arrays = named(params)
    if grads is None:
        raise InvalidArgument("gradients are missing: give a DDP or an FSDP, or parameters and gradients")
    grad_names, grad_arrays = named(grads, "grads")
    by_name = dict(zip(grad_names, grad_arrays, strict=True))
    missing = [name for name in names if name not in by_name]
    if missing or len(by_name) != len(names):
        extra = [name for name in grad_names if name not in names]
        raise InvalidArgument(f"parameters and gradients differ: without gradient {missing}, without parameter {extra}")
    return names, [tensor(array) for array in arrays], [tensor(by_name[name], writable=False) for name in names]


@takes(_options.SGD)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum after Sutskever et al. 2013.

    A load replaces the settings by those that were saved: set `lr` after it.

    Parameters
    ----------
    params : DDP, FSDP, or named arrays as `DDP` takes them
        Contiguous arrays of float32 or float64. Over an `FSDP` its state is cut as the shards are.
    grads : named arrays, optional
        Needed without a model: a gradient for each parameter, by the same name.
    <options>
    """

    def __init__(
        self,
        params: DDP | FSDP | Params,
        grads: Params | None = None,
        **options: Unpack[SGDOptions],
    ) -> None:
        self._handle = _core.sgd(*_over(params, grads), **raw(_options.SGD, options))


def _betas(betas: tuple[float, float] | None) -> dict[str, float]:
    """Of Adam, by their names in C."""
    if betas is None:
        return {}
    try:
        first, second = betas
    except (TypeError, ValueError):
        raise TypeError(f"betas is {betas!r}; a pair of numbers is wanted") from None
    return {"beta1": first, "beta2": second}


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), with bias correction.

    A load replaces the settings by those that were saved: set `lr` after it.

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

    def __init__(
        self,
        params: DDP | FSDP | Params,
        grads: Params | None = None,
        *,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        self._handle = _core.adam(*_over(params, grads), lr=lr, **_betas(betas), eps=eps, weight_decay=weight_decay)


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay.

    A load replaces the settings by those that were saved: set `lr` after it.

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

    def __init__(
        self,
        params: DDP | FSDP | Params,
        grads: Params | None = None,
        *,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        self._handle = _core.adamw(*_over(params, grads), lr=lr, **_betas(betas), eps=eps, weight_decay=weight_decay)
