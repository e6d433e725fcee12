"""Runs a script as the ranks of a `torch.distributed` job, one process a rank, under torchrun's environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    script: Path, ranks: int, *arguments: object, timeout: float = 280, cwd: Path | None = None, hosts: int = 1
) -> str:
    """What the ranks printed; fails if one of them did not end with 0. This machine pretends to be `hosts`."""

    def host_of(rank: int) -> dict[str, str]:
        return {"TESSERA_HOST_ID": f"host{rank % hosts}"} if hosts > 1 else {}

    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    common |= {"OMP_NUM_THREADS": "1"}
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
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return "".join(outputs)
