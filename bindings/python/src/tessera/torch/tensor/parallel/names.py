"""The names of parallel modules, for messages: a style learns only the module that it is applied to."""

from __future__ import annotations

import weakref

from torch import nn

__all__ = ["name_of", "remember"]

_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def remember(module: nn.Module, name: str) -> None:
    """Keep the name that the module has in the model given to `parallelize_module`."""
    _names[module] = name


def name_of(module: nn.Module) -> str:
    """The module's name in quotes, or its class if it has none."""
    name = _names.get(module)
    return repr(name) if name else f"this {type(module).__name__}"
