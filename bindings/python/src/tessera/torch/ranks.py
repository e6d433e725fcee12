"""Tessera communicators for the ranks of `torch.distributed` groups.

The group's store, which PyTorch passes to its backend, carries the address and token of rank 0's own store once. From
then on the communicator is Tessera's, so a save in the background shares nothing with the trainer's collectives. One
communicator is kept per group and closed with it; saves in flight keep it open.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from .._base import Timeout
from ..comm import Comm
from ..errors import InvalidArgument, TesseraError
from ..launch import watch_uncaught
from ..store import Store, StoreServer
from .errors import PeerLost, TesseraTimeout

__all__ = [
    "Meeting",
    "Ranks",
    "about",
    "arrange",
    "await_told",
    "deadline",
    "forget",
    "host_name",
    "join",
    "members_of",
    "missing_of",
    "ranks_of",
    "serve",
]

T = TypeVar("T")
Missed = TypeVar("Missed", PeerLost, TesseraTimeout)


@dataclass(frozen=True)
class Meeting:
    """Where ranks find each other. Small, and can be pickled."""

    uri: str
    token: str
    job_id: str
    world_size: int


class Ranks:
    """The ranks that save or load together (a communicator, or one rank alone), and their save in flight."""

    def __init__(self, comm: Comm | None, *, server: StoreServer | None = None, store: Store | None = None) -> None:
        self.comm = comm
        self.rank = 0 if comm is None else comm.rank
        self.world_size = 1 if comm is None else comm.world_size
        self.pid = os.getpid()
        self._owned = [one for one in (comm, store, server) if one is not None] if store is not None else []
        self._lock = threading.Lock()  # guards the two below
        self._in_flight: Future[Any] | None = None
        self._closing = False

    @classmethod
    def alone(cls) -> Ranks:
        """This process alone."""
        return cls(None)

    @classmethod
    def meet(cls, meeting: Meeting, rank: int, server: StoreServer | None) -> Ranks:
        """Connect to the other ranks; rank 0 passes its server, which is closed with the rest. Collective."""
        comm, store = join(meeting, rank, server, name="torch.checkpoint")
        return cls(comm, server=server, store=store)

    @property
    def usable(self) -> bool:
        """Whether a save may use it: not closed, not failed, and not of a parent process."""
        if self.pid != os.getpid() or self._closing:
            return False
        return self.comm is None or (not self.comm.closed and self.comm.error is None)

    def wait(self) -> None:
        """Wait for the save in flight; its future has the outcome."""
        with self._lock:
            running = self._in_flight
        if running is not None and self.pid == os.getpid():  # a forked child lacks the thread that would end it
            running.exception()

    def runs(self, future: Future[Any]) -> None:
        """Remember a save in flight."""
        with self._lock:
            self._in_flight = future
        future.add_done_callback(self._ran)

    def _ran(self, future: Future[Any]) -> None:
        with self._lock:
            if self._in_flight is future:
                self._in_flight = None
            closing = self._closing and self._in_flight is None
        if closing:
            self._free()

    def close(self) -> None:
        """Leave the other ranks once nothing is in flight."""
        with self._lock:
            self._closing = True
            busy = self._in_flight is not None
        if not busy:
            self._free()

    def _free(self) -> None:
        if self.pid == os.getpid():
            for one in self._owned:
                one.close()

    def gather(self, content: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank. Collective."""
        return gather(self.comm, content)

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank if any rank has an error: its own there, the first one elsewhere. Collective."""
        agree(self.comm, error)

    def together(self, step: Callable[[], T]) -> T:
        """Run a step on all ranks; if it fails on one, raise on all of them. Collective."""
        try:
            result = step()
        except Exception as error:
            self.agree(error)
            raise
        self.agree(None)
        return result


def gather(comm: Comm | None, content: bytes) -> list[bytes]:
    """Every rank's bytes, on every rank. Collective."""
    if comm is None:
        return [content]
    sizes = np.zeros(comm.world_size, np.int64)
    comm.all_gather(np.array([len(content)], np.int64), sizes)
    parts = [np.empty(int(size), np.uint8) for size in sizes]
    comm.all_gather_v(np.frombuffer(bytearray(content), np.uint8), parts)
    return [part.tobytes() for part in parts]


def agree(comm: Comm | None, error: BaseException | None) -> None:
    """Raise on every rank if any rank has an error."""
    failed = b"" if error is None else f"{_code_of(error)}:{type(error).__name__}: {error}".encode()
    answers = gather(comm, failed)
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer:
            code, message = answer.decode(errors="replace").split(":", 1)
            kind = TesseraError.by_code.get(int(code), TesseraError)
            told = kind(f"rank {rank}: {message}")
            told.rank = rank
            raise told


def _code_of(error: BaseException) -> int:
    return int(error.code) if isinstance(error, TesseraError) else 0


_alone = Ranks.alone()
_known: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()
_known_lock = threading.Lock()


def ranks_of(group: Any, no_dist: bool) -> Ranks:
    """The ranks of a `torch.distributed` group (None for the default one) or Tessera `Comm`. Collective at first."""
    if isinstance(group, Comm):
        return _remembered(group, lambda: Ranks(group if group.world_size > 1 else None))
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return _alone
    chosen = dist.group.WORLD if group is None else group
    return _remembered(chosen, lambda: _of_torch(chosen))


def _remembered(group: Any, make: Any) -> Ranks:
    with _known_lock:
        known = _known.get(group)
        if known is not None and known.usable:
            return known
    if known is not None:
        known.close()
    made: Ranks = make()
    with _known_lock:
        _known[group] = made
    weakref.finalize(group, made.close)
    return made


def _of_torch(group: Any) -> Ranks:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return Ranks.alone()
    board = dist.PrefixStore("tessera/checkpoint", group.get_group_store())
    timeout = deadline(group._get_backend(torch.device("cpu")).options._timeout)
    meeting, server = arrange(board, rank, members_of(group), timeout, "a save or load")
    made = Ranks.meet(meeting, rank, server)
    if rank == 0:
        forget(board, world_size)
    assert made.comm is not None
    made.comm.barrier()  # none needs the store any more
    return made


def deadline(timeout: timedelta) -> timedelta:
    """The timeout of a group's operations: `timeout`, which is the group's, or TESSERA_TIMEOUT_MS if the group has the
    default."""
    text = os.environ.get("TESSERA_TIMEOUT_MS", "")
    if timeout != default_pg_timeout or not text:
        return timeout
    if not (text.isascii() and text.isdigit() and 1 <= int(text) < 2**31):  # as the library reads it
        raise InvalidArgument(f"TESSERA_TIMEOUT_MS is '{text}'; it must be a number from 1 to {2**31 - 1}")
    return timedelta(milliseconds=int(text))


def members_of(group: Any) -> list[int]:
    """The global ranks of a group, in its order."""
    members: list[int] = dist.get_process_group_ranks(group)
    return members


def arrange(
    board: Any, rank: int, members: Sequence[int], timeout: timedelta, what: str
) -> tuple[Meeting, StoreServer | None]:
    """Agree on where the ranks that share `board` meet; rank 0 also gets the server. Collective. `members` are their
    global ranks.

    Raises
    ------
    TesseraTimeout
        A rank did not join `what` in time; the message names it.
    """
    watch_uncaught()
    end = time.monotonic() + timeout.total_seconds()
    hosts = [f"host/{each}" for each in range(len(members))]
    missing: list[int] = []

    def late() -> TesseraTimeout:
        missing[:] = missing_of(board, hosts) or [0]
        # Rank 0 waits for all of them in init_process_group, where PyTorch makes its store, before it comes here.
        if missing[0] == 0 and not dist.is_initialized():
            missing[:] = missing[1:] or [0]
        return did_not_come()

    def did_not_come() -> TesseraTimeout:
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        words = (
            f"{ranks} did not join {what} in time; check the logs of the missing ranks, or raise the timeout of the "
            "group"
        )
        return about(missing[0], rank, members, TesseraTimeout(words))

    board.set(hosts[rank], host_name())
    if rank > 0:
        await_told(board, ["meeting"], end, late, rank, members)
        told = json.loads(board.get("meeting"))
        if "failed" not in told:
            return Meeting(**told), None
        missing = told["missing"]
        if missing:
            raise did_not_come()
        raise TesseraError(f"rank 0 could not connect the ranks for {what}: {told['failed']}")
    try:
        await_told(board, hosts, end, late, rank, members)
        server, meeting = serve([board.get(host).decode() for host in hosts])
    except Exception as error:
        board.set("meeting", json.dumps({"failed": str(error), "missing": missing}))
        raise
    board.set("meeting", json.dumps(asdict(meeting)))
    return meeting, server


def forget(board: Any, world_size: int) -> None:
    """Called by rank 0 when all have arrived: delete the keys, which later meetings of this name must not read."""
    for key in ["meeting", *(f"host/{rank}" for rank in range(world_size))]:
        board.delete_key(key)


def await_told(
    board: Any, keys: Sequence[str], end: float, late: Callable[[], TesseraTimeout], rank: int, members: Sequence[int]
) -> None:
    """Return when all keys exist; `late` makes the error of `rank` if they do not in time."""
    try:
        try:
            board.wait(keys, timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError as error:
            # Before that it is something else; PyTorch's timeout comes a little early.
            if isinstance(error, dist.DistNetworkError) or time.monotonic() < end - 0.1:
                raise
            raise late() from error
    except dist.DistNetworkError as error:
        said = str(error).partition("\n")[0]
        words = (
            f"the store through which the ranks connect was lost: {said} Check the log of the rank that served it, "
            "usually rank 0 of the job"
        )
        raise about(members.index(0) if 0 in members else -1, rank, members, PeerLost(words)) from error


def about(peer: int, rank: int, members: Sequence[int], error: Missed) -> Missed:
    """The error of `rank`, which waits for `peer` (both numbers in the group), with global ranks for the launcher."""
    error.rank = rank
    if peer >= 0:
        error.peer = peer
        if os.environ.get("TESSERA_RANK") == str(members[rank]):
            error._launcher_peer = members[peer]
    return error


def missing_of(board: Any, keys: Sequence[str]) -> list[int]:
    """The indices of the keys that do not exist."""
    if board.check(list(keys)):
        return []
    if len(keys) == 1:
        return [0]
    half = len(keys) // 2
    return [*missing_of(board, keys[:half]), *(half + each for each in missing_of(board, keys[half:]))]


def join(
    meeting: Meeting, rank: int, server: StoreServer | None, *, name: str, timeout: Timeout = None
) -> tuple[Comm, Store]:
    """The communicator of the ranks of a meeting, and the store that it uses. Collective. On failure `server`, which
    rank 0 passes, is closed."""
    store = None
    try:
        store = Store(meeting.uri, token=meeting.token, job_id=meeting.job_id, epoch=0)
        return Comm.create(store, rank, meeting.world_size, name=name, timeout=timeout), store
    except BaseException:
        for one in (store, server):
            if one is not None:
                one.close()
        raise


def serve(hosts: Sequence[str]) -> tuple[StoreServer, Meeting]:
    """A store for as many ranks as there are host names; the caller is one of them."""
    address = "127.0.0.1" if len(set(hosts)) == 1 else own_address()
    token, job_id = secrets.token_hex(32), f"torch-{uuid.uuid4()}"
    server = StoreServer(address, token=token, job_id=job_id, epoch=0)
    return server, Meeting(server.uri, token, job_id, len(hosts))


def own_address() -> str:
    """The address of this host on its route to the job's master, which other hosts can reach too."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((master, 9))  # sends nothing
        return str(route.getsockname()[0])


def host_name() -> str:
    """An identifier of this machine: its boot id, or its host name if that cannot be read."""
    if pretended := os.environ.get("TESSERA_HOST_ID"):
        return pretended
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
