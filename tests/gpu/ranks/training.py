"""A rank on a GPU: DDP, FSDP, their optimizers and a checkpoint give on the device what they give on the CPU.

usage: training.py DIRECTORY
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import one_gpu
import tessera as ts
import torch
from tessera._core import CudaArray

STEPS = 4
SHAPES = {
    "first": {"weight": (300, 257), "bias": (300,)},
    "second": {"weight": (3000, 300), "scale": (7, 3)},
    "third": {"weight": (257, 3000)},
}
State = dict[str, torch.Tensor]


def initial(rank: int) -> State:
    generator = torch.Generator().manual_seed(rank)
    return {
        f"{unit}.{name}": torch.randn(shape, generator=generator)
        for unit, shapes in SHAPES.items()
        for name, shape in shapes.items()
    }


def tensor_over(view: Any) -> torch.Tensor:
    return torch.from_dlpack(view) if isinstance(view, CudaArray) else torch.from_numpy(view)


def gradient(param: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Of products alone, so that the CPU and a GPU round alike."""
    return param * (rank + 1) * (0.5 if step % 2 else 0.25)


@contextmanager
def on_stream(device: torch.device) -> Iterator[Any]:
    """A stream that the computation runs on; None on the CPU."""
    if device.type == "cpu":
        yield None
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
        stream.synchronize()


def results(arrays: Mapping[str, Any]) -> State:
    return {name: tensor_over(view).cpu().clone() for name, view in arrays.items()}


def of_ddp(comm: ts.Comm, device: torch.device, _directory: Path) -> State:
    params = {name: value.to(device) for name, value in initial(comm.rank).items()}
    with on_stream(device) as stream, ts.DDP(comm, params, bucket_bytes=200_000) as ddp:
        optimizer = ts.AdamW(ddp, lr=1e-2)
        if stream is not None:
            ddp.set_stream(stream)
            optimizer.set_stream(stream)
        grads = {name: tensor_over(view) for name, view in ddp.grads.items()}
        for step in range(STEPS):
            for name in reversed(list(params)):
                grads[name].copy_(gradient(params[name], comm.rank, step))
                ddp.ready(name)
            ddp.wait()
            optimizer.step()
        last = {f"gradient of {name}": grad.cpu().clone() for name, grad in grads.items()}
        optimizer.close()
        return last | {name: value.cpu() for name, value in params.items()}


def of_fsdp(comm: ts.Comm, device: torch.device, directory: Path) -> State:
    values = {name: value.to(device) for name, value in initial(comm.rank).items()}
    units = {unit: {f"{unit}.{name}": values[f"{unit}.{name}"] for name in shapes} for unit, shapes in SHAPES.items()}
    with on_stream(device) as stream:
        fsdp = ts.FSDP(comm, units)
        optimizer = ts.AdamW(fsdp, lr=1e-2)
        state = ts.State(model=fsdp, optim=optimizer)
        if stream is not None:
            fsdp.set_stream(stream)
            optimizer.set_stream(stream)
            state.set_stream(device.index, stream)
        norms = []
        for step in range(STEPS):
            for unit in SHAPES:
                with fsdp.forward(unit) as params:
                    if device.type == "cuda":  # what the stream then reads is there
                        total = sum(tensor_over(params[name]).sum() for name in params)
                        assert bool(torch.isfinite(total)), (unit, step)
            for unit in reversed(SHAPES):
                with fsdp.backward(unit) as (params, grads):
                    for name in params:
                        whole = tensor_over(params[name]) if device.type == "cuda" else torch.tensor(params[name])
                        tensor_over(grads[name]).copy_(gradient(whole, comm.rank, step))
                        del whole
            fsdp.wait()
            norms.append(torch.tensor(optimizer.clip_grad_norm(1e9)))
            optimizer.step()
        before = results(fsdp.shards)
        with ts.Saver(comm, directory / device.type) as saver:
            saver.save(STEPS, state)
            for shard in fsdp.shards.values():
                tensor_over(shard).zero_()
            assert saver.resume(state) == STEPS
        assert all(torch.equal(value, before[name]) for name, value in results(fsdp.shards).items())
        with fsdp.summon_full_params() as params:
            whole_params = results(params) if device.type == "cuda" else {n: torch.tensor(params[n]) for n in params}
        gradients = {f"gradient of {name}": value for name, value in results(fsdp.shard_grads).items()}
        for one in (optimizer, fsdp):
            one.close()
        return whole_params | gradients | {"norms": torch.stack(norms)}


def main() -> None:
    one_gpu.share(torch.cuda.device_count())
    directory = Path(sys.argv[1])
    with ts.init(backend="cpu:auto,cuda:nccl") as comm:
        device = torch.device("cuda", comm.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        kinds: list[Callable[[ts.Comm, torch.device, Path], State]] = [of_ddp, of_fsdp]
        for of_kind in kinds:
            here, there = (of_kind(comm, one, directory) for one in (device, torch.device("cpu")))
            for name, expected in there.items():
                torch.testing.assert_close(
                    here[name], expected, rtol=2e-6, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
                )
            equal = sum(torch.equal(here[name], expected) for name, expected in there.items())
            print(f"rank {comm.rank}: {of_kind.__name__}: {equal} of {len(there)} have the CPU's bits", flush=True)


main()
