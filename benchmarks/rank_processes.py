"""The ranks of a benchmark: processes that wait for commands, a line each, and answer with a line of JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
DEADLINE_S = 900.0
SHARED = ("/memfd:tessera", "/dev/zero")  # among ranks; of a rank that is alone on its host


def pss() -> int:
    """Bytes of the rank that asks, each page divided by the processes that map it."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as sizes:
        return next(int(line.split()[1]) << 10 for line in sizes if line.startswith("Pss:"))


def shown_twice() -> set[tuple[int, int, int]]:
    """(file, first byte, end) of each part of the library's shared memory that this rank sees at a second address: of
    whole parameters of fully sharded units, shown where their views lie (src/parallel/fsdp/address_range.hpp).
    """
    maps: dict[int, list[tuple[int, int]]] = {}
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            fields = line.split()
            if len(fields) < 6 or not fields[5].startswith(SHARED):
                continue
            first, end = (int(address, 16) for address in fields[0].split("-"))
            offset = int(fields[2], 16)
            maps.setdefault(int(fields[4]), []).append((offset, offset + end - first))
    found = set()
    for file, parts in maps.items():
        for i, (first, end) in enumerate(parts):
            inside = any(a <= first and end <= b for k, (a, b) in enumerate(parts) if k != i)
            if inside:
                found.add((file, first, end))
    return found


def length_of(pages: set[tuple[int, int, int]]) -> int:
    """Bytes of the union."""
    total, last = 0, (-1, 0)
    for file, first, end in sorted(pages):
        begin = max(first, last[1]) if file == last[0] else first
        total += max(end - begin, 0)
        last = (file, max(end, last[1]) if file == last[0] else end)
    return total


def serve_steps(
    steps: Mapping[str, Callable[[], object]],
    barrier: Callable[[], object],
    more: Callable[[], Mapping[str, object]] = dict,
) -> None:
    """Of a rank: for each command `step KIND`, takes that step when all ranks have come, and tells its milliseconds,
    and what `more` returns."""
    for line in sys.stdin:
        _, kind = line.split()
        barrier()
        begin = time.perf_counter()
        steps[kind]()
        print(json.dumps({"ms": (time.perf_counter() - begin) * 1e3, **more()}), flush=True)


class Ranks:
    """`count` ranks of a script beside this file, idle until told; ended with the block, at once if it failed."""

    def __init__(self, script: str, arguments: list[str], count: int, environment: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **common, **environment, "RANK": str(rank)},
                text=True,
            )
            for rank in range(count)
        ]
        self.ready = self._replies()

    def tell(self, *words: object) -> list[dict[str, Any]]:
        """Give all ranks a command; return what each answers."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(" ".join(map(str, words)) + "\n")
            process.stdin.flush()
        return self._replies()

    def _replies(self) -> list[dict[str, Any]]:
        watchdog = threading.Timer(DEADLINE_S, self._kill)
        watchdog.start()
        try:
            lines = [process.stdout.readline() for process in self._processes]  # type: ignore[union-attr]
        finally:
            watchdog.cancel()
        if not all(lines):
            raise RuntimeError(f"rank {lines.index('')} ended before it replied, or after {DEADLINE_S:g} s")
        return [json.loads(line) for line in lines]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self._kill()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(timeout=120)
