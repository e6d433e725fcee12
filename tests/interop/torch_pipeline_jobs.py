"""What test_torch_pipeline.py runs: the orders of PyTorch's schedules beside those of `tessera pipeline show`, in both
formats of CSV; and each reads the other's files.

usage: torch_pipeline_jobs.py TESSERA CASES-AS-JSON
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.distributed.pipelining import schedules

TORCH = {
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


def torch_order(name: str, ranks: int, stages: int, microbatches: int) -> list[list[str]]:
    """Its own lists, without what a schedule needs to run: process groups and modules."""
    one: Any = object.__new__(TORCH[name])
    one.pp_group_size, one.num_stages, one.n_local_stages = ranks, ranks * stages, stages
    one._n_microbatches, one._stages = microbatches, [None] * stages
    one.number_of_rounds = max(1, microbatches // ranks)
    one.microbatches_per_round = microbatches // one.number_of_rounds
    placement = "v" if name in ("zbv", "dualpipev") else "loop"
    one.stage_index_to_group_rank = schedules.generate_stage_to_rank_mapping(ranks, ranks * stages, placement)
    return texts(one._calculate_single_rank_operations(rank) for rank in range(ranks))


def texts(orders: Iterable[Iterable[Any]]) -> list[list[str]]:
    return [[text(action) for action in order if action is not None] for order in orders]


def a_schedule(stages: int, microbatches: int, ranks: int) -> Any:
    """One that PyTorch's methods for CSV can be called with."""
    one: Any = object.__new__(schedules._PipelineScheduleRuntime)
    one.pipeline_order, one._stages, one._num_stages = {}, [], stages
    one.pp_group_size, one._n_microbatches = ranks, microbatches
    one._max_active_stages, one._unshard_lookahead, one._max_outstanding_sends = stages, "full", None
    one._defer_reduce_grad_wait = one._defer_pp_recv = False
    return one


def text(action: Any) -> str:
    return str(action).replace("BACKWARD_INPUT", "I").replace("BACKWARD_WEIGHT", "W")


def show(tessera: str, *words: object) -> str:
    command = [tessera, "pipeline", "show", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def ours(tessera: str, kind: str, name: str, ranks: int, stages: int, microbatches: int) -> str:
    sizes = ("--ranks", ranks, "--stages-per-rank", stages, "--microbatches", microbatches)
    return show(tessera, "--schedule", name, kind, *sizes)


def read_by_torch(csv: str, directory: Path) -> list[list[str]]:
    path = directory / "schedule.csv"
    path.write_text(csv)
    one = a_schedule(stages_of(csv), microbatches_of(csv), len(csv.splitlines()))
    schedules.PipelineScheduleMulti._load_csv(one, str(path))
    return texts(order for _, order in sorted(one.pipeline_order.items()))


def check_communication(tessera: str, case: tuple[str, int, int, int], directory: Path) -> None:
    """Ours has the actions of PyTorch's lowering; computations, messages and waits in its order too. PyTorch accepts
    ours and runs it without a deadlock, and `tessera` reads what PyTorch writes."""
    name, ranks, per_rank, microbatches = case
    stages = ranks * per_rank
    path = directory / "schedule.csv"
    path.write_text(csv := ours(tessera, "--csv", *case))
    theirs = a_schedule(stages, microbatches, ranks)
    theirs._load_csv(str(path))
    path.write_text(comms := ours(tessera, "--csv-comms", *case))
    mine = a_schedule(stages, microbatches, ranks)
    mine._load_csv(str(path), format="compute_comms")
    assert mine.stage_index_to_group_rank == theirs.stage_index_to_group_rank, case
    place, own = mine.stage_index_to_group_rank.__getitem__, mine.pipeline_order_with_comms
    for rank, order in theirs.pipeline_order_with_comms.items():
        assert sorted(map(text, flat(order))) == sorted(map(text, own[rank])), (case, rank)

    bare = {rank: [action for action in order if action.microbatch_index is not None] for rank, order in own.items()}
    schedules._validate_schedule(bare, ranks, stages, microbatches)
    schedules._validate_send_waits(bare)
    schedules._simulate_comms_compute(bare, place, stages)
    assert_same_order_of_messages(bare, place)
    if name != "dualpipev":  # its pairs stand together there
        computed = copy.deepcopy(theirs.pipeline_order)
        assert bare == schedules._add_wait_send(schedules._add_send_recv(computed, place, stages)), case
    for kind in ("compute_only", "compute_comms"):
        theirs._dump_csv(str(path), kind)
        assert show(tessera, "--file", path, "--csv") == csv, (case, kind)
    assert show(tessera, "--file", path, "--csv-comms") == comms, case


def flat(order: list[Any]) -> list[Any]:
    return [part for one in order if one is not None for part in one.sub_actions or (one,)]


def assert_same_order_of_messages(orders: dict[int, list[Any]], place: Callable[[int], int]) -> None:
    """Two ranks agree on the order of the messages between them, or NCCL would wait forever."""
    seen: dict[tuple[int, int], list[tuple[int, str, int]]] = {}
    for rank, order in orders.items():
        for one in order:
            kind, stage = one.computation_type.value, one.stage_index
            if kind not in ("SEND_F", "SEND_B", "RECV_F", "RECV_B"):
                continue
            step = 1 if kind in ("SEND_F", "RECV_B") else -1
            sender = stage if kind.startswith("SEND") else stage + step
            seen.setdefault((rank, place(stage + step)), []).append((sender, kind[-1], one.microbatch_index))
    assert seen or len(orders) == 1
    for (rank, peer), messages in seen.items():
        assert messages == seen[peer, rank], (rank, peer)


def stages_of(csv: str) -> int:
    return 1 + max(int(cell) for cell in re.findall(r"(\d+)[FBIW]\d+", csv))


def microbatches_of(csv: str) -> int:
    return 1 + max(int(cell) for cell in re.findall(r"\d+[FBIW](\d+)", csv))


def main(tessera: str, cases: list[tuple[str, int, int, int]], directory: Path) -> None:
    for case in cases:
        csv = ours(tessera, "--csv", *case)
        cells = [line.split(",") for line in csv.splitlines()]
        assert cells == torch_order(*case), case
        assert read_by_torch(csv, directory) == cells, case
    alike = [(name, ranks, 1, 2 * ranks) for name in ("gpipe", "1f1b", "zb_h2") for ranks in (1, 3, 4)]
    for case in [*alike, *cases[::5]]:
        check_communication(tessera, case, directory)
    print(f"{len(cases)} schedules are equal")


main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
