"""Optimizers of DeepSpeed that PyTorch lacks, and those that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...errors import InvalidArgument
from ..norm import norms
from .settings import Settings

__all__ = ["Lamb", "Lion", "make_optimizer"]

_NO_EFFECT = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "freeze_step", "cuda_aware")


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023): the sign of a mean of gradients, with decoupled weight decay. As DeepSpeed's.

    Parameters
    ----------
    params
        Parameters or groups of them.
    lr : float
        The learning rate.
    betas : pair of float
        The weights of the old mean in the update and in the new mean.
    weight_decay : float
        Parameters shrink by this times `lr` per step.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        _check(lr=lr, betas=betas, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                mean = state["exp_avg"]
                update = mean.lerp(param.grad, 1 - beta1).sign_()
                param.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr)
                mean.lerp_(param.grad, 1 - beta2)
        return loss


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020): Adam whose step is scaled to the norm of each parameter. As DeepSpeed's.

    Parameters
    ----------
    params
        Parameters or groups of them.
    lr : float
        The learning rate.
    bias_correction : bool
        Correct the means for their first steps, in the learning rate.
    betas : pair of float
        The weights of the old means.
    eps : float
        Added to the root of the mean square.
    weight_decay : float
        Times the parameter: added to Adam's step before its norm is taken.
    max_coeff, min_coeff : float
        Limits of the ratio of the two norms.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        _check(lr=lr, betas=betas, weight_decay=weight_decay, eps=eps)
        if not 0 <= min_coeff <= max_coeff:
            raise InvalidArgument(f"min_coeff is {min_coeff} and max_coeff {max_coeff}; expected 0 <= min <= max")
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": tuple(betas), "eps": eps}
        defaults |= {"weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient. Collective if they are DTensors."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            params, updates, rates = [], [], []
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["step"] += 1
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(param.grad, 1 - beta1)
                square.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                update = mean / (square.sqrt() + group["eps"])
                params.append(param)
                updates.append(update.add_(param, alpha=group["weight_decay"]))
                step = float(state["step"])
                correction = (1 - beta2**step) ** 0.5 / (1 - beta1**step) if group["bias_correction"] else 1.0
                rates.append(group["lr"] * correction)
            sizes, steps = norms(params, 2.0), norms(updates, 2.0)
            for param, update, rate, size, length in zip(params, updates, rates, sizes, steps, strict=True):
                ratio = 1.0
                if size > 0 and length > 0:
                    ratio = min(max(size / length, group["min_coeff"]), group["max_coeff"])
                param.add_(update, alpha=-rate * ratio)
        return loss


def make_optimizer(settings: Settings, params: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer that the configuration names.

    Raises
    ------
    InvalidArgument
        PyTorch has no such class, or it refuses the parameters; the message has both.
    """
    assert settings.optimizer is not None
    kind, options = settings.optimizer
    name = kind.lower()
    given = {key: value for key, value in options.items() if key not in _NO_EFFECT}
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    of_torch: Any
    if name in ("adam", "adamw"):
        decoupled = name == "adamw" or options.get("adam_w_mode") is not False
        of_torch = torch.optim.AdamW if decoupled else torch.optim.Adam
        # The defaults of DeepSpeed's implementations; torch_adam: PyTorch's own.
        if not options.get("torch_adam"):
            given = {"weight_decay": 0.0, **given}
        if given.pop("bias_correction", True) is False:
            raise InvalidArgument(
                "optimizer.params.bias_correction is false; PyTorch's Adam always corrects its moments"
            )
    elif name in ("lion", "lamb"):
        of_torch = Lion if name == "lion" else Lamb
    else:
        known = {"adagrad": "Adagrad", "sgd": "SGD"}
        of_torch = getattr(torch.optim, known.get(name, kind), None)
        if not (isinstance(of_torch, type) and issubclass(of_torch, torch.optim.Optimizer)):
            raise InvalidArgument(
                f"optimizer.type is {kind!r}; it must be Adam, AdamW, Adagrad, Lamb, Lion, SGD or the exact name of a "
                "class of torch.optim"
            )
    try:
        made: torch.optim.Optimizer = of_torch(params, **given)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"optimizer.params {options} do not fit {of_torch.__name__}: {error}") from error
    return made


def _check(**given: Any) -> None:
    for name, value in given.items():
        if name == "betas":
            if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
                raise InvalidArgument(f"betas is {value}; it must be two numbers of at least 0 and below 1")
        elif not value >= 0:
            raise InvalidArgument(f"{name} is {value}; it must be at least 0")


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
