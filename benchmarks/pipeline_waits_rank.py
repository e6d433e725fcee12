"""One rank of `./dev bench pipeline`: stages whose work is a wait that takes no processor.

usage: pipeline_waits_rank.py MICROBATCHES WAIT_MS SCHEDULE..., under torchrun's environment. Each rank waits WAIT_MS
for the forward of a micro-batch, and twice that for the backward, over all of its stages. Commands, a line each:
`step SCHEDULE`; the answer tells the waits' sum in milliseconds, as asked for and as it was.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from functools import partial

import numpy as np
import tessera as ts
from rank_processes import serve_steps

ROWS, WIDTH = 4, 64
STAGES_PER_RANK = {"zbv": 2, "dualpipev": 2, "interleaved_1f1b": 2, "interleaved_zero_bubble": 2}
IN_A_V = ("zbv", "dualpipev")


PR_SET_TIMERSLACK = 29


class Waits:
    """Their sum in milliseconds: a processor comes back from idling later than it was asked to."""

    asked = 0.0
    took = 0.0

    def wait(self, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        self.took += (time.perf_counter() - begin) * 1e3
        self.asked += seconds * 1e3

    def tell(self) -> dict[str, float]:
        told = {"asked": self.asked, "took": self.took}
        self.asked = self.took = 0.0
        return told


def stages_of(schedule: str, rank: int, world: int) -> list[int]:
    if schedule in IN_A_V:
        return [rank, 2 * world - 1 - rank]
    return [rank + i * world for i in range(STAGES_PER_RANK.get(schedule, 1))]


def pipeline(comm: ts.Comm, schedule: str, microbatches: int, seconds: float, waits: Waits) -> ts.Pipeline:
    wait = seconds / STAGES_PER_RANK.get(schedule, 1)

    def forward(call: ts.StageCall) -> object:
        waits.wait(wait)
        return 0.0 if call.targets else call.inputs[0]

    def backward_input(call: ts.StageCall) -> None:
        waits.wait(wait)

    def backward_weight(call: ts.StageCall) -> None:
        waits.wait(wait)

    def backward(call: ts.StageCall) -> None:
        waits.wait(2 * wait)

    stages = stages_of(schedule, comm.rank, comm.world_size)
    return ts.Pipeline(
        comm,
        stages,
        forward,
        backward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        microbatches=microbatches,
        schedule=schedule,
    )


def main() -> None:
    microbatches, seconds = int(sys.argv[1]), float(sys.argv[2]) / 1e3
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # 1 ns instead of 50 us
    waits = Waits()
    with ts.init() as comm:
        pipelines = {name: pipeline(comm, name, microbatches, seconds, waits) for name in sys.argv[3:]}
        batch = np.zeros((ROWS * microbatches, WIDTH), np.float32)
        for pipe in pipelines.values():
            pipe.step(batch, batch)
        waits.tell()
        print(json.dumps({}), flush=True)
        steps = {name: partial(pipe.step, batch, batch) for name, pipe in pipelines.items()}
        serve_steps(steps, comm.barrier, waits.tell)
        for pipe in pipelines.values():
            pipe.close()


if __name__ == "__main__":
    main()
