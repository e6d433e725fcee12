"""The digits trainers evaluate by the library's metrics: the same numbers in each language, in a job of all of them,
for every number of ranks and every way to be parallel. They are scikit-learn's, and the report's curve has that area.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
from conftest import LANGUAGES, ROOT, RunJob, newest, run
from evaluation import Evaluation, area, macro_average
from sampling import sample

STEPS = 50  # so that there are mistakes
WAYS = [
    ("ddp", 2), ("ddp", 3), ("fsdp", 4), ("tp", 2), ("dp+tp", 4), ("fsdp+tp", 4), ("pp", 2), ("pp", 4), ("pp", 8),
    ("dp+tp+pp", 4), ("dp+tp+pp", 8),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after which nothing is left to do but the evaluation."""
    root = tmp_path_factory.mktemp("trained") / "root"
    run(["c", "c"], steps=STEPS, checkpoints=root)
    return root


def evaluated(run_job: RunJob, trained: Path, directory: Path, languages: list[str], parallel: str) -> dict[str, Any]:
    """What each rank logs, which has to be the same."""
    log, root = directory / "log", directory / "root"
    shutil.copytree(trained, root)
    output = run_job(languages, steps=STEPS, checkpoints=root, more=["--log", str(log), "--parallel", parallel])
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert sorted((row.pop("rank"), row.pop("lang")) for row in rows) == list(enumerate(languages))
    for row in rows:
        assert (row.pop("world"), row.pop("step")) == (len(languages), STEPS)
        del row["time"]
        assert row == rows[0]
    assert f"held-out accuracy {rows[0]['accuracy']:.4f}" in output
    return dict(rows[0])


@pytest.fixture(scope="module")
def expected(trained: Path) -> dict[str, Any]:
    """The same by scikit-learn, of what NumPy computes from the checkpoint."""
    data = np.loadtxt(ROOT / "examples" / "data" / "digits.csv", delimiter=",", dtype=np.int64)
    row = np.arange(len(data))
    data = data[(row < 1782) & (row % 6 == 5)]
    pixels, labels = (data[:, :64] / 16).astype(np.float32), data[:, 64]
    value = {name.removeprefix("model."): array for name, array in newest(trained).items()}
    hidden = np.maximum(pixels @ value["fc1.weight"].T + value["fc1.bias"], 0)
    logits = hidden @ value["fc2.weight"].T + value["fc2.bias"]

    matrix = sklearn.metrics.confusion_matrix(labels, logits.argmax(axis=1))
    found = {"matrix": matrix.ravel().tolist(), "accuracy": round(float(matrix.trace() / 297), 6)}
    areas = [sklearn.metrics.roc_auc_score(labels == digit, logits[:, digit]) for digit in range(10)]
    found["auroc"] = round(float(np.mean(areas)), 6)
    for digit in range(10):
        fpr, tpr, _ = sklearn.metrics.roc_curve(labels == digit, logits[:, digit])
        found |= {f"fpr.{digit}": np.round(fpr, 6).tolist(), f"tpr.{digit}": np.round(tpr, 6).tolist()}
    assert 200 < matrix.trace() < 290, "some mistakes, but not too many"
    return found


@pytest.mark.parametrize(
    ("language", "parallel", "ranks"),
    sample([(one, *way) for one in LANGUAGES for way in [("ddp", 1), *WAYS]], 6, "evaluations in each language"),
)
def test_each_language_finds_the_same(
    run_job: RunJob,
    tmp_path: Path,
    trained: Path,
    expected: dict[str, Any],
    language: str,
    parallel: str,
    ranks: int,
) -> None:
    assert evaluated(run_job, trained, tmp_path, [language] * ranks, parallel) == expected


@pytest.mark.parametrize("parallel", ["ddp", "fsdp+tp", "pp"])
def test_a_job_of_four_languages_finds_the_same(
    run_job: RunJob, tmp_path: Path, trained: Path, expected: dict[str, Any], parallel: str
) -> None:
    assert evaluated(run_job, trained, tmp_path, LANGUAGES, parallel) == expected


def test_the_reports_curve_is_the_mean_of_the_digits(expected: dict[str, Any]) -> None:
    evaluation = Evaluation.of({**expected, "lang": "c"})
    mean = macro_average(evaluation.curves)
    assert (mean[0], mean[-1]) == ((0, 0), (1, 1))
    assert mean == sorted(mean)
    assert area(mean) == pytest.approx(expected["auroc"], abs=1e-5)
