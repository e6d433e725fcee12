"""The checkpoints' figures of the pages are those of the results, and a run of some scenarios replaces these alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import pages  # noqa: E402
import results  # noqa: E402

from checkpoint import COLD, DCP, RAW, SAVE, SCENARIOS, WARM  # noqa: E402


@pytest.fixture(scope="module")
def expected() -> dict[Path, str]:
    return pages.pages()


@pytest.mark.parametrize("path", pages.paths(), ids=lambda path: path.name)
def test_a_page_says_what_the_results_say(path: Path, expected: dict[Path, str]) -> None:
    assert path.read_text(encoding="utf-8") == expected[path], "run ./dev docs"


def test_results_are_of_scenarios_that_the_pages_show() -> None:
    assert {case["scenario"] for case in results.read("checkpoint")} <= set(SCENARIOS)


def test_ratios_follow_from_their_rounds() -> None:
    for case in results.read("checkpoint"):
        rounds = [(ours, peer) for ours, peer in case["rounds"]]
        assert case["ratio"] == pytest.approx(results.ratio_of(rounds, case["better"] == "smaller"))


def beyond(ours: float, peer: float) -> results.Case:
    rounds = [(100 + ours + i % 5, 100 + peer - i % 3, 100.0) for i in range(30)]
    return results.case_beyond("step", "ms", "a peer", rounds, 5.0, 0.05)


def test_what_is_beyond_a_base_meets_its_target_by_either_bound() -> None:
    assert results.missed_by(beyond(2, 8)) is None  # little of the base
    assert results.missed_by(beyond(8, 90)) is None  # little of the peer's
    assert "5, or a share of 0.05" in str(results.missed_by(beyond(8, 40)))
    changed = beyond(8, 90)
    changed["rounds"][0][0] += 50
    changed["ratio"] += 1
    assert "do not follow from the rounds" in str(results.missed_by(changed))


def test_bounds_are_wider_for_rounds_that_scatter() -> None:
    calm = results.bounds_beyond([(110.0, 150.0, 100.0)] * 30)
    wild = results.bounds_beyond([(105.0 + i % 11, 150.0, 100.0) for i in range(30)])
    assert calm == (5.0, 0.1)
    assert wild[0] < calm[0]
    assert wild[1] > calm[1]


def a_case(operation: str, peer: str, metric: str, rounds: list[tuple[float, float]], target: float | None) -> dict:
    label = f"{operation}: {SCENARIOS['large-2'].title}"
    case = results.case(label, metric, peer, rounds, target, smaller_is_better=metric == "s")
    return {"scenario": "large-2", **case}


CASES = [
    a_case(SAVE, DCP, "s", [(0.5, 1.0), (0.5, 0.6), (0.5, 0.5)], 1.4),
    a_case(SAVE, RAW, "GiB/s", [(2.0, 2.0)], 0.93),
    a_case(WARM, DCP, "s", [(0.25, 1.0)], 2.5),
    a_case(COLD, DCP, "s", [(1.0, 1.1)], 1.05),
]


def test_a_missed_target_is_shown_and_a_met_one_is_not() -> None:
    text = pages.tables(CASES)
    saves, loads = (line for line in text.splitlines() if line.startswith(f"| {SCENARIOS['large-2'].title} |"))
    assert saves.startswith(f"| {SCENARIOS['large-2'].title} | 0.50 s | 1.00 | 1.20 (target: 1.4) |")
    assert loads.startswith(f"| {SCENARIOS['large-2'].title} | 0.25 s | 4.00 |")


def test_a_missed_bound_of_memory_is_that_of_all_rounds() -> None:
    """DCP may have run one round only: ours of that one is not what counts."""
    extra = [
        a_case(SAVE, DCP, pages.EXTRA, [(50.0, 200.0)], None),
        a_case(SAVE, "bound", pages.EXTRA, [(50.0, 64.0), (100.0, 64.0), (110.0, 64.0)], 1.0),
    ]
    for case in extra:
        case.update(ratio=results.ratio_of(case["rounds"], True))
    assert "| 100 (target: 64) / 200 |" in pages.tables(extra)


def test_a_row_has_our_value_the_peers_the_ratio_and_the_target() -> None:
    missed = results.case("a", "s", "bound", [(0.06, 0.05)], 1.0, smaller_is_better=True)
    met = results.case("b", "bytes/s", "a peer", [(2 << 20, 1 << 20)], 1.5, smaller_is_better=False)
    text = pages.plain("checkpoint")([missed, met])
    assert "| a | 60 ms | 50 ms | 0.83 | 1 (missed) |" in text
    assert "| b | 2.00 MiB/s | 1.00 MiB/s, a peer | 2.00 | 1.5 |" in text


def test_a_command_that_takes_too_long_is_marked() -> None:
    cases = [results.case(f"{form}: tree", "s", "bound", [(seconds, 0.3)], target, smaller_is_better=True)
             for form, seconds, target in (("native", 0.34, 1.0), ("safetensors", 0.6, None))]  # fmt: skip
    cases += [results.case("native: latest", "s", "bound", [(0.1, 0.3)], 1.0, smaller_is_better=True)]
    told = pages.commands(cases)
    assert "| `tree` | 0.34 s (target: 0.3 s) | 0.60 s |" in told
    assert "| `latest` | 0.10 s | - |" in told


def test_readme_says_how_much_faster_and_rounds_down() -> None:
    assert pages.readme(CASES) == "a durable save is 1.2x faster than PyTorch DCP's, a warm load 4x faster"
    assert [pages.times(ratio) for ratio in (2.653, 1.2, 9.06, 12.9)] == ["2.6x", "1.2x", "9x", "12x"]


def test_the_plot_has_a_dot_for_each_ratio_at_its_place() -> None:
    plot = pages.plot(CASES)
    assert plot.count("<circle") == len(pages.COLORS) + len(CASES)
    better, worse = pages.plot(CASES[2:3]), pages.plot(CASES[3:])
    assert float(better.rsplit('cx="', 1)[1].split('"')[0]) > float(worse.rsplit('cx="', 1)[1].split('"')[0])


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="lacks the marks"):
        pages.with_block("nothing here", "checkpoint.json", "text", "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "machine", lambda: "this machine")
    return tmp_path


def named(scenario: str, ours: float) -> dict:
    return {"scenario": scenario, **results.case("c", "s", DCP, [(ours, 1.0)], None, smaller_is_better=True)}


def test_only_the_scenarios_that_ran_are_replaced(folder: Path) -> None:
    results.write("x", [named("a", 1.0), named("b", 2.0)])
    results.write("x", [named("a", 3.0)])
    assert {case["scenario"]: case["ours"] for case in results.read("x")} == {"a": 3.0, "b": 2.0}
    assert (folder / "x.machine.txt").read_text(encoding="utf-8") == "this machine\n"


def test_results_of_another_machine_stay_under_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.write("x", [named("a", 1.0), named("b", 2.0)])
    monkeypatch.setattr(results, "machine", lambda: "another")
    results.write("x", [named("a", 3.0)])
    kept = json.loads((folder / "x.json").read_text(encoding="utf-8"))
    assert {case["scenario"]: (case["machine"], case["ours"]) for case in kept} == {
        "a": ("another", 3.0),
        "b": ("this machine", 2.0),
    }
    assert (folder / "x.machine.txt").read_text(encoding="utf-8") == "this machine (b); another (a)\n"
