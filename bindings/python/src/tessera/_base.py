"""What the objects of this package share: closing, warning of leaks, and conversion of time."""

from __future__ import annotations

import math
import warnings
from datetime import timedelta
from types import TracebackType
from typing import ClassVar, TypeVar

from . import _core

Timeout = float | timedelta | None
"""Seconds, or a timedelta; None takes the library's default."""

_Self = TypeVar("_Self", bound="Closable")
_T = TypeVar("_T")


class Closable:
    """An object over a handle of the library.

    Closing is local and never waits for other ranks unless a class says so. A closed object raises `InvalidState`, and
    so does any use in a forked child. Objects that hold sockets, threads or files emit a `ResourceWarning` when they
    are collected unclosed.
    """

    _handle: _core.Handle
    _warns: ClassVar[bool] = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return handle.closed if (handle := getattr(self, "_handle", None)) is not None else True

    def close(self) -> None:
        """Free the object. Closing twice is fine."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Complete what runs in the background, before the communicator that this came from ends."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if self._warns and handle is not None and not handle.closed and not handle.foreign:
            warnings.warn(f"unclosed {self!r}; use a with block or close()", ResourceWarning, 2, source=self)

    def __repr__(self) -> str:
        state = " (closed)" if self.closed else ""
        return f"<tessera.{type(self).__name__}{state}>"


def checked(value: _T, kind: type[_T]) -> _T:
    """`value`, if it is a `kind`; else a TypeError in words."""
    if not isinstance(value, kind):
        raise TypeError(f"wanted is a tessera.{kind.__name__}, not a {type(value).__name__}")
    return value


def milliseconds(timeout: float | timedelta) -> int:
    """A timeout as the library takes it: rounded up, so that a small one is not none at all."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if math.isnan(seconds):
        raise ValueError("the timeout is not a number")
    return min(math.ceil(seconds * 1000), 2**31 - 1) if math.isfinite(seconds) else 2**31 - 1


def given(**options: object) -> dict[str, object]:
    """Those options that the caller set; the library knows the defaults of the others."""
    return {name: value for name, value in options.items() if value is not None}
