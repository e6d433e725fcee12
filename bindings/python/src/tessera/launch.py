"""What a program and its launcher tell each other."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from . import _core
from .errors import TesseraError

__all__ = ["preempt_requested", "record"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def preempt_requested() -> bool:
    """Whether the launcher was asked to stop: save and return soon. Costs nothing; always False without a launcher."""
    return _core.preempt_requested()


def record(main: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a program's main function, so that the launcher's error summary shows why it failed.

    Needed for what fails outside a communicator's ``with`` block, which tells the launcher by itself. The exception
    goes on; the first one of a process counts. ``sys.exit`` is no failure.

    Examples
    --------
    >>> @ts.record  # doctest: +SKIP
    ... def main(): ...
    """

    if not callable(main):
        raise TypeError(f"tessera.record decorates a function, not a {type(main).__name__}")

    @functools.wraps(main)
    def recorded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return main(*args, **kwargs)
        except BaseException as error:
            tell_launcher(error)
            raise

    return recorded


def tell_launcher(error: BaseException) -> None:
    """Tell the launcher why this process fails; the first error of a process counts. ``sys.exit`` is no failure."""
    if not isinstance(error, (Exception, KeyboardInterrupt)):
        return
    try:
        _core.record_error(in_words(error).splitlines()[0], _plain("".join(traceback.format_exception(error))))
    except TesseraError as refused:  # the error file cannot be written
        error.add_note(f"tessera could not tell the launcher: {refused}")


def in_words(error: BaseException) -> str:
    """Type and message of any exception, also of one that cannot say what it is, as text that the library takes."""
    try:
        text = str(error)
    except Exception:
        text = "an error whose message cannot be printed"
    return _plain(f"{type(error).__name__}: {text}")


def _plain(text: str) -> str:
    return text.replace("\0", " ").encode("utf-8", "backslashreplace").decode()
