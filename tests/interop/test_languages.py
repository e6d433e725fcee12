"""The four languages in one job and over one checkpoint: the same samples, the same values, each resumes any other."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tessera as ts
from conftest import LANGUAGES, RunJob, job, newest, ranks_equal_one
from sampling import sample


def manifest(root: Path) -> dict[str, object]:
    with ts.Checkpoint(root) as checkpoint:
        return dict(checkpoint.manifest)


PARALLEL = pytest.mark.parametrize("parallel", ["ddp", "fsdp"])


@PARALLEL
def test_each_language_trains_like_c(run_job: RunJob, tmp_path: Path, language: str, parallel: str) -> None:
    """The same initial values and samples: after 30 steps the weights differ by rounding alone."""
    run_job(["c", "c"], steps=30, checkpoints=tmp_path / "c")
    run_job([language, language], steps=30, checkpoints=tmp_path / "other", more=["--parallel", parallel])
    expected, got = newest(tmp_path / "c"), newest(tmp_path / "other")
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("language", "parallel"),
    sample([(one, parallel) for one in LANGUAGES for parallel in ("ddp", "fsdp")], 4, "shares of the batch"),
)
def test_ranks_with_a_share_of_the_batch_equal_one_rank_with_all_of_it(
    run_job: RunJob, tmp_path: Path, language: str, parallel: str
) -> None:
    ranks_equal_one(run_job, tmp_path, language, ["--parallel", parallel])


@PARALLEL
def test_a_job_of_four_languages_trains_like_c_alone(run_job: RunJob, tmp_path: Path, parallel: str) -> None:
    run_job(["c"] * 4, steps=30, checkpoints=tmp_path / "c")
    run_job(LANGUAGES, steps=30, checkpoints=tmp_path / "mixed", more=["--parallel", parallel])
    expected, got = newest(tmp_path / "c"), newest(tmp_path / "mixed")
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


# Each ordered pair of languages stands side by side once (an Eulerian circuit).
CHAIN = ["c", "rust", "java", "rust", "python", "rust", "c", "java", "python", "java", "c", "python", "c"]


def test_each_language_resumes_every_other_at_another_world_size(run_job: RunJob, tmp_path: Path) -> None:
    assert set(pairwise(CHAIN)) == {(a, b) for a in LANGUAGES for b in LANGUAGES if a != b}
    root = tmp_path / "checkpoints"
    for number, language in enumerate(CHAIN):
        more = ["--parallel", ("ddp", "fsdp")[number // 2 % 2]]  # each goes on from itself and from the other
        output = run_job([language] * (number % 4 + 1), steps=10 * (number + 1), checkpoints=root, more=more)
        if number > 0:
            assert f"resumed after step {10 * number}" in output


def test_all_languages_go_on_alike_from_what_one_saved(run_job: RunJob, tmp_path: Path, language: str) -> None:
    """Weights, moments, step and samples: after ten more steps they differ by rounding alone."""
    run_job([language] * 2, steps=10, checkpoints=tmp_path / "saved")
    ended = {}
    for other in LANGUAGES:
        shutil.copytree(tmp_path / "saved", tmp_path / other)
        run_job([other] * 2, steps=20, checkpoints=tmp_path / other)
        ended[other] = newest(tmp_path / other)
    for other, got in ended.items():
        assert sorted(got) == sorted(ended[language])
        for name, value in ended[language].items():
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-6, err_msg=f"{name} under {other}")


def test_a_job_that_is_told_to_stop_saves_its_last_step(tmp_path: Path, language: str) -> None:
    root = tmp_path / "checkpoints"
    command = job([language, language], steps=10_000_000, checkpoints=root, save_every=20)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        limit = threading.Timer(120, running.kill)
        limit.start()
        assert running.stdout is not None
        output = ""
        for line in running.stdout:
            output += line
            if "step 30/" in line:  # a save later
                running.send_signal(signal.SIGTERM)
    limit.cancel()
    stopped = re.search(r"digits: stopped after step (\d+)", output)
    assert stopped and running.returncode == 0, output
    assert manifest(root)["step"] == int(stopped[1])


def test_the_manifest_names_the_language(run_job: RunJob, tmp_path: Path, language: str) -> None:
    run_job([language], steps=10)
    text = json.dumps(manifest(tmp_path / "checkpoints")["writer"])
    assert f'"{language}"' in text


def test_pytorch_reads_what_each_language_writes(run_job: RunJob, tmp_path: Path, language: str) -> None:
    """PyTorch's own reader of safetensors directories gives the same bits."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    root = tmp_path / "checkpoints"
    run_job([language] * 3, steps=10)
    expected = newest(root)
    state = {name: torch.full(value.shape, -1, dtype=torch.from_numpy(value).dtype) for name, value in expected.items()}
    directory = root / (root / "latest").read_text(encoding="utf-8").strip()
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(directory)), no_dist=True)
    for name, value in expected.items():
        assert state[name].numpy().tobytes() == value.tobytes(), name


def test_pytorchs_own_load_reads_what_each_language_saves(run_job: RunJob, tmp_path: Path, language: str) -> None:
    """In PyTorch's own format: a plain load gives the same bits and values, and the language itself resumes it."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    root = tmp_path / "checkpoints"
    more = ["--format", "torch_dcp"]
    run_job([language] * 3, steps=10, more=more)
    (directory,) = root.glob("step-*")
    assert (directory / ".metadata").exists()
    with ts.Checkpoint(root) as checkpoint:
        expected = {name: checkpoint[name] for name in checkpoint.tensors}
        values = dict(checkpoint.saved_values)
    assert len(expected) == 16, "four parameters; exp_avg, exp_avg_sq and step of each"
    state = {name: torch.full(value.shape, -1, dtype=torch.from_numpy(value).dtype) for name, value in expected.items()}
    state |= dict.fromkeys(values)
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    for name, value in expected.items():
        assert state[name].numpy().tobytes() == value.tobytes(), name
    assert {name: state[name] for name in values} == values
    assert "resumed after step 10" in run_job([language] * 2, steps=20, more=more)


def test_a_bar_shows_each_save_and_load(run_job: RunJob, language: str) -> None:
    """Of each save in the background and of the resume; by rank 0 alone. The launcher shows what a line ends as."""
    full = "[" + "#" * 20 + "]"
    first = run_job([language] * 2, steps=20, more=["--progress", "1"])
    assert (first.count(f"saving {full}"), first.count("loading")) == (2, 0), first
    then = run_job([language] * 2, steps=30, more=["--progress", "1"])
    assert (then.count(f"loading {full}"), then.count(f"saving {full}")) == (1, 1), then
    assert "saving [" not in run_job([language], steps=40)


def test_each_language_says_when_nothing_is_left_to_do(run_job: RunJob, tmp_path: Path, language: str) -> None:
    assert "nothing left" not in run_job([language], steps=20)
    before = manifest(tmp_path / "checkpoints")
    for steps in (20, 10):
        output = run_job([language, language], steps=steps)
        assert "digits: 2 ranks, resumed after step 20" in output
        assert f"digits: nothing left to do: --steps is {steps}" in output
        assert "held-out accuracy" in output
        assert f"step {steps}/" not in output
    assert manifest(tmp_path / "checkpoints") == before
