"""Run the tests that CMake registered, many GoogleTest cases a process.

A process for each case would start 4,000 of them, which takes longer than the cases do, above all under a sanitizer. So
the cases of a program are dealt out in batches, and each worker runs one batch in one process. A case keeps its own
deadline and its own output in the report. A crash takes no other case with it: when a process ends early, the case that
it was in has failed, and another process runs those that it had not begun.

What there is to run comes from ``ctest --show-only``: a test with the label ``gtest`` is a program with its environment
and its ``--gtest_filter``. Each of its cases is named ``<name of the test>/<Suite.Case>``. Any other test is run as it
is. Of a test with the label ``half``, ``third`` or ``quarter``, so many of the cases are drawn by TESSERA_TEST_SEED,
unless TESSERA_TEST_LONG or a filter asks for all.

The report is a JUnit file. It is written when the run ends, also by SIGTERM, which is how a section that runs out of
time ends: the cases that were running then are errors, those that had not begun are left out.

Thread-safety: the workers are threads, each of which owns the process it started; ``Report`` is the only thing shared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

BATCH_S = 6.0  # what a batch is meant to take: short enough that the workers end together
UNKNOWN_S = 0.15  # a case that was never timed
SAMPLES = {"half": 2, "third": 3, "quarter": 4}  # labels
KEPT_BYTES = 200_000  # of a case's output
BEGAN = re.compile(r"\[ RUN      \] (\S+)$")
ENDED = re.compile(r"\[(       OK |  FAILED  |  SKIPPED )\] ([^\s,]+).* \((\d+) ms\)$")
# Control characters have no place in XML; \S above takes them.
NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")


@dataclass(frozen=True)
class Test:
    """A test as CMake registered it."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    labels: frozenset[str]
    timeout_s: float

    @property
    def is_gtest(self) -> bool:
        return "gtest" in self.labels


@dataclass
class Result:
    name: str
    state: str  # passed, failed, skipped, running
    seconds: float = 0.0
    output: str = ""


@dataclass
class Batch:
    test: Test
    cases: list[str]  # none: the test is no GoogleTest program
    weight_s: float = 0.0


@dataclass
class Report:
    """What ended, by name, and what runs. Guarded by ``lock``."""

    total: int = 0
    results: dict[str, Result] = field(default_factory=dict)
    running: dict[str, float] = field(default_factory=dict)
    passed: TextIO | None = None  # gets the name of each that passes
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, name: str) -> None:
        with self.lock:
            self.running[name] = time.monotonic()

    def end(self, result: Result) -> None:
        with self.lock:
            self.running.pop(result.name, None)
            self.results[result.name] = result
            if self.passed and result.state == "passed":
                self.passed.write(f"{result.name}\n")
            done = len(self.results)
        word = {"passed": "Passed", "failed": "***Failed", "skipped": "Skipped"}[result.state]
        print(f"{done:5}/{self.total} {word:9} {result.seconds:7.2f} s  {result.name}", flush=True)
        if result.state == "failed":
            print(result.output, flush=True)

    def write_junit(self, path: Path, suite: str) -> None:
        now = time.monotonic()
        with self.lock:
            cut = [Result(name, "running", now - since) for name, since in self.running.items()]
            results = [*self.results.values(), *cut]
        root = ET.Element("testsuite", name=suite, tests=str(len(results)), expected=str(self.total))
        for result in results:
            case = ET.SubElement(root, "testcase", name=result.name, time=f"{result.seconds:.3f}")
            output = NOT_XML.sub("?", result.output)
            if result.state == "failed":
                ET.SubElement(case, "failure", message="failed").text = output
            elif result.state == "skipped":
                ET.SubElement(case, "skipped", message=" ".join(output.split())[:300])
            elif result.state == "running":
                ET.SubElement(case, "error", message=f"still running after {result.seconds:.0f} s")
        path.parent.mkdir(parents=True, exist_ok=True)
        ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def registered(build: Path) -> list[Test]:
    """The tests that CMake registered in a build tree."""
    shown = subprocess.run(
        ["ctest", "--test-dir", str(build), "--show-only=json-v1"], capture_output=True, text=True, check=True
    )
    tests = []
    for one in json.loads(shown.stdout)["tests"]:
        if "command" not in one:
            raise SystemExit(f"{one['name']}: its program was not built")
        properties = {item["name"]: item["value"] for item in one.get("properties", [])}
        tests.append(
            Test(
                name=one["name"],
                command=tuple(one["command"]),
                environment=dict(pair.split("=", 1) for pair in properties.get("ENVIRONMENT", [])),
                directory=properties.get("WORKING_DIRECTORY", str(build)),
                labels=frozenset(properties.get("LABELS", [])),
                timeout_s=float(properties.get("TIMEOUT", 120)),
            )
        )
    return tests


def cases_of(test: Test) -> list[str]:
    """The cases of a GoogleTest program that its filter leaves."""
    shown = subprocess.run(
        [*test.command, "--gtest_list_tests"],
        capture_output=True,
        text=True,
        check=True,
        cwd=test.directory,
        env={**os.environ, **test.environment},
    )
    cases, suite = [], ""
    for line in shown.stdout.splitlines():
        name = line.split("#")[0].rstrip()
        if name.endswith(".") and not name.startswith(" "):
            suite = name
        elif name.startswith("  ") and suite:
            cases.append(suite + name.strip())
    return [case for case in cases if not case.startswith("DISABLED_") and ".DISABLED_" not in case]


def deal(test: Test, cases: Sequence[str], seconds: Mapping[str, float]) -> list[Batch]:
    """Batches of about BATCH_S each, in the order of the program."""
    batches: list[Batch] = []
    for case in cases:
        weight = seconds.get(f"{test.name}/{case}", UNKNOWN_S)
        if not batches or batches[-1].weight_s + weight > BATCH_S:
            batches.append(Batch(test, []))
        batches[-1].cases.append(case)
        batches[-1].weight_s += weight
    return batches


class Processors:
    """Admits batches: always one a processor, and more while processors are idle, since many cases wait more than they
    compute."""

    IDLE = 0.2  # of all processors, since the last look
    LOOK_S = 0.5

    def __init__(self) -> None:
        self.count = os.cpu_count() or 1
        self.running = 0
        self.lock = threading.Lock()
        self.looked = (time.monotonic(), self.idle_s())

    @staticmethod
    def idle_s(stat: Path = Path("/proc/stat")) -> float:
        """With what has a lower priority than this process: `begin_ahead` of tools/dev/common.sh."""
        fields = stat.read_text(encoding="ascii").splitlines()[0].split()
        nice = int(fields[2]) if os.nice(0) <= 0 else 0
        return (int(fields[4]) + int(fields[5]) + nice) / os.sysconf("SC_CLK_TCK")

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        while not self.admits():
            time.sleep(self.LOOK_S / 4)
        try:
            yield
        finally:
            with self.lock:
                self.running -= 1

    def admits(self) -> bool:
        with self.lock:
            now, idle = time.monotonic(), self.idle_s()
            since, idle_then = self.looked
            wants_idle = self.running >= self.count
            if wants_idle and now - since < self.LOOK_S:
                return False
            self.looked = (now, idle)
            if wants_idle and idle - idle_then < self.IDLE * self.count * (now - since):
                return False
            self.running += 1
            return True


class Runner:
    def __init__(self, report: Report, patience: float) -> None:
        self.report = report
        self.patience = patience
        self.processors = Processors()
        self.batches: queue.PriorityQueue[tuple[float, int, Batch]] = queue.PriorityQueue()
        self.order = 0
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.lock = threading.Lock()  # of `processes` and `stopping`
        self.stopping = False

    def add(self, batch: Batch) -> None:
        """The longest first, so that none is left alone at the end."""
        with self.lock:
            self.order += 1
            self.batches.put((-batch.weight_s, self.order, batch))

    def work(self) -> None:
        while not self.stopping:
            with self.processors.one():
                try:
                    _, _, batch = self.batches.get_nowait()
                except queue.Empty:
                    return
                if batch.cases:
                    self.run_cases(batch)
                else:
                    self.run_alone(batch.test)

    def stop(self) -> None:
        """Ends the processes; the workers return without a word about what these were doing."""
        with self.lock:
            self.stopping = True
            for process in self.processes:
                kill_group(process)

    def start(self, test: Test, more: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.lock:
            process = subprocess.Popen(
                [*test.command, *more],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=test.directory,
                env={**os.environ, **test.environment, "TESSERA_TEST_PATIENCE": str(self.patience)},
                start_new_session=True,
            )
            self.processes.add(process)
            if self.stopping:
                kill_group(process)
        return process

    def finish(self, process: subprocess.Popen[bytes]) -> int:
        status = process.wait()
        with self.lock:
            self.processes.discard(process)
        kill_group(process)  # what it left running
        return status

    def run_alone(self, test: Test) -> None:
        self.report.begin(test.name)
        since = time.monotonic()
        process = self.start(test, [])
        watch = Watch(process)
        watch.begin(test.timeout_s * self.patience)
        assert process.stdout
        output = process.stdout.read().decode(errors="replace")
        watch.close()
        status = self.finish(process)
        if self.stopping:
            return
        state = "passed" if status == 0 else "failed"
        self.report.end(Result(test.name, state, time.monotonic() - since, output[-KEPT_BYTES:] + watch.said(status)))

    def run_cases(self, batch: Batch) -> None:
        """One process; what it did not come to is put back, unless it ended before its first case."""
        test = batch.test
        unseen = list(batch.cases)
        name, since, ended_any = "", 0.0, False
        output: list[bytes] = []
        with tempfile.NamedTemporaryFile("w", prefix="tessera-cases-", suffix=".flags") as flags:
            flags.write(f"--gtest_filter={':'.join(batch.cases)}\n")
            flags.flush()
            process = self.start(test, [f"--gtest_flagfile={flags.name}", "--gtest_color=no"])
            watch = Watch(process)
            watch.begin(test.timeout_s * self.patience)  # to come to the first case
            assert process.stdout
            for raw in process.stdout:
                line = raw.decode(errors="replace").rstrip("\r\n")
                began, ended = BEGAN.search(line), ENDED.search(line)
                if began and began[1] in unseen:
                    unseen.remove(began[1])
                    name, since, output = began[1], time.monotonic(), []
                    self.report.begin(f"{test.name}/{name}")
                    watch.begin(test.timeout_s * self.patience)
                elif ended and ended[2] == name:
                    output.append(raw)
                    state = {"O": "passed", "F": "failed", "S": "skipped"}[ended[1].strip()[0]]
                    self.report.end(Result(f"{test.name}/{name}", state, int(ended[3]) / 1000, text_of(output)))
                    name, output, ended_any = "", [], True
                    watch.begin(test.timeout_s * self.patience)
                else:
                    output.append(raw)
            watch.close()
            status = self.finish(process)
        if self.stopping:
            return
        if name:
            said = text_of(output) + watch.said(status)
            self.report.end(Result(f"{test.name}/{name}", "failed", time.monotonic() - since, said))
        elif unseen and not ended_any:
            for case in unseen:
                said = text_of(output) + watch.said(status)
                self.report.end(Result(f"{test.name}/{case}", "failed", 0.0, said))
            return
        elif status not in (0, 1) or watch.expired:  # after its last case, as a leak is found
            said = f"cases: {' '.join(batch.cases)}\n{text_of(output)}{watch.said(status)}"
            self.report.end(Result(f"{test.name}/the end of {batch.cases[0]} and others", "failed", 0.0, said))
        if unseen:
            self.add(Batch(test, unseen, batch.weight_s))


class Watch:
    """Kills a process group whose deadline has passed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.expired = False
        self.limit_s = 0.0
        self._changed = threading.Condition()
        self._until: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self, seconds: float) -> None:
        with self._changed:
            self.limit_s = seconds
            self._until = time.monotonic() + seconds
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def said(self, status: int) -> str:
        if self.expired:
            return f"\nits time was over: {self.limit_s:.0f} s\n"
        if status < 0:
            return f"\nended by {signal.Signals(-status).name}\n"
        return f"\nended with exit status {status}\n" if status != 0 else ""

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                left = None if self._until is None else self._until - time.monotonic()
                if left is not None and left <= 0:
                    self.expired = True
                    kill_group(self.process)
                    return
                self._changed.wait(left)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def text_of(output: Iterable[bytes]) -> str:
    return b"".join(output)[-KEPT_BYTES:].decode(errors="replace")


def selected(
    tests: Iterable[Test], labels: str, without: str, pattern: str, done: frozenset[str]
) -> list[tuple[Test, list[str]]]:
    """What to run: each test with its cases that match, none where it is no GoogleTest program."""
    matches = re.compile(pattern).search

    def wanted(name: str) -> bool:
        return name not in done and matches(name) is not None

    chosen = []
    for test in tests:
        if labels and not any(re.fullmatch(labels, label) for label in test.labels):
            continue
        if without and any(re.fullmatch(without, label) for label in test.labels):
            continue
        if test.is_gtest:
            cases = [case for case in cases_of(test) if wanted(f"{test.name}/{case}")]
            parts = max((SAMPLES.get(label, 1) for label in test.labels), default=1)
            if not pattern and "TESSERA_TEST_LONG" not in os.environ:
                cases = [case for case in cases if is_drawn(f"{test.name}/{case}", parts)]
            if cases:
                chosen.append((test, cases))
        elif wanted(test.name):
            chosen.append((test, []))
    return chosen


def is_drawn(name: str, parts: int) -> bool:
    """Whether it is in the one of so many parts that the seed draws."""
    return zlib.crc32(f"{os.environ.get('TESSERA_TEST_SEED', '0')} {name}".encode()) % parts == 0


def read_seconds(path: Path | None) -> dict[str, float]:
    if path is None or not path.exists():
        return {}
    return {str(name): float(value) for name, value in json.loads(path.read_text()).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests that CMake registered.")
    parser.add_argument("build", type=Path)
    parser.add_argument("--filter", default="", help="a regular expression in <test>/<Suite.Case>")
    parser.add_argument("--labels", default="", help="only tests with a label that this matches")
    parser.add_argument("--without", default="", help="no test with a label that this matches")
    parser.add_argument(
        "--jobs", type=int, default=6 * (os.cpu_count() or 1), help="at most; fewer unless processors are idle"
    )
    parser.add_argument("--junit", type=Path)
    parser.add_argument("--seconds", type=Path, help="what the cases took before; brought up to date")
    parser.add_argument("--done", type=Path, help="names of what passed before, left out; grows")
    parser.add_argument("--patience", type=float, default=float(os.environ.get("TESSERA_TEST_PATIENCE", "1")))
    options = parser.parse_args()

    seconds = read_seconds(options.seconds)
    report = Report()
    done: frozenset[str] = frozenset()
    if options.done:
        options.done.parent.mkdir(parents=True, exist_ok=True)
        report.passed = options.done.open("a+", buffering=1, encoding="utf-8")
        report.passed.seek(0)
        done = frozenset(report.passed.read().split("\n"))
    runner = Runner(report, options.patience)
    tests = registered(options.build)
    for test, cases in selected(tests, options.labels, options.without, options.filter, done):
        report.total += max(1, len(cases))
        for batch in deal(test, cases, seconds) or [Batch(test, [], seconds.get(test.name, 1.0))]:
            runner.add(batch)

    begin = time.monotonic()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's background job ignores it, and so would `tessera run`
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda *_: runner.stop())
    workers = [threading.Thread(target=runner.work) for _ in range(options.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    if options.junit:
        report.write_junit(options.junit, str(options.build))
    if options.seconds:
        seconds |= {name: round(result.seconds, 2) for name, result in report.results.items()}
        options.seconds.parent.mkdir(parents=True, exist_ok=True)
        options.seconds.write_text(json.dumps(seconds, indent=0, sort_keys=True))
    failed = sorted(name for name, result in report.results.items() if result.state == "failed")
    for name in failed:
        print(f"FAILED {name}")
    for name in report.running:
        print(f"running at the end: {name}")
    print(f"{len(report.results)} of {report.total} cases in {time.monotonic() - begin:.0f} s, {len(failed)} failed")
    return 1 if failed or runner.stopping else 0


if __name__ == "__main__":
    sys.exit(main())
