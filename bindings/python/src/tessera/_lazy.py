"""State that PyTorch's optimizers make at their first step, and that a load has to find before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from .errors import Mismatch

_T = TypeVar("_T")


def load_with_lazy_state(parts: Mapping[str, Any], load: Callable[[], _T]) -> _T:
    """Call `load`, for which optimizers of PyTorch in `parts` that made no step have their state.

    What was not loaded is gone afterwards, so that their first step makes it; and so it is before, where what was saved
    has none either.
    """
    made = list(_made(parts))
    try:
        return load()
    except Mismatch:
        for optimizer in made:
            optimizer.state.clear()
        if made:
            with suppress(Mismatch):
                return load()
        raise
    finally:
        for optimizer in made:
            for param in [param for param, state in optimizer.state.items() if _is_as_made(state)]:
                del optimizer.state[param]


def _made(parts: Any) -> Iterator[Any]:
    """The optimizers without state in `parts`, at any depth, which have it now: NaN."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if isinstance(parts, torch.optim.Optimizer):
        if not parts.state and _make(torch, parts):
            yield parts
    elif isinstance(parts, (list, tuple)):
        for part in parts:
            yield from _made(part)
    elif isinstance(parts, Mapping):
        for part in parts.values():
            yield from _made(part)


def _make(torch: Any, optimizer: Any) -> bool:
    """Make a step of rate 0 with gradients of 0, which changes no parameter; whether there is state now."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    grads, rates = [param.grad for param in params], [group.get("lr") for group in optimizer.param_groups]
    try:
        for param in params:
            param.grad = torch.zeros_like(param)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    except TypeError:  # LBFGS has a step that wants a closure: no state without one
        optimizer.state.clear()
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
    for state in optimizer.state.values():
        for tensor in _floats(state):
            tensor.fill_(float("nan"))
    return bool(optimizer.state)


def _floats(state: Mapping[str, Any]) -> Iterator[Any]:
    return (value for value in state.values() if hasattr(value, "is_floating_point") and value.is_floating_point())


def _is_as_made(state: Mapping[str, Any]) -> bool:
    return any(bool(tensor.isnan().all()) for tensor in _floats(state))
