"""What a build takes: the core with its C API and command, the core with all tests, one changed source.

Cold builds without ccache, into folders below ``build/bench-build``, of this tree and, in turn, of another commit
(``--beside``), so that the ratio does not depend on the hour. Job-seconds by target come from Ninja's log, so that a
target that grew shows. Ninja runs more jobs than there are cores, and a job's seconds include its waiting for one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import results

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "bench-build"
TOUCHED = "saver.cc"  # one of the dearest sources of the core
TOUCHED_TEST = "checkpoint_test"
BOUNDS_S = {"core, C API and command": 240.0, "core and all tests": 480.0, "one source to its test": 20.0}


def ninja(source: Path, build: Path, *targets: str) -> float:
    begin = time.monotonic()
    subprocess.run(
        ["cmake", "--build", str(build), *(["--target", *targets] if targets else [])],
        cwd=source,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "CCACHE_DISABLE": "1"},
    )
    return time.monotonic() - begin


def configured(source: Path, build: Path, *, tests: bool, command: bool) -> Path:
    shutil.rmtree(build, ignore_errors=True)
    options = {"TESTS": tests, "CLI": command, "EXAMPLES": False, "BENCHMARKS": False}
    switches = [f"-DTESSERA_BUILD_{name}={'ON' if on else 'OFF'}" for name, on in options.items()]
    subprocess.run(
        ["cmake", "--preset", "release", "-B", str(build), *switches], cwd=source, check=True, stdout=subprocess.DEVNULL
    )
    return build


def measure(source: Path, build: Path) -> dict[str, float]:
    taken = {}
    taken["core, C API and command"] = ninja(source, configured(source, build, tests=False, command=True))
    of_first = job_seconds(build)
    taken["core and all tests"] = ninja(source, configured(source, build, tests=True, command=False))
    of_all = job_seconds(build)
    next((source / "src/checkpoint").rglob(TOUCHED)).touch()
    taken["one source to its test"] = ninja(source, build, TOUCHED_TEST)
    for name, seconds in sorted({**of_all, **of_first}.items(), key=lambda item: -item[1]):
        taken[f"jobs of {name}"] = seconds
    return taken


def job_seconds(build: Path) -> dict[str, float]:
    """By target, from Ninja's log, in which the last line of an output counts."""
    last: dict[str, float] = {}
    for line in (build / ".ninja_log").read_text(encoding="utf-8").splitlines()[1:]:
        begin, end, _, output, _ = line.split("\t")
        last[output] = (int(end) - int(begin)) / 1000
    targets: dict[str, float] = defaultdict(float)
    for output, seconds in last.items():
        name = output.split(".dir/")[0].split("/")[-1] if ".dir/" in output else "links and the rest"
        targets[name] += seconds
    return dict(targets)


def bench(beside: str, rounds: int) -> list[results.Case]:
    other = WORK / "other"
    ours: dict[str, list[float]] = defaultdict(list)
    theirs: dict[str, list[float]] = defaultdict(list)
    if beside:
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        shutil.rmtree(other, ignore_errors=True)
        subprocess.run(["git", "worktree", "add", "--force", "--detach", str(other), beside], cwd=ROOT, check=True)
    try:
        for _ in range(rounds):
            for name, seconds in measure(ROOT, WORK / "ours").items():
                ours[name].append(seconds)
            for name, seconds in (measure(other, WORK / "theirs") if beside else {}).items():
                theirs[name].append(seconds)
    finally:
        if beside:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=False)
        shutil.rmtree(WORK, ignore_errors=True)
    cases = []
    for name, measured in ours.items():
        if name in BOUNDS_S:
            pairs = [(seconds, BOUNDS_S[name]) for seconds in measured]
            cases.append(results.case(name, "s", "bound", pairs, 1.0, smaller_is_better=True))
        if name in theirs:
            beside_them = list(zip(measured, theirs[name], strict=True))
            metric = "job-seconds" if name.startswith("jobs of ") else "s"
            cases.append(results.case(name, metric, f"commit {beside}", beside_them, None, smaller_is_better=True))
        elif name not in BOUNDS_S:
            pairs = [(seconds, seconds) for seconds in measured]
            cases.append(results.case(name, "job-seconds", "none", pairs, None, smaller_is_better=True))
    return cases
