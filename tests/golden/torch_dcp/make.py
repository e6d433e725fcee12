"""Makes the golden files of the PyTorch that runs this, in a folder of its version.

usage: make.py [-h] [--into DIRECTORY] [WHAT ...]

  dcp, save.pt   dtypes, strides and values by torch.distributed.checkpoint (two ranks) and torch.save; golden_test.cc
                 has their numbers
  plain, ddp, fsdp, tp, mesh, uneven, hsdp, grid
                 a small model and its AdamW as jobs.py spreads them, and in the same directory an expected.json with
                 what a reader finds: {"tensors": {NAME: {"dtype", "shape", "numbers"}},
                 "values": {NAME: typed JSON}}

Without WHAT all are made. Needs PyTorch (2.4 or newer; CPUs do) and NumPy; to make an environment for an old one:

  python3.11 -m venv /tmp/torch-2.4.1 && /tmp/torch-2.4.1/bin/pip install torch==2.4.1 'numpy<2'
  /tmp/torch-2.4.1/bin/python tests/golden/torch_dcp/make.py

write_ours.py and read_ours.py, beside this, are the other direction: an old PyTorch loads what Tessera writes.
"""

import argparse
import base64
import json
import math
import os
import shutil
from pathlib import Path

import jobs
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._tensor import Replicate, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh

# What a version cannot make: job, and what PyTorch says. golden_test.cc has the same list.
CANNOT = {
    "2.4.1": {
        # Of FSDP2 it saves meshes of one dimension only; strided shards came with 2.5. "grid" has two dimensions.
        "mesh": "2D state_dict is under development",
        "uneven": "2D state_dict is under development",
        "hsdp": "2D state_dict is under development",
    },
    "2.7.1": {"uneven": "FSDP+TP sharding does not support uneven sharding for now"},
}
DTYPES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.int64: "I64",
}


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


def save_dtypes():
    mesh = init_device_mesh("cpu", (2,))
    state = {"model": tensors(), **values()}
    state["model"]["rows"] = distribute_tensor(state["model"]["rows"], mesh, [Shard(0)])
    state["model"]["columns"] = distribute_tensor(torch.arange(15.0).reshape(3, 5), mesh, [Shard(1)])
    state["model"]["copies"] = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    dcp.save(state, checkpoint_id="dcp")


def save_file():
    whole = tensors()
    whole["shared"] = whole["rows"][2:4]
    whole["parameter"] = torch.nn.Parameter(torch.arange(3.0))
    torch.save({"model": whole, **values()}, "save.pt")


def save_job(job):
    dcp.save(jobs.state_of(job, *jobs.trained(job)), checkpoint_id=job)


def typed(value):
    """As docs/FORMAT.md writes values."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"~": "double", "v": str(value)}
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return {"~": "int", "v": str(value)}
    if isinstance(value, bytes):
        return {"~": "bytes", "v": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {"~": "tuple", "v": [typed(item) for item in value]}
    if isinstance(value, list):
        return [typed(item) for item in value]
    assert value is None or isinstance(value, (bool, int, float, str)), value
    return value


def expect(job):
    found = {"tensors": {}, "values": {}}
    for name, value in sorted(jobs.expected_of(job).items()):
        if isinstance(value, torch.Tensor):
            numbers = [int(n) if n == int(n) else n for n in value.flatten().double().tolist()]
            found["tensors"][name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "numbers": numbers}
        else:
            found["values"][name] = typed(value)
    saved = sorted(dcp.FileSystemReader(job).read_metadata().state_dict_metadata)
    assert saved == sorted([*found["tensors"], *found["values"]]), saved
    lines = [
        f"{json.dumps(kind)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in content.items())
        + "\n}"
        for kind, content in found.items()
    ]
    Path(job, "expected.json").write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


def make(what):
    shutil.rmtree(what, ignore_errors=True)
    if what == "save.pt":
        save_file()
    elif what == "dcp":
        jobs.on_ranks(2, save_dtypes)
    else:
        make_job(what)


def make_job(what):
    reason = CANNOT.get(jobs.VERSION, {}).get(what)
    try:
        jobs.on_ranks(jobs.JOBS[what], save_job, what)
    except torch.multiprocessing.ProcessRaisedException as error:
        if reason is None or reason not in str(error):
            raise
        print(f"cannot make {what}: {reason}")
    else:
        assert reason is None, f"PyTorch {jobs.VERSION} makes {what} after all: take it out of CANNOT"
        expect(what)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=""
    )
    parser.add_argument("--into", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("what", nargs="*", default=["dcp", "save.pt", *jobs.JOBS])
    arguments = parser.parse_args()
    directory = arguments.into / jobs.VERSION
    directory.mkdir(parents=True, exist_ok=True)
    os.chdir(directory)  # PyTorch writes the path that it is given into the checkpoint
    for what in arguments.what:
        make(what)
    print(f"wrote {directory}")


if __name__ == "__main__":
    main()
