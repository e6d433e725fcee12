"""The drawings of the demo's report: SVG made by hand, whose widths follow the page."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass, field

COLORS = {"c": "#3b7dd8", "python": "#b7791f", "java": "#c94f4f", "rust": "#7a5cc0"}
LANGUAGES = {"c": "C", "python": "Python", "java": "Java", "rust": "Rust"}
BEFORE, AFTER = "#2b6cb0", "#2f855a"
DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}


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
class Rank:
    """A process of one part of the run, and how it ended."""

    rank: int
    language: str
    pid: int
    end: str


@dataclass
class Part:
    """The run before the kill, or after it: its ranks, and the last checkpoint that they wrote."""

    ranks: list[Rank]
    step: int
    tensors: list[TensorPicture] = field(default_factory=list)

    @property
    def language_of(self) -> dict[int, str]:
        return {rank.rank: rank.language for rank in self.ranks}

    def pieces_of(self, rank: int) -> list[tuple[int, str]]:
        """(bytes, tensor) of each piece in the file of `rank`, the largest first."""
        found = [
            (math.prod(piece.shape) * DTYPE_BYTES.get(tensor.dtype, 1), tensor.name)
            for tensor in self.tensors
            for piece in tensor.pieces
            if piece.rank == rank
        ]
        return sorted(found, reverse=True)


@dataclass
class Curve:
    """The losses that rank 0 logged, and where the run broke."""

    rows: list[tuple[int, int, float]]  # step, world size, loss
    killed: int  # step
    resumed: int  # step
    language: str  # of the killed rank

    def of(self, world: int) -> list[tuple[int, float]]:
        return [(step, loss) for step, size, loss in self.rows if size == world]


def who(rank: int, language: str) -> str:
    return f"rank {rank} ({LANGUAGES[language]})"


def loss_chart(curve: Curve, width: int, height: int) -> str:
    """Loss over steps. The three go on from a checkpoint of the four, so their line begins there, and the steps between
    it and the kill are drawn twice, because they were done twice."""
    left, right, bottom, top = 58, 12, 44, 34
    last = max(step for step, _, _ in curve.rows)
    logs = [math.log10(max(loss, 1e-6)) for _, _, loss in curve.rows]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    roomy = width > 600

    def x(step: float) -> float:
        return left + (width - left - right) * step / last

    def y(loss: float) -> float:
        return top + (height - top - bottom) * (high - math.log10(max(loss, 1e-6))) / max(high - low, 1)

    def line(points: list[tuple[int, float]], style: str) -> str:
        text = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
        return f'<polyline points="{text}" fill="none" {style}/>'

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss over steps, on a logarithmic scale">']
    begin, end = x(curve.resumed), x(curve.killed)
    floor = height - bottom
    parts.append(f'<rect class="again" x="{begin:.1f}" y="{top}" width="{end - begin:.1f}" height="{floor - top}"/>')
    for exponent in range(low, high + 1):
        at = y(10.0**exponent)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="axis" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**exponent:g}</text>')
    for i in range(5):
        step, anchor = last * i // 4, "middle" if i < 4 else "end"
        parts.append(f'<text class="axis" x="{x(step):.1f}" y="{floor + 18}" text-anchor="{anchor}">{step}</text>')
    middle = (top + floor) / 2
    parts.append(
        f'<text class="axis" x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        "loss (log scale)</text>"
    )
    parts.append(f'<text class="axis" x="{x(last / 2):.0f}" y="{height - 6}" text-anchor="middle">step</text>')

    four, three = curve.of(4), curve.of(3)
    parts.append(line(four, f'class="four" stroke="{BEFORE}" stroke-width="1.6"'))
    at_checkpoint = [(step, loss) for step, loss in four if step == curve.resumed]
    parts.append(line(at_checkpoint + three, f'class="three" stroke="{AFTER}" stroke-width="1.6"'))
    for step, loss in at_checkpoint:
        parts.append(f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4" fill="{AFTER}"/>')

    parts.append(f'<line class="kill" x1="{end:.1f}" x2="{end:.1f}" y1="{top - 6}" y2="{floor}"/>')
    parts.append(f'<line class="resume" x1="{begin:.1f}" x2="{begin:.1f}" y1="{top - 6}" y2="{floor}"/>')
    name = LANGUAGES[curve.language]
    kill = f"kill -9 of the {name} rank at step {curve.killed}" if roomy else f"kill -9: {name}, {curve.killed}"
    resume = f"3 ranks go on from the checkpoint of step {curve.resumed}" if roomy else f"from step {curve.resumed}"
    parts.append(f'<text class="kill" x="{end + 5:.1f}" y="{top - 12}">{kill}</text>')
    parts.append(f'<text class="resume" x="{begin - 5:.1f}" y="{top - 12}" text-anchor="end">{resume}</text>')
    return "".join([*parts, "</svg>"])


def shortened(name: str, room: int) -> str:
    """A tensor's name without as many of its first parts as it takes to fit into `room` characters; else nothing."""
    while len(name) > room and "." in name:
        name = name.partition(".")[2]
    return name if len(name) <= room else ""


def file_bars(part: Part, largest: int) -> str:
    """A bar for each rank's file, cut into the tensors that it holds; `largest` bytes fill the width."""
    width, row, gap, head = 430, 24, 12, 16
    parts = [
        f'<svg viewBox="0 0 {width} {(row + gap + head) * len(part.ranks)}" role="img" aria-label="bytes of each file">'
    ]
    for number, rank in enumerate(part.ranks):
        y, x = number * (row + gap + head) + head, 0.0
        pieces = part.pieces_of(rank.rank)
        said = f"{sum(size for size, _ in pieces) / 1024:.1f} KiB" if pieces else "no file: nothing is left to write"
        parts.append(f'<text x="0" y="{y - 4}">{who(rank.rank, rank.language)}: {said}</text>')
        for size, name in pieces:
            span = width * size / largest
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{span:.1f}" height="{row}" fill="{COLORS[rank.language]}" '
                f'stroke="#fff"><title>{html.escape(name)}: {size} bytes</title></rect>'
            )
            label = shortened(name, int(span / 6.6))
            if label:
                parts.append(f'<text class="label" x="{x + 5:.1f}" y="{y + 16}">{html.escape(label)}</text>')
            x += span
        if not pieces:
            parts.append(f'<line class="empty" x1="0" x2="{width}" y1="{y + row / 2}" y2="{y + row / 2}"/>')
    return "".join([*parts, "</svg>"])


def tensor_picture(tensor: TensorPicture | None, part: Part) -> str:
    """A tensor as a rectangle, cut into the boxes that each rank's file holds, and who that is."""
    if tensor is None:
        return "not saved"
    rows, columns = [*tensor.shape, 1, 1][:2]
    width = 40 + 100 * min(1.0, columns / 64)
    height = 14 + 56 * min(1.0, rows / 128)
    parts = [f'<svg class="tensor" viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px">']
    for piece in tensor.pieces:
        py, px = [*piece.offsets, 0, 0][:2]
        ph, pw = [*piece.shape, 1, 1][:2]
        parts.append(
            f'<rect x="{width * px / columns:.1f}" y="{height * py / rows:.1f}" width="{width * pw / columns:.1f}" '
            f'height="{height * ph / rows:.1f}" fill="{COLORS[part.language_of[piece.rank]]}">'
            f"<title>{who(piece.rank, part.language_of[piece.rank])}: offsets {piece.offsets}, shape {piece.shape}"
            "</title></rect>"
        )
    holders = sorted({(piece.rank, part.language_of[piece.rank]) for piece in tensor.pieces})
    return "".join([*parts, "</svg>", f"<small>{', '.join(who(*holder) for holder in holders)}</small>"])
