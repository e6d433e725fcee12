"""all_reduce over two hosts of two ranks beside Gloo and the line, the hosts being network name spaces.

The line is what two plain TCP connections' ends send each other at once: an all_reduce over two hosts cannot move less
than its tensor each way. "gloo" is our own Gloo transport over all ranks, "Gloo" is the library's ring. Needs root.

Of ours and of the line it is recorded, too, for how long a call keeps the machine's processors busy, which here are
those of both hosts: what is near the time of a call times the processors is limited by them, not by the transport.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import results

from comm import MIB, rows_of

HOSTS, RANKS = 2, 4
SIZES = [8, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB]
RATES = {"1 Gbit/s": "1gbit", "no limit": ""}


def target(peer: str, rate: str, size: int) -> float | None:
    if size < MIB:
        return None
    if peer == "line":
        return 0.9 if rate else None
    return 1.0


def bench(binaries: Path, rounds: int, sizes: list[int]) -> list[results.Case]:
    sizes_text = ",".join(map(str, sizes))
    cases: list[results.Case] = []
    for words, rate in RATES.items():
        runs: dict[str, list[dict[int, dict[str, float]]]] = defaultdict(list)
        env = dict(os.environ, BENCH_HOSTS=str(HOSTS), BENCH_RATE=rate)
        ours = [str(binaries / "all_reduce_tessera"), str(RANKS), sizes_text, "buffer"]
        for number in range(rounds):
            print(f"  {words}, round {number + 1} of {rounds}", flush=True)
            runs["ours"].append(rows_of(ours, dict(env, TESSERA_BACKEND="auto")))
            runs["line"].append(rows_of([str(binaries / "exchange"), sizes_text], env))
            runs["gloo"].append(rows_of(ours, dict(env, TESSERA_BACKEND="gloo")))
            runs["Gloo"].append(rows_of([str(binaries / "all_reduce_gloo"), str(RANKS), sizes_text], env))
        for peer in ("line", "gloo", "Gloo"):
            for size in sizes:
                pairs = [(a[size]["us"], b[size]["us"]) for a, b in zip(runs["ours"], runs[peer], strict=True)]
                name = f"all_reduce {size} B, {HOSTS} hosts of {RANKS // HOSTS} ranks, {words}"
                cases.append(
                    results.case(name, "us a call", peer, pairs, target(peer, rate, size), smaller_is_better=True)
                )
        for size in sizes:
            if size < MIB:  # less than the clock of the processors' time tells apart
                continue
            for metric, divided in (("processor us a call", False), ("processors busy", True)):
                pairs = [
                    tuple(row[size]["busy_us"] / (row[size]["us"] if divided else 1) for row in both)
                    for both in zip(runs["ours"], runs["line"], strict=True)
                ]
                name = f"{metric}, all_reduce {size} B, {words}"
                cases.append(results.case(name, metric, "line", pairs, None, smaller_is_better=True))
    return cases
