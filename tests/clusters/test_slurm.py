"""Slurm: srun starts the ranks on two nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import tessera as ts
from cluster_hosts import Cluster, assigned, facts, rank_command
from patience import until
from programs import LANGUAGES, ROOT, TESSERA, digits
from ranks import trained, undisturbed
from slurm import EVEN, Slurm


@pytest.fixture(scope="module")
def slurm(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Slurm:
    return Slurm(cluster, tmp_path_factory.mktemp("slurm"), environment)


@pytest.fixture(autouse=True)
def nothing_runs_on(slurm: Slurm) -> Iterator[None]:
    """A test that failed leaves no job to the next one."""
    yield
    slurm("scancel", "--user=root", "--signal=KILL", "--full")
    slurm("scancel", "--user=root")
    until(lambda: slurm("squeue", "--noheader") == "", 60, lambda: slurm("squeue") + slurm.logs())


def test_ranks_of_two_nodes_sum(slurm: Slurm, tmp_path: Path) -> None:
    slurm.srun(*EVEN, *rank_command("total", tmp_path))
    found = facts(tmp_path, "total")
    assert [fact["host"] for fact in found] == ["n1", "n1", "n2", "n2"]
    assert [(fact["world"], fact["sums"]) for fact in found] == [(4, [10.0])] * 4


def test_ranks_of_one_node_share_memory(slurm: Slurm, tmp_path: Path) -> None:
    slurm.srun("-N1", "-n3", *rank_command("total", tmp_path))
    assert [(fact["transport"], fact["sums"]) for fact in facts(tmp_path, "total")] == [("shm", [6.0])] * 3


def test_ranks_dealt_out_in_turn_join(slurm: Slurm, tmp_path: Path) -> None:
    """Ranks of one host need not be neighbours."""
    slurm.srun(*EVEN, "--distribution=cyclic", *rank_command("total", tmp_path))
    found = facts(tmp_path, "total")
    assert [fact["host"] for fact in found] == ["n1", "n2", "n1", "n2"]
    assert [fact["sums"] for fact in found] == [[10.0]] * 4


def test_nodes_with_unequal_numbers_of_ranks_join(slurm: Slurm, tmp_path: Path) -> None:
    slurm.srun("-N2", "-n4", *rank_command("total", tmp_path))
    found = facts(tmp_path, "total")
    assert [fact["host"] for fact in found] == ["n1", "n1", "n1", "n2"]
    assert [fact["sums"] for fact in found] == [[10.0]] * 4


def test_two_steps_of_a_job_at_a_time_do_not_meet(slurm: Slurm, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    steps = [" ".join(["srun -N2 -n2 --exact", *rank_command("total", tmp_path / name)]) for name in "ab"]
    job = slurm.batch(tmp_path, f"{steps[0]} & {steps[1]} & wait", "-N2", "-n4")
    output = slurm.ended(job, tmp_path)
    assert slurm.state(job) == "COMPLETED", output
    for name in "ab":
        assert [fact["sums"] for fact in facts(tmp_path / name, "total")] == [[3.0]] * 2, output


def digits_arguments(root: Path, *, steps: int) -> list[str]:
    data = ROOT / "examples" / "data" / "digits.csv"
    return f"--data {data} --checkpoints {root} --steps {steps} --save-every 10 --batch 6 --seed 11".split()


def newest(root: Path) -> dict[str, np.ndarray]:
    with ts.Checkpoint(root) as checkpoint:
        return {name: checkpoint[name] for name in checkpoint.tensors}


@pytest.fixture(scope="module")
def trained_alone(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """30 steps of four ranks on one host, without Slurm."""
    root = tmp_path_factory.mktemp("alone") / "checkpoints"
    slurm(TESSERA, "run", "-n", "4", *digits("c", digits_arguments(root, steps=30)))
    return newest(root)


def same(root: Path, expected: Mapping[str, np.ndarray]) -> None:
    """Up to rounding: between hosts the sums are in another order."""
    found = newest(root)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_trains_and_resumes(
    slurm: Slurm, tmp_path: Path, language: str, trained_alone: Mapping[str, np.ndarray]
) -> None:
    root = tmp_path / "checkpoints"
    slurm.srun(*EVEN, *digits(language, digits_arguments(root, steps=10)))
    output = slurm.srun(*EVEN, *digits(language, digits_arguments(root, steps=30)))
    assert "digits: 4 ranks, resumed after step 10" in output
    same(root, trained_alone)


def test_a_step_of_four_languages_trains(slurm: Slurm, tmp_path: Path, trained_alone: Mapping[str, np.ndarray]) -> None:
    """Slurm's own way to start several programs as one step."""
    root = tmp_path / "checkpoints"
    programs = [" ".join(digits(language, digits_arguments(root, steps=30))) for language in LANGUAGES]
    lines = [f"{rank} {program}\n" for rank, program in enumerate(programs)]
    (tmp_path / "programs").write_text("".join(lines))
    slurm.srun(*EVEN, "--multi-prog", tmp_path / "programs")
    same(root, trained_alone)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_dies_is_named_to_all_others(slurm: Slurm, tmp_path: Path, victim: int) -> None:
    """Slurm lets the others live, so that they can tell."""
    options = ["--kill-on-bad-exit=0", "--wait=0"]
    slurm("sh", "-c", 'srun "$@" || true', "sh", *EVEN, *options, *rank_command("lose", tmp_path, victim))
    found = facts(tmp_path, "lost")
    assert [fact["rank"] for fact in found] == [rank for rank in range(4) if rank != victim]
    for fact in found:
        assert f"rank {victim}" in fact["message"], found
        assert fact["seconds"] < 10, found


def test_a_batch_of_tessera_run_that_gets_sigterm_saves_its_last_step(slurm: Slurm, tmp_path: Path) -> None:
    """As `sbatch --signal=B:TERM@60` sends it before the time limit. The ranks see `preempt_requested`."""
    run = [str(TESSERA), "run", "-n", "3", *rank_command("train", tmp_path, 1_000_000, 0.01)]
    job = slurm.batch(tmp_path, " ".join(["exec", *run]), "-N1", "-c3")
    told_after_a_save(slurm, tmp_path, job, "--batch", "--signal=TERM")


def test_ranks_of_srun_that_handle_sigterm_save_their_last_step(slurm: Slurm, tmp_path: Path) -> None:
    """`scancel` sends it to them. Without `tessera run` a program tells by itself what it heard to `should_stop`."""
    run = rank_command("train", tmp_path, 1_000_000, 0.01)
    job = slurm.batch(tmp_path, " ".join(["exec srun", *run]), *EVEN, more={"RANKS_LISTEN": "1"})
    told_after_a_save(slurm, tmp_path, job)


def told_after_a_save(slurm: Slurm, at: Path, job: int, *scancel: str) -> None:
    until((at / "checkpoints" / "latest").exists, 60, lambda: log_of(at) + slurm.logs())
    slurm("scancel", *scancel, str(job))
    output = slurm.ended(job, at)
    found = facts(at, "trained")
    assert found, output
    step, weights = trained(at / "checkpoints")
    assert {fact["step"] for fact in found} == {step}, output
    assert (step, weights) == undisturbed(at / "alone", step)


def log_of(at: Path) -> str:
    return (at / "job.log").read_text() if (at / "job.log").exists() else "the job has not begun"


def test_a_job_that_is_requeued_resumes(slurm: Slurm, tmp_path: Path) -> None:
    """Under the same job and step number as before, which the ranks of both runs meet by."""
    steps = 200
    run = rank_command("train", tmp_path, steps, 0.02)
    job = slurm.batch(tmp_path, " ".join(["srun", *run]), *EVEN, "--requeue")
    until((tmp_path / "checkpoints" / "latest").exists, 60, lambda: log_of(tmp_path) + slurm.logs())
    slurm("scontrol", "requeue", str(job))
    until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", str(job)), 60, slurm.logs)
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")  # it would be held back for a while
    output = slurm.ended(job, tmp_path)
    assert slurm.state(job) == "COMPLETED", output
    found = facts(tmp_path, "trained")
    assert len(found) == 4 and all(0 < fact["begun"] < steps for fact in found), output
    assert trained(tmp_path / "checkpoints") == undisturbed(tmp_path / "alone", steps)


def test_the_tasks_of_a_job_array_resume_one_another(slurm: Slurm, tmp_path: Path) -> None:
    """One at a time, each with more steps; their world sizes differ."""
    run = rank_command("train", tmp_path)
    step = " ".join(["srun -n $((4 - SLURM_ARRAY_TASK_ID))", *run, "$((20 + 20 * SLURM_ARRAY_TASK_ID))", "0"])
    job = slurm.batch(tmp_path, step, *EVEN, "--array=0-2%1")
    output = slurm.ended(job, tmp_path)
    assert slurm.state(job) == "COMPLETED", output
    ranges = re.findall(r"rank 0 of (\d): steps (\d+) to (\d+)", output)
    assert ranges == [("4", "0", "20"), ("3", "20", "40"), ("2", "40", "60")], output
    assert trained(tmp_path / "checkpoints") == undisturbed(tmp_path / "alone", 60)


def test_a_node_that_is_lost_is_named(slurm: Slurm, tmp_path: Path) -> None:
    """Its network goes; the ranks of the other one hear of it when the heartbeat's time is over."""
    node = slurm.cluster.nodes[1]
    options = ["--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    log = tmp_path / "srun.log"
    command = ["srun", *EVEN, *options, *rank_command("lose", tmp_path)]
    environment = assigned({**slurm.environment, "TESSERA_HEARTBEAT_TIMEOUT_MS": "3000"})
    slurm.cluster.hub.start("env", "-i", *environment, *command, log=log)
    try:
        until(lambda: len(facts(tmp_path, "joined")) == 4, 60, log.read_text)
        slurm.cluster.cut(node)
        until(lambda: len([fact for fact in facts(tmp_path, "lost") if fact["host"] == "n1"]) == 2, 30, log.read_text)
    finally:
        slurm.cluster.mend(node)
    for fact in facts(tmp_path, "lost"):
        if fact["host"] == "n1":
            assert re.search("n2|rank [23]", fact["message"]) and fact["seconds"] < 15, fact


def test_nothing_is_left_on_the_hosts(slurm: Slurm) -> None:
    """After all the others of this file: no rank, and no shared memory."""
    for node in slurm.cluster.nodes:
        assert node.run("ls", "-A", "/dev/shm") == ""
        assert "ranks.py" not in node.run("ps", "-e", "-o", "args"), os.linesep
