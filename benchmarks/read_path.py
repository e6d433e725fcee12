"""A load of a warm checkpoint beside `pread` and a CRC32C of the same bytes, in one run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import results

BOUND = 1.3  # times what reading and checking takes


def bench(binaries: Path, rounds: int, ranks: list[int]) -> list[results.Case]:
    """1 GiB in 64 tensors at each number of ranks, and in 65,536 tensors at one rank."""
    cases = []
    for count, tensors, size in [(count, 64, 16 << 20) for count in ranks] + [(1, 65536, 16 << 10)]:
        command = [binaries / "read_path", str(count), str(rounds), str(tensors), str(size)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        measured = [(line["load_s"], line["read_s"]) for line in map(json.loads, output.splitlines())]
        many = tensors > 64
        cases.append(
            results.case(
                f"load of {tensors:,} tensors, 1 GiB, {count} rank{'s' if count > 1 else ''}", "s",
                "pread and CRC32C", measured, None if many else round(1 / BOUND, 2), smaller_is_better=True,
            )
        )  # fmt: skip
    return cases
