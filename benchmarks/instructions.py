"""Instructions of the hot paths, counted by callgrind: the same on a busy machine as on a quiet one.

What is recorded is the count of the last run that was written, beside the one before it: a case misses its target when
it takes 3 % more than was recorded. Callgrind knows no AVX-512: the widest kernels counted are those of AVX2. Waiting
for another rank is left out, since it takes as many instructions as it takes time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import results

LEAST_RATIO = 0.97
WAIT = "ShmTransport::await_others"


def inclusive(dump: Path, function: str) -> int:
    """Instructions in a function and what it calls."""
    text = subprocess.run(
        ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(dump)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = [line for line in text.splitlines() if function in line and "'2" not in line]
    return max((int(line.split()[0].replace(",", "")) for line in found), default=0)


def counts(program: Path) -> dict[str, float]:
    """By case, what it takes by element or call."""
    if shutil.which("valgrind") is None:
        raise RuntimeError("valgrind is not installed: ./dev setup --bench")
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        out = f"--callgrind-out-file={directory}/%p"
        done = subprocess.run(
            ["valgrind", "--tool=callgrind", out, str(program)], capture_output=True, text=True, timeout=900
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed ({done.returncode}): {done.stderr[-2000:]}")
        for dump in sorted(Path(directory).iterdir(), key=lambda path: [int(part) for part in path.name.split(".")]):
            text = dump.read_text(encoding="utf-8", errors="replace")
            named = re.search(r"^desc: Trigger: Client Request: (.*)/(\d+)$", text, re.MULTILINE)
            total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            if named is None or total is None:
                continue
            taken = int(total[1]) - (inclusive(dump, WAIT) if "ranks" in named[1] else 0)
            each = taken / int(named[2])
            found[named[1]] = min(each, found.get(named[1], each))  # of several rounds the least
    return found


def bench(binaries: Path) -> list[results.Case]:
    path = results.RESULTS / "instructions.json"
    recorded = {case["case"]: case["ours"] for case in results.read("instructions")} if path.exists() else {}
    return [
        results.case(
            name, "instructions", "recorded", [(now, recorded.get(name, now))], LEAST_RATIO, smaller_is_better=True
        )
        for name, now in counts(binaries / "instructions").items()
    ]
