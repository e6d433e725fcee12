"""The loader of `initialize`'s training data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from .settings import Settings

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


class DeepSpeedDataLoader:
    """Micro-batches of this rank's samples. Each iteration is an epoch, in another order.

    The samples are shuffled, and filled up with some of them if the data-parallel ranks do not divide them, so that all
    ranks have equally many.
    """

    def __init__(self, dataset: Any, settings: Settings, group: Any, collate_fn: Any) -> None:
        self.dataset = dataset
        self.batch_size = settings.micro_batch
        self.data_sampler = DistributedSampler(
            dataset, num_replicas=dist.get_world_size(group), rank=dist.get_rank(group), shuffle=True
        )
        self.dataloader = DataLoader(
            dataset,
            batch_size=settings.micro_batch,
            sampler=self.data_sampler,
            collate_fn=collate_fn,
            drop_last=settings.drops_last,
        )
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        self.data_sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self.dataloader)


class RepeatingLoader:
    """An endless iterator over a loader: it begins again at the end."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
