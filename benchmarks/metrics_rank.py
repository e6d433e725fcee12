"""One rank of `./dev bench metrics`: has scores from 0 to 1 and labels, and computes a metric of all ranks'.

usage: metrics_rank.py SCORES RENDEZVOUS, under torchrun's environment; SCORES are of all ranks. Commands, a line each:
`step LIBRARY METRIC`. The reply has the milliseconds, the most memory that the rank had beyond its samples, the bytes
of its scores, and the metric, or of a curve its average precision; null on ranks that do not get it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tessera as ts
import torch
import torch.distributed as dist
from checkpoint_worker import memory_bytes

TOTAL, RENDEZVOUS = int(sys.argv[1]), sys.argv[2]
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ENDS = [TOTAL * rank // WORLD_SIZE for rank in range(WORLD_SIZE + 1)]
CURVE = "precision_recall_curve"
Array = npt.NDArray[Any]
Found = float | tuple[Array, Array] | None  # a number; precision and recall


def samples() -> tuple[Array, Array]:
    """What a classifier that is not bad says; a fifth of the samples are positive."""
    chance = np.random.default_rng(RANK)
    count = ENDS[RANK + 1] - ENDS[RANK]
    labels = (chance.random(count, np.float32) < 0.2).astype(np.uint8)
    scores = chance.standard_normal(count, np.float32)
    scores += labels
    np.negative(scores, out=scores)
    np.exp(scores, out=scores)
    scores += 1
    return np.reciprocal(scores, out=scores), labels


def ours(comm: ts.Comm, kind: str, how: str, scores: Array, labels: Array) -> Found:
    """A curve is sharded, with a part of it on each rank, or every rank has it ("whole")."""
    options: Any = {"sharded": True} if how == "sharded" else {}
    with ts.Metric(kind, **options) as metric:  # type: ignore[arg-type]
        metric.update(scores, labels)
        value = metric.compute(comm)
        return (metric.array("precision"), metric.array("recall")) if kind == CURVE else value


def scikit_learn(kind: str, scores: Array, labels: Array) -> Found:
    """On rank 0, of what gloo gathers there."""
    import sklearn.metrics

    gathered = []
    for own in (scores, labels):
        parts = None
        if RANK == 0:
            gathered.append(np.empty(TOTAL, own.dtype))
            parts = [torch.from_numpy(gathered[-1][a:b]) for a, b in pairwise(ENDS)]
        dist.gather(torch.from_numpy(own), parts)
    if RANK > 0:
        return None
    all_scores, all_labels = gathered
    if kind == "average_precision":
        return float(sklearn.metrics.average_precision_score(all_labels, all_scores))
    if kind == "auroc":
        return float(sklearn.metrics.roc_auc_score(all_labels, all_scores))
    precision, recall, _ = sklearn.metrics.precision_recall_curve(all_labels, all_scores)
    return precision, recall


def torchmetrics(kind: str, scores: Array, labels: Array) -> Found:
    """On every rank, by its own synchronization over gloo."""
    from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, BinaryPrecisionRecallCurve

    kinds = {CURVE: BinaryPrecisionRecallCurve, "average_precision": BinaryAveragePrecision, "auroc": BinaryAUROC}
    metric = kinds[kind](thresholds=None)
    metric.update(torch.from_numpy(scores), torch.from_numpy(labels))
    value = metric.compute()
    return (value[0].numpy(), value[1].numpy()) if kind == CURVE else float(value)


def number_of(found: Found, how: str, comm: ts.Comm) -> float | None:
    """What the libraries are compared by: of a curve its average precision."""
    if not isinstance(found, tuple):
        return found
    precision, recall = (array.astype(np.float64) for array in found)  # recall falls
    if how != "sharded":
        return float(-np.sum(np.diff(recall) * precision[:-1]))
    # The first rank has the highest scores, and the curve's end at recall 0. Others lack the step to the one before.
    firsts = np.empty(WORLD_SIZE)
    comm.all_gather(recall[:1].copy(), firsts)
    steps = -np.diff(recall, append=0.0 if RANK == 0 else firsts[RANK - 1])
    total = np.array([np.sum(steps * precision)])
    comm.all_reduce(total)
    return float(total[0])


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no reply
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    scores, labels = samples()
    with ts.Store(f"file://{RENDEZVOUS}", insecure=True) as store:
        comm = ts.Comm.create(store, RANK, WORLD_SIZE)
        sides: dict[str, Callable[[str, str], Found]] = {
            "ours": lambda kind, how: ours(comm, kind, how, scores, labels),
            "scikit-learn": lambda kind, _: scikit_learn(kind, scores, labels),
            "torchmetrics": lambda kind, _: torchmetrics(kind, scores, labels),
        }
        comm.barrier()
        replies.write("{}\n")
        for line in sys.stdin:
            _, side, metric = line.split()
            kind, _, how = metric.partition(":")
            before = memory_bytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM begins anew
            comm.barrier()
            begin = time.perf_counter()
            found = sides[side](kind, how)
            reply = {"ms": (time.perf_counter() - begin) * 1e3}
            comm.barrier()  # what follows takes time from ranks that are not done
            reply["extra"] = max(memory_bytes("VmHWM") - before, 4096)  # a page at least: ratios are made of it
            value = number_of(found, how if side == "ours" else "whole", comm)
            replies.write(json.dumps({**reply, "scores": scores.nbytes, "value": value}) + "\n")
            del found
        comm.finalize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
