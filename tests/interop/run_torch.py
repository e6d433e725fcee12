"""Runs Python programs from pytest by the fork server: alone, or as the ranks of a `torch.distributed` job, in the
environment that torchrun gives them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from fork_server import Program, Start, server
from patience import patience


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a TCP port. It is bound, so the kernel gives it to nobody else, but nobody listens on it, so a store that
    sets SO_REUSEADDR, as all do, can."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def run_ranks(
    script: Path,
    ranks: int,
    *arguments: object,
    timeout: float = patience(280),
    cwd: Path | None = None,
    hosts: int = 1,
    ends: Mapping[int, int] | None = None,
    start: Start = Start.FORK,
) -> str:
    """What the ranks printed; fails if one of them did not end with 0, or with what `ends` says of it. This machine
    pretends to be `hosts`."""

    def host_of(rank: int) -> dict[str, str]:
        return {"TESSERA_HOST_ID": f"host{rank % hosts}"} if hosts > 1 else {}

    with reserved_port() as port, ExitStack() as running:
        common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        common["PYTHONFAULTHANDLER"] = "1"
        programs = []
        for rank in range(ranks):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **host_of(rank)}
            program = server().start([script, *arguments], environment=environment, cwd=cwd, how=start)
            programs.append(running.enter_context(closing(program)))
        hung = wait_for(programs, timeout)
        outputs = [program.printed() for program in programs]
    assert not hung, "\n".join([f"rank {', '.join(map(str, hung))} did not end within {timeout} s", *outputs])
    expected = [(ends or {}).get(rank, 0) for rank in range(ranks)]
    codes = [program.returncode for program in programs]
    assert codes == expected, "\n".join([f"ranks ended with {codes}, not {expected}", *outputs])
    return "".join(outputs)


def run_spawner(
    *arguments: object, cwd: Path | None = None, environment: Mapping[str, str] | None = None, start: Start = Start.FORK
) -> subprocess.CompletedProcess[str]:
    """Run a script that starts its ranks by `mp.spawn`; forked, it forks these too. MASTER_PORT is free."""
    with reserved_port() as port:
        words = arguments if start is Start.EXECUTE else (Path(__file__).with_name("spawn_forks.py"), *arguments)
        return run_python(*words, cwd=cwd, environment={"MASTER_PORT": str(port), **(environment or {})}, start=start)


def wait_for(programs: Sequence[Program], timeout: float) -> list[int]:
    """Return the indices of those that hung. SIGABRT makes their fault handler print where."""
    deadline = time.monotonic() + timeout
    hung = [i for i, program in enumerate(programs) if not ends_within(program, deadline - time.monotonic())]
    for i in hung:
        programs[i].signal(signal.SIGABRT)
    for i in hung:
        if not ends_within(programs[i], patience(10)):
            programs[i].signal(signal.SIGKILL)
            programs[i].wait(patience(10))
    return hung


def ends_within(program: Program, timeout: float) -> bool:
    try:
        program.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True


def run_python(
    *arguments: object,
    timeout: float = patience(280),
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    start: Start = Start.FORK,
) -> subprocess.CompletedProcess[str]:
    """Run a program of `Server.start`, like `subprocess.run`."""
    given = {**os.environ, **(environment or {}), "PYTHONFAULTHANDLER": "1"}
    with closing(server().start(arguments, environment=given, cwd=cwd, how=start, streams=2)) as program:
        hung = wait_for([program], timeout)
        output, errors = program.printed(0), program.printed(1)
    assert not hung, f"{program.arguments} did not end within {timeout} s\n{output}{errors}"
    return subprocess.CompletedProcess(program.arguments, program.wait(0), output, errors)
