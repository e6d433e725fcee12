"""The library's log: to standard error, to a function, or to Python's `logging`.

``TESSERA_LOG`` in the environment (debug, info, warning, error, off) sets the initial level; the default is warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from . import _core
from .errors import InvalidArgument, Named

__all__ = ["Level", "set_callback", "set_level", "to_logging"]


class Level(Named):
    """Log levels."""

    DEBUG = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    OFF = 5


def set_level(level: Level | str) -> None:
    """Drop lines below `level`.

    Parameters
    ----------
    level : Level or str
        ``"debug"``, ``"info"``, ``"warning"``, ``"error"`` or ``"off"``.
    """
    if isinstance(level, str) and level.upper() not in Level.__members__:
        raise InvalidArgument(f"the log level is {level!r}; it must be one of {', '.join(Level.__members__).lower()}")
    if not isinstance(level, (str, int)):
        raise TypeError(f"the log level is a {type(level).__name__}; it must be a Level or its name")
    _core.log_set_level(int(Level[level.upper()] if isinstance(level, str) else level))


def set_callback(fn: Callable[[Level, str], object] | None) -> None:
    """Send the log to a function.

    Parameters
    ----------
    fn : callable or None
        Called with level and line, from any thread, possibly from several at once; must not call the library. None
        restores standard error.
    """
    if fn is None:
        _core.log_set_callback(None)
        return
    if not callable(fn):
        raise TypeError(f"the log's receiver is a {type(fn).__name__}; it must be a function or None")
    receiver = fn
    _core.log_set_callback(lambda level, line: receiver(Level(level), line))


_TO_LOGGING = {
    Level.DEBUG: logging.DEBUG,
    Level.INFO: logging.INFO,
    Level.WARNING: logging.WARNING,
    Level.ERROR: logging.ERROR,
}


def to_logging(logger: logging.Logger | str = "tessera") -> None:
    """Send the log to a logger of Python's `logging`. The library's own level applies first.

    Parameters
    ----------
    logger : logging.Logger or str
        The logger or its name.
    """
    target = logging.getLogger(logger) if isinstance(logger, str) else logger
    set_callback(lambda level, line: target.log(_TO_LOGGING[level], "%s", line))
