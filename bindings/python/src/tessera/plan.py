"""Collectives that are prepared once and launched many times."""

from __future__ import annotations

from . import _core
from ._base import Closable, Timeout, milliseconds

__all__ = ["Plan"]


class Plan(Closable):
    """A collective over the same arrays, checked when it was prepared; `Comm.prepare` makes one.

    It keeps its arrays. A launch may meet the ordinary call of another rank. Closed while a start is in flight, it
    leaves that to its end and its arrays to the library.

    Examples
    --------
    >>> plan = comm.prepare("all_reduce", outputs=[x])  # doctest: +SKIP
    >>> for _ in range(1000):  # doctest: +SKIP
    ...     plan.run()
    """

    _handle: _core.Plan

    def __init__(self) -> None:
        raise TypeError("use comm.prepare()")

    @classmethod
    def _adopt(cls, handle: _core.Plan) -> Plan:
        plan = cls.__new__(cls)
        plan._handle = handle
        return plan

    def run(self) -> None:
        """Launch the collective and return when it is done.

        Raises
        ------
        InvalidState
            What `start` launched is not done.
        TesseraError
            As the collective does.
        """
        _core.plan_run(self._handle)

    def start(self) -> None:
        """Launch the collective in the background, in the order of the communicator's calls.

        Raises
        ------
        InvalidState
            What was started before is not done.
        """
        _core.plan_start(self._handle)

    def wait(self, timeout: Timeout = None) -> None:
        """Return when what was started last is done.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Seconds; None waits until the collective's own deadline.

        Raises
        ------
        NotReady
            `timeout` passed; the operation goes on.
        TesseraError
            What the operation failed with.
        """
        _core.plan_wait(self._handle, milliseconds(timeout))

    def close(self) -> None:
        """Free the plan."""
        _core.plan_destroy(self._handle)
