"""What `./dev test` counts: where everything is there, only a missing GPU excuses a skip. And what it tells of a
section that ran out of time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from patience import patience, until

TOOLS = Path(__file__).resolve().parents[2] / "tools"
TALLY = TOOLS / "tally.py"


def tally(folder: Path, cases: str, *, status: int = 0, strict: str = "yes") -> tuple[int, str]:
    (folder / "report.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    (folder / "sections.tsv").write_text(f"Python\tjunit\t{folder / 'report.xml'}\t{status}\t1\n")
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
    (tmp_path / "sections.tsv").write_text(f"C\tjunit\t{tmp_path / 'report.xml'}\t8\t1\n")
    done = subprocess.run([sys.executable, str(TALLY), str(tmp_path)], capture_output=True, text=True)
    shown = ["FAILED  C: t.b", "        x_test.cc:7: Failure", "        Expected: 1", "          Actual: 2", ""]
    assert done.stdout.splitlines()[: len(shown)] == shown


def test_a_runner_that_broke_without_a_failed_test_is_a_failure(tmp_path: Path) -> None:
    assert tally(tmp_path, case("a"), status=139) == (1, "1 passed, 1 failed, 0 skipped")


def test_nothing_that_ran_is_a_failure(tmp_path: Path) -> None:
    assert tally(tmp_path, "") == (1, "0 passed, 0 failed, 0 skipped")


# --- sections that ran out of time


def said_of_cut(folder: Path, kind: str, report: Path, *, slow: bool = True) -> tuple[list[str], str]:
    """The lines of what is told of a section that ran out of time, and the closing one."""
    results = folder / "results"
    results.mkdir(exist_ok=True)
    (results / "sections.tsv").write_text(f"S\t{kind}\t{report}\t124\t2400\n")
    (results / "cuts.tsv").write_text(f"S\t2400\t1.0\t{3.4 if slow else 1.0}\n")
    done = subprocess.run([sys.executable, str(TALLY), str(results)], capture_output=True, text=True)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    return lines, lines[-1]


def test_of_a_section_out_of_time_what_ran_is_told_and_how_slow_the_machine_was(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    still = '<error message="still running after 312 s when the run was ended"/>'
    cases = case("a") + case("b", "<failure/>") + case("c", still)
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    lines, closing = said_of_cut(tmp_path, "junit", report)
    assert "FAILED  S: out of time; running: t.c" in lines
    assert "S: out of time after 2400 s; the machine was slow (factor 1 at the start, 3.4 at the end)" in lines
    assert "        was running: t.c" in lines
    assert closing == "1 passed, 2 failed, 0 skipped"
    lines, _ = said_of_cut(tmp_path, "junit", report, slow=False)
    assert "S: out of time after 2400 s; the machine was not slow (factor 1 at the start, 1 at the end)" in lines


def test_without_the_time_being_over_a_test_that_was_running_has_failed(tmp_path: Path) -> None:
    still = '<error message="still running after 3 s when the run was ended"/>'
    assert tally(tmp_path, case("a") + case("b", still), status=1) == (1, "1 passed, 1 failed, 0 skipped")


def test_pytest_that_is_ended_has_told_what_it_did(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import os, pytest, signal\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2\n"
        "@pytest.fixture\n"
        "def torn():\n"
        "    yield\n"
        "    raise OSError('in the teardown')\n"
        "def test_is_torn(torn): pass\n"
        "def test_is_skipped(): pytest.skip('needs a GPU')\n"
        "def test_runs_for_ever():\n"
        "    open('here', 'w').close()\n"
        "    signal.pause()\n"
    )
    report = tmp_path / "report.xml"
    arguments = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(tmp_path)]
    command = [sys.executable, str(TOOLS / "pytest_progress.py"), str(report.with_suffix(".progress")), *arguments]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        until(lambda: (tmp_path / "here").exists() or running.poll() is not None, 60, "the last test has begun")
        running.send_signal(signal.SIGTERM)
        assert running.wait(patience(60)) == -signal.SIGTERM
    finally:
        running.kill()
    assert not report.exists()
    lines, closing = said_of_cut(tmp_path, "junit", report)
    assert "FAILED  S: out of time; running: test_it.py::test_runs_for_ever" in lines
    assert "FAILED  S: test_it.py::test_fails" in lines
    assert "FAILED  S: test_it.py::test_is_torn" in lines
    assert any("in the teardown" in line for line in lines)
    assert closing == "1 passed, 3 failed, 1 skipped"


MEETS = """
import time
from pathlib import Path
def test_begins(): Path("begun.NAME").touch()
def test_meets():
    end = time.monotonic() + PATIENCE
    while len(list(Path().glob("begun.*"))) < 2:
        assert time.monotonic() < end
def test_ends(): pass
"""


@contextmanager
def shared_by_two(folder: Path, files: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text.replace("NAME", name).replace("PATIENCE", str(patience(60))))
    arguments = ["-q", "-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={folder / 'report.xml'}", str(folder)]
    command = [sys.executable, str(TOOLS / "pytest_progress.py"), str(folder / "report.progress"), "--workers", "2"]
    running = subprocess.Popen([*command, *arguments], cwd=folder, stdout=subprocess.DEVNULL)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(patience(60))


def test_workers_run_each_file_once_and_at_a_time(tmp_path: Path) -> None:
    rest = {f"rest{i}": "def test_a(): pass\ndef test_b(): assert 'NAME' != 'rest3'\n" for i in range(5)}
    with shared_by_two(tmp_path, {"a": MEETS, "b": MEETS, **rest}) as running:
        status = running.wait(patience(120))
    assert status == 1
    (tmp_path / "sections.tsv").write_text(f"Python\tjunit\t{tmp_path / 'report.xml'}\t{status}\t1\n")
    done = subprocess.run([sys.executable, str(TALLY), str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "FAILED  Python: test_rest3.test_b"
    assert done.stdout.splitlines()[-1] == "15 passed, 1 failed, 0 skipped"


def test_what_judges_the_whole_run_runs_when_the_last_worker_has_ended_its_tests(tmp_path: Path) -> None:
    judge = (
        "import pytest\nfrom pathlib import Path\n@pytest.mark.whole_run\n"
        "def test_judges(): assert sorted(file.name for file in Path().glob('ended.*')) == ['ended.y', 'ended.z']\n"
    )
    ends = MEETS.replace("def test_ends(): pass", "def test_ends(): Path('ended.NAME').touch()")
    late = ends.replace("test_ends():", "test_ends():\n    until_the_other_worker_is_gone();") + (
        "def until_the_other_worker_is_gone():\n"
        "    end = time.monotonic() + PATIENCE\n"
        "    while not list(Path().glob('report.*.xml')): assert time.monotonic() < end\n"
    )
    with shared_by_two(tmp_path, {"a": judge, "y": ends, "z": late}) as running:
        status = running.wait(patience(120))
    (tmp_path / "sections.tsv").write_text(f"Python\tjunit\t{tmp_path / 'report.xml'}\t{status}\t1\n")
    done = subprocess.run([sys.executable, str(TALLY), str(tmp_path)], capture_output=True, text=True)
    assert (status, done.stdout.splitlines()[-1]) == (0, "7 passed, 0 failed, 0 skipped"), done.stdout


def test_workers_that_are_ended_have_told_what_they_did(tmp_path: Path) -> None:
    hangs = (
        "import signal\ndef test_hangs():\n    open('NAME', 'w').close()\n    signal.pause()\ndef test_ends(): pass\n"
    )
    with shared_by_two(tmp_path, {"x": hangs, "y": "def test_passes(): pass\n" + hangs}) as running:
        until(lambda: (tmp_path / "x").exists() and (tmp_path / "y").exists(), 60, "both hang")
        running.send_signal(signal.SIGTERM)
        assert running.wait(patience(60)) != 0
    lines, closing = said_of_cut(tmp_path, "junit", tmp_path / "report.xml")
    assert "        was running: test_x.py::test_hangs" in lines
    assert "        was running: test_y.py::test_hangs" in lines
    assert closing == "1 passed, 1 failed, 0 skipped"


def test_a_line_that_pytest_was_writing_is_no_line(tmp_path: Path) -> None:
    lines = [json.dumps(facts) for facts in (["begins", "a"], ["passed", "a", ""], ["begins", "b"])]
    (tmp_path / "report.progress").write_text("\n".join(lines) + '\n["pass')
    assert said_of_cut(tmp_path, "junit", tmp_path / "report.xml")[1] == "1 passed, 1 failed, 0 skipped"


def test_cargo_that_is_ended_has_told_what_it_did(tmp_path: Path) -> None:
    log = tmp_path / "test-rust.log"
    log.write_text(
        "     Running tests/store.rs (target/debug/deps/store-1)\n"
        "test a ... ok\ntest b ... ok\n"
        "test result: ok. 2 passed; 0 failed; 0 ignored\n"
        "     Running tests/comm.rs (target/debug/deps/comm-2)\n"
        "test c ... ok\n"
        "test d ... FAILED\n"
        "test c2 has been running for over 60 seconds\n"
        "test e has been running for over 60 seconds\n"
        "test c2 ... ok\n"
    )
    lines, closing = said_of_cut(tmp_path, "cargo", log)
    assert "FAILED  S: out of time; running: tests/comm.rs: e" in lines
    assert closing == "4 passed, 2 failed, 0 skipped"


def test_maven_that_is_ended_has_told_what_it_did(tmp_path: Path) -> None:
    report = tmp_path / "java"
    report.mkdir()
    (report / "TEST-dev.tessera.StoreTest.xml").write_text(f"<testsuite>{case('a')}{case('b')}</testsuite>")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "test-java.log").write_text(
        "[INFO] Running dev.tessera.StoreTest\n"
        "[INFO] Tests run: 2, Failures: 0, Errors: 0, Skipped: 0, Time elapsed: 2.1 s -- in dev.tessera.StoreTest\n"
        "[INFO] Running dev.tessera.FsdpTest\n"
    )
    lines, closing = said_of_cut(tmp_path, "surefire", report)
    assert "FAILED  S: out of time; running: dev.tessera.FsdpTest" in lines
    assert closing == "2 passed, 1 failed, 0 skipped"


def test_what_was_not_begun_is_no_failure_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "checks.txt").write_text("passed clang-format\nfailed ruff format\n")
    (tmp_path / "sections.tsv").write_text(
        f"Formatting\tchecks\t{tmp_path / 'checks.txt'}\t1\t1\nC++ under asan\tnot-begun\t-\t0\t0\n"
    )
    done = subprocess.run([sys.executable, str(TALLY), str(tmp_path)], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert "FAILED  Formatting: ruff format" in lines
    assert any(line.startswith("C++ under asan") and "not begun" in line for line in lines)
    assert (done.returncode, lines[-1]) == (1, "1 passed, 1 failed, 0 skipped")
