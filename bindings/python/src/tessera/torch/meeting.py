"""How the ranks of a process group connect: through the group's own store, which PyTorch passes to its backend.

The store holds the address of group rank 0 and a token until all ranks have arrived. From then on the ranks have their
own communicators.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..comm import Comm
from ..errors import TesseraError
from .errors import TesseraTimeout
from .ranks import about, arrange, await_told, deadline, forget, join, members_of, missing_of

__all__ = ["communicator_of", "meet", "meet_again", "own_communicator"]


def meet(
    store: Any,
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
    names: Sequence[str],
    begin: Callable[[Comm], object] | None = None,
) -> list[Comm]:
    """Communicators of the ranks that use `store`, which are `members` of the job, one for each name. Collective. They
    cannot be split between hosts later; `begin` gets the first one while it still can be.

    Raises
    ------
    TesseraTimeout
        A rank did not arrive in time; the message names it.
    """
    board = dist.PrefixStore("tessera", store)
    meeting, server = arrange(board, rank, members, timeout, names[0])
    comm, own_store = join(meeting, rank, server, name=names[0], timeout=timeout)
    comms = [comm]
    try:
        if rank == 0:
            forget(board, len(members))
        for name in names[1:]:
            split = comm.split(0, rank, name=name)
            assert split is not None
            comms.append(split)
        if begin is not None:
            begin(comm)
        comm.barrier()  # no rank needs the store any more
    except BaseException:
        for one in comms:
            one.close()
        raise
    finally:
        own_store.close()
        if server is not None:
            server.close()
    return comms


_made: weakref.WeakKeyDictionary[Any, Comm] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards the above


def communicator_of(ranks: Any) -> Comm:
    """A communicator for gradients: `ranks` itself, or one made for a `torch.distributed` group (None for the default
    one) and kept as long as the group. Collective the first time."""
    if isinstance(ranks, Comm):
        return ranks
    group = _group(ranks)
    with _lock:
        comm = _made.get(group)
        if comm is None or comm.closed:
            comm = _made[group] = _of_group(group, "gradients of DistributedDataParallel")
            weakref.finalize(group, comm.close)
    return comm


def own_communicator(ranks: Any, name: str, begin: Callable[[Comm], object] | None = None) -> Comm:
    """A new communicator of the same ranks, owned by the caller. Collective. `begin` gets it while it can be split; if
    `begin` fails, it is closed."""
    if isinstance(ranks, Comm):
        comm = ranks.split(0, ranks.rank, name=name)
        assert comm is not None
        try:
            if begin is not None:
                begin(comm)
        except BaseException:
            comm.close()
            raise
        return comm
    with _lock:
        return _of_group(_group(ranks), name, begin)


def _group(ranks: Any) -> Any:
    group = dist.group.WORLD if ranks is None else ranks
    if group is None:
        raise TesseraError(
            "torch.distributed is not initialised; call init_process_group first, or pass a tessera.Comm"
        )
    return group


def _of_group(group: Any, name: str, begin: Callable[[Comm], object] | None = None) -> Comm:
    """A communicator made through the group's store."""
    store = dist.PrefixStore("gradients", group.get_group_store())
    timeout = deadline(group._get_backend(torch.device("cpu")).options._timeout)
    (comm,) = meet(store, group.rank(), members_of(group), timeout, [name], begin)
    return comm


def meet_again(store: Any, rank: int, members: Sequence[int], timeout: timedelta, number: int, name_all: bool) -> None:
    """Return once every rank has called this with the same number, which is 1 at first and increases by one each time.

    It uses the store, so that no communicator fails if a rank does not arrive.

    Raises
    ------
    TesseraTimeout
        Names every rank that did not arrive, in the words of Gloo's monitored barrier.
    """

    def late() -> TesseraTimeout:
        missing = missing_of(board, keys) or [0]
        here = (
            "Rank 0 timed out in monitoredBarrier"
            if rank == 0
            else f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            "from rank 0"
        )
        named, more = (missing, []) if name_all else (missing[:1], missing[1:])
        too = f" (nor did {', '.join(map(str, more))})" if more else ""
        words = (
            f"{here}: Rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} failed to pass monitoredBarrier in "
            f"{round(timeout.total_seconds() * 1000)} ms{too}. Check the logs of the missing ranks, or raise the "
            "timeout of the call"
        )
        return about(missing[0], rank, members, TesseraTimeout(words))

    board = dist.PrefixStore("tessera/barrier", store).clone()  # a wait must not hold others up
    board.set(f"{number}/{rank}", "")
    keys = [f"{number}/{each}" for each in range(len(members))]
    await_told(board, keys, time.monotonic() + timeout.total_seconds(), late, rank, members)
    if number > 1:  # all have come to this one, and so have left the one before
        board.delete_key(f"{number - 1}/{rank}")
