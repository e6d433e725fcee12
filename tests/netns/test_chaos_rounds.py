"""A sample of the faults of chaos.py hits a job of several languages, and chaos.py notices what must not happen."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chaos
import pytest
from sampling import SEED, sample

ROUNDS = 4


def test_a_job_survives_a_sample_of_faults(tmp_path: Path) -> None:
    if why := chaos.obstacle():
        pytest.skip(why)
    faults = sample(chaos.faults_here(), ROUNDS, "chaos")
    record = chaos.new_record(SEED, 0, random.Random(f"{SEED} hosts of chaos").choice([2, 3]))
    chaos.run_job(record, faults, tmp_path / "at")
    print(record)
    assert not record.failure, record.failure


@pytest.mark.parametrize(
    ("begins", "end", "expected"),
    [
        ([(4, 0)], 30, [(4, 30)]),
        ([(4, 0), (4, 10), (4, 10)], 30, [(4, 30)]),
        ([(4, 0), (2, 10), (4, 25)], 30, [(4, 10), (2, 25), (4, 30)]),
        ([(4, 0), (2, 10), (4, 10)], 30, [(4, 30)]),
        ([(2, 0), (4, 0)], 30, [(4, 30)]),
    ],
)
def test_a_replay_has_the_steps_that_were_not_lost(
    begins: list[tuple[int, int]], end: int, expected: list[tuple[int, int]]
) -> None:
    assert chaos.segments(begins, end) == expected


@pytest.mark.parametrize(("begins", "end"), [([(4, 0), (4, 10), (4, 5)], 30), ([(4, 0), (4, 10)], 5)])
def test_a_committed_step_that_is_lost_is_noticed(begins: list[tuple[int, int]], end: int) -> None:
    with pytest.raises(AssertionError, match="committed was lost"):
        chaos.segments(begins, end)


def a_job(at: Path, log: Sequence[str] = ()) -> chaos.Job:
    """One that runs nothing."""
    job = object.__new__(chaos.Job)
    job.root, job.log, job.manifests = at / "root", at / "log", {}
    job.log.write_text("".join(line + "\n" for line in log))
    return job


def manifest(job: chaos.Job, name: str, content: str) -> None:
    (job.root / name).mkdir(parents=True, exist_ok=True)
    (job.root / name / "manifest.json").write_text(content)


def test_two_manifests_of_a_step_are_noticed(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    manifest(job, "step-00000005-0a", "{}")
    manifest(job, "step-00000010-0b", "{}")
    (job.root / "step-00000010-0c").mkdir()
    job.check_saves()
    manifest(job, "step-00000010-0c", "{}")
    with pytest.raises(AssertionError, match="step 10 was saved twice"):
        job.check_saves()


def test_a_manifest_that_changes_is_noticed(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    manifest(job, "step-00000005-0a", "{}")
    job.check_saves()
    manifest(job, "step-00000005-0a", "{ }")
    with pytest.raises(AssertionError, match="was changed"):
        job.check_saves()


def test_a_wrong_cause_is_noticed(tmp_path: Path) -> None:
    right = "tessera: rank 3 was killed by SIGKILL (sent by a user); starting round 2 with 4 ranks, restart 2 of 9"
    late = "tessera: rank 1 ended with exit code 1: PEER_LOST; starting round 3 with 4 ranks, restart 3 of 9"
    chosen = "tessera: the hosts of the job have changed; starting round 4 with 4 ranks on 2 hosts"
    everything = chaos.Moment(0, 0)
    a_job(tmp_path, [right, chosen, right]).names("rank 3 was killed by SIGKILL", everything)
    a_job(tmp_path, [late, right]).names("rank 3 was killed by SIGKILL", chaos.Moment(1, 0))
    for log, message in (([late], "nothing names"), ([chosen], "nothing names"), ([right, late], "rank 1 ended")):
        with pytest.raises(AssertionError, match=message):
            a_job(tmp_path, log).names("rank 3 was killed by SIGKILL", everything)


def test_what_grows_is_noticed() -> None:
    held = chaos.Holdings(30, 2, 3, 4, 8)
    assert held.within(held)
    assert not chaos.Holdings(31, 2, 3, 4, 8).within(held)
    assert not chaos.Holdings(30, 2, 3, 4, 9).within(held)
    assert chaos.Holdings(29, 0, 0, 0, 0).within(held)


def test_every_fault_is_drawn_equally_often() -> None:
    faults = list(chaos.FAULTS)
    jobs = [chaos.dealt("7", faults, 8 * job, 8) for job in range(len(faults))]
    drawn = [fault for job in jobs for fault in job]
    assert {fault: drawn.count(fault) for fault in faults} == dict.fromkeys(faults, 8)
    assert chaos.dealt("7", faults, 8, 8) == jobs[1] != chaos.dealt("8", faults, 8, 8)


def test_the_command_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the jobs that it would have drawn without the interruption."""
    monkeypatch.setattr(chaos, "obstacle", lambda: "")
    drawn: list[tuple[int, list[str]]] = []

    def command(state: str, runs: Callable[..., Any]) -> int:
        monkeypatch.setattr(chaos, "run_job", runs)
        words = ["chaos", "--rounds", "20", "--seed", "5", "--per-job", "6", "--state", str(tmp_path / state)]
        monkeypatch.setattr(sys, "argv", words)
        return chaos.main()

    def passes(record: chaos.Record, faults: Sequence[str], at: Path) -> None:
        record.rounds = [chaos.Round(fault, chaos.RESTARTED, 2.5) for fault in faults]
        drawn.append((record.hosts, list(faults)))

    def is_interrupted(record: chaos.Record, faults: Sequence[str], at: Path) -> None:
        if record.job == 2:
            raise KeyboardInterrupt
        passes(record, faults, at)

    assert command("whole", passes) == 0
    whole, drawn = drawn, []
    assert [len(faults) for _, faults in whole] == [6, 6, 6, 2]
    assert command("parts", is_interrupted) == 130
    assert len(drawn) == 2
    assert command("parts", passes) == 0
    assert drawn == whole
    assert command("parts", passes) == 0, "there is nothing left to do"
    assert drawn == whole
    assert "20 rounds in 4 jobs; 0 jobs failed" in capsys.readouterr().out

    def fails(record: chaos.Record, faults: Sequence[str], at: Path) -> None:
        (at / "job").mkdir(parents=True)
        record.rounds = [chaos.Round(fault, "failed") for fault in faults]
        record.failure = "it broke"

    assert command("bad", fails) == 1
    assert len(json.loads((tmp_path / "bad").read_text().splitlines()[0])["rounds"]) == 6
    assert "failed: " in capsys.readouterr().out
