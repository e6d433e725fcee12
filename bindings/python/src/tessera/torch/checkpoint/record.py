"""Facts about a state that PyTorch needs and the native format lacks: a value of rank 0, which other loads may ignore.

Names under ``rank/<r>/`` belong to one rank, so a strict load by others does not see it as unexpected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ...checkpoint import TORCH_RECORD
from ...values import decode, encode
from ..tensors import bits_of, dtype_name, named_dtype
from .rows import Entry, Path

__all__ = ["RECORD", "Record", "core_name", "of_one_rank"]

RECORD = TORCH_RECORD
_OF_ONE_RANK = re.compile(r"rank/(0|[1-9][0-9]*)/.")


def core_name(name: str) -> str:
    """The name of a tensor in the core: without the parts that model wrappers add."""
    *parts, last = name.split(".")
    return ".".join([*(part for part in parts if part not in ("module", "_orig_mod")), last])


def of_one_rank(name: str) -> bool:
    """Whether the core treats a name as a value of a single rank."""
    return _OF_ONE_RANK.match(name) is not None


@dataclass
class Record:
    """The paths of PyTorch's names, which of them are pickles, which have dtypes that the core lacks, and the id that
    PyTorch gave the save."""

    paths: dict[str, Path] = field(default_factory=dict)
    pickles: list[str] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    save_id: str | None = None

    @classmethod
    def of(cls, entries: list[Entry], save_id: str) -> Record:
        """The record of a save."""
        record = cls(save_id=save_id)
        for entry in entries:
            record.paths[entry.name] = entry.path
            if entry.kind == "pickle":
                record.pickles.append(entry.name)
            elif entry.kind == "tensor" and bits_of(named_dtype(entry.dtype)) != named_dtype(entry.dtype):
                record.dtypes[entry.name] = dtype_name(named_dtype(entry.dtype))
        return record

    def json(self) -> str:
        """The value that is saved; a path that equals its name is omitted."""
        paths = {name: list(path) for name, path in self.paths.items() if path != (name,)}
        names = [name for name in self.paths if name not in paths and core_name(name) != name]
        known = {"paths": paths, "names": names, "pickles": self.pickles, "dtypes": self.dtypes}
        return encode({"version": 1, **known, "save_id": self.save_id})

    @classmethod
    def parse(cls, text: str) -> Record:
        """The record of a checkpoint."""
        value = decode(text)
        paths = {name: tuple(path) for name, path in value["paths"].items()}
        paths |= {name: (name,) for name in value["names"]}
        return cls(paths, value["pickles"], value["dtypes"], value.get("save_id"))
