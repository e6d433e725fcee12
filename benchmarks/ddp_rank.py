"""One rank of `./dev bench ddp`: a transformer that trains under PyTorch, a kind of DDP at a time.

usage: ddp_rank.py LAYERS, under torchrun's environment. Commands, a line each: `step KIND COUNT`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import tessera.torch
import torch
import torch.distributed as dist
from torch import nn
from transformer import WIDTH, WORDS

LENGTH, BATCH = 64, 4


class Transformer(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places.weight
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.as_tensor(self.out(self.norm(hidden)))


def alone(model: nn.Module) -> nn.Module:
    return model


def ours(model: nn.Module) -> nn.Module:
    return tessera.torch.DistributedDataParallel(model)


def gloo(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def backend(model: nn.Module) -> nn.Module:
    group = dist.new_group(backend="tessera")
    return nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


class Trainer:
    """A model of its own, which takes as many steps as the others."""

    def __init__(
        self,
        wrap: Callable[[Transformer], nn.Module],
        layers: int,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        torch.manual_seed(1)
        self.model = wrap(Transformer(layers))
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)
        self.data = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> None:
        tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=self.data)
        scores = self.model(tokens[:, :-1])
        nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainers = {wrap.__name__: Trainer(wrap, int(sys.argv[1])) for wrap in (alone, ours, gloo, backend)}
    for trainer in trainers.values():
        for _ in range(3):  # PyTorch's builds its buckets anew after the first
            trainer.step()
    parameters = sum(parameter.numel() for parameter in trainers["alone"].model.parameters())
    print(json.dumps({"parameters": parameters}), flush=True)
    for line in sys.stdin:
        _, kind, count = line.split()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(int(count)):
            trainers[kind].step()
        print(json.dumps({"ms": (time.perf_counter() - begin) / int(count) * 1e3}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
