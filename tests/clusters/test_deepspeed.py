"""The launchers of DeepSpeed and PyTorch: `deepspeed` on one host, torchrun on two that meet by its own rendezvous."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_hosts import Cluster, Host, assigned, facts, rank_command
from deepspeed_steps import check_alike
from patience import patience
from ranks import trained, undisturbed

HERE = Path(__file__).parent


def run(host: Host, environment: dict[str, str], *command: str, timeout: float = 200) -> str:
    return host.run("env", "-i", *assigned({**environment, "PYTHONPATH": str(HERE)}), *command, timeout=timeout)


def deepspeed(ranks: int, *command: str) -> list[str]:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--no_local_rank"]
    return [*launcher, "--master_addr", "127.0.0.1", *command]


def test_ranks_of_deepspeeds_launcher_sum(cluster: Cluster, environment: dict[str, str], tmp_path: Path) -> None:
    _, *program = rank_command("total", tmp_path)
    output = run(cluster.nodes[0], environment, *deepspeed(4, *program))
    assert [fact["sums"] for fact in facts(tmp_path, "total")] == [[10.0]] * 4, output


def test_a_rank_of_deepspeeds_launcher_that_dies_is_named(
    cluster: Cluster, environment: dict[str, str], tmp_path: Path
) -> None:
    """Those of the others that the launcher lets live so long."""
    _, *program = rank_command("lose", tmp_path, 2)
    launcher = ["sh", "-c", '"$@" && exit 1 || exit 0', "sh", *deepspeed(4, *program)]
    output = run(cluster.nodes[0], environment, *launcher)
    found = facts(tmp_path, "lost")
    assert found, output
    assert all("rank 2" in fact["message"] for fact in found), found


@pytest.mark.parametrize("backend", ["gloo", "tessera"])
def test_deepspeed_trains_beside_a_communicator(
    cluster: Cluster, environment: dict[str, str], tmp_path: Path, backend: str
) -> None:
    more = {**environment, "DS_ACCELERATOR": "cpu"}
    output = run(cluster.nodes[0], more, *deepspeed(2, str(HERE / "deepspeed_rank.py"), str(tmp_path), backend))
    found = facts(tmp_path, "trained")
    assert [fact["same"] for fact in found] == [True, True], output
    losses = found[0]["losses"]
    assert losses == found[1]["losses"] and losses[-1] < 0.5 * losses[0], losses


def test_schedules_have_deepspeeds_values() -> None:
    command = [sys.executable, str(HERE / "deepspeed_schedules.py")]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(200), check=False)
    assert done.returncode == 0 and "8 schedules are equal" in done.stdout, done.stdout + done.stderr


STEPS = HERE.parent / "interop" / "deepspeed_steps.py"


def records(cluster: Cluster, environment: dict[str, str], directory: Path, library: str) -> dict[str, Any]:
    """What each rank of two wrote."""
    directory.mkdir()
    more = {**environment, "DS_ACCELERATOR": "cpu"}
    output = run(cluster.nodes[0], more, *deepspeed(2, str(STEPS), library, str(directory)))
    files = [directory / f"{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), output
    return {str(rank): json.loads(file.read_text(encoding="utf-8")) for rank, file in enumerate(files)}


def test_the_engine_has_deepspeeds_steps(cluster: Cluster, environment: dict[str, str], tmp_path: Path) -> None:
    """The record with which the other tests compare is DeepSpeed's too: replace it by that of a newer DeepSpeed."""
    theirs = records(cluster, environment, tmp_path / "theirs", "deepspeed")
    ours = records(cluster, environment, tmp_path / "ours", "tessera")
    recorded = json.loads(STEPS.with_suffix(".json").read_text(encoding="utf-8"))
    for rank in theirs:
        check_alike(ours[rank], theirs[rank])
        check_alike(recorded[rank], theirs[rank])


def torchrun(node: int, *command: str) -> list[str]:
    options = (
        f"--nnodes 2 --nproc-per-node 2 --node-rank {node} --rdzv-backend c10d --rdzv-endpoint n1:29400 --rdzv-id 7"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", *options.split(), "--max-restarts", "2"]
    return [*launcher, "--no-python", *command]


def test_ranks_of_torchrun_on_two_hosts_resume_after_a_restart(
    cluster: Cluster, environment: dict[str, str], tmp_path: Path
) -> None:
    """A rank kills itself once, after a save; torchrun starts all four again."""
    program = rank_command("train", tmp_path, 200, 0.01)
    dying = ["env", "RANKS_DIE_ONCE=2", *program]
    logs = [tmp_path / f"n{number + 1}.log" for number in range(2)]
    launchers = [
        node.start("env", "-i", *assigned(environment), *torchrun(number, *dying), log=logs[number])
        for number, node in enumerate(cluster.nodes)
    ]
    codes = [launcher.wait(timeout=patience(200)) for launcher in launchers]
    output = "".join(log.read_text() for log in logs)
    assert codes == [0, 0], output
    assert len(re.findall(r"ranks, resumed after step [1-9]", output)) == 1, output
    found = facts(tmp_path, "trained")
    assert sorted({fact["host"] for fact in found}) == ["n1", "n2"] and len(found) == 4, output
    assert trained(tmp_path / "checkpoints") == undisturbed(tmp_path / "alone", 200)
