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

    The exception goes on; the first one of a process counts. ``sys.exit`` is no failure.

    Examples
    --------
    >>> @ts.record  # doctest: +SKIP
    ... def main(): ...
    """

    @functools.wraps(main)
    def recorded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return main(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            message = f"{type(error).__name__}: {error}".replace("\0", " ")
            trace = "".join(traceback.format_exception(error)).replace("\0", " ")
            try:
                _core.record_error(message.splitlines()[0], trace)
            except TesseraError as refused:
                error.add_note(f"tessera.record could not tell the launcher: {refused}")
            raise

    return recorded
