"""One rank of `./dev bench fsdp`: a transformer that trains under PyTorch, fully sharded or alone.

usage: fsdp_rank.py LAYERS KIND..., under torchrun's environment. Commands, a line each: `step KIND`, `memory KIND`,
`whole KIND`.
"""

from __future__ import annotations

import json
import os
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
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


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
        if what == "whole":
            print(json.dumps(whole_memory(trainers[kind], LOOKS[kind])), flush=True)
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


def whole_memory(trainer: Trainer, look: Callable[[nn.Module], dict[str, int]]) -> dict[str, int]:
    """The memory in which whole parameters were seen in a step: most bytes, by what tells each piece on the host."""
    found: dict[str, int] = {}

    def note(*_: object) -> None:
        for piece, size in look(trainer.model).items():
            found[piece] = max(size, found.get(piece, 0))

    hooks = []
    for layer in trainer.model.layers:  # type: ignore[union-attr]
        hooks.append(layer.linear2.register_forward_pre_hook(note))
        hooks.append(layer.linear2.register_full_backward_pre_hook(note))
    trainer.step()
    for hook in hooks:
        hook.remove()
    return found


def shared_files(model: nn.Module) -> dict[str, int]:
    """What is in memory of the files in which whole parameters lie: the same for all ranks of the host."""
    addresses = [
        parameter.data_ptr()
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None and not isinstance(parameter, DTensor)
    ]
    found: dict[str, int] = {}
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            words = line.split()
            if not words[0].endswith(":"):
                begin, end = (int(bound, 16) for bound in words[0].split("-"))
                inode = words[4]
            elif words[0] == "Rss:" and any(begin <= address < end for address in addresses):
                found[inode] = max(int(words[1]) << 10, found.get(inode, 0))
    return found


def storages(model: nn.Module) -> dict[str, int]:
    """Of all parameters that PyTorch has whole at this moment, and of those that it has gathered ahead."""
    size = 0
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is None:
            continue
        size += sum(whole.untyped_storage().size() for param in group.fsdp_params for whole in param.all_gather_outputs)
        if group._all_gather_result is not None:
            size += group._all_gather_result.all_gather_output.untyped_storage().size()
    return {f"of {os.getpid()}": size}


LOOKS = {"ours": shared_files, "gloo": storages}

if __name__ == "__main__":
    main()
