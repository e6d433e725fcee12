"""all_reduce beside Gloo, Intel MPI, Open MPI (through shared memory, and through TCP alone), PyTorch's gloo and memory
itself.

The same sizes and ranks, rounds interleaved, and, but for PyTorch, the same timing code. The memory's bound is a copy
of as many bytes on all ranks at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import results
import torch_backend

KIB, MIB = 1 << 10, 1 << 20
SIZES = [8, 1 * KIB, 8 * KIB, 64 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB]


def rows_of(command: list[str], env: dict[str, str] | None = None) -> dict[int, dict[str, float]]:
    """By size what a benchmark program prints of it."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {done.stderr[-2000:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert all(row["correct"] for row in rows), "a wrong sum"
    return {row["bytes"]: row for row in rows}


def lines(command: list[str], env: dict[str, str] | None = None) -> dict[int, float]:
    """Microseconds a call by size."""
    return {size: row["us"] for size, row in rows_of(command, env).items()}


GLOO, MPI, MPI_TCP, TORCH, MEMORY = "Gloo", "Open MPI", "Open MPI, TCP alone", "PyTorch gloo", "memory"
INTEL_MPI = "Intel MPI"
HERE = Path(__file__).parent


def target(peer: str, mode: str, size: int) -> float | None:
    if peer == MEMORY:
        return 0.9 if mode == "buffer" and size >= 64 * MIB else None
    if peer == GLOO and mode == "buffer" and size >= MIB:
        return 10.0
    if peer == INTEL_MPI:
        return 1.0 if mode == "foreign" and size >= 64 * KIB else None
    if peer != MPI:
        return None
    if size <= 8 * KIB:
        return 1.0
    if size < MIB:
        return None
    return 4.0 if mode == "buffer" else 2.0 if size >= 16 * MIB else 1.5


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
            runs[GLOO].append(lines([str(binaries / "all_reduce_gloo"), str(ranks), sizes_text]))
            runs["foreign"].append(lines([*ours, "foreign"]))
            if mpirun and (binaries / "all_reduce_mpi").exists():
                env = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
                program = ["-n", str(ranks), str(binaries / "all_reduce_mpi"), sizes_text]
                runs[MPI].append(lines([mpirun, "--oversubscribe", *program], env))
                runs[MPI_TCP].append(lines([mpirun, "--oversubscribe", "--mca", "btl", "self,tcp", *program], env))
            if (binaries / "all_reduce_impi").exists():
                mpiexec = str(HERE.parent / ".venv/impi/bin/mpiexec.hydra")
                program = ["-n", str(ranks), str(binaries / "all_reduce_impi"), sizes_text]
                runs[INTEL_MPI].append(lines([mpiexec, *program]))
            by_torch = torch_backend.measured(1, ranks, sizes)
            runs[TORCH].append({size: pairs[0][1] for size, pairs in by_torch.items()})
            runs[MEMORY].append(lines([*ours, "copy"]))
        for mode in ("buffer", "foreign"):
            for peer in (GLOO, INTEL_MPI, MPI, MPI_TCP, TORCH, MEMORY):
                if peer not in runs:
                    continue
                for size in sizes:
                    pairs = [(a[size], b[size]) for a, b in zip(runs[mode], runs[peer], strict=True)]
                    name = f"all_reduce {size} B, {ranks} ranks, {mode} memory"
                    cases.append(
                        results.case(name, "us a call", peer, pairs, target(peer, mode, size), smaller_is_better=True)
                    )
    return cases
