"""The demo's report: one self-contained HTML page with hand-made SVG, no script and no network."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field
from pathlib import Path

COLORS = {"c": "#3b7dd8", "python": "#e0a526", "java": "#c94f4f", "rust": "#7a5cc0"}
LANGUAGES = {"c": "C", "python": "Python", "java": "Java", "rust": "Rust"}


@dataclass
class Piece:
    """A box of a tensor and the rank whose file holds it."""

    rank: int
    offsets: list[int]
    shape: list[int]


@dataclass
class TensorPicture:
    name: str
    dtype: str
    shape: list[int]
    pieces: list[Piece]


@dataclass
class Run:
    """Everything that the report shows."""

    loss: list[tuple[float, int, int, float]]  # seconds since the start, step, world size, loss
    accuracy: float
    kill: tuple[float, int, str]  # seconds, step, language
    restart: tuple[float, int]  # seconds, step that training went on from
    ranks: list[tuple[int, str, int, int]]  # round, language, rank, pid
    tensors: list[TensorPicture]
    checkpoint_languages: dict[int, str]  # rank of the last world -> language
    timings: list[tuple[str, str]]
    checks: list[tuple[str, str]]
    tree: str = ""
    notes: list[str] = field(default_factory=list)


def language_tag(language: str) -> str:
    return f'<span class="tag" style="background:{COLORS[language]}">{LANGUAGES[language]}</span>'


def loss_curve(run: Run) -> str:
    """Loss over steps, logarithmic, with the kill and the restart marked. Steps done twice are drawn twice."""
    width, height, left, bottom, top = 860, 300, 56, 34, 16
    max_step = max(step for _, step, _, _ in run.loss)
    logs = [math.log10(max(loss, 1e-6)) for *_, loss in run.loss]
    low, high = math.floor(min(logs)), math.ceil(max(logs))

    def x(step: float) -> float:
        return left + (width - left - 10) * step / max_step

    def y(value: float) -> float:
        return top + (height - top - bottom) * (high - value) / max(high - low, 1)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss over steps">']
    for exponent in range(low, high + 1):
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - 10}" y1="{y(exponent):.1f}" y2="{y(exponent):.1f}"/>'
        )
        parts.append(
            f'<text class="axis" x="{left - 8}" y="{y(exponent) + 4:.1f}" text-anchor="end">{10.0**exponent:g}</text>'
        )
    for i in range(5):
        step = max_step * i // 4
        anchor = "middle" if i < 4 else "end"
        parts.append(
            f'<text class="axis" x="{x(step):.1f}" y="{height - 12}" text-anchor="{anchor}">step {step}</text>'
        )
    for world, color in ((4, "#2b6cb0"), (3, "#2f855a")):
        points = " ".join(
            f"{x(step):.1f},{y(value):.1f}"
            for (_, step, size, _), value in zip(run.loss, logs, strict=True)
            if size == world
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    killed, resumed = run.kill[1], run.restart[1]
    parts.append(f'<line class="kill" x1="{x(killed):.1f}" x2="{x(killed):.1f}" y1="{top}" y2="{height - bottom}"/>')
    parts.append(
        f'<text class="kill" x="{x(killed) + 6:.1f}" y="{top + 12}">kill -9 of the {LANGUAGES[run.kill[2]]} rank</text>'
    )
    parts.append(
        f'<line class="resume" x1="{x(resumed):.1f}" x2="{x(resumed):.1f}" y1="{top}" y2="{height - bottom}"/>'
    )
    parts.append(
        f'<text class="resume" x="{x(resumed) - 6:.1f}" y="{top + 28}" text-anchor="end">'
        f"3 ranks go on from step {resumed}</text>"
    )
    parts.append("</svg>")
    legend = '<p class="legend"><b style="color:#2b6cb0">4 ranks</b> &nbsp; <b style="color:#2f855a">3 ranks</b></p>'
    return "".join(parts) + legend


def tensor_picture(tensor: TensorPicture, languages: dict[int, str]) -> str:
    """A tensor as a rectangle, cut into the boxes that each rank's file holds."""
    rows, columns = [*tensor.shape, 1, 1][:2]
    width = 40 + 120 * min(1.0, columns / 64)
    height = 14 + 70 * min(1.0, rows / 128)
    parts = [f'<svg class="tensor" width="{width:.0f}" height="{height:.0f}">']
    for piece in tensor.pieces:
        py, px = [*piece.offsets, 0, 0][:2]
        ph, pw = [*piece.shape, 1, 1][:2]
        color = COLORS[languages[piece.rank]]
        parts.append(
            f'<rect x="{width * px / columns:.1f}" y="{height * py / rows:.1f}" width="{width * pw / columns:.1f}" '
            f'height="{height * ph / rows:.1f}" fill="{color}"><title>rank {piece.rank}: offsets {piece.offsets}, '
            f"shape {piece.shape}</title></rect>"
        )
    parts.append("</svg>")
    holders = ", ".join(sorted({f"rank {p.rank} ({LANGUAGES[languages[p.rank]]})" for p in tensor.pieces}))
    shape = " × ".join(map(str, tensor.shape)) or "scalar"
    return (
        f"<tr><td><code>{html.escape(tensor.name)}</code></td><td>{tensor.dtype}</td><td>{shape}</td>"
        f"<td>{''.join(parts)}</td><td>{holders}</td></tr>"
    )


def file_bars(run: Run) -> str:
    """A bar for each rank's file, cut into the tensors that it holds, all to one scale of bytes."""
    left, width, row, gap = 110, 740, 26, 8
    held: dict[int, list[tuple[int, str]]] = {rank: [] for rank in sorted(run.checkpoint_languages)}
    for tensor in run.tensors:
        size = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}.get(tensor.dtype, 1)
        for piece in tensor.pieces:
            held[piece.rank].append((math.prod(piece.shape) * size, tensor.name))
    largest = max(sum(size for size, _ in parts) for parts in held.values())
    parts = [f'<svg viewBox="0 0 {left + width + 10} {(row + gap) * len(held)}" role="img" aria-label="bytes a file">']
    for number, (rank, pieces) in enumerate(held.items()):
        y, x = number * (row + gap), float(left)
        language = run.checkpoint_languages[rank]
        parts.append(f'<text x="0" y="{y + 17}">rank {rank} ({LANGUAGES[language]})</text>')
        if not pieces:
            parts.append(f'<text class="axis" x="{left}" y="{y + 17}">nothing to write</text>')
        for size, name in sorted(pieces, reverse=True):
            part = width * size / largest
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{part:.1f}" height="{row}" fill="{COLORS[language]}" stroke="#fff">'
                f"<title>{html.escape(name)}: {size} bytes</title></rect>"
            )
            if part > 7 * len(name):
                parts.append(f'<text class="label" x="{x + 5:.1f}" y="{y + 17}">{html.escape(name)}</text>')
            x += part
    return "".join([*parts, "</svg>"])


STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:920px;margin:2rem auto;padding:0 1rem;color:#1f2933;background:#fff}
h1{margin-bottom:0} h2{margin-top:2.2rem;border-bottom:1px solid #e1e5ea;padding-bottom:.2rem}
.sub{color:#66727f;margin-top:.2rem} .big{font-size:2.6rem;font-weight:650} .cards{display:flex;gap:1rem;flex-wrap:wrap}
.card{border:1px solid #e1e5ea;border-radius:10px;padding:.8rem 1.2rem;flex:1;min-width:11rem}
.card span{color:#66727f;display:block} .tag{color:#fff;border-radius:4px;padding:.05rem .5rem;font-size:.85rem}
table{border-collapse:collapse;width:100%} td,th{padding:.35rem .6rem;border-bottom:1px solid #eef1f4;text-align:left}
svg text{font-family:system-ui,sans-serif;font-size:13px} svg .grid{stroke:#e1e5ea}
svg .axis{fill:#66727f;font-size:12px} svg .label{fill:#fff;font-size:11px}
svg line.kill{stroke:#c0392b;stroke-dasharray:5 3} svg text.kill{fill:#c0392b}
svg line.resume{stroke:#2f855a;stroke-dasharray:2 3} svg text.resume{fill:#2f855a}
svg.tensor{background:#f4f6f8;display:block} .legend{margin:.2rem 0 0 3.5rem;font-size:.9rem}
pre{background:#f4f6f8;padding:1rem;border-radius:8px;overflow-x:auto;font-size:.82rem;line-height:1.4}
.ok{color:#2f855a;font-weight:600}
"""


def write_report(run: Run, path: Path) -> None:
    """Write the page to ``path``."""
    first = min(number for number, *_ in run.ranks)
    rank_rows = "".join(
        f"<tr><td>{'before the kill' if number == first else 'after it'}</td><td>{rank}</td>"
        f"<td>{language_tag(language)}</td><td>{pid}</td></tr>"
        for number, language, rank, pid in run.ranks
    )
    tensors = "".join(tensor_picture(tensor, run.checkpoint_languages) for tensor in run.tensors)
    timings = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in run.timings
    )
    checks = "".join(
        f'<tr><td class="ok">✓</td><td>{html.escape(what)}</td><td>{html.escape(result)}</td></tr>'
        for what, result in run.checks
    )
    languages = " ".join(map(language_tag, COLORS))
    notes = "".join(f"<p class=sub>{html.escape(note)}</p>" for note in run.notes)
    path.write_text(
        f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Tessera demo</title>
<style>{STYLE}</style></head><body>
<h1>One training job, four languages</h1>
<p class="sub">Handwritten digits, a 64-128-10 network, data-parallel over ranks written in {languages}.
One rank was killed in mid-training; the others went on from the shared checkpoint.</p>
<div class="cards">
<div class="card"><span>held-out accuracy</span><div class="big">{run.accuracy * 100:.1f} %</div></div>
<div class="card"><span>ranks</span><div class="big">4 → 3</div></div>
<div class="card"><span>killed at step, went on from</span><div class="big">{run.kill[1]} → {run.restart[1]}</div></div>
</div>
<h2>Loss</h2>{loss_curve(run)}
<h2>Ranks</h2><table><tr><th></th><th>rank</th><th>language</th><th>pid</th></tr>{rank_rows}</table>
<h2>Which rank's file holds which part of each tensor</h2>
<p class="sub">Data-parallel ranks all hold the whole model, and each part of it is written once. Tensors of 4 MiB and
more are cut into row blocks over the ranks. Smaller ones, as all of these are, are packed into runs of 64 KiB or more,
and a run goes to the rank that has least to write; a model as small as this leaves nothing for the last rank.</p>
{file_bars(run)}
<table><tr><th>tensor</th><th>dtype</th><th>shape</th><th></th><th>in the file of</th></tr>{tensors}</table>
<h2>Checked afterwards</h2><table>{checks}</table>{notes}
<h2>Timings</h2><table>{timings}</table>
<h2>tessera ckpt tree</h2><pre>{html.escape(run.tree)}</pre>
</body></html>
""",
        encoding="utf-8",
    )
