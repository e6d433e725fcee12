"""Runs a script as the ranks of a `torch.distributed` job, one process a rank, under torchrun's environment, and, in a
rank, its checks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a rank that is started as a script

from patience import patience

# Within which a rank hears of another one's death. It is 1 where the rank that waits gets to run, which a machine that
# runs other tests too may not let it.
NOTICED_S = patience(5)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    script: Path,
    ranks: int,
    *arguments: object,
    timeout: float = patience(280),
    cwd: Path | None = None,
    hosts: int = 1,
    ends: Mapping[int, int] | None = None,
) -> str:
    """What the ranks printed; fails if one of them did not end with 0, or with what `ends` says of it. This machine
    pretends to be `hosts`."""

    def host_of(rank: int) -> dict[str, str]:
        return {"TESSERA_HOST_ID": f"host{rank % hosts}"} if hosts > 1 else {}

    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **host_of(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=cwd,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    expected = [(ends or {}).get(rank, 0) for rank in range(ranks)]
    assert [process.returncode for process in processes] == expected, "\n".join(outputs)
    return "".join(outputs)


def leave() -> NoReturn:
    """End a rank of PyTorch alone, which has done its work: threads of PyTorch abort the end of the interpreter now and
    then ("terminate called without an active exception")."""
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def refused(
    kinds: type[BaseException] | tuple[type[BaseException], ...], text: str, operation: Callable[[], object]
) -> None:
    """In a rank: the operation raises an error of these classes, whose message holds `text`."""
    try:
        operation()
    except kinds as error:
        assert text in str(error), str(error)
        return
    raise AssertionError(f"rank {os.environ['RANK']}: nothing was refused with {text!r}")


def alone_on_each(act: Callable[[], object], rank: int, ranks: int) -> None:
    """Each rank acts while the others wait: for a collective in it nobody would come."""
    import torch.distributed as dist

    for turn in range(ranks):
        if turn == rank:
            act()
        dist.monitored_barrier(timeout=timedelta(seconds=patience(20)))


def run_checks(checks: Sequence[Callable[[], object]], names: Sequence[str], rank: int) -> None:
    """Runs those of these names, or all, one after the other; rank 0 prints what each took."""
    assert {check.__name__ for check in checks} >= set(names), names
    for check in checks:
        if names and check.__name__ not in names:
            continue
        since = time.monotonic()
        try:
            check()
        except BaseException as error:
            error.add_note(f"rank {rank}, in {check.__name__}")
            raise
        if rank == 0:
            print(f"{check.__name__} {time.monotonic() - since:.2f} s", flush=True)
