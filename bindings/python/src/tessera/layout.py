"""How a global tensor is distributed over the ranks. Pure arithmetic; only `Layout.gather` communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import _core
from ._base import Closable, checked
from .comm import Comm

__all__ = ["Box", "Layout", "Replicate", "Shard"]


class Replicate(NamedTuple):
    """Every rank of the mesh dimension holds the same data."""


class Shard(NamedTuple):
    """The mesh dimension splits tensor dimension `dim` as `torch.chunk` does.

    Equal parts of ``ceil(size / parts)``, then a shorter one, then empty ones.
    """

    dim: int


class Box(NamedTuple):
    """A piece of a tensor; offsets and sizes are in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this box in the global array."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


class Layout(Closable):
    """A layout from placements.

    Parameters
    ----------
    shape : sequence of int
        Shape of the global tensor, at most 8 dimensions.
    mesh_sizes : sequence of int
        The sizes of the mesh; ranks are row-major.
    placements : sequence of Replicate or Shard
        One per mesh dimension, applied in order.

    Examples
    --------
    >>> layout = Layout((10, 4), [4], [Shard(0)])
    >>> layout.boxes(3)
    [Box(offsets=(9, 0), sizes=(1, 4))]
    """

    _handle: _core.Layout

    def __init__(
        self, shape: Sequence[int], mesh_sizes: Sequence[int], placements: Sequence[Replicate | Shard]
    ) -> None:
        self._shape = tuple(shape)
        for placement in placements:
            if not isinstance(placement, (Replicate, Shard)):
                raise TypeError(
                    f"the placement {placement!r} is a {type(placement).__name__}; it must be Replicate or Shard"
                )
        pairs = [(2, placement.dim) if isinstance(placement, Shard) else (1, 0) for placement in placements]
        self._handle = _core.layout_create(self._shape, list(mesh_sizes), pairs)

    @classmethod
    def from_boxes(
        cls, shape: Sequence[int], boxes: Sequence[Sequence[Box | tuple[Sequence[int], Sequence[int]]]]
    ) -> Layout:
        """A layout from explicit boxes.

        Parameters
        ----------
        shape : sequence of int
            Shape of the global tensor.
        boxes : sequence of sequences of Box
            ``boxes[r]`` are the boxes of rank r. Any two boxes must be equal (replicas) or disjoint.
        """
        return cls._adopt(_core.layout_from_boxes(tuple(shape), [list(of_rank) for of_rank in boxes]), tuple(shape))

    @classmethod
    def _adopt(cls, handle: _core.Layout, shape: tuple[int, ...]) -> Layout:
        layout = cls.__new__(cls)
        layout._shape = shape
        layout._handle = handle
        return layout

    @classmethod
    def gather(
        cls, comm: Comm, shape: Sequence[int], boxes: Sequence[Box | tuple[Sequence[int], Sequence[int]]]
    ) -> Layout:
        """A layout from explicit boxes, where each rank knows only its own. Collective.

        The ranks exchange only their offsets and sizes. All ranks get the layout that `from_boxes` would make of all
        boxes.

        Parameters
        ----------
        comm : Comm
            The ranks.
        shape : sequence of int
            Shape of the global tensor, the same on every rank.
        boxes : sequence of Box
            This rank's boxes, in the order of its pieces; empty if it holds nothing of the tensor.

        Raises
        ------
        InvalidArgument
            On all ranks: a box lies outside the tensor, or two overlap partially. The message names their ranks.
        Mismatch
            The ranks pass different shapes, or one calls another collective.
        """
        handle = _core.layout_gather(checked(comm, Comm, "comm")._handle, tuple(shape), list(boxes))
        return cls._adopt(handle, tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global tensor."""
        return self._shape

    def boxes(self, rank: int) -> list[Box]:
        """The boxes that a rank holds; empty ones are left out."""
        count = _core.layout_box_count(self._handle, rank)
        return [Box(*_core.layout_box(self._handle, rank, i, len(self._shape))) for i in range(count)]

    def close(self) -> None:
        """Free the layout."""
        _core.layout_destroy(self._handle)
