"""The ranks of a job: joining, splitting, shared buffers and an orderly end."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from operator import index
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import _core
from ._base import Closable, Timeout, checked, milliseconds
from .collectives import Collectives, OnStream
from .errors import InvalidArgument, TesseraError
from .launch import in_words, tell_launcher, watch_uncaught
from .store import Store
from .tensor import DTypeLike, array_over, dtype_of
from .turn import Turn
from .work import Stream, stream_of

__all__ = ["Comm", "init"]

_CREATIONS = ("model", "pipeline", "mesh", "comm")  # in the order of the library's numbers


def init(
    *,
    timeout: Timeout = None,
    heartbeat_timeout: Timeout = None,
    backend: str | None = None,
    spin_count: int | None = None,
    name: str | None = None,
    cuda_device: int | None = None,
) -> Comm:
    """Join the job that the environment describes.

    Supports ``tessera run``, torchrun, mpirun, srun and Indexed Jobs of Kubernetes; with none of them the job is this
    process alone. Collective: returns once all ranks have joined.

    Parameters
    ----------
    timeout : float or timedelta, default 600
        Deadline of each collective, in seconds. ``TESSERA_TIMEOUT_MS`` in the environment overrides the default.
    heartbeat_timeout : float or timedelta, default 30
        How long another host may fail to answer heartbeats while ranks wait for it, before it counts as lost
        (`PeerLost`), in seconds; 0 sends no heartbeats, so that only the deadline ends the wait.
        ``TESSERA_HEARTBEAT_TIMEOUT_MS`` in the environment overrides the default.
    backend : str, default "auto"
        ``"auto"`` (shared memory between ranks of one host, Gloo between hosts), ``"shm"`` or ``"gloo"``. With NCCL for
        arrays on CUDA devices: ``"cpu:auto,cuda:nccl"``. ``TESSERA_BACKEND`` in the environment overrides the default.
    spin_count : int, default -1
        Spins before a waiting rank yields the CPU; -1 derives it from the ranks and usable cores.
    name : str, default "world"
        Name in messages and logs.
    cuda_device : int, default -1
        With NCCL, the device of this rank's arrays; -1 takes that of the parent in a split, else the rank's place among
        the ranks of its host, from 0.

    Returns
    -------
    Comm
        Best used in a ``with`` block: at its end the ranks shut down in order; if an exception leaves it, the peers
        are notified at once.

    Raises
    ------
    TesseraTimeout
        A rank did not join in time.
    PeerLost
        A rank of ``tessera run`` exited before it joined.
    PermissionDenied
        There is no job token, or it was refused.
    Unsupported
        The backend has NCCL, but a rank has no NVIDIA driver, no device or no NCCL.
    """
    options = _options(timeout, heartbeat_timeout, backend, spin_count, name, cuda_device)
    watch_uncaught()
    return Comm._adopt(_core.comm_from_env(**options), options)


def _options(
    timeout: Timeout,
    heartbeat_timeout: Timeout,
    backend: str | None,
    spin_count: int | None,
    name: str | None,
    cuda_device: int | None,
) -> dict[str, Any]:
    """The given options, as `_core` takes them."""
    options = {
        "timeout_ms": milliseconds(timeout),
        "heartbeat_timeout_ms": milliseconds(heartbeat_timeout),
        "backend": backend,
        "spin_count": spin_count,
        "name": name,
        "cuda_device": cuda_device,
    }
    return {key: value for key, value in options.items() if value is not None}


class Comm(Collectives):
    """A communicator: the ranks of a group. Made by `init`, `Comm.create`, `split` or a `Mesh`.

    `Collectives` describes its collectives, `all_reduce` and the others.
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
        comm._is_remade = False
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
        cuda_device: int | None = None,
    ) -> Comm:
        """Connect `world_size` ranks through a common store. Collective.

        Parameters
        ----------
        store : Store
            Used until the communicator is closed.
        rank : int
            0 to ``world_size - 1``, unique.
        world_size : int
            1 to 4096.
        timeout, heartbeat_timeout, backend, spin_count, name, cuda_device
            As for `init`.

        Raises
        ------
        TesseraTimeout
            A rank did not join in time; the message names it.
        """
        options = _options(timeout, heartbeat_timeout, backend, spin_count, name, cuda_device)
        watch_uncaught()
        handle = _core.comm_create(checked(store, Store, "store")._handle, rank, world_size, **options)
        return cls._adopt(handle, options)

    def _options_with(self, given: dict[str, Any]) -> dict[str, Any]:
        """This communicator's options, overridden by the given ones; empty, which means the same, if none are given."""
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

    def on_stream(self, stream: Stream) -> Collectives:
        """The collectives of this communicator in the order of a CUDA stream, for arrays on a device.

        A collective returns once it is on the stream: what the stream gets later sees the result.
        With ``async_op=True`` it runs on another stream, after what this one had before; `Work.wait` waits for the
        device, and `Work.order` makes a stream wait. While the stream is captured into a CUDA graph, only calls without
        ``async_op`` are possible.

        Parameters
        ----------
        stream : stream
            Of this rank's device: PyTorch's or CuPy's, an object with ``__cuda_stream__``, or the address of one.
        """
        return OnStream(self, stream_of(stream))

    @property
    def timeout(self) -> float:
        """The deadline of each operation, in seconds from its start.

        A new value, in seconds or a timedelta, applies to operations that this rank issues afterwards: a short one for
        a call that must be answered soon. Operations already issued keep theirs, so the old value can be restored at
        once. Each rank has its own deadline; the first one that passes
        fails the communicator on all ranks.
        """
        return _core.comm_timeout(self._handle) / 1000

    @timeout.setter
    def timeout(self, timeout: float | timedelta) -> None:
        if (ms := milliseconds(timeout)) is None:
            raise TypeError("the timeout is None; it must be in seconds or a timedelta")
        _core.comm_set_timeout(self._handle, ms)

    def refuse(self, creation: Literal["model", "pipeline", "mesh", "comm"], error: BaseException) -> None:
        """Tell the other ranks that this one cannot take part in a creation. Collective, in place of the creation.

        It fails on them too, at once and with the rank and the error in its message, instead of waiting for this rank
        until the deadline. Tessera's classes call it for arguments that they refuse; call it for checks of your own
        that one rank alone may fail. The communicator stays usable.

        Parameters
        ----------
        creation : str
            What the others create: "model" (`DDP`, `FSDP`, `TensorParallel`, `Engine`), "pipeline", "mesh", or "comm"
            (`split`, a `Saver`).
        error : exception
            Why not; raise it afterwards. The others get the class of a `TesseraError`, `InvalidArgument` for a
            TypeError or ValueError, and `UserError` for any other.

        Examples
        --------
        >>> try:  # doctest: +SKIP
        ...     params = read_params(path)
        ... except OSError as error:
        ...     comm.refuse("model", error)
        ...     raise
        >>> ddp = ts.DDP(comm, params)  # doctest: +SKIP
        """
        if creation not in _CREATIONS:
            raise InvalidArgument(f"creation is {creation!r}; it must be one of {', '.join(map(repr, _CREATIONS))}")
        _core.comm_refuse(self._handle, _CREATIONS.index(creation) + 1, error)

    @property
    def error(self) -> TesseraError | None:
        """The error that failed the communicator; None if it works."""
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
        cuda_device: int | None = None,
    ) -> Comm | None:
        """Split the ranks into groups: ranks of the same `color` form one, ordered by `key`, then rank. Collective.

        Parameters
        ----------
        color : int
            The group; with a negative color this rank joins none.
        key : int
            The order inside the group.
        timeout, heartbeat_timeout, backend, spin_count, name, cuda_device
            As for `init`; by default those of this communicator.

        Returns
        -------
        Comm or None
            This rank's group, which no longer depends on this communicator; None for a negative color.
        """
        try:
            given = _options(timeout, heartbeat_timeout, backend, spin_count, name, cuda_device)
        except Exception as error:
            self.refuse("comm", error)
            raise
        options = self._options_with(given)
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
        cuda_device: int | None = None,
    ) -> Comm:
        """Continue with the surviving ranks after a failure. Collective over the survivors.

        The ranks that call it form a new communicator, in the order of this one. Ranks that died or closed this
        communicator are known to be gone. The call waits for other ranks until the deadline and then continues without
        them; such a rank gets `Aborted` if it calls later. Objects made from this communicator (buffers, DDP, savers,
        meshes) can no longer be used: close them, create them again and load a checkpoint, because the failed
        collective left its arrays incomplete.

        Parameters
        ----------
        timeout, heartbeat_timeout, backend, spin_count, name, cuda_device
            As for `init`; by default those of this communicator. `timeout` is also the deadline for ranks that do not
            call.

        Raises
        ------
        Aborted
            The other ranks have continued without this one.
        TesseraTimeout, PeerLost
            The surviving ranks could not form a communicator.
        TesseraIOError
            The store that the ranks use is gone: rank 0, which served it, died.

        Examples
        --------
        >>> try:  # doctest: +SKIP
        ...     train(comm)
        ... except (ts.PeerLost, ts.TesseraTimeout, ts.Aborted):
        ...     comm = comm.shrink()
        """
        options = self._options_with(_options(timeout, heartbeat_timeout, backend, spin_count, name, cuda_device))
        rest = _core.comm_shrink(self._handle, **options)
        self._is_remade = True
        return Comm._adopt(rest, options or self._options)

    def grow(
        self,
        *,
        timeout: Timeout = None,
        heartbeat_timeout: Timeout = None,
        backend: str | None = None,
        spin_count: int | None = None,
        name: str | None = None,
        cuda_device: int | None = None,
    ) -> Comm:
        """Continue with all ranks after a failure, of which some are new processes. Collective over all ranks.

        Under ``tessera run --on-loss replace`` the launcher starts another process for a rank that was killed. That
        process calls `init`, as any rank does, and the other ranks call `grow`: together they make the new
        communicator, with the rank numbers and the world size of this one. If another rank dies meanwhile, its
        replacement is waited for, too. Objects made from this communicator can no longer be used, as after `shrink`.

        Parameters
        ----------
        timeout, heartbeat_timeout, backend, spin_count, name, cuda_device
            As for `init`; by default those of this communicator. `timeout` is the deadline of the call.

        Raises
        ------
        InvalidState
            This communicator was not made by `init` under ``tessera run --on-loss replace``.
        TesseraTimeout
            The ranks that the message names did not come.
        PeerLost
            A rank has ended and is not replaced.
        Aborted
            Another process has replaced this one.
        TesseraIOError
            The store that the ranks use is gone.

        Examples
        --------
        >>> comm = ts.init()  # doctest: +SKIP
        >>> while True:  # doctest: +SKIP
        ...     try:
        ...         train(comm)  # creates its objects from comm, and loads the newest checkpoint
        ...         break
        ...     except (ts.PeerLost, ts.TesseraTimeout, ts.Aborted):
        ...         comm = comm.grow()
        """
        options = self._options_with(_options(timeout, heartbeat_timeout, backend, spin_count, name, cuda_device))
        grown = _core.comm_grow(self._handle, **options)
        self._is_remade = True
        return Comm._adopt(grown, options or self._options)

    def turn(self, rank: int, *, timeout: float | timedelta) -> Turn:
        """Let one rank work alone, as in an evaluation on rank 0, while the others wait for it.

        All ranks enter a ``with`` block over the turn; the others wait where it ends. Inside, this communicator refuses
        everything else on every rank. A rank that dies is noticed at once, as in any collective.

        Parameters
        ----------
        rank : int
            The rank whose turn it is.
        timeout : float or timedelta
            How long the others wait for the end, or for the next report of progress, in seconds. The timeout of the
            communicator does not apply to them.

        Returns
        -------
        Turn
            True on the rank whose turn it is.

        Raises
        ------
        InvalidState
            Another turn of this communicator has not ended.

        Examples
        --------
        >>> with comm.turn(0, timeout=600) as turn:  # doctest: +SKIP
        ...     if turn:
        ...         print("accuracy", evaluate(model))
        """
        if (ms := milliseconds(timeout)) is None:
            raise TypeError("the timeout is None; it must be in seconds or a timedelta")
        return Turn._adopt(_core.turn_create(self._handle, rank, ms), index(rank) == self._rank)

    def buffer(self, size: int) -> npt.NDArray[np.uint8]:
        """Allocate bytes that the peers access without a copy. Collective.

        Parameters
        ----------
        size : int
            Bytes, the same on every rank.

        Returns
        -------
        ndarray of uint8, shape (size,)
            Zero-initialised. The memory lives as long as the array or any view of it.
        """
        handle = _core.buffer_create(self._handle, size)
        return array_over(_core.buffer_data(handle), 6, (size,))

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> npt.NDArray[Any]:
        """Allocate an array that the peers access without a copy. Collective.

        Parameters
        ----------
        shape : int or sequence of int
            The same on every rank.
        dtype : DType, NumPy type or name
            The same on every rank.

        Returns
        -------
        ndarray
            Zero-initialised, contiguous, aligned to 4096 bytes.
        """
        dims = tuple(index(length) for length in shape) if isinstance(shape, Sequence) else (index(shape),)
        kind = dtype_of(dtype)
        if any(length < 0 for length in dims):
            raise InvalidArgument(f"the shape {dims} has a negative size")
        handle = _core.buffer_create(self._handle, math.prod(dims) * kind.numpy.itemsize)
        return array_over(_core.buffer_data(handle), kind, dims)

    def finalize(self) -> None:
        """Wait for all ranks and all issued work. No collective may follow. Collective."""
        _core.comm_finalize(self._handle)

    def abort(self, reason: str | None = None) -> None:
        """Fail every pending and later operation, on this rank and its peers, with `Aborted`. Callable from any thread.

        Parameters
        ----------
        reason : str, optional
            Part of the error on every rank.
        """
        _core.comm_abort(self._handle, reason)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write this rank's flight record: the last 1,024 operations with their times, as JSON lines.

        Callable from any thread. ``tessera trace why-hung`` and ``tessera trace merge`` read the records of all ranks
        together. Under ``tessera run --trace-dir DIR`` each communicator writes its own when it fails or ends.

        Parameters
        ----------
        path : path-like
            The file to write; an existing file is replaced as a whole.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        _core.comm_write_trace(self._handle, os.fspath(path))

    def close(self) -> None:
        """Leave the communicator and abort running operations. Local; for an orderly end call `finalize` first."""
        _core.comm_destroy(self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the communicator in order.

        After an exception, including ``sys.exit``, report it to the launcher for its error summary and to the peers by
        `abort`. Otherwise let savers made from this communicator finish their saves, then wait for all ranks; if that
        fails, report the error in the same way. A communicator that was shrunk is just closed. In all cases savers,
        meshes and groups made from it are closed with it.
        """
        if self.closed or self._handle.foreign:  # a forked child leaves the block: the job is its parent's
            return
        try:
            if error is not None:
                self._fail(error)
            elif not self._is_remade:
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
