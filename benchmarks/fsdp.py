"""A fully sharded step under PyTorch: ours beside PyTorch's FSDP2 on gloo and beside compute alone; and memory.

One set of ranks holds a model of each kind (fsdp_rank.py) and takes a step of each in turn, in another order each
round; a step's time is the slower rank's. "Alone" trains the whole model on each rank and sends nothing. What
communication adds to a step, exposed, is its time less that of the same step alone in the same round; the optimizer,
fused AdamW, updates a rank's shard in one and the whole model in the other, so that exposed may be below what is
sent. Memory is that of sets of ranks with one kind each: what the model added to the proportional set sizes of all
ranks, at most over a step. Whole parameters: of ours the pages of shared memory that units show in a step, each once a
host; of PyTorch's the storages of what it has gathered, at their highest, summed over ranks. Asked for: 1.1 / ranks.
"""

from __future__ import annotations

import results
from rank_processes import Ranks, length_of

KINDS = ("alone", "ours", "gloo")
EXPOSED = 3.0  # a third of PyTorch's, or the step of STEPS
STEPS = {2: 1 / 0.6, 4: 1 / 0.7}  # by ranks


def bench(rounds: int, ranks_list: list[int], layers: int) -> list[results.Case]:
    return [case for count in ranks_list for case in of_world(rounds, count, layers)]


def of_world(rounds: int, count: int, layers: int) -> list[results.Case]:
    with Ranks("fsdp_rank.py", [str(layers), *KINDS], count, {}) as ranks:
        millions = ranks.ready[0]["parameters"] / 1e6
        times = [measured(ranks, number) for number in range(rounds)]
    name = f"FSDP step of {millions:.1f} M parameters, {count} ranks"
    exposed = [(of["ours"], of["gloo"], of["alone"]) for of in times]
    cases = [results.case_beyond(f"{name}: exposed", "ms", "PyTorch FSDP2, gloo", exposed, EXPOSED, 0.0)]
    for kind, peer, target in (("gloo", "PyTorch FSDP2, gloo", STEPS.get(count)), ("alone", "compute alone", None)):
        pairs = [(of["ours"], of[kind]) for of in times]
        cases.append(results.case(name, "ms", peer, pairs, target, smaller_is_better=True))
    return cases + memory_of_world(count, layers)


def memory(ranks_list: list[int], layers: int) -> list[results.Case]:
    """Memory alone, which needs no quiet machine."""
    return [case for count in ranks_list for case in memory_of_world(count, layers)]


def memory_of_world(count: int, layers: int) -> list[results.Case]:
    """Each kind in ranks of its own."""
    pss, whole, complete = {}, {}, {}
    for kind in KINDS:
        with Ranks("fsdp_rank.py", [str(layers), kind], count, {}) as ranks:
            millions = ranks.ready[0]["parameters"] / 1e6
            pss[kind] = sum(reply["pss"] for reply in ranks.tell("memory", kind)) / 2**20
            replies = ranks.tell("unsharded", kind)
            pages = {tuple(part) for reply in replies for part in reply["pages"]}
            whole[kind] = (length_of(pages) if kind == "ours" else sum(reply["held"] for reply in replies)) / 2**20
            complete[kind] = sum(reply["complete"] for reply in replies) / 2**20
    if whole["ours"] == 0 or whole["gloo"] == 0:
        raise RuntimeError(f"no whole parameters were found among {count} ranks: {whole}")
    name = f"FSDP step of {millions:.1f} M parameters, {count} {'rank' if count == 1 else 'ranks'}"
    cases = []
    asked = 1.0 if count > 1 else None  # on one rank nothing is cut
    for kind, peer, target in (("gloo", "PyTorch FSDP2, gloo", asked), ("alone", "not sharded", None)):
        pair = (pss["ours"], pss[kind])
        cases.append(results.case(f"{name}: memory of all ranks", "MiB", peer, [pair], target, smaller_is_better=True))
    for peer, theirs, target in (
        ("PyTorch FSDP2, gloo", whole, count / 1.1 if count > 1 else None),
        ("PyTorch FSDP2 without gathers in flight", complete, None),
    ):
        pair = (whole["ours"], theirs["gloo"])
        label = f"{name}: full parameters on the host"
        cases.append(results.case(label, "MiB", peer, [pair], target, smaller_is_better=True))
    return cases


def measured(ranks: Ranks, number: int) -> dict[str, float]:
    """Milliseconds of a step of each kind."""
    turn = number % len(KINDS)
    order = KINDS[turn:] + KINDS[:turn]
    return {kind: max(reply["ms"] for reply in ranks.tell("step", kind)) for kind in order}
