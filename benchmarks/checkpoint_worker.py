"""What the ranks of ours and of the peers share: the command loop.

A rank reads a line ``COMMAND ARGUMENT``, calls that method of its library, and answers with one JSON line: wall and
CPU seconds, the bytes that it had the devices read, the memory beyond what it held before the first command, what the
method returned, and for a load whether every byte is what was saved; the end of its input ends it. Destinations are
poisoned before a load.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from checkpoint_workload import PART, Piece, Share, checksum

POISON = 0xA5


class Library(Protocol):
    """A library with its state over the pieces."""

    def __init__(self, share: Share, pieces: dict[str, list[Piece]]) -> None: ...
    def barrier(self) -> None: ...
    def save(self, number: str) -> str: ...  # a path
    def load(self, path: str) -> None: ...
    # load_part(path) and others, where checkpoint.py asks for them
    def close(self) -> None: ...


def in_part(names: list[str]) -> list[str]:
    """The tensors of a partial load."""
    return names[::PART]


def scratch() -> Path:
    return Path(os.environ["BENCH_SCRATCH"])


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def number_in(file: str, key: str) -> int:
    """The number of a line ``KEY: NUMBER`` of a file of this process."""
    for line in Path(f"/proc/self/{file}").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/{file} has no {key}")


def memory_bytes(key: str) -> int:
    return number_in("status", key) * 1024


def serve(make: Callable[[Share, dict[str, list[Piece]]], Library]) -> None:
    """Answer commands until there are no more."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no reply
    share = Share.from_environment()
    pieces = share.pieces()
    arrays = {name: [piece.bits for piece in held] for name, held in pieces.items()}
    wanted = {"load": list(arrays), "load_part": in_part(list(arrays))}
    loaded = {command: [bits for name in names for bits in arrays[name]] for command, names in wanted.items()}
    expected = {command: checksum(bits) for command, bits in loaded.items()}
    library = make(share, pieces)
    library.barrier()
    before = memory_bytes("VmRSS")
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        for bits in loaded.get(command, []):
            bits.view("uint8").fill(POISON)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM begins anew
        library.barrier()
        read = number_in("io", "read_bytes")
        cpu, start = cpu_seconds(), time.perf_counter()
        path = getattr(library, command)(argument)
        reply = {"seconds": time.perf_counter() - start, "cpu": cpu_seconds() - cpu, "path": path}
        reply["read"] = number_in("io", "read_bytes") - read
        reply["extra"] = max(memory_bytes("VmHWM") - before, 4096)  # a page at least: ratios are made of it
        reply["right"] = command not in loaded or checksum(loaded[command]) == expected[command]
        replies.write(json.dumps(reply) + "\n")
    library.close()
