"""The schedule of a fully sharded step, played through: its time and what communication adds, up to 1,024 ranks.

As src/parallel/fsdp/fsdp.cc orders it: a unit's gather begins with its own forward or backward at the latest, and
earlier by as many units as are prefetched; a backward waits while the gradients of `grads_in_flight` units are being
reduced; the step ends with the last reduction. Gathers follow each other, and so do reductions; on one host the two
have a thread each, between hosts they share a link. Costs are those of docs/SCALING.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import results
from transformer import LAYERS, WIDTH, shapes

MIB = 1 << 20
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PER_HOST = 8
ALPHA = 10e-6  # a message between hosts, an assumption as in docs/SCALING.md
LINK = 100e9 / 8
CHUNK = 1 << 20


@dataclass(frozen=True)
class Unit:
    bytes: float
    forward: float  # seconds
    backward: float
    keep: bool = False  # whole between forward and backward
    batches: int = 1  # exchanged one by one between hosts: of up to 4 MiB, or a larger parameter


@dataclass(frozen=True)
class Options:
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    grads_in_flight: int = 2
    one_link: bool = False  # for gathers and reductions


@dataclass
class Lane:
    """Jobs one after the other."""

    free: float = 0.0

    def run(self, ready: float, seconds: float) -> float:
        self.free = max(self.free, ready) + seconds
        return self.free


def step(units: list[Unit], gather: list[float], reduce: list[float], options: Options) -> float:
    """Seconds of a step whose gathers and reductions take so long a unit."""
    gathers = Lane()
    reductions = gathers if options.one_link else Lane()
    order = list(range(len(units)))
    now = 0.0
    for order_of_pass, prefetch, backward in (
        (order, options.forward_prefetch, False),
        (order[::-1], options.backward_prefetch, True),
    ):
        whole = {u: 0.0 for u in order if units[u].keep and backward}
        reducing: list[float] = []
        for at, unit in enumerate(order_of_pass):
            for ahead in order_of_pass[at : at + 1 + prefetch]:
                if ahead not in whole:
                    whole[ahead] = gathers.run(now, gather[ahead])
            if backward:
                reducing = [end for end in reducing if end > now]
                while len(reducing) >= options.grads_in_flight:
                    now = max(now, reducing.pop(0))
            now = max(now, whole[unit]) + (units[unit].backward if backward else units[unit].forward)
            if backward:
                reducing.append(reductions.run(now, reduce[unit]))
    return max([now, *reducing])


@dataclass(frozen=True)
class Machine:
    """Ranks of a host share a memory of `memory` bytes/s, in which a meeting of all takes `meeting` seconds."""

    memory: float
    meeting: float
    link: float = LINK
    alpha: float = ALPHA


def gather_seconds(size: float, hosts: int, per_host: int, machine: Machine, batches: int = 1) -> float:
    """Each rank writes its chunks, the leaders exchange those of their hosts: WholeCopies::make_whole."""
    if hosts * per_host == 1:
        return 2 * size / machine.memory
    inside = 2 * size / hosts / machine.memory + 2 * machine.meeting * (per_host > 1)
    if hosts == 1:
        return inside
    messages = machine.alpha * (hosts - 1) * (batches + 3)  # to agree on the unit, two; a notice before the rows
    return inside + max(size * (hosts - 1) / hosts / machine.link, messages)


def reduce_seconds(size: float, hosts: int, per_host: int, machine: Machine, batches: int = 1) -> float:
    """Each rank reads its part of all gradients of its host, the leaders exchange sums: GradientScatter::scatter."""
    if hosts * per_host == 1:
        return 2 * size / machine.memory
    inside = (per_host + 1) * size / machine.memory + 2 * machine.meeting * (per_host > 1)
    if hosts == 1:
        return inside
    messages = machine.alpha * (hosts - 1) * (batches + math.ceil(size / CHUNK))  # with a notice
    return max(inside, size * (hosts - 1) / hosts / machine.link, messages)


def replicas_seconds(size: float, shard_ranks: int, replicas: int, per_host: int, machine: Machine) -> float:
    """An all_reduce of each rank's shard with those that hold the same; the ranks of a host share its link."""
    if replicas == 1:
        return 0.0
    through_link = 2 * size / shard_ranks * per_host * (replicas - 1) / replicas
    messages = 2 * machine.alpha * (replicas - 1) * math.ceil(size / shard_ranks / CHUNK)
    return max(through_link / machine.link, messages)


def step_of(units: list[Unit], ranks: int, machine: Machine, shard_ranks: int = 0, **options: int) -> float:
    """With `PER_HOST` ranks a host; `shard_ranks`, if not 0, a multiple of these."""
    per_host = min(ranks, PER_HOST)
    sharded = min(shard_ranks or ranks, ranks)
    hosts, replicas = sharded // per_host, ranks // sharded
    gather = [gather_seconds(u.bytes, hosts, per_host, machine, u.batches) for u in units]
    reduce = [
        reduce_seconds(u.bytes, hosts, per_host, machine, u.batches)
        + replicas_seconds(u.bytes, sharded, replicas, per_host, machine)
        for u in units
    ]
    return step(units, gather, reduce, Options(one_link=ranks > per_host, **options))


def without_overlap(units: list[Unit], ranks: int, machine: Machine) -> float:
    """Seconds of a step on one host whose cores all compute: each copy takes its time from them. Under PyTorch each
    rank copies its gradients into the library's memory, too."""
    seconds = 0.0
    for u in units:
        gathers = 1 if u.keep else 2
        seconds += u.forward + u.backward + gathers * gather_seconds(u.bytes, 1, ranks, machine)
        seconds += reduce_seconds(u.bytes, 1, ranks, machine) + 2 * ranks * u.bytes / machine.memory
    return seconds


# ---- with what was measured ----


def measured_machine(ranks: int) -> Machine:
    """From all_reduces of 16 MiB (2 n S / B) and of 8 bytes in scaling.json."""
    by_name = {case["case"]: case["ours"] * 1e-6 for case in results.read("scaling")}
    count = min(max(ranks, 2), PER_HOST)
    large = by_name[f"all_reduce {16 * MIB} B, {count} ranks, library memory"]
    return Machine(2 * count * 16 * MIB / large, by_name[f"all_reduce 8 B, {count} ranks, library memory"])


def measured_units(compute: float) -> list[Unit]:
    """Of benchmarks/ddp_rank.py's transformer: the root with the words, whole throughout, and a unit a layer. A third
    of the computing is forward, and the parts are as the products of tokens and matrices are."""
    sizes = {name: math.prod(shape) for name, shape in shapes().items()}
    words = sizes["words"] + (64 + 2) * WIDTH
    layer = sum(size for name, size in sizes.items() if name.startswith("0.")) + 2 * WIDTH
    parts = [words, *[layer] * LAYERS]
    shares = [part / sum(parts) for part in parts]
    return [
        Unit(4.0 * part, compute * share / 3, compute * share * 2 / 3, keep=i == 0, batches=2 if i == 0 else 3)
        for i, (part, share) in enumerate(zip(parts, shares, strict=True))
    ]


def measured(ranks: int) -> tuple[float, float]:
    """Seconds of a step, and of the same alone, in fsdp.json."""
    for case in results.read("fsdp"):
        if case["case"].endswith(f", {ranks} ranks") and case["peer_name"] == "compute alone":
            return case["ours"] / 1e3, case["peer"] / 1e3
    raise ValueError(f"fsdp.json has no step of {ranks} ranks beside compute alone")


def text() -> str:
    """What docs/SCALING.md says."""
    rows = [
        "| | overlapped | deviation | not | deviation | measured | exposed: overlapped | not | measured |",
        "|---" * 9 + "|",
    ]
    for ranks in (2, 4):
        ours, alone = measured(ranks)
        units, machine = measured_units(alone), measured_machine(ranks)
        both = step_of(units, ranks, machine), without_overlap(units, ranks, machine)
        cells = [f"{found * 1e3:.0f} ms | {(found / ours - 1) * 100:+.1f} %" for found in both]
        exposed = [f"{(found - alone) * 1e3:.1f} ms" for found in (*both, ours)]
        rows.append(f"| {ranks} ranks | {' | '.join(cells)} | {ours * 1e3:.0f} ms | {' | '.join(exposed)} |")
    _, alone = measured(2)
    units, machine = measured_units(alone), measured_machine(PER_HOST)
    variants: list[tuple[str, dict[str, int]]] = [
        ("default", {}),
        ("no prefetch", {"forward_prefetch": 0, "backward_prefetch": 0}),
        ("`grads_in_flight` 1", {"grads_in_flight": 1}),
        ("replicas, `shard_ranks` 8", {"shard_ranks": PER_HOST}),
    ]
    heads = [f"{name}: step | exposed" for name, _ in variants]
    rows += ["", f"| ranks | hosts | {' | '.join(heads)} |", "|---" * (2 + 2 * len(variants)) + "|"]
    for ranks in RANKS:
        cells = [f"{ranks:,}", str(max(1, ranks // PER_HOST))]
        for _, options in variants:
            found = step_of(units, ranks, machine if ranks >= PER_HOST else measured_machine(ranks), **options)
            cells += [f"{found * 1e3:.0f} ms", f"{(found - alone) * 1e3:.1f} ms"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(text())
