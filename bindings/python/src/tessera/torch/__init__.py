"""Tessera under PyTorch's own names. Needs PyTorch; `import tessera` does not.

`tessera.torch.checkpoint` is PyTorch's Distributed Checkpoint over Tessera's engine.
"""

from . import checkpoint

__all__ = ["checkpoint"]
