"""Joins the rows of all ranks into the state that they save.

Ranks whose rows have the same structure compare a hash and exchange nothing more. Otherwise (names that some ranks
lack, shards on a part of the mesh, strided shards, plans that PyTorch deduplicated) they exchange their tables: names
and boxes, no data.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from ... import _core
from ...comm import Comm
from ...errors import InvalidArgument, Mismatch
from ...layout import Box, Layout, Replicate, Shard
from ...tensor import tensor as core_tensor
from ..ranks import gather
from ..tensors import bits_of, core_dtype, named_dtype
from .record import core_name
from .rows import Entry, Row, structure_text, table_text

__all__ = ["State", "join"]


def join(comm: Comm | None, rows: list[Row], save_id: str) -> tuple[list[Entry], str]:
    """The joined state of all ranks' rows, and rank 0's save id. Collective; every rank must have valid rows."""
    rank, world = (comm.rank, comm.world_size) if comm is not None else (0, 1)
    digest = hashlib.sha256(structure_text(rows)).digest()
    own_boxes = any(row.kind == "tensor" and row.spec[0] == "boxes" for row in rows)
    head = digest + bytes([own_boxes])
    heads = gather(comm, head + save_id.encode())
    save_id = heads[0][len(head) :].decode()
    if not own_boxes and all(other[: len(head)] == head for other in heads):
        return [_regular(row, rank, world) for row in rows], save_id
    tables = [json.loads(text) for text in gather(comm, table_text(rows))]
    pieces = {row.name: row.pieces for row in rows}
    merged: dict[str, dict[int, list[Any]]] = {}
    for of_rank, table in enumerate(tables):
        for line in table:
            merged.setdefault(line[0], {})[of_rank] = line
    return [_merged(name, lines, pieces.get(name, []), rank, world) for name, lines in merged.items()], save_id


def _regular(row: Row, rank: int, world: int) -> Entry:
    layout, pieces = row.spec, row.pieces
    if row.kind == "pickle":  # of equal size everywhere, but its bytes may differ: rank 0's it is
        layout = ["boxes", row.boxes, *([[]] * (world - 1))]
        pieces = pieces if rank == 0 else []
    return Entry(row.name, row.kind, row.path, row.dtype, row.shape, layout, pieces, row.json)


def _merged(name: str, lines: dict[int, list[Any]], pieces: list[torch.Tensor], rank: int, world: int) -> Entry:
    first = min(lines)
    _, kind, path, dtype, shape, spec, _, text = lines[first]
    for other, line in lines.items():
        # Values and pickles may differ: the first rank's are taken, as PyTorch takes one of them.
        same = line[1:5:2] == [kind, dtype] and line[4] == shape if kind == "tensor" else line[1] != "tensor"
        if not same:
            rows = line[1:4:2] == [kind, dtype] and line[1] == "tensor" and line[4][1:] == list(shape[1:])
            hint = "; save the rows of one tensor as a DTensor or a ShardedTensor, which know their offsets"
            raise Mismatch(
                f"{name!r} is a {line[1]} {line[3]} {tuple(line[4])} on rank {other}, but a {kind} {dtype} "
                f"{tuple(shape)} on rank {first}{hint if rows else ''}"
            )
    own = lines.get(rank)
    if own is not None and own[1] == "value":  # rank 0's is saved; check_replicas compares them
        text = own[-1]
    entry = Entry(name, kind, tuple(path), dtype, tuple(shape), spec, pieces, text)
    if kind == "value":
        return entry
    if kind == "pickle":
        lines = {first: lines[first]}
        entry.pieces = pieces if rank == first else []
    elif len(lines) == world and spec != ["boxes"] and all(line[5] == spec for line in lines.values()):
        return entry
    if 0 in entry.shape:
        entry.layout, entry.pieces = ["whole"], [torch.empty(entry.shape, dtype=bits_of(named_dtype(dtype)))]
        return entry
    entry.layout = ["boxes", *([Box(tuple(o), tuple(s)) for o, s in lines[r][6]] if r in lines else []
                              for r in range(world))]  # fmt: skip
    return entry


class State:
    """The core's state over entries. Keeps the pieces' memory alive."""

    def __init__(self, entries: list[Entry], rank: int) -> None:
        self.handle = _core.state_create()
        names: dict[str, str] = {}
        for entry in entries:
            same = entry.name if entry.kind == "value" else names.setdefault(core_name(entry.name), entry.name)
            if same != entry.name:
                raise InvalidArgument(
                    f"{same!r} and {entry.name!r} differ only by wrapper names (module., _orig_mod.), which a "
                    "checkpoint strips; save one of them under another name"
                )
            if entry.kind == "value":
                _core.state_set_value(self.handle, entry.name, entry.json)
            elif entry.layout == ["whole"]:
                _core.state_add_tensor(self.handle, entry.name, core_tensor(entry.pieces[0]))
            else:
                self._add(entry, rank)

    def _add(self, entry: Entry, rank: int) -> None:
        if entry.layout[0] == "mesh":
            _, sizes, dims = entry.layout
            placements = [Replicate() if dim < 0 else Shard(dim) for dim in dims]
            layout = Layout(entry.shape, sizes, placements)
        else:
            layout = Layout.from_boxes(entry.shape, entry.layout[1:])
        dtype = core_dtype(named_dtype(entry.dtype))
        pieces = [core_tensor(piece) for piece in entry.pieces]
        _core.state_add_sharded(self.handle, entry.name, layout._handle, int(dtype), pieces, rank)
