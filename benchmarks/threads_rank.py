"""A process of `./dev bench threads`, which trains two models: a rank of DDP, or all replicas as threads.

usage: threads_rank.py THREADS, under torchrun's environment. With 0 threads this is a rank of DDP; otherwise the
process has so many replicas, each with a thread, as `torch.nn.DataParallel` has on GPUs: they compute, the first one
gets the mean of their gradients and steps, and the others copy its parameters. Commands, a line each: `step KIND`.
"""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import tessera.torch
import torch
import torch.distributed as dist
from ddp_rank import BATCH, LENGTH, Transformer
from rank_processes import serve_steps
from torch import nn
from transformer import WORDS

SMALL_WIDTH, SMALL_LAYERS = 32, 64


class Transformers:
    """Large operations, during which PyTorch does not hold the interpreter's lock."""

    def model(self) -> nn.Module:
        return Transformer(4)

    def loss(self, model: nn.Module, data: torch.Generator) -> torch.Tensor:
        tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=data)
        scores = model(tokens[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


class Deep:
    """Many small operations, most of whose time is Python's."""

    def model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(SMALL_WIDTH, SMALL_WIDTH), nn.Tanh()) for _ in range(SMALL_LAYERS)]
        return nn.Sequential(*layers)

    def loss(self, model: nn.Module, data: torch.Generator) -> torch.Tensor:
        return torch.as_tensor(model(torch.randn(BATCH, SMALL_WIDTH, generator=data)).square().mean())


WORKLOADS = {"transformer": Transformers(), "deep": Deep()}


class Threads:
    def __init__(self, workload: Transformers | Deep, threads: int) -> None:
        self.workload = workload
        torch.manual_seed(1)
        first = workload.model()
        self.replicas = [first, *(copy.deepcopy(first) for _ in range(threads - 1))]
        self.data = [torch.Generator().manual_seed(number) for number in range(threads)]
        self.optimizer = torch.optim.SGD(first.parameters(), lr=1e-3)
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def compute(self, number: int) -> None:
        self.workload.loss(self.replicas[number], self.data[number]).backward()

    @torch.no_grad()
    def join(self) -> None:
        for first, *others in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            for other in others:
                first.grad.add_(other.grad)
                other.grad = None
            first.grad.div_(len(self.replicas))
        self.optimizer.step()
        self.optimizer.zero_grad()
        for first, *others in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            for other in others:
                other.copy_(first)

    def step(self) -> None:
        list(self.pool.map(self.compute, range(len(self.replicas))))
        self.join()


class Process:
    def __init__(self, workload: Transformers | Deep) -> None:
        self.workload = workload
        torch.manual_seed(1)
        self.model = tessera.torch.DistributedDataParallel(workload.model())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.data = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> None:
        self.workload.loss(self.model, self.data).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    threads = int(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("tessera")
    trainers = {
        name: Threads(workload, threads) if threads else Process(workload) for name, workload in WORKLOADS.items()
    }
    print("{}", flush=True)
    serve_steps({name: trainer.step for name, trainer in trainers.items()}, dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
