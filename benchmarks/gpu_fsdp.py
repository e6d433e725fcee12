"""A step of GPT-2 (124 M parameters) on a GPU: Tessera's FSDP beside PyTorch's fully_shard, and neither.

usage: gpu_fsdp.py [--ranks 1 2] [--dtypes f32 bf16 mixed] [--steps N] [--rounds N] [--batch N] [--layers N]

As gpu_ddp.py, whose model it trains: a unit each block, and one of all else, which both keep unsharded from its forward
to its backward. A step is zeroing, forward, backward and the end of the reduction. The last line of a job has the
medians, and the largest difference between Tessera's and PyTorch's gradients of this rank's shards.

"mixed" has shards in f32, and parameters in bf16, in which it also reduces: that needs libtessera_cuda.so.

Kinds: "alone" (no shards, all in bf16 where the others are mixed), "torch" (fully_shard), "ours" (units driven by hooks
of autograd, a new gradient copied into the unit's) and "flat" (the same with flat units, whose shards begin anywhere:
one operation each; not compared).
"""

from __future__ import annotations

import argparse
from typing import Any

from gpu_ddp import Trainer, main


class Sharded(Trainer):
    """A model whose units Tessera's FSDP unshards."""

    mixed_dtype = "float32"

    def __init__(self, kind: str, comm: Any, options: argparse.Namespace) -> None:
        import tessera as ts
        import torch
        from tessera import _core

        super().__init__("alone", comm, options)
        self.kind = kind
        self.core = _core
        blocks = {f"block{i}": block for i, block in enumerate(self.module.blocks)}
        inside = {id(param) for block in blocks.values() for param in block.parameters()}
        named = dict(self.module.named_parameters())
        units: dict[str, dict[str, torch.nn.Parameter]] = {
            "rest": {name: param for name, param in named.items() if id(param) not in inside}
        }
        for unit, block in blocks.items():
            units[unit] = {f"{unit}.{name}": param for name, param in block.named_parameters()}
        given = {unit: {name: param.detach() for name, param in params.items()} for unit, params in units.items()}
        mixed = {"param_dtype": "bfloat16"} if options.dtypes[0] == "mixed" else {}
        self.fsdp = ts.FSDP(comm, given, keep_whole=["rest"], flat=list(given) if kind == "flat" else (), **mixed)
        self.fsdp.set_stream(torch.cuda.current_stream())
        self.handle = self.fsdp._handle
        self.order = [name for params in units.values() for name in params]
        number = {name: i for i, name in enumerate(self.fsdp.names)}
        with self.fsdp.summon_full_params():
            for params in units.values():
                for name, param in params.items():  # which is at its unit's address from now on
                    param.data = self.over(_core.fsdp_whole, number[name])
        for i, (unit, params) in enumerate(units.items()):
            module = blocks.get(unit, self.module)
            module.register_forward_pre_hook(lambda *_, i=i: _core.fsdp_forward(self.handle, i))
            module.register_forward_hook(lambda _, __, out, i=i: self.ended(out, i))
            self.expect(params, number, i)
        by_name = {name: param for params in units.values() for name, param in params.items()}
        self.params = [by_name[name] for name in self.order]

    def over(self, view: Any, number: int) -> Any:
        import torch

        return torch.from_dlpack(view(self.handle, number, counted=False)[0])

    def ended(self, out: Any, unit: int) -> None:
        self.core.fsdp_forward_done(self.handle, unit)
        out.register_hook(lambda _: self.core.fsdp_backward(self.handle, unit))

    def expect(self, params: dict[str, Any], number: dict[str, int], unit: int) -> None:
        left = len(params)

        def accumulated(param: Any, place: int) -> None:
            nonlocal left
            self.over(self.core.fsdp_grad, place).copy_(param.grad)
            param.grad = None
            left -= 1
            if left == 0:
                left = len(params)
                self.core.fsdp_grads_ready(self.handle, unit)

        for name, param in params.items():
            param.register_post_accumulate_grad_hook(lambda param, place=number[name]: accumulated(param, place))

    def step(self) -> None:
        super().step()
        self.fsdp.wait()

    def gradients(self) -> list:
        import torch

        if self.kind == "flat":
            return []
        return [torch.from_dlpack(self.fsdp.shard_grads[name]) for name in self.order]

    def close(self) -> None:
        self.module = self.model = None
        self.params = []
        self.fsdp.close()


class Theirs(Trainer):
    """PyTorch's fully_shard."""

    mixed_dtype = "float32"

    def __init__(self, kind: str, comm: Any, options: argparse.Namespace) -> None:
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__("alone", comm, options)
        self.kind = kind
        dtype = torch.bfloat16 if options.dtypes[0] == "mixed" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        for block in self.module.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(self.module, mp_policy=policy, reshard_after_forward=False)

    def gradients(self) -> list:
        named = dict(self.module.named_parameters())
        rest = [name for name in named if not name.startswith("blocks.")]
        inside = [name for name in named if name.startswith("blocks.")]
        return [named[name].grad.to_local() for name in rest + inside]


if __name__ == "__main__":
    kinds = {"alone": Trainer, "torch": Theirs, "ours": Sharded, "flat": Sharded}
    main(__file__, __doc__, kinds, ("f32", "bf16", "mixed"))
