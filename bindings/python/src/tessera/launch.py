"""What a program and its launcher tell each other."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
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
        except SystemExit:
            raise
        except BaseException as error:
            tell_launcher(error)
            raise

    return recorded


def tell_launcher(error: BaseException) -> None:
    """Tell the launcher why this process fails; the first error of a process counts.

    Takes Tessera's own frames out of the error's traceback, which so ends where the program called it.
    """
    _strip_own_frames(error)
    if not isinstance(error, (Exception, KeyboardInterrupt, SystemExit)):
        return
    trace = "".join(traceback.format_exception(error))
    if error.__traceback__ is None:  # it was raised in a call of Tessera's that has not returned yet
        stack = reversed([(frame, line) for frame, line in traceback.walk_stack(sys._getframe()) if not _is_own(frame)])
        frames = traceback.StackSummary.extract(stack).format()
        trace = "".join(["Traceback (most recent call last):\n", *frames, trace])
    try:
        _core.record_error(in_words(error), _plain(trace))
    except TesseraError as refused:  # the error file cannot be written
        error.add_note(f"tessera could not tell the launcher: {refused}")


def _is_own(frame: FrameType) -> bool:
    # Those of Cython have no globals under the limited API; their function's name says where they are.
    of_cython = frame.f_code.co_name.startswith("tessera._core.")
    return of_cython or str(frame.f_globals.get("__name__")).split(".")[0] == "tessera"


def _strip_own_frames(error: BaseException) -> None:
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        shown = rest.pop()
        if shown is None or id(shown) in seen:
            continue
        seen.add(id(shown))
        rest += [shown.__cause__, shown.__context__]
        kept = [trace for trace in _chain(shown.__traceback__) if not _is_own(trace.tb_frame)]
        for trace, following in zip(kept, [*kept[1:], None], strict=False):
            trace.tb_next = following
        shown.__traceback__ = kept[0] if kept else None


def _chain(trace: TracebackType | None) -> list[TracebackType]:
    chain = []
    while trace is not None:
        chain.append(trace)
        trace = trace.tb_next
    return chain


def in_words(error: BaseException) -> str:
    """Type and message of any exception, also of one that cannot say what it is, as text that the library takes."""
    if isinstance(error, SystemExit):
        status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        text = "" if error.code is None or isinstance(error.code, int) else f": {error.code}"
        return _plain(f"it left the job with exit status {status} (sys.exit{text})")
    try:
        text = str(error)
    except Exception:
        text = "an error whose message cannot be printed"
    return _plain(f"{type(error).__name__}: {text}")


def _plain(text: str) -> str:
    return text.replace("\0", " ").encode("utf-8", "backslashreplace").decode()
