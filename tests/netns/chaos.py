"""Chaos: a job of four languages trains on two or three hosts of a network, and one fault after another hits it.

A job has some rounds, one for each of its faults, all drawn from a seed. In a round the job trains, the fault hits it
at a moment that the seed draws too, the job goes on (or ends, if it has to, and is started again), and the round checks
what must hold: docs/RELIABILITY.md lists it. Then the job is asked to stop, saves, and has to have the bits of a
replay: a training that nobody disturbs, with the same numbers of ranks in the same steps.

`./dev fault chaos` runs this file: it accumulates rounds in a file, so it can be interrupted and continued.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "clusters"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "demo"))

import tessera as ts
from cluster_hosts import ROOT, Cluster, Host, Marked, assigned, rank_environment, runs
from patience import patience, until
from programs import LANGUAGES, TESSERA, digits
from user_programs import JVM

PER_HOST = 2  # ranks
SAVE_EVERY = 5
PACE_MS = 40  # of a step, so that a round has some saves and not many steps to replay
SILENCE_S = 3  # after which an agent is lost
DEADLINE_S = 5  # of the ranks' collectives
ROUND_S = 60  # a round that has not gone on by then has failed
FAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"


# --- the job


def languages() -> list[str]:
    """Of rank 0, 1, ... in turn: those whose trainer has been built."""
    return [language for language in LANGUAGES if Path(digits(language, [])[-1]).exists()]


def trainer(at: Path, name: str, arguments: Sequence[str]) -> Path:
    """A program that becomes the trainer of its rank's language, so that the command is the same on all hosts. Python
    and Java keep their clocks: under libfaketime 0.9.10 a pause of Python fails and the JVM hangs.
    """
    lines = [
        "#!/bin/sh",
        f"cd {shlex.quote(str(at))} && ulimit -c 0 || exit 1",
        f"case $((RANK % {len(languages())})) in",
    ]
    for number, language in enumerate(languages()):
        words = digits(language, list(arguments))
        if language == "java":
            words[1:1] = [*JVM, "-XX:+SuppressFatalErrorMessage"]
        before = "unset LD_PRELOAD && " if language in ("python", "java") else ""
        lines.append(f"{number}) {before}exec {shlex.join(words)} ;;")
    script = at / name
    script.write_text("\n".join([*lines, "esac", ""]))
    script.chmod(0o700)
    return script


@dataclass(frozen=True)
class Moment:
    """What was there before a fault."""

    lines: int  # of the agents' output
    step: int


@dataclass(frozen=True)
class Holdings:
    """What the job holds of the hosts while it trains undisturbed: it must not grow from round to round."""

    descriptors: int  # of the agents, with both ends of the connection to the store that the coordinating one may have
    segments: int  # in /dev/shm
    listening: int  # ports
    files: int  # temporary ones
    processes: int

    def within(self, other: Holdings) -> bool:
        return all(asdict(self)[name] <= value for name, value in asdict(other).items())


class Job:
    """An agent on each host, over the same checkpoints. Rank 0 and the coordinating agent are on the first host."""

    def __init__(self, cluster: Cluster, at: Path, *, fakes_clock: bool = False) -> None:
        self.cluster, self.at, self.fakes_clock = cluster, at, fakes_clock
        self.nodes = cluster.nodes
        at.mkdir()
        self.root, self.log = at / "checkpoints", at / "log"
        self.log.touch()
        self.marked = Marked()
        self.environment = rank_environment(at)
        for node in self.nodes:
            (at / node.name).mkdir()
            (at / f"{node.name}.clock").write_text("+0\n")
        self.mounts = {node.name: mounts_of(node) for node in self.nodes}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.command = trainer(at, "rank", self.arguments(100_000_000, SAVE_EVERY, PACE_MS))
        self.manifests: dict[str, str] = {}  # what the manifest of each save held

    def arguments(self, steps: int, save_every: int, pace: int) -> list[str]:
        data = ROOT / "examples" / "data" / "digits.csv"
        options = (
            f"--checkpoints {self.root} --steps {steps} --save-every {save_every} --batch 6 --seed 11 --pace {pace}"
        )
        return ["--data", str(data), *options.split()]

    def start(self) -> None:
        """An agent on each host that has none."""
        for node in self.nodes:
            if node.name not in self.agents:
                self.agents[node.name] = self.start_agent(node, self.command, (1, len(self.nodes)))

    def start_agent(self, node: Host, program: Path, hosts: tuple[int, int]) -> subprocess.Popen[bytes]:
        number = self.nodes.index(node)
        conf = f"join_timeout={ROUND_S},last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt={SILENCE_S}"
        options = f"--nnodes {hosts[0]}:{hosts[1]} --node-rank {number} -n {PER_HOST} --rdzv-conf {conf}"
        options += f" --rdzv-endpoint {self.nodes[0].address}:29400 --max-restarts 1000000"
        options += f" --timeout-s {DEADLINE_S} --grace-s 5 --kill-grace-s 1"
        variables = {**self.environment, "TMPDIR": str(self.at / node.name)}
        if self.fakes_clock:
            variables |= {
                "LD_PRELOAD": faketime(),
                "FAKETIME_TIMESTAMP_FILE": str(self.at / f"{node.name}.clock"),
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_NO_CACHE": "1",
                "NO_FAKE_STAT": "1",
            }
        words = ["env", "-i", *assigned(variables), self.marked.assignment, str(TESSERA), "run", *options.split()]
        return node.start(*words, str(program), log=self.log)

    # --- what it is doing

    def ranks(self) -> dict[int, int]:
        """The processes of the newest round, by rank."""
        found = [(pid, of) for pid, of in self.marked.living().items() if "TESSERA_RANK" in of]
        newest = max((int(of["TESSERA_EPOCH"]) for _, of in found), default=0)
        return {int(of["TESSERA_RANK"]): pid for pid, of in found if int(of["TESSERA_EPOCH"]) == newest}

    def ranks_on(self, node: Host) -> list[int]:
        number = self.nodes.index(node)
        return list(range(PER_HOST * number, PER_HOST * (number + 1)))

    def agents_on(self, node: Host) -> list[int]:
        """The two processes of its agent, the one that was started first."""
        of_agents = [pid for pid, of in self.marked.living().items() if "TESSERA_RANK" not in of]
        living = [pid for pid in of_agents if runs(pid, TESSERA) and host_of(pid) == host_of_first_process(node)]
        return sorted(living, key=began)

    def full(self) -> int:
        return PER_HOST * len(self.nodes)

    def step(self) -> int:
        """Of the newest checkpoint; 0 before there is one."""
        try:
            with ts.Checkpoint(self.root) as checkpoint:
                return int(checkpoint.step)
        except ts.NotFound:
            return 0

    def said(self, since: Moment | None = None) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[since.lines if since else 0 :]

    def now(self) -> Moment:
        return Moment(len(self.said()), self.step())

    def told(self) -> str:
        return "\n".join(self.said()[-80:])

    def begins(self, since: Moment | None = None) -> list[tuple[int, int]]:
        """The ranks of each round that began to train, and the step after which."""
        found = (
            re.search(r"digits: (\d+) ranks, (?:from the beginning|resumed after step (\d+))", line)
            for line in self.said(since)
        )
        return [(int(begun[1]), int(begun[2] or 0)) for begun in found if begun]

    # --- waiting for what must happen

    def trains(self, world: int, since: Moment) -> None:
        """A round of so many ranks has begun since then, and saved."""

        def does() -> bool:
            begun = self.begins(since)
            return bool(begun) and begun[-1][0] == world and self.step() > max(since.step, begun[-1][1])

        until(lambda: self.lives() and does(), ROUND_S, lambda: f"{world} ranks do not train\n{self.told()}")

    def lives(self) -> bool:
        ended = {name: agent.returncode for name, agent in self.agents.items() if agent.poll() is not None}
        assert not ended, f"agents have ended: {ended}\n{self.told()}"
        return True

    def goes_on(self, since: Moment, saves: int = 6) -> None:
        """Nothing has disturbed it: the same round has made some more saves."""
        until(lambda: self.step() >= since.step + saves * SAVE_EVERY, ROUND_S, lambda: f"no step\n{self.told()}")
        self.lives()
        assert not self.begins(since), f"it was disturbed\n{self.told()}"

    def names(self, cause: str, since: Moment) -> None:
        """Every new round since then was announced with this cause, or is one for hosts that have come."""
        reasons = [line.split("; starting round ")[0] for line in self.said(since) if "; starting round " in line]
        assert any(re.search(cause, reason) for reason in reasons), f"nothing names {cause!r}: {reasons}\n{self.told()}"
        wrong = [reason for reason in reasons if not re.search(f"{cause}|the hosts of the job have changed", reason)]
        assert not wrong, f"not {cause!r}: {wrong}\n{self.told()}"

    def ends(self, *, codes: Callable[[int], bool], seconds: float = ROUND_S) -> None:
        """All agents end, with such codes, and nothing of the job lives any more."""
        agents, self.agents = self.agents, {}
        deadline = time.monotonic() + patience(seconds)
        for name, agent in agents.items():
            try:
                code = agent.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the agent of {name} goes on\n{self.told()}") from None
            assert codes(code), f"the agent of {name} ended with {code}\n{self.told()}"
        until(lambda: not self.marked.living(), 15, lambda: f"left: {self.marked.living()}\n{self.told()}")

    # --- what it holds

    def holdings(self, spare: int = 0) -> Holdings:
        descriptors = [descriptors_of(pid) for node in self.nodes for pid in self.agents_on(node)]
        return Holdings(
            sum(descriptors) + spare,
            sum(len(segments_of(node)) for node in self.nodes),
            sum(listening_on(node) for node in self.nodes),
            sum(len(list((self.at / node.name).iterdir())) for node in self.nodes),
            len(self.marked.living()),
        )

    def check_saves(self) -> None:
        """One manifest a step, which nobody has changed since it was seen first."""
        steps: dict[int, str] = {}
        for directory in sorted(self.root.glob("step-*")):
            try:
                content = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
            except FileNotFoundError:
                continue  # not committed, or removed meanwhile
            step = int(directory.name.split("-")[1])
            assert step not in steps, f"step {step} was saved twice: {steps[step]}, {directory.name}"
            steps[step] = directory.name
            known = self.manifests.setdefault(directory.name, content)
            assert content == known, f"the manifest of {directory.name} was changed"

    def check_nothing_is_left(self) -> None:
        """After its end."""
        for node in self.nodes:
            assert not segments_of(node), f"in /dev/shm of {node.name}: {segments_of(node)}"
            until(lambda node=node: listening_on(node) == 0, 10, f"{node.name} has a port that listens")
            assert mounts_of(node) == self.mounts[node.name], f"mounts of {node.name}"
            files = sorted(path.name for path in (self.at / node.name).iterdir())
            assert not files, f"temporary files of {node.name}: {files}"
        listed = json.loads(subprocess.check_output([TESSERA, "ckpt", "ls", "--json", self.root]))
        assert {save["state"] for save in listed} == {"committed"}, listed
        subprocess.run([TESSERA, "ckpt", "verify", listed[-1]["path"]], check=True, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        for pid in self.marked.living():
            self.marked.signal(pid, signal.SIGKILL)
        for agent in self.agents.values():
            agent.wait(30)


def host_of(pid: int) -> str:
    """Its name space of processes."""
    try:
        return str((Path("/proc") / str(pid) / "ns" / "pid").readlink())
    except OSError:
        return ""


def host_of_first_process(node: Host) -> str:
    return str(Path(f"/proc/{node.pid}/ns/pid_for_children").readlink())


def began(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return sys.maxsize


def descriptors_of(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def segments_of(node: Host) -> list[str]:
    """Without those of libfaketime, which stay when a process is killed."""
    return [name for name in os.listdir(f"/proc/{node.pid}/root/dev/shm") if "faketime" not in name]


def listening_on(node: Host) -> int:
    tables = (Path(f"/proc/{node.pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    return sum(line.split()[3] == "0A" for table in tables for line in table)


def mounts_of(node: Host) -> list[str]:
    return sorted(line.split()[4] for line in Path(f"/proc/{node.pid}/mountinfo").read_text().splitlines())


def faketime() -> str:
    found = sorted(str(path) for path in Path("/").glob(FAKETIME.lstrip("/")))
    return found[0] if found else ""


# --- the replay


def segments(begins: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """(ranks, last step) of each training that a job's rounds add up to: steps that were lost count for nothing, and
    rounds of one size in a row are one."""
    parts: list[tuple[int, int]] = []
    for (world, begun), last in zip(begins, [begun for _, begun in begins[1:]] + [end], strict=True):
        assert begun <= last, f"a step that was committed was lost: {list(begins)}, {end}"
        if last == begun:
            continue
        if parts and parts[-1][0] == world:
            parts.pop()
        parts.append((world, last))
    return parts


def replay(job: Job, end: int) -> None:
    """The bits of the job's last checkpoint are those of a job that nobody disturbs."""
    calm = Job(job.cluster, job.at / "replay")
    try:
        for world, last in segments(job.begins(), end):
            script = trainer(calm.at, f"rank-{last}", calm.arguments(last, last, 0))
            nodes = calm.nodes[: world // PER_HOST]
            for node in nodes:
                calm.agents[node.name] = calm.start_agent(node, script, (len(nodes), len(nodes)))
            calm.ends(codes=lambda code: code == 0, seconds=300)
    finally:
        calm.close()
    with ts.Checkpoint(job.root) as found, ts.Checkpoint(calm.root) as expected:
        assert found.step == expected.step == end
        assert sorted(found.tensors) == sorted(expected.tensors)
        for name in expected.tensors:
            assert found[name].tobytes() == expected[name].tobytes(), f"{name} differs from the replay's"


# --- the faults. Each returns what came of it.

Draw = random.Random
RESTARTED, UNDISTURBED, SHRANK, ENDED = "restarted", "undisturbed", "shrank and grew", "ended and resumed"


def kill(job: Job, victims: Sequence[int], what: signal.Signals = signal.SIGKILL) -> None:
    pids = job.ranks()
    for rank in victims:
        assert rank in pids, f"rank {rank} does not live\n{job.told()}"
        job.marked.signal(pids[rank], what)


def restarts(job: Job, since: Moment, cause: str) -> str:
    job.trains(job.full(), since)
    job.names(cause, since)
    return RESTARTED


def by_sigkill(ranks: Sequence[int]) -> str:
    return f"rank ({'|'.join(map(str, ranks))}) was killed by SIGKILL"


def sigkill(job: Job, draw: Draw) -> str:
    victims, since = [draw.randrange(1, job.full())], job.now()
    kill(job, victims)
    return restarts(job, since, by_sigkill(victims))


def rank_0(job: Job, draw: Draw) -> str:
    since = job.now()
    kill(job, [0])
    return restarts(job, since, by_sigkill([0]))


def all_but_one(job: Job, draw: Draw) -> str:
    left, since = draw.randrange(job.full()), job.now()
    victims = [rank for rank in range(job.full()) if rank != left]
    kill(job, victims)
    return restarts(job, since, by_sigkill(victims))


def sigsegv(job: Job, draw: Draw) -> str:
    """Rust's handler takes the first one for a fault that comes again; the JVM aborts."""
    victim, since = draw.randrange(job.full()), job.now()
    pid = job.ranks()[victim]
    until(lambda: not job.marked.signal(pid, signal.SIGSEGV), 20, "a rank survives SIGSEGV")
    return restarts(job, since, f"rank {victim} was killed by SIG(SEGV|ABRT)")


def sigstop(job: Job, draw: Draw) -> str:
    """For good."""
    victim, since = draw.randrange(job.full()), job.now()
    kill(job, [victim], signal.SIGSTOP)
    return restarts(job, since, f"rank {victim} was late and other ranks timed out waiting for it")


def pause(job: Job, draw: Draw) -> str:
    """For less than the deadline."""
    victim, since = draw.randrange(job.full()), job.now()
    pid = job.ranks()[victim]
    job.marked.signal(pid, signal.SIGSTOP)
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.agents["n1"].wait(draw.uniform(0.2, 0.3 * DEADLINE_S))
    job.marked.signal(pid, signal.SIGCONT)
    job.goes_on(since)
    return UNDISTURBED


def out_of_memory(job: Job, draw: Draw) -> str:
    """In a group of processes with little memory, whose other one takes all; the kernel prefers to kill the rank."""
    victim, since = draw.randrange(job.full()), job.now()
    pid = job.ranks()[victim]
    with memory_group(32 << 20) as group:
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        (group / "cgroup.procs").write_text(str(pid))
        hog = subprocess.Popen([sys.executable, "-c", HOG, str(group / "cgroup.procs")])
        try:
            until(lambda: pid not in job.marked.living(), 20, "a rank lives in a group without memory")
        finally:
            hog.kill()
            hog.wait()
        assert kills_in(group) > 0, "the kernel counts no kill"
    return restarts(job, since, by_sigkill([victim]))


HOG = """
import sys
open(sys.argv[1], "w").write("0")
taken = []
while True:
    taken.append(bytearray(b"x") * (1 << 20))
"""


def memory_groups() -> Path | None:
    """Where this process may make a group with a limit of memory."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for mount, is_it in (("memory", controllers == "memory"), ("", controllers == "")):
            place = Path("/sys/fs/cgroup") / mount / path.lstrip("/")
            controls = place / "cgroup.controllers"
            able = mount or (controls.exists() and "memory" in controls.read_text())
            if is_it and able and os.access(place, os.W_OK):
                return place
    return None


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    place = memory_groups()
    assert place
    group = Path(tempfile.mkdtemp(prefix="tessera-chaos-", dir=place))
    try:
        old = group / "memory.limit_in_bytes"
        (old if old.exists() else group / "memory.max").write_text(str(limit))
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (place / "cgroup.procs").write_text(pid)
        until(lambda: not (group / "cgroup.procs").read_text(), 20, "processes stay in the group")
        group.rmdir()


def kills_in(group: Path) -> int:
    old = group / "memory.oom_control"
    counts = dict(line.split() for line in (old if old.exists() else group / "memory.events").read_text().splitlines())
    return int(counts["oom_kill"])


def agent(job: Job, draw: Draw) -> str:
    """Of another host than the first; it comes back."""
    node, since = draw.choice(job.nodes[1:]), job.now()
    job.marked.signal(draw.choice(job.agents_on(node)), signal.SIGKILL)
    assert job.agents.pop(node.name).wait(patience(20)) != 0
    return shrinks_and_grows(job, node, since, "its agent has ended", job.start)


def shrinks_and_grows(job: Job, node: Host, since: Moment, why: str, heal: Callable[[], None]) -> str:
    try:
        job.trains(job.full() - PER_HOST, since)
        lost = "|".join(map(str, job.ranks_on(node)))
        job.names(f"rank ({lost}) was lost with its host {node.name}: ({why})", since)
    finally:
        heal()
    job.trains(job.full(), job.now())
    return SHRANK


def store_host(job: Job, draw: Draw) -> str:
    """All processes of the first host: it serves the store, coordinates and has rank 0. The others end by themselves,
    and the job is started again."""
    first, ranks, since = job.nodes[0], job.ranks(), job.now()
    for pid in [*job.agents_on(first), *(ranks[rank] for rank in job.ranks_on(first))]:
        job.marked.signal(pid, signal.SIGKILL)
    job.ends(codes=lambda code: code != 0, seconds=SILENCE_S + 20)
    told = "\n".join(job.said(since))
    assert "lost the coordinating agent at tcp://" in told, told
    shutil.rmtree(job.at / first.name)  # a host that starts again has no temporary files
    (job.at / first.name).mkdir()
    job.start()
    job.trains(job.full(), since)
    return ENDED


def coordinator(job: Job, draw: Draw) -> str:
    """One of the two processes of the coordinating agent; the other one cleans up."""
    since = job.now()
    job.marked.signal(draw.choice(job.agents_on(job.nodes[0])), signal.SIGKILL)
    job.ends(codes=lambda code: code != 0, seconds=SILENCE_S + 20)
    told = "\n".join(job.said(since))
    assert "lost the coordinating agent at tcp://" in told, told
    job.start()
    job.trains(job.full(), since)
    return ENDED


def terminate(job: Job, draw: Draw) -> str:
    """SIGTERM to any agent: all ranks save and end."""
    since = job.now()
    stop(job, draw.choice(job.nodes))
    job.start()
    job.trains(job.full(), since)
    return ENDED


def stop(job: Job, node: Host) -> int:
    """The step that was saved last."""
    since = job.now()
    job.marked.signal(job.agents_on(node)[0], signal.SIGTERM)
    job.ends(codes=lambda code: code == 0)
    stopped = re.findall(r"digits: stopped after step (\d+)", "\n".join(job.said(since)))
    assert stopped and job.step() == int(stopped[-1]), f"{stopped}, {job.step()}\n{job.told()}"
    return job.step()


SILENT = "its agent has (not been heard for|ended)|its agent has connected again"


def cut_off(job: Job, draw: Draw) -> str:
    """Nothing goes to or from a host until the others have gone on without it."""
    node, since = draw.choice(job.nodes[1:]), job.now()
    job.cluster.cut(node)
    return shrinks_and_grows(job, node, since, SILENT, lambda: job.cluster.mend(node))


def short_cut(job: Job, draw: Draw) -> str:
    """For less than any deadline."""
    node, since = draw.choice(job.nodes), job.now()
    job.cluster.cut(node)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.agents["n1"].wait(draw.uniform(0.1, 0.3 * SILENCE_S))
    finally:
        job.cluster.mend(node)
    job.goes_on(since)
    return UNDISTURBED


def deaf(job: Job, draw: Draw) -> str:
    """A host hears nothing, and is heard."""
    return one_way(job, draw, hears=100)


def mute(job: Job, draw: Draw) -> str:
    """A host hears all, and is not heard."""
    return one_way(job, draw, says=100)


def one_way(job: Job, draw: Draw, **lost: int) -> str:
    node, since = draw.choice(job.nodes[1:]), job.now()
    job.cluster.drop(node, **lost)
    return shrinks_and_grows(job, node, since, SILENT, lambda: job.cluster.mend_drop(node))


def slow(job: Job, draw: Draw) -> str:
    node, since = draw.choice(job.nodes), job.now()
    job.cluster.slow(node, draw.choice(["3mbit", "10mbit"]))
    try:
        job.goes_on(since)
    finally:
        job.cluster.mend_slow(node)
    return UNDISTURBED


def lossy(job: Job, draw: Draw) -> str:
    node, since = draw.choice(job.nodes), job.now()
    percent = draw.choice([1, 3])
    job.cluster.drop(node, hears=percent, says=percent)
    try:
        job.goes_on(since)
    finally:
        job.cluster.mend_drop(node)
    return UNDISTURBED


def late(job: Job, draw: Draw) -> str:
    node, since = draw.choice(job.nodes), job.now()
    proxy = job.cluster.delay(node, 2, draw.choice([10, 40]))
    try:
        job.goes_on(since)
    finally:
        job.cluster.mend_delay(node, proxy)
    return UNDISTURBED


def clock(job: Job, draw: Draw) -> str:
    """The wall clock of a host jumps, and stays there."""
    node, since = draw.choice(job.nodes), job.now()
    path = job.at / f"{node.name}.clock"
    draft = path.with_suffix(".draft")
    draft.write_text(draw.choice(["+1h", "-1h", "+1y", "-1y", "+0"]) + "\n")
    draft.rename(path)
    job.goes_on(since)
    return UNDISTURBED


FAULTS: dict[str, Callable[[Job, Draw], str]] = {
    "a rank gets SIGKILL": sigkill,
    "rank 0 gets SIGKILL": rank_0,
    "all ranks but one get SIGKILL": all_but_one,
    "a rank gets SIGSEGV": sigsegv,
    "a rank gets SIGSTOP": sigstop,
    "a rank is stopped and continues": pause,
    "a rank is out of memory": out_of_memory,
    "the agent of a host gets SIGKILL": agent,
    "the coordinating agent gets SIGKILL": coordinator,
    "the host of store and rank 0 dies": store_host,
    "an agent gets SIGTERM": terminate,
    "a host is cut off": cut_off,
    "a host is cut off for a moment": short_cut,
    "a host hears nothing": deaf,
    "a host is not heard": mute,
    "a slow link": slow,
    "a lossy link": lossy,
    "a delayed link": late,
    "the clock of a host jumps": clock,
}


def obstacle() -> str:
    """Why nothing of this can run here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for hosts as name spaces"
    lacking = [name for name in ("ip", "tc", "nft") if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def faults_here() -> list[str]:
    """Those that can be made on this machine."""
    impossible = set() if memory_groups() else {"a rank is out of memory"}
    impossible |= set() if faketime() else {"the clock of a host jumps"}
    return [name for name in FAULTS if name not in impossible]


# --- rounds


@dataclass
class Round:
    fault: str
    outcome: str = ""
    seconds: float = 0


@dataclass
class Record:
    """What came of a job."""

    seed: str
    job: int
    hosts: int
    commit: str
    machine: str
    began: str
    rounds: list[Round] = field(default_factory=list)
    steps: int = 0
    failure: str = ""


def run_job(record: Record, faults: Sequence[str], at: Path) -> None:
    """Adds a round for each fault, with what came of it, or the failure."""
    draw = random.Random(f"{record.seed} {record.job}")
    (at / "hosts").mkdir(parents=True)
    with Cluster(record.hosts, at / "hosts") as cluster:
        job = Job(cluster, at / "job", fakes_clock="the clock of a host jumps" in faults)
        try:
            job.start()
            job.trains(job.full(), Moment(0, 0))
            held = job.holdings(spare=2)
            for fault in faults:
                done = Round(fault)
                record.rounds.append(done)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.agents["n1"].wait(draw.uniform(0, 0.4))
                begin = time.monotonic()
                done.outcome = "failed"
                outcome = FAULTS[fault](job, draw)
                done.seconds = round(time.monotonic() - begin, 2)
                job.check_saves()
                until(lambda: job.holdings().within(held), 15, lambda: f"{job.holdings()} is more than {held}")
                done.outcome = outcome
            record.steps = stop(job, draw.choice(job.nodes))
            job.check_saves()
            job.check_nothing_is_left()
            replay(job, record.steps)
        except Exception as error:
            record.failure = f"{type(error).__name__}: {error}"
        finally:
            job.close()


def new_record(seed: str, number: int, hosts: int) -> Record:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    machine = f"{len(os.sched_getaffinity(0))} cores, {model[1] if model else platform.machine()}, {platform.release()}"
    return Record(seed, number, hosts, commit, machine, datetime.now(UTC).isoformat(timespec="seconds"))


# --- the command


def read_records(path: Path) -> list[Record]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields: dict[str, Any] = json.loads(line)
        rounds = [Round(**each) for each in fields.pop("rounds")]
        found.append(Record(**fields, rounds=rounds))
    return found


def dealt(seed: str, faults: Sequence[str], begin: int, count: int) -> list[str]:
    """Some of an endless row of shuffled decks, so that every fault comes equally often."""
    row: list[str] = []
    for deck in range((begin + count) // len(faults) + 1):
        row += random.Random(f"{seed} deck {deck}").sample(faults, len(faults))
    return row[begin : begin + count]


def counted(records: Sequence[Record]) -> int:
    """Rounds whose job went to its end; of a failed job those that were over."""
    return sum(len(record.rounds) for record in records)


def table(records: Sequence[Record]) -> str:
    """In Markdown: each fault, its rounds, what came of them and how long the job needed to go on."""
    by_fault: dict[str, list[Round]] = {name: [] for name in FAULTS}
    for record in records:
        for done in record.rounds:
            by_fault.setdefault(done.fault, []).append(done)
    lines = ["| fault | rounds | outcome | seconds until it continues: median, most |", "|---|---|---|---|"]
    for fault, rounds in by_fault.items():
        outcomes = {done.outcome: 0 for done in rounds}
        for done in rounds:
            outcomes[done.outcome] += 1
        told = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(outcomes.items())) or "-"
        times = [done.seconds for done in rounds if done.outcome != "failed"]
        spent = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "-"
        lines.append(f"| {fault} | {len(rounds)} | {told} | {spent} |")
    failed = sum(bool(record.failure) for record in records)
    lines.append(f"\n{counted(records)} rounds in {len(records)} jobs; {failed} jobs failed")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev fault chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000, help="so many in the file when this command ends")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "chaos" / "rounds.jsonl", metavar="FILE")
    parser.add_argument("--faults", default="", metavar="REGEX", help="only those whose name matches")
    parser.add_argument("--per-job", type=int, default=8, help="rounds of a job (8)")
    parser.add_argument("--table", action="store_true", help="print the table of the file, and run nothing")
    options = parser.parse_args()
    records = read_records(options.state)
    if options.table:
        print(table(records))
        return 0
    if why := obstacle():
        parser.error(why)
    faults = [name for name in faults_here() if re.search(options.faults, name)]
    if not faults:
        parser.error(f"no fault matches {options.faults!r}")
    print(f"ranks in {', '.join(languages())}; without {sorted(set(FAULTS) - set(faults)) or 'nothing'}", flush=True)
    options.state.parent.mkdir(parents=True, exist_ok=True)
    try:
        while (left := options.rounds - counted(records)) > 0:
            number = sum(record.seed == options.seed for record in records)
            record = new_record(options.seed, number, random.Random(f"{options.seed} {number} hosts").choice([2, 3]))
            drawn = dealt(options.seed, faults, number * options.per_job, min(left, options.per_job))
            with tempfile.TemporaryDirectory(prefix="tessera-chaos-") as scratch:
                run_job(record, drawn, Path(scratch) / "at")
                if record.failure:
                    kept = options.state.parent / f"failed-{options.seed}-{number}"
                    shutil.rmtree(kept, ignore_errors=True)
                    shutil.copytree(Path(scratch) / "at" / "job", kept, ignore=shutil.ignore_patterns("token"))
                    print(f"job {number} FAILED in {kept}:\n{record.failure}", flush=True)
            records.append(record)
            with options.state.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
            print(
                f"job {number}: {record.hosts} hosts, {len(record.rounds)} rounds, {record.steps} steps; "
                f"{counted(records)} of {options.rounds} rounds",
                flush=True,
            )
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on")
        print(table(records))
        return 130
    print(table(records))
    return int(any(record.failure for record in records))


if __name__ == "__main__":
    sys.exit(main())
