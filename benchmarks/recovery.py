"""From the death of a rank to the next step of all ranks, in a job of C processes with its checkpoints in memory.

With `--on-loss replace` the other ranks stay in their processes; the peer is a restart of all ranks. The bound is 1 s.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import results

SECONDS = 1.0


def seconds_of(tessera: Path, program: Path, ranks: int, on_loss: str) -> float:
    """Between the kill and the last rank's first step after it."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm") as scratch:
        times = Path(scratch)
        command = [tessera, "run", "-n", str(ranks), "--on-loss", on_loss, "--max-restarts", "1"]
        subprocess.run([*command, program, times / "root", times], check=True, capture_output=True, timeout=120)
        killed = float((times / "killed").read_text())
        return max(float((times / f"back-{rank}").read_text()) for rank in range(ranks)) - killed


def bench(binaries: Path, tessera: Path, rounds: int, ranks: list[int]) -> list[results.Case]:
    program = binaries / "recovery"
    cases = []
    for size in ranks:
        measured = [
            [seconds_of(tessera, program, size, on_loss) for on_loss in ("replace", "restart")] for _ in range(rounds)
        ]
        name = f"{size} ranks"
        for peer, pairs, target in (
            ("bound", [(ours, SECONDS) for ours, _ in measured], 1.0),
            ("restart of all ranks", [(ours, peer) for ours, peer in measured], None),
        ):
            cases.append(results.case(name, "s", peer, pairs, target, smaller_is_better=True))
        print(f"{name}: {cases[-1]['ours']:.3f} s, restart {cases[-1]['peer']:.3f} s", file=sys.stderr)
    return cases
