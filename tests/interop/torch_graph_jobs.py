"""What test_torch_graphs.py runs: random modules, used in random ways, on each rank.

usage: torch_graph_jobs.py fully_shard|ddp FIRST_SEED SECONDS COUNT

Each seed draws a model, how it is cut into units, and some steps; all ranks draw the same, with other inputs. The
gradients of each step are compared with those of a whole copy of the model, averaged over the ranks. PyTorch's own
class runs beside it; where that differs from the whole copy, or refuses, is counted. Stops after so many seconds
or seeds.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tessera.torch import DistributedDataParallel as OurDDP
from tessera.torch.fsdp import fully_shard as our_fully_shard
from torch import nn
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel as TheirDDP
from torch.utils.checkpoint import checkpoint
from torch_ranks import patience

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
WIDTH = 5
FOUND = (10_000, 400_338)  # seeds that have differed before


class Failed(Exception):
    """A forward is to fail."""


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Pair(nn.Module):
    """Of two modules that may have a unit of their own each, or share their weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.down(torch.tanh(self.up(x))))


@dataclasses.dataclass(frozen=True)
class Use:
    """One use of a module in a forward."""

    module: int
    way: str


WAYS = ["chained", "added", "of the input", "detached", "without gradients", "checkpointed", "reentrant", "left out"]


class Model(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        kinds: list[Callable[[], nn.Module]] = [
            lambda: nn.Linear(WIDTH, WIDTH),
            lambda: nn.Linear(WIDTH, WIDTH, bias=False),
            lambda: nn.LayerNorm(WIDTH),
            Scale,
            lambda: Pair(tied=False),
            lambda: Pair(tied=True),
        ]
        self.parts = nn.ModuleList(draw.choice(kinds)() for _ in range(draw.randint(2, 5)))
        self.head = nn.Linear(WIDTH, 3)
        self.uses: list[Use] = []
        self.fails_at: int | None = None

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        x = raw
        for number, use in enumerate(self.uses):
            part = self.parts[use.module]
            if number == self.fails_at:
                raise Failed
            if use.way == "chained":
                x = torch.tanh(part(x))
            elif use.way == "added":
                x = x + part(x)
            elif use.way == "of the input":
                x = x + part(raw)
            elif use.way == "detached":
                x = x + part(x.detach())
            elif use.way == "without gradients":
                with torch.no_grad():
                    y = part(x)
                x = x + y
            elif use.way == "checkpointed":
                x = x + checkpoint(part, x, use_reentrant=False)
            elif use.way == "reentrant":
                x = x + checkpoint(part, x, use_reentrant=True)
            else:
                part(x)  # nothing comes of it
        return torch.as_tensor(self.head(x))


@dataclasses.dataclass
class Step:
    uses: list[list[Use]]  # of each forward
    order: str  # of its backwards
    frozen: set[str]  # modules by name
    fails_at: int | None
    clears: bool | None  # to None, to zero, or not at all
    syncs_last: bool  # only the last backward, where they come in turn


@dataclasses.dataclass
class Plan:
    model: Model
    units: list[list[str]]  # modules of each call of fully_shard, inner ones first; the root's comes last
    options: list[dict[str, Any]]
    steps: list[Step]


def by_columns(param: nn.Parameter) -> Shard:
    """Of a vector the same as by rows."""
    return Shard(-1)


def drawn(seed: int) -> Plan:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Model(draw)
    count = len(model.parts)
    units: list[list[str]] = []
    alone = [f"parts.{i}" for i in range(count)]
    draw.shuffle(alone)
    if draw.random() < 0.4 and count >= 2:
        units.append(sorted(alone.pop() for _ in range(2)))
    for name in alone:
        part = model.get_submodule(name)
        if isinstance(part, Pair) and part.up.weight is not part.down.weight and draw.random() < 0.4:
            units.append([f"{name}.up"])
        if draw.random() < 0.75:
            units.append([name])
    options = [{"reshard_after_forward": draw.random() < 0.7} for _ in units]
    names = [f"parts.{i}" for i in range(count)]
    steps = []
    frozen: set[str] = {name for name in names if draw.random() < 0.15}
    for _ in range(4):
        if draw.random() < 0.3:
            frozen = {name for name in names if draw.random() < 0.3}
        forwards = draw.choice([1, 1, 1, 2, 3])
        uses = []
        for _ in range(forwards):
            chosen = [i for i in range(count) for _ in range(draw.choice([0, 1, 1, 1, 2, 3]))]
            draw.shuffle(chosen)
            uses.append([Use(i, draw.choice(WAYS)) for i in chosen])
        fails_at = draw.randrange(4) if draw.random() < 0.1 else None
        steps.append(
            Step(
                uses=uses,
                order=draw.choice(["together", "in turn", "first come first", "last comes first"]),
                frozen=frozen,
                fails_at=fails_at,
                clears=draw.choice([True, True, False, None]),
                # After a failure, what passes without synchronisation left is in the next step, as with PyTorch's.
                syncs_last=fails_at is None and draw.random() < 0.3,
            )
        )
    for one in options:
        if draw.random() < 0.3:
            one["shard_placement_fn"] = by_columns
    return Plan(model, units, options, steps)


KINDS = {"fully_shard": (our_fully_shard, their_fully_shard), "ddp": (OurDDP, TheirDDP)}


def wrapped(kind: Any, plan: Plan) -> nn.Module:
    model = copy.deepcopy(plan.model)
    if kind in KINDS["ddp"]:
        return kind(model, find_unused_parameters=True)
    freeze(model, plan.steps[0].frozen)
    for names, options in zip(plan.units, plan.options, strict=True):
        modules = [model.get_submodule(name) for name in names]
        kind(modules if len(modules) > 1 else modules[0], **options)
    kind(model)
    return model


def within(model: nn.Module) -> Model:
    inner = model.module if isinstance(model, TheirDDP) else model
    assert isinstance(inner, Model)
    return inner


def freeze(model: nn.Module, frozen: set[str]) -> None:
    for name, module in model.named_modules():
        if name.count(".") == 1 and name.startswith("parts."):
            module.requires_grad_(name not in frozen)


def inputs(seed: int, step: int, number: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * seed + 100 * step + 10 * number + rank))


def run_step(model: nn.Module, plan: Step, seed: int, number: int) -> bool:
    """Whether it ended well; a forward may fail."""
    drawn_one = within(model)
    losses = []
    last = len(plan.uses) - 1
    for turn, uses in enumerate(plan.uses):
        drawn_one.uses = uses
        drawn_one.fails_at = plan.fails_at if turn == last else None
        with syncing(model, turn == last or plan.order != "in turn" or not plan.syncs_last):
            try:
                loss = model(inputs(seed, number, turn)).square().mean()
            except Failed:
                return False
            if plan.order == "in turn":
                loss.backward()
            else:
                losses.append(loss)
    if plan.order == "together":
        torch.stack(losses).sum().backward()
    else:
        for loss in losses if plan.order == "first come first" else reversed(losses):
            loss.backward()
    return True


@contextlib.contextmanager
def syncing(model: Any, syncs: bool) -> Iterator[None]:
    """Whether gradients are averaged at the end of backward in this block."""
    if isinstance(model, TheirDDP):
        with contextlib.nullcontext() if syncs else model.no_sync():
            yield
    else:
        if hasattr(model, "set_requires_gradient_sync"):  # not the whole copy
            model.set_requires_gradient_sync(syncs)
        yield


def averaged(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gradients of all ranks; what is None on one is None on all, since all do the same."""
    grads: dict[str, torch.Tensor | None] = {}
    for name, param in model.named_parameters():
        grads[name] = None
        if param.grad is not None:
            grads[name] = mean = param.grad.clone()
            dist.all_reduce(mean)
            mean /= ranks
    return grads


def part(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's, as torch.chunk cuts."""
    chunks = whole.chunk(ranks, dim)
    return chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)


def difference(model: nn.Module, expected: dict[str, torch.Tensor | None]) -> str:
    """The first gradient that differs."""
    for name, param in within(model).named_parameters():
        want, got = expected[name], param.grad
        if want is None or got is None:
            if want is not got:
                return f"{name}: {got}, expected {want}"
            continue
        local, right = got, want
        if isinstance(got, DTensor):
            (cut,) = got.placements
            assert isinstance(cut, Shard)
            local, right = got.to_local(), part(want, cut.dim)
        if not torch.allclose(local, right, rtol=1e-4, atol=1e-5):
            return f"{name}: {local.tolist()}, expected {right.tolist()}"
    return ""


def on_all(told: str) -> list[str]:
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, told)
    return every


def uses_once(plan: Plan) -> None:
    """A forward and a backward a step, each module in a unit of its own and used once at most. Beyond that, PyTorch's
    fully_shard reads memory that it gave back, which ends the process."""
    plan.units = [unit for unit in plan.units if len(unit) == 1]
    plan.options = [{}] * len(plan.units)
    for step in plan.steps:
        step.uses = [list({use.module: use for use in step.uses[0]}.values())]


def compare(seed: int, kind: Any, is_ours: bool) -> str:
    """Train under `kind`, and return the first difference."""
    plan = drawn(seed)
    if kind is not our_fully_shard:  # DDP refuses reentrant checkpoints
        for step in plan.steps:
            for uses in step.uses:
                uses[:] = [Use(use.module, "checkpointed") if use.way == "reentrant" else use for use in uses]
    if kind is their_fully_shard:
        uses_once(plan)
    whole = copy.deepcopy(plan.model)
    model = wrapped(kind, plan)
    for number, step in enumerate(plan.steps):
        for one in (whole, within(model)):
            freeze(one, step.frozen)
            if step.clears is not None:
                one.zero_grad(set_to_none=step.clears)
        ended = run_step(whole, step, seed, number)
        if run_step(model, step, seed, number) is not ended:
            return f"step {number} ended otherwise"
        if not ended:
            if not is_ours:
                return ""  # PyTorch's cannot go on
            if not isinstance(model, OurDDP):
                model.reset_iter_state()  # which gives the gradients up
            model.zero_grad()
            whole.zero_grad()
            continue
        told = difference(model, averaged(whole))
        if told:
            return f"step {number} ({step.order}): {told}"
        with torch.no_grad():  # so that the next step has other values
            for name, param in within(model).named_parameters():
                shift = 0.01 * (number + 1)
                local = param.to_local() if isinstance(param, DTensor) else param
                local.add_(shift)
                whole.get_parameter(name).add_(shift)
    return ""


def main(what: str, first: int, seconds: float, count: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=patience(60)))
    ours, theirs = KINDS[what]
    for seed in FOUND:
        told_by_all = on_all(compare(seed, ours, is_ours=True))
        assert not any(told_by_all), f"seed {seed}: {told_by_all}"
    deadline = time.monotonic() + seconds
    done = differs = 0
    for seed in range(first, first + count):
        go_on = [time.monotonic() < deadline]
        dist.broadcast_object_list(go_on, src=0)
        if not go_on[0]:
            break
        try:
            told = compare(seed, ours, is_ours=True)
        except Exception as error:
            error.add_note(f"seed {seed}, rank {rank}: {drawn(seed)}")
            raise
        told_by_all = on_all(told)
        if any(told_by_all):
            raise AssertionError(f"seed {seed}: {told_by_all}; {drawn(seed)}")
        if seed % 4 == 0:
            try:
                other = compare(seed, theirs, is_ours=False)
            except Exception as error:
                other = f"{type(error).__name__}: {error}"
            differs += any(on_all(other))
        done += 1
    if rank == 0:
        print(
            f"seeds {first} to {first + done - 1}; PyTorch's differs in {differs} of those that 4 divides", flush=True
        )
    dist.barrier()  # Gloo's threads let go of tensors while this one waits, not after the interpreter has ended
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
