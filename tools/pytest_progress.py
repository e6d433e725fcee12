"""pytest that tells in a file, at once, what begins and how it ends, for whoever ends it before it writes its report.

    pytest_progress.py FILE [--filter REGEX] [--done PASSED] ARGUMENTS-OF-PYTEST...

A line of the file is a JSON list: ["begins", test], or [outcome, test, text]; outcomes are passed, failed and skipped.
A test that passed and then failed in its teardown has both. tools/tally.py reads it where there is no report.

REGEX is looked for in the tests' names, as `tests/interop/test_torch_ddp.py::test_hooks[2]`; others are left out.

PASSED is a file with a test a line: those that passed before, which are left out, and to which this run adds its own.
So a long run goes on where one was cut off.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TextIO

import pytest


class Progress:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1, encoding="utf-8")
        self._before: frozenset[str] = frozenset()
        self._passed: TextIO | None = None
        self._filter = re.compile("")

    def take_only(self, pattern: str) -> None:
        self._filter = re.compile(pattern)

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


if __name__ == "__main__":
    sys.path[0] = ""  # as `python -m pytest` has it
    progress, arguments = Progress(Path(sys.argv[1])), sys.argv[2:]
    if arguments[:1] == ["--filter"]:
        progress.take_only(arguments[1])
        arguments = arguments[2:]
    if arguments[:1] == ["--done"]:
        progress.keep_passed_in(Path(arguments[1]))
        arguments = arguments[2:]
    sys.exit(pytest.main(arguments, plugins=[progress]))
