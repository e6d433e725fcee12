"""One rank of `./dev bench fsdp`: a transformer that trains under PyTorch, fully sharded or alone.

usage: fsdp_rank.py LAYERS KIND..., under torchrun's environment. Commands, a line each: `step KIND`, `memory KIND`,
`unsharded KIND`.
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
from rank_processes import pss, shown_twice
from tessera.torch.fsdp import fully_shard as our_fully_shard
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


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
        if what == "unsharded":
            print(json.dumps(unsharded(trainers[kind], gathered if kind == "gloo" else no_storages)), flush=True)
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


def unsharded(trainer: Trainer, held: Callable[[nn.Module], tuple[int, int]]) -> dict[str, object]:
    """What whole parameters take in a step, looked at before and after each computation inside a layer. `pages`: those
    of shared memory that units showed, by file, first and last byte; `held` and `complete`: what `held` tells at its
    highest, with what is on its way and without."""
    pages: set[tuple[int, int, int]] = set()
    storages = [(0, 0)]

    def look(*_: object) -> None:
        pages.update(shown_twice())
        storages.append(held(trainer.model))

    hooks = []
    for module in trainer.model.layers.modules():  # type: ignore[union-attr]
        if any(True for _ in module.children()):
            continue  # FSDP's own hooks may come between a unit's computation and one of ours
        hooks.append(module.register_forward_pre_hook(look))
        hooks.append(module.register_forward_hook(look))
        hooks.append(module.register_full_backward_hook(look))
    trainer.step()
    for hook in hooks:
        hook.remove()
    complete, on_their_way = zip(*storages, strict=True)
    both = max(a + b for a, b in zip(complete, on_their_way, strict=True))
    return {"pages": sorted(pages), "held": both, "complete": max(complete)}


def no_storages(_: nn.Module) -> tuple[int, int]:
    return 0, 0


def gathered(model: nn.Module) -> tuple[int, int]:
    """Bytes of the storages of parameters that PyTorch's FSDP2 has gathered, and of those that it receives a gather on
    its way in."""
    complete: dict[int, int] = {}
    on_their_way: dict[int, int] = {}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:  # no public way to ask
            for tensor in (tensor for param in group.fsdp_params for tensor in param.all_gather_outputs):
                add_storage(complete, tensor)
            if group._all_gather_result is not None:
                add_storage(on_their_way, group._all_gather_result.all_gather_output)
    return sum(complete.values()), sum(on_their_way.values())


def add_storage(found: dict[int, int], tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if storage.nbytes() > 0:
        found[storage.data_ptr()] = storage.nbytes()


if __name__ == "__main__":
    main()
