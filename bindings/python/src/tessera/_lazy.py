"""State that PyTorch's optimizers create in their first step, but that a load needs before it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from .errors import Mismatch

_T = TypeVar("_T")


def load_with_lazy_state(parts: Mapping[str, Any], load: Callable[[], _T], saved: Callable[[], Iterable[str]]) -> _T:
    """Call `load` with state allocated for PyTorch optimizers in `parts` that have not stepped yet.

    State is allocated for all trained parameters first. If that does not fit, it is allocated for the parameters that
    have state according to `saved`, the names in the checkpoint as the state names them. State that was not loaded is
    removed afterwards, so that the optimizer's next step creates it.
    """
    fresh = list(_fresh("", parts))
    for _, optimizer in fresh:
        _make(optimizer, [param for param in _params(optimizer) if param.requires_grad])
    try:
        return load()
    except Mismatch:
        names = list(saved()) if fresh else []
        if not sum(_make_as_saved(f"{name}.", optimizer, names) for name, optimizer in fresh):
            raise
        return load()
    finally:
        for _, optimizer in fresh:
            for param in [param for param, state in optimizer.state.items() if _is_as_made(state)]:
                del optimizer.state[param]


def _fresh(prefix: str, parts: Any) -> Iterator[tuple[str, Any]]:
    """The optimizers without state in `parts`, at any depth, with their names."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for key, part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
        if isinstance(part, torch.optim.Optimizer):
            if not part.state:
                yield f"{prefix}{key}", part
        elif isinstance(part, (Mapping, list, tuple)):
            yield from _fresh(f"{prefix}{key}.", part)


def _params(optimizer: Any) -> list[Any]:
    """The parameters in the order of their numbers in ``state_dict()``."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _make_as_saved(prefix: str, optimizer: Any, names: Iterable[str]) -> bool:
    """Allocate state for the parameters that have one in `names`. False if they are the same as now."""
    of_optimizer = [name[len(prefix) :].split(".") for name in names if name.startswith(prefix)]
    if not of_optimizer:
        return False  # it was not saved: the error names all that is missing
    numbers = {parts[1] for parts in of_optimizer if parts[0] == "state" and len(parts) > 2}
    wanted = [param for number, param in enumerate(_params(optimizer)) if str(number) in numbers]
    if set(map(id, wanted)) == set(map(id, optimizer.state)):
        return False
    optimizer.state.clear()
    _make(optimizer, wanted)
    return True


def _make(optimizer: Any, wanted: list[Any]) -> None:
    """Give these parameters NaN state by a step with learning rate 0 and zero gradients, which changes no parameter."""
    torch = sys.modules["torch"]
    params = _params(optimizer)
    grads, rates = [param.grad for param in params], [group.get("lr") for group in optimizer.param_groups]
    try:
        for param in params:
            param.grad = None
        for param in wanted:
            param.grad = torch.zeros_like(param)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    except TypeError:  # the step of LBFGS needs a closure: no state without one
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


def _floats(state: Mapping[str, Any]) -> Iterator[Any]:
    return (value for value in state.values() if hasattr(value, "is_floating_point") and value.is_floating_point())


def _is_as_made(state: Mapping[str, Any]) -> bool:
    return any(bool(tensor.isnan().all()) for tensor in _floats(state))
