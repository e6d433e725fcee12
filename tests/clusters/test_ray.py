"""Ray: a cluster of two nodes, whose actors are the ranks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tessera as ts
from cluster_hosts import ROOT, Cluster, assigned, facts
from patience import until
from ranks import trained, undisturbed

HERE = Path(__file__).parent


class Ray:
    def __init__(self, cluster: Cluster, at: Path, environment: dict[str, str]) -> None:
        self.cluster, self.at = cluster, at
        self.environment = {
            **environment,
            "HOME": str(at),
            "PYTHONPATH": str(HERE),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }
        self.port = 21_000
        head = cluster.nodes[0]
        for node in cluster.nodes:
            role = ["--head", "--port=6379", "--temp-dir=/run/ray", "--include-dashboard=false"]
            if node is not head:
                role = [f"--address={head.address}:6379"]
            size = ["--num-cpus=4", "--object-store-memory=100000000", f'--resources={{"{node.name}": 4}}']
            node.start(
                *self.command(
                    "ray.scripts.scripts", "start", f"--node-ip-address={node.address}", "--block", *role, *size
                ),
                log=at / f"{node.name}.log",
            )
            if node is head:
                until(lambda: "Ray runtime started" in self.log("n1"), 90, self.logs)
        until(lambda: "Ray runtime started" in self.log("n2"), 90, self.logs)

    def command(self, module: str, *arguments: str) -> list[str]:
        return ["env", "-i", *assigned(self.environment), sys.executable, "-m", module, *arguments]

    def log(self, name: str) -> str:
        return (self.at / f"{name}.log").read_text()

    def logs(self) -> str:
        return self.log("n1") + self.log("n2")

    def processes(self) -> list[str]:
        """The actors of tessera.ray that live."""
        all_of_them = "".join(node.run("ps", "-e", "-o", "args") for node in self.cluster.nodes)
        return [line for line in all_of_them.splitlines() if line.startswith("ray::_Rank")]

    def program(self, *words: str | Path) -> str:
        command = [
            "env",
            "-i",
            *assigned({**self.environment, "RAY_ADDRESS": "auto"}),
            sys.executable,
            *map(str, words),
        ]
        return self.cluster.nodes[0].run(*command, timeout=200)

    def job(self, what: str, at: Path, *arguments: int) -> str:
        self.port += 100
        words = [what, str(at), str(self.port), *map(str, arguments)]
        return self.cluster.nodes[0].run(*self.command("ray_job", *words), timeout=200)


@pytest.fixture(scope="module")
def ray(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[Ray]:
    yield Ray(cluster, tmp_path_factory.mktemp("ray"), environment)


def test_actors_of_two_nodes_sum(ray: Ray, tmp_path: Path) -> None:
    ray.job("total", tmp_path)
    found = facts(tmp_path, "total")
    assert [fact["host"] for fact in found] == ["n1", "n1", "n2", "n2"]
    assert [fact["sums"] for fact in found] == [[10.0]] * 4


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_actor_is_named_and_a_new_one_resumes_with_the_others(ray: Ray, tmp_path: Path, victim: int) -> None:
    """The others join the next job in the processes that they are."""
    ray.job("kill", tmp_path, victim)
    found = json.loads((tmp_path / "told.json").read_text())
    told = found["told"]
    assert "Actor" in told.pop(str(victim))["error"]
    assert len(told) == 3
    for error in told.values():
        assert f"rank {victim}" in error["message"], told
    assert found["seconds"] < 20, found
    step, weights = trained(tmp_path / "checkpoints")
    assert (step, weights) == undisturbed(tmp_path / "alone", step)


def test_run_returns_by_rank_and_names_the_rank_that_failed(ray: Ray, tmp_path: Path) -> None:
    ray.program(HERE / "ray_run.py", tmp_path)
    found = json.loads((tmp_path / "ran.json").read_text())
    total = found["total"]["returned"]
    assert [fact["rank"] for fact in total] == [0, 1, 2, 3]
    assert total[0]["host"] == total[1]["host"] != total[2]["host"] == total[3]["host"]
    assert [(fact["transport"], fact["sums"]) for fact in total] == [("hierarchical", [10.0])] * 4

    raised = found["raises"]
    assert (raised["error"], raised["peer"]) == ("UserError", 2), raised
    assert "rank 2 of 4 raised ValueError: no such thing" in raised["message"]
    assert "ValueError('no such thing')" in raised["cause"]
    died = found["dies"]
    assert (died["error"], died["peer"]) == ("PeerLost", 1), died
    assert "rank 1 of 4 died" in died["message"]
    assert found["no room"]["error"] == "TesseraTimeout", found["no room"]
    assert "has not placed 4 ranks with {'CPU': 3}" in found["no room"]["message"]
    assert found["after them"] == {"returned": [0, 1, 2, 3]}
    until(lambda: not ray.processes(), 30, lambda: str(ray.processes()))


def test_the_example_trains_and_resumes(ray: Ray, tmp_path: Path) -> None:
    example = [ROOT / "examples" / "ray" / "digits_ray.py", "--checkpoints", tmp_path]
    first = ray.program(*example, "--workers", "2", "--epochs", "3")
    assert "2 ranks, epochs 0 to 3" in first
    second = ray.program(*example, "--workers", "3", "--epochs", "6")
    accuracy = re.search(r"3 ranks, epochs 3 to 6: held-out accuracy (\d\.\d+)", second)
    assert accuracy and float(accuracy[1]) > 0.85, second
    with ts.Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.step == 6
        assert checkpoint["model.fc1.weight"].shape == (64, 128)
