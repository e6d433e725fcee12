"""`load` and its like, under the module name that PyTorch uses."""

from .loading import load, load_state_dict

__all__ = ["load", "load_state_dict"]
