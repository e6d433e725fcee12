"""A job of four ranks trains while this test kills and stops its ranks and its launcher, at random moments, for
TESSERA_CHAOS_MINUTES (5). Then it has the bits of a training that nobody disturbed, and nothing is left of it but
checkpoints. The seed is printed; TESSERA_TEST_SEED takes it back.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import tessera as ts
from cluster_hosts import Cluster, Host, Marked, assigned, rank_command, runs
from patience import patience, until
from programs import ROOT, TESSERA, digits

MINUTES = float(os.environ.get("TESSERA_CHAOS_MINUTES", "5"))
STEPS = 100_000_000  # more than there is time for
SAVE_EVERY = 5


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """One host for the job alone: all processes there and all of /dev/shm are the job's."""
    (tmp_path / "host").mkdir()
    with Cluster(0, tmp_path / "host") as cluster:
        yield cluster.hub


class Job:
    """The job on its host: a launcher at a time, over the same checkpoints."""

    def __init__(self, host: Host, at: Path, environment: Mapping[str, str], options: list[str]) -> None:
        self.host, self.at, self.options = host, at, options
        self.mark = Marked()
        self.temporary = at / "temporary"
        self.temporary.mkdir()
        self.environment = {**environment, "TMPDIR": str(self.temporary)}
        self.root = at / "checkpoints"
        self.log = at / "log"
        self.launcher: subprocess.Popen[bytes] | None = None

    def start(self, command: list[str]) -> None:
        run = [TESSERA, "run", *self.options, "--timeout-s", "5", "--kill-grace-s", "1", *command]
        self.launcher = self.host.start(
            "env", "-i", *assigned(self.environment), self.mark.assignment, *run, log=self.log
        )

    def ranks(self) -> list[int]:
        """Of the running round, in the order of ranks."""
        found = {
            int(variables["TESSERA_RANK"]): pid
            for pid, variables in self.mark.living().items()
            if "TESSERA_RANK" in variables
        }
        return [found[rank] for rank in sorted(found)]

    def launchers(self) -> list[int]:
        """Its two processes, either of which cleans up after the other."""
        return [
            pid
            for pid, variables in self.mark.living().items()
            if "TESSERA_RANK" not in variables and runs(pid, TESSERA)
        ]

    def end(self, seconds: float = 60) -> int:
        """Waits until the launcher and all of the job's processes have ended."""
        assert self.launcher
        launcher, self.launcher = self.launcher, None
        try:
            code = launcher.wait(patience(seconds))
        finally:
            launcher.kill()
        until(lambda: not self.mark.living(), 15, lambda: f"left of the job: {self.mark.living()}\n{self.tail()}")
        return code

    def step(self) -> int:
        """Of the newest checkpoint; 0 before there is one."""
        try:
            with ts.Checkpoint(self.root) as checkpoint:
                return int(checkpoint.step)
        except ts.NotFound:
            return 0

    def resumed(self) -> list[int]:
        """The steps after which its rounds resumed."""
        return [int(step) for step in re.findall(r"ranks, resumed after step (\d+)", self.log.read_text())]

    def tail(self) -> str:
        return self.log.read_text()[-6000:]


class Chaos:
    """What is done to the job, drawn from a seed."""

    def __init__(self, job: Job, command: list[str], seed: int) -> None:
        self.job, self.command = job, command
        self.draw = random.Random(seed)
        self.done: Counter[str] = Counter()

    def go_on(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        weights = {"kill a rank": 8, "stop a rank": 2, "pause a rank": 4, "kill a launcher": 2, "terminate": 2}
        while time.monotonic() < deadline:
            if self.job.launcher is None:
                self.job.start(self.command)
            assert not self.ended_within(self.draw.uniform(0.2, 8)), f"the job ended by itself\n{self.job.tail()}"
            what = self.draw.choices(list(weights), list(weights.values()))[0]
            self.done[what] += 1
            getattr(self, what.replace(" ", "_"))()

    def ended_within(self, seconds: float) -> bool:
        assert self.job.launcher
        try:
            self.job.launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal_a_rank(self, what: signal.Signals) -> int:
        ranks = until(self.job.ranks, 30, self.job.tail)
        victim = self.draw.choice(ranks)
        self.job.mark.signal(victim, what)
        return victim

    def kill_a_rank(self) -> None:
        self.signal_a_rank(signal.SIGKILL)

    def stop_a_rank(self) -> None:
        """For good: the others' deadline ends the round."""
        self.signal_a_rank(signal.SIGSTOP)

    def pause_a_rank(self) -> None:
        """For less than the deadline: nobody minds."""
        victim = self.signal_a_rank(signal.SIGSTOP)
        assert not self.ended_within(self.draw.uniform(0, 2)), self.job.tail()
        self.job.mark.signal(victim, signal.SIGCONT)

    def kill_a_launcher(self) -> None:
        launchers = until(self.job.launchers, 30, self.job.tail)
        self.job.mark.signal(self.draw.choice(launchers), signal.SIGKILL)
        assert self.job.end() != 0

    def terminate(self) -> None:
        """As a scheduler does; a rank that was stopped before may cost the job its last save."""
        launchers = until(self.job.launchers, 30, self.job.tail)
        self.job.mark.signal(min(launchers, key=started), signal.SIGTERM)
        self.job.end()


def started(pid: int) -> int:
    """When the process started, in ticks; the end of time where it is gone."""
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return sys.maxsize


def digits_command(root: Path, steps: int, pace: int) -> list[str]:
    """The trainer of the examples: DDP and AdamW. Its bits depend on the number of ranks."""
    data = ROOT / "examples" / "data" / "digits.csv"
    options = f"--data {data} --checkpoints {root} --steps {steps} --save-every {SAVE_EVERY} --batch 6 --pace {pace}"
    return digits("python", options.split())


def exact_command(root: Path, steps: int, pace: int) -> list[str]:
    """The training of ranks.py. Its bits are the same for any number of ranks."""
    return rank_command("train", root.parent, steps, pace / 1000, SAVE_EVERY)


@pytest.mark.timeout(30 * MINUTES + patience(400))
@pytest.mark.parametrize(
    ("options", "command"),
    [
        pytest.param(["-n", "4", "--max-restarts", "1000000"], digits_command, id="restart"),
        pytest.param(["-n", "1:4", "--on-loss", "shrink", "--max-restarts", "1000000"], exact_command, id="shrink"),
    ],
)
def test_a_job_under_chaos_ends_with_the_bits_of_an_undisturbed_one(
    host: Host, tmp_path: Path, environment: dict[str, str], options: list[str], command: object
) -> None:
    assert callable(command)
    seed = int(os.environ.get("TESSERA_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"TESSERA_TEST_SEED={seed} TESSERA_CHAOS_MINUTES={MINUTES}")
    (tmp_path / "job").mkdir()
    job = Job(host, tmp_path / "job", environment, options)
    chaos = Chaos(job, command(job.root, STEPS, 5), seed)
    chaos.go_on(30 * MINUTES)
    if job.launcher is not None:
        chaos.terminate()
    target = job.step() // SAVE_EVERY * SAVE_EVERY + 4 * SAVE_EVERY
    job.start(command(job.root, target, 0))
    assert job.end(120) == 0, job.tail()

    resumed = job.resumed()
    print(f"{dict(chaos.done)}; {len(resumed)} rounds, {target} steps")
    assert len(resumed) > MINUTES and target > 20 * MINUTES, "little happened"
    assert resumed == sorted(resumed), "a step that was committed was lost"

    # Nothing is left but the newest checkpoints, whole.
    assert host.run("ls", "-A", "/dev/shm") == ""
    assert list(job.temporary.iterdir()) == []
    checkpoints = json.loads(host.run(TESSERA, "ckpt", "ls", "--json", job.root))
    assert {checkpoint["state"] for checkpoint in checkpoints} == {"committed"}
    assert len(checkpoints) == 3 and checkpoints[-1]["step"] == target
    for checkpoint in checkpoints:
        host.run(TESSERA, "ckpt", "verify", checkpoint["path"])

    # A job that nobody disturbs, to the same step.
    (tmp_path / "calm").mkdir()
    calm = Job(host, tmp_path / "calm", environment, ["-n", "4"])
    calm.start(command(calm.root, target, 0))
    assert calm.end(120 + 60 * MINUTES) == 0, calm.tail()
    with ts.Checkpoint(job.root) as found, ts.Checkpoint(calm.root) as expected:
        assert sorted(found.tensors) == sorted(expected.tensors)
        for name in expected.tensors:
            assert found[name].tobytes() == expected[name].tobytes(), name
    left = {entry.name for entry in job.root.iterdir()} - {Path(checkpoint["path"]).name for checkpoint in checkpoints}
    assert left == {entry.name for entry in calm.root.iterdir() if not entry.name.startswith("step-")}
