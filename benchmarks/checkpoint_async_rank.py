"""One rank of `checkpoint_async.py`: a trainer with AdamW that saves in the background, ours or PyTorch's.

Ours holds every parameter and moment whole, as under DDP, and writes half of the bytes a rank; DCP's tensors are cut by
rows, so that a rank stages and writes the same number of bytes. A line on standard input is ``COMMAND ARGUMENTS``; the
answer is one JSON line.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_worker import memory_bytes

COUNT, ROWS, COLUMNS = 43, 2048, 1024  # 43 parameters of 8 MiB
MOMENTS = ("exp_avg", "exp_avg_sq")
UNITS_PER_STEP = 40
SCRATCH = Path(os.environ["BENCH_SCRATCH"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SHARD_BYTES = COUNT * ROWS * COLUMNS * 4 * (1 + len(MOMENTS)) // WORLD_SIZE


class Ours:
    def __init__(self) -> None:
        import tessera as ts

        self.ts = ts
        self.store = ts.Store(f"file://{SCRATCH / 'rendezvous'}", insecure=True)
        self.comm = ts.Comm.create(self.store, RANK, WORLD_SIZE)
        generator = np.random.default_rng(7)
        self.params = {f"p{i:02d}": generator.random((ROWS, COLUMNS), dtype=np.float32) for i in range(COUNT)}
        grads = {name: generator.random((ROWS, COLUMNS), dtype=np.float32) for name in self.params}
        self.optimizer = ts.AdamW(self.params, grads)
        self.state = ts.State(model=self.params, optim=self.optimizer)
        self.savers: dict[tuple[str, int], Any] = {}
        self.number = 0

    def barrier(self) -> None:
        self.comm.barrier()

    def step(self) -> None:
        self.optimizer.step()

    def _saver(self, mode: str, bytes_per_s: int) -> Any:
        if (mode, bytes_per_s) not in self.savers:
            for other in self.savers.values():
                other.trim()  # one pool at a time
            self.savers[mode, bytes_per_s] = self.ts.Saver(
                self.comm,
                SCRATCH / f"ours-{mode}-{bytes_per_s}",
                keep_latest=1,
                copy_on_demand=mode.startswith("on-demand"),
                write_bytes_per_s=bytes_per_s or None,
                low_priority=not mode.endswith("ordinary"),
            )
        return self.savers[mode, bytes_per_s]

    def begin(self, mode: str, bytes_per_s: int) -> Callable[[], bool]:
        self.number += 1
        return self._saver(mode, bytes_per_s).save_async(self.number, self.state).done

    def prepare(self, mode: str, bytes_per_s: int) -> None:
        self._saver(mode, bytes_per_s)

    def finish(self) -> None:
        for saver in self.savers.values():
            saver.wait()

    def forget(self) -> None:
        for saver in self.savers.values():
            saver.close()
        self.savers.clear()

    def close(self) -> None:
        self.forget()
        self.comm.finalize()
        self.comm.close()
        self.store.close()


class Dcp:
    """PyTorch DCP with its best settings: staging memory is kept, two threads, synced files, cached plans."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        self.dist, self.dcp = dist, dcp
        self.make_stager = lambda: DefaultStager(StagingOptions(False, False, False, False))
        dist.init_process_group("cpu:gloo", rank=RANK, world_size=WORLD_SIZE)
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        generator = torch.Generator().manual_seed(7)
        shape = (ROWS // WORLD_SIZE, COLUMNS)
        params = [torch.rand(shape, generator=generator).requires_grad_() for _ in range(COUNT)]
        for param in params:
            param.grad = torch.rand(shape, generator=generator)
        self.optimizer = torch.optim.AdamW(params, fused=True)
        self.optimizer.step()
        tensors = {f"model.p{i:02d}": param.detach() for i, param in enumerate(params)}
        for i, param in enumerate(params):
            for moment in MOMENTS:
                tensors[f"optim.p{i:02d}.{moment}"] = self.optimizer.state[param][moment]
        self.state = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}
        self.number = 0
        self.stager: Any = None
        self.future: Any = None

    def barrier(self) -> None:
        self.dist.barrier()

    def step(self) -> None:
        self.optimizer.step()

    def prepare(self, mode: str, bytes_per_s: int) -> None:
        self.stager = self.stager or self.make_stager()

    def begin(self, mode: str, bytes_per_s: int) -> Callable[[], bool]:
        self.number += 1
        writer = self.dcp.FileSystemWriter(
            SCRATCH / f"dcp-{self.number}", thread_count=2, sync_files=True, per_thread_copy_ahead=64 << 20
        )
        planner = self.dcp.DefaultSavePlanner(enable_plan_caching=True)
        self.future = self.dcp.async_save(self.state, storage_writer=writer, planner=planner, async_stager=self.stager)
        return self.future.done

    def finish(self) -> None:
        self.future.result()
        self.dist.barrier()
        if RANK == 0:
            shutil.rmtree(SCRATCH / f"dcp-{self.number}")

    def forget(self) -> None:
        if self.stager is not None:
            self.stager.close()
        self.stager = None

    def close(self) -> None:
        self.forget()
        self.dist.destroy_process_group()


class Rank:
    def __init__(self, library: Ours | Dcp) -> None:
        self.library = library
        generator = np.random.default_rng(1)
        self.left, self.right = (generator.random((512, 512), dtype=np.float32) for _ in range(2))
        self.product = np.empty((512, 512), np.float32)
        self.source = np.ones(SHARD_BYTES // 4, np.float32)
        self.copy = np.zeros(SHARD_BYTES // 4, np.float32) + 1  # touched

    def unit(self, number: int) -> None:
        """A forward and backward of UNITS_PER_STEP products, then the optimizer's step."""
        if number % UNITS_PER_STEP == UNITS_PER_STEP - 1:
            self.library.step()
        else:
            for _ in range(4):
                np.matmul(self.left, self.right, out=self.product)

    def memcpy(self) -> dict[str, float]:
        """One copy of as many bytes as the rank saves, into memory that is there."""
        self.library.barrier()
        start = time.perf_counter()
        np.copyto(self.copy, self.source)
        return {"seconds": time.perf_counter() - start}

    def save(self, mode: str, memory: str) -> dict[str, float]:
        """The caller's wait for a save in the background, into "new" staging memory or that of the last save."""
        if memory == "new":
            self.library.forget()
        self.library.prepare(mode, 0)
        self.library.step()
        before = memory_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM begins anew
        self.library.barrier()
        start = time.perf_counter()
        self.library.begin(mode, 0)
        blocked = time.perf_counter() - start
        self.library.finish()
        return {"blocked": blocked, "extra": max(memory_bytes("VmHWM") - before, 4096)}

    def train(self, mode: str, bytes_per_s: str) -> dict[str, float]:
        """Train while a save drains, then the same once more alone."""
        self.library.prepare(mode, int(bytes_per_s))
        self.library.begin(mode, int(bytes_per_s))  # its staging memory is there from here on
        self.library.finish()
        for number in range(2 * UNITS_PER_STEP):
            self.unit(number)
        self.library.barrier()
        start = time.perf_counter()
        done = self.library.begin(mode, int(bytes_per_s))
        units = 0
        while not done():
            self.unit(units)
            units += 1
        busy = time.perf_counter() - start
        self.library.finish()
        self.library.barrier()
        start = time.perf_counter()
        for number in range(units):
            self.unit(number)
        return {"busy": busy, "alone": time.perf_counter() - start}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no reply
    library = Ours() if sys.argv[1] == "ours" else Dcp()
    rank = Rank(library)
    replies.write(json.dumps({"shard": SHARD_BYTES}) + "\n")
    for line in sys.stdin:
        command, *arguments = line.split()
        replies.write(json.dumps(getattr(rank, command)(*arguments)) + "\n")
    library.close()


if __name__ == "__main__":
    main()
