"""Result files of the benchmarks: a list of cases, each with the raw rounds that its ratio comes from.

A case is ``{"case", "metric", "ours", "peer", "peer_name", "ratio", "target", "rounds": [[ours, peer], ...]}``. The
``ratio`` is the median of the per-round ratios; above 1 means that ours is better. The ``target`` is the ratio asked
for, or null.

Of a case with ``"within"`` each round is ``[ours, peer, base]``, and what counts is what the first two take beyond
the base. Its ``ratio`` is the peer's over ours or more, its ``share`` ours over the base or less, each with 95 %
certainty. The target is met by either, the ratio or a share of at most ``within``.
"""

from __future__ import annotations

import json
import os
import platform
import random
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


def case_beyond(
    name: str,
    metric: str,
    peer_name: str,
    rounds: list[tuple[float, float, float]],
    target: float | None,
    within: float,
) -> Case:
    """One case of what ours and the peer's take beyond a base, from its interleaved rounds."""
    ratio, share = bounds_beyond(rounds)
    return {
        "case": name,
        "metric": metric,
        "ours": statistics.median(ours - base for ours, _, base in rounds),
        "peer": statistics.median(peer - base for _, peer, base in rounds),
        "peer_name": peer_name,
        "ratio": ratio,
        "share": share,
        "target": target,
        "within": within,
        "better": "smaller",
        "rounds": [list(each) for each in rounds],
    }


def bounds_beyond(rounds: list[tuple[float, float, float]]) -> tuple[float, float]:
    """The lower bound of the peer's excess over ours, and the upper one of ours over the base: the 5th and the 95th
    percentile of medians of samples with replacement. Less than a thousandth of the base is as good as nothing."""
    chance = random.Random(1)
    ratios, shares = [], []
    for _ in range(2000):
        sample = chance.choices(rounds, k=len(rounds))
        base = statistics.median(each[2] for each in sample)
        ours = statistics.median(each[0] - each[2] for each in sample)
        peer = statistics.median(each[1] - each[2] for each in sample)
        ratios.append(peer / max(ours, base / 1000))
        shares.append(ours / base)
    return sorted(ratios)[100], sorted(shares)[-101]


def is_met(c: Case) -> bool:
    """Whether a case meets its target, by the ratio and share that it tells; one without a target does."""
    return c["target"] is None or c["ratio"] >= c["target"] or ("within" in c and c["share"] <= c["within"])


def missed_by(c: Case) -> str | None:
    """What a case misses; None if nothing. Its ratio is computed anew."""
    if "within" in c:
        ratio, share = bounds_beyond([tuple(each) for each in c["rounds"]])
        if (ratio, share) != (c["ratio"], c["share"]):
            return f"the bounds {c['ratio']} and {c['share']} do not follow from the rounds ({ratio}, {share})"
        if is_met(c):
            return None
        targets = f"{c['target']:g}, or a share of {c['within']:g}"
        return f"against {c['peer_name']}: {ratio:.2f} and a share of {share:.3f}, target {targets}"
    ratio = ratio_of([tuple(pair) for pair in c["rounds"]], c["better"] == "smaller")
    if abs(ratio - c["ratio"]) > 1e-9 * max(1.0, abs(ratio)):
        return f"the ratio {c['ratio']} does not follow from the rounds ({ratio})"
    if not is_met(c):
        return f"against {c['peer_name']}: {ratio:.2f}, target {c['target']:g}"
    return None


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
    """Write ``results/<name>.json`` and, beside it, the machine. Of cases that tell their ``scenario`` those that ran
    replace the scenario's former ones, and the others stay; each tells its ``machine``."""
    RESULTS.mkdir(exist_ok=True)
    path, machine_path = RESULTS / f"{name}.json", RESULTS / f"{name}.machine.txt"
    measured_on = machine()
    ran = {case.get("scenario") for case in cases}
    if None not in ran:
        former = read(name) if path.exists() else []
        kept = [case for case in former if case["scenario"] not in ran]
        cases = kept + [{**case, "machine": machine()} for case in cases]
        scenarios: dict[str, list[str]] = {}
        for case in cases:
            of = scenarios.setdefault(case["machine"], [])
            if case["scenario"] not in of:
                of.append(case["scenario"])
        if len(scenarios) > 1:
            measured_on = "; ".join(f"{where} ({', '.join(of)})" for where, of in scenarios.items())
    path.write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")
    machine_path.write_text(measured_on + "\n", encoding="utf-8")
    return path


def read(name: str) -> list[Case]:
    return list(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def table(cases: list[Case]) -> str:
    """The cases as an aligned text table."""
    rows = [("case", "metric", "ours", "peer", "peer's name", "ratio", "target", "rounds (min..max ratio)")]
    for c in cases:
        smaller = c["better"] == "smaller"
        if "within" in c:
            of_rounds = f"{len(c['rounds'])} (95 % bounds; {c['share']:.1%} of the base)"
        else:
            ratios = sorted((p / o) if smaller else (o / p) for o, p in c["rounds"])
            of_rounds = f"{len(ratios)} ({ratios[0]:.2f}..{ratios[-1]:.2f})"
        verdict = "" if c["target"] is None else f"{c['target']:g}" + ("" if missed_by(c) is None else "  MISSED")
        rows.append(
            (
                c["case"], c["metric"], f"{c['ours']:.4g}", f"{c['peer']:.4g}", c["peer_name"], f"{c['ratio']:.2f}",
                verdict, of_rounds,
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
            if (why := missed_by(c)) is not None:
                print(f"{path.name}: {c['case']}: {why}")
                missed += 1
    print(f"{missed} missed" if missed else "every target is met")
    return 1 if missed else 0
