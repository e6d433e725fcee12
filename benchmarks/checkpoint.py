"""Save and load beside PyTorch DCP (best settings), others and raw O_DIRECT of the same bytes, rounds interleaved.

The ranks of each library live through all rounds. Durable always: ours commits, DCP runs with sync_files, the others
are fsynced. Destinations are poisoned before a load and their checksum compared after it. Saves are deleted and the
disk synced between measurements. Before a warm load every file was read once through the page cache, before a cold one
it was dropped from there: ours, which writes and reads past the page cache, would otherwise never be warm and DCP never
cold.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import results
from checkpoint_workload import WORKLOADS, size_bytes
from rank_processes import Ranks

OURS, DCP, ONE_THREAD, RAW = "ours", "PyTorch DCP", "PyTorch DCP, 1 thread", "raw O_DIRECT (fio)"
COMMANDS = {
    OURS: ["checkpoint_tessera.py"],
    DCP: ["checkpoint_torch.py", "dcp"],
    "safetensors": ["checkpoint_torch.py", "safetensors"],
    "torch.save": ["checkpoint_torch.py", "torch.save"],
}
SAVE, WARM, COLD, PART = "durable save", "warm load", "cold load", "warm load of a tenth"
EXTRA_BYTES = 64 << 20  # what a save or load may need beyond the tensors
# Ratios asked for: against DCP it is the disk that bounds what is not in the page cache.
TARGETS = {
    (SAVE, DCP): 1.4,
    (SAVE, ONE_THREAD): 1.4,
    (SAVE, RAW): 0.93,
    (WARM, DCP): 2.5,
    (COLD, DCP): 1.05,
    (COLD, RAW): 0.95,
    (PART, DCP): 2.0,
}
SMALL = {(SAVE, DCP): 50.0, (WARM, DCP): 50.0, (COLD, DCP): 50.0, (PART, DCP): None}


@dataclass(frozen=True)
class Scenario:
    """A workload and how it lies on the ranks. With `load_ranks` it is saved once and loaded into another world."""

    workload: str
    ranks: int = 2
    placement: str = "rows"
    load_ranks: int = 0
    load_placement: str = "rows"
    peers: tuple[str, ...] = (DCP,)
    one_thread: bool = False  # measure DCP's saves by one thread too
    raw: bool = True
    rounds: int = 7
    peer_rounds: int = 99  # fewer where a peer takes long
    targets: dict[tuple[str, str], float | None] = field(default_factory=dict)

    @property
    def has_part(self) -> bool:
        """Whether a tenth of the tensors is loaded too; DCP's flat shards are no tensors of the workload."""
        return not self.load_ranks and self.placement != "flat"

    @property
    def title(self) -> str:
        def on(ranks: int, placement: str) -> str:
            return f"{ranks} rank{'s' if ranks > 1 else ''}{'' if placement == 'rows' else ', ' + placement}"

        text = f"{self.workload}, {on(self.ranks, self.placement)}"
        return text if not self.load_ranks else f"{text} to {on(self.load_ranks, self.load_placement)}"


def large(ranks: int, *peers: str) -> Scenario:
    return Scenario("64 x 16 MiB", ranks, peers=(DCP, *peers), one_thread=True)


def resharded(ranks: int, load_ranks: int, placement: str) -> Scenario:
    targets = {(WARM, DCP): 2.0, (COLD, RAW): 0.9 if placement == "rows" else 0.8}
    return Scenario("64 x 16 MiB", ranks, load_ranks=load_ranks, load_placement=placement, targets=targets)


def language_model(ranks: int) -> Scenario:
    return Scenario("LLM, 2.1 GiB", ranks)


def many(ranks: int) -> Scenario:
    targets = {**SMALL, (SAVE, RAW): 0.8}
    return Scenario("100,000 x 4-16 KiB", ranks, rounds=3, peer_rounds=1, targets=targets)


def flat(ranks: int) -> Scenario:
    return Scenario("20 layers, 1 GiB", ranks, "flat")


SCENARIOS = {
    "large-1": large(1, "safetensors", "torch.save"),
    "large-2": large(2),
    "large-4": large(4),
    "llm-1": language_model(1),
    "llm-2": language_model(2),
    "llm-4": language_model(4),
    "small": Scenario("20,000 x 1 KiB", raw=False, rounds=3, targets=SMALL),
    "many-1": many(1),
    "many-2": many(2),
    "many-4": many(4),
    "replicated-2": Scenario("64 x 16 MiB", 2, "replicated", targets={(COLD, RAW): None}),
    "replicated-4": Scenario("64 x 16 MiB", 4, "replicated", targets={(COLD, RAW): None}),
    "flat-1": flat(1),
    "flat-2": flat(2),
    "flat-4": flat(4),
    "rows-2-4": resharded(2, 4, "rows"),
    "rows-3-2": resharded(3, 2, "rows"),
    "columns-2-4": resharded(2, 4, "columns"),
    "columns-3-2": resharded(3, 2, "columns"),
}


@dataclass
class Reply:
    """One operation of all ranks of a library."""

    seconds: float  # of the slowest rank
    cpu: float  # of all ranks
    extra: int  # bytes, of the rank with the most
    read: int  # bytes from the devices, of all ranks
    path: Path


def start(library: str, workload: str, ranks: int, placement: str, scratch: Path) -> Ranks:
    """The ranks of one library."""
    script, *arguments = COMMANDS[library]
    environment = {
        "BENCH_SCRATCH": tempfile.mkdtemp(dir=scratch),
        "BENCH_WORKLOAD": workload,
        "BENCH_PLACEMENT": placement,
    }
    return Ranks(script, arguments, ranks, environment)


def do(ranks: Ranks, command: str, argument: str | int | Path) -> Reply:
    replies = ranks.tell(command, argument)
    if not all(reply["right"] for reply in replies):
        raise RuntimeError(f"{command}: the data is not what was saved")
    return Reply(
        max(reply["seconds"] for reply in replies),
        sum(reply["cpu"] for reply in replies),
        max(reply["extra"] for reply in replies),
        sum(reply["read"] for reply in replies),
        Path(replies[0]["path"] or argument),
    )


def raw_seconds(direction: str, directory: Path, ranks: int, size: int) -> float:
    """fio: as many processes as ranks write or read the bytes once, O_DIRECT, 4 MiB, depth 4, preallocated, fsync."""
    directory.mkdir(exist_ok=True)
    command = [
        "fio", "--name=raw", f"--directory={directory}", f"--rw={direction}", "--bs=4M", "--ioengine=io_uring",
        "--iodepth=4", "--direct=1", "--fallocate=posix", "--end_fsync=1", f"--numjobs={ranks}",
        f"--size={-(-size // ranks // 4096) * 4096}", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    seconds = max(job[direction]["runtime"] / 1000, job["job_runtime"] / ranks / 1000)
    return seconds * size / job[direction]["io_bytes"]  # fio leaves out what does not fill a request


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def warm(directory: Path) -> None:
    for path in files_in(directory):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 22):
                pass


def cool(directory: Path) -> None:
    for path in files_in(directory):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def clean(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.sync()


class Rounds:
    """Runs a scenario and keeps what was measured, a value a round."""

    def __init__(self, scenario: Scenario, rounds: int, scratch: Path) -> None:
        self.scenario, self.scratch = scenario, scratch
        self.rounds = min(rounds, scenario.rounds)
        self.size = size_bytes(scenario.workload)
        self.replies: dict[tuple[str, str], list[Reply]] = defaultdict(list)  # by operation and library
        self.raw: dict[str, list[float]] = defaultdict(list)  # seconds, by operation
        self.metadata: dict[str, list[float]] = defaultdict(list)  # bytes a tensor, by library

    def run(self) -> None:
        s = self.scenario
        saved = None
        if s.load_ranks:
            with self._libraries(s.ranks, s.placement) as libraries:
                saved = {name: do(ranks, "save", 0).path for name, ranks in libraries.items()}
            raw_seconds("write", self.scratch / "raw", s.load_ranks, self.size)
        with self._libraries(s.load_ranks or s.ranks, s.load_placement if s.load_ranks else s.placement) as libraries:
            for number in range(self.rounds):
                print(f"  {s.title}: round {number + 1} of {self.rounds}", flush=True)
                # Who comes first changes from round to round.
                turn = [name for name in libraries if name == OURS or number < s.peer_rounds][:: (-1) ** number]
                here = saved or self._save(number, {name: libraries[name] for name in turn})
                self._load({name: libraries[name] for name in turn}, here)
                if not saved:
                    for directory in (*here.values(), self.scratch / "raw"):
                        clean(directory)

    @contextmanager
    def _libraries(self, ranks: int, placement: str) -> Iterator[dict[str, Ranks]]:
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(start(name, self.scenario.workload, ranks, placement, self.scratch))
                for name in (OURS, *self.scenario.peers)
            }

    def _save(self, number: int, libraries: dict[str, Ranks]) -> dict[str, Path]:
        saved = {}
        for name, ranks in libraries.items():
            os.sync()
            reply = do(ranks, "save", number)
            self.replies[SAVE, name].append(reply)
            on_disk = sum(path.stat().st_size for path in files_in(reply.path))
            self.metadata[name].append((on_disk - self.size) / len(WORKLOADS[self.scenario.workload]()))
            saved[name] = reply.path
        if self.scenario.one_thread:
            os.sync()
            reply = do(libraries[DCP], "save_by_one_thread", f"{number}-by-one")
            self.replies[SAVE, ONE_THREAD].append(reply)
            clean(reply.path)
        if self.scenario.raw:
            os.sync()
            self.raw[SAVE].append(raw_seconds("write", self.scratch / "raw", self.scenario.ranks, self.size))
        return saved

    def _load(self, libraries: dict[str, Ranks], saved: dict[str, Path]) -> None:
        for operation, prepare, command in ((WARM, warm, "load"), (PART, warm, "load_part"), (COLD, cool, "load")):
            for name, ranks in libraries.items():
                if operation == PART and not (self.scenario.has_part and name in (OURS, DCP)):
                    continue
                prepare(saved[name])
                self.replies[operation, name].append(do(ranks, command, saved[name]))
        if self.scenario.raw:
            ranks_count = self.scenario.load_ranks or self.scenario.ranks
            self.raw[COLD].append(raw_seconds("read", self.scratch / "raw", ranks_count, self.size))

    def cases(self) -> list[results.Case]:
        cases = []
        gib = self.size / (1 << 30)
        targets = {**TARGETS, **self.scenario.targets}

        def add(what: str, metric: str, peer: str, pairs: Any, target: float | None, larger: bool = False) -> None:
            label = f"{what}: {self.scenario.title}"
            cases.append(results.case(label, metric, peer, list(pairs), target, smaller_is_better=not larger))

        for operation in (SAVE, WARM, COLD, PART):
            ours = self.replies[operation, OURS]
            for (of, peer), theirs in list(self.replies.items()):
                if of == operation and peer != OURS:
                    pairs = [(a.seconds, b.seconds) for a, b in zip(ours, theirs, strict=False)]
                    add(operation, "s", peer, pairs, targets.get((operation, peer)))
            if self.raw[operation]:
                pairs = [(gib / a.seconds, gib / b) for a, b in zip(ours, self.raw[operation], strict=True)]
                add(operation, "GiB/s", RAW, pairs, targets.get((operation, RAW)), larger=True)
            if not ours or operation == PART:
                continue
            dcp = self.replies[operation, DCP]
            pairs = [(a.cpu / gib, b.cpu / gib) for a, b in zip(ours, dcp, strict=False)]
            add(operation, "CPU s per GiB", DCP, pairs, None)
            mib = [(a.extra / (1 << 20), b.extra / (1 << 20)) for a, b in zip(ours, dcp, strict=False)]
            add(operation, "MiB of extra memory per rank", DCP, mib, None)
            bound = [(a.extra / (1 << 20), EXTRA_BYTES / (1 << 20)) for a in ours]
            add(operation, "MiB of extra memory per rank", "bound", bound, 1.0)
            if operation == COLD:
                read = [(a.read / (1 << 20), self.size / (1 << 20)) for a in ours]
                add(operation, "MiB read from the device", "data", read, None)
        if self.metadata:
            add("metadata", "B per tensor", DCP, zip(self.metadata[OURS], self.metadata[DCP], strict=False), None)
        return cases


def bench(rounds: int, only: list[str]) -> Iterator[list[results.Case]]:
    """The cases of one scenario after the other: what ran is kept when a later one fails."""
    if unknown := set(only) - set(SCENARIOS):
        sys.exit(f"there is no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    for name in only or SCENARIOS:
        scratch = Path(tempfile.mkdtemp(prefix="tessera-bench-", dir=os.environ.get("TESSERA_BENCH_DIR")))
        try:
            measured = Rounds(SCENARIOS[name], rounds, scratch)
            measured.run()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        yield [{"scenario": name, **case} for case in measured.cases()]
