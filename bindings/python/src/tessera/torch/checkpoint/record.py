"""What PyTorch knows of a state and the native format does not: a value of rank 0's own, which others may ignore.

Names under ``rank/<r>/`` belong to one rank, so that a strict load elsewhere does not stumble over it.
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
    """The name under which the core keeps a tensor: without the parts that wrappers of models add."""
    *parts, last = name.split(".")
    return ".".join([*(part for part in parts if part not in ("module", "_orig_mod")), last])


def of_one_rank(name: str) -> bool:
    """Whether the core takes a name for one of the values that belong to a single rank."""
    return _OF_ONE_RANK.match(name) is not None


@dataclass
class Record:
    """Of names as PyTorch has them: their paths, which are pickles, which have dtypes that the core lacks; and the id
    that PyTorch gave the save."""

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
        """The value that is saved; a path that is its name alone is left out."""
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
