"""Saves in the background: what the trainer waits and loses, beside PyTorch's dcp.async_save, rounds interleaved.

Two ranks train a model with AdamW (checkpoint_async_rank.py), 1 GiB of parameters and moments, half of which each
rank stages and writes. "Blocked" is the slower rank's wait for save_async; a copy of as many bytes into memory that is
there is measured in the same round. The trainer's slowdown is the time of what it did while the save drained over that
of the same alone, right after; the rates are set by write_bytes_per_s from a raw write (fio) of the same round. With
low priority the writers give way to the trainer where no core is free, and drain at what is left; with ordinary
priority they keep the rate, and that is what the target of the slowdown is for. Extra memory is the peak beyond what
the process held before its first save. Every save is durable before the next command.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import results
from rank_processes import Ranks

from checkpoint import raw_seconds

WORLD_SIZE = 2
OURS = ("at-once", "on-demand")
DCP = "dcp.async_save"
TARGET_MS = 1.0  # of the call, with a core-owned optimizer
PRIORITIES = {"on-demand-ordinary": "ordinary priority", "on-demand": "low priority"}
RATES = (0.5, 0.25, 0)  # limits, parts of raw; 0: none
SLOWDOWNS = {0.5: 0.15, 0.25: 0.05, 0: 0.15}  # that are allowed; without a limit a save drains at 0.5 of raw or more


class Library:
    """The ranks of ours or of PyTorch; each figure is the larger one of the ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.shard = int(_largest(ranks.ready)["shard"])

    def do(self, command: str, *arguments: str | int) -> dict[str, float]:
        return _largest(self.ranks.tell(command, *arguments))


def _largest(replies: list[dict[str, float]]) -> dict[str, float]:
    return {key: max(reply[key] for reply in replies) for key in replies[0]}


def bench(rounds: int) -> list[results.Case]:
    scratch = Path(tempfile.mkdtemp(prefix="tessera-bench-", dir=os.environ.get("TESSERA_BENCH_DIR")))
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        ours, dcp = (
            Library(
                stack.enter_context(
                    Ranks("checkpoint_async_rank.py", [name], WORLD_SIZE, {"BENCH_SCRATCH": str(scratch)})
                )
            )
            for name in ("ours", "dcp")
        )
        for number in range(rounds):
            print(f"  round {number + 1} of {rounds}", flush=True)
            saves = {}
            for library, mode in ((dcp, DCP), (ours, "at-once"), (ours, "on-demand")):
                for memory in ("new", "kept", "kept"):  # the last one counts
                    os.sync()
                    saves[mode, memory] = library.do("save", mode, memory)
                pairs[f"{mode} extra"].append((saves[mode, "new"]["extra"], library.shard))
                if mode == "at-once":
                    pairs["memcpy"].append((saves[mode, "kept"]["blocked"], library.do("memcpy")["seconds"]))
            pairs["limit"].append((saves["on-demand", "kept"]["blocked"], TARGET_MS / 1000))
            for mode in OURS:
                for memory in ("new", "kept"):
                    pairs[f"{mode} {memory}"].append((saves[mode, memory]["blocked"], saves[DCP, memory]["blocked"]))
            os.sync()
            seconds = raw_seconds("write", scratch / "raw", WORLD_SIZE, ours.shard * WORLD_SIZE)
            raw = ours.shard / seconds  # bytes a second and rank
            shutil.rmtree(scratch / "raw")
            for rate in RATES:
                for mode in PRIORITIES:
                    os.sync()
                    train = ours.do("train", mode, int(rate * raw))
                    pairs[f"{mode} {rate}"].append((train["busy"], train["alone"]))
                    pairs[f"{mode} rate {rate}"].append((ours.shard / train["busy"], raw))
            os.sync()
            train = dcp.do("train", DCP, 0)
            pairs[f"{DCP} train"].append((train["busy"], train["alone"]))
            pairs[f"{DCP} rate"].append((dcp.shard / train["busy"], raw))

    gib = f"{WORLD_SIZE} ranks, {ours.shard >> 20} MiB each"
    words = {"at-once": "copied immediately", "on-demand": "copied on demand"}

    def case(name: str, metric: str, peer: str, key: str, target: float | None = None) -> results.Case:
        return results.case(f"{name}, {gib}", metric, peer, pairs[key], target, smaller_is_better=True)

    cases = [
        case("caller blocked, copied immediately", "s", "one warm memcpy of the shard", "memcpy", 1 / 1.05),
        case("caller blocked, copied on demand", "s", "bound", "limit", 1.0),
    ]
    for mode in OURS:
        cases += [
            case(f"caller blocked, {words[mode]}", "s", f"{DCP}, cached staging", f"{mode} kept"),
            case(f"caller blocked by the first save, {words[mode]}", "s", DCP, f"{mode} new"),
        ]

    def drains(save: str, train: str, rate: str, slowdown: float | None) -> list[results.Case]:
        target = None if slowdown is None else 1 / (1 + slowdown)
        return [
            case(f"training while {save} drains", "s", "training alone", train, target),
            results.case(f"{save} drains, {gib}", "bytes/s", "raw", pairs[rate], None, smaller_is_better=False),
        ]

    for rate in RATES:
        limit = f"limited to {rate} of raw" if rate else "without a limit"
        for mode, priority in PRIORITIES.items():
            cases += drains(f"a save {limit}, {priority},", f"{mode} {rate}", f"{mode} rate {rate}", SLOWDOWNS[rate])
    cases += drains(DCP, f"{DCP} train", f"{DCP} rate", None)
    for mode in OURS:
        cases.append(case(f"extra memory, {words[mode]}", "bytes", "the shard", f"{mode} extra", 1 / 1.02))
    cases.append(case(f"extra memory of {DCP}", "bytes", "the shard", f"{DCP} extra"))
    return cases
