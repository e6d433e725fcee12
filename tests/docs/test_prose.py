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
    assert found("One.\n\nIt fails at\nonce.\n") == [(3, "at once")]


@pytest.mark.parametrize(
    "text",
    [
        "```\nit fails at once\n```\n",
        "    it fails at once\n",
        "it prints `it fails at once`\n",
        "it fails at `x` once\n",
        "[a link](at%20once.md#at-once)\n",
        "<!-- at once -->\n",
    ],
)
def test_code_and_links_of_markdown_are_ignored(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    ("suffix", "text", "lines"),
    [
        (".h", "/** It fails at\n *  once. */\nint at_once; /* and `at once` */\n// at once\n", [1, 4]),
        (".cc", '// at once\nf("it fails at "\n  "once");\ng("at", "once");\n', [2]),
        (".py", 'x = "at once"\ndef f():\n    """It fails at once, as ``at once`` does."""\n', [3]),
        (".java", "// at once\n/** It fails\n * at once: {@code at once}. */\n", [3]),
        (".rs", "// at once\n/// It fails at\n/// once.\n", [2]),
    ],
)
def test_only_what_users_read_is_looked_at_in_sources(suffix: str, text: str, lines: list[int]) -> None:
    assert found(text, suffix) == [(line, "at once") for line in lines]


@pytest.mark.parametrize("text", ["there is no root", "two whole numbers", "of its own host", "once a rank of it came"])
def test_plain_english_is_left_alone(text: str) -> None:
    assert found(text) == []
