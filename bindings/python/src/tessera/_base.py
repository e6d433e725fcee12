"""Shared by the objects of this package: closing, leak warnings, timeout conversion and durable names."""

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
"""Seconds or a timedelta, at most 24 days, to which a longer one is shortened; None selects the library's default."""

_Self = TypeVar("_Self", bound="Closable")
_T = TypeVar("_T")
_LONGEST = 2**31 - 1  # milliseconds, 24 days


def stays(self: object, protocol: SupportsIndex, /) -> NoReturn:
    """The ``__reduce_ex__`` of objects that cannot leave their process."""
    raise TypeError(f"a tessera.{type(self).__name__} cannot be pickled or copied: it belongs to its process")


class Closable:
    """Base of all objects that own a handle of the library.

    Closing is local and never waits for other ranks unless a class documents it. Using a closed object raises
    `InvalidState`, as does any use in a forked child. Objects that hold sockets, threads or files emit a
    `ResourceWarning` if they are garbage-collected without being closed.
    """

    _handle: _core.Handle
    _warns: ClassVar[bool] = False
    __reduce_ex__ = stays

    @property
    def closed(self) -> bool:
        """Whether the object is closed."""
        return handle.closed if (handle := getattr(self, "_handle", None)) is not None else True

    def close(self) -> None:
        """Free the object. Does nothing if it is already closed."""
        raise NotImplementedError

    def _finish(self) -> None:
        """Complete background work before the communicator that this object was made from ends."""

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
    """Return `value` if it is a `kind`; else raise a TypeError, which notes if it was swapped with one of `others`."""
    if isinstance(value, kind):
        return value
    swapped = "; the arguments are swapped" if any(isinstance(other, kind) for other in others) else ""
    raise TypeError(f"{name} is a {type(value).__name__}; it must be a tessera.{kind.__name__}{swapped}")


def there_are(wrong: object, names: Collection[str]) -> str:
    """Suggestions for a wrong name, for messages: all names if they are few, else the closest ones.

    A name is close if it is spelled alike, in any case, or has these initials ("mse").
    """
    if len(names) <= 8:
        return f"known: {', '.join(names) or 'none'}"
    near: list[str] = []
    if isinstance(wrong, str):
        lower = wrong.lower()
        near = [name for name in names if "".join(word[:1] for word in name.split("_")) == lower]
        near += [name for name in get_close_matches(lower, names, 3, 0.5) if name not in near]
    return f"{len(names)} are known, {'the closest' if near else 'the first'}: {', '.join(near or list(names)[:3])}"


def milliseconds(timeout: Timeout) -> int | None:
    """A timeout in milliseconds, rounded up so that a small one does not become 0; None stays None."""
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, (str, bytes)) or not hasattr(timeout, "__float__"):
        raise TypeError(f"the timeout is {timeout!r}; it must be in seconds or a timedelta")
    else:
        seconds = float(timeout)
    if math.isnan(seconds):
        raise InvalidArgument("the timeout is not a number")
    return math.ceil(max(-_LONGEST, min(seconds * 1000, _LONGEST)))


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Sync a directory, so that the names in it are durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
