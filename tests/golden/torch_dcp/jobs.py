"""The states that make.py saves and read_ours.py loads: a small model and its AdamW under each way of spreading them.

Runs under PyTorch 2.4 and newer. Every number follows from its name (`number`), so that a reader needs no PyTorch to
know it: AdamW takes two steps of learning rate 0, with the parameters as gradients, which is exact in float32.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed._tensor import Replicate, Shard, distribute_tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before 2.6
    from torch.distributed._composable.fsdp import fully_shard

VERSION = torch.__version__.split("+")[0]
# Ranks of each job.
JOBS = {"plain": 1, "ddp": 2, "fsdp": 3, "tp": 2, "mesh": 4, "uneven": 4, "hsdp": 4, "grid": 4}


def number(name, i):
    """Element `i` of the model's tensor `name`: a multiple of 1/8 between -4 and 4."""
    return ((sum(name.encode()) + 7 * i) % 64 - 32) / 8


def content(name, shape, dtype):
    count = torch.Size(shape).numel()
    numbers = torch.tensor([number(name, i) for i in range(count)], dtype=torch.float64)
    return numbers.reshape(shape).to(dtype)


class Net(nn.Module):
    """Sizes that no number of ranks divides, buffers, and a frozen parameter of another dtype."""

    def __init__(self, job):
        super().__init__()
        # FSDP2 over tensor parallelism wanted rows that all ranks divide, until it learnt uneven ones.
        hidden = 8 if job == "mesh" else 5
        self.up = nn.Linear(3, hidden)
        self.down = nn.Linear(hidden, 3, bias=False)
        self.frozen = nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(0))
        for name, tensor in self.state_dict().items():
            tensor.copy_(content(name, tensor.shape, tensor.dtype))


def spread(job, model):
    if job == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if job == "tp":
        mesh = init_device_mesh("cpu", (2,))
        return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if job == "fsdp":
        mesh = init_device_mesh("cpu", (3,))
    elif job == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    elif job in ("mesh", "uneven"):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = grid["dp"]
    else:
        return model
    for part in (model.up, model.down):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def groups_of(job):
    """Parameters' names by group of the optimizer."""
    return [["up.weight", "down.weight"], ["up.bias"]] if job == "plain" else [["up.weight", "up.bias", "down.weight"]]


def trained(job):
    """The model as the job spreads it, and its optimizer."""
    if job == "grid":
        return None, None
    model = spread(job, Net(job))
    return model, optimizer_of(job, model)


def optimizer_of(job, model):
    parameters = {name.removeprefix("module."): one for name, one in model.named_parameters() if one.requires_grad}
    groups = [{"params": [parameters[name] for name in names], "lr": 0.0} for names in groups_of(job)]
    optimizer = torch.optim.AdamW(groups, betas=(0.5, 0.75), weight_decay=0.125)
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    optimizer.zero_grad()
    for group, lr in zip(optimizer.param_groups, (0.25, 0.5), strict=False):
        group["lr"] = lr
    return optimizer


def placed(grid):
    """Tensors over a mesh of two dimensions, as no model spreads them."""
    return {
        "both": distribute_tensor(content("both", (7, 5), torch.float32), grid, [Shard(0), Shard(1)]),
        "twice": distribute_tensor(content("twice", (7, 3), torch.float32), grid, [Shard(0), Shard(0)]),
        "few": distribute_tensor(content("few", (3,), torch.float16), grid, [Shard(0), Shard(0)]),
        "copies": distribute_tensor(content("copies", (3, 5), torch.int32), grid, [Replicate(), Shard(1)]),
    }


def values_of(optimizer):
    """What a trainer keeps besides tensors."""
    return {
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5).state_dict(),
        "step": 7,
        "note": "größer",
        "nothing": None,
        "mixed": [1, 2.5, None, "x", (True, b"\x00\xff"), [2**40, 2**80]],
        "stages": [{"at": 1, "name": "warm"}, {"at": -(2**33), "name": ""}],
        "history": {3: {"loss": float("inf")}, "empty": []},
    }


def state_of(job, model, optimizer):
    """What is given to dcp.save. "grid" has no model."""
    if job == "grid":
        return {"model": placed(init_device_mesh("cpu", (2, 2))), "job": job}
    if job == "uneven":  # besides "mesh", whose moments are cut likewise
        return {"model": get_model_state_dict(model), "job": job}
    model_state, optimizer_state = get_state_dict(model, optimizer)
    more = values_of(optimizer) if job == "plain" else {}  # once a version: an item takes more than 1 KiB
    return {"model": model_state, "optim": optimizer_state, "job": job, **more}


def flat(state, name=""):
    """The state by the names that PyTorch's DCP gives its parts."""
    if isinstance(state, dict):
        parts = state.items()
    elif isinstance(state, list) and any(has_parts(item) for item in state):
        parts = enumerate(state)
    else:
        return {name: state}
    return {n: v for key, part in parts for n, v in flat(part, f"{name}.{key}" if name else str(key)).items()}


def has_parts(value):
    return isinstance(value, (dict, torch.Tensor)) or (isinstance(value, list) and any(has_parts(i) for i in value))


def expected_of(job):
    """What a reader finds, by name: numbers that follow from names, and values; nothing of it was spread over ranks."""
    if job == "grid":
        shapes = {"both": (7, 5), "twice": (7, 3), "few": (3,), "copies": (3, 5)}
        dtypes = {"few": torch.float16, "copies": torch.int32}
        model = {name: content(name, shape, dtypes.get(name, torch.float32)) for name, shape in shapes.items()}
        return flat({"model": model, "job": job})
    net = Net(job)
    model = {name: content(name, one.shape, one.dtype) for name, one in net.state_dict().items()}
    if job == "uneven":
        return flat({"model": model, "job": job})
    state = {}
    for name in ("up.weight", "up.bias", "down.weight"):
        moments = {"exp_avg": model[name] * 0.75, "exp_avg_sq": model[name].square() * (7 / 16)}
        state[name] = {"step": torch.tensor(2.0), **moments}
    optimizer = optimizer_of(job, net)
    groups = [{**group, "params": names} for group, names in zip(optimizer.param_groups, groups_of(job), strict=True)]
    more = values_of(optimizer) if job == "plain" else {}
    return flat({"model": model, "optim": {"state": state, "param_groups": groups}, "job": job, **more})


def run(rank, world_size, body, arguments, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    body(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(world_size, body, *arguments):
    """Calls `body` on so many ranks, each a process."""
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, (world_size, body, arguments, str(Path(directory) / "store")), nprocs=world_size)
