"""The FSDP2 parts of a document on distributed training: `fully_shard`, parameters as DTensors, the optimizer.

What differs from the document is in README.md beside this file.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from tessera.torch.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2))
        self.output = nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def init():
    # model
    model = Transformer()

    # Apply fully_shard to each layer first, then to the root model
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    assert isinstance(model, Transformer)
    assert isinstance(model, FSDPModule)
    print(model)

    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.placements == (Shard(0),)
        # inspect sharded parameters with param.to_local()

    # optimizer
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer


if __name__ == "__main__":
    dist.init_process_group("tessera")
    init()
    dist.destroy_process_group()
