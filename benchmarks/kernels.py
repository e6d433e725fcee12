"""The reduce kernels of shared memory beside memcpy, one core, in the second-level cache and in memory."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path

import results


def bench(binaries: Path, rounds: int) -> list[results.Case]:
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", flush=True)
        output = subprocess.run([str(binaries / "kernels")], stdout=subprocess.PIPE, text=True, check=True).stdout
        widest: dict[str, tuple[float, float]] = {}  # they come from plain to widest
        for row in map(json.loads, output.splitlines()):
            widest[f"{row['dtype']} {row['op']}, {row['place']}"] = (row["gb_s"], row["memcpy"])
        for name, pair in widest.items():
            pairs[name].append(pair)
    return [
        results.case(name, "GB/s", "memcpy", of_name, 0.9 if name.endswith("memory") else None, smaller_is_better=False)
        for name, of_name in pairs.items()
    ]
