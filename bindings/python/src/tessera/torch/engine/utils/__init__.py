"""DeepSpeed's `utils` module: what programs of it use."""

from ..loader import RepeatingLoader
from . import zero_to_fp32

__all__ = ["RepeatingLoader", "zero_to_fp32"]
