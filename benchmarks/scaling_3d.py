"""A training step of a large transformer on N ranks, cut by width (tp), depth (pp) and data (dp): simulated.

The schedule is played through by `tessera pipeline show`, with the times of a stage that follow from the machine:
computing, and the all-reduces of tensor parallelism inside a host. Gradients are averaged over dp in the last backward
of a stage, which hides what fits into it. The machine is that of docs/SCALING.md: the memory of a host as measured,
links and messages as assumed there.
"""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scaling_fsdp import ALPHA, CHUNK, LINK, PER_HOST, Machine, measured_machine

COMMAND = Path(__file__).resolve().parent.parent / "build" / "release" / "tessera"
LAYERS, WIDTH, WORDS, LENGTH = 32, 4096, 32_000, 2048
BATCH = 1024  # sequences a step, of all ranks
FLOPS = 2e12  # of a rank, an assumption
RANKS = (8, 64, 256, 1024)
SCHEDULES = {"1f1b": 1, "zbv": 2}  # stages on a rank


@dataclass(frozen=True)
class Layout:
    dp: int
    tp: int
    pp: int
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp


@dataclass(frozen=True)
class Step:
    seconds: float
    computing: float  # the share of the time in which a rank computes
    idle: float  # waits for other stages
    tensor: float  # all-reduces of activations
    data: float  # gradients that nothing hides
    gib: float  # of activations, at most on a rank


def parameters() -> int:
    return LAYERS * 12 * WIDTH**2 + 2 * WORDS * WIDTH


def reduce_in_host(size: float, ranks: int, machine: Machine) -> float:
    """An all-reduce of `size` bytes by groups of `ranks`; all groups of a host share its memory."""
    if ranks == 1:
        return 0.0
    groups = PER_HOST // ranks
    return 2 * ranks * size * groups / machine.memory + 2 * machine.meeting


def reduce_between_hosts(size: float, ranks: int) -> float:
    """An all-reduce of each rank's `size` bytes with `ranks` others, all of a host's through its link."""
    if ranks == 1:
        return 0.0
    through_link = 2 * size * PER_HOST * (ranks - 1) / ranks
    return max(through_link / LINK, 2 * ALPHA * (ranks - 1) * math.ceil(size / CHUNK))


@cache
def makespan(schedule: str, ranks: int, microbatches: int, forward: float, latency: float) -> float:
    """Seconds, if a rank's forward of a micro-batch takes `forward`, and its backward twice that."""
    stages = SCHEDULES[schedule]
    time = f"{forward / stages:.9f}"
    options = ["--schedule", schedule, "--ranks", str(ranks), "--stages-per-rank", str(stages)]
    options += ["--microbatches", str(microbatches), "--forward", time, "--input", time, "--weight", time]
    options += ["--latency", f"{latency:.9f}"]
    shown = subprocess.run(
        [COMMAND, "pipeline", "show", "--json", *options], check=True, capture_output=True, text=True
    )
    return float(json.loads(shown.stdout)["makespan"])


def step(layout: Layout, machine: Machine) -> Step:
    rows = 1  # sequences a micro-batch
    microbatches = BATCH // layout.dp // rows
    layers = LAYERS / layout.pp
    tokens = rows * LENGTH
    flops = 2 * tokens * (12 * WIDTH**2 + 2 * LENGTH * WIDTH) * layers + 2 * tokens * WORDS * WIDTH / layout.pp
    computing = flops / layout.tp / FLOPS  # of a forward
    activation = 4.0 * tokens * WIDTH
    tensor = 2 * layers * reduce_in_host(activation, layout.tp, machine)  # of a forward
    forward = computing + tensor
    latency = 0.0
    if layout.pp > 1:  # each rank of a host sends its slice to the next stage, on another host
        latency = ALPHA + activation / layout.tp * PER_HOST / LINK if layout.tp * layout.pp > PER_HOST else ALPHA
    played = makespan(layout.schedule, layout.pp, microbatches, forward, latency)
    own = 4.0 * parameters() / layout.tp / layout.pp
    data = max(0.0, reduce_between_hosts(own, layout.dp) - 2 * forward)
    seconds = played + data
    busy = 3 * microbatches * computing
    talk = 3 * microbatches * tensor
    held = min(microbatches, layout.pp) if layout.schedule == "1f1b" else layout.pp
    gib = held * layers * 34 * tokens * WIDTH / layout.tp / 2**30  # with sequence parallelism: parallel.md 1.3
    idle = max(0.0, seconds - busy - talk - data)
    return Step(seconds, busy / seconds, idle / seconds, talk / seconds, data / seconds, gib)


def layouts(ranks: int) -> list[Layout]:
    """Layouts of `ranks` with tensor parallelism inside a host, whose micro-batches are enough for their schedule."""
    found = []
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8, 16, 32):
            dp, rest = divmod(ranks, tp * pp)
            if rest or dp > BATCH or LAYERS % pp:
                continue
            for schedule in ("1f1b", "zbv") if 1 < pp <= LAYERS // 2 else ("1f1b",):
                if BATCH // dp >= pp * (2 if schedule == "zbv" else 1):
                    found.append(Layout(dp, tp, pp, schedule))
    return found


def row(name: str, layout: Layout, machine: Machine) -> str:
    of = step(layout, machine)
    gib = 12.0 * parameters() / layout.tp / layout.pp / 2**30 + 4.0 * parameters() / layout.tp / layout.pp / 2**30
    cells = [
        f"{layout.ranks:,}", name, f"{layout.dp} x {layout.tp} x {layout.pp}",
        layout.schedule if layout.pp > 1 else "-",
        f"{of.seconds:.1f} s", f"{of.computing:.0%}", f"{of.idle:.0%}", f"{of.tensor:.0%}", f"{of.data:.0%}",
        f"{gib:.1f} GiB", f"{of.gib:.1f} GiB",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def text() -> str:
    """What docs/SCALING.md says."""
    machine = measured_machine(PER_HOST)
    rows = [
        "| ranks | | dp x tp x pp | schedule | step | computing | idle | tp | dp | parameters | activations |",
        "|---" * 11 + "|",
    ]
    for ranks in RANKS:
        every = sorted(layouts(ranks), key=lambda layout: step(layout, machine).seconds)
        rows.append(row("fastest", every[0], machine))
        for name, fits in (
            ("only dp", lambda layout: layout.tp == layout.pp == 1),
            ("dp and tp", lambda layout: layout.tp > 1 and layout.pp == 1),
            ("dp and pp, 1F1B", lambda layout: layout.tp == 1 and layout.pp > 1 and layout.schedule == "1f1b"),
            ("dp and pp, ZBV", lambda layout: layout.tp == 1 and layout.schedule == "zbv"),
            ("all three", lambda layout: layout.dp > 1 and layout.tp > 1 and layout.pp > 1),
        ):
            some = [layout for layout in every if fits(layout)]
            if some:
                rows.append(row(name, some[0], machine))
    return "\n".join(rows)


if __name__ == "__main__":
    print(text())
