"""The prose linter finds each word of the house list, reads only prose, and finds nothing in the places it covers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from prose import COVERED, RULES, Rule, files, findings  # noqa: E402


def found(text: str, suffix: str = ".md") -> list[tuple[int, str]]:
    return [(line, words) for line, words, _ in findings(text, suffix)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.example)
def test_each_rule_finds_its_example_and_no_other_rule_does(rule: Rule) -> None:
    assert [instead for _, _, instead in findings(f"{rule.example}\n", ".md")] == [rule.instead]


@pytest.mark.parametrize("place", COVERED)
def test_a_covered_place_is_clean(place: str) -> None:
    paths = files([place])
    assert paths, f"{place} does not exist"
    for path in paths:
        assert findings(path.read_text(encoding="utf-8"), path.suffix) == [], place


def test_words_are_found_across_lines() -> None:
    assert found("One.\n\nIt header says\nso.\n") == [(3, "says so")]


@pytest.mark.parametrize(
    "text",
    [
        "```\nit header says so\n```\n",
        "    it header says so\n",
        "it prints `it header says so`\n",
        "it fails at `x` once\n",
        "[a link](at%20once.md#at-once)\n",
        "<!-- says so -->\n",
    ],
)
def test_code_and_links_of_markdown_are_ignored(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    ("suffix", "text", "lines"),
    [
        (".h", "/** It header says\n *  so. */\nint says_so; /* and `says so` */\n// says so\n", [1, 4]),
        (".cc", '// says so\nf("it header says "\n  "so");\ng("says", "so");\n', [2]),
        (".py", 'x = "says so"\ndef f():\n    """It header says so, as ``says so`` does."""\n', [3]),
        (".pxi", '# header says\n# so\nf("it says "\n  f"so")  # `says so`\nx = says(so)\n', [1, 3]),
        (".java", "// says so\n/** It fails\n * says so: {@code says so}. */\n", [3]),
        (".rs", "// says so\n/// It header says\n/// so.\n", [2]),
    ],
)
def test_only_what_users_read_is_looked_at_in_sources(suffix: str, text: str, lines: list[int]) -> None:
    assert found(text, suffix) == [(line, "says so") for line in lines]


@pytest.mark.parametrize("text", ["there is no root", "two whole numbers", "of its own host", "once a rank of it came"])
def test_plain_english_is_left_alone(text: str) -> None:
    assert found(text) == []
