"""What test_torch_fsdp.py runs: under torchrun's environment, one process a rank.

usage: torch_fsdp_jobs.py checks|checks_by_columns DIRECTORY [CHECK...] | saves|loads DIRECTORY rows|columns |
       adds_up LEAVES | loads_large DIRECTORY | dies

PyTorch's own fully_shard over Gloo and Tessera's train the same models on the same ranks. Each check is a function of
this file.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import tessera as ts
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tessera.torch import checkpoint as our_dcp
from tessera.torch import fsdp as our_module
from tessera.torch.fsdp import AllGather, FSDPModule, ReduceScatter, collectives, register_fsdp_forward_method
from tessera.torch.fsdp import fully_shard as ours
from torch import nn
from torch.distributed import fsdp as their_module
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, share_comm_ctx
from torch.distributed.fsdp import FSDPModule as TheirModule
from torch.distributed.fsdp import fully_shard as theirs
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint
from torch_ranks import NOTICED_S, alone_on_each, end, patience, refused, run_checks

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
directory = ""
Kind = Callable[..., Any]
VOCABULARY = 11


class Block(nn.Module):
    """Rows that ranks do not divide, and fewer rows than ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, *, by: float = 1.0) -> torch.Tensor:
        return x + by * self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an embedding and a head, which may share their weight; a buffer."""

    def __init__(self, tied: bool = False, recomputed: bool | None = None, often: int = 1) -> None:
        super().__init__()
        width = 6
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("offset", torch.full((1,), 0.5))
        self.recomputed, self.often = recomputed, often  # reentrant or not; how often each block is used
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, which: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        x = self.embed(x) + self.offset.to(self.embed.weight.dtype)
        for i in which:
            for _ in range(self.often):
                if self.recomputed is None:
                    x = self.blocks[i](x, by=0.5)
                else:
                    x = checkpoint(self.blocks[i], x, use_reentrant=self.recomputed)
        return torch.as_tensor(self.head(x))

    def as_list(self, x: torch.Tensor) -> list[torch.Tensor]:
        """A method beside forward."""
        return [self.head(self.embed(x))]


def net(**options: Any) -> Net:
    torch.manual_seed(5)
    return Net(**options)


def sharded(kind: Kind, model: Net, **options: Any) -> Net:
    for block in model.blocks:
        kind(block, **options)
    kind(model, **options)
    return model


def tokens(step: int) -> torch.Tensor:
    """Other ones on each rank."""
    return torch.randint(VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, **options: Any) -> torch.Tensor:
    x = tokens(step)
    logits = model(x, **options).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ((3 * x + 1) % VOCABULARY).flatten())


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of this rank's rows: no rank asks the others, which takes far longer than the training."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return None if tensor is None else tensor.detach().clone()


@dataclass
class Run:
    """What a training told: compared between both kinds."""

    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    grads: list[dict[str, torch.Tensor | None]]  # this rank's rows
    state: dict[str, torch.Tensor | None]
    layouts: dict[str, tuple[torch.Size, Any]]

    def check(self, other: Run, what: str, **tolerance: float) -> None:
        assert self.layouts == other.layouts, what
        for name, one, two in [
            ("loss", self.losses, other.losses),
            ("norm", self.norms, other.norms),
            ("gradient", self.grads, other.grads),
            ("state", self.state, other.state),
        ]:
            torch.testing.assert_close(one, two, msg=lambda text, name=name: f"{what}, {name}: {text}", **tolerance)


def train(
    model: Any,
    steps: int = 4,
    *,
    accumulate: int = 1,
    without: Callable[[bool], None] | None = None,
    loss: Callable[[nn.Module, int], torch.Tensor] = loss_of,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Run:
    """Steps of `accumulate` backward passes; before each `without` is told whether it is the last of them."""
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.02)
    run = Run([], [], [], {}, {})
    for step in range(steps):
        for turn in range(accumulate):
            if without is not None:
                without(turn + 1 == accumulate)
            value = loss(model, step * accumulate + turn)
            value.backward()
        run.losses.append(value.detach())
        run.grads.append({name: local(param.grad) for name, param in model.named_parameters()})
        norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        run.norms.append(full(norm))  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    run.state = {name: local(value) for name, value in state.items()}
    run.layouts = {name: (value.shape, getattr(value, "placements", None)) for name, value in state.items()}
    return run


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[torch.Tensor]:
    """The losses of these steps."""
    losses = []
    for step in numbers:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@contextmanager
def job(backend: str = "gloo") -> Iterator[None]:
    dist.init_process_group(backend, timeout=timedelta(seconds=patience(60)))
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- checks


def losses_gradients_and_states() -> None:
    expected = train(sharded(theirs, net()))
    got = train(sharded(ours, net()))
    got.check(expected, "gloo")
    train(sharded(ours, net())).check(got, "again", rtol=0, atol=0)
    alone = train(sharded(ours, net(), mesh=init_device_mesh("cpu", (ranks,))))
    alone.check(got, "a mesh of its own", rtol=0, atol=0)


def losses_of_fifty_steps() -> None:
    """Of whole batches: the means over the ranks."""
    of = {}
    for kind in (theirs, ours):
        model = sharded(kind, net())
        losses = torch.stack(steps(model, torch.optim.AdamW(model.parameters(), lr=0.02), range(50)))
        dist.all_reduce(losses)
        of[kind] = losses / ranks
    assert of[ours][-1] < of[ours][0] / 2, "it learns"
    torch.testing.assert_close(of[ours], of[theirs], rtol=1e-4, atol=0)


def every_way_to_be_whole() -> None:
    expected = train(sharded(theirs, net()))
    for reshards in (True, False, 1, ranks, *([2] if ranks % 2 == 0 else [])):
        train(sharded(ours, net(), reshard_after_forward=reshards)).check(expected, f"reshard_after_forward {reshards}")
    model = sharded(ours, net())
    model.set_reshard_after_forward(True)  # the root's too
    model.set_reshard_after_backward(False)
    train(model).check(expected, "resharded by a method")
    whole = ours(net())  # one unit
    train(whole).check(expected, "one unit")
    model = net()
    ours([model.blocks[0], model.blocks[1]])
    ours(model)
    train(model).check(expected, "two modules in one unit")


def phase_of(model: Any) -> str:
    """Of the module's unit, as the core has it."""
    return str(model._unit.engine.core.phase(model._unit.name))


def compiled_before_the_first_forward() -> None:
    """The engine begins in a forward that torch.compile traces; hooks and methods of sharded modules end graphs."""
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled(model: nn.Module, step: int) -> torch.Tensor:
        return loss_of(torch.compile(model, backend=backend), step)

    model = sharded(ours, net())
    assert type(model.blocks[0]) is type(model.blocks[1]), "what is compiled for one block is for all"
    got = train(model, steps=2, loss=compiled)
    got.check(train(sharded(ours, net()), steps=2), "compiled")
    assert any("linear" in graph.code for graph in graphs)
    model = sharded(ours, net())

    @torch.compile(backend=backend)
    def by_hand() -> None:
        model.unshard()
        model.reshard()

    by_hand()
    assert model.head.bias.to_local().shape[0] < VOCABULARY
    torch.compiler.reset()


def parts_of_containers() -> None:
    """A slice is of the container's own class, and has the same modules, which compute in it as ever."""
    torch.manual_seed(5)
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    x = torch.ones(1, 3)
    expected = layers[:2](x)
    for layer in layers:
        ours(layer)
    some = ours(layers)[:2]
    assert type(some) is nn.Sequential
    assert list(some) == [layers[0], layers[1]]
    layers(x)
    torch.testing.assert_close(some(x), expected)
    layers.append(ours(nn.Linear(3, 3)))
    assert [type(one).__name__ for one in layers[-2:]] == ["FSDPLinear"] * 2
    assert type(layers)(nn.ReLU()).__class__ is nn.Sequential


def replicated_beside_sharded() -> None:
    """PyTorch's `replicate` around a sharded module, and in one: each has its own parameters."""

    def around(kind: Kind, model: Net) -> Net:
        kind(model.blocks[1])
        return replicate(model)

    def inside(kind: Kind, model: Net) -> Net:
        replicate(model.blocks[1])
        return kind(model)

    for build in (around, inside):
        results = []
        for kind in (theirs, ours):
            model = build(kind, net())
            losses = steps(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
            results.append((losses, [full(param) for param in model.parameters()]))
            inner = model.blocks[1].scale
            assert isinstance(inner, DTensor) == (build is around)
        torch.testing.assert_close(*results)
    refused(AssertionError, "only be applied to a module once", lambda: theirs(model))
    refused(ts.InvalidArgument, "replicate was already called", lambda: ours(replicate(net())))


def modules_to_prefetch_are_on_their_way() -> None:
    """Those of an explicit list, that would not be otherwise: one unit is prefetched, the next."""

    def phases(model: Any) -> dict[str, list[str]]:
        a, b, c = model.blocks
        seen: dict[str, list[str]] = {}

        def look(when: str, *modules: Any) -> Callable[..., None]:
            return lambda *_: seen.update({when: [phase_of(module) for module in modules]})

        hooks = [
            model.register_forward_pre_hook(look("in the root's forward", a, b, c)),
            c.down.register_full_backward_pre_hook(look("in the backward of the last block", a, b)),
        ]
        loss_of(model, 0).backward()
        for hook in hooks:
            hook.remove()
        model.zero_grad()
        return seen

    expected = train(sharded(theirs, net()))
    model = sharded(ours, net())
    assert phases(model) == {
        "in the root's forward": ["on_its_way", "sharded", "sharded"],
        "in the backward of the last block": ["sharded", "on_its_way"],
    }
    a, b, c = model.blocks
    model.set_modules_to_forward_prefetch([a, c])
    a.set_modules_to_forward_prefetch([b, c])
    c.set_modules_to_backward_prefetch([a, b])
    assert phases(model) == {
        "in the root's forward": ["on_its_way", "sharded", "on_its_way"],
        "in the backward of the last block": ["on_its_way", "on_its_way"],
    }
    train(model).check(expected, "explicit prefetch")


def shards_are_offloaded_already() -> None:
    expected = train(sharded(ours, net()))
    for policy in (CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        got = train(sharded(ours, net(), offload_policy=policy))
        got.check(expected, "CPUOffloadPolicy", rtol=0, atol=0)


def activations_are_computed_again() -> None:
    expected = train(sharded(theirs, net(recomputed=False)))
    for reentrant in (False, True):
        train(sharded(ours, net(recomputed=reentrant))).check(expected, f"use_reentrant={reentrant}")


def parameters_that_are_shared_or_used_often() -> None:
    train(sharded(ours, net(tied=True))).check(train(sharded(theirs, net(tied=True))), "tied")
    train(sharded(ours, net(often=2))).check(train(sharded(theirs, net(often=2))), "used twice")


def frozen_and_unused_parameters() -> None:
    def built(kind: Kind, inner: int) -> Net:
        model = net()
        model.blocks[inner].requires_grad_(False)  # backward may need its parameters all the same
        model.embed.weight.requires_grad_(bool(inner))
        model.blocks[1].up.bias.requires_grad_(False)
        return sharded(kind, model)

    for inner in (0, 1):
        train(built(ours, inner)).check(train(built(theirs, inner)), f"block {inner} is frozen")

    def some(model: nn.Module, step: int) -> torch.Tensor:
        """All skip a block."""
        return loss_of(model, step, which=(0, 2))

    model = sharded(ours, net())
    run = train(model, loss=some, kind=torch.optim.SGD)
    expected = train(sharded(theirs, net()), loss=some, kind=torch.optim.SGD)
    torch.testing.assert_close(run.losses, expected.losses)
    assert run.grads[-1]["blocks.1.up.weight"] is run.grads[-1]["blocks.1.scale"] is None
    moving = {"kind": partial(torch.optim.AdamW, weight_decay=0.5), "loss": some}  # what no rank used does not move
    model = sharded(ours, net())
    run = train(model, **moving)
    assert torch.equal(run.state["blocks.1.up.weight"], local(sharded(ours, net()).blocks[1].up.weight))  # type: ignore[arg-type]


class Quantised(nn.Module):
    """A frozen weight of whole numbers below what is trained, as QLoRA has it; 5 rows, and 1."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter((torch.arange(20).reshape(5, 4) % 3).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.full((1,), 2, dtype=dtype), requires_grad=False)
        self.inner = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.weight.is_floating_point()
        return x @ (self.weight * self.scale).to(x.dtype).T + self.inner(x)


def frozen_whole_numbers() -> None:
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return model(tokens(step)[:, :4].float()).float().square().mean()

    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool):
        of = [train(kind(Quantised(dtype)), steps=2, loss=loss) for kind in (ours, theirs)]
        of[0].check(of[1], f"{dtype}")
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({"mp_policy": narrow}, {"reshard_after_forward": False}):
        model = ours(Quantised(torch.uint8), **options)
        train(model, steps=2, loss=loss)
        assert full(model.weight).equal(Quantised(torch.uint8).weight)
    for dtype in (torch.float8_e4m3fn, torch.complex64):
        model = ours(Quantised(dtype), mp_policy=narrow)
        model.unshard()
        assert model.weight.dtype is dtype
        assert model.weight.view(torch.uint8).equal(Quantised(dtype).weight.view(torch.uint8))


def frozen_and_unfrozen_later() -> None:
    """As often as one likes, of shards and of what is shown whole; an optimizer that was made before goes on."""

    def run(kind: Kind, first: bool) -> Run:
        model = net()
        model.blocks[1].requires_grad_(first)
        sharded(kind, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        told = Run([], [], [], {}, {})
        for step in range(6):
            model.blocks[1].requires_grad_(first ^ (step in (1, 2, 4)))
            model.blocks[0].up.bias.requires_grad_(step % 2 == 0)
            loss = loss_of(model, step)
            loss.backward()
            told.losses.append(loss.detach())
            told.grads.append({name: local(param.grad) for name, param in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        told.state = {name: local(value) for name, value in model.state_dict().items()}
        return told

    for first in (True, False):
        run(ours, first).check(run(theirs, first), f"trained at first: {first}")
    model = net()
    model.head.requires_grad_(False)
    sharded(ours, model)
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    model.head.requires_grad_(True)
    refused(ts.InvalidState, "'head.weight' was unfrozen while gradients", lambda: loss_of(model, 1))
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    loss_of(model, 1).backward()
    assert isinstance(model.head.weight.grad, DTensor)


def averaged(model: nn.Module, step: int) -> None:
    """What a step of data parallelism is: the ranks' gradients, zero where a rank has none, averaged."""
    loss_of_it(model, step).backward()
    for param in model.parameters():
        used = torch.tensor(param.grad is not None, dtype=torch.int32)
        dist.all_reduce(used)
        if not used:
            continue
        grad = torch.zeros_like(param, dtype=torch.float32) if param.grad is None else param.grad.float()
        dist.all_reduce(grad)
        param.grad = (grad / ranks).to(param.dtype)


def loss_of_it(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return torch.as_tensor(model(x).float().square().mean())


def trains_as_averaged(
    kind: type[nn.Module], what: str, placement: Callable[[nn.Parameter], Shard] | None = None, **tolerance: float
) -> nn.Module:
    """The module as one unit, after some steps in which it did what a whole copy does."""
    torch.manual_seed(5)
    plain = kind()
    model = ours(copy.deepcopy(plain), shard_placement_fn=placement)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for step in range(4):
        averaged(plain, step)
        loss_of_it(model, step).backward()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            for one, two in ((param.grad, other.grad), (param.detach(), other.detach())):
                torch.testing.assert_close(
                    full(one), two, msg=lambda text, name=name: f"{what}, {name}: {text}", **tolerance
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


def several_types_in_one_unit() -> None:
    """PyTorch's own wants one type a unit."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6)
            self.narrow = nn.Linear(6, 5).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.narrow(self.norm(x).to(torch.bfloat16)))

    model = trains_as_averaged(Mixed, "f32 and bf16", rtol=2e-2, atol=2e-2)
    types = {name: param.dtype for name, param in model.named_parameters()}
    assert types["norm.weight"] is torch.float32
    assert types["narrow.weight"] is torch.bfloat16


def a_parameter_that_one_rank_uses() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes, self.never = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.always(x) + (self.sometimes(x) if rank == 0 else 0))

    trains_as_averaged(Partly, "used on rank 0")


class Image(nn.Module):
    """Weights of up to four dimensions, one of them frozen and one shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, (1, 3), padding=(0, 1))
        self.turn, self.turn_again = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.turn_again.weight = self.turn.weight
        self.second = nn.ConvTranspose1d(4, 2, 1)
        self.last = nn.Bilinear(3, 3, 5)
        self.last.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.reshape(-1, 2, 1, 3)).squeeze(2)
        x = self.second(self.turn_again(torch.tanh(self.turn(x.mT))).mT)
        return torch.as_tensor(self.last(x, x.flip(1)))


def parameters_are_cut_along_any_dimension() -> None:
    """Whether ranks divide it or not, and where some have nothing of it; PyTorch's own wants the first."""
    for dim in range(4):
        asked = []

        def placement(param: nn.Parameter, dim: int = dim, asked: list[int] = asked) -> Shard:
            asked.append(id(param))
            return Shard(min(dim, param.ndim - 1))

        model = trains_as_averaged(Image, f"dimension {dim}", placement, rtol=1e-4, atol=1e-6)
        assert len(asked) == len(set(asked)) == 7, "once about each"
        for param in model.parameters():
            assert param.placements == (Shard(min(dim, param.ndim - 1)),)
            assert param.to_local().is_contiguous()


def a_shard_of_columns_is_contiguous() -> None:
    """As PyTorch's are: an optimizer that takes it for that, as fused ones do, goes on from any state."""

    def run(kind: Kind) -> torch.Tensor:
        model = kind(nn.Linear(6, 4), shard_placement_fn=lambda param: Shard(param.ndim - 1))
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().view(-1).copy_(torch.arange(param.to_local().numel()) / 8)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
        for step in range(4):
            model(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            assert model.weight.grad.to_local().is_contiguous()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
            if step == 1:
                whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
                set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(full_state_dict=True))
        return local(model.weight)  # type: ignore[return-value]

    if 6 % ranks == 0:
        torch.testing.assert_close(run(ours), run(theirs))


def gradients_add_up() -> None:
    for accumulate in (2, 3):
        expected = train(sharded(theirs, net()), accumulate=accumulate)
        model = sharded(ours, net())
        train(model, accumulate=accumulate).check(expected, "reduced each time")
        model = sharded(ours, net())
        other = sharded(theirs, net())
        got = train(model, accumulate=accumulate, without=model.set_requires_gradient_sync)
        got.check(train(other, accumulate=accumulate, without=other.set_requires_gradient_sync), "without sync")


def adding_up(model: Any, sync: bool, leaves: str) -> Run:
    """Steps of three passes. Memory of units is left after backward never, until the last pass, or always."""

    def tell(last: bool) -> None:
        if leaves != "never":
            model.set_reshard_after_backward(last and leaves != "always")
        model.set_requires_gradient_sync(last or sync)

    return train(model, accumulate=3, without=tell)


def memory_is_left_after_backward() -> None:
    """As a trainer does with PyTorch's until the last pass; or always, with which PyTorch's would have old values."""
    for sync in (False, True):
        for reshards in (True, False):
            other = sharded(theirs, net(), reshard_after_forward=reshards)
            expected = adding_up(other, sync, "until the last")
            for leaves in ("until the last", "always"):
                model: Any = sharded(ours, net(), reshard_after_forward=reshards)
                adding_up(model, sync, leaves).check(expected, f"{sync=} {reshards=} {leaves}")
    refused(ts.InvalidArgument, "reshard_after_backward is 1", lambda: model.set_reshard_after_backward(1))


def adds_up(leaves: str) -> None:
    """A test counts what is copied."""
    with job():
        adding_up(sharded(ours, net()), sync=True, leaves=leaves)
        gc.collect()  # its communicators leave their records when they end


def what_changes_shards_is_seen() -> None:
    """However they are changed, and on one rank alone: no forward has what was there before."""
    model: Any = sharded(ours, net())
    model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = str(Path(directory, "before"))
    our_dcp.save(get_model_state_dict(model), checkpoint_id=path)
    loss_of(model, 0).backward()
    state = get_model_state_dict(model)

    def with_data() -> None:
        for param in model.parameters():
            param.data.add_(param.grad.data, alpha=-0.1)

    def on_one_rank() -> None:
        if rank == 0:
            model.blocks[1].up.bias.to_local().detach().numpy()[0] += 1

    def assigned() -> None:
        other = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
        with torch.no_grad():
            other["head.bias"].add_(1)
        model.load_state_dict(other, assign=True)

    for change in (
        optimizer.step,
        with_data,
        on_one_rank,
        partial(our_dcp.load, state, checkpoint_id=path),
        partial(dcp.load, state, storage_reader=our_dcp.FileSystemReader(path)),
        assigned,
    ):
        loss_of(model, 1).backward()
        change()
        assert all(isinstance(param, DTensor) for param in model.parameters()), "modules show shards in between"
        now = {name: full(param.detach()) for name, param in model.named_parameters()}
        plain = net()
        plain.load_state_dict(now, strict=False)  # type: ignore[arg-type]
        torch.testing.assert_close(model(tokens(9)), plain(tokens(9)))
        model.reset_iter_state()
        loss_of(model, 1).backward()
        for _ in range(2):
            with torch.no_grad():
                for param in (*model.blocks.parameters(), *plain.blocks.parameters()):
                    param.add_(0.1)
                for one, same in zip(model.blocks, plain.blocks, strict=True):  # by themselves, the next on its way
                    torch.testing.assert_close(one(torch.ones(2, 6)), same(torch.ones(2, 6)))
        model.reset_iter_state()


def replicas_hold_the_same_shards() -> None:
    if ranks % 2:
        return
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    expected = train(sharded(theirs, net(), mesh=mesh))
    model = sharded(ours, net(), mesh=mesh)
    assert model.head.weight.placements[0] == Replicate()
    train(model).check(expected, "replicas")
    model, other = (sharded(kind, net(), mesh=mesh) for kind in (ours, theirs))
    got = train(model, accumulate=3, without=model.set_requires_all_reduce)
    got.check(train(other, accumulate=3, without=other.set_requires_all_reduce), "a delayed all-reduce")


def narrow_types() -> None:
    seen: list[torch.dtype] = []

    def watch(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.extend((args[0].dtype, output.dtype))

    def built(kind: Kind, of_blocks: MixedPrecisionPolicy, of_root: MixedPrecisionPolicy) -> Net:
        model = net()
        for block in model.blocks:
            kind(block, mp_policy=of_blocks)
        kind(model, mp_policy=of_root)
        return model

    policy = MixedPrecisionPolicy
    bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
    for blocks, root in (
        (policy(bf16, f32), policy(bf16, f32, f32)),
        (policy(bf16), policy(bf16)),
        (policy(None, f64), policy(None, f64, f64)),
        (policy(bf16, f32, f32), policy()),
        (policy(f32, None, bf16), policy(bf16, f32)),
    ):
        model = built(ours, blocks, root)
        hooks = [model.register_forward_hook(watch), model.blocks[0].register_forward_hook(watch)]
        train(model).check(train(built(theirs, blocks, root)), f"{blocks}, {root}", rtol=2e-2, atol=2e-2)
        for hook in hooks:
            hook.remove()
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        assert seen[0] is (blocks.param_dtype or f32), "a block's input"
        assert seen[1] is (blocks.output_dtype or blocks.param_dtype or f32), "a block's output"
        assert seen[3] is (root.output_dtype or root.param_dtype or f32), "the root's output"
        seen.clear()
    narrow = sharded(ours, net().to(torch.bfloat16))
    assert train(narrow, kind=torch.optim.SGD).grads[0]["head.weight"].dtype is torch.bfloat16  # type: ignore[union-attr]


def divided_by_another_number() -> None:
    """Each module by its own: the root's, which is set last, is not its blocks'."""
    model, other = (sharded(kind, net()) for kind in (ours, theirs))
    for one in (model, other):
        one.blocks[0].set_gradient_divide_factor(4.0)
        one.blocks[1].set_reduce_scatter_divide_factor(3.0)  # its older name; the third keeps the number of ranks
        one.set_gradient_divide_factor(5.0)
        for each in one.modules():
            if isinstance(each, TheirModule):
                each.set_force_sum_reduction_for_comms(True)  # Gloo knows no other way
    train(model).check(train(other), "set_gradient_divide_factor")


def without_values_until_later() -> None:
    def built(kind: Kind) -> Net:
        with torch.device("meta"):
            model = Net()
        sharded(kind, model)
        assert model.head.weight.device.type == "meta"
        model.to_empty(device="cpu")
        for number, param in enumerate(model.parameters()):
            local = param.to_local()  # type: ignore[attr-defined]
            with torch.no_grad():
                local.fill_(0.01 * (number + 1))
        with torch.no_grad():
            model.offset.fill_(0.5)
        return model

    of = [train(built(kind), kind=torch.optim.SGD) for kind in (ours, theirs)]  # gradients near zero are not blown up
    of[0].check(of[1], "meta")
    with torch.device("meta"):
        model = Net()
    sharded(ours, model)
    refused(ts.InvalidArgument, "'embed.weight' has no values yet", lambda: model(tokens(0)))


LARGE = 4096  # rows and columns of each of two weights: 64 MiB


def large() -> nn.Module:
    """Without values."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(LARGE, LARGE, bias=False), nn.Linear(LARGE, LARGE, bias=False))


def memory_of_process(what: str) -> int:
    """VmRSS, or VmHWM, in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if what in line]
    return 1024 * int(line.split()[1])


def loads_large(where: str) -> None:
    """On the meta device, sharded, loaded: what a rank needs is its rows, less than even one whole weight."""
    with job():
        model = large()
        for layer in model:
            ours(layer)
        ours(model)
        model.to_empty(device="cpu")
        state = {"model": get_model_state_dict(model)}
        small = {"small": torch.zeros(3)}
        our_dcp.save(small, checkpoint_id=str(Path(where, "small")))
        our_dcp.load(small, checkpoint_id=str(Path(where, "small")))  # what is loaded once: code, stacks of threads
        before = memory_of_process("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM begins anew
        our_dcp.load(state, checkpoint_id=str(Path(where, "large")))
        set_model_state_dict(model, state["model"])
        grown = memory_of_process("VmHWM") - before
        own = 2 * 4 * LARGE * LARGE // ranks
        assert own <= grown < 4 * LARGE * LARGE, f"{grown / 2**20:.0f} MiB for {own / 2**20:.0f}"
        rows = torch.arange(LARGE).chunk(ranks)[rank].float()
        for number, param in enumerate(model.parameters()):
            local = param.to_local()  # type: ignore[attr-defined]
            assert bool((local == (rows + number)[:, None]).all())
        with torch.no_grad():
            first = torch.zeros(1, LARGE)
            first[0, 0] = 1
            torch.testing.assert_close(model[0](first)[0], torch.arange(LARGE).float())  # type: ignore[index]


def whole_by_hand() -> None:
    model = sharded(ours, net())
    expected = net()
    for one in (model, *model.blocks):
        assert one.unshard() is None
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter
        torch.testing.assert_close(param.data, expected.get_parameter(name).data, rtol=0, atol=0)
    addresses = {name: param.data_ptr() for name, param in model.named_parameters()}
    for one in (model, *model.blocks):
        one.reshard()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    for by in (2, 0.5):
        with torch.no_grad():
            for param in (*model.parameters(), *expected.parameters()):
                param.mul_(by)
        model.blocks[0].unshard()
        for param, same in zip(model.blocks[0].parameters(), expected.blocks[0].parameters(), strict=True):
            torch.testing.assert_close(param.data, same.data, rtol=0, atol=0)
        model.blocks[0].reshard()
    handle = model.blocks[1].unshard(async_op=True)
    assert isinstance(model.blocks[1].scale, DTensor)
    handle.wait()
    handle.wait()
    assert model.blocks[1].scale.data_ptr() == addresses["blocks.1.scale"]
    model.blocks[1].reshard()
    train(model, steps=2).check(train(sharded(theirs, net()), steps=2), "afterwards")
    with torch.no_grad():
        model(tokens(0))
    assert all(isinstance(param, DTensor) for param in model.parameters()), "no backward follows"
    model(tokens(0))
    assert type(model.head.weight) is nn.Parameter, "the root's stay whole"
    assert all(isinstance(value, (DTensor, torch.Tensor)) for value in model.state_dict().values())
    assert isinstance(model.state_dict()["head.weight"], DTensor)
    torch.testing.assert_close(net().as_list(tokens(0)), sharded_method(), rtol=1e-6, atol=1e-6)


def sharded_method() -> list[torch.Tensor]:
    model = sharded(ours, net())
    register_fsdp_forward_method(model, "as_list")
    with torch.no_grad():
        return model.as_list(tokens(0))


def checkpoints() -> None:
    """Saved by Tessera's engine and by PyTorch's own, loaded by either, into either's modules."""
    model = sharded(ours, net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    other = sharded(theirs, net())
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.02)

    steps(model, optimizer, range(3))
    steps(other, other_optimizer, range(3))
    for number, (save, saved, saved_optimizer) in enumerate(
        (
            (partial(our_dcp.save, format="torch_dcp"), model, optimizer),
            (dcp.save, model, optimizer),
            (dcp.save, other, other_optimizer),
        )
    ):
        path = str(Path(directory, f"checkpoint-{number}"))
        own, own_optimizer = get_state_dict(saved, saved_optimizer)
        save({"model": own, "optim": own_optimizer}, checkpoint_id=path)
        for load, kind in ((our_dcp.load, ours), (dcp.load, ours), (our_dcp.load, theirs), (dcp.load, theirs)):
            loaded = sharded(kind, net())
            if kind is ours:
                loss_of(loaded, 77).backward()  # the core has its shards already
                loaded.zero_grad()
            with_ = torch.optim.AdamW(loaded.parameters(), lr=0.5)
            state, optimizer_state = get_state_dict(loaded, with_)
            load({"model": state, "optim": optimizer_state}, checkpoint_id=path)
            set_state_dict(loaded, with_, model_state_dict=state, optim_state_dict=optimizer_state)
            again = copy_of(saved, saved_optimizer)
            torch.testing.assert_close(steps(loaded, with_, range(3, 6)), steps(*again, range(3, 6)))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        plain = net()
        plain.load_state_dict(whole)
    empty = sharded(ours, net())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(empty, whole if rank == 0 else {}, options=options)
    torch.testing.assert_close(loss_of(empty, 9), loss_of(model, 9))
    assigned = sharded(ours, net())
    loss_of(assigned, 0).backward()
    assigned.zero_grad()
    assigned.load_state_dict({name: copy.deepcopy(value) for name, value in model.state_dict().items()}, assign=True)
    torch.testing.assert_close(loss_of(assigned, 9), loss_of(model, 9))


def a_sharded_state_needs_no_other_rank() -> None:
    model = sharded(ours, net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    steps(model, optimizer, range(1))

    def asks() -> None:
        whole = [isinstance(param, DTensor) for param in model.parameters()]
        assert not all(whole), "the root's are, since a forward"
        for state, moments in ((model.state_dict(), optimizer.state_dict()), get_state_dict(model, optimizer)):
            assert all(isinstance(state[name], DTensor) for name, _ in model.named_parameters())
            assert all(isinstance(moment["exp_avg"], DTensor) for moment in moments["state"].values())

    loss_of(model, 1)
    alone_on_each(asks, rank, ranks)


def copy_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One that trains on from there, under PyTorch's own."""
    made = sharded(theirs, net())
    with_ = torch.optim.AdamW(made.parameters(), lr=0.02)
    state, optimizer_state = get_state_dict(model, optimizer)
    state, optimizer_state = copy.deepcopy(state), copy.deepcopy(optimizer_state)
    set_state_dict(made, with_, model_state_dict=state, optim_state_dict=optimizer_state)
    return made, with_


def a_step_that_failed() -> None:
    for where in ("forward", "backward"):
        model = sharded(ours, net())
        first = train(model, steps=1)

        def fails(*_: Any) -> None:
            raise ZeroDivisionError

        if where == "forward":
            hook = model.blocks[1].up.register_forward_hook(fails)
            refused(ZeroDivisionError, "", partial(model, tokens(0)))
        else:
            hook = model.blocks[1].register_full_backward_pre_hook(fails)
            loss = loss_of(model, 0)
            refused(ZeroDivisionError, "", loss.backward)
        hook.remove()
        model.reset_iter_state()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert all(param.grad is None or not param.grad.to_local().any() for param in model.parameters())
        model.zero_grad()
        other = sharded(ours, net())
        train(other, steps=1).check(first, "the same so far", rtol=0, atol=0)
        train(model, steps=2).check(train(other, steps=2), "afterwards", rtol=0, atol=0)


def nothing_is_left() -> None:
    model = sharded(ours, net())
    loss_of(model, 0).backward()
    gone = weakref.ref(model.blocks[0])
    engine = weakref.ref(model._unit.engine)
    del model
    gc.collect()
    assert gone() is None
    assert engine() is None


def mistakes_are_told() -> None:
    model = sharded(ours, net())
    assert isinstance(model, FSDPModule)
    assert isinstance(model, TheirModule)
    assert isinstance(model, Net)
    assert type(model).__name__ == "FSDPNet"
    refused(ts.InvalidArgument, "already called for this FSDPNet", lambda: ours(model))
    refused(ts.InvalidArgument, "a ModuleList has no forward", lambda: ours(net().blocks))
    refused(ts.InvalidArgument, "takes a module", lambda: ours(None))  # type: ignore[arg-type]
    for number in (0, -1, ranks + 1, 1.0):
        refused(
            ts.InvalidArgument,
            f"reshard_after_forward is {number}",
            lambda number=number: ours(net(), reshard_after_forward=number),
        )
    untouched = net()
    for wrong, kind, text in (
        (Shard(1), ts.InvalidArgument, "'bias': shard_placement_fn returned Shard(dim=1) for the shape (11,)"),
        (Shard(-3), ts.InvalidArgument, "for the shape (11, 6), which has dimensions from -2 to 1"),
        (Replicate(), ts.InvalidArgument, "'weight': shard_placement_fn returned Replicate(), expected Shard"),
        (0, ts.InvalidArgument, "returned 0, expected Shard"),
        (ShardPlacementResult(Shard(0), None), ts.Unsupported, "returned a ShardPlacementResult; it must return"),  # type: ignore[arg-type]
    ):
        refused(kind, text, lambda wrong=wrong: ours(untouched.head, shard_placement_fn=lambda _: wrong))
        assert type(untouched.head.weight) is nn.Parameter, "nothing was changed"
    refused(ts.Unsupported, "dp_mesh_dims", lambda: ours(net(), dp_mesh_dims=object()))
    overridden = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: param.dtype)
    refused(ts.Unsupported, "param_dtype_override_fn", lambda: ours(net(), mp_policy=overridden))
    refused(ts.Unsupported, "copy it before", lambda: copy.deepcopy(model))
    refused(ts.Unsupported, "set_custom_all_gather", lambda: model.set_custom_all_gather(None))
    refused(ts.Unsupported, "set_custom_reduce_scatter", lambda: model.set_custom_reduce_scatter(None))
    refused(ts.Unsupported, "set_all_reduce_hook", lambda: model.set_all_reduce_hook(print))
    refused(ts.Unsupported, "set_unshard_in_backward(False)", lambda: model.set_unshard_in_backward(False))
    model.set_unshard_in_backward(True)
    refused(ts.Unsupported, "finalization(True)", lambda: model.set_manual_backward_finalization(True))
    refused(ts.InvalidState, "nothing to finalize", model.finalize_backward)
    refused(ts.Unsupported, "set_symm_mem_for_comm", model.set_symm_mem_for_comm)
    refused(ts.Unsupported, "no state of PyTorch's FSDP", lambda: share_comm_ctx([model]))
    our_module.share_comm_ctx([model])
    refused(ts.InvalidArgument, "share_comm_ctx", lambda: our_module.share_comm_ctx([net()]))
    refused(ts.InvalidArgument, "must be positive", lambda: model.set_gradient_divide_factor(0))
    refused(ts.InvalidArgument, "modules to prefetch", lambda: model.set_modules_to_forward_prefetch([nn.Linear(1, 1)]))
    scalar = nn.Module()
    scalar.register_parameter("one", nn.Parameter(torch.tensor(1.0)))
    refused(ts.InvalidArgument, "'one' has no dimension", lambda: ours(scalar))
    turned = nn.Linear(3, 4)
    turned.weight = nn.Parameter(torch.randn(3, 4).t())
    refused(ts.InvalidArgument, "'weight' has strides (1, 4)", lambda: ours(turned))
    whole = nn.Module()
    whole.register_parameter("n", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    refused(ts.Unsupported, "'n' is torch.complex64", lambda: ours(whole))
    sharded_already = nn.Linear(4, 4)
    theirs(sharded_already)
    refused(ts.InvalidArgument, "'weight' is already a DTensor over the ranks", lambda: ours(sharded_already))
    own = net()
    ours(own.blocks[0])
    own.blocks[0](torch.ones(2, 6))
    ours(own)
    refused(ts.InvalidState, "has computed on its own before", lambda: own(tokens(0)))
    used = sharded(ours, net())
    used(tokens(0))
    assert used.to("cpu").float() is used, "as it is"
    refused(ts.InvalidState, "before its first forward", lambda: used.to(torch.bfloat16))
    used.blocks[0].set_requires_gradient_sync(False)
    refused(ts.Unsupported, "hold for all modules", lambda: loss_of(used, 0).backward())


def shared_parameters_in_two_units_are_refused() -> None:
    model = net(tied=True)
    ours(model.embed)
    refused(ts.InvalidArgument, "parameter 'head.weight' is also 'weight' of a FSDPEmbedding", lambda: ours(model))
    assert type(model.blocks[0].up.weight) is nn.Parameter, "nothing was changed"
    with torch.device("meta"):
        later = Net(tied=True)
    ours(later.head)
    refused(ts.InvalidArgument, "parameter 'embed.weight' is also 'weight' of a FSDPLinear", lambda: ours(later))
    frozen = net(tied=True)
    frozen.requires_grad_(False)
    ours(frozen.head)
    refused(ts.InvalidArgument, "is also 'weight'", lambda: ours([frozen.embed, frozen.blocks[0]]))
    together = net(tied=True)
    ours([together.embed, together.head])
    ours(together)
    assert together.head.weight is together.embed.weight
    kept = net()
    weight = kept.head.weight
    ours(kept)
    del kept
    gc.collect()
    again = nn.Linear(6, VOCABULARY)
    again.weight = weight  # of a model that is no more
    assert isinstance(ours(again).weight, DTensor)


def units_that_are_in_use() -> None:
    """They are not sharded in the middle of their forward or backward, and the step goes on."""
    expected = train(sharded(ours, net()))
    model = sharded(ours, net())
    block, told = model.blocks[1], []

    def refuses(text: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            refused(ts.InvalidState, text, block.reshard)
            told.append(text)

        return hook

    hooks = [
        block.up.register_forward_hook(refuses("'blocks.1' is in its forward")),
        block.up.register_full_backward_pre_hook(refuses("'blocks.1' is in its backward")),
    ]
    train(model).check(expected, "in use", rtol=0, atol=0)
    assert len(told) == 2 * 4
    for one in hooks:
        one.remove()

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    hook = block.up.register_forward_hook(fails)
    refused(ZeroDivisionError, "", partial(model, tokens(0)))
    hook.remove()
    refused(ts.InvalidState, "reset_iter_state", block.reshard)
    assert isinstance(model.state_dict()["blocks.1.up.weight"], DTensor), "a state is told all the same"
    model.reset_iter_state()
    block.reshard()
    train(model)


def ranks_that_differ() -> None:
    """Each rank is told, and none waits for another."""
    model = sharded(ours, net())
    which = (0, 2) if rank == 1 else (0, 1, 2)
    # A rank may wait for another of this unit's messages when it is told of the first one.
    refused((ts.Mismatch, ts.Aborted), 'unshards unit "blocks.1"', lambda: loss_of(model, 0, which=which).backward())
    refused(ts.Aborted, "cannot be used after an earlier error", lambda: model(tokens(0)))
    model = net()
    if rank == 1:
        ours(model.blocks[0])  # a unit more
    ours(model)
    refused(ts.Mismatch, "the ranks' models differ", lambda: model(tokens(0)))
    model = net()
    if rank == 1:
        model.head = nn.Linear(6, VOCABULARY, bias=False)
    sharded(ours, model)
    refused(ts.Mismatch, "the ranks' models differ", lambda: model(tokens(0)))
    square = ours(nn.Linear(4, 4), shard_placement_fn=lambda param: Shard(param.ndim - 1 if rank == 1 else 0))
    refused(ts.Mismatch, '"weight (Shard(1))"', lambda: square(torch.ones(1, 4)))


def another_cut_is_refused() -> None:
    """Of a parameter that is put into the place of one; on this rank its values may have the same shape."""

    def square(dim: int) -> Any:
        return ours(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda _: Shard(dim))

    x = torch.ones(1, 4)
    for begun in (False, True):
        rows, other = square(0), square(1)
        if begun:
            rows(x)
        rows.load_state_dict(other.state_dict(), assign=True)
        text = "'weight' was replaced by a DTensor with placements (Shard(dim=1),), expected (Shard(dim=0),)"
        refused(ts.InvalidArgument, text, partial(rows, x))


def sparse_gradients_are_refused() -> None:
    words = nn.Embedding(VOCABULARY, 6, sparse=True)
    ours(words)
    refused(
        ts.Unsupported,
        "the gradient of 'weight' is torch.sparse_coo",
        lambda: words(tokens(0)).square().sum().backward(),
    )
    words.sparse = False
    words.reset_iter_state()  # type: ignore[operator]
    words(tokens(0)).square().sum().backward()
    assert isinstance(words.weight.grad, DTensor)


def every_name_of_pytorchs_is_there() -> None:
    """A method that a new PyTorch adds would otherwise be PyTorch's own, on modules that it knows nothing of."""
    theirs_ = [name for name, value in vars(TheirModule).items() if callable(value) and not name.startswith("__")]
    assert len(theirs_) > 20
    assert [name for name in theirs_ if name not in vars(FSDPModule)] == []
    assert [name for name in their_module.__all__ if name not in our_module.__all__] == []
    assert all(hasattr(our_module, name) for name in our_module.__all__)


def ignored_parameters_stay() -> None:
    model = net()
    kept = model.head.weight
    ours(model, ignored_params={kept})
    assert model.head.weight is kept
    loss_of(model, 0).backward()
    assert type(model.head.weight.grad) is torch.Tensor
    assert isinstance(model.embed.weight.grad, DTensor)


def our_collectives_in_theirs() -> None:
    expected = train(sharded(theirs, net()))
    model = sharded(theirs, net())
    gathers, scatters = [], []

    class Gather(AllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            gathers.append(kwargs.get("group", args[2] if len(args) > 2 else None))
            return super().__call__(*args, **kwargs)

    class Scatter(ReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            scatters.append(kwargs.get("group", args[2] if len(args) > 2 else None))
            return super().__call__(*args, **kwargs)

    for module in model.modules():
        if isinstance(module, TheirModule):
            module.set_custom_all_gather(Gather())
            module.set_custom_reduce_scatter(Scatter())
    train(model).check(expected, "our collectives")
    assert len(gathers) >= 4 * 4
    assert len(scatters) == 4 * 4, "units by steps"
    for group in (gathers[0], scatters[0]):
        assert dist.get_backend(collectives._ours_of(group)) == "tessera"


def the_backend_of_tessera() -> None:
    """DTensors' own messages over Tessera too."""
    expected = train(sharded(theirs, net()))
    train(sharded(ours, net())).check(expected, "cpu:tessera")


CHECKS = [
    losses_gradients_and_states,
    losses_of_fifty_steps,
    every_way_to_be_whole,
    compiled_before_the_first_forward,
    parts_of_containers,
    replicated_beside_sharded,
    modules_to_prefetch_are_on_their_way,
    shards_are_offloaded_already,
    activations_are_computed_again,
    parameters_that_are_shared_or_used_often,
    frozen_and_unused_parameters,
    frozen_whole_numbers,
    frozen_and_unfrozen_later,
    several_types_in_one_unit,
    a_parameter_that_one_rank_uses,
    parameters_are_cut_along_any_dimension,
    a_shard_of_columns_is_contiguous,
    gradients_add_up,
    replicas_hold_the_same_shards,
    narrow_types,
    divided_by_another_number,
    without_values_until_later,
    whole_by_hand,
    checkpoints,
    a_sharded_state_needs_no_other_rank,
    a_step_that_failed,
    nothing_is_left,
    mistakes_are_told,
    shared_parameters_in_two_units_are_refused,
    units_that_are_in_use,
    ranks_that_differ,
    another_cut_is_refused,
    sparse_gradients_are_refused,
    every_name_of_pytorchs_is_there,
    memory_is_left_after_backward,
    what_changes_shards_is_seen,
    ignored_parameters_stay,
    our_collectives_in_theirs,
]


def checks(where: str, *names: str) -> None:
    global directory
    directory = where
    with job():
        run_checks(CHECKS, names, rank)
    if not names:
        with job("tessera"):
            the_backend_of_tessera()


def columns(param: nn.Parameter) -> Shard | None:
    """Of matrices whose columns two ranks divide, and three, as PyTorch's asks for."""
    return Shard(-1) if param.ndim == 2 and param.shape[1] % 6 == 0 else None


def checks_by_columns(where: str, *names: str) -> None:
    """The same of parameters that both cut so."""
    global ours, theirs
    ours, theirs = (partial(kind, shard_placement_fn=columns) for kind in (ours, theirs))
    checks(where, *names)


def trained(cut: str, number: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """By rows, or by columns of which ranks may have different numbers or none; after a step."""
    model = sharded(ours, net(), shard_placement_fn=(lambda _: Shard(-1)) if cut == "columns" else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    steps(model, optimizer, range(number, number + 1))
    return model, optimizer


def whole_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return {"model": state, "optim": moments["state"]}


def saves(where: str, cut: str) -> None:
    """In three ways, and whole."""
    with job():
        model, optimizer = trained(cut, 1)
        state, moments = get_state_dict(model, optimizer)
        parts = {"model": state, "optim": moments}
        our_dcp.save(parts, checkpoint_id=Path(where, "native"))
        our_dcp.save(parts, checkpoint_id=Path(where, "torch_dcp"), format="torch_dcp")
        dcp.save(parts, checkpoint_id=Path(where, "theirs"))
        whole = whole_of(model, optimizer)
        if rank == 0:
            torch.save(whole, Path(where, "whole.pt"))


def loads(where: str, cut: str) -> None:
    """Each of them by each."""
    with job():
        expected = torch.load(Path(where, "whole.pt"))
        for load, name in (
            (our_dcp.load, "native"),
            (our_dcp.load, "torch_dcp"),
            (our_dcp.load, "theirs"),
            (dcp.load, "torch_dcp"),
            (dcp.load, "theirs"),
        ):
            model, optimizer = trained(cut, 2)
            state, moments = get_state_dict(model, optimizer)
            load({"model": state, "optim": moments}, checkpoint_id=Path(where, name))
            set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
            torch.testing.assert_close(whole_of(model, optimizer), expected, rtol=0, atol=0)


def dies() -> None:
    """The last rank is killed in its backward pass: the others name it."""
    with job():
        model = sharded(ours, net())
        train(model, steps=1)
        loss = loss_of(model, 1)
        if rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        since = time.monotonic()
        refused(ts.PeerLost, f"rank {ranks - 1}", loss.backward)
        assert time.monotonic() - since < NOTICED_S
        refused(ts.Aborted, "cannot be used after an earlier error", lambda: model(tokens(0)))
        os._exit(0)  # Gloo's store has lost a rank


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
    end()
