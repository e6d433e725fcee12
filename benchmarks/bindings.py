"""A call in each language beyond the same call in C (call/): a planned all_reduce of 8 bytes, and a plain one.

On a communicator of one rank, where nothing waits. A program tells the least of its batches, which no other work of the
machine disturbed; a round runs all four.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import results

ROOT = Path(__file__).resolve().parent.parent
CALL = Path(__file__).parent / "call"
NANOSECONDS = {
    "plan": {"rust": 2.0, "java": 20.0, "python": 200.0},
    "all_reduce": {"rust": 2.0, "java": 60.0, "python": 400.0},
}


def bench(binaries: Path, rounds: int) -> list[results.Case]:
    build = ["cargo", "build", "--release", "--quiet", "--manifest-path", str(CALL / "Cargo.toml")]
    subprocess.run(build, check=True)
    jars = ":".join(map(str, sorted((ROOT / "bindings" / "java" / "target").glob("tessera-*.jar"))))
    programs = {
        "c": [str(binaries / "call")],
        "rust": [str(CALL / "target" / "release" / "call")],
        "java": ["java", "-cp", jars, str(CALL / "Call.java")],
        "python": [sys.executable, str(CALL / "call.py")],
    }
    measured: list[dict[str, dict[str, float]]] = []
    for _ in range(rounds):
        measured.append({})
        for language, command in programs.items():
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            measured[-1][language] = json.loads(output)
    return [
        results.case(
            f"{kind} beyond C, {language}", "ns", "bound",
            [(max(each[language][kind] - each["c"][kind], 0.01), bound) for each in measured],
            1.0, smaller_is_better=True,
        )
        for kind, bounds in NANOSECONDS.items()
        for language, bound in bounds.items()
    ]  # fmt: skip
