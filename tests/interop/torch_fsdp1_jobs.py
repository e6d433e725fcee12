"""What test_torch_fsdp.py runs of `FullyShardedDataParallel`: under torchrun's environment, one process a rank.

usage: torch_fsdp1_jobs.py checks DIRECTORY [CHECK...] | saves DIRECTORY | goes_on DIRECTORY

PyTorch's own over Gloo and Tessera's train the same models on the same ranks. Each check is a function of this file.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import tessera as ts
import torch
import torch.distributed as dist
from tessera.torch import checkpoint as our_dcp
from tessera.torch.checkpoint.optimizer import load_sharded_optimizer_state_dict
from tessera.torch.fsdp import FullyShardedDataParallel as Ours
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch_fsdp_jobs import Block, Net, full, job, loss_of, net, steps, tokens
from torch_ranks import alone_on_each, end, refused, run_checks

rank = int(os.environ["RANK"])
ranks = int(os.environ["WORLD_SIZE"])
directory = ""
BLOCKS = ModuleWrapPolicy({Block})
FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
Run = tuple[list[float], list[float], dict[str, torch.Tensor]]


def theirs(model: nn.Module, use_orig_params: bool = True, **options: Any) -> TorchFSDP:
    return TorchFSDP(model, device_id=torch.device("cpu"), use_orig_params=use_orig_params, **options)


def train(model: Any, steps: int = 4, accumulate: int = 1, kind: Any = torch.optim.AdamW) -> Run:
    """Losses, norms and the whole state; of `accumulate` backward passes all but the last are without reduction."""
    optimizer = kind(model.parameters(), lr=0.02)
    losses, norms = [], []
    for step in range(steps):
        for turn in range(accumulate):
            with model.no_sync() if turn + 1 < accumulate else nullcontext():
                loss = loss_of(model, step * accumulate + turn)
                loss.backward()
        losses.append(loss.item())
        norms.append(float(model.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}


def same(got: Run, expected: Run, what: str, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


# ---------------------------------------------------------------- checks


def losses_norms_and_states() -> None:
    expected = train(theirs(net(), auto_wrap_policy=BLOCKS))
    model = Ours(net(), auto_wrap_policy=BLOCKS)
    assert len(Ours.fsdp_modules(model)) == 4
    assert Ours.fsdp_modules(model, root_only=True) == [model]
    same(train(model), expected, "blocks")
    assert model.check_is_root()
    assert not model.blocks[0].check_is_root()
    same(train(Ours(net())), expected, "one unit")
    nested = net()
    for i, block in enumerate(nested.blocks):
        nested.blocks[i] = Ours(block)  # by hand
    same(train(Ours(nested)), expected, "by hand")
    same(train(Ours(net(), auto_wrap_policy=BLOCKS), accumulate=3),
         train(theirs(net(), auto_wrap_policy=BLOCKS), accumulate=3), "no_sync")  # fmt: skip


def compiled_before_the_first_forward() -> None:
    model = Ours(net())
    model.compile(backend="eager")
    same(train(model, steps=1), train(Ours(net()), steps=1), "compiled")
    torch.compiler.reset()


def norms_of_every_kind() -> None:
    """Where a rank has no row of some parameters, too, and of parameters that are left as they are."""
    plain = net()
    model = Ours(plain, auto_wrap_policy=BLOCKS, ignored_states=[plain.head.weight])
    assert (plain.blocks[0].scale.to_local().numel() == 0) == (rank > 0)
    for kind in (math.inf, 1, 2.0, 3):
        loss_of(model, 0).backward()
        dist.broadcast(model.head.weight.grad, 0)  # which nobody averages
        before = [full(param.grad).clone() for param in model.parameters()]
        expected = torch.nn.utils.get_total_norm(before, kind)
        torch.testing.assert_close(model.clip_grad_norm_(expected / 2, kind), expected)
        after = [full(param.grad) for param in model.parameters()]
        torch.testing.assert_close(after, [grad / 2 for grad in before])
        model.zero_grad()
    torch.testing.assert_close(model.clip_grad_norm_(1.0), torch.tensor(0.0))


def wrappers_of_wrappers() -> None:
    """Which have no parameters of their own: as if there were one, and a wrapper may have several around it."""
    expected = train(Ours(net()))
    inner = Ours(net())
    Ours(inner)
    model = Ours(Ours(inner))
    assert len(Ours.fsdp_modules(model)) == 3
    same(train(model), expected, "three wrappers", 0)
    state = inner.state_dict()
    assert state.keys() == net().state_dict().keys()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    with Ours.summon_full_params(model):
        assert all(bool((param == 0).all()) for param in model.parameters())
    refused(ts.Unsupported, "first", lambda: Ours(Ours(net()), auto_wrap_policy=BLOCKS))


def every_strategy() -> None:
    expected = train(theirs(net(), auto_wrap_policy=BLOCKS))
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        model = Ours(net(), auto_wrap_policy=BLOCKS, sharding_strategy=strategy)
        same(train(model), expected, strategy.name)
    offloaded = train(Ours(net(), auto_wrap_policy=BLOCKS, cpu_offload=CPUOffload(offload_params=True)))
    same(offloaded, train(Ours(net(), auto_wrap_policy=BLOCKS)), "shards are in the CPU's memory anyhow", 0)
    narrow = MixedPrecision(torch.bfloat16, torch.float32)
    got = train(Ours(net(), auto_wrap_policy=BLOCKS, mixed_precision=narrow))
    same(got, train(theirs(net(), auto_wrap_policy=BLOCKS, mixed_precision=narrow)), "bf16", 3e-2)


def replicas_of_shards() -> None:
    """HYBRID_SHARD."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh, "auto_wrap_policy": BLOCKS}
    expected = train(theirs(net(), **hybrid))
    model = Ours(net(), **hybrid)
    assert model.head.weight.placements == (Replicate(), Shard(0))
    assert model.head.weight.to_local().shape[0] in (5, 6), "among two ranks"
    same(train(model), expected, "HYBRID_SHARD")
    unnamed = {**hybrid, "device_mesh": init_device_mesh("cpu", (ranks // 2, 2))}
    same(train(Ours(net(), **unnamed)), expected, "a mesh without names")
    pair, part = dist.new_group([0, 1]), DeviceMesh("cpu", [[0], [1]])
    if rank < 2:
        of_part = train(Ours(net(), **{**hybrid, "device_mesh": part}))
        same(of_part, train(Ours(net(), process_group=pair)), "a mesh without names, of a part of the ranks")
    dist.barrier()
    rows = model.head.weight.to_local().detach()
    rows = torch.cat([rows, rows[: 6 - len(rows)]])
    every = [torch.empty_like(rows) for _ in range(ranks)]
    dist.all_gather(every, rows)
    assert all(torch.equal(every[one], every[one % 2]) for one in range(ranks)), "each replica has the same"


def every_policy() -> None:
    def wrapped(policy: Any) -> list[str]:
        model = Ours(net(), auto_wrap_policy=policy)
        return sorted(name.replace("_fsdp_wrapped_module.", "") for name, one in model.named_modules()
                      if isinstance(one, Ours) and one is not model)  # fmt: skip

    def of_pytorch(policy: Any) -> list[str]:
        model = theirs(net(), auto_wrap_policy=policy)
        return sorted(name.replace("_fsdp_wrapped_module.", "") for name, one in model.named_modules()
                      if isinstance(one, TorchFSDP) and one is not model)  # fmt: skip

    for policy in (
        BLOCKS,
        partial(size_based_auto_wrap_policy, min_num_params=100),
        partial(size_based_auto_wrap_policy, min_num_params=70),
        CustomPolicy(lambda module: isinstance(module, nn.Linear)),
    ):
        assert wrapped(policy) == of_pytorch(policy), (wrapped(policy), of_pytorch(policy))


def values_of_rank_0() -> None:
    torch.manual_seed(rank)
    model = Ours(Net(), auto_wrap_policy=BLOCKS, sync_module_states=True)
    torch.manual_seed(0)
    expected = Net().state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    with torch.device("meta"):
        later = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    torch.manual_seed(4)
    made = Ours(later, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    assert made(torch.ones(2, 3)).shape == plain(torch.ones(2, 3)).shape
    assert not any(param.is_meta for param in made.parameters())


def states_of_each_kind() -> None:
    model = Ours(net(), auto_wrap_policy=BLOCKS)
    reference = theirs(net(), auto_wrap_policy=BLOCKS)
    train(model, 2)
    train(reference, 2)
    names = [name for name, _ in net().named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    assert [name for name, _ in model.named_buffers()] == ["offset"]
    assert torch.equal(model.offset, net().offset)
    whole = model.state_dict()
    assert list(whole) == list(reference.state_dict())
    torch.testing.assert_close(whole, reference.state_dict())
    with Ours.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True, offload_to_cpu=True)):
        assert set(model.state_dict()) == (set(whole) if rank == 0 else set())
    with Ours.state_dict_type(model, SHARDED):
        assert Ours.get_state_dict_type(model).state_dict_type is SHARDED
        sharded = model.state_dict()
        assert all(isinstance(sharded[name], DTensor) for name in names)
    with Ours.state_dict_type(model, LOCAL):
        local = model.state_dict()
        assert all(isinstance(local[name], DTensor) for name in names)
        rows = {name: value.to_local() if name in names else value for name, value in local.items()}
        assert rows["head.weight"].shape[0] <= -(-11 // ranks)
    assert Ours.get_state_dict_type(model).state_dict_type is FULL
    for kind, state in ((FULL, whole), (SHARDED, sharded), (LOCAL, local), (LOCAL, rows)):
        other = Ours(Net(), auto_wrap_policy=BLOCKS)
        if kind is LOCAL:
            loss_of(other, 0)  # the core has its shards already
        with Ours.state_dict_type(other, kind):
            assert other.load_state_dict({name: value.clone() for name, value in state.items()}).missing_keys == []
        torch.testing.assert_close(other.state_dict(), whole, rtol=0, atol=0)
        torch.testing.assert_close(loss_of(other, 5), loss_of(reference, 5))


def states_of_optimizers() -> None:
    def stepped(model: Any) -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        steps(model, optimizer, range(2))
        return model, optimizer

    model, optimizer = stepped(Ours(net(), auto_wrap_policy=BLOCKS))
    # PyTorch's FSDP with its original parameters tells exp_avg_sq as exp_avg (2.15); its DDP trains alike.
    reference, reference_optimizer = stepped(nn.parallel.DistributedDataParallel(net()))
    numbers = reference_optimizer.state_dict()
    names = [name.removeprefix("module.") for name, _ in reference.named_parameters()]
    got = Ours.full_optim_state_dict(model, optimizer, rank0_only=False)
    torch.testing.assert_close(got["state"], {names[i]: of_param for i, of_param in numbers["state"].items()})
    assert [group["params"] for group in got["param_groups"]] == [names]
    assert Ours.full_optim_state_dict(model, optimizer).keys() == (got.keys() if rank == 0 else {}.keys())
    by_number = Ours.rekey_optim_state_dict(got, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    assert set(by_number["state"]) == set(range(len(got["state"])))
    by_name = Ours.rekey_optim_state_dict(by_number, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
    assert by_name["state"].keys() == got["state"].keys()
    sharded = Ours.sharded_optim_state_dict(model, optimizer)
    assert isinstance(sharded["state"]["head.weight"]["exp_avg"], DTensor)

    def goes_on(loaded: dict[str, Any], what: str) -> None:
        other = Ours(net(), auto_wrap_policy=BLOCKS)
        other.load_state_dict(model.state_dict())
        with_ = torch.optim.AdamW(other.parameters(), lr=0.5)
        with_.load_state_dict(loaded)
        losses = steps(other, with_, range(2, 5))
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")

    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = Ours.full_optim_state_dict(model, optimizer, rank0_only=False)
    expected = steps(reference, reference_optimizer, range(2, 5))
    torch.testing.assert_close(before, model.state_dict(), rtol=0, atol=0)
    goes_on(Ours.shard_full_optim_state_dict(moments, model, optim=optimizer), "whole")
    goes_on(Ours.scatter_full_optim_state_dict(moments if rank == 0 else None, model, optim=optimizer), "of rank 0")
    goes_on(Ours.flatten_sharded_optim_state_dict(sharded, model, optimizer), "sharded")
    rank_0 = FullOptimStateDictConfig(rank0_only=True)
    with Ours.state_dict_type(model, FULL, optim_state_dict_config=rank_0):
        state = Ours.optim_state_dict(model, optimizer)
        goes_on(Ours.optim_state_dict_to_load(model, optimizer, state), "gathered to rank 0")
    with Ours.state_dict_type(model, LOCAL):
        state = Ours.optim_state_dict(model, optimizer)
        goes_on(Ours.optim_state_dict_to_load(model, optimizer, state), "local")
        of_rows = {
            name: {key: value.to_local() if isinstance(value, DTensor) else value for key, value in of_param.items()}
            for name, of_param in state["state"].items()
        }
        goes_on(Ours.optim_state_dict_to_load(model, optimizer, {**state, "state": of_rows}), "this rank's rows")
    path = str(Path(directory, "checkpoint"))
    with Ours.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optim": Ours.optim_state_dict(model, optimizer)}
        our_dcp.save_state_dict(state, our_dcp.FileSystemWriter(path))
        loaded = load_sharded_optimizer_state_dict(model.state_dict(), "optim", our_dcp.FileSystemReader(path))
        goes_on(Ours.optim_state_dict_to_load(model, optimizer, loaded["optim"]), "of a checkpoint")


def groups_of_parameters() -> None:
    """An optimizer's groups, and their parameters, may be in another order than the state's; not others."""

    def grouped(model: Any, *order: int) -> torch.optim.Optimizer:
        weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
        others = [param for name, param in model.named_parameters() if not name.endswith("weight")]
        groups = [{"params": weights, "lr": 0.02}, {"params": others[::-1], "lr": 0.01, "weight_decay": 0.5}]
        return torch.optim.AdamW([groups[number] for number in order])

    model = Ours(net(), auto_wrap_policy=BLOCKS)
    optimizer = grouped(model, 0, 1)
    steps(model, optimizer, range(2))
    state = Ours.full_optim_state_dict(model, optimizer, rank0_only=False)
    other = Ours(net(), auto_wrap_policy=BLOCKS)
    other.load_state_dict(model.state_dict())
    with_ = grouped(other, 1, 0)
    state["param_groups"][0]["params"].reverse()
    with_.load_state_dict(Ours.shard_full_optim_state_dict(state, other, optim=with_))
    assert [group["weight_decay"] for group in with_.param_groups] == [0.5, 0.01]
    torch.testing.assert_close(steps(other, with_, range(2, 5)), steps(model, optimizer, range(2, 5)))
    alone = torch.optim.AdamW(other.parameters())
    refused(
        ts.InvalidArgument,
        "no group with the parameters of the optimizer's group 0: embed.weight, ",
        lambda: Ours.shard_full_optim_state_dict(state, other, optim=alone),
    )
    state["param_groups"][0]["params"].append("another")
    refused(
        ts.InvalidArgument,
        "no parameter 'another'",
        lambda: Ours.shard_full_optim_state_dict(state, other, optim=with_),
    )


def state_of(kind: Any, model: Any, optimizer: torch.optim.Optimizer, what: StateDictType) -> dict[str, Any]:
    """Of either class."""
    with kind.state_dict_type(model, what):
        return {"model": model.state_dict(), "optim": kind.optim_state_dict(model, optimizer)}


def states_that_need_no_other_rank() -> None:
    model = Ours(net(), auto_wrap_policy=BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    steps(model, optimizer, range(1))
    for what in (SHARDED, LOCAL):

        def asks(what: StateDictType = what) -> None:
            state = state_of(Ours, model, optimizer, what)
            assert isinstance(state["model"]["head.weight"], DTensor)
            assert isinstance(state["optim"]["state"]["head.weight"]["exp_avg"], DTensor)

        alone_on_each(asks, rank, ranks)


def loaded(kind: Any, model: Any, optimizer: Any, what: StateDictType, load: Any, path: str) -> tuple[Any, Any]:
    """What goes on from a checkpoint, of either class. An optimizer has a state to load into after a step."""
    steps(model, optimizer, range(77, 78))
    state = state_of(kind, model, optimizer, what)
    load(state, checkpoint_id=path)
    with kind.state_dict_type(model, what):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(kind.optim_state_dict_to_load(model, optimizer, state["optim"]))
    return model, optimizer


def optimizer_of(model: nn.Module, original: bool, lr: float = 0.02) -> torch.optim.Optimizer:
    """PyTorch's FSDP with its original parameters tells exp_avg_sq as exp_avg (2.15); a momentum it tells."""
    if original:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def close(got: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")


def checkpoints_of_pytorchs() -> None:
    """PyTorch's class saves, flat or original parameters, cut or whole, and Tessera's goes on."""
    cut = init_device_mesh("cpu", (ranks,))
    for number, (original, what, options, of) in enumerate(
        (
            (False, SHARDED, {}, ShardedTensor),
            (False, SHARDED, {"device_mesh": cut}, DTensor),
            (True, SHARDED, {}, ShardedTensor),
            (True, SHARDED, {"device_mesh": cut}, DTensor),
            (False, FULL, {}, torch.Tensor),
            (True, FULL, {}, torch.Tensor),
        )
    ):
        reference = theirs(net(), original, auto_wrap_policy=BLOCKS, **options)
        reference_optimizer = optimizer_of(reference, original)
        steps(reference, reference_optimizer, range(2))
        state = state_of(TorchFSDP, reference, reference_optimizer, what)
        assert type(state["model"]["head.weight"]) is of
        kept = copy.deepcopy(reference.state_dict())
        paths = {save: str(Path(directory, f"theirs-{number}-{save.__module__}")) for save in (dcp.save, our_dcp.save)}
        for save, path in paths.items():
            save(state, checkpoint_id=path)
        expected = steps(reference, reference_optimizer, range(2, 5))
        for save, load in ((dcp.save, dcp.load), (dcp.save, our_dcp.load), (our_dcp.save, our_dcp.load)):
            model = Ours(Net(), auto_wrap_policy=BLOCKS)
            optimizer = optimizer_of(model, original, lr=0.5)
            loaded(Ours, model, optimizer, what, load, paths[save])
            torch.testing.assert_close(model.state_dict(), kept, rtol=0, atol=0)
            got = steps(model, optimizer, range(2, 5))
            close(got, expected, f"{of}, {what}")


def checkpoints_for_pytorchs() -> None:
    """Tessera's class saves, in PyTorch's format and in its own, and PyTorch's goes on."""
    cut = init_device_mesh("cpu", (ranks,))
    cases = ((False, SHARDED), (True, SHARDED), (False, FULL), (True, FULL), (True, LOCAL))
    for number, (original, what) in enumerate(cases):
        model = Ours(net(), auto_wrap_policy=BLOCKS)
        optimizer = optimizer_of(model, original)
        steps(model, optimizer, range(2))
        state = state_of(Ours, model, optimizer, what)
        native, theirs_ = (str(Path(directory, f"ours-{number}-{kind}")) for kind in ("native", "torch_dcp"))
        our_dcp.save(state, checkpoint_id=native)
        our_dcp.save(state, checkpoint_id=theirs_, format="torch_dcp")
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        expected = steps(model, optimizer, range(2, 5))
        for path, load in ((theirs_, dcp.load), (theirs_, our_dcp.load), (native, our_dcp.load)):
            # DTensors to load into: PyTorch's planner (2.15) fails where a rank has no rows of a ShardedTensor, also of
            # what PyTorch itself has saved.
            other = theirs(Net(), original, auto_wrap_policy=BLOCKS, device_mesh=cut)
            with_ = optimizer_of(other, original, lr=0.5)
            loaded(TorchFSDP, other, with_, SHARDED if what is LOCAL else what, load, path)
            torch.testing.assert_close(other.state_dict(), kept, rtol=0, atol=0)
            got = steps(other, with_, range(2, 5))
            close(got, expected, path)


def sharded_tensors_of_pytorchs() -> None:
    """Without a checkpoint between: states of PyTorch's class are loaded by Tessera's."""
    reference = theirs(net(), use_orig_params=False, auto_wrap_policy=BLOCKS)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.02)
    steps(reference, reference_optimizer, range(2))
    state = state_of(TorchFSDP, reference, reference_optimizer, SHARDED)
    rows = sum(len(shard.tensor) for shard in state["model"]["blocks.0.scale"].local_shards())
    assert rows == (1 if rank == 0 else 0), "a rank without rows"
    assert isinstance(state["optim"]["state"]["head.weight"]["exp_avg"], ShardedTensor)
    model = Ours(Net(), auto_wrap_policy=BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with Ours.state_dict_type(model, SHARDED):
        model.load_state_dict(state["model"])
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=0, atol=0)
    optimizer.load_state_dict(Ours.flatten_sharded_optim_state_dict(state["optim"], model, optimizer))
    expected = steps(reference, reference_optimizer, range(2, 5))
    torch.testing.assert_close(steps(model, optimizer, range(2, 5)), expected, rtol=1e-5, atol=1e-6)


def states_by_the_functions_for_them() -> None:
    """`get_state_dict` and its like, sharded and whole, of wrappers in a wrapper."""
    model = Ours(net(), auto_wrap_policy=BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    steps(model, optimizer, range(2))
    sharded = our_dcp.get_state_dict(model, optimizer)
    assert list(sharded[0]) == list(model.state_dict())
    assert isinstance(sharded[0]["head.weight"], DTensor)
    assert isinstance(sharded[1]["state"]["blocks.1.up.weight"]["exp_avg"], DTensor)
    options = our_dcp.StateDictOptions(full_state_dict=True)
    whole = our_dcp.get_state_dict(model, optimizer, options=options)
    torch.testing.assert_close(whole[0], model.state_dict(), rtol=0, atol=0)
    for (of_model, of_optimizer), more in ((sharded, {}), (whole, {"options": options})):
        other = Ours(Net(), auto_wrap_policy=BLOCKS)
        with_ = torch.optim.AdamW(other.parameters(), lr=0.5)
        our_dcp.set_state_dict(
            other, with_, model_state_dict=of_model, optim_state_dict=copy.deepcopy(of_optimizer), **more
        )
        torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(
            Ours.full_optim_state_dict(other, with_, rank0_only=False)["state"],
            Ours.full_optim_state_dict(model, optimizer, rank0_only=False)["state"],
        )
        assert with_.param_groups[0]["lr"] == 0.02


def whole_parameters() -> None:
    model = Ours(net(), auto_wrap_policy=BLOCKS)
    expected = dict(net().named_parameters())
    for _ in range(2):
        with Ours.summon_full_params(model, writeback=False):
            for name, param in model.named_parameters():
                assert type(param) is nn.Parameter
                torch.testing.assert_close(param, expected[name], rtol=0, atol=0)
                param.data.fill_(-1)
            assert model.head.weight.shape == (11, 6)
        loss_of(model, 0).backward()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    before = [full(param.grad).clone() for param in model.parameters()]
    for writeback in (False, True):
        with Ours.summon_full_params(model, with_grads=True, writeback=writeback):
            torch.testing.assert_close([param.grad for param in model.parameters()], before)
            for param in model.parameters():
                param.grad.mul_(3)
        grads = [full(param.grad) for param in model.parameters()]
        torch.testing.assert_close(grads, [(3 if writeback else 1) * grad for grad in before])
    loss_of(model, 0)  # the root's stay whole until backward, whose gradients are not there yet
    with Ours.summon_full_params(model, with_grads=True), torch.no_grad():
        assert model.head.weight.grad.shape == (11, 6)
        for param in model.parameters():
            param.mul_(2)
    torch.testing.assert_close(full(model.head.weight.detach()), 2 * expected["head.weight"])
    with Ours.summon_full_params(model, rank0_only=True, writeback=False):
        assert isinstance(model.head.weight, DTensor) == (rank != 0)
    with Ours.summon_full_params(model, recurse=False):
        assert isinstance(model.blocks[0].scale, DTensor)
        assert not isinstance(model.head.bias, DTensor)

    def ones(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)

    model.apply(ones)
    assert bool((model.blocks[0].up.weight.to_local() == 1).all())


def mistakes_are_told() -> None:
    model = Ours(net(), auto_wrap_policy=BLOCKS)
    refused(ts.Unsupported, "device_id is cuda", lambda: Ours(net(), device_id=torch.device("cuda", 0)))
    refused(
        ts.Unsupported,
        "HYBRID_SHARD needs a device_mesh",
        lambda: Ours(net(), sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    )
    refused(ts.InvalidArgument, "cannot be combined", lambda: Ours(net(), ignored_modules=[], ignored_states=[]))
    refused(ts.Unsupported, "register_comm_hook", lambda: model.register_comm_hook(None, print))
    refused(ts.InvalidArgument, "FULL_STATE_DICT takes a FullStateDictConfig",
            lambda: Ours.set_state_dict_type(model, FULL, ShardedStateDictConfig()))  # fmt: skip
    refused(ts.InvalidArgument, "no FullyShardedDataParallel", lambda: Ours.get_state_dict_type(net()))
    refused(ts.InvalidArgument, "writeback with rank0_only", Ours.summon_full_params(model, rank0_only=True).__enter__)
    optimizer = torch.optim.SGD(net().parameters(), lr=1)
    refused(
        ts.InvalidArgument,
        "a parameter that the model does not currently show",
        lambda: Ours.optim_state_dict(model, optimizer),
    )
    tied = net(tied=True)
    refused(
        ts.InvalidArgument,
        "'head.weight' is also 'weight' of a FSDPEmbedding",
        lambda: Ours(tied, auto_wrap_policy=ModuleWrapPolicy({nn.Embedding})),
    )
    kept = net()
    left = Ours(kept, ignored_states=[kept.head.weight])
    assert type(left.head.weight) is nn.Parameter
    loss_of(left, 0).backward()
    assert tokens(0).shape == (4, 5)


def every_name_of_pytorchs_is_there() -> None:
    missing = [name for name in vars(TorchFSDP) if not name.startswith("_") and name not in vars(Ours)]
    assert missing == [], missing


CHECKS = [
    losses_norms_and_states,
    compiled_before_the_first_forward,
    norms_of_every_kind,
    wrappers_of_wrappers,
    every_strategy,
    replicas_of_shards,
    every_policy,
    values_of_rank_0,
    states_of_each_kind,
    states_of_optimizers,
    states_that_need_no_other_rank,
    groups_of_parameters,
    checkpoints_of_pytorchs,
    checkpoints_for_pytorchs,
    sharded_tensors_of_pytorchs,
    states_by_the_functions_for_them,
    whole_parameters,
    mistakes_are_told,
    every_name_of_pytorchs_is_there,
]


def checks(where: str, *names: str) -> None:
    global directory
    directory = where
    with job():
        run_checks(CHECKS, names, rank)
        dist.barrier()


# ---------------------------------------------------------------- another number of ranks

BOTH = ((TorchFSDP, dcp.save), (Ours, partial(our_dcp.save, format="torch_dcp")))


def wrapped(kind: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    if kind is TorchFSDP:
        options["use_orig_params"] = False
    model = (theirs if kind is TorchFSDP else Ours)(net(), auto_wrap_policy=BLOCKS, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def saves(where: str) -> None:
    """A checkpoint of either class, sharded, and the same whole."""
    with job():
        for kind, save in BOTH:
            model, optimizer = wrapped(kind)
            steps(model, optimizer, range(2))
            save(state_of(kind, model, optimizer, SHARDED), checkpoint_id=str(Path(where, kind.__module__)))
            whole = state_of(kind, model, optimizer, FULL)
            if rank == 0:
                torch.save(whole, Path(where, f"{kind.__module__}.pt"))


def goes_on(where: str) -> None:
    """Each is loaded into either class, which trains on as DDP does from what is whole."""
    names = [name for name, _ in net().named_parameters()]
    with job():
        for saved, _ in BOTH:
            whole = torch.load(Path(where, f"{saved.__module__}.pt"))
            plain = net()
            plain.load_state_dict(whole["model"])
            reference = nn.parallel.DistributedDataParallel(plain)
            reference_optimizer = torch.optim.AdamW(reference.parameters())
            # PyTorch's class gives the parameters of a unit one step, which each would count up.
            of_names = {name: copy.deepcopy(value) for name, value in whole["optim"]["state"].items()}
            groups = [
                {**group, "params": sorted(names.index(name) for name in group["params"])}
                for group in whole["optim"]["param_groups"]
            ]
            reference_optimizer.load_state_dict(
                {"state": {names.index(name): value for name, value in of_names.items()}, "param_groups": groups}
            )
            expected = steps(reference, reference_optimizer, range(2, 5))
            for kind, load in ((Ours, our_dcp.load), (Ours, dcp.load), (TorchFSDP, dcp.load)):
                path = str(Path(where, saved.__module__))
                cut = init_device_mesh("cpu", (ranks,))  # DTensors, as above
                model, optimizer = loaded(kind, *wrapped(kind, device_mesh=cut), SHARDED, load, path)
                got = steps(model, optimizer, range(2, 5))
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
    end()
