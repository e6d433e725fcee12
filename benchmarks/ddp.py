"""A step of DDP under PyTorch: ours, PyTorch's on gloo, and PyTorch's on our backend, beside compute alone.

One set of ranks holds a model of each kind (ddp_rank.py) and takes a step of each in turn, in another order each
round; a step's time is the slower rank's. What communication adds to a step, exposed, is its time less that of the same
step without any in the same round, taken by all ranks at once too. PyTorch's runs with gradient_as_bucket_view, which
is its faster way.
"""

from __future__ import annotations

import results
from rank_processes import Ranks

KINDS = ("alone", "ours", "gloo", "backend")
TARGET, WITHIN = 5.0, 0.05  # exposed: a fifth of gloo's, or this part of the step


def bench(rounds: int, ranks_list: list[int], layers: int) -> list[results.Case]:
    cases = []
    for count in ranks_list:
        with Ranks("ddp_rank.py", [str(layers)], count, {}) as ranks:
            millions = ranks.ready[0]["parameters"] / 1e6
            times = [measured(ranks, number) for number in range(rounds)]
        step = f"DDP step of {millions:.1f} M parameters, {count} ranks"
        for kind, name, target in (("gloo", "PyTorch gloo", TARGET), ("backend", 'PyTorch "tessera"', None)):
            exposed = [(of["ours"], of[kind], of["alone"]) for of in times]
            cases.append(results.case_beyond(f"{step}: exposed", "ms", name, exposed, target, WITHIN))
        for kind, name in (("gloo", "PyTorch gloo"), ("backend", 'PyTorch "tessera"'), ("alone", "compute alone")):
            pairs = [(of["ours"], of[kind]) for of in times]
            cases.append(results.case(step, "ms", name, pairs, None, smaller_is_better=True))
    return cases


def measured(ranks: Ranks, number: int) -> dict[str, float]:
    """Milliseconds of a step of each kind."""
    turn = number % len(KINDS)
    order = KINDS[turn:] + KINDS[:turn]
    return {kind: max(reply["ms"] for reply in ranks.tell("step", kind, 1)) for kind in order}
