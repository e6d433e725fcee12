"""The demo's report shows what happened: bars as long as the files' bytes, pieces where they lie, the three's loss from
the checkpoint that they went on from, and nothing that is wider than a narrow screen."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "demo"))

from charts import Curve, Part, Piece, Rank, TensorPicture, file_bars, loss_chart, tensor_picture  # noqa: E402
from evaluation import Evaluation  # noqa: E402
from report import Run, write_report  # noqa: E402

FOUR = [
    Rank(rank, language, 100 + rank, "SIGKILL from this demo" if language == "java" else "exit code 1")
    for rank, language in enumerate(["c", "python", "java", "rust"])
]
THREE = [Rank(rank, language, 200 + rank, "exit code 0") for rank, language in enumerate(["c", "python", "rust"])]
SPLIT = TensorPicture("w", "F32", [6, 10], [Piece(0, [0, 0], [3, 10]), Piece(1, [3, 0], [3, 10])])
WHOLE = TensorPicture("b", "F64", [15], [Piece(1, [0], [15])])
BEFORE, AFTER = Part(FOUR, 300, [SPLIT, WHOLE]), Part(THREE, 600, [SPLIT])
ROWS = [(step, 4, 1.0) for step in range(10, 341, 10)] + [(step, 3, 0.1) for step in range(310, 601, 10)]
MATRIX = [[26 * (i == j) + (i == 3 and j == 5) for j in range(10)] for i in range(10)]
ROC = [(0.0, 0.0), (0.0, 0.9), (0.1, 1.0), (1.0, 1.0)]
EVALUATIONS = [Evaluation(language, 0.995, MATRIX, [ROC] * 10) for language in ("c", "python", "rust")]
CURVE = Curve(ROWS, killed=340, resumed=300, language="java")


def widths(svg: str) -> list[float]:
    return [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', svg)]


def points(svg: str, line: str) -> list[tuple[float, float]]:
    text = re.search(rf'<polyline points="([^"]*)" fill="none" class="{line}"', svg)
    assert text
    return [(float(x), float(y)) for x, y in (point.split(",") for point in text[1].split())]


@pytest.fixture
def page(tmp_path: Path) -> str:
    write_report(
        Run(CURVE, 0.9663, EVALUATIONS, BEFORE, AFTER, [("whole job", "14 s")], [("it loads", "yes")], "tree"),
        tmp_path / "r",
    )
    return (tmp_path / "r").read_text(encoding="utf-8")


def test_a_file_is_as_long_as_its_bytes() -> None:
    first, *second = widths(file_bars(BEFORE, 240))
    assert len(second) == 2
    assert abs(sum(second) - 2 * first) < 0.2  # 120 bytes beside 120 + 120


def test_a_rank_without_a_file_is_said_to_have_none(page: str) -> None:
    assert file_bars(BEFORE, 240).count("no file: nothing is left to write") == 2
    assert "rank 2 and rank 3 hold the whole model too, but have nothing to write" in page
    assert "rank 2 holds the whole model too, but has nothing to write" in page


def test_the_mistake_is_marked_in_the_matrix(page: str) -> None:
    assert page.count('class="mistake"') == 1


def test_a_split_tensor_is_cut_where_its_files_are() -> None:
    row = tensor_picture(SPLIT, BEFORE)
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', row)]
    assert len(heights) == 2
    assert heights[0] == heights[1]
    assert "rank 0 (C), rank 1 (Python)" in row


@pytest.mark.parametrize("width", [900, 380])
def test_the_curve_of_the_three_begins_at_the_checkpoint_on_that_of_the_four(width: int) -> None:
    chart = loss_chart(CURVE, width, 300)
    four, three = points(chart, "four"), points(chart, "three")
    checkpoint = four[29]  # step 300
    assert three[0] == checkpoint
    assert three[1][0] < four[-1][0], "steps done twice are drawn twice"
    kill = re.search(r'<line class="kill" x1="([\d.]+)"', chart)
    resume = re.search(r'<line class="resume" x1="([\d.]+)"', chart)
    assert kill
    assert resume
    assert float(kill[1]) == four[-1][0]
    assert float(resume[1]) == checkpoint[0]


def test_the_axis_says_that_it_is_logarithmic() -> None:
    assert "loss (log scale)" in loss_chart(CURVE, 900, 300)


def test_before_and_after_are_two_columns_each_with_its_legend(page: str) -> None:
    assert "Before the kill: four ranks" in page
    assert "After it: three ranks" in page
    legends = re.findall(r'<p class="legend">(.*?)</p>', page)
    assert len(legends) == 4, "of the loss, the ROC, and both"
    assert [re.findall(r"rank \d: \w+", legend) for legend in legends[2:]] == [
        ["rank 0: C", "rank 1: Python", "rank 2: Java", "rank 3: Rust"],
        ["rank 0: C", "rank 1: Python", "rank 2: Rust"],
    ]
    rows = re.findall(r"<tr><td><code>(\w)</code>.*?</tr>", page)
    assert rows == ["b", "w"]
    assert "not saved" in page, "b is not in the later checkpoint"


def test_nothing_is_wider_than_a_narrow_screen(page: str) -> None:
    assert '<meta name="viewport" content="width=device-width' in page
    assert not re.findall(r'<(?:svg|table|img|div)[^>]* width="?\d', page), "drawings scale with the page"
    assert re.search(r"svg\{[^}]*width:100%", page)
    assert re.search(r"pre\{[^}]*overflow-x:auto", page)
    assert '<div class="narrow"><svg viewBox="0 0 380' in page


def test_the_page_needs_nothing_else(page: str) -> None:
    assert not re.findall(r"<script|<link|<img|https?:|url\((?!#)", page)
