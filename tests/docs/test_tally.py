"""What `./dev test` counts: where everything is there, only a missing GPU excuses a skip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TALLY = Path(__file__).resolve().parents[2] / "tools" / "tally.py"


def tally(folder: Path, cases: str, *, status: int = 0, strict: str = "yes") -> tuple[int, str]:
    (folder / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    (folder / "sections.tsv").write_text(f"Python\tpytest\t{folder / 'report.xml'}\t{status}\t1\n")
    done = subprocess.run(
        [sys.executable, str(TALLY), str(folder), f"--strict-skips={strict}"], capture_output=True, text=True
    )
    return done.returncode, done.stdout.splitlines()[-1]


def case(name: str, inside: str = "") -> str:
    return f'<testcase classname="t" name="{name}">{inside}</testcase>'


def skip(reason: str) -> str:
    return f'<skipped message="{reason}"/>'


def test_all_is_well(tmp_path: Path) -> None:
    assert tally(tmp_path, case("a") + case("b")) == (0, "2 passed, 0 failed, 0 skipped")


@pytest.mark.parametrize("reason", ["needs a GPU", "needs two NVIDIA GPUs"])
def test_a_missing_gpu_is_an_excuse(tmp_path: Path, reason: str) -> None:
    assert tally(tmp_path, case("a") + case("b", skip(reason))) == (0, "1 passed, 0 failed, 1 skipped")


@pytest.mark.parametrize("reason", ["needs PyTorch", "", "no GPU today"])
def test_no_other_skip_is_excused(tmp_path: Path, reason: str) -> None:
    cases = case("a") + case("b", skip(reason))
    assert tally(tmp_path, cases) == (1, "1 passed, 1 failed, 0 skipped")
    assert tally(tmp_path, cases, strict="no") == (0, "1 passed, 0 failed, 1 skipped")


def test_failures_count(tmp_path: Path) -> None:
    cases = case("a") + case("b", "<failure/>") + case("c", "<error/>")
    assert tally(tmp_path, cases, status=1) == (1, "1 passed, 2 failed, 0 skipped")


def test_what_a_failed_test_printed_is_shown(tmp_path: Path) -> None:
    printed = "[ RUN ] T.t\nx_test.cc:7: Failure\nExpected: 1\n  Actual: 2"
    cases = case("a", "<system-out>passed</system-out>") + case("b", f"<failure/><system-out>{printed}</system-out>")
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    (tmp_path / "sections.tsv").write_text(f"C\tctest\t{tmp_path / 'report.xml'}\t8\t1\n")
    done = subprocess.run([sys.executable, str(TALLY), str(tmp_path)], capture_output=True, text=True)
    shown = ["FAILED  C: b", "        x_test.cc:7: Failure", "        Expected: 1", "          Actual: 2", ""]
    assert done.stdout.splitlines()[: len(shown)] == shown


def test_a_runner_that_broke_without_a_failed_test_is_a_failure(tmp_path: Path) -> None:
    assert tally(tmp_path, case("a"), status=139) == (1, "1 passed, 1 failed, 0 skipped")


def test_nothing_that_ran_is_a_failure(tmp_path: Path) -> None:
    assert tally(tmp_path, "") == (1, "0 passed, 0 failed, 0 skipped")
