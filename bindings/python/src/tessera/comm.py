"""The ranks of a job: joining, splitting, shared memory, and how they part."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from operator import index
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core
from ._base import Closable, Timeout, checked, milliseconds
from .collectives import Collectives
from .errors import InvalidArgument, TesseraError
from .launch import in_words, tell_launcher, watch_uncaught
from .store import Store
from .tensor import DTypeLike, array_over, dtype_of

__all__ = ["Comm", "init"]


def init(
    *,
    timeout: Timeout = None,
    heartbeat_timeout: Timeout = None,
    backend: str | None = None,
    spin_count: int | None = None,
    name: str | None = None,
) -> Comm:
    """Join the job that the environment describes.

    ``tessera run`` and torchrun, mpirun and srun are understood; with none of them the job is this process alone.
    Collective: returns when all ranks have come.

    Parameters
    ----------
    timeout : float or timedelta, default 600
        Deadline of each collective, in seconds. ``TESSERA_TIMEOUT_MS`` in the environment is another default.
    heartbeat_timeout : float or timedelta, default 30
        How long another host that is waited for may give no sign of life, though it is asked, before it counts as lost
        (`PeerLost`), in seconds; 0: it is not asked, and only the deadline ends the wait.
        ``TESSERA_HEARTBEAT_TIMEOUT_MS`` in the environment is another default.
    backend : str, default "auto"
        ``"auto"`` (shared memory between ranks of one host, Gloo between hosts), ``"shm"`` or ``"gloo"``.
        ``TESSERA_BACKEND`` in the environment is another default.
    spin_count : int, default -1
        Busy turns before a waiting rank yields; -1 takes it from ranks and usable cores.
    name : str, default "world"
        In messages and logs.

    Returns
    -------
    Comm
        Best used in a ``with`` block: at its end the ranks part in order; if it is left by an exception the peers are
        told at once.

    Raises
    ------
    TesseraTimeout
        A rank never came.
    PeerLost
        A rank of ``tessera run`` ended without coming.
    PermissionDenied
        There is no job token, or it was refused.
    Unsupported
        The backend is one between GPUs, as ``"cuda:nccl"``: there is none yet.
    """
    options = _options(timeout, heartbeat_timeout, backend, spin_count, name)
    watch_uncaught()  # joining may fail
    return Comm._adopt(_core.comm_from_env(**options), options)


def _options(
    timeout: Timeout, heartbeat_timeout: Timeout, backend: str | None, spin_count: int | None, name: str | None
) -> dict[str, Any]:
    """Those that are given, as `_core` takes them."""
    options = {
        "timeout_ms": milliseconds(timeout),
        "heartbeat_timeout_ms": milliseconds(heartbeat_timeout),
        "backend": backend,
        "spin_count": spin_count,
        "name": name,
    }
    return {key: value for key, value in options.items() if value is not None}


class Comm(Collectives):
    """The ranks of a group. Made by `init`, `Comm.create`, `split` or a `Mesh`.

    Its collectives, `all_reduce` and the others, are described by `Collectives`.
    """

    _handle: _core.Comm
    _options: dict[str, Any]
    _children: list[weakref.ref[Closable]]
    _rank: int
    _world_size: int
    _warns = True

    def __init__(self) -> None:
        raise TypeError("use tessera.init(), Comm.create(), comm.split() or a Mesh")

    @classmethod
    def _adopt(cls, handle: _core.Comm, options: Mapping[str, Any] | None = None) -> Comm:
        comm = cls.__new__(cls)
        comm._handle = handle
        comm._options = dict(options or {})
        comm._children = []
        comm._is_shrunk = False
        comm._rank = _core.comm_rank(handle)
        comm._world_size = _core.comm_world_size(handle)
        return comm

    @classmethod
    def create(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout: Timeout = None,
        heartbeat_timeout: Timeout = None,
        backend: str | None = None,
        spin_count: int | None = None,
        name: str | None = None,
    ) -> Comm:
        """Join `world_size` ranks that use the same store. Collective.

        Parameters
        ----------
        store : Store
            Used until the communicator is closed.
        rank : int
            0 to ``world_size - 1``, each once.
        world_size : int
            1 to 4096.
        timeout, heartbeat_timeout, backend, spin_count, name
            As `init` takes them.

        Raises
        ------
        TesseraTimeout
            A rank never came; the message names it.
        """
        options = _options(timeout, heartbeat_timeout, backend, spin_count, name)
        watch_uncaught()
        handle = _core.comm_create(checked(store, Store, "store")._handle, rank, world_size, **options)
        return cls._adopt(handle, options)

    def _options_with(self, given: dict[str, Any]) -> dict[str, Any]:
        """This communicator's options but for those that are given; none, which says the same, if none are."""
        return {**self._options, "timeout_ms": milliseconds(self.timeout), **given} if given else {}

    @property
    def rank(self) -> int:
        """This rank's number, 0 to ``world_size - 1``."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    @property
    def transport(self) -> str:
        """The transport in use: ``"shm"``, ``"gloo"``, ``"hierarchical"`` (several hosts) or ``"self"``."""
        return _core.comm_transport(self._handle)

    @property
    def timeout(self) -> float:
        """The deadline of each operation, in seconds, counted from when it starts.

        Setting it, to seconds or a timedelta, counts for operations that this rank issues from then on: a short one for
        a call that must be answered soon, a long one for an evaluation on one rank. What was issued keeps its own, so
        that it may be set back at once. Each rank has its own; the first that passes fails the communicator on all.
        """
        return _core.comm_timeout(self._handle) / 1000

    @timeout.setter
    def timeout(self, timeout: float | timedelta) -> None:
        if (ms := milliseconds(timeout)) is None:
            raise TypeError("the timeout is None: seconds or a timedelta are expected")
        _core.comm_set_timeout(self._handle, ms)

    @property
    def error(self) -> TesseraError | None:
        """What failed the communicator; None while it is well."""
        return _core.comm_error(self._handle)

    def split(
        self,
        color: int,
        key: int = 0,
        *,
        timeout: Timeout = None,
        heartbeat_timeout: Timeout = None,
        backend: str | None = None,
        spin_count: int | None = None,
        name: str | None = None,
    ) -> Comm | None:
        """Divide the ranks into groups; those of one `color` form one, ordered by `key`, then by rank. Collective.

        Parameters
        ----------
        color : int
            The group; negative: this rank joins none.
        key : int
            The order inside the group.
        timeout, heartbeat_timeout, backend, spin_count, name
            As `init` takes them; by default those of this communicator.

        Returns
        -------
        Comm or None
            This rank's group, which does not need this communicator any longer; None for a negative color.
        """
        options = self._options_with(_options(timeout, heartbeat_timeout, backend, spin_count, name))
        handle = _core.comm_split(self._handle, color, key, **options)
        return None if handle is None else self._own(Comm._adopt(handle, options or self._options))

    def shrink(
        self,
        *,
        timeout: Timeout = None,
        heartbeat_timeout: Timeout = None,
        backend: str | None = None,
        spin_count: int | None = None,
        name: str | None = None,
    ) -> Comm:
        """Go on with the ranks that are left after a failure. Collective of those.

        Those who call it form a new communicator, in the order of this one. Ranks that died, or closed this one, are
        known to be gone; for others it waits until the deadline and then goes on without them: when such a rank comes
        after all, it gets `Aborted`. All that was made from this communicator (buffers, DDP, savers, meshes) is out of
        use: close it, make it anew, and load a checkpoint, since a collective that failed left its arrays half done.

        Parameters
        ----------
        timeout, heartbeat_timeout, backend, spin_count, name
            As `init` takes them; by default those of this communicator. `timeout` is also the deadline for ranks that
            do not come.

        Raises
        ------
        Aborted
            The other ranks have gone on without this one.
        TesseraTimeout, PeerLost
            No communicator could be made of those that are left.
        TesseraIOError
            The store at which the ranks met is gone: rank 0 served it, and died.

        Examples
        --------
        >>> try:  # doctest: +SKIP
        ...     train(comm)
        ... except (ts.PeerLost, ts.TesseraTimeout, ts.Aborted):
        ...     comm = comm.shrink()
        """
        options = self._options_with(_options(timeout, heartbeat_timeout, backend, spin_count, name))
        rest = _core.comm_shrink(self._handle, **options)
        self._is_shrunk = True
        return Comm._adopt(rest, options or self._options)

    def buffer(self, size: int) -> npt.NDArray[np.uint8]:
        """Allocate bytes that the peers reach without a copy. Collective.

        Parameters
        ----------
        size : int
            Bytes, the same on every rank.

        Returns
        -------
        ndarray of uint8, shape (size,)
            Zeros. The memory lives as long as the array or any view of it.
        """
        handle = _core.buffer_create(self._handle, size)
        return array_over(_core.buffer_data(handle), 6, (size,))

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> npt.NDArray[Any]:
        """Allocate an array that the peers reach without a copy. Collective.

        Parameters
        ----------
        shape : int or sequence of int
            The same on every rank.
        dtype : DType, NumPy type or name
            The same on every rank.

        Returns
        -------
        ndarray
            Zeros, contiguous, aligned to 4096 bytes.
        """
        dims = tuple(index(length) for length in shape) if isinstance(shape, Sequence) else (index(shape),)
        kind = dtype_of(dtype)
        if any(length < 0 for length in dims):
            raise InvalidArgument(f"the shape {dims} has a negative size")
        handle = _core.buffer_create(self._handle, math.prod(dims) * kind.numpy.itemsize)
        return array_over(_core.buffer_data(handle), kind, dims)

    def finalize(self) -> None:
        """Wait for all ranks and all issued work; no collective may follow. Collective."""
        _core.comm_finalize(self._handle)

    def abort(self, reason: str | None = None) -> None:
        """Fail every waiting and later operation, here and at the peers, with `Aborted`. From any thread.

        Parameters
        ----------
        reason : str, optional
            Told to the peers.
        """
        _core.comm_abort(self._handle, reason)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write this rank's flight record: the last 1,024 operations and their times, as JSON lines. From any thread.

        ``tessera trace why-hung`` and ``tessera trace merge`` read the records of all ranks together. Under
        ``tessera run --trace-dir DIR`` each communicator writes its own when it fails, or else at its end.

        Parameters
        ----------
        path : path-like
            The file to write; one that is there is replaced whole.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        _core.comm_write_trace(self._handle, os.fspath(path))

    def close(self) -> None:
        """Leave the communicator; what is still running is aborted. Local: see `finalize` for the orderly end."""
        _core.comm_destroy(self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Part from the other ranks.

        After an exception, ``sys.exit`` among them, the launcher is told why, for its error summary, and the peers by
        `abort`. Otherwise savers made from this communicator finish what they are saving, then all ranks wait for each
        other; if that fails it is told in the same way. One that was shrunk is closed. In all cases savers, meshes and
        groups made from it are closed with it.
        """
        if self.closed or self._handle.foreign:  # a forked child leaves the block: the job is its parent's
            return
        try:
            if error is not None:
                self._fail(error)
            elif not self._is_shrunk:
                try:
                    for child in self._living():
                        child._finish()
                    self.finalize()
                except BaseException as failure:
                    self._fail(failure)
                    raise
        finally:
            for child in self._living():
                child.close()
            self.close()

    def _fail(self, error: BaseException) -> None:
        tell_launcher(error)  # before the peers fail in their turn: the first error is the cause
        self.abort(in_words(error))

    def _own(self, child: Any) -> Any:
        """Close `child` when this communicator's with block ends."""
        self._children = [ref for ref in self._children if ref() is not None]
        self._children.append(weakref.ref(child))
        return child

    def _living(self) -> list[Closable]:
        children = [ref() for ref in reversed(self._children)]
        return [child for child in children if child is not None and not child.closed]

    def __repr__(self) -> str:
        if self.closed:
            return f"<tessera.Comm rank {self._rank} of {self._world_size} (closed)>"
        return f"<tessera.Comm rank {self._rank} of {self._world_size}>"
