"""Turns: one rank works alone while the others wait for it."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from . import _core
from ._base import Closable
from .errors import TesseraError

__all__ = ["Turn"]


class Turn(Closable):
    """A turn of one rank, begun by `Comm.turn`. True on the rank whose turn it is.

    Leaving the ``with`` block ends the turn: the other ranks wait there. An exception that leaves the block on the rank
    whose turn it is becomes an error of class `UserError` on the others.

    Examples
    --------
    >>> with comm.turn(0, timeout=600) as turn:  # doctest: +SKIP
    ...     if turn:
    ...         for n, batch in enumerate(batches):
    ...             evaluate(model, batch)
    ...             turn.progress(n + 1, len(batches))
    """

    _handle: _core.Turn
    _own: bool
    _ended = False

    def __init__(self) -> None:
        raise TypeError("use comm.turn()")

    @classmethod
    def _adopt(cls, handle: _core.Turn, own: bool) -> Turn:
        turn = cls.__new__(cls)
        turn._handle = handle
        turn._own = own
        return turn

    def __bool__(self) -> bool:
        return self._own

    def progress(self, done: int, total: int = 0) -> None:
        """Report progress on the rank whose turn it is, after which the others wait up to the timeout again.

        The call does not wait. The others log a report every 10 s, and name the last one if they time out.

        Parameters
        ----------
        done : int
            Steps that are done.
        total : int, default 0
            The number of all steps; 0 if unknown.

        Raises
        ------
        PeerLost, Aborted, TesseraTimeout, Mismatch
            What a peer failed with while it waited.
        """
        _core.turn_progress(self._handle, done, total)

    def end(self, failure: str | None = None) -> None:
        """End the turn. Collective. A ``with`` block does it, unless it was done inside; a second call does nothing.

        Parameters
        ----------
        failure : str, optional
            On the rank whose turn it is: why its work failed.

        Raises
        ------
        UserError
            The rank whose turn it is has failed.
        TesseraTimeout
            That rank neither ended its turn nor reported progress in time, or another rank did not come.
        """
        if self._ended and not self.closed:
            return
        self._ended = True  # also if it fails: the library ends a turn once
        _core.turn_end(self._handle, failure)

    def close(self) -> None:
        """Free the turn and its communicator for other calls. Without an end, the others wait until their timeout."""
        _core.turn_destroy(self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.end()
            elif self._own and isinstance(error, Exception):
                with suppress(TesseraError):  # the exception itself says more
                    self.end(f"{type(error).__name__}: {error}")
        finally:
            self.close()
