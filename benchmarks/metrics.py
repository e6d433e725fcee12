"""Average precision, AUROC and the precision-recall curve of scores that are distributed over ranks: ours beside
scikit-learn, for which PyTorch's gloo gathers the scores on one rank, and beside torchmetrics over gloo.

All begin with the same arrays on each rank and take turns. A time is the slowest rank's. Memory is the most that a rank
had beyond its samples: a metric's copy of the scores, what the computation takes, and the result. scikit-learn and
torchmetrics are compared where they are asked for a target (100 and 10 million scores); the values have to be the same.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import results
from rank_processes import Ranks

PEERS = Path(__file__).parent.parent / ".venv" / "impi" / "lib"  # of ./dev setup --bench
RANKS = 4
QUICK = 10**6
AREAS = {"average_precision": "average precision", "auroc": "AUROC"}
CURVE = "precision-recall curve"
# How many scores, how many times as fast ours should be, and how far values may differ: torchmetrics computes in f32.
SCIKIT_LEARN, TORCHMETRICS = (10**8, 3.0, 1e-9), (10**7, 5.0, 1e-4)
METRICS = {
    "scikit-learn": {**AREAS, "precision_recall_curve:sharded": f"{CURVE}, left sharded"},
    "torchmetrics": {**AREAS, "precision_recall_curve:whole": f"{CURVE} on every rank"},
}


def bench(rounds: int, quick: bool) -> list[results.Case]:
    cases = []
    for peer, (scores, target, precision) in (("scikit-learn", SCIKIT_LEARN), ("torchmetrics", TORCHMETRICS)):
        # A round of scikit-learn takes minutes: ours before and after it.
        peer_rounds = 1 if peer == "scikit-learn" else rounds
        cases += beside(peer, QUICK if quick else scores, None if quick else target, precision, peer_rounds)
    return cases


def beside(peer: str, scores: int, target: float | None, precision: float, rounds: int) -> list[results.Case]:
    title = f"{scores / 1e6:g} M scores, {RANKS} ranks"
    name = "scikit-learn on one rank" if peer == "scikit-learn" else peer
    site = PEERS / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    cases = []
    with tempfile.TemporaryDirectory() as meeting:
        arguments = [str(scores), f"{meeting}/store"]
        with Ranks("metrics_rank.py", arguments, RANKS, {"PYTHONPATH": str(site)}) as ranks:
            for metric, what in METRICS[peer].items():
                if peer == "torchmetrics":  # it imports and allocates on the first call
                    for side in ("ours", peer):
                        ranks.tell("step", side, metric)
                times, memory = [], []
                for _ in range(rounds):
                    before, other, after = (ranks.tell("step", side, metric) for side in ("ours", peer, "ours"))
                    for one in (before, after):
                        compare(f"{what}, {title}", one, other, precision)
                        times.append((slowest(one), slowest(other)))
                        memory.append((most(one), most(other)))
                case = f"{what} of {title}"
                cases.append(results.case(case, "s", name, times, target, smaller_is_better=True))
                cases.append(results.case(f"{case}: memory", "MiB", name, memory, None, smaller_is_better=True))
                if peer == "scikit-learn":
                    asked = 2 * max(reply["scores"] for reply in before) / 2**20
                    bound = [(ours, asked) for ours, _ in memory]
                    least = None if target is None else 1.0
                    cases.append(results.case(f"{case}: memory", "MiB", "bound", bound, least, smaller_is_better=True))
    return cases


def slowest(replies: list[dict[str, Any]]) -> float:
    return float(max(reply["ms"] for reply in replies) / 1e3)


def most(replies: list[dict[str, Any]]) -> float:
    return float(max(reply["extra"] for reply in replies) / 2**20)


def compare(what: str, ours: list[dict[str, Any]], other: list[dict[str, Any]], precision: float) -> None:
    expected = other[0]["value"]
    for rank, reply in enumerate(ours):
        if abs(reply["value"] - expected) > precision:
            raise RuntimeError(f"{what}: rank {rank} has {reply['value']}, the peer {expected}")
