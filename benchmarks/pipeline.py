"""Pipelines: stages that wait beside the simulation of their schedule, and a training step beside PyTorch's pipelining.

A wait takes no processor, so that more ranks than the machine has processors show what the executor adds to the times
of a schedule: its messages and its calls. All schedules divide the same work: a rank's forward of a micro-batch takes
WAIT_MS, its backward twice that, however many stages it has. The peer is the makespan that `tessera pipeline show`
simulates, times what the waits of the same step took over what was asked for.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path

import results
from pipeline_waits_rank import STAGES_PER_RANK
from rank_processes import Ranks

MICROBATCHES, WAIT_MS = 16, 8.0
SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zb_h2", "zbv", "dualpipev")
SIMULATED = 1 / 1.05  # of the simulated makespan over ours
OF_THE_GAIN = 0.95


KINDS = ("ours", "gloo")
LAYERS, TRAINED = 8, 8  # TRAINED: micro-batches of the training step


def bench(command: Path, rounds: int, ranks_list: list[int]) -> list[results.Case]:
    return training(2 * rounds, 2) + [case for count in ranks_list for case in waits(command, rounds, count)]


def training(rounds: int, count: int) -> list[results.Case]:
    """Stages that compute, on as many processors."""
    pairs = []
    with Ranks("pipeline_rank.py", [str(LAYERS), str(TRAINED), *KINDS], count, {}) as ranks:
        millions = sum(reply["parameters"] for reply in ranks.ready) / 1e6
        for number in range(rounds):
            order = KINDS if number % 2 == 0 else KINDS[::-1]
            times = {kind: max(reply["ms"] for reply in ranks.tell("step", kind)) for kind in order}
            pairs.append((times["ours"], times["gloo"]))
    name = f"pipeline step of {millions:.1f} M parameters, {count} stages, m = {TRAINED}"
    return [results.case(name, "ms", "PyTorch pipelining, gloo", pairs, 1 / 0.9, smaller_is_better=True)]


def waits(command: Path, rounds: int, count: int) -> list[results.Case]:
    simulated = {name: makespan(command, name, count) for name in SCHEDULES}
    arguments = [str(MICROBATCHES), str(WAIT_MS), *SCHEDULES]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in SCHEDULES}
    with Ranks("pipeline_waits_rank.py", arguments, count, {}) as ranks:
        for number in range(rounds):
            turn = number % len(SCHEDULES)
            for name in SCHEDULES[turn:] + SCHEDULES[:turn]:
                replies = ranks.tell("step", name)
                stretch = statistics.mean(reply["took"] / reply["asked"] for reply in replies)
                times[name].append((max(reply["ms"] for reply in replies), simulated[name] * stretch))
    cases = []
    for name in SCHEDULES:
        label = f"pipeline of {count} ranks that wait, m = {MICROBATCHES}, {name}"
        cases.append(results.case(label, "ms", "simulated", times[name], SIMULATED, smaller_is_better=True))
    for name in ("interleaved_zero_bubble", "zb_h2", "zbv"):
        pairs = [(own, plain) for (own, _), (plain, _) in zip(times[name], times["1f1b"], strict=True)]
        gain = simulated["1f1b"] / simulated[name]
        label = f"pipeline of {count} ranks that wait, m = {MICROBATCHES}, {name}"
        target = max(1.0, OF_THE_GAIN * gain)
        cases.append(results.case(label, "ms", "1f1b, ours", pairs, target, smaller_is_better=True))
    return cases


def makespan(command: Path, schedule: str, count: int) -> float:
    """Milliseconds, as simulated."""
    stages = STAGES_PER_RANK.get(schedule, 1)
    wait = str(WAIT_MS / stages)
    options = ["--schedule", schedule, "--ranks", str(count), "--stages-per-rank", str(stages)]
    options += ["--microbatches", str(MICROBATCHES), "--forward", wait, "--input", wait, "--weight", wait]
    shown = subprocess.run(
        [command, "pipeline", "show", "--json", *options], check=True, capture_output=True, text=True
    )
    return float(json.loads(shown.stdout)["makespan"])
