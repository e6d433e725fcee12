"""What jobs under Ray and Spark share: a rank's part of a job that meets at a given store, and whose failure it was."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Iterator, Mapping
from operator import index
from typing import Any

from .comm import Comm
from .errors import Aborted, InvalidArgument, PeerLost, TesseraError, TesseraTimeout, UserError
from .store import Store

_MOST_RANKS = 4096


def new_token() -> str:
    """A job token: only the ranks that are given it can join."""
    return secrets.token_hex(32)


def checked_job(fn: object, num_workers: int) -> int:
    """The number of ranks; raises if it or the function cannot be."""
    if not callable(fn):
        raise TypeError(f"fn is a {type(fn).__name__}; it must be a function that takes a communicator")
    if not 1 <= (ranks := index(num_workers)) <= _MOST_RANKS:
        raise InvalidArgument(f"num_workers is {ranks}; it must be 1 to {_MOST_RANKS}")
    return ranks


@contextlib.contextmanager
def join(uri: str, token: str, rank: int, world_size: int, options: Mapping[str, Any]) -> Iterator[Comm]:
    """Join the ranks that meet at the store. The communicator ends with the block, in order if that does."""
    with (
        Store(uri, token=token, timeout=options.get("timeout")) as store,
        Comm.create(store, rank, world_size, **options) as comm,
    ):
        yield comm


def failure_of(failures: Mapping[int, BaseException], died: Collection[int], world_size: int) -> TesseraError:
    """The error of a job in which these ranks failed: about the first cause, which the others' errors follow from.

    A process that died comes first, then an exception of the program, then errors that are about other ranks.
    """

    def importance(rank: int) -> tuple[bool, bool, int]:
        follows = isinstance(failures[rank], (PeerLost, Aborted, TesseraTimeout))
        return rank not in died, follows, rank

    rank = min(failures, key=importance)
    reason = failures[rank]
    name = f"rank {rank} of {world_size}"
    lost = rank in died
    said = str(reason).strip()
    error: TesseraError = (PeerLost if lost else UserError)(
        f"{name} died: {said}" if lost else f"{name} raised {type(reason).__name__}: {said}"
    )
    error.peer = rank
    error.__cause__ = reason
    return error
