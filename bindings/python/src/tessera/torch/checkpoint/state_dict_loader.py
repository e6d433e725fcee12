"""`load` and `load_state_dict` under PyTorch's module name."""

from .loading import load, load_state_dict

__all__ = ["load", "load_state_dict"]
