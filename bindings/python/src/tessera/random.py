"""Random numbers that do not depend on how a tensor is distributed.

The number of an element follows from the seed, the stream and the element's index in the whole tensor alone. A slice or
a shard has, bit for bit, the numbers that the same call writes into the whole array on one rank, in every language.
They are Philox4x32-10's (Salmon et al. 2011), not those of NumPy or PyTorch.

All three functions take:

``out``
    The array to fill: contiguous, float16, bfloat16, float32 or float64.
``seed``, ``stream``
    Integers from 0 to ``2**64 - 1``. Different ones give unrelated numbers: use, for example, one seed per run and
    one stream per parameter or step.
``layout``, ``rank``
    Without a layout, ``out`` is the whole tensor. With one it is what this rank holds of it, boxes one after another,
    such as a slice of `TensorParallel` or a shard of `FSDP` with their ``layout(name)``. It may be empty.
``dtype``
    The element type if the array cannot provide it, as for bfloat16 in an array of uint16.

They return ``out`` and raise `InvalidArgument` for numbers, dtypes and shapes that they cannot have.
"""

from __future__ import annotations

from typing import TypeVar

from . import _core
from ._base import checked
from .errors import InvalidArgument
from .layout import Layout
from .tensor import ArrayLike, DTypeLike, tensor

__all__ = ["bernoulli", "normal", "uniform"]

_Array = TypeVar("_Array", bound=ArrayLike)


def _part(layout: Layout | None, rank: int | None) -> tuple[_core.Layout | None, int]:
    if layout is None:
        if rank is not None:
            raise InvalidArgument(f"rank is {rank}, but there is no layout; without one, out is the whole tensor")
        return None, 0
    held = checked(layout, Layout, "layout")._handle
    if rank is None:
        raise InvalidArgument("a layout needs a rank: whose part of it out is")
    return held, rank


def uniform(
    out: _Array,
    seed: int,
    stream: int = 0,
    low: float = 0.0,
    high: float = 1.0,
    *,
    layout: Layout | None = None,
    rank: int | None = None,
    dtype: DTypeLike | None = None,
) -> _Array:
    """Fill an array with numbers from `low` to below `high`, also after rounding to its dtype.

    Examples
    --------
    >>> whole = ts.random.uniform(np.empty((4, 3)), seed=7)
    >>> rows = ts.Layout((4, 3), [2], [ts.Shard(0)])
    >>> half = ts.random.uniform(np.empty((2, 3)), seed=7, layout=rows, rank=1)
    >>> bool((half == whole[2:]).all())
    True
    """
    _core.random_uniform(tensor(out, dtype), seed, stream, low, high, *_part(layout, rank))
    return out


def normal(
    out: _Array,
    seed: int,
    stream: int = 0,
    mean: float = 0.0,
    deviation: float = 1.0,
    *,
    layout: Layout | None = None,
    rank: int | None = None,
    dtype: DTypeLike | None = None,
) -> _Array:
    """Fill an array with normally distributed numbers; `deviation` is the standard deviation."""
    _core.random_normal(tensor(out, dtype), seed, stream, mean, deviation, *_part(layout, rank))
    return out


def bernoulli(
    out: _Array,
    seed: int,
    stream: int = 0,
    p: float = 0.5,
    *,
    layout: Layout | None = None,
    rank: int | None = None,
    dtype: DTypeLike | None = None,
) -> _Array:
    """Fill an array with 1 with the probability `p`, otherwise 0: a dropout mask that keeps a share `p`.

    `out` may also have an integer dtype or bool.
    """
    _core.random_bernoulli(tensor(out, dtype), seed, stream, p, *_part(layout, rank))
    return out
