"""What the ranks of ours and of the peer share: the workload and the command loop.

A rank reads a line ``save DIR``, ``load DIR`` or ``quit`` and answers with one JSON line: seconds, CPU seconds, and for
a load whether every byte is what was saved.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Workload:
    """``count`` float32 tensors of ``rows`` x ``columns``, cut by rows over the ranks."""

    count: int
    rows: int
    columns: int

    @staticmethod
    def from_environment() -> Workload:
        return Workload(*(int(part) for part in os.environ["BENCH_WORKLOAD"].split("x")))

    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def size_bytes(self) -> int:
        return self.count * self.rows * self.columns * 4

    def local_arrays(self, rank: int, world_size: int) -> dict[str, np.ndarray]:
        """This rank's rows of every tensor. World sizes here divide the rows."""
        assert self.rows % world_size == 0
        shape = (self.rows // world_size, self.columns)
        generator = np.random.default_rng(1000 + rank)
        return {f"t{i:06d}": generator.random(shape, dtype=np.float32) for i in range(self.count)}


class Library(Protocol):
    def barrier(self) -> None: ...
    def save(self, directory: str) -> None: ...
    def load(self, directory: str) -> None: ...
    def local(self) -> dict[str, np.ndarray]: ...
    def close(self) -> None: ...


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def checksum(arrays: dict[str, np.ndarray]) -> int:
    total = 0
    for i, array in enumerate(arrays.values()):
        total = (total + (i + 1) * int(array.view(np.uint32).sum(dtype=np.uint64))) % (1 << 61)
    return total


def serve(make: Any, rank: int, world_size: int) -> None:
    """Answer commands until ``quit``."""
    library: Library = make(rank, world_size, Workload.from_environment())
    expected = checksum(library.local())
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no reply
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "quit":
            break
        if command == "load":
            for array in library.local().values():
                array.fill(np.nan)
        library.barrier()
        cpu, start = cpu_seconds(), time.perf_counter()
        (library.save if command == "save" else library.load)(argument)
        reply = {"seconds": time.perf_counter() - start, "cpu": cpu_seconds() - cpu}
        reply["right"] = checksum(library.local()) == expected
        replies.write(json.dumps(reply) + "\n")
    library.close()
