"""The digits trainer in Python as a rank of a pipeline. In the last forward of its third step it says so and waits for
a line on standard input. In that step it waits for other ranks for `PAUSING_STAGE_TIMEOUT_S`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "python"))

import digits
from digits_pipeline import MICROBATCHES, Pipelined

STEP = 3


class Pausing(Pipelined):
    step = 0

    def __init__(self, comm, params, parallel, loss_of, opened):
        made = []
        super().__init__(comm, params, parallel, loss_of, lambda one: made.append(opened(one)) or one)
        self.line = made[0]["pp"]

    def forward_backward(self, x, labels):
        self.step += 1
        if self.step == STEP:
            self.line.timeout = float(os.environ["PAUSING_STAGE_TIMEOUT_S"])
        return super().forward_backward(x, labels)

    def forward(self, call):
        if self.step == STEP and call.microbatch == MICROBATCHES - 1:
            print("in the middle of a step", flush=True)
            sys.stdin.readline()
        return super().forward(call)


digits.Pipelined = Pausing
digits.main()
