"""Every kind of value crosses between all languages: what each writes, each other reads as exactly that.

The programs in values/ hold the same table, each in its own language's types and literals. In a save of four ranks, a
language each, the values without a rank are rank 0's, and each rank has all of them once more as its own.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import user_programs
from conftest import LANGUAGES, TESSERA
from patience import patience

SOURCES = {"c": "values.c", "python": "values.py", "java": "EveryValue.java", "rust": "values.rs"}
COUNT = 34


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return user_programs.of_each_language(Path(__file__).parent / "values", SOURCES, tmp_path_factory.mktemp)


def run_job(programs: dict[str, list[str]], languages: list[str], *arguments: str | Path) -> None:
    command = [str(TESSERA), "run"]
    for i, language in enumerate(languages):
        command += ([":"] if i else []) + ["-n", "1", *programs[language], *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stdout + done.stderr


def texts_of(root: Path) -> dict[str, str]:
    """Of each value its JSON as it is written, so that 1, 1.0 and -0.0 differ, and the order of keys counts."""
    (manifest,) = root.glob("step-*/manifest.json")

    def number(text: str) -> list[str]:
        return ["number", text]

    document = json.loads(
        manifest.read_text(encoding="utf-8"),
        object_pairs_hook=lambda pairs: ["object", pairs],
        parse_int=number,
        parse_float=number,
    )
    return {name: json.dumps(value) for name, value in dict(dict(document[1])["values"][1]).items()}


@pytest.mark.parametrize("first", LANGUAGES)
def test_every_kind_that_a_language_writes_is_read_by_each(
    programs: dict[str, list[str]], tmp_path: Path, first: str
) -> None:
    """Each language writes for all ranks once, and once for each rank, which is of each language in turn."""
    turn = LANGUAGES.index(first)
    run_job(programs, LANGUAGES[turn:] + LANGUAGES[:turn], "save", tmp_path)
    texts = texts_of(tmp_path)
    names = [name for name in texts if not name.startswith("rank/")]
    assert len(names) == COUNT
    assert len(texts) == COUNT * (1 + len(LANGUAGES))
    for name in names:
        of_each = {texts[name], *(texts[f"rank/{rank}/own.{name}"] for rank in range(len(LANGUAGES)))}
        assert len(of_each) == 1, "equal values have equal text"
    run_job(programs, LANGUAGES, "check", tmp_path)
