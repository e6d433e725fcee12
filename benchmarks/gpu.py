"""On a GPU: an all_reduce of ours beside NCCL's own.

NCCL's blocks until it is launched, and therefore until its peers are connected; ours is polled, and so is the one of
NCCL that it is compared with on the host. With one GPU, two ranks share it and meet over loopback sockets: the rate
says nothing of a network, but the ratio says what we add. One rank alone shows what a call adds on the host, since NCCL
then has nothing to do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import results

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "gpu" / "ranks"))

import one_gpu

SIZES = [4, 1 << 20, 16 << 20, 256 << 20, 1 << 30]
ADDED_US = 3.0  # by a call of ours, at most


def gpus() -> list[str]:
    """Names of the devices, from the driver's own tool."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\n")[:-1]


def bench(binaries: Path, tessera: Path, rounds: int) -> list[results.Case]:
    names = gpus()
    cases = []
    for ranks in (1, 2):
        one_each = len(names) >= ranks
        environment = os.environ if one_each else {**os.environ, **one_gpu.VARIABLES}
        sizes = SIZES[:1] if ranks == 1 else SIZES if one_each else SIZES[:4]
        command = [tessera, "run", "-n", str(ranks), binaries / "gpu_comm", str(rounds), ",".join(map(str, sizes))]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
        lines = [json.loads(line[line.index("{") :]) for line in output.splitlines() if "{" in line]
        where = f"{ranks} rank{'s' if ranks > 1 else ''} on {names[0]}" + ("" if one_each else ", sharing it")
        for size in sizes:
            of_size = [line for line in lines if line["bytes"] == size]
            if ranks > 1:
                target = 0.98 if size >= 1 << 20 else None
                pairs = [(ours, peer) for ours, peer, _ in (line["us"] for line in of_size)]
                name = f"all_reduce of {size:,} bytes, {where}"
                cases.append(results.case(name, "us", "NCCL", pairs, target, smaller_is_better=True))
            if size == SIZES[0]:
                name = f"what a call adds on the host, {where}"
                pairs = [(ours - polled, ADDED_US) for ours, _, polled in (line["host_us"] for line in of_size)]
                cases.append(results.case(name, "us", "the target", pairs, 1, smaller_is_better=True))
                name = f"the host's part of a call, {where}"
                pairs = [(ours, peer) for ours, peer, _ in (line["host_us"] for line in of_size)]
                cases.append(results.case(name, "us", "NCCL, blocking", pairs, None, smaller_is_better=True))
    return cases
