"""DJL and candle: networks and gradients of a framework, averaged by Tessera. With `./dev test --frameworks` alone: the
two have to be downloaded and built."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import tessera as ts
from conftest import FRAMEWORKS, ROOT, RunJob, digits, newest, ranks_equal_one
from patience import patience
from sampling import sample

pytestmark = pytest.mark.frameworks


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# AdamW of Tessera, or SGD of the framework.
WITH_OPTIMIZER = pytest.mark.parametrize(
    ("framework", "optimizer"),
    sample([(one, optimizer) for one in FRAMEWORKS for optimizer in ("tessera", one)], 2, "optimizers of frameworks"),
)


@WITH_OPTIMIZER
def test_ranks_with_a_share_of_the_batch_equal_one_rank_with_all_of_it(
    run_job: RunJob, tmp_path: Path, framework: str, optimizer: str
) -> None:
    ranks_equal_one(run_job, tmp_path, framework, ["--optimizer", optimizer])


def test_a_framework_trains_like_c(run_job: RunJob, tmp_path: Path, framework: str) -> None:
    run_job(["c", "c"], steps=30, checkpoints=tmp_path / "c")
    run_job([framework, framework], steps=30, checkpoints=tmp_path / "other")
    expected, got = newest(tmp_path / "c"), newest(tmp_path / "other")
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


@WITH_OPTIMIZER
def test_a_run_in_two_parts_ends_as_one_does(run_job: RunJob, tmp_path: Path, framework: str, optimizer: str) -> None:
    """Parameters, moments and the place in the data come back, into the framework's memory too."""
    more = ["--optimizer", optimizer]
    run_job([framework] * 2, steps=40, save_every=20, checkpoints=tmp_path / "whole", more=more)
    run_job([framework] * 2, steps=20, save_every=20, checkpoints=tmp_path / "parts", more=more)
    output = run_job([framework] * 2, steps=40, save_every=20, checkpoints=tmp_path / "parts", more=more)
    assert "digits: 2 ranks, resumed after step 20" in output
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert {name: value.tobytes() for name, value in parts.items()} == {
        name: value.tobytes() for name, value in whole.items()
    }


def test_python_and_a_framework_resume_each_other(run_job: RunJob, tmp_path: Path, framework: str) -> None:
    root = tmp_path / "checkpoints"
    run_job([framework] * 3, steps=20, checkpoints=root)
    with ts.Checkpoint(root) as checkpoint:
        checkpoint.verify()
        assert checkpoint.step == 20
        assert checkpoint.tensors["model.fc1.weight"].shape == (128, 64)
    assert "2 ranks, resumed after step 20" in run_job(["python"] * 2, steps=40, checkpoints=root)
    assert "1 ranks, resumed after step 40" in run_job([framework], steps=60, checkpoints=root)


def test_ranks_of_one_job_may_have_different_frameworks(run_job: RunJob, tmp_path: Path) -> None:
    run_job(["c"] * 3, steps=30, checkpoints=tmp_path / "c")
    run_job(["c", *FRAMEWORKS], steps=30, checkpoints=tmp_path / "mixed")
    expected, got = newest(tmp_path / "c"), newest(tmp_path / "mixed")
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


def test_a_framework_learns_the_digits(run_job: RunJob, framework: str) -> None:
    output = run_job([framework] * 2, steps=300, save_every=0, batch=48)
    assert float(output.split("held-out accuracy ")[1].split()[0]) >= 0.95


def test_an_unknown_optimizer_is_one_line_and_exit_code_2(framework: str) -> None:
    data = ["--data", str(ROOT / "examples" / "data" / "digits.csv")]
    done = subprocess.run(
        digits(framework, [*data, "--optimizer", "sgd"]),
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == f'digits: --optimizer cannot be "sgd": tessera or {framework}; see examples/README.md'
