"""The ways in which gpt.py is parallel: fully sharded (over tensor parallelism or not), or as a pipeline.

Each has the same methods. A checkpoint of one goes on in any other: all name the parameters as the whole model does.
"""

import tessera.torch
import torch
import torch.distributed as dist
from tessera.torch.fsdp import MixedPrecisionPolicy, fully_shard
from tessera.torch.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from tessera.torch.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

ROWS = Shard(1)  # activations are [batch, length, width]; between layers each rank of a group has a part of the length
PLAN = {
    "characters": RowwiseParallel(input_layouts=Replicate(), output_layouts=ROWS),
    "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "blocks.*.norm_*": SequenceParallel(),
    "blocks.*.[qkv]": ColwiseParallel(input_layouts=ROWS),
    "blocks.*.out": RowwiseParallel(output_layouts=ROWS),
    "blocks.*.up": ColwiseParallel(input_layouts=ROWS),
    "blocks.*.down": RowwiseParallel(output_layouts=ROWS),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=ROWS, output_layouts=Replicate()),
}


def loss_of(scores: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1).float(), wanted.flatten())


class Sharded:
    """Each rank has its rows of each parameter, or of its slice of it: `tp` ranks share a model."""

    def __init__(self, model: nn.Module, tp: int, bf16: bool) -> None:
        self.model = model
        mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
        if tp > 1:
            parallelize_module(model, mesh["tp"], PLAN)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        self.share, self.shares = mesh["dp"].get_local_rank(), mesh["dp"].size()  # of a batch

    def forward_backward(self, given: torch.Tensor, wanted: torch.Tensor) -> float:
        """The mean loss of all ranks."""
        loss = loss_of(self.model(given), wanted)
        loss.backward()
        return self._mean(loss)

    def clip(self, most: float) -> None:
        tessera.torch.clip_grad_norm_(self.model.parameters(), most)

    def judge(self, given: torch.Tensor, wanted: torch.Tensor) -> float:
        return self._mean(loss_of(self.model(given), wanted))

    def scores(self, text: torch.Tensor) -> torch.Tensor:
        return self.model(text)

    def _mean(self, loss: torch.Tensor) -> float:
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        return float(mean)


class Pipeline:
    """Each rank has some of the blocks, and computes them for one micro-batch after another."""

    share, shares = 0, 1  # all ranks have the same batch

    def __init__(self, model: nn.Module, batch: int) -> None:
        self.model = model
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.last = self.ranks - 1
        count = len(model.blocks)
        mine = range(self.rank * count // self.ranks, (self.rank + 1) * count // self.ranks)
        for i in range(count):
            if i not in mine:
                del model.blocks[str(i)]
        if self.rank > 0:
            model.characters = model.places = None
        if self.rank < self.last:
            model.norm = model.head = None
        stage = PipelineStage(model, self.rank, self.ranks, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, min(batch, 2 * self.ranks), loss_fn=loss_of)
        self.single = ScheduleGPipe(stage, 1)  # for one passage

    def forward_backward(self, given: torch.Tensor, wanted: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        self.schedule.step(
            *[given][: self.rank == 0], target=self._on_last(wanted), losses=losses, return_outputs=False
        )
        return self._mean(losses, len(given))

    def clip(self, most: float) -> None:
        """By the norm over all stages."""
        own = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        total = own.square()
        dist.all_reduce(total)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), most, total.sqrt())

    def judge(self, given: torch.Tensor, wanted: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        self.schedule.eval(*[given][: self.rank == 0], target=self._on_last(wanted), losses=losses)
        return self._mean(losses, len(given))

    def scores(self, text: torch.Tensor) -> torch.Tensor:
        made = self.single.eval(*[text][: self.rank == 0])
        scores = made.contiguous() if made is not None else torch.empty(*text.shape, self.model.kinds)
        dist.broadcast(scores, self.last)
        return scores

    def _on_last(self, wanted: torch.Tensor) -> torch.Tensor | None:
        return wanted if self.rank == self.last else None

    def _mean(self, losses: list[torch.Tensor], rows: int) -> float:
        """Of all rows; micro-batches may differ in their number."""
        mean = torch.zeros(())
        if self.rank == self.last:
            sizes = [len(part) for part in torch.arange(rows).tensor_split(len(losses))]
            mean = sum(loss.detach() * size / rows for loss, size in zip(losses, sizes, strict=True))
        dist.broadcast(mean, self.last)
        return float(mean)
