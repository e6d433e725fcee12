"""Optimizers for a DDP, FSDP or tensor-parallel model or any parameters.

SGD, Adam, AdamW and Adagrad are those of PyTorch, with its defaults. Settings default to the library's values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from . import _core, _options
from ._base_optimizer import Optimizer
from ._given import raw, takes
from ._params import Params, named
from .ddp import DDP
from .errors import InvalidArgument
from .fsdp import FSDP
from .tensor import tensor
from .tp import TensorParallel

if TYPE_CHECKING:
    from ._options import AdagradOptions, SGDOptions

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lamb", "Lion", "Optimizer"]


def _over(params: DDP | FSDP | TensorParallel | Params, grads: Params | None) -> tuple[Any, ...]:
    """The arguments from which `_core` makes an optimizer: a model, or names, parameters and gradients."""
    if isinstance(params, (DDP, FSDP, TensorParallel)):
        if grads is not None:
            raise TypeError(
                f"grads is {grads!r}, but a {type(params).__name__} has its own gradients; pass settings by name, such "
                "as lr=0.001"
            )
        return (params._handle,)
    names, arrays = named(params)
    if grads is None:
        raise InvalidArgument(
            "gradients are missing; pass a DDP, an FSDP, a TensorParallel, or parameters and gradients"
        )
    grad_names, grad_arrays = named(grads, "grads")
    by_name = dict(zip(grad_names, grad_arrays, strict=True))
    missing = [name for name in names if name not in by_name]
    if missing or len(by_name) != len(names):
        extra = [name for name in grad_names if name not in names]
        raise InvalidArgument(
            f"parameters and gradients differ: parameters without a gradient: {missing}, gradients without a "
            f"parameter: {extra}"
        )
    return names, [tensor(array) for array in arrays], [tensor(by_name[name], writable=False) for name in names]


@takes(_options.SGD)
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum after Sutskever et al. 2013.

    A load replaces the settings by the saved ones: set `lr` after it.

    Parameters
    ----------
    params : DDP, FSDP, TensorParallel, or named arrays as for `DDP`
        Contiguous arrays of float32 or float64. Over an `FSDP` or a `TensorParallel` the optimizer's state is sharded
        like the parameters.
    grads : named arrays, optional
        Required without a model: a gradient for each parameter, with the same name.
    <options>
    """

    def __init__(
        self,
        params: DDP | FSDP | TensorParallel | Params,
        grads: Params | None = None,
        **options: Unpack[SGDOptions],
    ) -> None:
        self._handle = _core.sgd(*_over(params, grads), **raw(_options.SGD, options))


def _betas(betas: tuple[float, float] | None) -> dict[str, float]:
    """Two betas, by their names in C."""
    if betas is None:
        return {}
    try:
        first, second = betas
    except (TypeError, ValueError):
        raise TypeError(f"betas is {betas!r}; it must be a pair of numbers") from None
    return {"beta1": first, "beta2": second}


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), with bias correction.

    A load replaces the settings by the saved ones: set `lr` after it.

    Parameters
    ----------
    params, grads
        As for `SGD`.
    lr : float, default 0.001
        Learning rate.
    betas : pair of float, default (0.9, 0.999)
        Decay rates of the two moments.
    eps : float, default 1e-8
        Added to the denominator.
    weight_decay : float, default 0
        Multiplied by the parameter and added to the gradient.
    """

    def __init__(
        self,
        params: DDP | FSDP | TensorParallel | Params,
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

    A load replaces the settings by the saved ones: set `lr` after it.

    Parameters
    ----------
    params, grads
        As for `SGD`.
    lr : float, default 0.001
        Learning rate.
    betas : pair of float, default (0.9, 0.999)
        Decay rates of the two moments.
    eps : float, default 1e-8
        Added to the denominator.
    weight_decay : float, default 0.01
        Each step multiplies the parameters by ``1 - lr * weight_decay``.
    """

    def __init__(
        self,
        params: DDP | FSDP | TensorParallel | Params,
        grads: Params | None = None,
        *,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        self._handle = _core.adamw(*_over(params, grads), lr=lr, **_betas(betas), eps=eps, weight_decay=weight_decay)


@takes(_options.ADAGRAD)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011).

    A load replaces the settings by the saved ones: set `lr` after it.

    Parameters
    ----------
    params, grads
        As for `SGD`.
    <options>
    """

    def __init__(
        self,
        params: DDP | FSDP | TensorParallel | Params,
        grads: Params | None = None,
        **options: Unpack[AdagradOptions],
    ) -> None:
        self._handle = _core.adagrad(*_over(params, grads), **raw(_options.ADAGRAD, options))


class Lamb(Optimizer):
    """Lamb (You et al. 2020) as DeepSpeed's FusedLamb, for parameters on the CPU.

    The direction of Adam plus weight decay is scaled for each parameter by its trust ratio: the norm of the parameter
    over that of the direction, or 1 if one of them is 0. The norms have the same bits however ranks divide a parameter.
    Over an `FSDP`, a `TensorParallel` or a `DDP` of its slices, `step` is collective. A load replaces the settings by
    the saved ones: set `lr` after it.

    Parameters
    ----------
    params, grads
        As for `SGD`; not a `DDP` with `share_params`.
    lr : float, default 0.001
        Learning rate.
    betas : pair of float, default (0.9, 0.999)
        Decay rates of the two moments.
    eps : float, default 1e-8
        Added to the denominator.
    weight_decay : float, default 0
        Multiplied by the parameter and added to the direction.
    bias_correction : bool, default True
        Multiply `lr` by ``sqrt(1 - beta2**step) / (1 - beta1**step)``.
    max_coeff : float, default 10
        The largest trust ratio.
    min_coeff : float, default 0.01
        The smallest trust ratio.
    """

    def __init__(
        self,
        params: DDP | FSDP | TensorParallel | Params,
        grads: Params | None = None,
        *,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        max_coeff: float | None = None,
        min_coeff: float | None = None,
    ) -> None:
        self._handle = _core.lamb(
            *_over(params, grads),
            lr=lr,
            **_betas(betas),
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )


class Lion(Optimizer):
    """Lion (Chen et al. 2023): each element moves by `lr` against the sign of a mean of gradients.

    An element whose mean is 0 stays, where DeepSpeed's Lion moves it. A load replaces the settings by the saved ones:
    set `lr` after it.

    Parameters
    ----------
    params, grads
        As for `SGD`.
    lr : float, default 0.0001
        Learning rate.
    betas : pair of float, default (0.9, 0.99)
        Weight of the mean in the direction of a step, and its decay rate.
    weight_decay : float, default 0
        Each step multiplies the parameters by ``1 - lr * weight_decay``.
    """

    def __init__(
        self,
        params: DDP | FSDP | TensorParallel | Params,
        grads: Params | None = None,
        *,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        weight_decay: float | None = None,
    ) -> None:
        self._handle = _core.lion(*_over(params, grads), lr=lr, **_betas(betas), weight_decay=weight_decay)
