"""Hosts on this machine. Each one is a set of name spaces: network, mounts, process IDs, host name and System V IPC,
with its own /dev/shm and /run. A bridge joins them, and nothing leads out of it. They need root.

The first process of a host reads a pipe that this process holds. When the pipe closes, at the end of the tests or at
the death of this process, the kernel kills all that runs on the host, so no service outlives its test.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from patience import patience

__all__ = [
    "ADDRESS",
    "ROOT",
    "Cluster",
    "Host",
    "Marked",
    "assigned",
    "facts",
    "rank_command",
    "rank_environment",
    "runs",
]

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "10.213.78."

UNSHARE = "unshare --net --mount --uts --ipc --pid --fork --kill-child --mount-proc"
# What a host runs first; $1 is its name, $2 its /etc/hosts. It reaps orphans, as SIGCHLD is ignored in `cat`.
FIRST_PROCESS = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
ip link set lo up
echo ready
trap '' CHLD
exec cat
"""


class Host:
    """One host. Commands that run on it see its network, its processes and its name; files are shared by all."""

    def __init__(self, name: str, address: str, hosts_file: Path) -> None:
        self.name, self.address = name, address
        self._first = subprocess.Popen(
            [*UNSHARE.split(), "sh", "-c", FIRST_PROCESS, "sh", name, str(hosts_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._first.stdout
        if self._first.stdout.readline() != b"ready\n":
            raise RuntimeError(f"host {name} did not start; is this process root's?")

    @property
    def pid(self) -> int:
        """A process in the name spaces of the host."""
        return self._first.pid

    def on(self, command: Sequence[str | Path]) -> list[str]:
        """The command line that runs `command` on this host. The working directory is /."""
        enter = f"nsenter --target {self.pid} --net --mount --uts --ipc --pid=/proc/{self.pid}/ns/pid_for_children --"
        return enter.split() + [str(word) for word in command]

    def run(self, *command: str | Path, timeout: float = 60, environment: Mapping[str, str] | None = None) -> str:
        """What `command` prints, standard error included. It has to end with 0."""
        done = subprocess.run(
            self.on(command),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience(timeout),
        )
        assert done.returncode == 0, f"{self.name}: {shlex.join(map(str, command))}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def start(
        self, *command: str | Path, log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts `command`; what it prints goes into `log`."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.on(command),
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def close(self) -> None:
        """Ends all that runs on the host."""
        assert self._first.stdin
        self._first.stdin.close()
        self._first.wait(timeout=30)


class Marked:
    """Processes that a test started on any host: they carry a mark in their environment, so no other one is hit."""

    def __init__(self) -> None:
        self.assignment = f"TESSERA_TEST_MARK={secrets.token_hex(8)}"

    def living(self) -> dict[int, dict[str, str]]:
        """The environment of each living process, by its ID as this process sees it."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it has ended
            if self.assignment in variables:
                found[int(entry.name)] = dict(variable.split("=", 1) for variable in variables if "=" in variable)
        return found

    def signal(self, pid: int, what: signal.Signals) -> bool:
        """Whether there was such a process."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            if pid not in self.living():
                return False
            signal.pidfd_send_signal(descriptor, what)  # the descriptor means the process that has the mark
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def runs(pid: int, program: Path) -> bool:
    """Whether the process is that program."""
    try:
        return (Path("/proc") / str(pid) / "exe").readlink().samefile(program)
    except OSError:
        return False


class Cluster:
    """`count` hosts n1, n2, ... and a host `hub`, which holds the bridge: the place to start launchers from."""

    def __init__(self, count: int, directory: Path) -> None:
        names = {f"n{i}": f"{ADDRESS}{i}" for i in range(1, count + 1)} | {"hub": f"{ADDRESS}254"}
        hosts_file = directory / "hosts"
        hosts_file.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in names.items()))
        self.hub = Host("hub", names["hub"], hosts_file)
        self.nodes = [Host(name, at, hosts_file) for name, at in names.items() if name != "hub"]
        self.hub.run("ip", "link", "add", "br0", "type", "bridge")
        self.hub.run("ip", "address", "add", f"{self.hub.address}/24", "dev", "br0")
        self.hub.run("ip", "link", "set", "br0", "up")
        for node in self.nodes:
            # In the hub's network alone: the process ID of the node is this process's.
            link = f"ip link add p-{node.name} type veth peer name eth0 netns {node.pid}"
            subprocess.run(["nsenter", "--target", str(self.hub.pid), "--net", "--", *link.split()], check=True)
            self.mend(node)
            node.run("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
            node.run("ip", "link", "set", "eth0", "up")

    def cut(self, node: Host) -> None:
        """Nothing goes to or from the host any more, and nobody is told."""
        self.hub.run("ip", "link", "set", f"p-{node.name}", "nomaster")

    def mend(self, node: Host) -> None:
        self.hub.run("ip", "link", "set", f"p-{node.name}", "master", "br0", "up")

    def slow(self, node: Host, rate: str) -> None:
        """What goes to and from the host takes as long as on a link of that rate, "2mbit"."""
        for host, link in ((self.hub, f"p-{node.name}"), (node, "eth0")):
            host.run("tc", *f"qdisc add dev {link} root tbf rate {rate} burst 16kb latency 200ms".split())

    def mend_slow(self, node: Host) -> None:
        for host, link in ((self.hub, f"p-{node.name}"), (node, "eth0")):
            host.run("tc", *f"qdisc del dev {link} root".split())

    def drop(self, node: Host, *, hears: int = 0, says: int = 0) -> None:
        """So many of 100 packets that the host would hear, or says, are lost at random."""
        rules = ["add table inet faults"]
        for percent, hook, side in ((hears, "input", "iifname"), (says, "output", "oifname")):
            rules.append(f"add chain inet faults {hook} {{ type filter hook {hook} priority 0 ; }}")
            if percent > 0:
                rules.append(f'add rule inet faults {hook} {side} "eth0" numgen random mod 100 <= {percent - 1} drop')
        node.run("nft", " ; ".join(rules))

    def mend_drop(self, node: Host) -> None:
        node.run("nft", "delete table inet faults")

    def delay(self, node: Host, least_ms: float, most_ms: float) -> subprocess.Popen[bytes]:
        """Each packet to and from the host is late by as much, until the process that delays them is given to
        `mend_delay`. The packets of a direction keep their order."""
        link, inner, outer = (f"{side}-{node.name}" for side in "pqr")
        self.hub.run("ip", "link", "add", inner, "up", "type", "veth", "peer", "name", outer)
        self.hub.run("ip", "link", "set", outer, "master", "br0", "up")
        self.hub.run("ip", "link", "set", link, "nomaster")
        program = [sys.executable, str(Path(__file__).with_name("delay_link.py")), link, inner]
        proxy = subprocess.Popen(
            self.hub.on([*program, str(least_ms), str(most_ms)]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert proxy.stdout
        if proxy.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the link of {node.name} is not delayed")
        return proxy

    def mend_delay(self, node: Host, proxy: subprocess.Popen[bytes]) -> None:
        assert proxy.stdin
        proxy.stdin.close()
        proxy.wait(timeout=30)
        self.hub.run("ip", "link", "del", f"q-{node.name}")
        self.mend(node)

    def close(self) -> None:
        for host in [*self.nodes, self.hub]:
            host.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def assigned(environment: Mapping[str, str]) -> list[str]:
    """The arguments of `env` that set these variables."""
    return [f"{name}={value}" for name, value in environment.items()]


def rank_environment(directory: Path) -> dict[str, str]:
    """Of ranks on several hosts: a token that all of them can read, and deadlines that a test can wait for."""
    token = directory / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32) + "\n")
    known = ("LD_LIBRARY_PATH", "OPENBLAS_CORETYPE", "PATH", "PYTHONPATH")
    return {
        **{name: os.environ[name] for name in known if name in os.environ},
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "TESSERA_TIMEOUT_MS": "60000",
        "TESSERA_TOKEN_FILE": str(token),
    }


def rank_command(what: str, *arguments: Any) -> list[str]:
    """The command of a rank that does `what` of ranks.py."""
    return [sys.executable, str(Path(__file__).with_name("ranks.py")), what, *map(str, arguments)]


def facts(at: Path, name: str) -> list[dict[str, Any]]:
    """What the ranks reported, by rank."""
    found = [json.loads(file.read_text()) for file in at.glob(f"{name}.*.json")]
    return sorted(found, key=lambda fact: int(fact["rank"]))
