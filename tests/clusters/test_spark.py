"""Spark: a standalone cluster of a master and two workers. Tasks of a barrier stage are ranks, in Python and Java."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tessera as ts
from cluster_hosts import ROOT, Cluster, assigned, facts
from patience import until
from ranks import trained, undisturbed

HERE = Path(__file__).parent
JAVA = ROOT / "bindings" / "java" / "target"


class Spark:
    def __init__(self, cluster: Cluster, at: Path, environment: dict[str, str]) -> None:
        import pyspark  # here, since ./dev test reads this file where it is not installed

        self.home = Path(pyspark.__file__).parent
        self.cluster, self.at, head = cluster, at, cluster.nodes[0]
        self.master = f"spark://{head.name}:7077"
        self.environment = {
            **environment,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(HERE),
            "SPARK_HOME": str(self.home),
            "SPARK_LOCAL_DIRS": str(at),
            "SPARK_WORKER_DIR": str(at),
        }
        deploy = "org.apache.spark.deploy"
        self.service(0, f"{deploy}.master.Master", "--host", head.name, "--port", "7077")
        until(lambda: "I have been elected leader" in self.logs(), 60, self.logs)
        for number, node in enumerate(cluster.nodes):
            size = ["--host", node.name, "--cores", "2", "--memory", "1g"]
            self.service(number, f"{deploy}.worker.Worker", *size, self.master)
        until(lambda: self.logs().count("Successfully registered with master") == 2, 60, self.logs)

    def service(self, number: int, name: str, *arguments: str) -> None:
        node, log = self.cluster.nodes[number], self.at / f"{name.split('.')[-1]}-{number}.log"
        node.start(*self.on(number, self.home / "bin" / "spark-class", name, *arguments), log=log)

    def on(self, number: int, *command: str | Path) -> list[str]:
        environment = {**self.environment, "SPARK_LOCAL_HOSTNAME": self.cluster.nodes[number].name}
        return ["env", "-i", *assigned(environment), *map(str, command)]

    def logs(self) -> str:
        return "".join(log.read_text() for log in sorted(self.at.glob("*.log")))

    def job(self, *command: str | Path) -> str:
        return self.cluster.nodes[0].run(*self.on(0, *command), timeout=280)


@pytest.fixture(scope="module")
def spark(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Spark:
    return Spark(cluster, tmp_path_factory.mktemp("spark"), environment)


def test_tasks_sum_in_one_stage_after_another(spark: Spark, tmp_path: Path) -> None:
    """The second stage's ranks are the first one's processes."""
    output = spark.job(sys.executable, HERE / "spark_job.py", "total", tmp_path, spark.master)
    found = facts(tmp_path, "total")
    assert sorted({fact["host"] for fact in found}) == ["n1", "n2"], output
    assert [fact["sums"] for fact in found] == [[10.0]] * 4, output
    assert output.count("'sums': [10.0]") == 8, output


def test_a_stage_that_lost_a_rank_is_tried_again_and_resumes(spark: Spark, tmp_path: Path) -> None:
    output = spark.job(sys.executable, HERE / "spark_job.py", "train", tmp_path, spark.master)
    lost = facts(tmp_path, "lost")
    assert [fact["rank"] for fact in lost] == [0, 1, 3], output
    assert all("rank 2" in fact["message"] for fact in lost), lost
    ended = re.findall(r"\((\d+), 200\)", output)
    assert len(ended) == 4 and len(set(ended)) == 1 and 0 < int(ended[0]) < 200, output
    assert trained(tmp_path / "checkpoints") == undisturbed(tmp_path / "alone", 200)


def built(spark: Spark, at: Path, source: Path) -> tuple[Path, str]:
    """The jar of a program, and the binding's jars as spark-submit takes them."""
    classpath = ":".join(map(str, [JAVA / "classes", spark.home / "jars" / "*"]))
    at.mkdir()
    subprocess.run(["javac", "-d", at, "-cp", classpath, source], check=True)
    subprocess.run(["jar", "cf", at / "program.jar", "-C", at, "."], check=True)
    binding = [str(jar) for jar in sorted(JAVA.glob("tessera-*.jar")) if not re.search("sources|javadoc", jar.name)]
    return at / "program.jar", ",".join(binding)


def test_tasks_in_java_sum(spark: Spark, tmp_path: Path) -> None:
    program, binding = built(spark, tmp_path / "classes", HERE / "SparkRanks.java")
    output = spark.job(
        spark.home / "bin" / "spark-submit", "--master", spark.master, "--conf", "spark.executor.memory=600m",
        "--jars", binding, "--class", "SparkRanks", program, spark.master,
    )  # fmt: skip
    found = sorted(re.findall(r"rank (\d) on (n\d): 10\.0 10\.0", output))
    assert [rank for rank, _ in found] == ["0", "1", "2", "3"], output
    assert {host for _, host in found} == {"n1", "n2"}, output


def test_the_java_example_trains_a_data_frame_and_resumes(spark: Spark, tmp_path: Path) -> None:
    """First on a local cluster of two executors with a core each, then on both nodes, with twice the ranks."""
    program, binding = built(spark, tmp_path / "classes", ROOT / "examples" / "spark" / "SparkDigits.java")
    root = tmp_path / "checkpoints"

    def train(master: str, ranks: int, epochs: int) -> list[str]:
        output = spark.job(
            spark.home / "bin" / "spark-submit", "--master", master, "--conf", "spark.executor.memory=600m",
            "--conf", "spark.ui.enabled=false", "--jars", binding, "--class", "SparkDigits", program,
            str(ranks), str(epochs), ROOT / "examples" / "data" / "digits.csv", root,
        )  # fmt: skip
        lines = sorted(re.findall(r"^rank \d of .*$", output, re.M))
        assert len(lines) == ranks, output
        return lines

    for rank, line in enumerate(train("local-cluster[2,1,1024]", 2, 3)):
        assert line.startswith(f"rank {rank} of 2 over shm: epochs 0 to 3, accuracy 0."), line
    for rank, line in enumerate(train(spark.master, 4, 8)):
        assert line.startswith(f"rank {rank} of 4 over hierarchical: epochs 3 to 8, accuracy 0.9"), line
    with ts.Checkpoint(root) as checkpoint:
        assert checkpoint.step == 8
        assert checkpoint["model.weight"].shape == (10, 64)


def test_run_returns_by_rank_and_names_the_rank_that_failed(spark: Spark, tmp_path: Path) -> None:
    output = spark.job(sys.executable, HERE / "spark_run.py", tmp_path, "local-cluster[2,1,1024]")
    assert (tmp_path / "ran.json").exists(), output
    found = json.loads((tmp_path / "ran.json").read_text())
    total = found["total"]["returned"]
    assert [(fact["rank"], fact["transport"], fact["sums"]) for fact in total] == [(0, "shm", [3.0]), (1, "shm", [3.0])]
    raised = found["raises"]
    assert (raised["error"], raised["peer"]) == ("UserError", 1), raised
    assert "rank 1 of 2 raised ValueError: no such thing" in raised["message"]
    assert "ValueError('no such thing')" in raised["cause"]
    died = found["dies"]
    assert (died["error"], died["peer"]) == ("PeerLost", 1), died
    assert "rank 1 of 2 died" in died["message"]
    assert found["partitions"] == {"returned": [[0, 2, 45], [1, 2, 45]]}
