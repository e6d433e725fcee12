"""`tessera run` next to the real torchrun: a rank finds the same environment, and each launcher reads what programs for
the other report."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TESSERA
from fork_server import ONE_THREAD
from patience import patience
from run_torch import run_python

pytest.importorskip("torch")

WORKER = Path(__file__).with_name("torchrun_worker.py")
FLAGS = ["--standalone", "--nproc_per_node=2", "--max-restarts", "1", "--role", "trainer", "--virtual-local-rank"]
# Of torchrun's variables, those whose values name a run, a port or a file.
OF_THE_RUN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


def of_launcher(file: Path) -> dict[str, str]:
    """The variables that torchrun documents, and others of its names."""
    names = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCH", "OMP_", "CUDA_")
    found = json.loads(file.read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if name.startswith(names)}


def test_ranks_find_torchruns_environment_and_each_reports_to_either_launcher(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")} | ONE_THREAD
    said = {}
    for launcher in ("torchrun", "tessera"):
        (tmp_path / launcher).mkdir()
        words = [*FLAGS, str(WORKER), str(tmp_path / launcher)]
        if launcher == "torchrun":
            done = run_python("-m", "torch.distributed.run", *words)
        else:
            done = subprocess.run(
                [TESSERA, "run", *words],
                env={**environment, "PYTHON_EXEC": sys.executable},
                capture_output=True,
                text=True,
                timeout=patience(60),
            )
        assert done.returncode == 1, done.stderr
        said[launcher] = done.stderr
    for name in ("0-0", "0-1", "1-0", "1-1"):
        real, ours = (of_launcher(tmp_path / launcher / f"{name}.json") for launcher in ("torchrun", "tessera"))
        assert set(ours) >= set(real), name
        differing = {key for key in real if ours[key] != real[key]} - OF_THE_RUN
        # torchrun's agent listens on MASTER_PORT; here rank 0 may.
        assert differing == {"TORCHELASTIC_USE_AGENT_STORE"}, {key: (real[key], ours[key]) for key in differing}
    for report in said.values():
        assert "ValueError: loss is nan after 1 restarts" in report
    assert "Root Cause (first observed failure)" in said["torchrun"]
    assert "torchrun_worker.py" in said["torchrun"].split("Root Cause", 1)[1], "the traceback"


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise RuntimeError("no more data")

main()
"""


def test_what_record_of_pytorch_writes_is_in_the_report(tmp_path: Path) -> None:
    """A forked program stands for the rank, which would import PyTorch for seconds."""
    file = tmp_path / "error.json"
    failed = run_python("-c", RECORDED, environment={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert failed.returncode == 1
    rank = f'[ $RANK = 0 ] || exit 0; cp {shlex.quote(str(file))} "$TORCHELASTIC_ERROR_FILE"; exit 5'
    done = subprocess.run(
        [TESSERA, "run", "-n", "2", "sh", "-c", rank], capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == 5
    assert "rank 0 ended with exit code 5: RuntimeError: no more data" in done.stderr
    assert "in main" in done.stderr, "the traceback"
