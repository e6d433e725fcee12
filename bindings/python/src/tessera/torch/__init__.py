"""Tessera under PyTorch's own names. Needs PyTorch; `import tessera` does not.

`tessera.torch.checkpoint` is PyTorch's Distributed Checkpoint over Tessera's engine.
"""

try:
    import torch as _torch
except ModuleNotFoundError as _missing:
    raise ModuleNotFoundError(
        "tessera.torch needs PyTorch, which this Python does not have: pip install torch", name=_missing.name
    ) from _missing

from . import checkpoint

del _torch

__all__ = ["checkpoint"]
