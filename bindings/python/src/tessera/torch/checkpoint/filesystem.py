"""The storage classes, under the module name that PyTorch uses."""

from torch.distributed.checkpoint.filesystem import SerializationFormat

from .reader import FileSystemReader
from .writer import FileSystemWriter

__all__ = ["FileSystemReader", "FileSystemWriter", "SerializationFormat"]
