"""Struct options as keyword arguments of public classes. The generated `_options.py` lists them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ._base import there_are
from .collectives import op_of
from .errors import InvalidArgument
from .tensor import dtype_of

_T = TypeVar("_T")


class Option(NamedTuple):
    annotation: str
    doc: str
    numbers: dict[str, int] | None = None
    """For an enumeration, the number of each name."""

    def raw(self, name: str, value: Any) -> Any:
        """A value as `_core` takes it; None stays None."""
        if value is None:
            return None
        if self.numbers is not None:
            if value not in self.numbers:
                raise InvalidArgument(f"{name} is {value!r}; it must be one of {', '.join(map(repr, self.numbers))}")
            return self.numbers[value]
        if self.annotation.startswith("ReduceOp"):
            return op_of(value)
        return int(dtype_of(value)) if self.annotation.startswith("DTypeLike") else value


Options = dict[str, Option]


def raw(options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options, as `_core` takes them."""
    for name in given:
        if name not in options:
            raise TypeError(f"there is no option {name!r}; {there_are(name, options)}")
    return {name: options[name].raw(name, value) for name, value in given.items()}


def takes(options: Options) -> Callable[[_T], _T]:
    """Decorates a class or function whose last parameter is ``**options``: adds the options to its signature, and their
    descriptions to its docstring at ``<options>``."""

    def named(taker: _T) -> _T:
        init: Any = taker
        if isinstance(taker, type):
            init = init.__init__
        signature = inspect.signature(init)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        more = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=f"{option.annotation} | None"
            )
            for name, option in options.items()
        ]
        init.__signature__ = signature.replace(parameters=[*own, *more])
        lines = []
        for name, option in options.items():
            lines.append(f"{name} : {option.annotation}, optional")
            lines += textwrap.wrap(option.doc, 112, initial_indent="    ", subsequent_indent="    ")
        doc = taker.__doc__ or ""
        indent = doc.partition("<options>")[0].rpartition("\n")[2]
        taker.__doc__ = doc.replace("<options>", f"\n{indent}".join(lines))
        return taker

    return named
