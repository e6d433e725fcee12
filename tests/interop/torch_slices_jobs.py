"""What test_torch_slices.py runs: under torchrun's environment, four or eight processes, on the backend "tessera".

usage: torch_slices_jobs.py DIRECTORY [CHECK...]

A mesh of dp x tp. Pairs of tensor-parallel ranks have half of a batch each; results are compared with those of one
process that has all of it, which each rank computes too.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import tessera as ts
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as their_dcp
import torch.nn.functional as F
from tessera.torch import DistributedDataParallel, clip_grad_norm_
from tessera.torch import checkpoint as dcp
from tessera.torch.fsdp import FullyShardedDataParallel, fully_shard
from tessera.torch.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint
from torch_ranks import end, patience, refused, run_checks

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
directory = Path()
grid: DeviceMesh
STEPS = 2
NEAR = {"rtol": 1e-9, "atol": 1e-11}


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def expect(got: Any, expected: Any, what: str, **tolerance: float) -> None:
    near = tolerance or NEAR
    torch.testing.assert_close(full(got), full(expected), msg=lambda text: f"rank {rank}, {what}: {text}", **near)


class Block(nn.Module):
    """A norm on parts of the sequence, columns and then rows."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, inner)
        self.down = nn.Linear(inner, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Parameters by rows, by columns, replicated, and with partial gradients. Ranks do not divide 13; with 1 they have
    one column or none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(inner) for inner in (13, 1))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(full(x)))


def whole() -> Net:
    torch.manual_seed(7)
    return Net().double()


def sliced(model: Net | None = None, mesh: DeviceMesh | None = None) -> Net:
    """A model whose blocks are cut over tp."""
    plan = {
        "embed": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    made: Net = parallelize_module(model or whole(), mesh or grid["tp"], plan)
    return made


def batch(step: int) -> torch.Tensor:
    return torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(step))


def mine(of: torch.Tensor) -> torch.Tensor:
    """This rank's half of a batch."""
    return of.chunk(2)[grid.get_local_rank("dp")]


def averaged(loss: torch.Tensor) -> torch.Tensor:
    value = loss.detach().clone()
    dist.all_reduce(value, dist.ReduceOp.AVG, group=grid["dp"].get_group())
    return value


def named(model: nn.Module) -> dict[str, Any]:
    return {name.removeprefix("module."): param for name, param in model.named_parameters()}


def train(
    model: nn.Module,
    optimizer: Any,
    reference: nn.Module,
    its: Any,
    steps: range,
    clip: float = 0.0,
    clipped: Any = torch.nn.utils.clip_grad_norm_,
) -> None:
    """Train both; losses, gradients, norms and parameters are the same after each step."""
    for step in steps:
        x = batch(step)
        loss, other = model(mine(x)).square().mean(), reference(x).square().mean()
        expect(averaged(loss), other.detach(), f"loss {step}")
        loss.backward()
        other.backward()
        for (name, param), theirs in zip(named(model).items(), reference.parameters(), strict=True):
            assert type(param.grad) is type(param.data), name
            if isinstance(param, DTensor):
                assert param.grad.placements == param.placements, name
                assert param.grad.device_mesh == param.device_mesh, name
            expect(param.grad, theirs.grad, f"gradient {step} of {name}")
        if clip:
            norm = clipped(model.parameters(), clip)
            expect(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), clip), f"norm {step}")
        for one in (optimizer, its):
            one.step()
            one.zero_grad()
    for (name, param), theirs in zip(named(model).items(), reference.parameters(), strict=True):
        expect(param, theirs.detach(), f"{name} after {steps}")


def ddp_over_slices() -> None:
    """Slices are averaged over dp alone; also with accumulated and unused gradients, and hooks."""
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        model, reference = sliced(), whole()
        with torch.no_grad():  # rank 0 of each dp group has the values that count
            for param in model.parameters():
                param._local_tensor.mul_(1.0 if grid.get_local_rank("dp") == 0 else 0.0)
        model = DistributedDataParallel(model, device_mesh=grid["dp"], bucket_cap_mb=0.001, **options)
        optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference)]
        train(model, optimizers[0], reference, optimizers[1], range(STEPS), clip=0.5)


def ddp_in_other_ways() -> None:
    """Accumulation; a hook, which sees slices; a group and a communicator instead of a mesh; a plain parameter."""
    group = grid["dp"].get_group()
    comm = ts.init().split(rank % 2, rank)
    for ranks_of_it in (group, comm):
        model, reference = whole(), whole()
        for one in (model, reference):
            one.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        model = sliced(model)
        model = DistributedDataParallel(model, find_unused_parameters=True, process_group=ranks_of_it)

        def hook(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            expected = [param.to_local().shape for param in bucket.parameters() if isinstance(param, DTensor)]
            assert [one.shape for one in bucket.gradients()][: len(expected)] == expected
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            flat = bucket.buffer()
            dist.all_reduce(flat, group=group)
            done.set_result(flat / 2)
            return done

        if ranks_of_it is comm:
            model.register_comm_hook(None, hook)
        for step in range(2):
            with model.no_sync():
                model(mine(batch(step))).square().mean().backward()
            (model(mine(batch(step + 5))).square().mean() + 0 * model.module.scale.sum()).backward()
            for of in (step, step + 5):
                reference(batch(of)).square().mean().backward()
        for (name, param), theirs in zip(named(model).items(), reference.parameters(), strict=True):
            if name != "scale":
                expect(param.grad, theirs.grad, name)
    comm.close()


def ddp_saves_and_loads() -> None:
    """A checkpoint has the parameters of one device, also those of the optimizer."""

    def ddp() -> nn.Module:
        return DistributedDataParallel(sliced(), device_mesh=grid["dp"])

    model, reference = ddp(), whole()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference)]
    train(model, optimizers[0], reference, optimizers[1], range(2))
    round_trip(model, optimizers[0], reference, optimizers[1], ddp, "ddp")
    with warnings.catch_warnings(action="error"):
        copied = copy.deepcopy(model.module)
        torch.save(dict(model.named_parameters()), directory / f"parameters{rank}.pt")
    for name, param in model.module.named_parameters():
        expect(copied.get_parameter(name), param.detach(), f"copy of {name}")


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def round_trip(
    model: nn.Module, optimizer: Any, reference: nn.Module, its: Any, again: Callable[[], nn.Module], name: str
) -> None:
    """Save; load into a whole model, into the same kind, and from a whole model's checkpoint; train on."""
    path = directory / name
    dcp.save(state_of(model, optimizer), checkpoint_id=path)
    alone = whole()
    of_alone = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    state = state_of(alone, of_alone)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(alone, of_alone, model_state_dict=state["model"], optim_state_dict=state["optim"])
    expected = state_of(reference, its)
    for part in ("model", "optim"):
        compare(state[part], expected[part], f"{name}, {part}")
    whole_path = directory / f"{name}_whole"
    dcp.save(expected, checkpoint_id=whole_path)
    for source in (path, whole_path):
        made = again()
        its_optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        with torch.no_grad():
            for param in made.parameters():
                local(param).zero_()
        state = state_of(made, its_optimizer)
        dcp.load(state, checkpoint_id=source)
        set_state_dict(made, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        compare(state_of(made, its_optimizer), expected, f"{name} of {source}")
        other = copy.deepcopy(alone)
        of_other = torch.optim.AdamW(other.parameters(), lr=1e-2)
        of_other.load_state_dict(copy.deepcopy(of_alone.state_dict()))
        train(made, its_optimizer, other, of_other, range(2, 4))


def local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def compare(got: Any, expected: Any, what: str) -> None:
    assert got.keys() == expected.keys(), (what, got.keys() ^ expected.keys())
    for key, value in expected.items():
        if isinstance(value, dict):
            compare(got[key], value, f"{what} {key}")
        elif isinstance(value, torch.Tensor):
            expect(got[key], value, f"{what} {key}")


def ddp_bad_input() -> None:
    """Each rank has the error."""
    over_all = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    model = parallelize_module(nn.Linear(8, 8), over_all, ColwiseParallel())
    refused(
        ValueError,
        f"a DTensor over the ranks {list(range(ranks))}, but its gradient would",
        lambda: DistributedDataParallel(model),
    )
    model = parallelize_module(nn.Linear(8, 8), grid["tp"], ColwiseParallel())
    refused(ValueError, "pass the ranks with other data", lambda: DistributedDataParallel(model))
    refused(
        ValueError, "pass the ranks with other data", lambda: DistributedDataParallel(model, device_mesh=grid["tp"])
    )
    crossed = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("a", "b"))["b"]
    refused(
        ts.Mismatch,
        "hold other slices of the DTensor parameters, such as weight: ",
        lambda: DistributedDataParallel(model, device_mesh=crossed),
    )
    weights = nn.Linear(8, 8)
    weights.weight = nn.Parameter(DTensor.from_local(torch.ones(8, 8), grid["tp"], [Partial()]))
    refused(
        ts.Unsupported,
        "'weight' is a DTensor with the placement",
        lambda: DistributedDataParallel(weights, device_mesh=grid["dp"]),
    )
    table = parallelize_module(nn.Embedding(8, 4, sparse=True), grid["tp"], ColwiseParallel(output_layouts=Replicate()))
    refused(
        ts.Unsupported,
        "'weight' is a DTensor, whose gradient cannot be sparse",
        lambda: DistributedDataParallel(table, device_mesh=grid["dp"]),
    )


def sharded(model: Net | None = None, dp: DeviceMesh | None = None, **options: Any) -> Any:
    """A model that is cut over tp, and its slices over dp."""
    model = model or sliced()
    dp = dp or grid["dp"]
    for block in model.blocks:
        fully_shard(block, mesh=dp, **options)
    return fully_shard(model, mesh=dp, **options)


def rows_of(rows: int, style: Any, mesh: DeviceMesh | None = None, columns: int = 8) -> list[list[int]]:
    """The rows and columns of a weight that each rank has, as [first row, rows, first column, columns]."""
    layer = nn.Linear(columns, rows, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(rows * columns).view(rows, columns))
    expected = layer.weight.detach().clone()
    mesh = mesh or grid
    fully_shard(parallelize_module(layer, mesh["tp"], style), mesh=mesh["dp"])
    expect(layer.weight, expected, "the full tensor")
    path = directory / f"{rows}{type(style).__name__}{mesh.mesh_dim_names}"
    dcp.save(layer.state_dict(), checkpoint_id=path)
    saved = {"weight": torch.zeros_like(expected)}
    dcp.load(saved, checkpoint_id=path)
    expect(saved["weight"], expected, "the saved tensor")
    own = layer.weight.to_local()
    first = int(own[0, 0]) if own.numel() else 0
    assert own.equal(expected[first // columns :][: len(own), first % columns :][:, : own.shape[1]])
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, [first // columns, len(own), first % columns, own.shape[1]])
    return told


def fsdp_parts_of_slices() -> None:
    """Rows of columns lie where PyTorch puts them: tp cuts first, then dp cuts each slice."""
    assert rows_of(8, ColwiseParallel()) == [[0, 2, 0, 8], [4, 2, 0, 8], [2, 2, 0, 8], [6, 2, 0, 8]]
    assert rows_of(8, RowwiseParallel()) == [[0, 4, 0, 4], [0, 4, 4, 4], [4, 4, 0, 4], [4, 4, 4, 4]]
    outside = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    assert rows_of(8, ColwiseParallel(), outside) == [[first, 2, 0, 8] for first in (0, 2, 4, 6)]
    assert rows_of(5, ColwiseParallel()) == [[0, 2, 0, 8], [3, 1, 0, 8], [2, 1, 0, 8], [4, 1, 0, 8]]


def fsdp_over_slices() -> None:
    """Gradients are averaged over dp alone; norms count each element once."""
    for options in ({}, {"reshard_after_forward": False}):
        model, reference = sharded(**options), whole()
        optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference)]
        for name, param in model.named_parameters():
            assert param.device_mesh.mesh.tolist() == grid.mesh.tolist(), name
        train(model, optimizers[0], reference, optimizers[1], range(STEPS), clip=0.5)


def fsdp_saves_and_loads() -> None:
    """A checkpoint has the parameters of one device, also those of the optimizer."""
    model, reference = sharded(), whole()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference)]
    train(model, optimizers[0], reference, optimizers[1], range(2))
    round_trip(model, optimizers[0], reference, optimizers[1], sharded, "fsdp")
    expected = reference.state_dict()
    for shape in ((ranks, 1), (1, ranks)):
        other = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        elsewhere = sharded(sliced(mesh=other["tp"]), other["dp"])
        state = {"model": elsewhere.state_dict()}
        dcp.load(state, checkpoint_id=directory / "fsdp")
        compare(state["model"], expected, f"loaded on {shape}")


def compare_gradients(model: nn.Module, reference: nn.Module, what: str) -> None:
    for (name, param), theirs in zip(named(model).items(), reference.parameters(), strict=True):
        expect(param.grad, theirs.grad, f"{what}: gradient of {name}")


def fsdp_in_other_ways() -> None:
    """Accumulation, columns of slices, frozen parameters, recomputed activations, units unsharded by hand."""

    def rows(param: nn.Parameter) -> Shard:
        return Shard(param.ndim - 1)

    model, reference = sharded(shard_placement_fn=rows), whole()
    for synchronised in (False, True):
        model.set_requires_gradient_sync(synchronised)
        for step in (0, 1):
            model(mine(batch(step))).square().mean().backward()
            reference(batch(step)).square().mean().backward()
    compare_gradients(model, reference, "accumulated, by columns")
    for block in (*model.blocks, *reference.blocks):
        block.norm.weight.requires_grad_(False)
        block.down.weight.requires_grad_(False)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for one, x in ((model, mine(batch(4))), (reference, batch(4))):
        one.zero_grad()
        one(x).square().mean().backward()
    compare_gradients(model, reference, "recomputed")
    block = model.blocks[0]
    block.unshard()
    for name, param in block.named_parameters():
        assert isinstance(param, DTensor)
        assert param.device_mesh == grid["tp"], name
        expect(param, reference.get_parameter(f"blocks.0.{name}").detach(), name)
    block.reshard()
    narrow = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    narrow(mine(batch(0))).square().mean().backward()
    for name, param in narrow.named_parameters():
        assert param.grad.dtype == torch.float64, name
        assert param.grad.placements == param.placements, name


class Tied(nn.Module):
    """One parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 6, dtype=torch.float64)
        self.output = nn.Linear(6, 13, bias=False, dtype=torch.float64)
        self.output.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.output(self.table(ids).tanh()))


def tied_weights_and_loss_parallel() -> None:
    torch.manual_seed(3)
    reference = Tied()
    ids, targets = batch(1), batch(2)
    expected = F.cross_entropy(reference(ids).flatten(0, 1), targets.flatten())
    expected.backward()
    plan = {"table": RowwiseParallel(), "output": ColwiseParallel(use_local_output=False)}
    for wrap in (partial(fully_shard, mesh=grid["dp"]), partial(DistributedDataParallel, device_mesh=grid["dp"])):
        model = wrap(parallelize_module(copy.deepcopy(reference), grid["tp"], plan))
        with loss_parallel():
            loss = F.cross_entropy(model(mine(ids)).flatten(0, 1), mine(targets).flatten())
            loss.backward()
        expect(averaged(full(loss)), expected.detach(), "loss")
        (param,) = model.parameters()
        expect(param.grad, reference.table.weight.grad, "gradient")


def fsdp_without_values_until_later() -> None:
    """Cut and sharded on the meta device, then loaded."""
    expected = whole()
    dcp.save({"model": expected.state_dict()}, checkpoint_id=directory / "values")
    with torch.device("meta"):
        model = Net().double()
    model = sharded(sliced(model))
    model.to_empty(device="cpu")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=directory / "values")
    expect(averaged(model(mine(batch(0))).mean()), expected(batch(0)).mean().detach(), "output")
    compare(model.state_dict(), expected.state_dict(), "values")


def fsdp_with_replicas() -> None:
    """Replicas by shards by slices. (PyTorch takes seconds to plan how a tensor on such a mesh becomes full.)"""
    for shape in ((2, 1, 2), (1, 2, 2)) if ranks == 4 else ((2, 2, 2),):
        three = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards", "tp"))
        model, reference = sharded(sliced(mesh=three["tp"]), three["replicas", "shards"]), whole()
        own = batch(0).chunk(ranks // 2)[rank // 2]
        for one, x in ((model, own), (reference, batch(0))):
            optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
            one(x).square().mean().backward()
            clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
        path = directory / f"replicas{shape}"
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        plain = whole().state_dict()
        dcp.load({"model": plain}, checkpoint_id=path)
        compare(plain, reference.state_dict(), f"replicas {shape}")


def norms_of_mixed_parameters() -> None:
    """Plain parameters beside slices: each rank of tp has the same ones, which count once."""
    for wrap in (partial(DistributedDataParallel, device_mesh=grid["dp"]), sharded):
        model, reference = whole(), whole()
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        model = wrap(parallelize_module(model, grid["tp"], plan))
        optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, reference)]
        train(model, optimizers[0], reference, optimizers[1], range(2), clip=0.5, clipped=clip_grad_norm_)
        model(mine(batch(3))).square().mean().backward()
        reference(batch(3)).square().mean().backward()
        for kind in (1.0, 3.0, float("inf"), float("-inf")):
            norms = [clip_grad_norm_(one.parameters(), 1e9, kind) for one in (model, reference)]
            expect(norms[0], torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()], kind), f"{kind}")
    partial_sums = nn.Parameter(DTensor.from_local(torch.zeros(3), grid["tp"], [Replicate()]))
    partial_sums.grad = DTensor.from_local(torch.ones(3), grid["tp"], [Partial()])
    expect(clip_grad_norm_(partial_sums, 1.0), torch.tensor(12.0).sqrt(), "partial sums")
    expect(partial_sums.grad, torch.full((3,), 2 / 12**0.5), "partial sums", rtol=1e-5, atol=1e-6)
    partial_sums.grad = torch.full_like(partial_sums, float("nan"))
    refused(
        ts.InvalidState, "of the gradients is nan", lambda: clip_grad_norm_(partial_sums, 1.0, error_if_nonfinite=True)
    )


def fsdp_of_whole_states() -> None:
    """PyTorch's functions for full states and its own checkpoints. (Without `broadcast_from_rank0`, PyTorch's fail for
    sizes that the ranks do not divide.)"""
    expected = whole().state_dict()
    model = sharded()
    full_state = StateDictOptions(full_state_dict=True)
    compare(get_model_state_dict(model, options=full_state), expected, "full state")
    with torch.no_grad():
        for param in model.parameters():
            local(param).zero_()
    from_rank_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(expected) if rank == 0 else {}, options=from_rank_0)
    compare(model.state_dict(), expected, "full state, loaded")
    model(mine(batch(0))).sum()
    their_dcp.save({"model": model.state_dict()}, checkpoint_id=directory / "theirs")
    dcp.save({"model": model.state_dict()}, checkpoint_id=directory / "torch_dcp", format="torch_dcp")
    for name in ("theirs", "torch_dcp"):
        for load in (dcp.load, their_dcp.load):
            plain = {key: torch.zeros_like(value) for key, value in expected.items()}
            load({"model": plain}, checkpoint_id=directory / name)
            compare(plain, expected, f"{name}, whole")
            other = sharded()
            state = other.state_dict()
            with torch.no_grad():
                for param in other.parameters():
                    local(param).zero_()
            load({"model": state}, checkpoint_id=directory / name)
            compare(state, expected, f"{name}, in parts")


def fsdp_bad_input() -> None:
    """Each rank has the error, and can go on."""

    def layer(mesh: DeviceMesh, style: Any = None) -> nn.Module:
        return parallelize_module(nn.Linear(8, 8), mesh, style or ColwiseParallel())

    def shard(module: nn.Module, mesh: DeviceMesh | None = None) -> Callable[[], object]:
        return lambda: fully_shard(module, mesh=mesh)

    columns = layer(grid["tp"])
    of_dp = grid["dp"].mesh.tolist()
    refused(ValueError, "again. Pass the mesh of the ranks with other data", shard(layer(grid["dp"]), grid["dp"]))
    refused(ValueError, f"over the ranks {of_dp}; fully_shard cannot", shard(layer(grid["dp"]), grid["dp"]))
    refused(ValueError, f"cannot shard it over {grid['tp'].mesh.tolist()} again", shard(columns))
    crossed = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("a", "b"))["b"]
    refused(ValueError, "pass dimensions of one mesh", shard(columns, crossed))
    refused(
        ValueError, "pass dimensions of one mesh", shard(columns, DeviceMesh.from_group(grid["dp"].get_group(), "cpu"))
    )
    sums = nn.Linear(8, 8)
    sums.weight = nn.Parameter(DTensor.from_local(torch.ones(8, 8), grid["tp"], [Partial()]))
    refused(ts.Unsupported, "'weight' is a DTensor with the placement", shard(sums, grid["dp"]))
    refused(ts.Unsupported, "use fully_shard", lambda: FullyShardedDataParallel(columns, device_mesh=grid["dp"]))
    assert columns.weight.placements == (Shard(0),)
    late = nn.Sequential(nn.Linear(8, 8))
    fully_shard(late, mesh=grid["dp"])
    refused(
        ts.InvalidState,
        "Tensor parallelism comes first",
        lambda: parallelize_module(late, grid["tp"], {"0": ColwiseParallel()}),
    )
    fully_shard(columns, mesh=grid["dp"])
    refused(ValueError, "fully_shard was already called", shard(columns, grid["dp"]))
    above = nn.Sequential(layer(grid["tp"]))
    fully_shard(above, mesh=grid["dp"])
    refused(ts.Unsupported, "call fully_shard for inner modules first", shard(above[0], grid["dp"]))
    refused(ValueError, "'weight' was replaced by a DTensor with placements", lambda: replaced(columns))
    rows_or_columns = layer(
        grid["tp"],
        [ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())][
            grid.get_local_rank("dp")
        ],
    )
    fully_shard(rows_or_columns, mesh=grid["dp"])
    refused(ts.Mismatch, "slice of", lambda: rows_or_columns(torch.ones(2, 8)))


def replaced(module: nn.Module) -> None:
    module(torch.ones(2, 8))
    weight = DTensor.from_local(torch.ones(4, 8), grid["tp"], [Shard(0)])
    module.load_state_dict({**module.state_dict(), "weight": weight}, assign=True)
    module(torch.ones(2, 8))


CHECKS = [
    ddp_over_slices,
    ddp_in_other_ways,
    ddp_saves_and_loads,
    ddp_bad_input,
    fsdp_parts_of_slices,
    fsdp_over_slices,
    fsdp_saves_and_loads,
    fsdp_in_other_ways,
    tied_weights_and_loss_parallel,
    fsdp_without_values_until_later,
    fsdp_with_replicas,
    norms_of_mixed_parameters,
    fsdp_of_whole_states,
    fsdp_bad_input,
]


def main() -> None:
    global directory, grid
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    dist.init_process_group("tessera", timeout=timedelta(seconds=patience(60)))
    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    run_checks(CHECKS, sys.argv[2:], rank)
    dist.destroy_process_group()
    end()


if __name__ == "__main__":
    main()
