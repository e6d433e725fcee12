"""Runs a rank of a program beside this file, and writes down what it holds at its places of interest.

usage: observe.py PROGRAM OUTPUT, under torchrun's environment. Rank 0 writes OUTPUT: a list of whole states, one a
place: at the end (before cleanup), at each asynchronous save, or wherever the program prints its parameters.
"""

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tessera.torch.checkpoint.state_dict import StateDictOptions, get_state_dict
from tessera.torch.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor

seen: list[Any] = []


def observed(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and moments, whole, and the loss of a batch. Collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    copies = {name: tensor.clone() for name, tensor in model_state.items()}
    moments = {
        name: {key: value.clone() for key, value in moments.items()}
        for name, moments in optimizer_state.get("state", {}).items()
    }
    return {"model": copies, "optim": moments, "loss": loss_of(model)}


def own(value: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return value.to_local() if isinstance(value, DTensor) else value


def batch(features: int) -> torch.Tensor:
    return torch.linspace(0, 1, 8 * features).reshape(8, features)


def loss_of(model: torch.nn.Module, features: int = 16) -> float:
    with torch.no_grad():
        return float(model(batch(features)).sum())


def main() -> None:
    name, output = sys.argv[1], Path(sys.argv[2])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sys.path.insert(0, str(Path(__file__).parent))
    program: Any = importlib.import_module(name)
    if name == "fsdp_checkpoint":
        printed = program.print_params

        def print_params(stage: str, model_1: FSDP, model_2: FSDP, optim_1: Any, optim_2: Any) -> None:
            printed(stage, model_1, model_2, optim_1, optim_2)
            of_pair = []
            for model, optim in ((model_1, optim_1), (model_2, optim_2)):
                with FSDP.summon_full_params(model):
                    parameters = {n: p.detach().clone() for n, p in model.module.named_parameters()}
                moments = {k: own(v).clone() for k, v in optim.state_dict()["state"][0].items()}
                of_pair.append((parameters, moments, loss_of(model, features=4)))
            everything: list[Any] = [None] * world_size
            dist.all_gather_object(everything, of_pair)
            seen.append((stage, everything))

        program.print_params = print_params
        program.run_fsdp_checkpoint_example(rank, world_size)
    elif name.startswith("async_dcp"):
        saves = program.dcp.async_save

        def async_save(state_dict: dict[str, Any], **how: Any) -> Any:
            app = state_dict["app"]
            seen.append(observed(app.model, app.optimizer))
            return saves(state_dict, **how)

        program.dcp.async_save = async_save
        program.run_fsdp_checkpoint_save_example(rank, world_size)
    else:
        ends = program.cleanup

        def cleanup() -> None:
            ending = sys._getframe(1).f_locals
            seen.append(observed(ending["model"], ending["optimizer"]))
            ends()

        program.cleanup = cleanup
        run = "run_fsdp_checkpoint_load_example" if name == "dcp_load" else "run_fsdp_checkpoint_save_example"
        getattr(program, run)(rank, world_size)
    if rank == 0:
        torch.save(seen, output)
    # With the model, which refers to itself, goes its process group: a thread of PyTorch's Gloo that is there when the
    # interpreter ends may abort it (pytorch issue 190489).
    gc.collect()


if __name__ == "__main__":
    main()
