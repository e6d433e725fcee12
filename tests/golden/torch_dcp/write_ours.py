"""Writes, with Tessera, what read_ours.py loads with an old PyTorch.

usage: write_ours.py DIRECTORY [JOB ...]. Makes DIRECTORY/<version>/<job>/ of every golden checkpoint here, with the
names and values that that version expects: saver/, a saver's directory, written by three ranks that cut tensors along
one dimension or another, and exported/, the golden checkpoint converted. And DIRECTORY/torch/<job>, written by
tessera.torch.checkpoint under the PyTorch installed here, from models that are spread as jobs.py says.

Needs this build (./dev build), its package in the Python that runs this, NumPy, ml_dtypes and PyTorch 2.15.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import tessera as ts
from tessera.values import decode

HERE = Path(__file__).resolve().parent
DTYPES = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "I32": np.int32,
    "I64": np.int64,
}


def state_of(expected, comm):
    state = ts.State()
    for i, (name, told) in enumerate(sorted(expected["tensors"].items())):
        whole = np.array(told["numbers"], np.float64).reshape(told["shape"]).astype(DTYPES[told["dtype"]])
        if whole.ndim == 0 or i % 4 == 3:
            state[name] = whole
            continue
        layout = ts.Layout(whole.shape, (comm.world_size,), (ts.Shard(i % whole.ndim),))
        pieces = [np.ascontiguousarray(whole[box.slices]) for box in layout.boxes(comm.rank)]
        state[name] = ts.Sharded(layout, pieces, comm.rank, whole.dtype)
    for name, value in expected["values"].items():
        state[name] = decode(json.dumps(value))
    return state


def write(directory, wanted):
    with ts.init() as comm:
        for file in sorted(HERE.glob("*/*/expected.json")):
            if file.parent.name not in wanted:
                continue
            target = directory / file.parent.relative_to(HERE)
            if comm.rank == 0:
                target.mkdir(parents=True)
                with ts.Checkpoint(file.parent) as golden:
                    golden.export(target / "exported", format="torch_dcp")
            comm.barrier()
            state = state_of(json.loads(file.read_text(encoding="utf-8")), comm)
            with ts.Saver(comm, target / "saver", format="torch_dcp") as saver:
                saver.save(7, state)


def save_with_torch(job, target):
    import jobs
    import tessera.torch.checkpoint as tcp

    state = jobs.state_of(job, *jobs.trained(job))
    tcp.save(state, checkpoint_id=target, format="torch_dcp")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1]).resolve()
    if "TESSERA_RANK" in os.environ:
        write(directory, sys.argv[2:])
    else:
        write_all(directory, sys.argv[2:])


def write_all(directory, wanted):
    import jobs  # here, and not in the ranks of write(), whom PyTorch would cost seconds

    wanted = wanted or list(jobs.JOBS)
    command = [
        str(HERE.parents[2] / "build" / "prefix" / "bin" / "tessera"),
        "run",
        "-n",
        "3",
        sys.executable,
        __file__,
        str(directory),
        *wanted,
    ]
    subprocess.run(command, check=True)
    for job in wanted:
        jobs.on_ranks(jobs.JOBS[job], save_with_torch, job, str(directory / "torch" / job))


if __name__ == "__main__":
    main()
