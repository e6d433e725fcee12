"""What PyTorch knows of a state and the native format does not: a value of rank 0's own, which others may ignore.

Names under ``rank/<r>/`` belong to one rank, so that a strict load elsewhere does not stumble over it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...values import decode, encode
from ..tensors import bits_of, dtype_name, named_dtype
from .joined import Entry
from .rows import Path

__all__ = ["RECORD", "Record", "core_name"]

RECORD = "rank/0/torch"


def core_name(name: str) -> str:
    """The name under which the core keeps a tensor: without the parts that wrappers of models add."""
    *parts, last = name.split(".")
    return ".".join([*(part for part in parts if part not in ("module", "_orig_mod")), last])


@dataclass
class Record:
    """Of names as PyTorch has them: their paths, which are pickles, which have dtypes that the core lacks."""

    paths: dict[str, Path] = field(default_factory=dict)
    pickles: list[str] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: list[Entry]) -> Record:
        """The record of a save."""
        record = cls()
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
        return encode({"version": 1, "paths": paths, "names": names, "pickles": self.pickles, "dtypes": self.dtypes})

    @classmethod
    def parse(cls, text: str) -> Record:
        """The record of a checkpoint."""
        value = decode(text)
        paths = {name: tuple(path) for name, path in value["paths"].items()}
        paths |= {name: (name,) for name in value["names"]}
        return cls(paths, value["pickles"], value["dtypes"])
