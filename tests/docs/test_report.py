"""The demo's report draws what the files hold: each rank's bar is as long as its bytes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "demo"))

from report import Piece, Run, TensorPicture, file_bars, tensor_picture  # noqa: E402

LANGUAGES = {0: "c", 1: "rust"}
SPLIT = TensorPicture("w", "F32", [6, 10], [Piece(0, [0, 0], [3, 10]), Piece(1, [3, 0], [3, 10])])
WHOLE = TensorPicture("b", "F64", [15], [Piece(1, [0], [15])])


def widths(svg: str) -> list[float]:
    return [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', svg)]


def test_a_file_is_as_long_as_its_bytes() -> None:
    run = Run([], 0, (0, 0, "java"), (0, 0), [], [SPLIT, WHOLE], LANGUAGES, [], [])
    first, *second = widths(file_bars(run))
    assert len(second) == 2
    assert abs(sum(second) - 2 * first) < 0.2  # 120 bytes beside 120 + 120


def test_a_split_tensor_is_cut_where_its_files_are() -> None:
    row = tensor_picture(SPLIT, LANGUAGES)
    heights = [float(height) for height in re.findall(r'<rect [^>]*height="([\d.]+)"', row)]
    assert len(heights) == 2
    assert heights[0] == heights[1]
    assert "rank 0 (C), rank 1 (Rust)" in row
