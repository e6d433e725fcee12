"""all_reduce beside Gloo and Open MPI: the same sizes, ranks and timing code, rounds interleaved."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import results

KIB, MIB = 1 << 10, 1 << 20
SIZES = [8, 1 * KIB, 8 * KIB, 64 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB]


def lines(command: list[str], env: dict[str, str] | None = None) -> dict[int, float]:
    """Microseconds by size that a benchmark program prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr[-2000:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert all(row["correct"] for row in rows), "a wrong sum"
    return {row["bytes"]: row["us"] for row in rows}


def target(peer: str, mode: str, size: int) -> float | None:
    if peer == "Gloo" and mode == "buffer" and size >= MIB:
        return 5.0
    if peer == "Open MPI" and mode == "foreign" and size >= MIB:
        return 1.5
    return None


def bench(binaries: Path, all_rounds: int, ranks_list: list[int], sizes: list[int]) -> list[results.Case]:
    sizes_text = ",".join(map(str, sizes))
    mpirun = shutil.which("mpirun")
    cases: list[results.Case] = []
    for ranks in ranks_list:
        runs: dict[str, list[dict[int, float]]] = defaultdict(list)
        rounds = all_rounds if ranks <= 4 else min(all_rounds, 3)  # the peers take over 30 s
        for number in range(rounds):
            print(f"  {ranks} ranks, round {number + 1} of {rounds}", flush=True)
            ours = [str(binaries / "all_reduce_tessera"), str(ranks), sizes_text]
            runs["buffer"].append(lines([*ours, "buffer"]))
            runs["Gloo"].append(lines([str(binaries / "all_reduce_gloo"), str(ranks), sizes_text]))
            runs["foreign"].append(lines([*ours, "foreign"]))
            if mpirun and (binaries / "all_reduce_mpi").exists():
                env = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
                theirs = [mpirun, "--oversubscribe", "-n", str(ranks), str(binaries / "all_reduce_mpi"), sizes_text]
                runs["Open MPI"].append(lines(theirs, env))
        for mode in ("buffer", "foreign"):
            for peer in ("Gloo", "Open MPI"):
                if peer not in runs:
                    continue
                for size in sizes:
                    pairs = [(a[size], b[size]) for a, b in zip(runs[mode], runs[peer], strict=True)]
                    name = f"all_reduce {size} B, {ranks} ranks, {mode} memory"
                    cases.append(
                        results.case(name, "us a call", peer, pairs, target(peer, mode, size), smaller_is_better=True)
                    )
    return cases
