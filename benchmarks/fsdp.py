"""A fully sharded step under PyTorch: ours beside PyTorch's FSDP2 on gloo and beside compute alone; and memory.

One set of ranks holds a model of each kind (fsdp_rank.py) and takes a step of each in turn, in another order each
round; a step's time is the slower rank's. "Alone" trains the whole model on each rank and sends nothing. What
communication adds to a step, exposed, is its time less that of the same step alone in the same round; the optimizer,
fused AdamW, updates a rank's shard in one and the whole model in the other, so that exposed may be below what is
sent. Memory is that of sets of ranks with one kind each: what the model added to the proportional set sizes of all
ranks, at most over a step; and the memory in which whole parameters lie, each piece once a host.
"""

from __future__ import annotations

import results
from rank_processes import Ranks

KINDS = ("alone", "ours", "gloo")
EXPOSED = 3.0  # a third of PyTorch's; or a step of 0.6 of its at 2 ranks, 0.7 at 4
WHOLE = 1.1  # of PyTorch's whole parameters by the ranks of the host


def bench(rounds: int, ranks_list: list[int], layers: int) -> list[results.Case]:
    return [case for count in ranks_list for case in of_world(rounds, count, layers)]


def of_world(rounds: int, count: int, layers: int) -> list[results.Case]:
    with Ranks("fsdp_rank.py", [str(layers), *KINDS], count, {}) as ranks:
        millions = ranks.ready[0]["parameters"] / 1e6
        times = [measured(ranks, number) for number in range(rounds)]
    memory: dict[str, float] = {}
    whole: dict[str, float] = {}
    for kind in KINDS:
        with Ranks("fsdp_rank.py", [str(layers), kind], count, {}) as ranks:
            memory[kind] = float(sum(reply["pss"] for reply in ranks.tell("memory", kind))) / 2**20
            if kind != "alone":
                whole[kind] = of_host(ranks.tell("whole", kind))
    name = f"FSDP step of {millions:.1f} M parameters, {count} ranks"
    exposed = [(of["ours"], of["gloo"], of["alone"]) for of in times]
    cases = [results.case_beyond(f"{name}: exposed", "ms", "PyTorch FSDP2, gloo", exposed, EXPOSED, 0.0)]
    for kind, peer in (("gloo", "PyTorch FSDP2, gloo"), ("alone", "compute alone")):
        pairs = [(of["ours"], of[kind]) for of in times]
        cases.append(results.case(name, "ms", peer, pairs, None, smaller_is_better=True))
    for kind, peer, target in (("gloo", "PyTorch FSDP2, gloo", 1.0), ("alone", "not sharded", None)):
        pair = (memory["ours"], memory[kind])
        cases.append(results.case(f"{name}: memory of all ranks", "MiB", peer, [pair], target, smaller_is_better=True))
    what = f"{name}: whole parameters of the host"
    pair = (whole["ours"], whole["gloo"])
    cases.append(results.case(what, "MiB", "PyTorch FSDP2, gloo", [pair], count / WHOLE, smaller_is_better=True))
    return cases


def of_host(replies: list[dict[str, int]]) -> float:
    """MiB of pieces of memory that several ranks may have seen."""
    pieces: dict[str, int] = {}
    for reply in replies:
        pieces |= {piece: max(size, pieces.get(piece, 0)) for piece, size in reply.items()}
    return sum(pieces.values()) / 2**20


def measured(ranks: Ranks, number: int) -> dict[str, float]:
    """Milliseconds of a step of each kind."""
    turn = number % len(KINDS)
    order = KINDS[turn:] + KINDS[:turn]
    return {kind: max(reply["ms"] for reply in ranks.tell("step", kind)) for kind in order}
