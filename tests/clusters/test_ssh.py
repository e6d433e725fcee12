"""sshd on two hosts: a loop of ssh starts the ranks with torchrun's variables, as people do who have no scheduler."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cluster_hosts import Cluster, assigned, facts, rank_command
from patience import patience, until
from ranks import trained, undisturbed

SSHD = """
Port 2222
ListenAddress {address}
HostKey {at}/host_key
PidFile none
AuthorizedKeysFile {at}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""


class Ssh:
    """Starts ranks as a user at the hub does."""

    def __init__(self, cluster: Cluster, at: Path, environment: Mapping[str, str]) -> None:
        self.cluster, self.at, self.environment = cluster, at, environment
        self.port = 20_000  # of a job's store: another one for each
        for key in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", at / key], check=True)
        public = (at / "host_key.pub").read_text()
        (at / "known_hosts").write_text("".join(f"[{node.name}]:2222 {public}" for node in cluster.nodes))
        for node in cluster.nodes:
            (at / f"sshd-{node.name}").write_text(SSHD.format(address=node.address, at=at))
            node.start("/usr/sbin/sshd", "-D", "-e", "-f", at / f"sshd-{node.name}", log=at / f"{node.name}.log")
        for number in range(len(cluster.nodes)):
            until(lambda number=number: self.answers(number), 30, self.logs)

    def command(self, number: int, command: list[str]) -> list[str]:
        options = f"-F none -i {self.at}/key -p 2222 -o BatchMode=yes -o UserKnownHostsFile={self.at}/known_hosts"
        return ["ssh", *options.split(), self.cluster.nodes[number].name, shlex.join(command)]

    def answers(self, number: int) -> bool:
        command = self.cluster.hub.on(self.command(number, ["true"]))
        return subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0

    def logs(self) -> str:
        return "".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.at.glob("*.log")))

    def start(self, nodes: list[int], command: list[str], at: Path, **more: str) -> list[subprocess.Popen[bytes]]:
        """A rank on each of the nodes; each prints into `at`/rank-N.log."""
        self.port += 20
        common = {"WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": self.cluster.nodes[nodes[0]].name}
        common |= {"MASTER_PORT": str(self.port), **self.environment, **more}
        started = []
        for rank, node in enumerate(nodes):
            variables = assigned({**common, "RANK": str(rank), "LOCAL_RANK": str(nodes[:rank].count(node))})
            run = self.command(
                node, ["env", *(variable for variable in variables if not variable.endswith("=")), *command]
            )
            started.append(self.cluster.hub.start(*run, log=at / f"rank-{rank}.log"))
        return started

    def run(self, nodes: list[int], command: list[str], at: Path, **more: str) -> str:
        """The same to the end, which has to be good; what the ranks printed."""
        ranks = self.start(nodes, command, at, **more)
        codes = [rank.wait(timeout=patience(120)) for rank in ranks]
        output = output_of(at)
        assert codes == [0] * len(nodes), output
        return output


def output_of(at: Path) -> str:
    return "".join(log.read_text() for log in sorted(at.glob("rank-*.log")))


@pytest.fixture(scope="module")
def ssh(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Ssh:
    return Ssh(cluster, tmp_path_factory.mktemp("ssh"), environment)


@pytest.fixture(autouse=True)
def network_is_whole(cluster: Cluster) -> Iterator[None]:
    yield
    for node in cluster.nodes:
        cluster.mend(node)


@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1, 1], [1, 0, 1]])
def test_ranks_of_two_hosts_sum(ssh: Ssh, tmp_path: Path, nodes: list[int]) -> None:
    ssh.run(nodes, rank_command("total", tmp_path), tmp_path)
    found = facts(tmp_path, "total")
    assert [fact["host"] for fact in found] == [f"n{node + 1}" for node in nodes]
    assert [fact["sums"] for fact in found] == [[sum(range(1, len(nodes) + 1))]] * len(nodes)


def test_a_training_of_two_hosts_goes_on_at_other_world_sizes(ssh: Ssh, tmp_path: Path) -> None:
    for steps, nodes in ((20, [0, 0, 1, 1]), (40, [1]), (60, [1, 0, 0])):
        output = ssh.run(nodes, rank_command("train", tmp_path, steps, 0), tmp_path)
        assert f"rank 0 of {len(nodes)}: steps {steps - 20} to {steps}" in output
    assert trained(tmp_path / "checkpoints") == undisturbed(tmp_path / "alone", 60)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_is_named_to_all_others(ssh: Ssh, tmp_path: Path, victim: int) -> None:
    ranks = ssh.start([0, 0, 1, 1], rank_command("lose", tmp_path, victim), tmp_path)
    for rank in ranks:
        rank.wait(timeout=patience(60))
    found = facts(tmp_path, "lost")
    assert [fact["rank"] for fact in found] == [rank for rank in range(4) if rank != victim], output_of(tmp_path)
    for fact in found:
        assert f"rank {victim}" in fact["message"], found
        assert fact["seconds"] < 10, found


def test_a_cut_network_is_noticed_within_the_heartbeat(ssh: Ssh, tmp_path: Path) -> None:
    """On both sides of the cut: each has lost the other."""
    heartbeat = 3.0
    more = {"TESSERA_HEARTBEAT_TIMEOUT_MS": str(int(heartbeat * 1000))}
    ssh.start([0, 0, 1, 1], rank_command("lose", tmp_path), tmp_path, **more)
    until(lambda: len(facts(tmp_path, "joined")) == 4, 60, lambda: output_of(tmp_path) + ssh.logs())
    ssh.cluster.cut(ssh.cluster.nodes[1])
    until(lambda: len(facts(tmp_path, "lost")) == 4, 10 * heartbeat, lambda: str(facts(tmp_path, "lost")))
    for fact in facts(tmp_path, "lost"):
        other = "[23]" if fact["host"] == "n1" else "[01]"
        assert re.search(f"rank {other}", fact["message"]), fact
        assert heartbeat * 0.5 < fact["seconds"] < heartbeat * 3, fact


def test_a_short_cut_of_the_network_disturbs_nobody(ssh: Ssh, tmp_path: Path) -> None:
    ranks = ssh.start([0, 0, 1, 1], rank_command("train", tmp_path, 300, 0.01), tmp_path)
    until((tmp_path / "checkpoints" / "latest").exists, 60, lambda: output_of(tmp_path))
    ssh.cluster.cut(ssh.cluster.nodes[1])
    mended = time.monotonic() + 2
    until(lambda: time.monotonic() > mended, 60, "")
    ssh.cluster.mend(ssh.cluster.nodes[1])
    assert [rank.wait(timeout=patience(120)) for rank in ranks] == [0] * 4, output_of(tmp_path)
    assert trained(tmp_path / "checkpoints") == undisturbed(tmp_path / "alone", 300)


def test_a_job_that_was_cut_resumes_on_one_of_the_hosts(ssh: Ssh, tmp_path: Path) -> None:
    more = {"TESSERA_HEARTBEAT_TIMEOUT_MS": "2000"}
    ssh.start([0, 0, 1, 1], rank_command("train", tmp_path, 1_000_000, 0.01), tmp_path, **more)
    until((tmp_path / "checkpoints" / "latest").exists, 60, lambda: output_of(tmp_path))
    ssh.cluster.cut(ssh.cluster.nodes[1])
    for node in ssh.cluster.nodes:
        until(lambda node=node: "ranks.py" not in node.run("ps", "-e", "-o", "args"), 60, lambda: output_of(tmp_path))
    begun = trained(tmp_path / "checkpoints")[0]
    output = ssh.run([0, 0], rank_command("train", tmp_path, begun + 20, 0), tmp_path)
    assert f"rank 0 of 2: steps {begun} to {begun + 20}" in output
    assert trained(tmp_path / "checkpoints") == undisturbed(tmp_path / "alone", begun + 20)


def test_ranks_without_a_token_are_refused(ssh: Ssh, tmp_path: Path) -> None:
    ranks = ssh.start([0, 1], rank_command("total", tmp_path), tmp_path, TESSERA_TOKEN_FILE="")
    assert all(rank.wait(timeout=patience(60)) != 0 for rank in ranks)
    assert output_of(tmp_path).count("PermissionDenied") >= 2, output_of(tmp_path)


def test_a_rank_that_does_not_come_is_named(ssh: Ssh, tmp_path: Path) -> None:
    """Its host is not reached: two of three ranks come."""
    ssh.cluster.cut(ssh.cluster.nodes[1])
    command = rank_command("total", tmp_path)
    ranks = ssh.start([0, 0, 1], command, tmp_path, TESSERA_TIMEOUT_MS="4000")
    for rank in ranks[:2]:
        assert rank.wait(timeout=patience(60)) != 0
    ranks[2].kill()
    for number in range(2):
        assert re.search("rank 2", (tmp_path / f"rank-{number}.log").read_text()), output_of(tmp_path)
