"""pytest that tells in a file, at once, what begins and how it ends, for whoever ends it before it writes its report.

    pytest_progress.py FILE [--workers N] [--filter REGEX] [--done PASSED] ARGUMENTS-OF-PYTEST...

With N workers, N processes share the files of tests: each takes the next one that none has taken. Each writes its own
FILE and report: `--junitxml=NAME.xml` becomes `NAME.1.xml` and so on. What a test marked `whole_run` judges is the work
of all: it runs in the worker that ends last, and finds their folder in TESSERA_TEST_SHARED.

A line of the file is a JSON list: ["begins", test], or [outcome, test, text]; outcomes are passed, failed and skipped.
A test that passed and then failed in its teardown has both. tools/tally.py reads it where there is no report.

REGEX is looked for in the tests' names, as `tests/interop/test_torch_ddp.py::test_hooks[2]`; others are left out.

PASSED is a file with a test a line: those that passed before, which are left out, and to which this run adds its own.
So a long run goes on where one was cut off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest


class Progress:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1, encoding="utf-8")
        self._before: frozenset[str] = frozenset()
        self._passed: TextIO | None = None
        self._filter = re.compile("")
        self._taken: Path | None = None  # a folder with a file for each file of tests that a worker has taken
        self._workers = 1

    def take_only(self, pattern: str) -> None:
        self._filter = re.compile(pattern)

    def share(self, folder: Path, workers: int) -> None:
        self._taken = folder
        self._workers = workers

    def keep_passed_in(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._before = frozenset(path.read_text(encoding="utf-8").split("\n")) if path.exists() else frozenset()
        self._passed = path.open("a", buffering=1, encoding="utf-8")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        taken, left_out = [], []
        for item in items:
            takes = self._filter.search(item.nodeid) and item.nodeid not in self._before
            (taken if takes else left_out).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = taken

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """pytest's own loop, over what this worker takes."""
        if self._taken is None or session.testsfailed or session.config.option.collectonly:
            return None
        judges = [item for item in session.items if item.get_closest_marker("whole_run")]
        self._run(session, self._shared([item for item in session.items if item not in judges], "tests"))
        (self._taken / f"ended-{os.getpid()}").touch()
        if len(list(self._taken.glob("ended-*"))) == self._workers:
            self._run(session, self._shared(judges, "judges"))
        return True

    @staticmethod
    def _run(session: pytest.Session, items: Iterator[pytest.Item]) -> None:
        """It takes the next file when the last test of one begins: pytest has to know then what to tear down."""
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following

    def _shared(self, items: list[pytest.Item], kind: str) -> Iterator[pytest.Item]:
        assert self._taken is not None
        ours = set()
        for file, tests in itertools.groupby(items, key=lambda item: item.nodeid.split("::")[0]):
            mark = self._taken / f"{kind}-{file.replace('/', '+')}"
            try:
                mark.touch(exist_ok=mark in ours)
            except FileExistsError:
                continue
            ours.add(mark)
            yield from tests

    def _write(self, *facts: str) -> None:
        self._file.write(json.dumps(facts) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("begins", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for setup, call and teardown."""
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._write("skipped", report.nodeid, str(reason).removeprefix("Skipped: "))
        elif report.failed or report.when == "call":
            self._write(report.outcome, report.nodeid, report.longreprtext)
            if report.passed and self._passed:
                self._passed.write(f"{report.nodeid}\n")


def numbered(path: str, number: int) -> str:
    return str(Path(path).with_suffix(f".{number}{Path(path).suffix}"))


def work_together(file: str, workers: int, arguments: list[str]) -> int:
    """The exit status of the first worker that failed. One that had nothing to do has not failed."""
    with tempfile.TemporaryDirectory(prefix="tessera-taken-") as taken:
        processes: list[subprocess.Popen[bytes]] = []
        signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in processes])
        for number in range(1, workers + 1):
            own = [
                f"--junitxml={numbered(word.removeprefix('--junitxml='), number)}"
                if word.startswith("--junitxml=")
                else word
                for word in arguments
            ]
            command = [sys.executable, __file__, numbered(file, number), "--share", taken, f"--of={workers}", *own]
            processes.append(subprocess.Popen(command))
        statuses = [process.wait() for process in processes]
    return next((status for status in statuses if status), 0)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("file")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--share", type=Path)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--filter", default="")
    parser.add_argument("--done", type=Path)
    options, arguments = parser.parse_known_args()
    if options.workers > 1:
        more = [f"--filter={options.filter}", *([f"--done={options.done}"] if options.done else []), *arguments]
        return work_together(options.file, options.workers, more)
    sys.path[0] = ""  # as `python -m pytest` has it
    progress = Progress(Path(options.file))
    progress.take_only(options.filter)
    if options.share:
        progress.share(options.share, options.of)
        os.environ["TESSERA_TEST_SHARED"] = str(options.share)
    if options.done:
        progress.keep_passed_in(options.done)
    return pytest.main(arguments, plugins=[progress])


if __name__ == "__main__":
    sys.exit(main())
