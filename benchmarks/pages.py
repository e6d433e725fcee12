"""Writes the figures between marks in README.md and docs/, docs/checkpoint.svg and docs/memory.svg, from results/.

`./dev bench` and `./dev docs` run it; tests/docs/test_performance.py compares the pages with the results.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable
from pathlib import Path

import fsdp_memory
import results
import scaling_3d
import scaling_fsdp
from tables import MIB, by_size, measured_on, plain, short, size_of, table, with_unit

from checkpoint import COLD, DCP, ONE_THREAD, PART, RAW, SAVE, SCENARIOS, WARM

ROOT = Path(__file__).resolve().parent.parent
PLOT, MEMORY_PLOT = ROOT / "docs" / "checkpoint.svg", ROOT / "docs" / "memory.svg"
EXTRA, CPU = "MiB of extra memory per rank", "CPU s per GiB"


class Figures:
    """The cases of one scenario, by what they measure."""

    def __init__(self, cases: list[results.Case], scenario: str) -> None:
        self.title = SCENARIOS[scenario].title
        self.cases = [case for case in cases if case.get("scenario") == scenario]

    def find(self, operation: str, peer: str, metric: str) -> results.Case | None:
        for case in self.cases:
            if case["case"].startswith(f"{operation}: ") and (case["peer_name"], case["metric"]) == (peer, metric):
                return case
        return None

    def seconds(self, operation: str, peer: str = DCP) -> str:
        case = self.find(operation, peer, "s")
        return f"{short(case['ours'])} s" if case else ""

    def ratio(self, operation: str, peer: str) -> str:
        """With the target if the ratio misses it."""
        case = self.find(operation, peer, "GiB/s" if peer == RAW else "s")
        if case is None:
            return ""
        return short(case["ratio"]) + (f" (target: {case['target']:g})" if not results.is_met(case) else "")

    def both(self, operation: str, metric: str) -> str:
        """Our value, with the target if it is missed, and DCP's."""
        case = self.find(operation, DCP, metric)
        if case is None:
            return ""
        # DCP may have run fewer rounds.
        bound = self.find(operation, "bound", metric) or case
        missed = f" (target: {bound['peer']:g})" if not results.is_met(bound) else ""
        return f"{short(bound['ours'])}{missed} / {short(case['peer'])}"


def tables(cases: list[results.Case]) -> str:
    of = [Figures(cases, name) for name in SCENARIOS]
    one = Figures(cases, "large-1")
    saves = table(
        ["durable save", "ours", "against raw", "DCP", "DCP, 1 thread", "CPU s per GiB, ours / DCP",
         "extra MiB per rank, ours / DCP", "metadata B per tensor, ours / DCP"],
        [[f.title, f.seconds(SAVE), f.ratio(SAVE, RAW), f.ratio(SAVE, DCP), f.ratio(SAVE, ONE_THREAD),
          f.both(SAVE, CPU), f.both(SAVE, EXTRA), f.both("metadata", "B per tensor")] for f in of],
    )  # fmt: skip
    loads = table(
        ["load", "warm", "DCP", "a tenth, DCP", "cold", "against raw", "DCP", "CPU s per GiB cold, ours / DCP",
         "extra MiB per rank, ours / DCP"],
        [[f.title, f.seconds(WARM), f.ratio(WARM, DCP), f.ratio(PART, DCP), f.seconds(COLD), f.ratio(COLD, RAW),
          f.ratio(COLD, DCP), f.both(COLD, CPU), f.both(COLD, EXTRA)] for f in of],
    )  # fmt: skip
    others = table(
        [one.title, "durable save", "warm load", "cold load"],
        [[f"`{peer}`", *(one.ratio(operation, peer) for operation in (SAVE, WARM, COLD))]
         for peer in ("safetensors", "torch.save")],
    )  # fmt: skip
    parts = [measured_on("checkpoint"), saves, loads, others]
    return "\n\n".join(part for part in parts if part)


BUFFER, FOREIGN = "library buffers", "foreign memory"


def all_reduces(cases: list[results.Case]) -> str:
    """One row per peer, one column per size; a cell has the values for all numbers of ranks."""
    pattern = r"all_reduce (\d+) B, (\d+) ranks, (buffer|foreign) memory"
    names = {"buffer": BUFFER, "foreign": FOREIGN}
    return measured_on("comm", "") + "\n\n" + by_size(cases, pattern, "ranks", lambda found: names[found[3]])


def hosts(cases: list[results.Case]) -> str:
    """One table per link rate."""
    pattern = r"all_reduce (\d+) B, (\d+) hosts of \d+ ranks, (.*)"
    rates = dict.fromkeys(found[3] for case in cases if (found := re.fullmatch(pattern, case["case"])))
    parts = [
        by_size([case for case in cases if case["case"].endswith(rate)], pattern, "hosts", lambda found: found[3])
        for rate in rates
    ]
    return "\n\n".join([measured_on("hosts", ""), *parts])


def scaling(cases: list[results.Case]) -> str:
    """One row per size, one column per number of ranks. The last row has the memory rate of the largest size."""
    of: dict[int, dict[int, results.Case]] = {}
    for case in cases:
        if found := re.match(r"all_reduce (\d+) B, (\d+) ranks", case["case"]):
            of.setdefault(int(found[1]), {})[int(found[2])] = case
    ranks_list = sorted({ranks for row in of.values() for ranks in row})
    rows = [[size_of(size), *(with_unit(row[ranks]["ours"], "us") for ranks in ranks_list)] for size, row in of.items()]
    largest = max(of)
    rates = [f"{2 * ranks * largest / of[largest][ranks]['ours'] / 1e3:.0f} GB/s" for ranks in ranks_list]
    rows.append([f"B, computed from {size_of(largest)}", *rates])
    head = ["", *(f"{ranks} ranks" for ranks in ranks_list)]
    return measured_on("scaling", "") + "\n\n" + table(head, rows)


def instructions(cases: list[results.Case]) -> str:
    """Instructions of each kind of all_reduce, of messages and of DDP."""
    of = {case["case"]: case for case in cases}
    forms = ["8 B, 1 rank", "8 B, 2 ranks", "8192 B, 2 ranks"]

    def row(name: str, begin: str, end: str) -> list[str]:
        return [name, *(count_of(of[f"{begin} of {form}, {end}"]) for form in forms)]

    calls = table(
        ["", "1 rank", "2 ranks, 8 B", "2 ranks, 8 KiB"],
        [row("`tsr_comm_all_reduce`", "all_reduce", "a call"),
         row("`tsr_plan_run`", "planned all_reduce", "a launch")],
    )  # fmt: skip
    names = {
        "flight record, an operation": "a flight record, included in each all-reduce, send and receive",
        "send of 8 B, 2 ranks, a call": "`tsr_comm_send` of 8 B, if no rank has to wait",
        "recv of 8 B, 2 ranks, a call": "`tsr_comm_recv` of 8 B, if no rank has to wait",
        "tsr_ddp_ready, a parameter": "`tsr_ddp_ready` for a parameter that does not complete its bucket",
        "the last tsr_ddp_ready and tsr_ddp_wait, a step of one bucket": (
            "`tsr_ddp_ready` that completes the only bucket, plus `tsr_ddp_wait`, 1 rank, both threads"
        ),
    }
    return calls + "\n\n" + table(["", "instructions"], [[name, count_of(of[case])] for case, name in names.items()])


def count_of(case: results.Case) -> str:
    return f"{case['ours']:,.0f}" + (" (missed)" if not results.is_met(case) else "")


def commands(cases: list[results.Case]) -> str:
    """One row per command, one column per format; "-" if a format does not have the command."""
    by_name = {tuple(case["case"].split(": ")): case for case in cases}
    formats = list(dict.fromkeys(form for form, _ in by_name))

    def cell(case: results.Case | None) -> str:
        if case is None:
            return "-"
        return f"{case['ours']:.2f} s" + (f" (target: {case['peer']:g} s)" if not results.is_met(case) else "")

    names = dict.fromkeys(name for _, name in by_name)
    rows = [[f"`{name}`", *(cell(by_name.get((form, name))) for form in formats)] for name in names]
    return measured_on("command") + "\n\n" + table(["`tessera ckpt`", *formats], rows)


def times(ratio: float) -> str:
    """Rounded down, so that "at least" holds."""
    return f"{math.floor(ratio * 10 + 1e-9) / 10:g}x" if ratio < 5 else f"{math.floor(ratio)}x"


def readme(cases: list[results.Case]) -> str:
    two = Figures(cases, "large-2")
    parts = [times(case["ratio"]) if (case := two.find(o, DCP, "s")) else "(not measured)" for o in (SAVE, WARM)]
    return f"a durable save is {parts[0]} faster than PyTorch DCP's, a warm load {parts[1]} faster"


def readme_comm(cases: list[results.Case]) -> str:
    """The range over all numbers of ranks, from 1 MiB up."""

    def span(memory: str, peer: str) -> list[float]:
        found = [case for case in cases if case["peer_name"] == peer and case["case"].endswith(f"{memory} memory")]
        return sorted(case["ratio"] for case in found if int(case["case"].split()[1]) >= MIB)

    gloo, mpi, foreign = span("buffer", "Gloo"), span("buffer", "Open MPI"), span("foreign", "Open MPI")
    return (
        f"in library buffers at least {times(gloo[0])} faster than Gloo and {times(mpi[0])} to {times(mpi[-1])} faster "
        f"than Open MPI; in other memory {times(foreign[0])} to {times(foreign[-1])} faster than Open MPI"
    )


# ---- the plot ----

COLORS = {SAVE: "#2b6cb0", WARM: "#b7791f", COLD: "#2f855a"}
ROW, TOP, LEFT, PANEL, GAP = 30, 70, 290, 330, 46


def plot(cases: list[results.Case]) -> str:
    """Two panels with one row per scenario: speed relative to DCP (logarithmic) and to the raw disk. A dot is the
    median of the rounds' ratios, a line the range from the lowest to the highest, a tick the target."""
    of = [figures for name in SCENARIOS if (figures := Figures(cases, name)).cases]
    width, height = LEFT + 2 * PANEL + GAP + 20, TOP + ROW * len(of) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="checkpoints against PyTorch DCP and the raw disk">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, (operation, color) in enumerate(COLORS.items()):
        x = LEFT + 130 * i
        parts.append(f'<circle cx="{x}" cy="18" r="4.5" fill="{color}"/><text x="{x + 10}" y="22">{operation}</text>')
    parts.append(f'<text x="{LEFT + 390}" y="22" fill="#555">| target &#160; &#8212; lowest to highest round</text>')
    for row, figures in enumerate(of):
        y = TOP + ROW * row
        if row % 2 == 0:
            parts.append(f'<rect y="{y}" width="{width}" height="{ROW}" fill="#f4f5f7"/>')
        parts.append(f'<text x="{LEFT - 12}" y="{y + 19}" text-anchor="end">{html.escape(figures.title)}</text>')

    low, high = math.log10(0.5), math.log10(1000)
    panels: list[tuple[float, str, str, str, list[float], Callable[[float], float]]] = [
        (LEFT, "times as fast as PyTorch DCP", DCP, "s", [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500],
         lambda ratio: (math.log10(min(max(ratio, 0.5), 1000)) - low) / (high - low)),
        (LEFT + PANEL + GAP, "rate relative to the raw disk", RAW, "GiB/s", [0, 0.25, 0.5, 0.75, 1, 1.25],
         lambda ratio: min(ratio, 1.3) / 1.3),
    ]  # fmt: skip
    for left, title, peer, metric, marks, place in panels:
        parts.append(f'<text x="{left + PANEL / 2}" y="44" text-anchor="middle" font-weight="bold">{title}</text>')
        for mark in marks:
            x = left + PANEL * place(mark)
            color = "#999" if mark == 1 else "#ddd"
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 34}" stroke="{color}"/>')
            parts.append(f'<text x="{x:.1f}" y="{height - 18}" text-anchor="middle" fill="#555">{mark:g}</text>')
        for row, figures in enumerate(of):
            for i, (operation, color) in enumerate(COLORS.items()):
                case = figures.find(operation, peer, metric)
                if case is None:
                    continue
                y = TOP + ROW * row + 7 + 8 * i
                least, greatest = (left + PANEL * place(ratio) for ratio in extremes(case))
                at = left + PANEL * place(case["ratio"])
                parts.append(
                    f'<line x1="{least:.1f}" x2="{greatest:.1f}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="2"/>'
                    f'<circle cx="{at:.1f}" cy="{y}" r="4" fill="{color}"/>'
                )
                if case["target"] is not None:
                    x = left + PANEL * place(case["target"])
                    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y + 4}" stroke="#000"/>')
    return "\n".join([*parts, "</svg>", ""])


def extremes(case: results.Case) -> tuple[float, float]:
    ratios = [peer / ours if case["better"] == "smaller" else ours / peer for ours, peer in case["rounds"]]
    return min(ratios), max(ratios)


# ---- the pages ----

PERFORMANCE, README = ROOT / "docs" / "PERFORMANCE.md", ROOT / "README.md"
SCALING, MEMORY = ROOT / "docs" / "SCALING.md", ROOT / "docs" / "MEMORY.md"
BLOCKS: list[tuple[Path, str, Callable[[list[results.Case]], str], str]] = [
    (PERFORMANCE, "comm", all_reduces, "\n\n"),
    (PERFORMANCE, "instructions", instructions, "\n\n"),
    (PERFORMANCE, "hosts", hosts, "\n\n"),
    (PERFORMANCE, "ddp", plain("ddp", disk=""), "\n\n"),
    (PERFORMANCE, "fsdp", plain("fsdp", disk=""), "\n\n"),
    (PERFORMANCE, "tp", plain("tp", disk=""), "\n\n"),
    (PERFORMANCE, "pipeline", plain("pipeline", disk=""), "\n\n"),
    (PERFORMANCE, "torch_backend", plain("torch_backend", disk=""), "\n\n"),
    (PERFORMANCE, "ddp_shared", plain("ddp_shared", disk=""), "\n\n"),
    (PERFORMANCE, "checkpoint", tables, "\n\n"),
    (PERFORMANCE, "checkpoint_async", plain("checkpoint_async"), "\n\n"),
    (PERFORMANCE, "command", commands, "\n\n"),
    (PERFORMANCE, "plan", plain("plan"), "\n\n"),
    (PERFORMANCE, "bindings", plain("bindings"), "\n\n"),
    (PERFORMANCE, "read_path", plain("read_path"), "\n\n"),
    (README, "checkpoint", readme, ""),
    (README, "comm", readme_comm, ""),
    (SCALING, "scaling", scaling, "\n\n"),
    (SCALING, "fsdp", lambda _: scaling_fsdp.text(), "\n\n"),
    (MEMORY, "fsdp_memory", lambda cases: measured_on("fsdp_memory", "") + "\n\n" + fsdp_memory.table(cases), "\n\n"),
]


def with_block(page: str, name: str, text: str, space: str) -> str:
    """The page with the text between the marks of that name."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"the page lacks the marks {begin} and {end}, or has several of them")
    return pattern.sub(lambda _: f"{begin}{space}{text}{space}{end}", page)


def paths() -> list[Path]:
    """The pages."""
    return list(dict.fromkeys([PLOT, MEMORY_PLOT, *(path for path, *_ in BLOCKS), SCALING]))


def pages() -> dict[Path, str]:
    """The expected text of each page."""
    made = {PLOT: plot(results.read("checkpoint")), MEMORY_PLOT: fsdp_memory.plot(results.read("fsdp_memory"))}
    for path, name, make, space in BLOCKS:
        page = made.get(path) or path.read_text(encoding="utf-8")
        made[path] = with_block(page, f"{name}.json", make(results.read(name)), space)
    made[SCALING] = with_block(made[SCALING], "scaling_3d.py", scaling_3d.text(), "\n\n")
    return made


def write() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
