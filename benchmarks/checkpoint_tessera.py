"""One rank of ours: Tessera's native checkpoints. Takes commands on standard input (see checkpoint.py)."""

from __future__ import annotations

import os

import numpy as np
import tessera as ts
from checkpoint_worker import Workload, serve


class Tessera:
    def __init__(self, rank: int, world_size: int, workload: Workload) -> None:
        self.store = ts.Store(f"file://{os.environ['BENCH_RENDEZVOUS']}", insecure=True)
        self.comm = ts.Comm.create(self.store, rank, world_size)
        self.arrays = workload.local_arrays(rank, world_size)
        layout = ts.Layout(workload.shape(), [world_size], [ts.Shard(0)])
        self.state = ts.State(t={name: ts.Sharded(layout, [array], rank) for name, array in self.arrays.items()})

    def barrier(self) -> None:
        self.comm.barrier()

    def save(self, directory: str) -> None:
        with ts.Saver(self.comm, directory) as saver:
            saver.save(1, self.state)

    def load(self, directory: str) -> None:
        with ts.Checkpoint(directory) as checkpoint:
            checkpoint.load(self.state)

    def local(self) -> dict[str, np.ndarray]:
        return self.arrays

    def close(self) -> None:
        self.comm.finalize()
        self.comm.close()
        self.store.close()


if __name__ == "__main__":
    serve(Tessera, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
