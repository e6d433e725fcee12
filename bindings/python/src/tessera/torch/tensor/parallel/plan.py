"""Which modules a plan means: its keys, resolved as PyTorch resolves them, before any module is changed.

A key is a path of tokens; each token is an fnmatch pattern for the names of direct children. An empty token is the
module that the path has reached, so ``""`` is the root.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["Place", "Resolved", "describe", "resolve"]


@dataclass(frozen=True)
class Place:
    """A style and a module that it applies to."""

    key: str
    name: str  # of the module
    module: nn.Module
    style: ParallelStyle

    def __str__(self) -> str:
        name = repr(self.name) if self.name else f"the {type(self.module).__name__} itself"
        return name + (f" (plan key {self.key!r})" if self.key != self.name else "")


@dataclass
class Resolved:
    """What the keys of a plan match."""

    places: list[Place] = field(default_factory=list)  # in the order in which styles apply
    unmatched: list[str] = field(default_factory=list)  # keys that match nothing, each with the closest names
    skipped: list[str] = field(default_factory=list)  # keys without a style; patterns that miss some modules


def resolve(root: nn.Module, plan: Any) -> Resolved:
    """Resolve a style, or a dict of styles (or of further dicts, which PyTorch accepts too).

    Raises
    ------
    TypeError
        The plan, a key or a style is of another type.
    """
    resolved = Resolved()
    _resolve(root, root, "", plan, "", resolved)
    return resolved


def _resolve(root: nn.Module, module: nn.Module, name: str, plan: Any, key: str, into: Resolved) -> None:
    if isinstance(plan, ParallelStyle):
        into.places.append(Place(key, name, module, plan))
        return
    if plan is None and key:
        into.skipped.append(f"{key!r} (no style)")
        return
    if not isinstance(plan, Mapping):
        where = f"the style of key {key!r}" if key else "parallelize_plan"
        raise TypeError(f"{where} is a {type(plan).__name__}; it must be a ParallelStyle, or a dict of them by name")
    for path, style in plan.items():
        if not isinstance(path, str):
            raise TypeError(f"parallelize_plan has the key {path!r}; keys must be names of modules")
        whole = f"{key}.{path}" if key else path
        for below, found in _matches(root, module, name, path, whole, into):
            _resolve(root, found, below, style, whole, into)


def _matches(
    root: nn.Module, module: nn.Module, name: str, path: str, key: str, into: Resolved
) -> list[tuple[str, nn.Module]]:
    reached = [(name, module)]
    for token in path.split("."):
        if token == "":
            continue
        following, misses = [], []
        for at, parent in reached:
            found = [(_join(at, child), one) for child, one in _children(parent) if fnmatch(child, token)]
            following += found
            if not found:
                misses.append(at)
        if not following:
            into.unmatched.append(f"{key!r} ({_why(root, key, token, reached)})")
            return []
        if misses:
            into.skipped.append(f"{key!r} (no {token!r} in {_listed(misses)})")
        reached = list({id(one): (at, one) for at, one in reversed(following)}.values())[::-1]  # each module once
    return reached


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """With all names of a child that has several."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _why(root: nn.Module, key: str, token: str, reached: list[tuple[str, nn.Module]]) -> str:
    where = repr(reached[0][0]) if reached[0][0] else f"the {type(root).__name__}"
    missing = f"no {token!r} in {where}" + (f" and {len(reached) - 1} more" if len(reached) > 1 else "")
    children = list(dict.fromkeys(child for _, parent in reached for child, _ in _children(parent)))
    names = [name for name, _ in root.named_modules() if name]
    near = get_close_matches(token, children, 3, 0.5)
    near = near or [name for name in names if name.endswith(f".{key}")][:3] or get_close_matches(key, names, 3, 0.7)
    if near:
        return f"{missing}; did you mean {' or '.join(map(repr, near))}?"
    return f"{missing}, which has {_listed(children) if children else 'no modules'}"


def _listed(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def describe(plan: Any) -> Iterator[str]:
    """A line for each entry of the plan, the same on all ranks that have the same plan."""
    if not isinstance(plan, Mapping):
        yield f"the plan is {_style(plan)}"
        return
    for key, style in plan.items():
        if isinstance(style, Mapping):
            yield from (f"below plan key {key!r}, {line}" for line in describe(style))
        else:
            yield f"plan key {key!r} is {_style(style)}"


def _style(style: Any) -> str:
    """A style and its arguments; without memory addresses, which differ between ranks."""
    default: Any = object.__repr__
    if type(style).__repr__ is default:
        return type(style).__qualname__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(style))
