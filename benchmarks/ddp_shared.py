"""One copy of parameters and moments per host (share_params) against one per rank: memory and the optimizer's time.

Three sets of ranks (ddp_shared_rank.py) hold the same model: "shared"; "plain", whose optimizer steps after the
reduction; and "in backward", plain with the optimizer stepping bucket by bucket. They take a step in turn, in another
order each round, the others idle. "Update" is a step whose gradients are not reduced: the optimizer alone, and where
ranks meet. Memory is what the model added to the proportional set sizes of all ranks, once all have taken steps.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack

import results
from rank_processes import Ranks

KINDS = ("shared", "plain", "backward")
PEERS = {"plain": "one copy per rank", "backward": "one copy per rank, step in backward"}
WORK = {"update": "update", "step": "reduce and update"}


def bench(rounds: int, ranks_list: list[int]) -> list[results.Case]:
    return [case for count in ranks_list for case in of_world(rounds, count)]


def of_world(rounds: int, count: int) -> list[results.Case]:
    with ExitStack() as stack:
        scratch = tempfile.mkdtemp(prefix="tessera-bench-")
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        sets = {
            kind: stack.enter_context(Ranks("ddp_shared_rank.py", [kind, f"{scratch}/{kind}"], count, {}))
            for kind in KINDS
        }
        memory = {}
        for kind, ranks in sets.items():
            made = ranks.tell("make")
            memory[kind] = sum(reply["pss"] for reply in made)
            gradients = sum(reply["parameters"] for reply in made) * 4
        millions = made[0]["parameters"] / 1e6
        times: list[dict[tuple[str, str], float]] = []
        for number in range(rounds):
            turn = number % len(KINDS)
            order = KINDS[turn:] + KINDS[:turn]
            times.append({(work, kind): slowest(sets[kind], work) for work in WORK for kind in order})
    model = f"AdamW, {millions:.1f} M parameters, {count} ranks"
    pair = (memory["shared"], memory["plain"])
    without = (pair[0] - gradients, pair[1] - gradients)
    cases = [
        results.case(f"{model}: parameters and moments", "bytes", PEERS["plain"], [without], 0.95 * count,
                     smaller_is_better=True),
        results.case(f"{model}: parameters, moments and gradients", "bytes", PEERS["plain"], [pair], None,
                     smaller_is_better=True),
    ]  # fmt: skip
    for work, name in WORK.items():
        for kind, peer in PEERS.items():
            pairs = [(of[work, "shared"], of[work, kind]) for of in times]
            cases.append(results.case(f"{model}: {name}", "ms", peer, pairs, None, smaller_is_better=True))
    return cases


def slowest(ranks: Ranks, work: str) -> float:
    """Milliseconds of a step, by the slowest rank."""
    return max(reply["ms"] for reply in ranks.tell("time", work))
