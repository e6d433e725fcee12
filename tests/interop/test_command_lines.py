"""The four digits trainers refuse a wrong command line in the same words: what, with which value, and what is right."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, digits
from patience import patience

DATA = ["--data", str(ROOT / "examples" / "data" / "digits.csv")]


def refusal(language: str, arguments: list[str], cwd: Path) -> str:
    done = subprocess.run(digits(language, arguments), cwd=cwd, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("--steps", "0", 1),
        ("--batch", "0", 1),
        ("--steps", "1000000000", 1),
        ("--save-every", "-1", 0),
        ("--seed", "1.5", 0),
        ("--pace", "", 0),
        ("--batch", "+8", 1),
    ],
)
def test_a_number_is_named_with_its_value_and_range(
    language: str, name: str, value: str, least: int, tmp_path: Path
) -> None:
    said = refusal(language, [*DATA, name, value], tmp_path)
    assert said == f'digits: {name} cannot be "{value}": a number from {least} to 999999999; see examples/README.md\n'


def test_a_way_to_be_parallel_is_one_of_seven(language: str, tmp_path: Path) -> None:
    said = refusal(language, [*DATA, "--parallel", "fsd"], tmp_path)
    ways = "ddp, fsdp, tp, dp+tp, fsdp+tp, pp or dp+tp+pp"
    assert said == f'digits: --parallel cannot be "fsd": {ways}; see examples/README.md\n'


def test_groups_of_two_need_an_even_number_of_ranks(language: str, tmp_path: Path) -> None:
    said = refusal(language, [*DATA, "--parallel", "dp+tp"], tmp_path)
    assert said == "digits: --parallel dp+tp needs an even number of ranks, not 1; see examples/README.md\n"


def test_groups_of_four_need_a_multiple_of_four_ranks(language: str, tmp_path: Path) -> None:
    said = refusal(language, [*DATA, "--parallel", "dp+tp+pp"], tmp_path)
    assert said == "digits: --parallel dp+tp+pp needs a multiple of 4 ranks, not 1; see examples/README.md\n"


def test_data_that_is_not_there_comes_with_a_hint(language: str, tmp_path: Path) -> None:
    said = refusal(language, [], tmp_path)
    assert said.startswith("digits: cannot read examples/data/digits.csv (")
    assert said.endswith("): start in the clone's root or name the file by --data; see examples/README.md\n")


@pytest.mark.parametrize("damage", ["cut short", "a label of 10", "text"])
def test_data_of_another_kind_is_refused(language: str, damage: str, tmp_path: Path) -> None:
    lines = Path(DATA[1]).read_text(encoding="utf-8").splitlines()
    if damage == "cut short":
        del lines[1000:]
    else:
        cells = lines[7].split(",")
        cells[64 if damage == "a label of 10" else 3] = "10" if damage == "a label of 10" else "x"
        lines[7] = ",".join(cells)
    file = tmp_path / "digits.csv"
    file.write_text("\n".join(lines) + "\n")
    assert f"digits: {file} is not the digits: " in refusal(language, ["--data", str(file)], tmp_path)


def test_an_unknown_option_is_named(language: str, tmp_path: Path) -> None:
    assert "--nope" in refusal(language, [*DATA, "--nope", "1"], tmp_path)
    assert "--steps" in refusal(language, [*DATA, "--steps"], tmp_path)
