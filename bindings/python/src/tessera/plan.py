"""Collectives prepared once and launched many times."""

from __future__ import annotations

from . import _core
from ._base import Closable, Timeout, milliseconds

__all__ = ["Plan"]


class Plan(Closable):
    """A prepared collective over fixed arrays, created and checked by `Comm.prepare`.

    It keeps its arrays alive. A launch matches an ordinary call of the same collective on another rank. If the plan is
    closed while a launch is in flight, the launch completes and the library keeps the arrays until then.

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
            The launch of `start` is not done.
        TesseraError
            As for the collective.
        """
        _core.plan_run(self._handle)

    def start(self) -> None:
        """Launch the collective in the background, in the order of the communicator's calls.

        Raises
        ------
        InvalidState
            The previous launch is not done.
        """
        _core.plan_start(self._handle)

    def wait(self, timeout: Timeout = None) -> None:
        """Wait until the last launch of `start` is done.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Seconds; None waits until the collective's own deadline.

        Raises
        ------
        NotReady
            `timeout` passed; the operation continues.
        TesseraError
            The error of the operation.
        """
        _core.plan_wait(self._handle, milliseconds(timeout))

    def close(self) -> None:
        """Free the plan."""
        _core.plan_destroy(self._handle)
