"""pytest that tells in a file, at once, what begins and how it ends, for whoever ends it before it writes its report.

    pytest_progress.py FILE ARGUMENTS-OF-PYTEST...

A line of the file is a JSON list: ["begins", test], or [outcome, test, text]; outcomes are passed, failed and skipped.
A test that passed and then failed in its teardown has both. tools/tally.py reads it where there is no report.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


class Progress:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1, encoding="utf-8")

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


if __name__ == "__main__":
    sys.path[0] = ""  # as `python -m pytest` has it
    sys.exit(pytest.main(sys.argv[2:], plugins=[Progress(Path(sys.argv[1]))]))
