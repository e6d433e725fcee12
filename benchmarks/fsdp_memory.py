"""Predicted memory of a fully sharded step next to what `./dev bench fsdp_memory` measured, for docs/MEMORY.md.

The model is benchmarks/ddp_rank.py's transformer: a root unit with the words, whole throughout, and a unit a layer.
"""

from __future__ import annotations

import math
import re

import results
from transformer import LAYERS, WIDTH, shapes

MIB = 1 << 20
OURS, PEER, STRICT, ALONE = (
    "Tessera",
    "PyTorch FSDP2, gloo",
    "PyTorch FSDP2 without gathers in flight",
    "not sharded",
)
COLORS = {OURS: "#2b6cb0", PEER: "#b7791f", STRICT: "#2f855a"}
NAMES = {OURS: "Tessera", PEER: "PyTorch FSDP2", STRICT: "FSDP2 without gathers in flight"}


def unit_bytes() -> tuple[float, float]:
    """Of the root and of a layer, f32."""
    sizes = {name: math.prod(shape) for name, shape in shapes().items()}
    layer = sum(size for name, size in sizes.items() if name.startswith("0.")) + 2 * WIDTH  # a second norm
    return 4.0 * (sizes["words"] + (64 + 2) * WIDTH), 4.0 * layer


def predicted(kind: str, ranks: int) -> float:
    """MiB of whole parameters on a host, a prefetch of 1: the root, the layer that computes and one on its way."""
    root, layer = unit_bytes()
    alone = kind == PEER and ranks == 1  # FSDP2 gathers nothing then
    each = root + layer if kind == STRICT or alone else root + 2 * layer
    return each * (1 if kind == OURS else ranks) / MIB


def states(copies: int) -> float:
    """MiB of so many copies of parameters, gradients and two moments."""
    root, layer = unit_bytes()
    return 4 * copies * (root + LAYERS * layer) / MIB


def measured(cases: list[results.Case], what: str) -> dict[tuple[str, int], float]:
    """MiB by kind and ranks."""
    found: dict[tuple[str, int], float] = {}
    for case in cases:
        if not case["case"].endswith(what):
            continue
        ranks = int(re.search(r", (\d+) ranks?:", case["case"])[1])  # type: ignore[index]
        found[OURS, ranks] = case["ours"]
        found[case["peer_name"], ranks] = case["peer"]
    return found


WHOLE, ALL = "full parameters on the host", "memory of all ranks"


def table(cases: list[results.Case]) -> str:
    whole, every = measured(cases, WHOLE), measured(cases, ALL)
    ranks_list = sorted({ranks for _, ranks in whole})
    asked = {case["case"]: case for case in cases if case["target"] is not None and case["case"].endswith(WHOLE)}
    head = [f"{ranks} rank{'s' if ranks > 1 else ''}" for ranks in ranks_list]
    rows = [["full parameters on the host, predicted / measured, MiB", *head], ["---"] * (1 + len(head))]
    for kind in (OURS, PEER, STRICT):
        cells = [f"{predicted(kind, ranks):.1f} / {whole[kind, ranks]:.1f}" for ranks in ranks_list]
        rows.append([NAMES[kind], *cells])
    told = []
    for ranks in ranks_list:
        case = next((case for name, case in asked.items() if f", {ranks} rank" in name), None)
        missed = " (missed)" if case is not None and results.missed_by(case) else ""
        told.append(f"1/{case['ratio']:.2f}, 1/{case['target']:.2f}{missed}" if case is not None else "")
    rows.append(["fraction of FSDP2's: measured, target", *told])
    totals = [["memory that the model adds, all ranks, MiB", *head], ["---"] * (1 + len(head))]
    for kind, name in ((ALONE, "not sharded, measured"), (OURS, "Tessera, measured"), (PEER, "FSDP2, measured")):
        totals.append([name, *(f"{every[kind, ranks]:.0f}" for ranks in ranks_list)])
    totals.append(["not sharded: states, by formula", *(f"{states(ranks):.0f}" for ranks in ranks_list)])
    totals.append(["Tessera, FSDP2: states, by formula", *(f"{states(1):.0f}" for _ in ranks_list)])
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in part) for part in (rows, totals))


LEFT, TOP, WIDE, HIGH = 60, 50, 420, 240


def plot(cases: list[results.Case]) -> str:
    """Lines: predicted whole parameters of a host by ranks. Dots: measured."""
    whole = measured(cases, WHOLE)
    ranks_list = sorted({ranks for _, ranks in whole})
    top = max([*whole.values(), *(predicted(PEER, ranks) for ranks in ranks_list)]) * 1.1

    def x(ranks: float) -> float:
        return LEFT + WIDE * (ranks - 0.5) / max(ranks_list)

    def y(value: float) -> float:
        return TOP + HIGH * (1 - value / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDE + 20} {TOP + HIGH + 50}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="full parameters of a host by ranks">',
        f'<rect width="{LEFT + WIDE + 20}" height="{TOP + HIGH + 50}" fill="#ffffff"/>',
    ]
    for i, (kind, color) in enumerate(COLORS.items()):
        at = LEFT + (0, 80, 200)[i]
        parts.append(f'<circle cx="{at}" cy="18" r="4" fill="{color}"/><text x="{at + 9}" y="22">{NAMES[kind]}</text>')
    for mark in range(0, int(top) + 1, 25):
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDE}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(mark) + 4:.1f}" text-anchor="end" fill="#555">{mark}</text>')
    for ranks in ranks_list:
        parts.append(f'<text x="{x(ranks):.1f}" y="{TOP + HIGH + 20}" text-anchor="middle" fill="#555">{ranks}</text>')
    parts.append(f'<text x="{LEFT + WIDE / 2}" y="{TOP + HIGH + 40}" text-anchor="middle">ranks of a host</text>')
    parts.append(f'<text x="{LEFT - 8}" y="{TOP - 10}" text-anchor="end">MiB</text>')
    for kind, color in COLORS.items():
        line = " ".join(f"{x(ranks):.1f},{y(predicted(kind, ranks)):.1f}" for ranks in ranks_list)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-dasharray="5 3"/>')
        for ranks in ranks_list:
            value = whole[kind, ranks]
            parts.append(f'<circle cx="{x(ranks):.1f}" cy="{y(value):.1f}" r="4" fill="{color}"/>')
    return "\n".join([*parts, "</svg>", ""])
