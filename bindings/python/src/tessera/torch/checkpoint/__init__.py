"""PyTorch's Distributed Checkpoint on Tessera's engine, with PyTorch's names and signatures.

    import tessera.torch.checkpoint as dcp

    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id="checkpoint")
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id="checkpoint")

`FileSystemWriter` and `FileSystemReader` also plug into an unmodified `torch.distributed.checkpoint`. Functions and
classes that only convert between models or optimizers and states are re-exported from PyTorch.
"""

from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    CheckpointableTensor,
    CheckpointException,
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FsspecReader,
    FsspecWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    QuantizedHuggingFaceStorageReader,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from .loading import load, load_state_dict
from .optimizer import load_sharded_optimizer_state_dict
from .reader import FileSystemReader
from .saving import async_save, save, save_state_dict
from .state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from .stateful import Stateful
from .writer import FileSystemWriter

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "AsyncStager",
    "BlockingAsyncStager",
    "BytesStorageMetadata",
    "CheckpointException",
    "CheckpointableTensor",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "FsspecReader",
    "FsspecWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StateDictOptions",
    "Stateful",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "async_save",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "save",
    "save_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
