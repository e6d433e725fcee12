"""The distributed sampler, which assigns samples to ranks."""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Unpack

import numpy as np
import numpy.typing as npt

from . import _core, _options
from ._base import Closable, checked
from ._given import raw, takes
from .comm import Comm
from .errors import InvalidArgument
from .tensor import tensor

if TYPE_CHECKING:
    from ._options import SamplerOptions

__all__ = ["Sampler"]


@takes(_options.SAMPLER)
class Sampler(Closable):
    """Distributes the samples of a data set over the ranks of `comm`.

    The order of an epoch depends only on the seed, epoch and length, not on the world size. A checkpoint can therefore
    resume in mid-epoch with another world size, without losing or repeating a sample.

    Parameters
    ----------
    comm : Comm
        Provides the rank and world size; not kept.
    length : int
        Number of samples in the data set, at least 1.
    <options>
    """

    _handle: _core.Sampler
    _length: int
    _last: int  # samples of the last batch

    def __init__(
        self,
        comm: Comm,
        length: int,
        **options: Unpack[SamplerOptions],
    ) -> None:
        self._handle = _core.sampler_create(
            checked(comm, Comm, "comm", length)._handle, length, **raw(_options.SAMPLER, options)
        )
        self._length = index(length)
        self._last = 0

    def batch(self, size: int) -> npt.NDArray[np.int64]:
        """This rank's next samples. All ranks must ask for the same sizes in the same order.

        Starts the next epoch automatically; a batch never spans two epochs.

        Parameters
        ----------
        size : int
            Number of samples for this rank, at least 1.

        Returns
        -------
        ndarray of int64, shape (count,)
            Indices below `length`; `count` is `size`, or less at the end of an epoch, the same on all ranks.
        """
        wanted = index(size)
        if wanted < 1:
            raise InvalidArgument(f"the batch size is {wanted}; it must be at least 1")
        # More than the data set holds is never given.
        indices = np.empty(min(wanted, self._length), np.int64)
        indices = indices[: _core.sampler_next(self._handle, tensor(indices))]
        self._last = len(indices)
        return indices

    def valid(self) -> npt.NDArray[np.bool_]:
        """Which samples of the last batch are not padding.

        Where the samples do not divide by the ranks, the last step of an epoch is filled up with samples that some rank
        has taken already. Metrics leave them out: ``metric.update(scores, labels, valid=sampler.valid())``.

        Returns
        -------
        ndarray of bool, shape (count,)
            As long as the last batch; empty before the first.
        """
        valid = np.empty(self._last, np.uint8)
        _core.sampler_valid(self._handle, tensor(valid))
        return valid.view(np.bool_)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0. Setting it moves to the beginning of that epoch."""
        return _core.sampler_position(self._handle)[0]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        _core.sampler_set_epoch(self._handle, epoch)

    @property
    def position(self) -> int:
        """How many samples of the epoch all ranks together have consumed."""
        return _core.sampler_position(self._handle)[1]

    def close(self) -> None:
        """Free the sampler."""
        _core.sampler_destroy(self._handle)
