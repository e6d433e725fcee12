"""One rank of `./dev bench ddp_shared`: a transformer's parameters under AdamW, with gradients but no forward pass.

usage: ddp_shared_rank.py KIND RENDEZVOUS, KIND one of shared, plain, backward. Commands, a line each: `make`; then
`time update` (gradients are not reduced) and `time step`.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import tessera as ts
from rank_processes import pss
from transformer import shapes

STEPS = 3
KIND, RENDEZVOUS = sys.argv[1:]
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Trainer:
    def __init__(self, comm: ts.Comm) -> None:
        self.comm = comm
        values = np.random.default_rng(1)
        params = {name: values.standard_normal(shape, np.float32) for name, shape in shapes().items()}
        self.ddp = ts.DDP(comm, params, share_params=KIND == "shared")
        del params
        self.optimizer = ts.AdamW(self.ddp, lr=1e-3)
        if KIND == "backward":
            self.ddp.step_in_backward(self.optimizer)
        for grad in self.ddp.grads.values():
            grad[...] = 1e-3 * (RANK + 1)

    def steps(self) -> float:
        """Milliseconds of a step, of a few."""
        self.comm.barrier()
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.ddp.ready_all()
            self.ddp.wait()
            if KIND == "plain":
                self.optimizer.step()
        return (time.perf_counter() - begin) / STEPS * 1e3

    def time(self, what: str) -> float:
        self.ddp.set_hook((lambda bucket: None) if what == "update" else None)
        return self.steps()


def main() -> None:
    with ts.Store(f"file://{RENDEZVOUS}", insecure=True) as store:
        comm = ts.Comm.create(store, RANK, WORLD_SIZE)
        trainer = None
        comm.barrier()
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            command, *arguments = line.split()
            if command == "make":
                before = pss()
                comm.barrier()
                trainer = Trainer(comm)
                trainer.steps()
                comm.barrier()
                grown = pss() - before
                comm.barrier()
                count = sum(grad.size for grad in trainer.ddp.grads.values())
                reply = {"pss": grown, "parameters": count}
            else:
                assert trainer is not None
                reply = {"ms": trainer.time(*arguments)}
            print(json.dumps(reply), flush=True)
        comm.finalize()


if __name__ == "__main__":
    main()
