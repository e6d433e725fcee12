"""How an all_reduce on one host grows with its ranks, by `tessera bench`: the time of a size beside that of 2 ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import results

KIB, MIB = 1 << 10, 1 << 20
RANKS = [2, 4, 8, 16]
SIZES = [8, 64 * KIB, 1 * MIB, 16 * MIB]


def times(tessera: Path, ranks: int) -> dict[int, float]:
    """Microseconds a call by size; the command checks every element."""
    found = {}
    for size in SIZES:
        command = [tessera, "bench", "all_reduce", "-n", ranks, "-b", size, "-e", size, "--json"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))} failed ({done.returncode}): {done.stderr[-2000:]}")
        found[size] = json.loads(done.stdout)["rows"][0]["time_us"]
    return found


def bench(tessera: Path, rounds: int) -> list[results.Case]:
    runs: list[dict[int, dict[int, float]]] = []
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", flush=True)
        runs.append({ranks: times(tessera, ranks) for ranks in RANKS})
    return [
        results.case(
            f"all_reduce {size} B, {ranks} ranks, library memory",
            "us a call",
            "2 ranks",
            [(run[ranks][size], run[2][size]) for run in runs],
            None,
            smaller_is_better=True,
        )
        for size in SIZES
        for ranks in RANKS
    ]
