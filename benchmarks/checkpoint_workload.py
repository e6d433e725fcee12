"""What is saved and loaded: named lists of tensors, and which boxes of them a rank holds.

Every element's bits follow from its place in the global tensor, so that whatever world size or layout loads them, the
bytes to expect are known.
"""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

BITS = {"f32": np.dtype(np.uint32), "bf16": np.dtype(np.uint16)}
PART = 10  # a partial load takes one tensor in so many


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    unit: str = ""  # flat shards: the tensors of a unit lie one behind the other, and are cut as one

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype].itemsize


class Piece(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bits: np.ndarray  # of `sizes`


def layer(number: int, dtype: str = "f32") -> list[Tensor]:
    """A transformer's layer of width 1024, 12.6 million parameters."""
    shapes = {
        **{f"attn.{part}": (1024, 1024) for part in "qkvo"},
        "mlp.down": (1024, 2730),
        "mlp.gate": (2730, 1024),
        "mlp.up": (2730, 1024),
        "norm1": (1024,),
        "norm2": (1024,),
    }
    unit = f"layers.{number:02}"
    return [Tensor(f"model.{unit}.{name}.weight", shape, dtype, unit) for name, shape in shapes.items()]


def language_model() -> list[Tensor]:
    """bf16 weights, an fp32 master copy and two moments: 14 bytes for each of 159 million parameters."""
    weights = [Tensor("model.embed.weight", (32000, 1024), "bf16")]
    for number in range(10):
        weights += layer(number, "bf16")
    kept = ("master", "exp_avg", "exp_avg_sq")
    return weights + [Tensor(f"optim.state.{w.name}.{k}", w.shape, "f32") for w in weights for k in kept]


def same(count: int, shape: tuple[int, ...]) -> list[Tensor]:
    return [Tensor(f"t{i:06}", shape, "f32") for i in range(count)]


WORKLOADS = {
    "64 x 16 MiB": lambda: same(64, (2048, 2048)),
    "LLM, 2.1 GiB": language_model,
    "20,000 x 1 KiB": lambda: same(20_000, (2, 128)),
    "100,000 x 4-16 KiB": lambda: [Tensor(f"t{i:06}", (2, 512 << i % 3), "f32") for i in range(100_000)],
    "20 layers, 1 GiB": lambda: [tensor for number in range(20) for tensor in layer(number)],
}


@dataclass(frozen=True)
class Share:
    """A rank's share of a workload. `placement`: rows, columns, replicated, or flat (ranges of whole units, as FSDP1
    cuts them)."""

    workload: str
    placement: str
    rank: int
    world_size: int

    @staticmethod
    def from_environment() -> Share:
        where = (os.environ[f"BENCH_{key}"] for key in ("WORKLOAD", "PLACEMENT"))
        return Share(*where, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def tensors(self) -> list[Tensor]:
        return WORKLOADS[self.workload]()

    def pieces(self) -> dict[str, list[Piece]]:
        """This rank's boxes of each tensor, filled."""
        if self.placement == "flat":
            units = self.units()
            pieces = {name: held for unit in units.values() for name, held in self._cut(unit).items()}
        else:
            pieces = {tensor.name: [self._box(tensor)] for tensor in self.tensors()}
        for number, tensor in enumerate(self.tensors()):
            for piece in pieces[tensor.name]:
                fill(piece, tensor.shape, number)
        return pieces

    def _box(self, tensor: Tensor) -> Piece:
        offsets, sizes = [0] * len(tensor.shape), list(tensor.shape)
        if self.placement != "replicated":
            dim = 1 if self.placement == "columns" else 0
            most = -(-sizes[dim] // self.world_size)  # as torch.chunk
            offsets[dim] = min(self.rank * most, tensor.shape[dim])
            sizes[dim] = min(most, tensor.shape[dim] - offsets[dim])
        return Piece(tuple(offsets), tuple(sizes), np.empty(sizes, BITS[tensor.dtype]))

    def units(self) -> dict[str, list[Tensor]]:
        units: dict[str, list[Tensor]] = {}
        for tensor in self.tensors():
            units.setdefault(tensor.unit, []).append(tensor)
        return units

    def range_of(self, unit: list[Tensor], rank: int) -> tuple[int, int]:
        """The elements of a unit that a rank holds."""
        total = sum(math.prod(tensor.shape) for tensor in unit)
        most = -(-total // self.world_size)
        return min(rank * most, total), min((rank + 1) * most, total)

    def boxes_of(self, unit: list[Tensor], rank: int) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
        """The rank's range of a unit as boxes of its tensors, in order: a part of a row, rows, a part of a row."""
        first, last = self.range_of(unit, rank)
        boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for tensor in unit:
            size = math.prod(tensor.shape)
            begin, end = max(first, 0), min(last, size)
            boxes[tensor.name] = held = []
            width = 1 if len(tensor.shape) == 1 else tensor.shape[1]
            while begin < end:
                row, column = divmod(begin, width)
                rows = 0 if column else (end - begin) // width
                count = rows * width if rows else min(width - column, end - begin)
                at, box = (row, column), (max(count // width, 1), min(count, width))
                held.append((at[: len(tensor.shape)], box[: len(tensor.shape)]))
                begin += count
            first, last = first - size, last - size
        return boxes

    def _cut(self, unit: list[Tensor]) -> dict[str, list[Piece]]:
        first, last = self.range_of(unit, self.rank)
        memory, at = np.empty(last - first, BITS[unit[0].dtype]), 0
        pieces: dict[str, list[Piece]] = {}
        for name, boxes in self.boxes_of(unit, self.rank).items():
            pieces[name] = []
            for offsets, sizes in boxes:
                count = math.prod(sizes)
                pieces[name].append(Piece(offsets, sizes, memory[at : at + count].reshape(sizes)))
                at += count
        return pieces


def size_bytes(workload: str) -> int:
    return sum(tensor.size_bytes for tensor in WORKLOADS[workload]())


def fill(piece: Piece, shape: tuple[int, ...], number: int) -> None:
    """Bits that no other element of the tensor has, and few of the others' elements."""
    index = np.full((1,) * len(shape), number * 40503, np.uint32)
    for dim, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
        step = math.prod(shape[dim + 1 :]) * 2654435761 % (1 << 32)
        along = np.arange(offset, offset + size, dtype=np.uint32) * np.uint32(step)
        along = along.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        in_place = dim == len(shape) - 1 and piece.bits.itemsize == 4
        index = np.add(index, along, out=piece.bits if in_place else None)
    if piece.bits.itemsize == 2:
        piece.bits[...] = index >> 16


def checksum(arrays: list[np.ndarray]) -> int:
    crc = 0
    for array in arrays:
        crc = zlib.crc32(array.reshape(-1).view(np.uint8), crc)
    return crc
