"""A StorageWriter through which PyTorch's own `dcp.save` and `dcp.async_save` use Tessera's engine.

PyTorch plans; the ranks then connect through the plan (`Meeting`), and `write_data` is one save of the core: durable
and committed on all ranks, or on none.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
import weakref
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from ..._base import Timeout
from ...checkpoint import ProgressFn
from ...errors import InvalidArgument, InvalidState, Unsupported
from ..ranks import Meeting, Ranks, host_name, serve
from ..tensors import Copies
from .rows import rows_of
from .saves import FORMATS, Save, is_url, local_directory

__all__ = ["FileSystemWriter"]


class FileSystemWriter(StorageWriter, BlockingAsyncStager):
    """Writes checkpoints into directories, for `save` here and for PyTorch's.

    Parameters
    ----------
    path : path
        The checkpoint's directory; `checkpoint_id` of a save overrides it. A relative path is resolved against the
        working directory at construction, not when saving.
    single_file_per_rank, sync_files, thread_count, per_thread_copy_ahead
        Accepted for compatibility with PyTorch: the core always writes one file per rank, syncs it, and chooses its
        threads itself.
    cache_staged_state_dict : bool
        Reuse the buffers into which asynchronous saves copy (pinned if there is an accelerator). Requires reusing the
        writer.
    overwrite : bool
        Whether an existing checkpoint may be replaced; if not, a save raises `InvalidState`.
    cached_state_dict : bool, optional
        Another name for `cache_staged_state_dict`.
    serialization_format : torch.distributed.checkpoint.filesystem.SerializationFormat, optional
        PyTorch's default, TORCH_SAVE, has no effect; others are `Unsupported`. Use `format` instead.
    format : {"tessera", "torch_dcp"}
        Tessera's own format, or PyTorch's, which an unmodified PyTorch loads.
    step : int
        Steps completed, stored with the checkpoint and shown by `tessera ckpt ls`. A value of the state is not used.
    timeout : float or timedelta, optional
        Deadline of the ranks' votes, in seconds.
    progress, low_priority, write_bytes_per_s, check_replicas
        As for `tessera.Saver`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        *,
        cached_state_dict: bool | None = None,
        serialization_format: Any = None,
        format: str = "tessera",
        step: int = 0,
        timeout: Timeout = None,
        progress: ProgressFn | None = None,
        low_priority: bool = False,
        write_bytes_per_s: int | None = None,
        check_replicas: bool = False,
    ) -> None:
        if not sync_files:
            raise Unsupported("sync_files=False is not supported; Tessera checkpoints are durable when a save is done")
        if getattr(serialization_format, "value", None) not in (None, "torch_save"):
            raise Unsupported(
                f"serialization_format={serialization_format} is not supported; the format 'tessera' writes "
                "safetensors files"
            )
        if format not in FORMATS:
            raise InvalidArgument(f"format is {format!r}; it must be one of {', '.join(FORMATS)}")
        StorageWriter.__init__(self)
        BlockingAsyncStager.__init__(
            self, cache_staged_state_dict=cache_staged_state_dict if cached_state_dict is None else cached_state_dict
        )
        self.cache_staged_state_dict: bool
        self.state_dict_cache: dict[str, Any] | None
        self.path = local_directory(path)
        self.save_id = str(uuid.uuid4())
        self.format = format
        self.step = step
        self.overwrite = overwrite
        self.timeout = timeout
        self.progress = progress
        self.low_priority = low_priority
        self.write_bytes_per_s = write_bytes_per_s
        self.check_replicas = check_replicas
        self.copies = Copies() if self.cache_staged_state_dict else None
        self.reads_copies: Future[Metadata] | None = None  # the save in flight that uses them
        self._ranks: dict[str, Ranks] = {}  # by the job_id of their meeting; one at most
        self._meeting: tuple[Any, Meeting] | None = None  # of the coordinator: its server, and what it told the ranks

    def __getstate__(self) -> dict[str, Any]:
        """The state without what belongs to this process: an asynchronous save in another process connects again."""
        return {
            **self.__dict__,
            "_ranks": {},
            "_meeting": None,
            "state_dict_cache": None,
            "copies": None,
            "reads_copies": None,
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, into `checkpoint_id` if given."""
        self.save_id = str(uuid.uuid4())
        if checkpoint_id:
            self.path = local_directory(checkpoint_id)

    def saving(self, ranks: Ranks) -> Save:
        """A save with this writer's options."""
        return Save(
            ranks,
            self.path,
            save_id=self.save_id,
            format=self.format,
            step=self.step,
            overwrite=self.overwrite,
            timeout=self.timeout,
            progress=self.progress,
            low_priority=self.low_priority,
            write_bytes_per_s=self.write_bytes_per_s,
            check_replicas=self.check_replicas,
        )

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state on the CPU, for PyTorch's `async_save`; in reused memory if the state is cached."""
        if not self.cache_staged_state_dict or self.state_dict_cache is not None or torch.cuda.is_available():
            return dict(super().stage(state_dict))
        self.cache_staged_state_dict = False  # the first copy becomes the cache; PyTorch would pin it for a GPU
        try:
            cache = self.state_dict_cache = dict(super().stage(state_dict))
        finally:
            self.cache_staged_state_dict = True
        return cache

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by PyTorch before planning."""
        if not kwargs.get("use_collectives", True):
            raise Unsupported(
                "use_collectives=False is not supported; such checkpoints cannot be loaded by another number of ranks"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Tell the coordinator which host this rank is on."""
        return dataclasses.replace(plan, storage_data=host_name())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: tell the ranks where to meet."""
        hosts = [str(plan.storage_data) for plan in plans]
        if len(hosts) == 1:
            return [dataclasses.replace(plans[0], storage_data=None)]
        known = self._ranks.get(self._meeting[1].job_id) if self._meeting is not None else None
        if self._meeting is None or known is None or not known.usable or known.world_size != len(hosts):
            if self._meeting is not None and known is None:
                self._meeting[0].close()  # no rank arrived
            self._meeting = serve(hosts)
        meeting = self._meeting[1]
        return [dataclasses.replace(plan, storage_data=(rank, meeting)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Save: durable and committed on all ranks when it returns."""
        ranks = self._joined(plan.storage_data)
        self.saving(ranks).now(lambda: rows_of(plan, planner, None))
        results = [
            WriteResult(item.index, 0 if item.tensor_data is None else (item.tensor_storage_size() or 0), None)
            for item in plan.items
        ]
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done

    def _joined(self, place: tuple[int, Meeting] | None) -> Ranks:
        if place is None:
            return Ranks.alone()
        rank, meeting = place
        known = self._ranks.get(meeting.job_id)
        if known is not None and known.usable:
            return known
        if known is not None:
            raise InvalidState("the plan belongs to an earlier save; use the same FileSystemWriter for all its saves")
        for former in self._ranks.values():
            former.close()
        server = self._meeting[0] if self._meeting is not None and self._meeting[1] == meeting else None
        ranks = Ranks.meet(meeting, rank, server)
        self._ranks = {meeting.job_id: ranks}
        weakref.finalize(self, ranks.close)
        return ranks

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the metadata. The checkpoint is already committed."""
        metadata.version = "1.0.0"
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta | None:
        """The storage metadata for planners."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory of the save."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is a path, not a URL."""
        return not is_url(checkpoint_id)
