"""sshd on two hosts: a loop of ssh starts the ranks with torchrun's variables, as people do who have no scheduler;
`tessera run --hostfile` and `tessera deepspeed` start them in one command.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from cluster_hosts import Cluster, Marked, assigned, facts, rank_command, runs
from patience import patience, until
from programs import TESSERA
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


# What the user's ssh reads for every host, in place of /etc/ssh/ssh_config.
CONFIG = """
IdentityFile {at}/key
UserKnownHostsFile {at}/known_hosts
Port 2222
"""


class OneCommand:
    """`tessera run --hostfile` or `tessera deepspeed`, as a user at the hub gives it."""

    def __init__(self, ssh: Ssh, at: Path) -> None:
        self.ssh, self.log, self.marked = ssh, at / "command.log", Marked()
        (at / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
        self.hosts = at / "hosts"

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Without a token: the command makes one."""
        variables = {name: value for name, value in self.ssh.environment.items() if name != "TESSERA_TOKEN_FILE"}
        words = (str(TESSERA), words[0], "--hostfile", str(self.hosts), *words[1:])
        command = ["env", "-i", *assigned(variables), self.marked.assignment, *words]
        return self.ssh.cluster.hub.start(*command, log=self.log)

    def end(self, started: subprocess.Popen[bytes]) -> int:
        """Its code; nothing of the job lives on any host."""
        code = started.wait(timeout=patience(120))
        for node in self.ssh.cluster.nodes:
            until(lambda node=node: not self.of_job(node.run("ps", "-e", "-o", "args")), 30, self.told)
        return code

    @staticmethod
    def of_job(processes: str) -> str:
        return "\n".join(line for line in processes.splitlines() if "ranks.py" in line or "agent-from-stdin" in line)

    def told(self) -> str:
        return self.log.read_text()[-4000:] + self.ssh.logs()


@pytest.fixture
def one_command(ssh: Ssh, tmp_path: Path) -> OneCommand:
    (ssh.at / "ssh_config").write_text(CONFIG.format(at=ssh.at))
    hub = ssh.cluster.hub
    if "/etc/ssh/ssh_config" not in hub.run("cat", "/proc/self/mountinfo"):  # seen on the hub alone
        hub.run("mount", "--bind", ssh.at / "ssh_config", "/etc/ssh/ssh_config")
    return OneCommand(ssh, tmp_path)


def test_one_command_starts_the_ranks_of_all_hosts(one_command: OneCommand, tmp_path: Path) -> None:
    assert one_command.end(one_command.start("run", *rank_command("total", tmp_path))) == 0, one_command.told()
    found = facts(tmp_path, "total")
    assert [fact["host"] for fact in found] == ["n1", "n1", "n2", "n2"]
    assert [(fact["transport"], fact["sums"]) for fact in found] == [("hierarchical", [10.0])] * 4


def test_deepspeeds_command_line_starts_the_slots_that_it_includes(one_command: OneCommand, tmp_path: Path) -> None:
    """The port of sshd is in its options, not in ssh's."""
    (one_command.ssh.at / "ssh_config").write_text(CONFIG.format(at=one_command.ssh.at).replace("Port 2222", ""))
    words = ["--include", "n1:0,1@n2:1", "--ssh_port", "2222", "--no_local_rank"]
    _, *program = rank_command("total", tmp_path)
    assert one_command.end(one_command.start("deepspeed", *words, *program)) == 0, one_command.told()
    found = facts(tmp_path, "total")
    assert [fact["host"] for fact in found] == ["n1", "n1", "n2"]
    assert [fact["sums"] for fact in found] == [[6.0]] * 3


def test_the_rank_that_died_is_in_the_report_of_the_command(one_command: OneCommand, tmp_path: Path) -> None:
    command = one_command.start("run", *rank_command("lose", tmp_path, 3))
    assert one_command.end(command) == 128 + signal.SIGKILL, one_command.told()
    assert "the job failed: rank 3 was killed by SIGKILL" in one_command.told()
    assert [fact["rank"] for fact in facts(tmp_path, "lost")] == [0, 1, 2], one_command.told()


def test_sigterm_of_the_command_lets_all_hosts_save(one_command: OneCommand, tmp_path: Path) -> None:
    command = one_command.start("run", *rank_command("train", tmp_path, 1_000_000, 0.01))
    until((tmp_path / "checkpoints" / "latest").exists, 60, one_command.told)
    launcher = min(pid for pid in one_command.marked.living() if runs(pid, TESSERA))
    assert one_command.marked.signal(launcher, signal.SIGTERM)
    assert one_command.end(command) == 0, one_command.told()
    step, weights = trained(tmp_path / "checkpoints")
    assert {fact["step"] for fact in facts(tmp_path, "trained")} == {step}, one_command.told()
    assert (step, weights) == undisturbed(tmp_path / "alone", step)


def test_a_host_that_is_cut_off_ends_the_command(one_command: OneCommand, tmp_path: Path) -> None:
    """No rank is left, also beyond the cut."""
    command = one_command.start("run", "--grace-s", "1", "--kill-grace-s", "1", *rank_command("lose", tmp_path))
    until(lambda: len(facts(tmp_path, "joined")) == 4, 60, one_command.told)
    one_command.ssh.cluster.cut(one_command.ssh.cluster.nodes[1])
    assert one_command.end(command) == 1, one_command.told()
    assert re.search(r"rank [23] was lost with its host n2: its agent has not been heard for 6 s", one_command.told())


def test_a_host_that_lets_nobody_in_is_named(one_command: OneCommand, tmp_path: Path) -> None:
    config = CONFIG.format(at=one_command.ssh.at)
    (one_command.ssh.at / "ssh_config").write_text(f"Host n2\nPort 2223\nHost *\n{config}")
    assert one_command.end(one_command.start("run", *rank_command("total", tmp_path))) == 255
    assert "the agent on host n2 ended with exit code 255, as ssh does if it cannot connect" in one_command.told()
    assert facts(tmp_path, "total") == []
