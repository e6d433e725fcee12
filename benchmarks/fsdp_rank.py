"""One rank of `./dev bench fsdp`: a transformer that trains under PyTorch, fully sharded or alone.

usage: fsdp_rank.py LAYERS KIND..., under torchrun's environment. Commands, a line each: `step KIND`, `memory KIND`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from ddp_rank import Trainer, Transformer
from rank_processes import pss
from tessera.torch.fsdp import fully_shard as our_fully_shard
from torch import nn
from torch.distributed.fsdp import fully_shard


def alone(model: Transformer) -> nn.Module:
    return model


def ours(model: Transformer) -> nn.Module:
    return sharded(our_fully_shard, model)


def gloo(model: Transformer) -> nn.Module:
    return sharded(fully_shard, model)


def sharded(shard: Callable[[nn.Module], object], model: Transformer) -> nn.Module:
    for layer in model.layers:
        shard(layer)
    shard(model)
    return model


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers, kinds = int(sys.argv[1]), [globals()[name] for name in sys.argv[2:]]
    dist.barrier()
    before = pss()
    trainers = {kind.__name__: Trainer(kind, layers, partial(torch.optim.AdamW, fused=True)) for kind in kinds}
    for trainer in trainers.values():
        for _ in range(3):
            trainer.step()
    parameters = sum(parameter.numel() for parameter in trainers[sys.argv[2]].model.parameters())
    print(json.dumps({"parameters": parameters}), flush=True)
    for line in sys.stdin:
        what, kind = line.split()
        dist.barrier()
        if what == "memory":  # beyond what a process without a model takes
            print(json.dumps({"pss": most(trainers[kind]) - before}), flush=True)
            continue
        begin = time.perf_counter()
        trainers[kind].step()
        print(json.dumps({"ms": (time.perf_counter() - begin) * 1e3}), flush=True)
    dist.destroy_process_group()


def most(trainer: Trainer) -> int:
    """The most of any moment at which a layer has computed."""
    found = [0]
    hooks = []
    for layer in trainer.model.layers:  # type: ignore[union-attr]
        hooks.append(layer.register_forward_hook(lambda *_: found.append(pss())))
        hooks.append(layer.register_full_backward_hook(lambda *_: found.append(pss())))
    trainer.step()
    for hook in hooks:
        hook.remove()
    return max(*found, pss())


if __name__ == "__main__":
    main()
