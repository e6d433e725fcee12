"""Save and load beside PyTorch DCP (best settings) and a raw O_DIRECT write of the same bytes, rounds interleaved.

Both libraries run as two ranks that live through all rounds. Durable always: ours commits, DCP runs with sync_files.
Destinations are poisoned before a load and compared after it. Directories are deleted and the disk synced between the
measurements. Before a warm load every file was read once through the page cache, before a cold one it was dropped from
there: ours, which writes and reads past the page cache, would otherwise never be warm and DCP never cold.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import results
from checkpoint_worker import Workload

HERE = Path(__file__).parent
WORLD_SIZE = 2
LARGE = Workload(64, 2048, 2048)  # 64 x 16 MiB = 1 GiB
SMALL = Workload(20_000, 2, 128)  # 20,000 x 1 KiB


class Ranks:
    """The ranks of one library, idle until told."""

    def __init__(self, script: str, workload: Workload, scratch: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        rendezvous = tempfile.mkdtemp(dir=scratch, prefix="rendezvous-")
        self.processes = []
        for rank in range(WORLD_SIZE):
            environment = dict(
                os.environ,
                RANK=str(rank),
                WORLD_SIZE=str(WORLD_SIZE),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                OMP_NUM_THREADS="1",
                BENCH_RENDEZVOUS=rendezvous,
                BENCH_WORKLOAD=f"{workload.count}x{workload.rows}x{workload.columns}",
            )
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / script)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                    text=True,
                )
            )
        self._replies()

    def _replies(self) -> list[dict[str, float]]:
        replies = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"a rank ended with status {process.wait()}")
            replies.append(json.loads(line))
        return replies

    def do(self, command: str, directory: Path) -> tuple[float, float]:
        """Seconds of the slowest rank, and CPU seconds of all."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{command} {directory}\n")
            process.stdin.flush()
        replies = self._replies()
        if not all(reply["right"] for reply in replies):
            raise RuntimeError(f"{command}: the data is not what was saved")
        return max(reply["seconds"] for reply in replies), sum(reply["cpu"] for reply in replies)

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("quit\n")
            process.stdin.close()
        for process in self.processes:
            process.wait(timeout=120)


def raw_write_seconds(directory: Path, size_bytes: int) -> float:
    """fio: two processes write the bytes once, O_DIRECT, 4 MiB, depth 4, preallocated, fsync at the end."""
    directory.mkdir()
    command = [
        "fio", "--name=raw", f"--directory={directory}", "--rw=write", "--bs=4M", "--ioengine=io_uring", "--iodepth=4",
        "--direct=1", "--fallocate=posix", "--end_fsync=1", f"--numjobs={WORLD_SIZE}",
        f"--size={size_bytes // WORLD_SIZE}", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return max(job["write"]["runtime"] / 1000, job["job_runtime"] / WORLD_SIZE / 1000)


def warm(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 22):
                    pass


def cool(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def clean(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.sync()


def bench_workload(
    name: str, workload: Workload, rounds: int, targets: dict[str, float], raw: bool
) -> list[results.Case]:
    gib = workload.size_bytes() / (1 << 30)
    timed = ["durable save", "warm load", "cold load"]
    pairs: dict[str, list[tuple[float, float]]] = {key: [] for key in (*timed, *(f"{key} cpu" for key in timed), "raw")}
    scratch = Path(tempfile.mkdtemp(prefix="tessera-bench-", dir=os.environ.get("TESSERA_BENCH_DIR")))
    try:
        ours = Ranks("checkpoint_tessera.py", workload, scratch)
        dcp = Ranks("checkpoint_dcp.py", workload, scratch)
        for number in range(rounds):
            print(f"  {name}, round {number + 1} of {rounds}", flush=True)
            mine, theirs = scratch / f"ours-{number}", scratch / f"dcp-{number}"
            os.sync()
            save_ours, cpu_ours = ours.do("save", mine)
            os.sync()
            if raw:
                raw_seconds = raw_write_seconds(scratch / "raw", workload.size_bytes())
                clean(scratch / "raw")
                pairs["raw"].append((gib / save_ours, gib / raw_seconds))
            measured = {"durable save": ((save_ours, cpu_ours), dcp.do("save", theirs))}
            for key, prepare in (("warm load", warm), ("cold load", cool)):
                both = []
                for library, directory in ((ours, mine), (dcp, theirs)):
                    prepare(directory)
                    both.append(library.do("load", directory))
                measured[key] = (both[0], both[1])
            for key, ((seconds_ours, cpu_ours), (seconds_dcp, cpu_dcp)) in measured.items():
                pairs[key].append((seconds_ours, seconds_dcp))
                pairs[f"{key} cpu"].append((cpu_ours / gib, cpu_dcp / gib))
            clean(mine)
            clean(theirs)
        ours.close()
        dcp.close()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

    cases = []
    for key in (*timed, *(f"{key} cpu" for key in timed)):
        metric = "CPU s a GiB" if key.endswith("cpu") else "s"
        label = f"{key}, {name}, {WORLD_SIZE} ranks"
        cases.append(results.case(label, metric, "PyTorch DCP", pairs[key], targets.get(key), smaller_is_better=True))
    if raw:
        label = f"durable save, {name}, {WORLD_SIZE} ranks"
        cases.append(
            results.case(label, "GiB/s", "raw O_DIRECT (fio)", pairs["raw"], targets["raw"], smaller_is_better=False)
        )
    return cases


def bench(rounds: int, workloads: list[str]) -> list[results.Case]:
    cases = []
    if "large" in workloads:
        cases += bench_workload(
            "64 x 16 MiB", LARGE, rounds, {"durable save": 1.2, "warm load": 1.5, "raw": 0.85}, raw=True
        )
    if "small" in workloads:
        few = min(rounds, 3)  # the peer takes over 30 s a call
        cases += bench_workload("20,000 x 1 KiB", SMALL, few, {"durable save": 20.0, "warm load": 20.0}, raw=False)
    return cases
