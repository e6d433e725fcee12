"""Repeat tests beside busy loops, and say how often each fails.

    stress.py needs [FILTER]    the Python suites that it selects from, a line each, so that what they test is built
    stress.py run [--times N] [--load L] [--append] [--out DIR] [FILTER]

A test's name is ``<test of CTest>/<Suite.Case>`` in C++ (``gloo/comm/Failure.LateRankIsNamed``), and in Python its file
without what all have in common, then its function (``interop/torch_ddp::test_...``, ``python/comm::test_...``). FILTER
is a regular expression that matches anywhere in it. What is run, and in which environments, CTest and pytest say.

Each of the N runs goes once through the selection, by tools/cpp_tests.py and pytest, whose JUnit reports are counted.
The busy loops are children of this process, and end with it however it ends. They run already when the machine's speed
is measured, so deadlines are as patient as under ``./dev test`` on a machine that is so busy.

DIR/results.json accumulates the runs of all calls with ``--append``; each call is a session with its commit, load and
machine. DIR/failures/ holds what the tests that failed printed. Ctrl-C ends the run with what there is by then.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import machine_speed

ROOT = Path(__file__).resolve().parents[1]
PYTHON_PLACES = {"python": ROOT / "bindings" / "python" / "tests", "together": ROOT / "tests"}
PR_SET_PDEATHSIG = 1
SHOWN_S = 60.0  # between two lines that say how far a run is


# --- what there is to run


@dataclass(frozen=True)
class Function:
    """A test function of Python, with all its parameters."""

    kind: str  # of PYTHON_PLACES
    file: Path
    name: str

    @property
    def shown(self) -> str:
        return f"{short_name(self.kind, self.file)}::{self.name}"

    @property
    def node(self) -> str:
        return f"{self.file}::{self.name}"


def short_name(kind: str, file: Path) -> str:
    """tests/interop/test_torch_ddp.py is interop/torch_ddp; the binding's test_comm.py is python/comm."""
    place = file.relative_to(PYTHON_PLACES[kind])
    name = place.with_name(place.stem.removeprefix("test_"))
    return str(Path("python") / name if kind == "python" else name)


def functions_in(kind: str, file: Path) -> list[Function]:
    """Of the source alone: pytest would import what may not be built yet."""
    found = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            found.append(Function(kind, file, node.name))
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found += [
                Function(kind, file, f"{node.name}::{member.name}")
                for member in node.body
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name.startswith("test")
            ]
    return found


def python_functions(pattern: re.Pattern[str]) -> list[Function]:
    return [
        function
        for kind, place in PYTHON_PLACES.items()
        for file in sorted(place.rglob("test_*.py"))
        if "clusters" not in file.parts  # these have services of their own: ./dev test --clusters
        for function in functions_in(kind, file)
        if pattern.search(function.shown)
    ]


# --- what a run gave


@dataclass(frozen=True)
class Outcome:
    name: str
    failed: bool
    seconds: float
    output: str


def python_name(case: ET.Element) -> str:
    """Of a test case in pytest's report, whose class is the dotted path of the file from pytest's root."""
    dotted = case.get("classname") or ""
    file, _, member = dotted.partition(".Test")
    parts = file.split(".")
    if "tests" in parts:  # the binding's root is above its tests
        parts = ["python", *parts[parts.index("tests") + 1 :]]
    parts[-1] = parts[-1].removeprefix("test_")
    inside = f"Test{member}::" if member else ""
    return f"{'/'.join(parts)}::{inside}{case.get('name')}"


def outcomes_of(report: Path, *, is_pytest: bool) -> Iterator[Outcome]:
    """What ran to its end; a test that was skipped, or interrupted, did not."""
    for case in ET.parse(report).getroot().iter("testcase"):
        trouble = case.find("failure")
        if trouble is None:
            trouble = case.find("error")
        still_running = trouble is not None and (trouble.get("message") or "").startswith("still running")
        if still_running or case.find("skipped") is not None:
            continue
        output = ""
        if trouble is not None:
            output = "\n".join([trouble.get("message") or "", trouble.text or "", case.findtext("system-out") or ""])
        name = python_name(case) if is_pytest else str(case.get("name"))
        yield Outcome(name, trouble is not None, float(case.get("time") or 0), output)


@dataclass
class Test:
    seconds: list[float] = field(default_factory=list)
    failures: int = 0


@dataclass
class Session:
    """What one call ran."""

    commit: str
    load: int
    machine: str
    factor: float
    began: str
    runs: int = 0
    tests: dict[str, Test] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        test = self.tests.setdefault(outcome.name, Test())
        test.seconds.append(round(outcome.seconds, 3))
        test.failures += outcome.failed


def read_sessions(path: Path) -> list[Session]:
    if not path.exists():
        return []
    sessions = []
    for stored in json.loads(path.read_text(encoding="utf-8"))["sessions"]:
        tests = {name: Test(**test) for name, test in stored.pop("tests").items()}
        sessions.append(Session(**stored, tests=tests))
    return sessions


def write_sessions(path: Path, sessions: Sequence[Session]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps({"sessions": [asdict(session) for session in sessions]}), encoding="utf-8")
    draft.replace(path)


def totals(sessions: Sequence[Session]) -> dict[str, Test]:
    every: dict[str, Test] = {}
    for session in sessions:
        for name, test in session.tests.items():
            total = every.setdefault(name, Test())
            total.seconds += test.seconds
            total.failures += test.failures
    return every


def table(sessions: Sequence[Session], out: Path) -> str:
    """Those that failed, the worst first, and a closing line."""
    tests = totals(sessions)
    bad = sorted((name for name in tests if tests[name].failures), key=lambda n: -tests[n].failures / runs_of(tests[n]))
    lines = []
    if bad:
        lines.append(f"{'failures':>12} {'rate':>7} {'median s':>9} {'max s':>8}  test")
    for name in bad:
        test = tests[name]
        lines.append(
            f"{f'{test.failures} of {runs_of(test)}':>12} {test.failures / runs_of(test):7.1%} "
            f"{statistics.median(test.seconds):9.2f} {max(test.seconds):8.2f}  {name}"
        )
    if bad:
        lines += ["", f"what they printed: {out / 'failures'}"]
    slowest = max(tests, key=lambda name: max(tests[name].seconds), default="")
    if slowest:
        lines.append(f"longest: {max(tests[slowest].seconds):.1f} s, {slowest}")
    runs, failures = sum(s.runs for s in sessions), sum(test.failures for test in tests.values())
    loads = ", ".join(str(load) for load in sorted({session.load for session in sessions}))
    lines.append(f"{len(tests)} tests, {runs} runs at load {loads}: {len(bad)} failed, {failures} times in all")
    return "\n".join(lines)


def runs_of(test: Test) -> int:
    return len(test.seconds)


# --- running


def die_with(parent: int) -> None:
    """In a child: the kernel ends it with its parent, even if that is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    parent = os.getpid()
    children = []
    try:
        for _ in range(count):
            child = os.fork()
            if child == 0:
                try:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                    die_with(parent)
                    while True:
                        pass
                finally:
                    os._exit(1)
            children.append(child)
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def run_quietly(command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
    """In a session of its own, so that all of it can be ended. How it ends is in its report."""
    parent = os.getpid()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: die_with(parent),
        )
        begin = time.monotonic()
        try:
            while True:
                try:
                    process.wait(SHOWN_S)
                    return
                except subprocess.TimeoutExpired:
                    print(f"    … {time.monotonic() - begin:.0f} s: {last_line(log)}", flush=True)
        finally:
            if process.poll() is None:
                process.terminate()  # tools/cpp_tests.py ends what it has started
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace")[-2000:].splitlines() if line.strip()]
    return lines[-1][:100] if lines else ""


@dataclass(frozen=True)
class Part:
    """One command of a run, and the report that it writes."""

    name: str
    command: tuple[str, ...]
    report: Path

    @property
    def is_pytest(self) -> bool:
        return self.name in PYTHON_PLACES

    @property
    def log(self) -> Path:
        return self.report.with_suffix(".log")

    def outcomes(self) -> list[Outcome]:
        """Of what ended. Without a report the runner itself did not: then its log is a failure's output."""
        if self.report.exists():
            return list(outcomes_of(self.report, is_pytest=self.is_pytest))
        text = self.log.read_text(errors="replace")[-20_000:] if self.log.exists() else ""
        return [Outcome(f"{self.name}: no report", True, 0.0, text)]


def parts(pattern: str, out: Path, factor: float) -> list[Part]:
    report = out / "cpp.xml"
    command = [sys.executable, str(ROOT / "tools" / "cpp_tests.py"), str(ROOT / "build" / "release")]
    command += [f"--filter={pattern}", "--without=long", f"--junit={report}", f"--patience={factor}"]
    found = [Part("C++", tuple(command), report)]
    functions = python_functions(re.compile(pattern))
    for kind in PYTHON_PLACES:
        nodes = [function.node for function in functions if function.kind == kind]
        if not nodes:
            continue
        report = out / f"{kind}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--timeout={300 * factor:.0f}"]
        command += ["-m", "not (long or frameworks)", f"--junitxml={report}", *nodes]
        found.append(Part(kind, tuple(command), report))
    return found


def run_once(session: Session, selection: Sequence[Part], environment: dict[str, str], failures: Path) -> None:
    """What ended counts, also where Ctrl-C came before the rest."""
    done: list[Part] = []
    try:
        for part in selection:
            part.report.unlink(missing_ok=True)
            done.append(part)
            run_quietly(part.command, part.log, environment)
        session.runs += 1
    except KeyboardInterrupt:
        done = [part for part in done if part.report.exists()]
        raise
    finally:
        for part in done:
            for outcome in part.outcomes():
                session.add(outcome)
                if outcome.failed:
                    keep(outcome, failures, session)


def keep(outcome: Outcome, failures: Path, session: Session) -> None:
    """What it printed, beside what it printed in other runs."""
    failures.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", outcome.name)[:150]
    stamp = f"{session.began.replace(':', '')}-{len(session.tests[outcome.name].seconds)}"
    (failures / f"{name}-{stamp}.log").write_text(outcome.output, encoding="utf-8")


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


def machine() -> str:
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{len(os.sched_getaffinity(0))} cores, {model[1] if model else platform.machine()}"


def run(options: argparse.Namespace) -> int:
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    results, failures = out / "results.json", out / "failures"
    if not options.append:
        shutil.rmtree(failures, ignore_errors=True)
    former = read_sessions(results) if options.append else []
    interrupted = False
    with busy_loops(options.load):
        factor = machine_speed.measure().factor
        print(f"machine speed under load {options.load}: factor {factor:g}; deadlines are that much longer", flush=True)
        began = datetime.now(UTC).isoformat(timespec="seconds")
        session = Session(commit(), options.load, machine(), factor, began)
        selection = parts(options.filter, out, factor)
        environment = {**os.environ, "TESSERA_TEST_PATIENCE": str(factor)}
        try:
            for turn in range(1, options.times + 1):
                begin = time.monotonic()
                run_once(session, selection, environment, failures)
                write_sessions(results, [*former, session])
                failed = sum(test.failures for test in session.tests.values())
                print(
                    f"run {turn} of {options.times}: {len(session.tests)} tests in {time.monotonic() - begin:.0f} s; "
                    f"failures so far: {failed}",
                    flush=True,
                )
        except KeyboardInterrupt:
            interrupted = True
    sessions = [*former, session]
    write_sessions(results, sessions)
    print("\n" + table(sessions, out))
    if not totals(sessions):
        print(f"no test matches {options.filter!r}")
        return 1
    return 130 if interrupted else int(any(test.failures for test in totals(sessions).values()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Repeat tests beside busy loops.")
    parser.add_argument("what", choices=["needs", "run"])
    parser.add_argument("filter", nargs="?", default="")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--load", type=int, default=4)
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "stress")
    options = parser.parse_intermixed_args()
    if options.what == "needs":
        for kind in sorted({function.kind for function in python_functions(re.compile(options.filter))}):
            print(kind)
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
