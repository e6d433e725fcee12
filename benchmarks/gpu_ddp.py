"""A step of GPT-2 (124 M parameters) on a GPU: Tessera's DDP beside PyTorch's, and neither.

usage: gpu_ddp.py [--ranks 1 2] [--dtypes f32 bf16] [--steps N] [--rounds N] [--batch N] [--layers N]

Needs tessera and torch with CUDA. Each kind trains a model of its own on the same tokens; rounds of the kinds take
turns. A step is zeroing, forward, backward and the end of the reduction; its time is the device's. With fewer GPUs than
ranks, the ranks share one and meet over loopback sockets, where times say nothing of a network. Each line of the result
is JSON: a round's milliseconds a step by kind. The last line of a job has the medians, and the largest difference
between Tessera's and PyTorch's gradients.

Kinds: "alone" (no reduction), "torch" (NCCL, gradient_as_bucket_view), "views" (autograd adds to Tessera's views, which
a call zeroes), "copies" (a new gradient is copied into its view, as PyTorch's DDP does after zero_grad()).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

KINDS = ("alone", "torch", "views", "copies")
WORDS, WIDTH, HEADS, LENGTH = 50_304, 768, 12, 1024


def arguments(text: str | None, dtypes: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=list(dtypes))
    parser.add_argument("--steps", type=int, default=10, help="of a kind in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--bucket-mb", type=int, default=25)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    return parser.parse_args()


def start(program: str, options: argparse.Namespace, ranks: int, dtype: str) -> None:
    """Runs a job of so many ranks of a program, whose first prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        job = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            command = [sys.executable, program, "--rank", str(rank), "--meeting", str(Path(folder, "ranks"))]
            for name in ("steps", "rounds", "batch", "layers", "bucket_mb"):
                command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
            job.append(subprocess.Popen([*command, "--dtypes", dtype, "--ranks", str(ranks)], env=environment))
        failed = [process.wait() for process in job]
        if any(failed):
            sys.exit(f"{ranks} ranks with {dtype} have failed")


def main(
    program: str,
    text: str | None,
    trainers: Mapping[str, Callable[..., Any]],
    dtypes: tuple[str, ...] = ("f32", "bf16"),
) -> None:
    """The program of one parallelism. `trainers` makes one of each kind, of its kind, the ranks and the options."""
    options = arguments(text, dtypes)
    if options.rank is not None:
        run(options, trainers)
        return
    for ranks in options.ranks:
        for dtype in options.dtypes:
            start(program, options, ranks, dtype)


# --- a rank


def run(options: argparse.Namespace, kinds: Mapping[str, Callable[..., Any]]) -> None:
    import torch

    rank, ranks = options.rank, options.ranks[0]
    shares = torch.cuda.device_count() < ranks
    if shares:  # NCCL refuses two ranks of one host on one device
        os.environ.update(
            NCCL_HOSTID=f"rank {rank}",
            NCCL_NET="Socket",
            NCCL_SOCKET_IFNAME="lo",
            NCCL_NVLS_ENABLE="0",
            NCCL_MNNVL_ENABLE="0",
            NCCL_RAS_ENABLE="0",
        )
    place = 0 if shares else rank
    torch.cuda.set_device(place)

    import tessera as ts
    import torch.distributed as dist

    dist.init_process_group(
        "nccl",
        store=dist.FileStore(options.meeting, ranks),
        rank=rank,
        world_size=ranks,
        device_id=torch.device("cuda", place),
    )
    with ts.init(backend="cpu:auto,cuda:nccl", cuda_device=place) as comm:
        trainers = {kind: make(kind, comm, options) for kind, make in kinds.items()}
        difference = compare(trainers)
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        where = {"ranks": ranks, "dtype": options.dtypes[0], "gpu": torch.cuda.get_device_name(place)}
        for _ in range(options.rounds):
            for kind, trainer in trainers.items():
                dist.barrier()
                times[kind].append(trainer.time(options.steps))
            if rank == 0:
                print(json.dumps({**where, "ms": {kind: round(of[-1], 3) for kind, of in times.items()}}), flush=True)
        if rank == 0:
            medians = {kind: round(statistics.median(of), 3) for kind, of in times.items()}
            ratios = {
                f"{kind}_to_torch": round(of / medians["torch"], 4)
                for kind, of in medians.items()
                if kind not in ("alone", "torch")
            }
            told = {name: value for trainer in trainers.values() for name, value in trainer.told().items()}
            result = {**where, "median_ms": medians, **ratios, **told, "largest_difference": difference}
            print(json.dumps(result), flush=True)
        for trainer in trainers.values():
            trainer.close()
    dist.destroy_process_group()


class Trainer:
    """A model under one kind of DDP."""

    mixed_dtype = "bfloat16"  # of the module's parameters, where they are mixed

    def __init__(self, kind: str, comm, options: argparse.Namespace) -> None:
        import tessera as ts
        import torch

        torch.manual_seed(1)
        self.kind = kind
        self.bf16 = options.dtypes[0] != "f32"
        dtype = getattr(torch, {"f32": "float32", "bf16": "bfloat16", "mixed": self.mixed_dtype}[options.dtypes[0]])
        self.module = self.model = gpt(options.layers).to("cuda", dtype)
        self.params = list(self.module.parameters())
        self.tokens = torch.randint(
            0,
            WORDS,
            (options.batch, LENGTH + 1),
            device="cuda",
            generator=torch.Generator("cuda").manual_seed(comm.rank),
        )
        self.ddp = None
        if kind == "torch":
            self.model = torch.nn.parallel.DistributedDataParallel(
                self.module, gradient_as_bucket_view=True, bucket_cap_mb=options.bucket_mb
            )
        elif kind != "alone":
            named = {name: param.detach() for name, param in self.module.named_parameters()}
            self.ddp = ts.DDP(comm, named, bucket_bytes=options.bucket_mb << 20, rebuild_buckets=True)
            self.ddp.set_stream(torch.cuda.current_stream())
            self.views = [torch.from_dlpack(self.ddp.grads[name]) for name in named]
            for i, param in enumerate(self.params):
                if kind == "views":
                    param.grad = self.views[i]
                    param.register_post_accumulate_grad_hook(functools.partial(self.ready, i))
                else:
                    param.register_post_accumulate_grad_hook(functools.partial(self.copy, i))

    def ready(self, i: int, _param) -> None:
        self.ddp.ready(i)

    def copy(self, i: int, param) -> None:
        self.views[i].copy_(param.grad)
        param.grad = self.views[i]
        self.ddp.ready(i)

    def step(self) -> None:
        import torch

        if self.kind == "views":
            self.ddp.zero_grad()
        else:
            self.module.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=not self.bf16):
            scores = self.model(self.tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1).float(), self.tokens[:, 1:].flatten())
        loss.backward()
        if self.ddp is not None:
            self.ddp.wait()

    def time(self, steps: int) -> float:
        """Milliseconds a step."""
        import torch

        self.step()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(steps):
            self.step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / steps

    def told(self) -> dict[str, float]:
        """What else a result has."""
        if self.kind != "views":
            return {}
        return {"exposed_ms": round(sum(bucket.exposed_ns for bucket in self.ddp.stats()) / 1e6, 3)}

    def gradients(self) -> list:
        """Of this rank, of the last step."""
        return [param.grad for param in self.params]

    def close(self) -> None:
        for param in self.params:
            param.grad = None
        self.views = []
        if self.ddp is not None:
            self.ddp.close()


def compare(trainers: Mapping[str, Any]) -> float:
    """The largest difference between gradients, of the largest gradient of the parameter."""
    for trainer in trainers.values():
        for _ in range(3):  # PyTorch and we regroup buckets after the first
            trainer.step()
    largest = 0.0
    for kind in [kind for kind in trainers if kind not in ("alone", "torch")]:
        gradients = trainers[kind].gradients()
        for ours, peers in zip(gradients, trainers["torch"].gradients() if gradients else (), strict=True):
            if peers.numel() == 0:
                continue
            difference = (ours.float() - peers.float()).abs().max() / peers.float().abs().max()
            largest = max(largest, float(difference))
    return largest


def gpt(layers: int):
    """GPT-2 small, without dropout."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, tokens):
            x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
            for block in self.blocks:
                x = block(x)
            return nn.functional.linear(self.norm(x), self.words.weight)

    return Gpt()


if __name__ == "__main__":
    main(__file__, __doc__, dict.fromkeys(KINDS, Trainer))
