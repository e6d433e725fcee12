"""Makes the golden files of the PyTorch that runs this: python make.py [DIRECTORY].

Writes DIRECTORY/<version>/dcp (a checkpoint of torch.distributed.checkpoint with two parts a tensor, as two ranks would
write it), DIRECTORY/<version>/save.pt (torch.save) and nothing else. The values are those that golden_test.cc expects.
"""

import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed._tensor import Replicate, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh


def tensors():
    return {
        "rows": torch.arange(35, dtype=torch.float32).reshape(7, 5),
        "half": torch.arange(6).to(torch.float16),
        "brain": torch.arange(6).to(torch.bfloat16).reshape(2, 3),
        "transposed": torch.arange(12, dtype=torch.float64).reshape(3, 4).t(),
        "scalar": torch.tensor(-3, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 5),
    }


def values():
    return {"step": 7, "lr": 0.5, "note": "größer", "pair": (1, [2, None]), "config": {"deep": {"flag": True}}}


def save(rank, directory, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = {"model": tensors(), **values()}
    state["model"]["rows"] = distribute_tensor(state["model"]["rows"], mesh, [Shard(0)])
    state["model"]["columns"] = distribute_tensor(torch.arange(15.0).reshape(3, 5), mesh, [Shard(1)])
    state["model"]["copies"] = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    dcp.save(state, checkpoint_id=str(directory / "dcp"))
    dist.barrier()
    dist.destroy_process_group()


def main():
    version = torch.__version__.split("+")[0]
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent) / version
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    mp.spawn(save, (directory, 29817), nprocs=2)
    whole = tensors()
    whole["shared"] = whole["rows"][2:4]
    whole["parameter"] = torch.nn.Parameter(torch.arange(3.0))
    torch.save({"model": whole, **values()}, directory / "save.pt")
    print(f"wrote {directory}")


if __name__ == "__main__":
    main()
