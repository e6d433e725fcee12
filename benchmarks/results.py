"""Result files of the benchmarks: a list of cases, each with the raw rounds that its ratio comes from.

A case is ``{"case", "metric", "ours", "peer", "peer_name", "ratio", "target", "rounds": [[ours, peer], ...]}``. The
``ratio`` is the median of the per-round ratios; above 1 means that ours is better. The ``target`` is the ratio asked
for, or null.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Case = dict[str, Any]


def case(
    name: str,
    metric: str,
    peer_name: str,
    rounds: list[tuple[float, float]],
    target: float | None,
    *,
    smaller_is_better: bool,
) -> Case:
    """One case from its interleaved rounds."""
    return {
        "case": name,
        "metric": metric,
        "ours": statistics.median(ours for ours, _ in rounds),
        "peer": statistics.median(peer for _, peer in rounds),
        "peer_name": peer_name,
        "ratio": ratio_of(rounds, smaller_is_better),
        "target": target,
        "better": "smaller" if smaller_is_better else "larger",
        "rounds": [list(pair) for pair in rounds],
    }


def ratio_of(rounds: list[tuple[float, float]], smaller_is_better: bool) -> float:
    return statistics.median((peer / ours) if smaller_is_better else (ours / peer) for ours, peer in rounds)


def machine() -> str:
    """The machine in words, for the table's caption."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"


def write(name: str, cases: list[Case]) -> Path:
    """Write ``results/<name>.json`` and, beside it, the machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
    (RESULTS / f"{name}.machine.txt").write_text(machine() + "\n", encoding="utf-8")
    return path


def table(cases: list[Case]) -> str:
    """The cases as an aligned text table."""
    rows = [("case", "metric", "ours", "peer", "peer's name", "ratio", "target", "rounds (min..max ratio)")]
    for c in cases:
        smaller = c["better"] == "smaller"
        ratios = sorted((p / o) if smaller else (o / p) for o, p in c["rounds"])
        verdict = (
            "" if c["target"] is None else (f"{c['target']:g}" + ("" if c["ratio"] >= c["target"] else "  MISSED"))
        )
        rows.append(
            (
                c["case"], c["metric"], f"{c['ours']:.4g}", f"{c['peer']:.4g}", c["peer_name"], f"{c['ratio']:.2f}",
                verdict, f"{len(ratios)} ({ratios[0]:.2f}..{ratios[-1]:.2f})",
            )
        )  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def check() -> int:
    """Recompute every ratio from its rounds and print what misses its target. 0 if nothing does."""
    missed = 0
    for path in sorted(RESULTS.glob("*.json")):
        for c in json.loads(path.read_text(encoding="utf-8")):
            ratio = ratio_of([tuple(pair) for pair in c["rounds"]], c["better"] == "smaller")
            if abs(ratio - c["ratio"]) > 1e-9 * max(1.0, abs(ratio)):
                print(f"{path.name}: {c['case']}: the ratio {c['ratio']} does not follow from the rounds ({ratio})")
                missed += 1
            elif c["target"] is not None and ratio < c["target"]:
                print(f"{path.name}: {c['case']} against {c['peer_name']}: {ratio:.2f}, target {c['target']:g}")
                missed += 1
    print(f"{missed} missed" if missed else "every target is met")
    return 1 if missed else 0
