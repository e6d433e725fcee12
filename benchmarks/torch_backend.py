"""all_reduce through torch.distributed: the backend "tessera" beside "gloo", in the same processes, rounds interleaved.

As a program it is one rank, under torchrun's environment: torch_backend.py ROUNDS SIZE...
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import results

SIZES = [1 << 10, 1 << 20, 16 << 20]


def bench(rounds: int, ranks_list: list[int], sizes: list[int]) -> list[results.Case]:
    cases = []
    for ranks in ranks_list:
        for size, pairs in measured(rounds, ranks, sizes).items():
            name = f"torch all_reduce {size} B, {ranks} ranks"
            cases.append(results.case(name, "us a call", "PyTorch gloo", pairs, None, smaller_is_better=True))
    return cases


def measured(rounds: int, ranks: int, sizes: list[int]) -> dict[int, list[tuple[float, float]]]:
    """Microseconds by size: ours and Gloo's, a pair a round."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, str(Path(__file__)), str(rounds), *map(str, sizes)]
    processes = [
        subprocess.Popen(command, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank of {' '.join(command)} failed")
    return {int(size): [tuple(pair) for pair in pairs] for size, pairs in json.loads(outputs[0]).items()}


def rank(rounds: int, sizes: list[int]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("tessera")
    groups = [None, dist.new_group(backend="gloo")]
    pairs: dict[int, list[list[float]]] = {}
    for size in sizes:
        tensor = torch.zeros(size // 4)
        calls = max(3, min(200, (32 << 20) // size))

        def timed(group: dist.ProcessGroup | None, tensor: torch.Tensor = tensor, calls: int = calls) -> float:
            dist.barrier(group=group)
            begin = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(tensor, group=group)
            return (time.perf_counter() - begin) / calls * 1e6

        for group in groups:
            timed(group)
        pairs[size] = [[timed(group) for group in groups] for _ in range(rounds)]
    if dist.get_rank() == 0:
        print(json.dumps(pairs))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank(int(sys.argv[1]), [int(size) for size in sys.argv[2:]])
