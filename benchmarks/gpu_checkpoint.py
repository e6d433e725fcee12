"""Checkpoints of tensors on a GPU, beside a bare copy into pinned memory in the same round. It needs a GPU.

    python benchmarks/gpu_checkpoint.py [--gib 4] [--rounds 5] [--directory /dev/shm] [--json FILE]

It needs only the installed `tessera` and a PyTorch with CUDA. Each round: the bare copy of all bytes at once (PyTorch,
pinned, beside the host), a background save, a save that waits and a load to the GPU. Of the background save:

- "call" is how long save_async holds the host,
- "device held" is how long the stream waits for the copies: what a training step loses at most. The bytes over this
  time are the staging rate,
- "staged" is when the saver says that everything is copied,
- "training" is the slowdown of matrix products on the same stream while the save is written, without the copies.

The first save also pins the memory, which later ones use again; it is reported apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import tessera as ts
import torch


def model(size_bytes: int) -> dict[str, torch.Tensor]:
    """Tensors as of a transformer: matrices of 64 MiB, and a small one beside each."""
    tensors: dict[str, torch.Tensor] = {}
    count = max(size_bytes // (64 << 20), 1)
    for i in range(count):
        tensors[f"layer{i:03}.weight"] = torch.randn(4096, 4096, device="cuda")
        tensors[f"layer{i:03}.bias"] = torch.randn(4096, device="cuda")
    return tensors


def device_seconds(body: Callable[[], object]) -> tuple[float, float]:
    """What `body` puts on the stream takes there, and the call on the host."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    called = time.perf_counter()
    body()
    host = time.perf_counter() - called
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000, host


class Products:
    """Work for the device, as a step of training."""

    def __init__(self) -> None:
        self.a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.a)

    def run(self, count: int = 50) -> None:
        for _ in range(count):
            torch.mm(self.a, self.a, out=self.out)


class Bench:
    """The tensors, and the savers of their state."""

    def __init__(self, size_bytes: int, root: Path) -> None:
        self.tensors = model(size_bytes)
        self.size = sum(tensor.nbytes for tensor in self.tensors.values())
        self.expected = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.flat = torch.empty(self.size, dtype=torch.uint8, device="cuda")
        self.pinned = torch.empty(self.size, dtype=torch.uint8, pin_memory=True)
        self.products = Products()
        self.products.run()
        self.root = root
        self.state = ts.State(model=self.tensors)
        self.saver = ts.Saver(None, root / "background", keep_latest=1)
        self.waiting = ts.Saver(None, root / "waiting", keep_latest=1)

    def round(self, step: int) -> dict[str, float]:
        bare, _ = device_seconds(lambda: self.pinned.copy_(self.flat, non_blocking=True))
        back, _ = device_seconds(lambda: self.flat.copy_(self.pinned, non_blocking=True))
        alone, _ = device_seconds(self.products.run)

        saves: list[ts.Save] = []
        torch.cuda.synchronize()
        began = time.perf_counter()
        held, call = device_seconds(lambda: saves.append(self.saver.save_async(step, self.state)))
        for tensor in self.tensors.values():
            tensor.zero_()  # the save has what was there before
        saves[0].staged.wait()
        staged = time.perf_counter() - began
        beside, _ = device_seconds(self.products.run)
        still_writing = not saves[0].done()
        saves[0].wait()
        written = time.perf_counter() - began

        began = time.perf_counter()
        with ts.Checkpoint(self.root / "background") as checkpoint:
            checkpoint.load(self.state)
        loaded = time.perf_counter() - began
        for name, tensor in self.tensors.items():
            assert torch.equal(tensor, self.expected[name]), name

        began = time.perf_counter()
        self.waiting.save(step, self.state)
        saved = time.perf_counter() - began
        found = {
            "bare copy GB/s": self.size / bare / 1e9,
            "bare copy to the device GB/s": self.size / back / 1e9,
            "staging GB/s": self.size / held / 1e9,
            "staging / bare copy": bare / held,
            "call ms": call * 1e3,
            "device held ms": held * 1e3,
            "staged ms": staged * 1e3,
            "background save GB/s": self.size / written / 1e9,
            "waiting save GB/s": self.size / saved / 1e9,
            "load to the device GB/s": self.size / loaded / 1e9,
        }
        if still_writing:
            found["training beside the write / alone"] = beside / alone
        return found

    def close(self) -> None:
        self.saver.close()
        self.waiting.close()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--gib", type=float, default=4)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--directory", default=None)
    arguments.add_argument("--json", default=None)
    given = arguments.parse_args()
    root = Path(tempfile.mkdtemp(prefix="tessera-gpu-", dir=given.directory))
    measured: dict[str, list[float]] = defaultdict(list)
    name = torch.cuda.get_device_name()
    try:
        bench = Bench(int(given.gib * (1 << 30)), root)
        print(f"{name}, {bench.size / 1e9:.2f} GB in {len(bench.tensors)} tensors, saved under {root}", flush=True)
        first = bench.round(1)
        for number in range(given.rounds):
            for what, value in bench.round(number + 2).items():
                measured[what].append(value)
        bench.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{'':36} {'median':>10}   lowest to highest, and of the first round")
    for what, values in measured.items():
        spread = f"({min(values):.3f} to {max(values):.3f})"
        print(f"{what:36} {statistics.median(values):10.3f}   {spread:24} {first.get(what, 0):10.3f}")
    if given.json:
        found = {"device": name, "bytes": bench.size, "first": first, "rounds": measured}
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
