"""What the interop tests share: the digits trainers of the four languages, and a way to run them as one job."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tessera as ts
from fork_server import server
from patience import patience
from user_programs import JVM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "demo"))

from programs import FRAMEWORKS, LANGUAGES, TESSERA  # noqa: E402
from programs import digits as digits_of_demo  # noqa: E402

__all__ = ["FRAMEWORKS", "LANGUAGES", "ROOT", "RunJob", "digits", "job", "losses", "newest", "ranks_equal_one", "run"]
RunJob = Callable[..., str]

if importlib.util.find_spec("torch") is not None:
    server().import_torch()  # while pytest goes on collecting


def digits(language: str, arguments: list[str]) -> list[str]:
    """As in the demo, with a JVM for short programs."""
    program, *words = digits_of_demo(language, arguments)
    return [program, *(JVM if program == "java" else []), *words]


def job(
    languages: list[str],
    *,
    steps: int,
    checkpoints: Path,
    save_every: int = 10,
    batch: int = 24,
    more: Sequence[str] = (),
) -> list[str]:
    """The command of a job with one rank of each."""
    arguments = ["--data", str(ROOT / "examples" / "data" / "digits.csv"), "--steps", str(steps)]
    arguments += ["--checkpoints", str(checkpoints), "--save-every", str(save_every), "--batch", str(batch)]
    arguments += ["--seed", "11", *more]
    command = [str(TESSERA), "run"]
    for i, language in enumerate(languages):
        command += ([":"] if i else []) + ["-n", "1", *digits(language, arguments)]
    return command


def run(languages: list[str], **options: Any) -> str:
    """Runs one rank of each and returns what the job printed."""
    done = subprocess.run(job(languages, **options), capture_output=True, text=True, timeout=patience(180))
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


@pytest.fixture
def run_job(tmp_path: Path) -> RunJob:
    """``run_job(["c", "java"], steps=20)`` is `run` with checkpoints of the test's own."""

    def run_here(languages: list[str], *, checkpoints: Path | None = None, **options: Any) -> str:
        return run(languages, checkpoints=checkpoints or tmp_path / "checkpoints", **options)

    return run_here


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def newest(root: Path) -> dict[str, np.ndarray]:
    with ts.Checkpoint(root) as checkpoint:
        return {name: checkpoint[name] for name in checkpoint.tensors}


def losses(log: Path, ranks: int) -> list[float]:
    """Of the whole batch: the means of what the ranks logged, a logged step each."""
    of_step: dict[int, dict[int, float]] = defaultdict(dict)
    for line in log.read_text(encoding="utf-8").splitlines():
        facts = json.loads(line)
        if "loss" in facts:
            of_step[facts["step"]][facts["rank"]] = facts["loss"]
    return [sum(of_step[step][rank] for rank in range(ranks)) / ranks for step in sorted(of_step)]


def ranks_equal_one(run_job: RunJob, directory: Path, program: str, more: Sequence[str] = ()) -> None:
    """2 and 3 ranks with a share of the batch each train as one rank with all of it, twice to the same bit."""
    whole_batch = 24

    def trained(ranks: int, name: str) -> tuple[list[float], dict[str, np.ndarray]]:
        log, root = directory / f"{name}.log", directory / name
        options = ["--log", str(log), *more]
        run_job([program] * ranks, steps=50, save_every=50, batch=whole_batch // ranks, checkpoints=root, more=options)
        return losses(log, ranks), newest(root)

    expected_losses, expected = trained(1, "alone")
    assert len(expected_losses) == 5
    assert expected_losses[-1] < 0.9 * expected_losses[0]
    for ranks in (2, 3):
        got_losses, got = trained(ranks, f"{ranks} ranks")
        np.testing.assert_allclose(got_losses, expected_losses, rtol=1e-4)
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-3, atol=1e-5, err_msg=f"{ranks} ranks, {name}")
        again_losses, again = trained(ranks, f"{ranks} ranks again")
        assert again_losses == got_losses
        bits, bits_again = ({name: value.tobytes() for name, value in of.items()} for of in (got, again))
        assert bits == bits_again
