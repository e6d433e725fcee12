"""The PyTorch programs of README.md, docs/FROM_PYTORCH.md and docs/PIPELINE.md run, as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

import tessera as ts
from run_torch import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def programs(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def test_the_ten_lines_of_the_readme(tmp_path: Path) -> None:
    source = tmp_path / "readme.py"
    source.write_text(
        "import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(4, 2)\n"
        "def loss(model, step):\n    return model(torch.full((1, 4), 1.0 + step)).square().mean()\n"
        + programs("README.md")[1]
    )
    run_ranks(source, 2, cwd=tmp_path)
    with ts.Checkpoint(tmp_path / "runs" / "torch") as checkpoint:
        assert checkpoint["model.weight"].shape == (2, 4)
        assert checkpoint["optim.state.weight.step"] == 100


def test_the_program_for_those_who_come_from_pytorch_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    (program,) = programs("docs/FROM_PYTORCH.md")
    source = tmp_path / "train.py"
    source.write_text(program)
    assert "rank 1: steps 0 to 9\n" in run_ranks(source, 2, cwd=tmp_path)
    assert "rank 0: steps 10 to 19\n" in run_ranks(source, 1, cwd=tmp_path)


def test_the_program_of_the_page_on_pipelines(tmp_path: Path) -> None:
    source = tmp_path / "pipeline.py"
    source.write_text(programs("docs/PIPELINE.md")[1])
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", run_ranks(source, 2, cwd=tmp_path))]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
