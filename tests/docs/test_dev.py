"""What `./dev` does around the tools that it runs: `./dev env` can be evaluated again and again, a command that runs
out of time leaves nothing behind, and limits and deadlines grow with the slowness of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import patience, until

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from cpp_tests import Processors  # noqa: E402
from machine_speed import REFERENCE_ROUNDS, Speed, measure  # noqa: E402


def test_the_environment_evaluated_twice_repeats_no_entry() -> None:
    evaluate = 'eval "$(./dev env)"; '
    script = evaluate * 2 + 'for name in PATH LD_LIBRARY_PATH PKG_CONFIG_PATH; do echo "${!name}"; done'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    for paths in done.stdout.split("\n")[:3]:
        ours = [entry for entry in paths.split(":") if entry.startswith(str(ROOT))]
        assert ours
        assert len(ours) == len(set(ours)), paths


def common(script: str, *, factor: str = "1") -> str:
    """What a shell prints that has tools/dev/common.sh."""
    prologue = f"set -euo pipefail; ROOT={ROOT}; source tools/dev/common.sh; TESSERA_TEST_PATIENCE={factor}; "
    return subprocess.run(
        ["bash", "-c", prologue + script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_a_command_that_runs_out_of_time_leaves_nothing_running(tmp_path: Path) -> None:
    child = tmp_path / "child"
    command = f"bash -c 'sleep 1000 & echo $! >{child}; wait'"
    assert common(f'rc=0; limited 1 {command} || rc=$?; echo "$rc $LIMIT_S"', factor="0.02") == "124 2\n"
    until(lambda: not Path(f"/proc/{child.read_text().strip()}").exists(), 20, "it has ended")


@pytest.mark.parametrize("ending", ["end_ahead; kill -0 $(<child) || echo gone", ""])
def test_what_runs_ahead_has_idle_processors_only_and_ends_with_dev(tmp_path: Path, ending: str) -> None:
    child = tmp_path / "child"
    command = "bash -c 'chrt -p $$; nice; cat /proc/self/autogroup; sleep 1000 & echo $! >new; mv new child; wait'"
    begun = "until [[ -e child ]]; do read -rt 0.1 -u $NEVER || true; done"
    script = f"LOGS={tmp_path}; cd {tmp_path}; begin_ahead {command}; {begun}; {ending or 'exit'}"
    assert common(script) == ("gone\n" if ending else "")
    until(lambda: not Path(f"/proc/{child.read_text().strip()}").exists(), 20, "it has ended")
    said = (tmp_path / "ahead.log").read_text()
    assert "SCHED_IDLE" in said
    assert "\n19\n" in said
    assert "nice 19\n" in said or not Path("/proc/self/autogroup").exists()


def test_to_the_tests_of_cpp_a_processor_with_an_idle_job_is_idle(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  1000 200 5000 30 4 0 0 0 0 0\ncpu0 1 1 1 1 1 0 0 0 0 0\n")
    idle = 234 if os.nice(0) <= 0 else 34
    assert Processors.idle_s(tmp_path / "stat") == idle / os.sysconf("SC_CLK_TCK")


def test_a_limit_grows_with_the_factor_and_the_exit_status_is_the_command_s() -> None:
    assert common('rc=0; limited 2 bash -c "exit 9" || rc=$?; echo "$rc $LIMIT_S"', factor="2.5") == "9 300\n"
    assert common("patient 7", factor="1.5") == "11"


@pytest.mark.parametrize(("slower", "factor"), [(0.5, 1.0), (1.0, 1.0), (1.62, 1.7), (7.95, 8.0), (100.0, 8.0)])
def test_the_factor_says_how_much_slower_the_machine_is(slower: float, factor: float) -> None:
    assert Speed(REFERENCE_ROUNDS / slower).factor == factor


def test_the_speed_is_measured_in_two_seconds() -> None:
    begin = time.monotonic()
    assert measure().rounds > 0
    assert time.monotonic() - begin < patience(2)
