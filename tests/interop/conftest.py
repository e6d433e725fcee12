"""What the interop tests share: the digits trainers of the four languages, and a way to run them as one job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "demo"))

from programs import FRAMEWORKS, LANGUAGES, TESSERA, digits  # noqa: E402

__all__ = ["FRAMEWORKS", "LANGUAGES", "ROOT", "RunJob", "digits"]  # for the tests
RunJob = Callable[..., str]


@pytest.fixture
def run_job(tmp_path: Path) -> RunJob:
    """``run_job(["c", "java"], steps=20)`` runs one rank each and returns what the job printed."""

    def run(
        languages: list[str],
        *,
        steps: int,
        save_every: int = 10,
        batch: int = 24,
        checkpoints: Path | None = None,
        more: Sequence[str] = (),
    ) -> str:
        arguments = ["--data", str(ROOT / "examples" / "data" / "digits.csv"), "--steps", str(steps)]
        arguments += ["--checkpoints", str(checkpoints or tmp_path / "checkpoints")]
        arguments += ["--save-every", str(save_every), "--batch", str(batch), "--seed", "11", *more]
        command = [str(TESSERA), "run"]
        for i, language in enumerate(languages):
            command += ([":"] if i else []) + ["-n", "1", *digits(language, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        return output

    return run


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    return str(request.param)
