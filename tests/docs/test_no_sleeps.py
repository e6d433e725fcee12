"""No test sleeps: a sleep is too short on a slow machine and too long on every other. A test waits for a condition,
with a deadline (tests/patience.hpp), or has the clock in its hand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("tests", "bindings/python/tests", "bindings/java/src/test", "bindings/rust/tessera/tests")
ALLOWED = {
    "tests/docs/test_no_sleeps.py": "names them",
    "tests/mock_nccl/nccl.cc": "waits for ranks of other processes, in memory that cannot signal",
    "tests/patience.py": "until() pauses between its looks",
    "tests/simulated_cuda/driver.cc": "delays of a device that a test asks for",
}
SUFFIXES = (".c", ".cc", ".h", ".hpp", ".py", ".java", ".rs")
SLEEP = re.compile(
    r"\b(?:sleep_for|sleep_until|nanosleep|clock_nanosleep|usleep|sleep)\s*\("  # C, C++, and by an imported name
    r"|\b(?:time|asyncio)\.sleep\b"
    r"|\b(?:Thread|\w*SECONDS)\.sleep\b"
    r"|\bthread::(?:sleep|sleep_ms|sleep_until)\b"
)


def sleeps(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if SLEEP.search(line)]


def test_no_test_sleeps() -> None:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PLACES]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    sources = [ROOT / name for name in files if name.endswith(SUFFIXES) and name not in ALLOWED]
    for place in PLACES:
        assert any(source.is_relative_to(ROOT / place) for source in sources), place
    found = {
        str(source.relative_to(ROOT)): lines
        for source in sources
        if source.exists() and (lines := sleeps(source.read_text(encoding="utf-8")))
    }
    assert not found


def test_every_language_s_sleep_is_known() -> None:
    for line in (
        "std::this_thread::sleep_for(milliseconds{5});",
        "::nanosleep(&pause, nullptr);",
        "time.sleep(0.01)",
        "await asyncio.sleep(1)",
        "Thread.sleep(10);",
        "TimeUnit.MILLISECONDS.sleep(1);",
        "thread::sleep(Duration::from_millis(1));",
    ):
        assert sleeps(line), line
    assert not sleeps("/* the receiver sleeps by then */ 'sleep 30'")
