"""The rows that a rank contributes to a save: one per name, from a plan of PyTorch's.

A row is a tensor (complete on this rank, sharded by a mesh, or in explicit boxes), a plain value, or, for anything
else, a pickle of torch.save.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import InvalidArgument
from ...layout import Box
from ...values import encode
from ..tensors import Copies, bits_of, dtype_name, staged

__all__ = ["Entry", "Row", "plain_json", "rows_of"]

Path = tuple[str | int, ...]


@dataclass
class Row:
    """One name of a state. `spec` is ``["whole"]``, ``["mesh", sizes, dims]`` or ``["boxes"]`` for tensors."""

    name: str
    kind: str  # "tensor", "value" or "pickle"
    path: Path
    dtype: str = ""
    shape: tuple[int, ...] = ()
    spec: list[Any] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    pieces: list[torch.Tensor] = field(default_factory=list)
    json: str = ""

    @property
    def structure(self) -> list[Any]:
        """What must be the same on every rank so that no tables need to be exchanged."""
        return [self.name, self.kind, self.path, self.dtype, self.shape, self.spec]

    @property
    def table(self) -> list[Any]:
        """What is exchanged if structures differ: everything but the data."""
        return [*self.structure, [[box.offsets, box.sizes] for box in self.boxes], self.json]


@dataclass
class Entry:
    """A name of the joined state, the same on every rank except for the pieces."""

    name: str
    kind: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    layout: list[Any]  # ["whole"], ["mesh", sizes, dims], or ["boxes", boxes of rank 0, of rank 1, ...]
    pieces: list[torch.Tensor]
    json: str


def rows_of(
    plan: SavePlan, planner: SavePlanner, world: Sequence[int] | None, copies: Copies | None = None
) -> list[Row]:
    """The rows of a plan's items, with their data.

    Parameters
    ----------
    plan : SavePlan
        This rank's plan.
    planner : SavePlanner
        Resolves the items.
    world : sequence of int or None
        The global ranks that save, if none of their plans was deduplicated; DTensors on a mesh of exactly these ranks
        need no boxes.
    copies : Copies, optional
        Where the data is copied; without it rows share the memory of the state.
    """
    state = planner.state_dict if isinstance(planner, DefaultSavePlanner) else {}
    plain = _keeps_objects(planner)
    paths = plan.planner_data if isinstance(plan.planner_data, dict) else {}
    rows: dict[str, Row] = {}
    for item in plan.items:
        name = item.index.fqn
        path = tuple(paths.get(name, (name,)))
        if item.type == WriteItemType.BYTE_IO:
            rows[name] = _object_row(name, path, item, planner, state.get(name) if plain else planner)
            continue
        row = rows.get(name)
        if row is None:
            spec = ["whole"] if item.type == WriteItemType.TENSOR else ["boxes"]
            if world is not None and isinstance(state.get(name), DTensor):
                spec = mesh_spec(state[name], world) or spec
            assert item.tensor_data is not None
            row = rows[name] = Row(name, "tensor", path, shape=tuple(item.tensor_data.size), spec=spec)
        _add_piece(row, item, planner, copies)
    return list(rows.values())


def mesh_spec(tensor: DTensor, world: Sequence[int]) -> list[Any] | None:
    """The mesh and the tensor dimension that each mesh dimension shards (-1: none); None for other placements."""
    mesh = tensor.device_mesh.mesh
    if mesh.flatten().tolist() != list(world):
        return None
    dims = []
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):  # a strided shard is a subclass of Shard
            return None
        dims.append(placement.dim if isinstance(placement, Shard) else -1)
    return ["mesh", list(mesh.shape), dims]


def plain_json(value: object) -> str | None:
    """The typed JSON of a value that a load returns unchanged; None for all others."""
    if not _is_plain(value, 0):
        return None
    try:
        text = encode(value)
        text.encode()
    except (InvalidArgument, UnicodeEncodeError):
        return None
    return text


def _is_plain(value: object, depth: int) -> bool:
    """Whether a value has exactly these types: a subclass, such as torch.Size or an enum, would load as its base."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return True
    if depth > 60:
        return False
    if kind is list or kind is tuple:
        members: Iterable[object] = value  # type: ignore[assignment]
        return all(_is_plain(member, depth + 1) for member in members)
    if kind is dict:
        pairs: dict[object, object] = value  # type: ignore[assignment]
        return all(_is_plain(k, depth + 1) and _is_plain(v, depth + 1) for k, v in pairs.items())
    return False


def _keeps_objects(planner: SavePlanner) -> bool:
    """Whether a planner saves the objects in its state unchanged."""
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "lookup_object", "transform_object")
    )


def _is_split(value: object) -> bool:
    """Whether the core would save the members of a value separately in PyTorch's format, as PyTorch's planner does."""
    return isinstance(value, dict) or (isinstance(value, list) and any(_is_split(member) for member in value))


def _object_row(name: str, path: Path, item: WriteItem, planner: SavePlanner, value: object) -> Row:
    text = None if value is planner or _is_split(value) else plain_json(value)
    if text is not None:
        return Row(name, "value", path, json=text)
    try:
        content = planner.resolve_data(item)
    except Exception as error:
        raise InvalidArgument(f"{name!r} cannot be pickled: {error}") from error
    if not isinstance(content, io.BytesIO):
        raise InvalidArgument(f"the planner resolved {name!r} to a {type(content).__name__}, expected a BytesIO")
    data = torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)
    size = (len(data),)
    return Row(name, "pickle", path, "uint8", size, ["boxes"], [Box((0,), size)], [data])


def _add_piece(row: Row, item: WriteItem, planner: SavePlanner, copies: Copies | None) -> None:
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        raise InvalidArgument(f"the planner resolved {row.name!r} to a {type(data).__name__}, expected a tensor")
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    if tuple(data.shape) != box.sizes:
        raise InvalidArgument(
            f"{row.name!r}: the planner returned data of shape {tuple(data.shape)} for a chunk of shape {box.sizes}"
        )
    row.dtype = dtype_name(data.dtype)
    if 0 in row.shape:  # no elements: every rank has all of it
        row.spec, row.boxes = ["whole"], [Box((0,) * len(row.shape), row.shape)]
        row.pieces = [torch.empty(row.shape, dtype=bits_of(data.dtype))]
        return
    if 0 in box.sizes:
        return  # this rank holds nothing of the tensor
    row.boxes.append(box)
    row.pieces.append(staged(data, row.name, copies, box))


def table_text(rows: list[Row]) -> bytes:
    """The tables of rows, for other ranks."""
    return json.dumps([row.table for row in rows]).encode()


def structure_text(rows: list[Row]) -> bytes:
    """The structures of rows, for comparison."""
    return json.dumps([row.structure for row in rows]).encode()
