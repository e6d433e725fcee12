"""Instructions of the hot paths, counted by callgrind: the same on a busy machine as on a quiet one.

Each run is held against a baseline, which stays as it is until a run is told to replace it (``--rebase``), so that
small losses do not add up unseen: a case misses its target when it takes 3 % more. Callgrind knows no AVX-512: the
widest kernels counted are those of AVX2. Waiting for another rank is left out, since it takes as many instructions as
it takes time.
"""

from __future__ import annotations

import datetime
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import results

LEAST_RATIO = 0.97
WAIT = "ShmTransport::await_others"
BASELINE = Path(__file__).parent / "instructions_baseline.json"


def inclusive(dump: Path, function: str) -> int:
    """Instructions in a function and what it calls."""
    text = subprocess.run(
        ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(dump)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = [line for line in text.splitlines() if function in line and "'2" not in line]
    numbers = [line.split()[0].replace(",", "") for line in found]
    return max((int(number) for number in numbers if number != "."), default=0)  # ".": none


def counts(program: Path) -> dict[str, float]:
    """By case, what it takes by element or call."""
    if shutil.which("valgrind") is None:
        raise RuntimeError("valgrind is not installed: ./dev setup")
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


def baseline() -> dict[str, Any]:
    """Its ``date``, the ``compiler`` of what was counted, and ``counts`` by case."""
    return dict(json.loads(BASELINE.read_text(encoding="utf-8")))


def compiler_of(program: Path) -> str:
    """As the compiler wrote it into the program: "GCC: (Debian 12.2.0-14+deb12u1) 12.2.0"."""
    dump = subprocess.run(["readelf", "-p", ".comment", str(program)], capture_output=True, text=True, check=True)
    found = re.findall(r"\]\s+(.+)$", dump.stdout, re.MULTILINE)
    return found[-1].strip() if found else "unknown"


def rebase(found: dict[str, float], compiler: str) -> None:
    made = {"date": datetime.date.today().isoformat(), "compiler": compiler, "counts": found}
    BASELINE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def beside_baseline(found: dict[str, float], base: dict[str, Any]) -> list[results.Case]:
    lost = base["counts"].keys() - found.keys()
    if not any("AVX2" in name for name in found):  # a machine without
        lost = {name for name in lost if "AVX2" not in name}
    if lost:
        raise RuntimeError(f"of the baseline these were not counted: {', '.join(sorted(lost))}")
    name_of = f"baseline of {base['date']}"
    cases = []
    for name, now in found.items():
        known = name in base["counts"]
        rounds = [(now, base["counts"].get(name, now))]
        cases.append(
            results.case(
                name, "instructions", name_of if known else "none: --rebase adds it", rounds,
                LEAST_RATIO if known else None, smaller_is_better=True,
            )
        )  # fmt: skip
    return cases


def bench(binaries: Path, *, replace_baseline: bool) -> list[results.Case]:
    program = binaries / "instructions"
    found = counts(program)
    if replace_baseline:
        rebase(found, compiler_of(program))
    base = baseline()
    if base["compiler"] != (here := compiler_of(program)):
        print(
            f"the baseline was counted of what {base['compiler']} made, this of {here}: other counts are no regression"
        )
    return beside_baseline(found, base)
