"""The storage classes under PyTorch's module name."""

from torch.distributed.checkpoint.filesystem import SerializationFormat

from .reader import FileSystemReader
from .writer import FileSystemWriter

__all__ = ["FileSystemReader", "FileSystemWriter", "SerializationFormat"]
