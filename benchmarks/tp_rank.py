"""One rank of `./dev bench tp`: a transformer that trains under PyTorch, cut over all ranks.

usage: tp_rank.py LAYERS KIND, under torchrun's environment. Kinds: `ours` and `gloo` are backends. Two compute the same
slices, with wrong results: `meets` is ours, but reduces only the first element of each tensor, so that ranks wait for
each other as before; `alone` communicates nothing (PyTorch's fake backend). A process has one kind: PyTorch takes
meshes with the same ranks for the same, whatever their backends. Commands, a line each: `step KIND`.
"""

from __future__ import annotations

import json
import sys

import tessera.torch.tensor.parallel as ours_parallel
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from rank_processes import serve_steps
from tessera.torch.c10d import TesseraBackend
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed import fake_pg
from transformer import WIDTH, WORDS

LENGTH, BATCH, HEADS = 64, 4, 8
BACKENDS = {"ours": "tessera", "meets": "tessera", "gloo": "gloo", "alone": "fake"}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        q, k, v = (
            part(given).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)  # of this rank's heads
            for part in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.as_tensor(self.out(mixed.transpose(1, 2).flatten(2)))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Transformer(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(layers))
        self.perceptron = nn.ModuleList(Perceptron() for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens) + self.places.weight
        for attention, perceptron in zip(self.attention, self.perceptron, strict=True):
            hidden = hidden + attention(hidden)
            hidden = hidden + perceptron(hidden)
        return torch.as_tensor(self.out(self.norm(hidden)))


class Trainer:
    def __init__(self, kind: str, layers: int) -> None:
        torch.manual_seed(1)
        self.model = Transformer(layers)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        ranks = list(range(dist.get_world_size()))
        group = dist.new_group(ranks, backend=BACKENDS[kind])
        self.parallel = ours_parallel if kind == "ours" else torch_parallel
        styles = self.parallel
        plan: dict[str, object] = {
            "words": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "attention.*.[qkv]": styles.ColwiseParallel(),
            "attention.*.out": styles.RowwiseParallel(),
            "perceptron.*.up": styles.ColwiseParallel(),
            "perceptron.*.down": styles.RowwiseParallel(),
            "out": styles.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        mesh = DeviceMesh.from_group(group, "cpu", mesh=ranks)
        self.parallel.parallelize_module(self.model, mesh, plan)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.data = torch.Generator().manual_seed(1)  # all ranks have the same samples

    def step(self) -> None:
        tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=self.data)
        with self.parallel.loss_parallel():
            scores = self.model(tokens[:, :-1])
            nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def only_meet() -> None:
    whole = TesseraBackend.allreduce

    def allreduce(self: TesseraBackend, tensors: list[torch.Tensor], options: object) -> object:
        return whole(self, [tensor.view(-1)[:1] for tensor in tensors], options)

    TesseraBackend.allreduce = allreduce  # type: ignore[method-assign, assignment]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert fake_pg  # its import registers the backend
    layers, kind = int(sys.argv[1]), sys.argv[2]
    if kind == "meets":
        only_meet()
    trainer = Trainer(kind, layers)
    for _ in range(3):
        trainer.step()
    print(json.dumps({"parameters": trainer.parameters}), flush=True)
    serve_steps({kind: trainer.step}, dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
