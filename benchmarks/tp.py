"""A tensor-parallel step under PyTorch: over our backend beside PyTorch's own on gloo, and the same slices alone.

There is a set of ranks of each kind (tp_rank.py); they take a step in turn, in another order each round, while the
others are idle. A step's time is the slowest rank's. What communication adds to a step is its time less that of the
same step without any, in the same round. Most of ours is that the ranks wait for each other, which a step shows whose
all-reduces have one element.
"""

from __future__ import annotations

from contextlib import ExitStack

import results
from rank_processes import Ranks

KINDS = ("alone", "meets", "ours", "gloo")
EXPOSED, STEP = 5.0, 1 / 0.8


def bench(rounds: int, ranks_list: list[int], layers: int) -> list[results.Case]:
    return [case for count in ranks_list for case in of_world(rounds, count, layers)]


def of_world(rounds: int, count: int, layers: int) -> list[results.Case]:
    times = []
    with ExitStack() as stack:
        ranks = {kind: stack.enter_context(Ranks("tp_rank.py", [str(layers), kind], count, {})) for kind in KINDS}
        millions = ranks["ours"].ready[0]["parameters"] / 1e6
        for number in range(rounds):
            turn = number % len(KINDS)
            order = KINDS[turn:] + KINDS[:turn]
            times.append({kind: max(reply["ms"] for reply in ranks[kind].tell("step", kind)) for kind in order})
    name = f"tensor-parallel step of {millions:.1f} M parameters, {count} ranks"
    beyond = [(of["ours"], of["gloo"], of["alone"]) for of in times]
    waits = [(of["ours"] - of["alone"], of["meets"] - of["alone"]) for of in times]
    pairs = [(of["ours"], of["gloo"]) for of in times]
    return [
        results.case_beyond(f"{name}: communication", "ms", "PyTorch TP, gloo", beyond, EXPOSED, 0.0),
        results.case(f"{name}: communication", "ms", "all-reduces of one element", waits, None, smaller_is_better=True),
        results.case(name, "ms", "PyTorch TP, gloo", pairs, STEP, smaller_is_better=True),
    ]
