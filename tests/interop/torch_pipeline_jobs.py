"""What test_torch_pipeline.py runs: the orders of PyTorch's schedules beside those of `tessera pipeline show`, and its
reading of our CSV.

usage: torch_pipeline_jobs.py TESSERA CASES-AS-JSON
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
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
    orders = [one._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return [[text(action) for action in order if action is not None] for order in orders]


def text(action: Any) -> str:
    return str(action).replace("BACKWARD_INPUT", "I").replace("BACKWARD_WEIGHT", "W")


def ours(tessera: str, name: str, ranks: int, stages: int, microbatches: int) -> str:
    words = [tessera, "pipeline", "show", "--schedule", name, "--csv", "--ranks", str(ranks)]
    words += ["--stages-per-rank", str(stages), "--microbatches", str(microbatches)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def read_by_torch(csv: str, directory: Path) -> list[list[str]]:
    path = directory / "schedule.csv"
    path.write_text(csv)
    one: Any = object.__new__(schedules.PipelineScheduleMulti)
    rows = csv.splitlines()
    one.pipeline_order, one._stages = {}, []
    one.pp_group_size, one._num_stages, one._n_microbatches = len(rows), stages_of(csv), microbatches_of(csv)
    schedules.PipelineScheduleMulti._load_csv(one, str(path))
    return [[text(action) for action in order if action is not None] for _, order in sorted(one.pipeline_order.items())]


def stages_of(csv: str) -> int:
    return 1 + max(int(cell) for cell in re.findall(r"(\d+)[FBIW]\d+", csv))


def microbatches_of(csv: str) -> int:
    return 1 + max(int(cell) for cell in re.findall(r"\d+[FBIW](\d+)", csv))


def main(tessera: str, cases: list[tuple[str, int, int, int]], directory: Path) -> None:
    for case in cases:
        csv = ours(tessera, *case)
        cells = [line.split(",") for line in csv.splitlines()]
        assert cells == torch_order(*case), case
        assert read_by_torch(csv, directory) == cells, case
    print(f"{len(cases)} schedules are equal")


main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
