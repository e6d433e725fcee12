"""Communication between a program and its launcher: preemption requests and error reports."""

from __future__ import annotations

import functools
import inspect
import os
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
    """Whether the launcher was asked to stop; then save and return soon. Cheap; always False without a launcher."""
    return _core.preempt_requested()


def record(main: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a program's main function so that the launcher's error summary shows why it failed.

    Needed only for exceptions that something else handles before they end the program, such as a command-line
    framework or a thread: uncaught exceptions of the main thread are reported automatically. The exception is raised
    again; only the first one of a process is reported. ``sys.exit`` is not an error.

    Examples
    --------
    >>> @ts.record  # doctest: +SKIP
    ... def main(): ...
    """

    if not callable(main):
        raise TypeError(f"tessera.record decorates a function, got a {type(main).__name__}")

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


def watch_uncaught(*, joining: bool = True) -> None:
    """Report uncaught exceptions of this process to the launcher, if there is one.

    Called on import and again on joining, because a hook that the program set in between would replace this one. On
    import, only the first process of a rank does so: the programs that it runs inherit its environment, but their
    failures are not the rank's.
    """
    path = os.environ.get("TESSERA_ERROR_FILE") or os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    own = f"{os.getpid()} {path}"
    first = os.environ.get(_REPORTER, "")
    if not joining and first.endswith(f" {path}") and first != own:
        return
    os.environ[_REPORTER] = own
    if not isinstance(sys.excepthook, _TellUncaught):
        sys.excepthook = _TellUncaught(sys.excepthook)
    sys.excepthook.process = os.getpid()


_REPORTER = "_TESSERA_REPORTER"  # "PID FILE": the process that reports to FILE


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _TellUncaught:
    """A `sys.excepthook` that reports the exception and then calls the previous hook."""

    def __init__(self, former: _Hook) -> None:
        self.former = former
        self.process = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        error.__traceback__ = trace
        if self.process == os.getpid():  # not of a forked child
            tell_launcher(error)
        if not isinstance(error, TesseraError) or _is_of_program(self.former):
            self.former(kind, error, error.__traceback__)
            return
        # The message first: the calls of every rank come below it.
        frames = "".join(traceback.format_tb(error.__traceback__)).rstrip("\n")
        print(in_words(error) + (f"\nat (most recent call last):\n{frames}" if frames else ""), file=sys.stderr)


def _is_of_program(hook: _Hook) -> bool:
    """Whether the program set the hook itself, for example to send exceptions to an error tracker."""
    while True:
        if isinstance(hook, _TellUncaught):
            hook = hook.former
        elif getattr(hook, "__name__", "") == "_distributed_excepthook":  # PyTorch's: the rank before each line
            hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
        else:
            return hook is not sys.__excepthook__


def tell_launcher(error: BaseException) -> None:
    """Report to the launcher why this process fails; only the first error of a process is reported.

    Removes Tessera's own frames from the error's traceback, so that it ends where the program called Tessera; for
    Tessera's errors also PyTorch's frames, through which the program called.
    """
    _strip_own_frames(error)
    if not isinstance(error, (Exception, KeyboardInterrupt, SystemExit)):
        return
    trace = "".join(traceback.format_exception(error))
    if error.__traceback__ is None:  # it was raised in a call of Tessera's that has not returned yet
        inner = _inner_packages(error)
        stack = reversed(
            [(frame, line) for frame, line in traceback.walk_stack(sys._getframe()) if not _is_of(frame, inner)]
        )
        frames = traceback.StackSummary.extract(stack).format()
        trace = "".join(["Traceback (most recent call last):\n", *frames, trace])
    try:
        words = in_words(error)
        facts = _found_by_python(error, words)
        if facts is None:
            _core.record_error(words, _plain(trace))
        else:
            _core.record_error_about(words, _plain(trace), *facts)
    except TesseraError as refused:  # the error file cannot be written
        error.add_note(f"tessera could not report this error to the launcher: {refused}")


def _found_by_python(error: BaseException, words: str) -> tuple[int, int] | None:
    """Code and peer of the error that `words` describe (`error` or a cause), if the library does not know them."""
    cause: BaseException | None = error
    for _ in range(100):  # there may be circles
        if isinstance(cause, TesseraError) and cause._launcher_peer is not None and _plain(str(cause)) in words:
            return int(cause.code), cause._launcher_peer
        cause = None if cause is None else cause.__cause__ or cause.__context__
    return None


def _inner_packages(error: BaseException) -> set[str]:
    return {"tessera", "torch"} if isinstance(error, TesseraError) else {"tessera"}


def _is_of(frame: FrameType, packages: set[str]) -> bool:
    # Cython frames have no globals under the limited API; their function name shows the module.
    of_cython = frame.f_code.co_name.startswith("tessera._core.")
    return of_cython or str(frame.f_globals.get("__name__")).split(".")[0] in packages


def _strip_own_frames(error: BaseException) -> None:
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        shown = rest.pop()
        if shown is None or id(shown) in seen:
            continue
        seen.add(id(shown))
        rest += [shown.__cause__, shown.__context__]
        inner = _inner_packages(shown)
        kept = [trace for trace in _chain(shown.__traceback__) if not _is_of(trace.tb_frame, inner)]
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
    """Type and message of any exception, even one whose ``str()`` fails, as text that the library accepts."""
    if isinstance(error, SystemExit):
        status = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
        text = "" if error.code is None or isinstance(error.code, int) else f": {error.code}"
        return _plain(f"it left the job with exit status {status} (sys.exit{text})")
    try:
        text = str(error)
    except Exception:
        text = "(the error's message cannot be printed)"
    return _plain(f"{type(error).__name__}: {text}")


def _plain(text: str) -> str:
    return text.replace("\0", " ").encode("utf-8", "backslashreplace").decode()
