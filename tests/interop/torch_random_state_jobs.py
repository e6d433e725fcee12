"""What test_torch_random_states.py runs: random nested states, saved by some of the ranks and loaded by others, against
what they were made of.

usage: torch_random_state_jobs.py DIRECTORY FIRST SECONDS NUMBER
"""

from __future__ import annotations

import datetime
import random
import shutil
import sys
import time
import warnings
from collections import deque
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import tessera.torch.checkpoint as tcp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_ranks import leave

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
DTYPES += [torch.complex64]
OBJECTS: list[Any] = [
    *(None, True, 0, -(2**70), 1.5, float("inf"), "größer", "", b"\x00\xff", (1, (2.0, None)), [], [1, "a"], {1, 2}),
    *(torch.Size([2, 3]), torch.float16, np.float32(0.1), np.int64(3), np.arange(6.0).reshape(2, 3), np.array(["a"])),
    *(Path("a/b"), datetime.datetime(2026, 1, 31, 12), frozenset([1]), deque([1, np.float64(2)], 3)),
]  # fmt: skip


@dataclass
class Tensor:
    """A leaf: its values, and how it lies while it is saved and loaded; None is whole on every rank."""

    whole: torch.Tensor
    saved: int | None
    loaded: int | None
    transposed: bool


@dataclass
class Object:
    value: Any


class Maker:
    """A state of a seed. Names of leaves are all different, so that those of wrappers may stand anywhere before."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = count()
        self.texts_alone = True

    def node(self, depth: int) -> Any:
        kind = self.random.choices(["tensor", "object", "dict", "list"], [5, 4, 4 if depth else 0, 2 if depth else 0])[
            0
        ]
        if kind == "tensor":
            return self.tensor()
        if kind == "object":
            return Object(self.random.choice(OBJECTS))
        if kind == "list":
            # Without what holds nothing: PyTorch's planner takes that for None when it loads (2.15).
            items = [self.node(depth - 1) for _ in range(self.random.randrange(1, 4))]
            return [one for one in items if has_leaves(one)] or [Object(None)]
        found = {self.key(): self.node(depth - 1) for _ in range(self.random.randrange(4))}
        return {self.random.choice(["module", "_orig_mod"]): found} if self.random.random() < 0.2 else found

    def key(self) -> Any:
        number = next(self.numbers)
        if self.random.random() < 0.2:
            self.texts_alone = False
            return number if self.random.random() < 0.7 else (number, "x")
        return f"k{number}"

    def tensor(self) -> Tensor:
        shape = [self.random.choice([0, 1, 2, 3, 5, 8]) for _ in range(self.random.randrange(4))]
        values = torch.tensor(
            [self.random.randrange(-100, 100) for _ in range(int(np.prod(shape)))], dtype=torch.float64
        )
        dtype = self.random.choice(DTYPES)
        whole = values.abs().to(dtype) if dtype is torch.uint8 else values.to(dtype)
        dims = [None, -1, *range(len(shape))]
        return Tensor(
            whole.reshape(shape), self.random.choice(dims), self.random.choice(dims), self.random.random() < 0.3
        )


def has_leaves(node: Any) -> bool:
    if isinstance(node, (Tensor, Object)):
        return True
    return any(has_leaves(inner) for inner in (node.values() if isinstance(node, dict) else node))


def placed(whole: torch.Tensor, dim: int | None, mesh: DeviceMesh, transposed: bool) -> torch.Tensor:
    if transposed:
        whole = whole.T.contiguous().T if whole.ndim == 2 else whole
    return whole.clone() if dim is None else distribute_tensor(whole, mesh, [Replicate() if dim < 0 else Shard(dim)])


def to_save(node: Any, mesh: DeviceMesh) -> Any:
    if isinstance(node, Tensor):
        return placed(node.whole, node.saved, mesh, node.transposed)
    if isinstance(node, Object):
        return node.value
    return each(node, lambda inner: to_save(inner, mesh))


def to_load(node: Any, mesh: DeviceMesh) -> Any:
    if isinstance(node, Tensor):
        return placed(torch.zeros_like(node.whole), node.loaded, mesh, not node.transposed)
    if isinstance(node, Object):
        return None
    return each(node, lambda inner: to_load(inner, mesh))


def each(node: Any, change: Any) -> Any:
    if isinstance(node, dict):
        return {key: change(inner) for key, inner in node.items()}
    return [change(inner) for inner in node]


def compare(got: Any, node: Any, where: str) -> None:
    if isinstance(node, Tensor):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        assert torch.equal(whole, node.whole), f"{where}: {whole} instead of {node.whole}"
    elif isinstance(node, Object):
        assert type(got) is type(node.value), f"{where}: a {type(got)} instead of {node.value!r}"
        same = np.array_equal(got, node.value) if isinstance(got, np.ndarray) else got == node.value
        assert same, f"{where}: {got!r} instead of {node.value!r}"
    else:
        assert type(got) is type(node) and len(got) == len(node), f"{where}: {got!r}"
        for key in node if isinstance(node, dict) else range(len(node)):
            compare(got[key], node[key], f"{where}[{key!r}]")


def one(seed: int, directory: Path, meshes: dict[int, DeviceMesh]) -> None:
    rank = dist.get_rank()
    maker = Maker(seed)
    state = {f"k{next(maker.numbers)}": maker.node(3) for _ in range(maker.random.randrange(1, 6))}
    saving, loading = maker.random.choice(list(meshes)), maker.random.choice(list(meshes))
    ours, form, planned = (maker.random.random() < 0.8), maker.random.choice(["tessera", "torch_dcp"]), False
    path = directory / str(seed)
    if rank < saving:
        group, given = meshes[saving].get_group(), to_save(state, meshes[saving])
        if not ours:
            dcp.save(given, checkpoint_id=path, process_group=group)
        elif maker.random.random() < 0.3:
            tcp.async_save(given, checkpoint_id=path, process_group=group, format=form).result()
        else:
            planned = maker.random.random() < 0.3
            (dcp if planned else tcp).save(
                given, storage_writer=tcp.FileSystemWriter(path, format=form), process_group=group
            )
    dist.barrier()
    if rank < loading:
        group = meshes[loading].get_group()
        ways: list[Any] = [lambda got: tcp.load(got, checkpoint_id=path, process_group=group)]
        ways += [lambda got: dcp.load(got, storage_reader=tcp.FileSystemReader(path), process_group=group)]
        if maker.texts_alone and (
            form == "torch_dcp" or not ours
        ):  # PyTorch's load puts others beside what they replace
            ways += [lambda got: dcp.load(got, checkpoint_id=path, process_group=group)]
        for number, load in enumerate(ways):
            got = to_load(state, meshes[loading])
            load(got)
            compare(got, state, f"seed {seed}, {saving} to {loading} ranks, ours {ours}, {form}, way {number}: ")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path)


def main(where: str, first: str, seconds: str, number: str) -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    dist.init_process_group("gloo")
    meshes = {ranks: DeviceMesh("cpu", list(range(ranks))) for ranks in range(1, dist.get_world_size() + 1)}
    end, seed = time.monotonic() + float(seconds), int(first)
    go_on = torch.ones(1)
    while go_on.item() and seed < int(first) + int(number):
        one(seed, Path(where), meshes)
        seed += 1
        go_on[0] = time.monotonic() < end
        dist.broadcast(go_on, 0)
    if dist.get_rank() == 0:
        print(f"seeds {first} to {seed - 1}")
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
