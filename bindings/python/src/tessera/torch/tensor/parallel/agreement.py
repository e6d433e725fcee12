"""What the ranks of a mesh compare: small values, gathered through the mesh's own process group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import Mismatch

__all__ = ["agree", "gathered", "ranks_of"]


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The global ranks of a mesh of one dimension, in its order."""
    ranks: list[int] = dist.get_process_group_ranks(mesh.get_group())
    return ranks


def gathered(mesh: DeviceMesh, values: torch.Tensor) -> list[torch.Tensor]:
    """The values of every rank, in CPU memory. They must have one shape. Collective."""
    own = values.to(mesh.device_type)
    everyones = [torch.empty_like(own) for _ in range(mesh.size())]
    dist.all_gather(everyones, own, group=mesh.get_group())
    return [one.cpu() for one in everyones]


def agree(mesh: DeviceMesh, call: str, lines: Sequence[str]) -> None:
    """Return if all ranks pass the same lines. Collective: gathers a hash, and the lines only if the hashes differ.

    Raises
    ------
    Mismatch
        On every rank. It names the ranks, and the first line that differs.
    """
    if mesh.size() == 1 or mesh.get_coordinate() is None:
        return
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    hashes = gathered(mesh, torch.tensor(list(digest), dtype=torch.uint8))
    if all(one.equal(hashes[0]) for one in hashes):
        return
    everyones: list[list[str]] = [[] for _ in hashes]
    dist.all_gather_object(everyones, list(lines), group=mesh.get_group())
    raise Mismatch(f"the ranks call {call} differently: {_first_difference(everyones, ranks_of(mesh))}")


def _first_difference(everyones: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    for at in range(max(len(lines) for lines in everyones)):
        ranks_by_line: dict[str, list[int]] = {}
        for rank, lines in zip(ranks, everyones, strict=True):
            ranks_by_line.setdefault(lines[at] if at < len(lines) else "nothing more", []).append(rank)
        if len(ranks_by_line) > 1:
            return "; ".join(f"{_named(of)}: {line}" for line, of in ranks_by_line.items())
    return "their hashes differ"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
