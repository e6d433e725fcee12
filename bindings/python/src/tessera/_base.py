"""What the objects of this package share: closing, warning of leaks, conversion of time, and durable names."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Collection
from datetime import timedelta
from difflib import get_close_matches
from types import TracebackType
from typing import Any, ClassVar, NoReturn, SupportsIndex, TypeVar

from . import _core
from .errors import InvalidArgument

Timeout = float | timedelta | None
"""Seconds, or a timedelta; None takes the library's default."""

_Self = TypeVar("_Self", bound="Closable")
_T = TypeVar("_T")
_LONGEST = 2**31 - 1  # milliseconds, 24 days


def stays(self: object, protocol: SupportsIndex, /) -> NoReturn:
    """The ``__reduce_ex__`` of what cannot leave its process."""
    raise TypeError(f"a tessera.{type(self).__name__} belongs to its process: it can be neither pickled nor copied")


class Closable:
    """An object over a handle of the library.

    Closing is local and never waits for other ranks unless a class says so. A closed object raises `InvalidState`, and
    so does any use in a forked child. Objects that hold sockets, threads or files emit a `ResourceWarning` when they
    are collected unclosed.
    """

    _handle: _core.Handle
    _warns: ClassVar[bool] = False
    __reduce_ex__ = stays

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


def checked(value: Any, kind: type[_T], name: str, *others: object) -> _T:
    """`value`, if it is a `kind`; else a TypeError in words, which knows an argument of `others` given in its place."""
    if isinstance(value, kind):
        return value
    swapped = "; the arguments are swapped" if any(isinstance(other, kind) for other in others) else ""
    raise TypeError(f"{name} is a {type(value).__name__}; a tessera.{kind.__name__} is wanted{swapped}")


def there_are(wrong: object, names: Collection[str]) -> str:
    """What there is in the place of a name that is wrong: all names, or of many the nearest."""
    if len(names) <= 8:
        return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names) or 'none'}"
    near = get_close_matches(wrong, names, 3, 0.5) if isinstance(wrong, str) else []
    some = f"the nearest {'is' if len(near) == 1 else 'are'}" if near else "they begin with"
    return f"there are {len(names)}, {some} {', '.join(near or list(names)[:3])}"


def milliseconds(timeout: Timeout) -> int | None:
    """A timeout as the library takes it: rounded up, so that a small one is not none at all; None stays None."""
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (str, bytes)) or not hasattr(timeout, "__float__"):
        raise TypeError(f"the timeout is {timeout!r}; seconds or a timedelta are wanted")
    else:
        seconds = float(timeout)
    if math.isnan(seconds):
        raise InvalidArgument("the timeout is not a number")
    return math.ceil(max(-_LONGEST, min(seconds * 1000, _LONGEST)))


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make a directory's names durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
