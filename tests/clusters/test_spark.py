"""Spark: a standalone cluster of a master and two workers. Tasks of a barrier stage are ranks, in Python and Java."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import ROOT, Cluster, assigned, facts
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


def test_tasks_in_java_sum(spark: Spark, tmp_path: Path, environment: dict[str, str]) -> None:
    jars = sorted(JAVA.glob("tessera-*.jar"))
    classpath = ":".join(map(str, [JAVA / "classes", spark.home / "jars" / "*"]))
    subprocess.run(["javac", "-d", tmp_path, "-cp", classpath, HERE / "SparkRanks.java"], check=True)
    subprocess.run(["jar", "cf", tmp_path / "ranks.jar", "-C", tmp_path, "."], check=True)
    token = Path(environment["TESSERA_TOKEN_FILE"]).read_text().strip()
    binding = [str(jar) for jar in jars if "sources" not in jar.name and "javadoc" not in jar.name]
    output = spark.job(
        spark.home / "bin" / "spark-submit", "--master", spark.master, "--conf", "spark.executor.memory=600m",
        "--jars", ",".join(binding), "--class", "SparkRanks", tmp_path / "ranks.jar", spark.master, token,
    )  # fmt: skip
    found = sorted(re.findall(r"rank (\d) on (n\d): 10\.0 10\.0", output))
    assert [rank for rank, _ in found] == ["0", "1", "2", "3"], output
    assert {host for _, host in found} == {"n1", "n2"}, output
