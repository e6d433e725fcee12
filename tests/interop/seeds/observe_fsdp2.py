"""Runs a rank of fsdp2.py, trains what it makes, and writes down the losses and the parameters.

usage: observe_fsdp2.py OUTPUT, under torchrun's environment. Rank 0 writes OUTPUT.
"""

import os
import sys

import fsdp2
import torch
import torch.distributed as dist

STEPS = 5


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of a batch that is this rank's in this step."""
    tokens = torch.randint(16, (4, 3), generator=torch.Generator().manual_seed(100 * step + rank))
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens + 1).remainder(16).flatten())


def main() -> None:
    dist.init_process_group("tessera")
    torch.manual_seed(1000)
    model, optimizer = fsdp2.init()
    rows = {name: (param.to_local().shape[0], param.shape[0]) for name, param in model.named_parameters()}
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, int(os.environ["RANK"]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach(), dist.ReduceOp.AVG)
        losses.append(float(loss))
    parameters = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({"rows": rows, "losses": losses, "parameters": parameters}, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
