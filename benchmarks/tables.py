"""Formats result files as tables for the pages: figures, units and targets."""

from __future__ import annotations

import re
from collections.abc import Callable

import results

KIB, MIB = 1 << 10, 1 << 20


def short(number: float) -> str:
    return f"{number:.0f}" if number >= 99.5 else f"{number:.2g}" if number >= 9.95 else f"{number:.2f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    kept = [row for row in rows if any(row[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *kept] if kept)


def measured_on(name: str, disk: str = ", ext4 on a virtual disk") -> str:
    machine = (results.RESULTS / f"{name}.machine.txt").read_text(encoding="utf-8").strip()
    return f"Measured on: {machine}{disk}."


def plain(name: str, disk: str = ", ext4 on a virtual disk") -> Callable[[list[results.Case]], str]:
    """One row per case: our value, the peer's, their ratio and the target."""

    def make(cases: list[results.Case]) -> str:
        rows = [[case["case"], with_unit(case["ours"], case["metric"]), peer(case), ratio(case), target(case)]
                for case in cases if case["peer_name"] != "none"]  # fmt: skip
        return measured_on(name, disk) + "\n\n" + table(["", "ours", "peer", "ratio", "target"], rows)

    return make


def peer(case: results.Case) -> str:
    return with_unit(case["peer"], case["metric"]) + ("" if case["peer_name"] == "bound" else f", {case['peer_name']}")


def ratio(case: results.Case) -> str:
    """The ratio; for a time beyond a base, a lower bound of the ratio and an upper bound of our share of the base."""
    if "within" not in case:
        return short(case["ratio"])
    # If the peer's time may be below zero, the ratio has no meaning.
    at_least = f"at least {short(case['ratio'])}, " if case["ratio"] > 0 else ""
    return f"{at_least}at most {case['share']:.1%} of the step"


def target(case: results.Case) -> str:
    if case["target"] is None:
        return ""
    or_share = f", or {case['within']:.0%} of the step" if case.get("within") else ""
    return f"{case['target']:.2g}{or_share}" + ("" if results.is_met(case) else " (missed)")


def with_unit(number: float, metric: str) -> str:
    """The number with a unit that keeps it short."""
    unit = metric.removesuffix(" a call").rsplit(" ", 1)[-1]
    if unit == "us" and number >= 999.5:
        return f"{short(number / 1e3)} ms"
    if unit == "s" and number < 0.1:
        return f"{short(number * 1e3)} ms"
    if unit.startswith("bytes"):
        return f"{short(number / (1 << 20))} MiB{unit[5:]}"
    return f"{number:.4f} {unit}" if 0 < number < 0.01 else f"{short(number)} {unit}"


def size_of(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB" if size >= KIB else f"{size} B"


def by_size(cases: list[results.Case], pattern: str, group: str, kind_of: Callable[[re.Match[str]], str]) -> str:
    """A table of cases whose names have a size, a number of ranks (or hosts) and a kind, as in ``pattern``. Each kind
    has one row of times and one row of ratios per peer. Each size has a column; a cell has the values for all numbers
    of ranks. A * marks a missed target."""
    cells: dict[tuple[str, str], dict[int, dict[int, results.Case]]] = {}
    for case in cases:
        if found := re.fullmatch(pattern, case["case"]):
            row = cells.setdefault((kind_of(found), case["peer_name"]), {})
            row.setdefault(int(found[1]), {})[int(found[2])] = case
    sizes = sorted({size for row in cells.values() for size in row})
    numbers = sorted({number for row in cells.values() for column in row.values() for number in column})
    rows: list[list[str]] = []
    kinds: set[str] = set()
    for (kind, peer), row in cells.items():
        if kind not in kinds:
            kinds.add(kind)
            times = [" / ".join(times_of([case["ours"] for case in row[size].values()])) for size in sizes]
            rows.append([kind, *times])
        ratios = [
            " / ".join(short(case["ratio"]) + ("" if results.is_met(case) else "*") for case in row[size].values())
            for size in sizes
        ]
        rows.append([f"against {peer}", *ratios])
    head = [f"{' / '.join(map(str, numbers))} {group}", *map(size_of, sizes)]
    return table(head, rows)


def times_of(microseconds: list[float]) -> list[str]:
    """All in the same unit, written after the last one."""
    in_ms = max(microseconds) >= 999.5
    numbers = [f"{number / 1e3 if in_ms else number:.2g}" for number in microseconds]
    numbers = [f"{float(number):g}" for number in numbers]
    return [*numbers[:-1], f"{numbers[-1]} {'ms' if in_ms else 'us'}"]
