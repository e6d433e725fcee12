"""Runs a rank of a DDP program beside this file from a known random state, and writes down what it ends with.

usage: observe_ddp.py PROGRAM FUNCTION OUTPUT, under torchrun's environment. Each rank writes OUTPUT.RANK when it leaves
the process group: the loss, and the names, values and gradients of the parameters. Where the program waits for its
checkpoint, what the file holds is written down too, and the parameters are lost: those of the end are of the file.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def seed(rank: int) -> int:
    return 1000 + rank


def main() -> None:
    name, function, output = sys.argv[1:]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sys.path.insert(0, str(Path(__file__).parent))
    program: Any = importlib.import_module(name)
    leave, wait = dist.destroy_process_group, dist.barrier
    saved: dict[str, torch.Tensor] = {}

    def barrier() -> None:
        wait()
        held = sys._getframe(1).f_locals
        saved.update(torch.load(held["CHECKPOINT_PATH"]))
        wait()
        with torch.no_grad():
            for parameter in held["ddp_model"].parameters():
                parameter.zero_()

    def destroy_process_group() -> None:
        frame = sys._getframe(1)
        while "loss_fn" not in frame.f_locals:
            assert frame.f_back is not None
            frame = frame.f_back
        held = frame.f_locals
        (model,) = (value for key, value in held.items() if key.startswith("ddp_"))
        torch.save(
            {
                "loss": float(held["loss_fn"](held["outputs"], held["labels"])),
                "parameters": {key: value.detach() for key, value in model.named_parameters()},
                "gradients": {key: value.grad for key, value in model.named_parameters()},
                "saved": saved,
            },
            f"{output}.{rank}",
        )
        leave()

    dist.destroy_process_group, dist.barrier = destroy_process_group, barrier
    torch.manual_seed(seed(rank))
    demo = getattr(program, function)
    if name == "elastic_ddp":
        demo()
    else:
        demo(rank, world_size)


if __name__ == "__main__":
    main()
