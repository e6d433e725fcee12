"""A tensor-parallel step under PyTorch: over our backend beside PyTorch's own on gloo, and the same slices alone.

One set of ranks holds a model of each kind (tp_rank.py) and takes a step of each in turn, in another order each round;
a step's time is the slowest rank's. What communication adds to a step is its time less that of the same step without
any, in the same round.
"""

from __future__ import annotations

import results
from rank_processes import Ranks

KINDS = ("alone", "ours", "gloo")
EXPOSED, STEP = 5.0, 1 / 0.8


def bench(rounds: int, ranks_list: list[int], layers: int) -> list[results.Case]:
    return [case for count in ranks_list for case in of_world(rounds, count, layers)]


def of_world(rounds: int, count: int, layers: int) -> list[results.Case]:
    times = []
    with Ranks("tp_rank.py", [str(layers), *KINDS], count, {}) as ranks:
        millions = ranks.ready[0]["parameters"] / 1e6
        for number in range(rounds):
            turn = number % len(KINDS)
            order = KINDS[turn:] + KINDS[:turn]
            times.append({kind: max(reply["ms"] for reply in ranks.tell("step", kind)) for kind in order})
    name = f"tensor-parallel step of {millions:.1f} M parameters, {count} ranks"
    beyond = [(of["ours"], of["gloo"], of["alone"]) for of in times]
    pairs = [(of["ours"], of["gloo"]) for of in times]
    return [
        results.case_beyond(f"{name}: communication", "ms", "PyTorch TP, gloo", beyond, EXPOSED, 0.0),
        results.case(name, "ms", "PyTorch TP, gloo", pairs, STEP, smaller_is_better=True),
    ]
