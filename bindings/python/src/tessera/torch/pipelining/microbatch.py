"""PyTorch's chunking of batches and merging of outputs, under PyTorch's module name."""

from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _CustomReducer,
    _LossReducer,
    _Replicate,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)

__all__ = [
    "TensorChunkSpec",
    "_CustomReducer",
    "_LossReducer",
    "_Replicate",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "sum_reducer",
]
