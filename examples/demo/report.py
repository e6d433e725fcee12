"""The demo's report: one self-contained HTML page, no script and no network, for wide screens and for narrow ones."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from pathlib import Path

from charts import AFTER, BEFORE, COLORS, LANGUAGES, Curve, Part, TensorPicture, file_bars, loss_chart, tensor_picture
from evaluation import Evaluation, evaluation_section

COUNTS = {1: "one rank", 2: "two ranks", 3: "three ranks", 4: "four ranks"}


@dataclass
class Run:
    """Everything that the report shows."""

    curve: Curve
    accuracy: float
    evaluations: list[Evaluation]  # of the ranks in the end
    before: Part
    after: Part
    timings: list[tuple[str, str]]
    checks: list[tuple[str, str]]
    tree: str = ""
    notes: list[str] = field(default_factory=list)


def language_tag(language: str) -> str:
    return f'<span class="tag" style="background:{COLORS[language]}">{LANGUAGES[language]}</span>'


def legend(when: str, part: Part) -> str:
    """Whose colour is whose."""
    entries = (
        f'<span><i style="background:{COLORS[rank.language]}"></i>rank {rank.rank}: {LANGUAGES[rank.language]}</span>'
        for rank in part.ranks
    )
    return f'<p class="legend"><b>{when}</b>{"".join(entries)}</p>'


def loss_section(run: Run) -> str:
    again = run.curve.killed - run.curve.resumed
    return (
        f'<div class="wide">{loss_chart(run.curve, 900, 330)}</div>'
        f'<div class="narrow">{loss_chart(run.curve, 380, 300)}</div>'
        f'<p class="legend"><span><i style="background:{BEFORE}"></i>{COUNTS[len(run.before.ranks)]}</span>'
        f'<span><i style="background:{AFTER}"></i>{COUNTS[len(run.after.ranks)]}</span>'
        f'<span><i class="again"></i>{again} steps that were done again</span></p>'
    )


def rank_table(part: Part) -> str:
    rows = "".join(
        f'<tr><td>{rank.rank}</td><td>{language_tag(rank.language)}</td><td class="key">{rank.pid}</td>'
        f"<td>{html.escape(rank.end)}</td></tr>"
        for rank in part.ranks
    )
    return f"<table><tr><th>rank</th><th>language</th><th>pid</th><th>ended</th></tr>{rows}</table>"


def packing(part: Part) -> str:
    """Why some ranks of `part` write nothing, in the figures of this run."""
    total = sum(size for rank in part.ranks for size, _ in part.pieces_of(rank.rank))
    idle = [f"rank {rank.rank}" for rank in part.ranks if not part.pieces_of(rank.rank)]
    if not idle:
        return f"Here {total / 1024:.0f} KiB are enough for a file of each rank."
    files = len(part.ranks) - len(idle)
    return (
        f"Here all is {total / 1024:.0f} KiB, {files} such {'run' if files == 1 else 'runs'}: "
        f"{' and '.join(idle)} {'holds' if len(idle) == 1 else 'hold'} the whole model too, but "
        f"{'has' if len(idle) == 1 else 'have'} nothing to write."
    )


def column(title: str, part: Part, largest: int) -> str:
    return (
        f"<section><h3>{title}: {COUNTS[len(part.ranks)]}</h3>{rank_table(part)}"
        f"<h4>Files of the checkpoint of step {part.step}</h4>{file_bars(part, largest)}"
        f'<p class="sub">{packing(part)}</p></section>'
    )


def tensor_rows(before: Part, after: Part) -> str:
    """Each tensor once, as it lay in the files before the kill and after it."""
    old, new = ({tensor.name: tensor for tensor in part.tensors} for part in (before, after))
    rows = []
    for name in sorted({*old, *new}):
        tensor: TensorPicture = new.get(name) or old[name]
        shape = " × ".join(map(str, tensor.shape)) or "scalar"
        rows.append(
            f"<tr><td><code>{html.escape(name)}</code><small>{tensor.dtype}, {shape}</small></td>"
            f"<td>{tensor_picture(old.get(name), before)}</td><td>{tensor_picture(new.get(name), after)}</td></tr>"
        )
    return "".join(rows)


STYLE = """
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#1f2933;background:#fff}
h1{margin-bottom:0;line-height:1.2} h2{margin-top:2.2rem;border-bottom:1px solid #e1e5ea;padding-bottom:.2rem}
h3{margin:.2rem 0 .4rem} h4{margin:1.2rem 0 .4rem;font-weight:600} code{overflow-wrap:anywhere}
.sub{color:#66727f;margin-top:.2rem} .big{font-size:2.6rem;font-weight:650} .cards{display:flex;gap:1rem;flex-wrap:wrap}
.card{border:1px solid #e1e5ea;border-radius:10px;padding:.8rem 1.2rem;flex:1;min-width:11rem}
.card span{color:#66727f;display:block} .tag{color:#fff;border-radius:4px;padding:.05rem .5rem;font-size:.85rem}
.two{display:grid;grid-template-columns:1fr 1fr;gap:2.5rem} .narrow{display:none}
.three{display:grid;grid-template-columns:1fr 1fr 1fr;gap:1.5rem}
table{border-collapse:collapse;width:100%} td,th{padding:.35rem .6rem;border-bottom:1px solid #eef1f4;text-align:left}
th:first-child,td:first-child{padding-left:0} td{vertical-align:top;overflow-wrap:anywhere}
td.ok,td.key{white-space:nowrap;overflow-wrap:normal} small{display:block;color:#66727f;line-height:1.3}
table.tensors{table-layout:fixed} table.tensors th:first-child{width:38%}
svg{display:block;width:100%;height:auto} svg text{font-family:system-ui,sans-serif;font-size:13px}
svg .grid{stroke:#e1e5ea} svg .axis{fill:#66727f;font-size:12px} svg .label{fill:#fff;font-size:11px}
svg line.kill{stroke:#c0392b;stroke-dasharray:5 3} svg text.kill{fill:#c0392b}
svg line.resume{stroke:#2f855a;stroke-dasharray:2 3} svg text.resume{fill:#2f855a}
svg line.chance{stroke:#66727f;stroke-dasharray:5 4}
table.confusion{table-layout:fixed} table.confusion td,table.confusion th{text-align:center;padding:.3rem 0}
td.dark{color:#fff} td.none{color:#c3cad1} td.mistake{outline:1px solid #c0392b;font-weight:600}
svg line.empty{stroke:#c3cad1;stroke-dasharray:3 4} svg .again{fill:#f0f2f4} i.again{background:#e3e7eb}
svg.tensor{background:#f4f6f8;margin:.2rem 0}
.legend{margin:.5rem 0;font-size:.9rem;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem}
.legends{gap:0 2.5rem}
.legend i{display:inline-block;width:.9rem;height:.9rem;border-radius:3px;margin-right:.4rem;vertical-align:-.1rem}
table,svg{print-color-adjust:exact;-webkit-print-color-adjust:exact} section{break-inside:avoid}
pre{background:#f4f6f8;padding:1rem;border-radius:8px;overflow-x:auto;font-size:.82rem;line-height:1.4}
.ok{color:#2f855a;font-weight:600}
@media (max-width:760px){.two,.three{grid-template-columns:minmax(0,1fr);gap:1.5rem} .wide{display:none}
.narrow{display:block}
body{margin:1rem auto} .big{font-size:2rem} td,th{padding:.3rem .35rem;font-size:.92rem}}
"""


def write_report(run: Run, path: Path) -> None:
    """Write the page to ``path``."""
    parts = (run.before, run.after)
    largest = max(sum(size for size, _ in part.pieces_of(rank.rank)) for part in parts for rank in part.ranks)
    timings = "".join(
        f"<tr><td>{html.escape(name)}</td><td class='key'>{html.escape(value)}</td></tr>" for name, value in run.timings
    )
    checks = "".join(
        f'<tr><td class="ok">✓</td><td>{html.escape(what)}</td><td>{html.escape(result)}</td></tr>'
        for what, result in run.checks
    )
    languages = " ".join(map(language_tag, COLORS))
    notes = "".join(f'<p class="sub">{html.escape(note)}</p>' for note in run.notes)
    killed = LANGUAGES[run.curve.language]
    path.write_text(
        f"""<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>Tessera demo</title>
<style>{STYLE}</style></head><body>
<h1>One training job, four languages</h1>
<p class="sub">Handwritten digits, a 64-128-10 network, data-parallel over ranks written in {languages}.
The {killed} rank was killed in mid-training; the others went on from the shared checkpoint.</p>
<div class="cards">
<div class="card"><span>held-out accuracy</span><div class="big">{run.accuracy * 100:.1f} %</div></div>
<div class="card"><span>ranks</span><div class="big">{len(run.before.ranks)} → {len(run.after.ranks)}</div></div>
<div class="card"><span>killed at step, went on from</span>
<div class="big">{run.curve.killed} → {run.curve.resumed}</div></div>
</div>
<h2>Loss</h2>{loss_section(run)}
<h2>Held-out digits</h2>{evaluation_section(run.evaluations)}
<h2>Ranks and their files</h2>
<p class="sub">Data-parallel ranks all hold the whole model, and each part of it is written once. Tensors of 4 MiB and
more are cut into row blocks, one a rank. Smaller ones, as all of these are, stay whole and are packed into runs of at
least 64 KiB, each of which goes to the rank that has least to write.</p>
<div class="two">{column("Before the kill", run.before, largest)}{column("After it", run.after, largest)}</div>
<h2>Which rank's file holds which part of each tensor</h2>
<div class="two legends">{legend("before", run.before)}{legend("after", run.after)}</div>
<table class="tensors">
<tr><th>tensor</th><th>before, step {run.before.step}</th><th>after, step {run.after.step}</th></tr>
{tensor_rows(*parts)}</table>
<h2>Checked afterwards</h2><table>{checks}</table>{notes}
<h2>Timings</h2><table>{timings}</table>
<h2>tessera ckpt tree</h2><pre>{html.escape(run.tree)}</pre>
</body></html>
""",
        encoding="utf-8",
    )
