"""Instructions of the hot paths do not grow unseen: they are held against a baseline that stays, not against the run
before. Counts, not times: a busy machine changes nothing."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import instructions  # noqa: E402
import results  # noqa: E402

PROGRAM = ROOT / "build" / "release" / "benchmarks" / "instructions"
# What a change may add unseen. Another compiler than the baseline's makes other code, of which more is no loss of ours.
SAME_COMPILER, ANOTHER_COMPILER = 1.05, 1.30

BASE = {"date": "2026-11-20", "compiler": "GCC: 12", "counts": {"a call": 100.0, "a sum, AVX2, an element": 2.0}}


def missed(found: dict[str, float]) -> list[str]:
    return [case["case"] for case in instructions.beside_baseline(found, BASE) if results.missed_by(case) is not None]


def test_several_small_losses_are_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run within 3 % of the run before it, as it is written: the baseline has stayed."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    told = []
    for count in (102.0, 104.0, 106.0):
        cases = instructions.beside_baseline({**BASE["counts"], "a call": count}, BASE)
        results.write("instructions", cases)
        told.append(missed({**BASE["counts"], "a call": count}))
    assert told == [[], ["a call"], ["a call"]]


def test_a_new_path_has_no_target_until_the_baseline_has_it() -> None:
    new = instructions.beside_baseline({**BASE["counts"], "another call": 7.0}, BASE)[-1]
    assert (new["case"], new["target"], new["peer_name"]) == ("another call", None, "none: --rebase adds it")


def test_a_path_that_is_not_counted_any_more_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not counted: a call"):
        instructions.beside_baseline({"a sum, AVX2, an element": 2.0}, BASE)
    # A processor without AVX2 counts the plain kernels.
    assert missed({"a call": 100.0}) == []


def test_a_baseline_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "BASELINE", tmp_path / "baseline.json")
    instructions.rebase({"a call": 90.0}, "GCC: 13")
    made = instructions.baseline()
    assert (made["compiler"], made["counts"]) == ("GCC: 13", {"a call": 90.0})
    assert made["date"] == datetime.date.today().isoformat()


def test_the_results_are_beside_the_baseline() -> None:
    base = instructions.baseline()
    for case in results.read("instructions"):
        if case["target"] is not None:
            assert case["peer"] == base["counts"][case["case"]], case["case"]


@pytest.mark.slow
def test_no_hot_path_takes_more_than_the_baseline() -> None:
    """Some ten seconds. After a gain, or for a price that is meant to be paid: ./dev bench instructions --rebase."""
    base = instructions.baseline()
    if not PROGRAM.exists():
        pytest.skip("it is built by the preset `release`, where valgrind is installed")
    same = instructions.compiler_of(PROGRAM) == base["compiler"]
    most = SAME_COMPILER if same else ANOTHER_COMPILER
    cases = instructions.beside_baseline(instructions.counts(PROGRAM), base)
    assert [f"{case['case']}: {case['ours']:g}, {case['peer']:g} before" for case in cases
            if case["ours"] > most * case["peer"]] == []  # fmt: skip
