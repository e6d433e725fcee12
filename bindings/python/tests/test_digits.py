"""The digits example: it learns, resumes where it was, and keeps the contract of examples/README.md."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import tessera as ts
from conftest import launcher
from patience import patience

REPOSITORY = Path(__file__).parents[3]
DIGITS = REPOSITORY / "examples/python/digits.py"
DATA = REPOSITORY / "examples/data/digits.csv"


def run(tmp_path: Path, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DIGITS), "--data", str(DATA), "--checkpoints", str(tmp_path / "root"), *arguments]
    if ranks > 1:
        command = [launcher(), "run", "--no-prefix", "-n", str(ranks), *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(240), check=False, cwd=tmp_path)


def test_three_ranks_learn_the_digits(tmp_path: Path):
    log = tmp_path / "log"
    result = run(tmp_path, "--log", str(log), ranks=3)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert "digits: 3 ranks, from the beginning" in lines
    assert any(line.startswith("step 600/600 loss ") for line in lines)
    accuracy = float(lines[-1].removeprefix("held-out accuracy "))
    assert accuracy >= 0.95
    facts = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(facts) == 3 * 61
    assert {fact["rank"] for fact in facts} == {0, 1, 2}
    assert all(fact["lang"] == "python" and fact["world"] == 3 for fact in facts)
    with ts.Checkpoint(tmp_path / "root") as checkpoint:
        assert checkpoint.step == 600
        assert list(checkpoint.metrics) == ["loss"]
        assert checkpoint.manifest["writer"]["language"] == "python"


def test_a_run_in_two_parts_ends_as_one_does(tmp_path: Path):
    (tmp_path / "whole").mkdir()
    assert run(tmp_path / "whole", "--steps", "60", "--save-every", "20").returncode == 0
    assert run(tmp_path, "--steps", "40", "--save-every", "20").returncode == 0
    result = run(tmp_path, "--steps", "60", "--save-every", "20")
    assert "resumed after step 40" in result.stdout
    with ts.Checkpoint(tmp_path / "root") as parts, ts.Checkpoint(tmp_path / "whole/root") as whole:
        assert parts.step == whole.step == 60
        for name, array in whole.items():
            assert np.array_equal(parts[name], array), name


def test_bad_arguments_end_with_2_and_one_line(tmp_path: Path):
    for arguments in (["--steps", "many"], ["--unknown"], ["--steps"], ["--batch", "0"], ["--data", "nowhere.csv"]):
        result = run(tmp_path, *arguments)
        assert result.returncode == 2, arguments
        assert len(result.stderr.splitlines()) == 1, result.stderr


def test_an_error_of_tessera_ends_with_1(tmp_path: Path):
    (tmp_path / "root").write_text("in the way")
    result = run(tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("digits: ")
