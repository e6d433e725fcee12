"""One rank of `./dev bench pipeline`: a stage of a transformer that trains under PyTorch, in a schedule of each kind.

usage: pipeline_rank.py LAYERS MICROBATCHES KIND..., under torchrun's environment. `ours` is tessera.torch.pipelining,
`gloo` PyTorch's own; both schedules are 1F1B. Commands, a line each: `step KIND`.
"""

from __future__ import annotations

import json
import sys

import tessera.torch.pipelining as ours_pipelining
import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from ddp_rank import LENGTH, Transformer
from rank_processes import serve_steps
from torch import nn
from transformer import WORDS

BATCH = 16  # sequences
SCORES = 2  # layers


class Stage(nn.Module):
    """Layers of the transformer: the first stage has the embeddings, the last the scores, which cost as much as two
    layers, so that it has so many fewer."""

    def __init__(self, whole: Transformer, number: int, stages: int) -> None:
        super().__init__()
        each = (len(whole.layers) + SCORES) // stages
        self.layers = whole.layers[number * each : (number + 1) * each]
        self.words = whole.words if number == 0 else None
        self.places = whole.places if number == 0 else None
        self.norm = whole.norm if number == stages - 1 else None
        self.out = nn.Linear(whole.out.in_features, WORDS, bias=False) if number == stages - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.words is not None and self.places is not None:
            x = self.words(x) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        if self.norm is not None and self.out is not None:
            x = self.out(self.norm(x))
        return x


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Trainer:
    """A model of its own, which takes as many steps as the others."""

    def __init__(self, kind: str, layers: int, microbatches: int) -> None:
        torch.manual_seed(1)
        rank, stages = dist.get_rank(), dist.get_world_size()
        self.model = Stage(Transformer(layers), rank, stages)
        classes = ours_pipelining if kind == "ours" else torch_pipelining
        stage = classes.PipelineStage(self.model, rank, stages, torch.device("cpu"))
        self.schedule = classes.Schedule1F1B(stage, microbatches, loss_fn=loss_of)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.data = torch.Generator().manual_seed(1)  # the first stage and the last have the same samples

    def step(self) -> None:
        tokens = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=self.data)
        if dist.get_rank() == 0:
            self.schedule.step(tokens[:, :-1])
        else:
            self.schedule.step(target=tokens[:, 1:], return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers, microbatches = int(sys.argv[1]), int(sys.argv[2])
    trainers = {kind: Trainer(kind, layers, microbatches) for kind in sys.argv[3:]}
    for trainer in trainers.values():
        for _ in range(3):
            trainer.step()
    own = sum(parameter.numel() for parameter in trainers[sys.argv[3]].model.parameters())
    print(json.dumps({"parameters": own}), flush=True)
    serve_steps({kind: trainer.step for kind, trainer in trainers.items()}, dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
