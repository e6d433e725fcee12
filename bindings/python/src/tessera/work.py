"""An asynchronous operation. It keeps its arrays alive until it is done, even if it is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Generator
from operator import index
from typing import Any

from . import _core
from ._base import Timeout, milliseconds, stays
from .errors import TesseraError

__all__ = ["Save", "Work"]

Stream = object  # of CUDA; see Comm.on_stream


def stream_of(stream: Stream) -> int:
    """The address of a stream; 0 for None."""
    if stream is None:
        return 0
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return index((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr"):  # of PyTorch, of CuPy
        if hasattr(stream, name):
            return index(getattr(stream, name))
    try:
        return index(stream)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"stream is a {type(stream).__name__}; it must be a CUDA stream or its address") from None


class Work:
    """An operation in flight, returned by calls with ``async_op=True``. Not created by users.

    A Work can be waited for, polled, given callbacks, and awaited in an `asyncio` coroutine.
    """

    __reduce_ex__ = stays

    def __init__(self, handle: _core.Work) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Work], object]] | None = None

    def wait(self, timeout: Timeout = None) -> None:
        """Wait until the operation is done.

        Parameters
        ----------
        timeout : float or timedelta, optional
            Seconds; None waits until the operation's own deadline.

        Raises
        ------
        NotReady
            `timeout` passed; the operation continues and may be waited for again.
        TesseraError
            The error of the operation.
        """
        _core.work_wait(self._handle, milliseconds(timeout))

    def order(self, stream: Stream = None, timeout: Timeout = None) -> None:
        """Make a CUDA stream wait for the operation, and return: what the stream gets later sees the result.

        An operation on arrays in CPU memory, or one that is not yet on its stream since others are queued before it, is
        waited for as by `wait`.

        Parameters
        ----------
        stream : stream, optional
            Of the device of the arrays, as for `Comm.on_stream`; None is the device's default stream.
        timeout : float or timedelta, optional
            Of a wait, in seconds.

        Raises
        ------
        InvalidArgument
            The stream is of another device.
        TesseraError
            As for `wait`.
        """
        _core.work_order(self._handle, stream_of(stream), milliseconds(timeout))

    def done(self) -> bool:
        """Whether the operation is done, successfully or not."""
        return _core.work_test(self._handle)

    def error(self) -> TesseraError | None:
        """The error of a finished operation; None if it succeeded.

        Raises
        ------
        NotReady
            The operation is not done yet.
        """
        return _core.work_error(self._handle)

    def add_done_callback(self, fn: Callable[[Work], object]) -> None:
        """Call ``fn(work)`` when the operation is done, immediately if it already is.

        Called on a thread of the library; `fn` must neither block nor use the communicator.
        """
        with self._lock:
            first = self._callbacks is None
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(fn)
        if first:
            _core.work_on_done(self._handle, lambda _status: self._call_back())
        elif self.done():
            self._call_back()

    def _call_back(self) -> None:
        with self._lock:
            waiting, self._callbacks = self._callbacks or [], []
        for fn in waiting:
            try:
                fn(self)
            except Exception:
                logging.getLogger("tessera").exception("a completion callback failed")

    def __await__(self) -> Generator[Any, None, None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not future.done():
                failure = self.error()
                future.set_result(None) if failure is None else future.set_exception(failure)

        def wake(_work: Work) -> None:
            with contextlib.suppress(RuntimeError):  # whoever awaited it gave up, and its loop is closed
                loop.call_soon_threadsafe(settle)

        self.add_done_callback(wake)
        return future.__await__()

    def __repr__(self) -> str:
        return f"<tessera.{type(self).__name__} {'done' if self.done() else 'in flight'}>"


class Save(Work):
    """A save in the background, returned by `Saver.save_async`. It is done when the checkpoint is durable."""

    def __init__(self, handle: _core.Work) -> None:
        super().__init__(handle)
        self._staged = Work(_core.work_staged(handle))

    @property
    def staged(self) -> Work:
        """Done when the whole state is copied, so that it may be written again.

        Without `copy_on_demand` that is before `save_async` returns. If the save fails earlier, it has the save's
        error. Its callbacks may also run inside a step, close or load that makes the last copy.
        """
        return self._staged
