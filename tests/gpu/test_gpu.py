"""What runs on a GPU alone: the driver, NCCL and PyTorch as they are. By `./dev test --gpu`.

With one GPU two ranks share it (ranks/one_gpu.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from patience import patience

RANKS = Path(__file__).parent / "ranks"
ROOT = Path(__file__).resolve().parents[2]
DEVICE_TEST = Path(os.environ.get("TESSERA_GPU_BINARIES", ROOT / "build" / "release" / "tests")) / "device_driver_test"


def run_ranks(program: str, ranks: int, directory: Path, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Processes without an agent, which would end the others when one dies."""
    logs = [directory / f"rank-{rank}.txt" for rank in range(ranks)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            environment["PYTHONPATH"] = os.pathsep.join([str(RANKS.parents[1]), os.environ.get("PYTHONPATH", "")])
            with log.open("w") as out:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(RANKS / program), *arguments], env=environment, stdout=out, stderr=out
                    )
                )
        codes = [process.wait(timeout=patience(90)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        texts = [log.read_text() for log in logs]
        print(*texts, sep="\n")
    return [subprocess.CompletedProcess(program, code, text) for code, text in zip(codes, texts, strict=True)]


def run_job(command: Sequence[str]) -> str:
    tessera = shutil.which("tessera")
    launcher = [tessera] if tessera else [sys.executable, "-m", "tessera"]
    done = subprocess.run(
        [*launcher, "run", *command], capture_output=True, text=True, timeout=patience(240), check=False
    )
    print(done.stdout + done.stderr)
    assert done.returncode == 0
    return done.stdout


def test_the_driver_does_what_the_simulated_one_does() -> None:
    done = subprocess.run([str(DEVICE_TEST)], capture_output=True, text=True, timeout=patience(60), check=False)
    print(done.stdout + done.stderr)
    assert done.returncode == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_collectives_agree_with_the_cpus(ranks: int) -> None:
    out = run_job(["-n", str(ranks), sys.executable, str(RANKS / "collectives.py")])
    for rank in range(ranks):
        assert f"rank {rank}: " in out and "agree with the CPU's" in out


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_agrees_with_the_cpus(ranks: int, tmp_path: Path) -> None:
    out = run_job(["-n", str(ranks), sys.executable, str(RANKS / "training.py"), str(tmp_path)])
    for kind in ("of_ddp", "of_fsdp"):
        assert out.count(f": {kind}: ") == ranks


@pytest.mark.parametrize("mode", ["late", "killed", "assert", "refused"])
def test_faults(mode: str, tmp_path: Path) -> None:
    done = run_ranks("faults.py", 2, tmp_path, str(tmp_path / "store"), mode)
    expected = [0, -9] if mode == "killed" else [0, 0]
    assert [one.returncode for one in done] == expected
    assert "rank 0 is well" in done[0].stdout
