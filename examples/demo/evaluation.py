"""What the ranks found out about the held-out digits, and its drawings: a confusion matrix and ROC curves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from charts import COLORS, LANGUAGES

CLASSES = 10
Points = list[tuple[float, float]]  # (false positive rate, true positive rate), from (0, 0) to (1, 1)


@dataclass
class Evaluation:
    """One rank's, as it logged it; examples/README.md has the form."""

    language: str
    auroc: float
    matrix: list[list[int]]  # by true digit, then recognised digit
    curves: list[Points]  # of each digit against the rest

    @classmethod
    def of(cls, row: dict[str, Any]) -> Evaluation:
        matrix = [row["matrix"][CLASSES * i : CLASSES * (i + 1)] for i in range(CLASSES)]
        curves = [list(zip(row[f"fpr.{i}"], row[f"tpr.{i}"], strict=True)) for i in range(CLASSES)]
        return cls(row["lang"], row["auroc"], matrix, curves)


def confusion_table(matrix: list[list[int]]) -> str:
    """A cell's shade is its share of its row. Mistakes have a frame, so that a print without colours shows them too."""
    head = "".join(f"<th>{digit}</th>" for digit in range(CLASSES))
    rows = []
    for digit, row in enumerate(matrix):
        cells = []
        for recognised, count in enumerate(row):
            share = count / max(sum(row), 1)
            # A single mistake has to be seen: shades of mistakes are those of the square root of their share.
            color = f"43,108,176,{share:.2f}" if recognised == digit else f"192,57,43,{share**0.5:.2f}"
            kind = ' class="dark"' if share > 0.55 and recognised == digit else "" if count else ' class="none"'
            if count and recognised != digit:
                kind = ' class="mistake"'
            cells.append(f'<td{kind} style="background:rgba({color})">{count}</td>')
        rows.append(f"<tr><th>{digit}</th>{''.join(cells)}</tr>")
    return f'<table class="confusion"><tr><th></th>{head}</tr>{"".join(rows)}</table>'


def macro_average(curves: list[Points]) -> Points:
    """The mean of the curves at each false positive rate. The area under it is the mean of theirs."""
    points: Points = []
    for rate in sorted({x for curve in curves for x, _ in curve}):
        for end in (min, max):  # where a curve rises straight up, and there alone, the two differ
            points.append((rate, sum(height(curve, rate, end) for curve in curves) / len(curves)))
    return points


def height(curve: Points, rate: float, end: Callable[..., float]) -> float:
    at_rate = [y for x, y in curve if x == rate]
    if at_rate:
        return end(at_rate)
    (x0, y0), (x1, y1) = max(p for p in curve if p[0] < rate), min(p for p in curve if p[0] > rate)
    return y0 + (y1 - y0) * (rate - x0) / (x1 - x0)


def area(points: Points) -> float:
    return sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points))


def roc_chart(evaluations: list[Evaluation], size: int, corner: float) -> str:
    """The mean curves of the digits, a curve per language, in the corner of the best values: false positive rates up to
    `corner`, true positive rates from 1 - `corner`. They lie on each other, so later ones are thinner."""
    left, right, top = 52, 16, 10
    side, number = size - left - right, len(evaluations)

    def x(rate: float) -> float:
        return left + side * rate / corner

    def y(rate: float) -> float:
        return top + side * (1 - rate) / corner

    name = "ROC curves" if corner == 1 else "the corner of the ROC curves, magnified"
    plot = f'x="{left - 4}" y="{top - 4}" width="{side + 8}" height="{side + 8}"'  # with the lines on its border
    parts = [f'<svg viewBox="0 0 {size} {size}" role="img" aria-label="{name}">']
    parts.append(f'<clipPath id="roc-{corner:g}"><rect {plot}/></clipPath>')
    for i in range(6):
        rate = corner * i / 5
        at_x, at_y = x(rate), y(1 - rate)
        parts.append(f'<line class="grid" x1="{at_x:.1f}" x2="{at_x:.1f}" y1="{top}" y2="{top + side}"/>')
        parts.append(f'<line class="grid" x1="{left}" x2="{left + side}" y1="{at_y:.1f}" y2="{at_y:.1f}"/>')
        parts.append(f'<text class="axis" x="{at_x:.1f}" y="{top + side + 16}" text-anchor="middle">{rate:.3g}</text>')
        parts.append(f'<text class="axis" x="{left - 6}" y="{at_y + 4:.1f}" text-anchor="end">{1 - rate:.3g}</text>')
    middle = top + side / 2
    below = f'x="{left + side / 2:.0f}" y="{size - 8}" text-anchor="middle"'
    parts.append(f'<text class="axis" {below}>false positive rate</text>')
    turned = f'x="12" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 12 {middle:.0f})"'
    parts.append(f'<text class="axis" {turned}>true positive rate</text>')
    parts.append(f'<g clip-path="url(#roc-{corner:g})">')
    parts.append(f'<line class="chance" x1="{x(0):.1f}" y1="{y(0):.1f}" x2="{x(1):.1f}" y2="{y(1):.1f}"/>')
    for i, evaluation in enumerate(evaluations):
        text = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in macro_average(evaluation.curves))
        style = f'stroke="{COLORS[evaluation.language]}" stroke-width="{1.5 + 2.5 * (number - 1 - i):g}"'
        parts.append(f'<polyline class="roc" points="{text}" fill="none" {style}/>')
    return "".join([*parts, "</g></svg>"])


def evaluation_section(evaluations: list[Evaluation]) -> str:
    rows = sum(map(sum, evaluations[0].matrix))
    legend = "".join(
        f'<span><i style="background:{COLORS[one.language]}"></i>{LANGUAGES[one.language]}: '
        f"AUROC {one.auroc:.6f}</span>"
        for one in evaluations
    )
    return (
        f'<p class="sub">Each rank recognised its share of the {rows} held-out digits. Tessera\'s metrics computed '
        "the rest over all ranks; each has the same values.</p>"
        f'<div class="three"><section><h4>Confusion matrix</h4>{confusion_table(evaluations[0].matrix)}'
        '<p class="sub">Rows: true digits. Columns: what they were recognised as.</p></section>'
        f"<section><h4>ROC, mean of each digit against the rest</h4>{roc_chart(evaluations, 350, 1)}</section>"
        f"<section><h4>Its corner, magnified 20 times</h4>{roc_chart(evaluations, 350, 0.05)}</section></div>"
        f'<p class="legend">{legend}<span>dashed: chance</span></p>'
    )
