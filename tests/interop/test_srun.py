"""One step of Slurm on two nodes; tests/clusters/ has the rest of Slurm."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "clusters"))
from cluster_hosts import Cluster, facts, rank_command, rank_environment
from slurm import EVEN, Slurm


def test_ranks_of_two_nodes_sum(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("slurmctld") is None:
        pytest.skip("needs root, for hosts as name spaces, and slurmctld")
    for name in ("hosts", "slurm", "found"):
        (tmp_path / name).mkdir()
    with Cluster(2, tmp_path / "hosts") as cluster:
        slurm = Slurm(cluster, tmp_path / "slurm", rank_environment(tmp_path))
        slurm.srun(*EVEN, *rank_command("total", tmp_path / "found"))
    found = facts(tmp_path / "found", "total")
    assert [fact["host"] for fact in found] == ["n1", "n1", "n2", "n2"]
    assert [(fact["world"], fact["transport"], fact["sums"]) for fact in found] == [(4, "hierarchical", [10.0])] * 4
