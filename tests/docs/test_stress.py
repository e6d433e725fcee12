"""./dev stress: what it selects, what it counts, and that nothing of it is left when it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path

from patience import patience, until

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import stress  # noqa: E402

# Runs stress.py on the pytest suite in the working directory alone.
DRIVER = f"""
import sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import stress
from pathlib import Path

def parts(pattern, out, factor):
    report = out / "together.xml"
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={{report}}", "test_it.py")
    return [stress.Part("together", command, report)]

stress.ROOT = Path.cwd()
stress.parts = parts
sys.exit(stress.main())
"""


def start(folder: Path, suite: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "test_it.py").write_text(textwrap.dedent(suite))
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, "run", f"--out={folder / 'out'}", *arguments, "a filter"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until(lambda: path.exists() or process.poll() is not None, 60, f"{path} is there")
    assert process.poll() is None


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def expect_gone(pids: set[int]) -> None:
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20, f"{pids} have ended")


# The second run fails.
EVERY_SECOND = """
    from pathlib import Path

    def test_fails_once():
        runs = Path("runs")
        runs.write_text((runs.read_text() if runs.exists() else "") + ".")
        assert len(runs.read_text()) != 2, "the second"

    def test_passes():
        pass
"""


def test_the_selection_is_named_as_in_the_results() -> None:
    names = [function.shown for function in stress.python_functions(re.compile("^interop/torch_ddp::|^python/comm::"))]
    assert "python/comm::test_bad_timeouts_are_refused" in names
    assert {name.partition("::")[0] for name in names} == {"interop/torch_ddp", "python/comm"}
    for classname, name in (
        ("interop.test_torch_ddp", "interop/torch_ddp::test_x[2]"),
        ("tests.test_comm", "python/comm::test_x[2]"),
        ("interop.seeds.test_seeds.TestAll", "interop/seeds/seeds::TestAll::test_x[2]"),
    ):
        assert stress.python_name(ET.Element("testcase", classname=classname, name="test_x[2]")) == name


def test_runs_accumulate_and_what_fails_is_listed_with_its_rate(tmp_path: Path) -> None:
    first = start(tmp_path, EVERY_SECOND, "--times=3", "--load=0")
    told = first.communicate(timeout=patience(120))[0]
    assert first.returncode == 1, told
    assert re.search(r"1 of 3 +33\.3% .*  it::test_fails_once$", told, re.MULTILINE), told
    assert "test_passes" not in told.replace("longest", "").split("what they printed")[0]
    assert told.endswith("2 tests, 3 runs at load 0: 1 failed, 1 times in all\n"), told
    kept = list((tmp_path / "out" / "failures").iterdir())
    assert len(kept) == 1
    assert "the second" in kept[0].read_text()

    more = start(tmp_path, EVERY_SECOND, "--times=2", "--load=1", "--append")
    told = more.communicate(timeout=patience(120))[0]
    assert re.search(r"1 of 5 +20\.0%", told), told
    assert told.endswith("2 tests, 5 runs at load 0, 1: 1 failed, 1 times in all\n"), told
    sessions = json.loads((tmp_path / "out" / "results.json").read_text())["sessions"]
    assert [(session["runs"], session["load"]) for session in sessions] == [(3, 0), (2, 1)]

    anew = start(tmp_path, EVERY_SECOND, "--times=1", "--load=0")
    told = anew.communicate(timeout=patience(120))[0]
    assert (anew.returncode, told.endswith("2 tests, 1 runs at load 0: 0 failed, 0 times in all\n")) == (0, True), told


def test_a_runner_that_writes_no_report_has_failed(tmp_path: Path) -> None:
    crashed = start(tmp_path, "import os\ndef test_it(): os.abort()\n", "--times=1", "--load=0")
    told = crashed.communicate(timeout=patience(120))[0]
    assert crashed.returncode == 1
    assert "together: no report" in told


FOR_EVER = """
    import signal
    from pathlib import Path

    def test_before():
        pass

    def test_runs_for_ever():
        Path("here").touch()
        signal.pause()
"""


def test_ctrl_c_ends_it_with_what_there_is(tmp_path: Path) -> None:
    first = start(tmp_path, EVERY_SECOND, "--times=1", "--load=0")
    first.communicate(timeout=patience(120))
    running = start(tmp_path, FOR_EVER, "--times=3", "--load=2", "--append")
    try:
        wait_for(tmp_path / "here", running)
        children = children_of(running.pid)
        assert len(children) == 3  # the loops and pytest
        running.send_signal(signal.SIGINT)
        told = running.communicate(timeout=patience(60))[0]
    finally:
        running.kill()
    assert running.returncode == 130
    assert told.endswith("2 tests, 1 runs at load 0, 2: 0 failed, 0 times in all\n"), told
    expect_gone(children)


def test_nothing_is_left_of_one_that_is_killed(tmp_path: Path) -> None:
    running = start(tmp_path, FOR_EVER, "--times=1", "--load=2")
    try:
        wait_for(tmp_path / "here", running)
        children = children_of(running.pid)
        assert len(children) == 3
    finally:
        os.kill(running.pid, signal.SIGKILL)
        running.communicate()
    expect_gone(children)
