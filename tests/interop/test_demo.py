"""`./dev demo` does what it promises: a rank is killed, three go on from the checkpoint, and the report tells of it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT
from patience import patience


def test_the_demo_loses_a_rank_and_ends_well(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(ROOT / "examples" / "demo" / "demo.py"), "--out", str(out), "--pace", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(180))
    assert done.returncode == 0, done.stdout + done.stderr

    killed = re.search(r"kill -9 \d+: rank 2, the Java one, is gone after step (\d+)", done.stdout)
    resumed = re.search(r"resumed from step (\d+) with 3 ranks", done.stdout)
    accuracy = re.search(r"held-out accuracy ([\d.]+) %", done.stdout)
    assert killed, done.stdout
    assert resumed, done.stdout
    assert accuracy, done.stdout
    assert int(resumed[1]) % 50 == 0
    assert int(resumed[1]) < int(killed[1]) < 600
    assert float(accuracy[1]) >= 95
    if importlib.util.find_spec("torch") is not None:
        assert "HuggingFaceStorageReader" in done.stdout
        assert "bit-equal" in done.stdout

    # Each step up to the kill was done by four, each from the checkpoint on by three; none is missing.
    rows = [json.loads(line) for line in (out / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = {world: {row["step"] for row in rows if row["world"] == world and "loss" in row} for world in (3, 4)}
    assert steps[3] == set(range(int(resumed[1]) + 10, 601, 10))
    assert steps[4] >= set(range(10, int(killed[1]) + 1, 10))
    languages = {row["rank"]: row["lang"] for row in rows if row["world"] == 3}
    assert languages == {0: "c", 1: "python", 2: "rust"}

    page = (out / "report.html").read_text(encoding="utf-8")
    assert f"3 ranks go on from the checkpoint of step {resumed[1]}" in page
    assert f"kill -9 of the Java rank at step {killed[1]}" in page
    assert f"before, step {resumed[1]}" in page
    assert "after, step 600" in page
    assert page.count("SIGKILL from this demo") == 1
    assert "nothing is left to write" in page

    # Each rank found the same out about the held-out digits, and the report draws it.
    evaluated = [row for row in rows if "auroc" in row]
    assert {row["lang"] for row in evaluated} == {"c", "python", "rust"}
    [found] = {json.dumps({key: row[key] for key in row if key not in ("rank", "lang", "time")}) for row in evaluated}
    matrix = json.loads(found)["matrix"]
    assert sum(matrix) == 297
    cells = re.findall(r"<td[^>]*>(\d+)</td>", page.split('<table class="confusion">')[1].split("</table>")[0])
    assert list(map(int, cells)) == matrix
    assert page.count('<polyline class="roc"') == 6, "a curve per language, twice"
    for language in ("C", "Python", "Rust"):
        assert f"{language}: AUROC {json.loads(found)['auroc']:.6f}" in page
