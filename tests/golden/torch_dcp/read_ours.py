"""Loads, with the PyTorch that runs this, what write_ours.py wrote, and compares every number and value.

usage: read_ours.py DIRECTORY [JOB ...]. Needs PyTorch and NumPy alone. Each of make.py's jobs is built anew, blank, and
loaded by torch.distributed.checkpoint.load and set_state_dict: a plain model, DDP, FSDP2, tensor parallel and meshes,
whose shards are never those that were saved. Every part of a tensor and value is also read by itself with
torch.load(weights_only=True), and each checkpoint turned into a file of torch.save by PyTorch's own tool.
"""

import io
import sys
import tempfile
from pathlib import Path

import jobs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from make import CANNOT
from torch.distributed._tensor import DTensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_state_dict


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def blank(value):
    """The same structure and tensors, without its numbers and values."""
    if isinstance(value, torch.Tensor):
        local(value).detach().zero_()
        return value
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list) and jobs.has_parts(value):
        return [blank(item) for item in value]
    return "blank"


def compare(found, expected):
    found, expected = jobs.flat(found), jobs.flat(expected)
    assert sorted(found) == sorted(expected), (sorted(found), sorted(expected))
    for name, value in expected.items():
        one, other = local(found[name]), local(value)
        assert type(one) is type(other), (name, one, other)
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), (name, one, other)
        else:
            assert one == other, (name, one, other)


def load_all(job, paths):
    for kind, path in paths.items():
        load(job, path, kind)
        if dist.get_rank() == 0:
            print(f"{job}, {kind}: read", flush=True)


def load(job, path, kind):
    model, optimizer = jobs.trained(job)
    state = jobs.state_of(job, model, optimizer)
    expected = jobs.state_of(job, *jobs.trained(job))
    if kind == "torch":  # whose scheduler is another version's, and keeps other values
        state.pop("scheduler", None)
        expected.pop("scheduler", None)
    state = blank(state)
    dcp.load(state, checkpoint_id=path)
    compare(state, expected)
    if "optim" in state:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        found = jobs.state_of(job, model, optimizer)
        compare({key: found[key] for key in expected}, expected)
    if dist.get_rank() == 0:
        read_parts(path)


def load_file(data):
    # With weights_only PyTorch 2.4 refuses bytes, also those that it wrote itself.
    safe = not (jobs.VERSION.startswith("2.4.") and b"_codecs" in data)
    return torch.load(io.BytesIO(data), weights_only=safe)


def read_parts(path):
    metadata = dcp.FileSystemReader(path).read_metadata()
    parts = {}
    for index, place in metadata.storage_data.items():
        data = (path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        parts.setdefault(index.fqn, []).append(load_file(data))
    assert sorted(parts) == sorted(metadata.state_dict_metadata)
    with tempfile.TemporaryDirectory() as directory:
        dcp_to_torch_save(path, Path(directory, "whole.pt"))
        whole = jobs.flat(load_file(Path(directory, "whole.pt").read_bytes()))
    assert sorted(whole) == sorted(parts)
    for name, pieces in parts.items():
        if isinstance(whole[name], torch.Tensor):
            assert sum(piece.numel() for piece in pieces) == whole[name].numel(), name
        else:
            assert pieces == [whole[name]], name


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1]).resolve()
    for job in sys.argv[2:] or jobs.JOBS:
        if job in CANNOT.get(jobs.VERSION, {}):
            print(f"{job}: this PyTorch cannot make it")
            continue
        of_version = directory / jobs.VERSION / job
        (saved,) = (of_version / "saver").glob("step-*")
        paths = {"saver": saved, "exported": of_version / "exported", "torch": directory / "torch" / job}
        jobs.on_ranks(jobs.JOBS[job], load_all, job, paths)
    print(f"PyTorch {jobs.VERSION} read all of {directory}")


if __name__ == "__main__":
    main()
