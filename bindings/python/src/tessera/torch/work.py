"""Operations in flight for PyTorch: `Work` of `torch.distributed`, and futures.

PyTorch completes a future on the thread that has the result, and runs the future's callbacks there. Tessera's progress
thread must not run them: a callback may wait for another collective (PowerSGD's does), which that thread would have to
run. Therefore another thread completes futures, in the order in which their operations are done, and a further thread
those that were requested in such a callback.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from .. import _core
from ..errors import NotReady
from .errors import TesseraTimeout

__all__ = ["Pending", "future_of", "teach_is_completed"]

_NO_TIMEOUT = timedelta(0)  # PyTorch's value for no timeout
_UNKNOWN = 100  # OpType::UNKNOWN


class Pending(Work):
    """One operation of a process group, which may be several operations of a communicator.

    Parameters
    ----------
    works : list of _core.Work
        The operations in flight.
    results : list of Tensor
        The value of the future.
    finish : callable, optional
        Called once when all operations are done, before the results are visible: copies back what was copied.
    patience : timedelta, optional
        A deadline before the communicator's own; when it passes, `give_up` is called with the error's message.
    """

    def __init__(
        self,
        works: Sequence[_core.Work],
        results: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
        patience: timedelta | None = None,
        give_up: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self._works = works
        self._results = results
        self._finish = finish
        self._deadline = None if patience is None else time.monotonic() + patience.total_seconds()
        self._patience = patience
        self._give_up = give_up
        self._lock = threading.RLock()  # guards _finish and _future; again by a future that is complete when it is made
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        if finish is not None:
            self.get_future()  # so that finish() is called even if nobody waits

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the results; a timeout of zero waits until the operation's own deadline."""
        self._outcome(None if timeout <= _NO_TIMEOUT else timeout.total_seconds())
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the results. The same one on every call."""
        with self._lock:
            if self._future is None:
                self._future = future_of(self._works, self._outcome)
            return self._future

    def _outcome(self, timeout: float | None = None) -> list[torch.Tensor]:
        end = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            self._wait_for(work, end)
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        return self._results

    def _wait_for(self, work: _core.Work, end: float | None) -> None:
        ends = [when for when in (end, self._deadline) if when is not None]
        if not ends:
            return _core.work_wait(work, None)
        try:
            _core.work_wait(work, max(0, round((min(ends) - time.monotonic()) * 1000)))
        except NotReady:
            if self._deadline is None or time.monotonic() < self._deadline:
                raise
            message = f"the operation timed out after {self._patience}, the timeout of the call"
            if self._give_up is not None:
                self._give_up(message)
            raise TesseraTimeout(message) from None


def future_of(works: Sequence[_core.Work], outcome: Callable[[], Any]) -> torch.futures.Future[Any]:
    """A future of what `outcome` returns or raises; `outcome` is called once all works are done."""
    begun: torch.futures.Future[None] = torch.futures.Future()
    # Only a callback that raises becomes an error in C++ too: with set_exception() the reducer of DDP would take the
    # exception for the tensor.
    future = begun.then(lambda _: outcome())
    waiting = [work for work in works if not _core.work_test(work)]
    if not waiting:
        begun.set_result(None)
        return future
    left = len(waiting)
    depth = getattr(_here, "depth", 0)
    lock = threading.Lock()

    def done(_status: int) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        try:
            _completer(depth).submit(begun.set_result, None)
        except RuntimeError:  # the interpreter ends and starts no threads any more
            begun.set_result(None)

    for work in waiting:
        _core.work_on_done(work, done)
    return future


_here = threading.local()  # depth: in how many callbacks, one waiting for the next, this thread is


@cache
def _completer(depth: int) -> ThreadPoolExecutor:
    def begin() -> None:
        _here.depth = depth + 1

    return ThreadPoolExecutor(1, f"tessera-future-{depth}", initializer=begin)


@cache
def teach_is_completed() -> None:
    """Make `Work.is_completed` work for a backend in Python.

    PyTorch returns such a backend's work in a holder that forwards only wait() and get_future() (PyProcessGroup.hpp,
    2.15); its is_completed() is always False, and a loop that polls it would never end.
    """
    itself = Work.is_completed

    def is_completed(self: Any) -> bool:
        if itself(self):
            return True
        if self._get_op_type() != _UNKNOWN:  # the works of PyTorch's backends, which know it
            return False
        try:
            return bool(self.get_future().done())
        except (RuntimeError, NotImplementedError):  # another backend's, which has no future
            return False

    Work.is_completed = is_completed  # type: ignore[method-assign]
