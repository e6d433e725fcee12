"""The digits trainers with slices of the layers, or as a pipeline: alone, beside ranks with other samples, and in one
job of several languages they train like one rank with all of the batch; a run goes on under another --parallel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tessera as ts
from conftest import LANGUAGES, RunJob, losses, newest, run
from sampling import sample

BATCH = 24  # of all ranks with other samples
WAYS = [
    *(("tp", ranks, 1) for ranks in (2, 4, 8)),
    *((parallel, ranks, ranks // 2) for parallel in ("dp+tp", "fsdp+tp") for ranks in (4, 8)),
    *(("pp", ranks, max(1, ranks // 4)) for ranks in (2, 4, 8)),
    *(("dp+tp+pp", ranks, ranks // 4) for ranks in (4, 8)),
]  # with the number of ranks, and of those with other samples


def trained(
    run_job: RunJob, root: Path, languages: list[str], parallel: str, samplers: int, steps: int = 30
) -> tuple[str, list[float]]:
    """What the job printed, and the losses of the whole batch, every tenth step."""
    log = root.with_suffix(".log")
    more = ["--parallel", parallel, "--log", str(log)]
    output = run_job(languages, steps=steps, batch=BATCH // samplers, checkpoints=root, more=more)
    logged = losses(log, len(languages))
    log.unlink()
    return output, logged


def accuracy(output: str) -> float:
    return float(output.rsplit("held-out accuracy ", 1)[1].split()[0])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[float]]:
    """One rank with all of the batch: its checkpoints, what it printed, and its losses."""
    root = tmp_path_factory.mktemp("alone") / "root"
    return root, *trained(run, root, ["c"], "ddp", 1)


def expect_alone(alone: tuple[Path, str, list[float]], root: Path, output: str, logged: list[float]) -> None:
    expected_root, expected_output, expected_losses = alone
    assert len(logged) == 3 and expected_losses[-1] < 0.9 * expected_losses[0]
    np.testing.assert_allclose(logged, expected_losses, rtol=1e-4)
    assert abs(accuracy(output) - accuracy(expected_output)) < 0.01
    expected, got = newest(expected_root), newest(root)
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("language", "parallel", "ranks", "samplers"),
    sample([(one, *way) for one in LANGUAGES for way in WAYS], 5, "slices in each language"),
)
def test_ranks_with_slices_equal_one_rank(
    run_job: RunJob,
    tmp_path: Path,
    alone: tuple[Path, str, list[float]],
    language: str,
    parallel: str,
    ranks: int,
    samplers: int,
) -> None:
    root = tmp_path / "root"
    expect_alone(alone, root, *trained(run_job, root, [language] * ranks, parallel, samplers))


@pytest.mark.parametrize(("parallel", "samplers"), [("tp", 1), ("fsdp+tp", 2), ("pp", 1)])
def test_a_job_of_four_languages_equals_one_rank(
    run_job: RunJob, tmp_path: Path, alone: tuple[Path, str, list[float]], parallel: str, samplers: int
) -> None:
    root = tmp_path / "root"
    expect_alone(alone, root, *trained(run_job, root, LANGUAGES, parallel, samplers))


def test_a_run_goes_on_under_another_way_to_be_parallel(
    run_job: RunJob, tmp_path: Path, alone: tuple[Path, str, list[float]]
) -> None:
    root = tmp_path / "root"
    output, curve = trained(run_job, root, ["rust", "python", "c", "java"], "fsdp+tp", 2, steps=10)
    for languages, parallel, samplers in ((["java", "python", "rust", "c"], "dp+tp+pp", 1), (["python"], "ddp", 1)):
        step = 10 * len(curve)
        output, logged = trained(run_job, root, languages, parallel, samplers, steps=step + 10)
        assert f"resumed after step {step}" in output
        curve += logged
    expect_alone(alone, root, output, curve)
    with ts.Checkpoint(root) as parts, ts.Checkpoint(alone[0]) as whole:
        for name, entry in whole.tensors.items():
            assert parts.tensors[name].shape == entry.shape, name
        assert parts.saved_values.keys() == whole.saved_values.keys()
