"""Checkpoints: `Saver` writes them under a root directory, `Checkpoint` opens a committed one for reading."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from . import _core
from ._base import Closable, Timeout, checked, milliseconds
from ._lazy import load_with_lazy_state
from .comm import Comm
from .errors import InvalidArgument, Named, NotFound
from .state import State
from .storage import Storage, in_library
from .tensor import DType, has_other_bits, tensor
from .values import decode
from .work import Save

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Cast", "Checkpoint", "LoadReport", "Phase", "Saver", "TensorInfo"]


class Phase(Named):
    """The phase that a progress callback reports."""

    STAGE = 1
    """`Saver.save_async` copies the state before it returns."""
    WRITE = 2
    """This rank writes its files."""
    COMMIT = 3
    """All ranks have written. Reported on rank 0 only, without bytes."""
    READ = 4
    """A checkpoint is being loaded."""
    VERIFY = 5
    """A checkpoint is being verified."""


ProgressFn = Callable[[Phase, int, int], object]
"""Called with the phase and the bytes done and in total on this rank (0 if there is nothing to count), at the beginning
and the end of a phase and about ten times a second in between. The bytes done equal the total only at the end; a phase
that fails has no end. An exception does not stop the operation, because other ranks depend on it: it is raised when the
call ends, or, for a save in the background, by the saver's next call."""

_WHEN_BUSY = {"wait": 0, "refuse": 1, "replace": 2}


class _Progress:
    """A user's callback and the first exception it raised; the callback is not called again until `settle`."""

    def __init__(self, progress: ProgressFn) -> None:
        if not callable(progress):
            raise TypeError(f"progress is {progress!r}; it must be callable")
        self._tell = progress
        self._caught: BaseException | None = None

    def __call__(self, phase: int, done: int, total: int) -> None:
        if self._caught is not None:
            return
        try:
            self._tell(Phase(phase), done, total)
        except KeyboardInterrupt:
            raise  # ends the wait, as it does without a callback
        except BaseException as error:
            self._caught = error

    def settle(self) -> None:
        caught, self._caught = self._caught, None
        if caught is not None:
            raise caught


def watch_progress(progress: ProgressFn | None) -> _Progress | None:
    return None if progress is None else _Progress(progress)


def settle_progress(progress: _Progress | None) -> None:
    if progress is not None:
        progress.settle()


class Saver(Closable):
    """Saves checkpoints under a root directory. Creating one is collective, as are its other calls.

    A checkpoint exists once its manifest does. The manifest is written last, so a failure before that leaves the
    previous checkpoint intact. The interpreter waits for saves in flight before it exits. Only one live job may own a
    root at a time. The checkpoints kept under the root are the union of `keep_latest`, `keep_best` and `keep_every`;
    the newest, the best and any that are open for reading are always kept.

    Parameters
    ----------
    comm : Comm or None
        The ranks that save together; None for this process alone.
    root : path
        Directory, the same on every rank; created if absent.
    keep_latest : int, default 0
        How many of the newest checkpoints to keep; 0 keeps all, whatever the other options.
    timeout : float or timedelta, default 600
        Deadline of the ranks' votes, in seconds. ``TESSERA_TIMEOUT_MS`` in the environment overrides the default.
    format : str, default "tessera"
        ``"tessera"``, or ``"torch_dcp"``, which an unmodified PyTorch loads with ``torch.distributed.checkpoint``.
    best_metric : str, optional
        The metric of rank 0 by which saves are compared: ``Checkpoint(root / "best")`` opens the best of them.
    best_is_higher : bool, default False
        Whether higher values are better, as for an accuracy, or lower ones, as for a loss.
    keep_best : int, default 0
        How many of the best to keep. Needs `best_metric` and `keep_latest`.
    keep_every : int, default 0
        Keep steps that are multiples of this forever; 0 keeps none. Needs `keep_latest`.
    when_busy : str, default "wait"
        What `save_async` does while another save is in flight: ``"wait"`` for it, ``"refuse"`` with `NotReady`, or
        ``"replace"``: queue behind it, replacing a queued save that has not begun, which becomes `Aborted`.
    low_priority : bool, default False
        Saves in the background yield CPU and disk to the trainer.
    copy_on_demand : bool, default False
        Copy the parameters and moments of the state's optimizers after `save_async` has returned: in the saver's
        threads, or just before the optimizer's next step, its close or a load into the state needs the memory. From
        the call to the end of that step, or until `Save.staged` is done, nothing else may write to this memory: not
        the trainer, not a load of another state and not a collective. If the state is larger than `staging_bytes` or
        the free memory, everything is copied at once.
    check_replicas : bool, default False
        Compare the tensors, shards and values that several ranks hold byte by byte (-0.0 differs from 0.0) when saving,
        and raise a `Mismatch` that names the first difference and the ranks. Each rank then reads all replicated data.
        Must be the same on every rank. Without it, several ranks write parts of large replicas, which must be equal,
        and values are rank 0's.
    staging_bytes : int, default 0
        Limit of the memory for copies of the state on this rank, at least 8 MiB; 0 allows what is needed. If the state
        is larger than this, or than this rank's share of the free memory, `save_async` writes a part before it returns.
    write_bytes_per_s : int, default 0
        Limit of this rank's write rate; 0 for no limit.
    progress : callable, optional
        Called with a `Phase` and the bytes done and in total on this rank, a few times a second; for a save in the
        background on a thread of the library. An exception does not stop the save: it is raised when the call ends,
        or, for a save in the background, by the saver's next call.
    storage : Storage, optional
        Where `root` is a key: an object store or another storage from `tessera.storage`.

    Raises
    ------
    InvalidState
        Another live job saves here. The message names its host and pid, and, if it cannot be seen, when its lease
        expires.
    """

    _handle: _core.Saver
    _warns = True

    def __init__(
        self,
        comm: Comm | None,
        root: str | os.PathLike[str],
        *,
        keep_latest: int | None = None,
        timeout: Timeout = None,
        format: str | None = None,
        best_metric: str | None = None,
        best_is_higher: bool | None = None,
        keep_best: int | None = None,
        keep_every: int | None = None,
        when_busy: Literal["wait", "refuse", "replace"] | None = None,
        low_priority: bool | None = None,
        copy_on_demand: bool | None = None,
        check_replicas: bool | None = None,
        staging_bytes: int | None = None,
        write_bytes_per_s: int | None = None,
        progress: ProgressFn | None = None,
        storage: Storage | None = None,
    ) -> None:
        handle = None if comm is None else checked(comm, Comm, "comm", root)._handle
        try:
            if when_busy is not None and when_busy not in _WHEN_BUSY:
                raise InvalidArgument(f"when_busy is {when_busy!r}; it must be 'wait', 'refuse' or 'replace'")
            self._progress = watch_progress(progress)
            self._root, self._storage = os.fsdecode(root), storage
            timeout_ms = milliseconds(timeout)
        except Exception as error:
            if comm is not None:
                comm.refuse("comm", error)
            raise
        with contextlib.ExitStack() as stack:
            try:
                place = stack.enter_context(in_library(storage))
            except Exception as error:
                if comm is not None:
                    comm.refuse("comm", error)
                raise
            self._handle = _core.saver_create(
                handle,
                self._root,
                keep_latest=keep_latest,
                format=format,
                best_metric=best_metric,
                best_is_higher=best_is_higher,
                keep_best=keep_best,
                keep_every=keep_every,
                when_busy=None if when_busy is None else _WHEN_BUSY[when_busy],
                low_priority=low_priority,
                copy_on_demand=copy_on_demand,
                check_replicas=check_replicas,
                staging_bytes=staging_bytes,
                write_bytes_per_s=write_bytes_per_s,
                progress=self._progress,
                timeout_ms=timeout_ms,
                writer="python",
                writer_version=platform.python_version(),
                storage=place,
            )
        if comm is not None:
            comm._own(self)

    @property
    def root(self) -> str:
        """The root directory."""
        return self._root

    def save(self, step: int, state: State, *, metrics: Mapping[str, float] | None = None) -> None:
        """Save, and return when the checkpoint is durable and committed on every rank.

        Parameters
        ----------
        step : int
            Steps completed, the same on every rank.
        state : State
            The same names, dtypes, shapes and layouts on every rank.
        metrics : mapping of str to float, optional
            Metrics of this save, shown by ``tessera ckpt ls``. `best_metric` on rank 0 decides which save is the best.

        Raises
        ------
        Mismatch
            The ranks' states or steps differ, or, with `check_replicas`, their replicas.
        TesseraIOError, TesseraTimeout, PeerLost, CommitUnknown
            The save failed. All ranks get the same error, and the previous checkpoint is untouched.
        """
        handle, _ = checked(state, State, "state", step)._prepare(metrics)
        _core.saver_save(self._handle, step, handle)
        settle_progress(self._progress)

    def save_async(self, step: int, state: State, *, metrics: Mapping[str, float] | None = None) -> Save:
        """Copy the state, return, and save the copy in the background.

        `when_busy` decides what happens while another save is in flight. If an earlier save failed and no call on the
        saver has raised its error yet, this call raises it and saves nothing. Waiting for the earlier save's `Save`
        does not count, so that all ranks do the same.

        Parameters
        ----------
        step, state, metrics
            As for `save`. When this returns, training may continue, with `copy_on_demand` through the optimizer's step.

        Returns
        -------
        Save
            Done when the checkpoint is committed; its `staged` is done when the whole state is copied. May be dropped:
            `wait` raises the error too.

        Raises
        ------
        NotReady
            A save is in flight, and `when_busy` is ``"refuse"``.
        """
        handle, _ = checked(state, State, "state", step)._prepare(metrics)
        work = Save(_core.saver_save_async(self._handle, step, handle))
        settle_progress(self._progress)
        return work

    def wait(self) -> None:
        """Wait for the saves in flight, if any, and raise the first error, once. Not collective."""
        _core.saver_wait(self._handle)
        settle_progress(self._progress)

    def should_stop(self, step: int, told: bool = False) -> bool:
        """Whether all ranks should save now and stop. Call it on every rank at each step.

        Once one rank was asked to stop, by the launcher (`preempt_requested`) or by `told`, all ranks get True at the
        same step and from then on. Costs one small all-reduce.

        Parameters
        ----------
        step : int
            The same on every rank.
        told : bool
            Whether this rank was asked to stop by something other than the launcher.

        Raises
        ------
        Mismatch
            The ranks are at different steps.

        Examples
        --------
        >>> stop = saver.should_stop(step)  # doctest: +SKIP
        >>> if stop or step % 50 == 0:  # doctest: +SKIP
        ...     saver.save_async(step, state)
        """
        return _core.saver_should_stop(self._handle, step, told)

    def trim(self) -> None:
        """Free the staging memory that no save in flight uses. It is kept between saves because new memory is slow."""
        _core.saver_trim(self._handle)

    def resume(self, state: State) -> int:
        """Load the newest committed checkpoint into `state`, in place and strictly.

        Parameters
        ----------
        state : State
            Unchanged if there is no checkpoint.

        Returns
        -------
        int
            The step it was saved at, which is where to continue; 0 without a checkpoint.

        Raises
        ------
        Mismatch
            Names, dtypes or shapes differ; the message lists all differences.
        Corrupt
            A checksum is wrong; the message names the file and offset.
        """

        def load() -> int:
            handle, take_over = state._prepare()
            before = _core.saver_resume(self._handle, handle)
            take_over()
            return before

        def saved() -> list[str]:
            with Checkpoint(self._root, storage=self._storage) as newest:
                return newest._names()

        before = load_with_lazy_state(checked(state, State, "state"), load, saved)
        settle_progress(self._progress)
        return before

    def _finish(self) -> None:
        self.wait()

    def close(self) -> None:
        """Wait for the save in flight and free the saver. Call `wait` first to learn whether the save succeeded."""
        _core.saver_destroy(self._handle)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait for the save in flight, raise its error unless another exception is being raised, and close."""
        try:
            if error is None and not self.closed:
                self.wait()
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"<tessera.Saver at {self._root!r}{' (closed)' if self.closed else ''}>"


class Cast(NamedTuple):
    """A tensor that a load converted."""

    name: str
    saved: DType
    here: DType


@dataclass(frozen=True)
class LoadReport:
    """How a load deviated from a strict one, by names of the state, and whether the data was verified."""

    missing: tuple[str, ...]
    """In the state but not in the checkpoint (``allow_missing``); left unchanged."""
    unexpected: tuple[str, ...]
    """In the checkpoint but not in the state (``allow_unexpected``)."""
    cast: tuple[Cast, ...]
    """Converted from another dtype (``allow_cast``)."""
    left_alone: tuple[str, ...]
    """In the state but not loaded, because ``only`` does not match them."""
    verified: bool
    """Whether all tensor data matched its checksums: False with ``verify=False`` and for formats without checksums,
    such as safetensors written by others."""

    @classmethod
    def _of(cls, told: dict[str, Any]) -> LoadReport:
        casts = (Cast(one["name"], DType[one["from"].upper()], DType[one["to"].upper()]) for one in told["cast"])
        missing, unexpected, left_alone = (tuple(told[kind]) for kind in ("missing", "unexpected", "left_alone"))
        return cls(missing, unexpected, tuple(casts), left_alone, told["verified"])


class TensorInfo(NamedTuple):
    """The description of a tensor in a checkpoint, without its data."""

    dtype: DType
    shape: tuple[int, ...]


TORCH_RECORD = "rank/0/torch"
"""The value that `tessera.torch.checkpoint` reserves for itself."""


def _is_torch_record(name: str, value: Any) -> bool:
    return name == TORCH_RECORD and isinstance(value, dict) and value.keys() >= {"version", "paths", "pickles"}


def _renamed(name: str, rules: Mapping[str, str]) -> str:
    for saved, here in rules.items():
        is_begin = saved == "" or saved.endswith(".")
        if name.startswith(saved) if is_begin else name == saved:
            return here + name[len(saved) :]
    return name


class Checkpoint(Closable, Mapping[str, "npt.NDArray[Any]"]):
    """A committed checkpoint, saved by any world size, layout and language. Opening one needs no job.

    A mapping from names to complete tensors, which are read on access.

    Parameters
    ----------
    path : path
        The directory of a checkpoint, or a root, which opens its newest checkpoint; ``root/best`` opens the best by the
        saver's `best_metric`. No saver removes it while it is open.
        Or a checkpoint of PyTorch's: the directory of a ``torch.distributed.checkpoint``, or a file of ``torch.save``
        (or the directory of a ``model.pt``). No pickle is executed, and PyTorch is not needed.
        Or safetensors in the layout of Hugging Face: a file, an index, or a directory of them.
        Or a checkpoint of DeepSpeed's engine: the directory of a tag, or the one above it with its ``latest``.
    storage : Storage, optional
        Where `path` is a key.

    Raises
    ------
    NotFound
        There is no manifest: this is not a committed checkpoint.
    Corrupt, VersionMismatch
        The manifest is damaged or has a newer format.

    Examples
    --------
    >>> with ts.Checkpoint("checkpoints") as checkpoint:  # doctest: +SKIP
    ...     weight = checkpoint["model.fc1.weight"]
    """

    _handle: _core.Checkpoint

    def __init__(self, path: str | os.PathLike[str], *, storage: Storage | None = None) -> None:
        if storage is None:
            self._handle = _core.checkpoint_open(os.fsdecode(path))
            return
        with in_library(storage) as place:
            self._handle = _core.checkpoint_open_with(os.fsdecode(path), storage=place)

    def __repr__(self) -> str:
        return (
            "<tessera.Checkpoint (closed)>" if self.closed else f"<tessera.Checkpoint {self.path!r}, step {self.step}>"
        )

    @property
    def path(self) -> str:
        """The directory that was opened."""
        return _core.checkpoint_path(self._handle)

    @property
    def step(self) -> int:
        """The step it was saved at; -1 for formats that do not record it: PyTorch's and safetensors."""
        return _core.checkpoint_step(self._handle)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest, as docs/manifest.schema.json describes it."""
        return dict(json.loads(_core.checkpoint_manifest(self._handle)))

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Dtype and global shape of each tensor, in order of names."""
        found = {}
        for index in range(_core.checkpoint_tensor_count(self._handle)):
            name, dtype, shape = _core.checkpoint_tensor(self._handle, index)
            found[name] = TensorInfo(DType(dtype), shape)
        return found

    @property
    def saved_values(self) -> dict[str, Any]:
        """The plain values, as Python values, by name."""
        values = self.manifest.get("values", {})
        return {name: decode(json.dumps(value)) for name, value in values.items() if not _is_torch_record(name, value)}

    @property
    def unreadable(self) -> dict[str, str]:
        """The parts of a PyTorch checkpoint that cannot be read (other dtypes, pickled classes): name to reason."""
        return dict(self.manifest.get("unreadable", {}))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the save."""
        return {name: decode(json.dumps(value)) for name, value in self.manifest.get("metrics", {}).items()}

    def _names(self, rename: Mapping[str, str] | None = None) -> list[str]:
        """The names of the tensors and values, as a state has them."""
        names = [*self.tensors, *self.manifest.get("values", {})]
        return [_renamed(name, rename) for name in names] if rename else names

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Read a complete tensor into a new array and verify its checksums."""
        info = self.tensors.get(name)
        if info is None:
            raise NotFound(f"{self.path} has no tensor {name!r}; known: {', '.join(self.tensors) or 'none'}")
        array: npt.NDArray[Any] = np.empty(info.shape, info.dtype.numpy)
        self.read(name, array)
        return array

    def read(self, name: str, out: Any) -> None:
        """Read a complete tensor into an existing array.

        Parameters
        ----------
        name : str
            The tensor's name.
        out : array
            Contiguous, with the tensor's dtype and shape.
        """
        info = self.tensors.get(name)
        of_bits = info.dtype if info is not None and has_other_bits(info.dtype) else None
        _core.checkpoint_read(self._handle, name, tensor(out, of_bits))

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def load(
        self,
        state: State,
        *,
        verify: bool | None = None,
        allow_missing: bool | None = None,
        allow_unexpected: bool | None = None,
        allow_cast: bool | None = None,
        progress: ProgressFn | None = None,
        comm: Comm | None = None,
        only: Iterable[str] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> LoadReport:
        """Load this rank's part into `state`, in place.

        Without a `comm` there is no communication. With one the call is collective: every rank has opened the same
        checkpoint and uses the same `verify`; states, layouts, names and allowances may differ. Ranks of a host then
        read data that several of them need once (from 8 MiB on) and share it through shared memory. All ranks get the
        same error.

        Parameters
        ----------
        state : State
            Any layout and world size.
        verify : bool, default True
            Verify the checksum of every block that is read.
        allow_missing : bool, default False
            Leave names of the state that the checkpoint lacks unchanged.
        allow_unexpected : bool, default False
            Skip names of the checkpoint that the state lacks.
        allow_cast : bool, default False
            Convert floating-point tensors of another dtype.
        progress : callable, optional
            As for `Saver`; called on this thread with `Phase.READ`.
        comm : Comm, optional
            The ranks that load together; without it each loads on its own. Its timeout is the deadline of each wait.
        only : iterable of str, optional
            Names of the state to load, or patterns: ``*`` matches any characters including dots, ``?`` matches one,
            ``[a-c]`` and ``[!a-c]`` match one of a set. All other names, of the state and of the checkpoint, are
            ignored: neither loaded nor missing nor unexpected. None, the default, loads all names.
        rename : mapping of str to str, optional
            Maps names of the checkpoint to names of the state. A key that ends with ``.`` or is empty replaces a
            prefix. The first rule that matches applies. For a `PerRank`, the name is the one without ``rank/<r>/``.

        Returns
        -------
        LoadReport
            How the load deviated from a strict one.

        Raises
        ------
        Mismatch
            The message lists all differences and the patterns of `only` that match nothing; nothing was loaded. With a
            `comm` also: the ranks load different checkpoints, or one makes a different call.
        InvalidArgument
            `only` is empty, or `rename` maps two names to the same one; the message names them.
        TesseraTimeout
            A rank of `comm` did not arrive; the message names it.
        """
        watched = watch_progress(progress)
        ranks = None if comm is None else checked(comm, Comm, "comm")._handle
        if isinstance(only, str):
            raise TypeError(f"only is the str {only!r}; it must be a list of patterns")
        patterns = None if only is None else list(only)

        def load() -> LoadReport:
            reports: list[str] = []
            handle, take_over = state._prepare()
            _core.checkpoint_load(
                self._handle,
                handle,
                verify=verify,
                allow_missing=allow_missing,
                allow_unexpected=allow_unexpected,
                allow_cast=allow_cast,
                progress=watched,
                comm=ranks,
                only=patterns,
                rename=None if rename is None else dict(rename),
                report=reports.append,
            )
            report = LoadReport._of(json.loads(reports[0]))
            take_over(frozenset(report.left_alone))
            return report

        report = load_with_lazy_state(checked(state, State, "state"), load, lambda: self._names(rename))
        settle_progress(watched)
        return report

    def verify(self, *, full: bool = True, progress: ProgressFn | None = None) -> None:
        """Check the checkpoint without loading it.

        Parameters
        ----------
        full : bool
            Read every byte; if False, only sizes and headers.
        progress : callable, optional
            As for `Saver`; called on this thread with `Phase.VERIFY`.

        Raises
        ------
        Corrupt
            The message names file and offset; ``__cause__`` leads to further faults.
        """
        if progress is None:
            _core.checkpoint_verify(self._handle, full)
        else:
            watched = _Progress(progress)
            _core.checkpoint_verify_progress(self._handle, full, watched)
            watched.settle()

    def export(
        self,
        directory: str | os.PathLike[str],
        comm: Comm | None = None,
        *,
        format: str | None = None,
        max_file_bytes: int | None = None,
        under: str | None = None,
        timeout: Timeout = None,
        progress: ProgressFn | None = None,
    ) -> None:
        """Write the tensors into a new directory in another format, in bounded memory.

        With a `comm` the call is collective: every rank has opened the same checkpoint, and all of them write. Parts
        that are `unreadable` are skipped, with a warning in the log.

        Parameters
        ----------
        directory : path
            Must not exist; the same on every rank, on a shared file system. It appears once everything is durable.
        comm : Comm, optional
            The ranks that write; without it this process alone.
        format : str, default "safetensors"
            ``"safetensors"``: complete tensors in the layout of Hugging Face; ``"torch_dcp"``, for
            `torch.distributed.checkpoint`; ``"torch_save"``, one file ``model.pt`` for `torch.load`; or ``"npz"``, one
            file ``model.npz`` for `numpy.load`.
        max_file_bytes : int, default 0
            For safetensors: split into files of about this size, with an index; 0 writes one file.
        under : str, optional
            Export only names with this prefix (``"model."``), and strip it.
        timeout : float or timedelta, default 600
            Deadline of each wait for the other ranks, in seconds. ``TESSERA_TIMEOUT_MS`` in the environment overrides
            the default.
        progress : callable, optional
            As for `Saver`; called on this thread with `Phase.WRITE`.
        """
        watched = watch_progress(progress)
        handle = None if comm is None else checked(comm, Comm, "comm", directory)._handle
        _core.checkpoint_export(
            self._handle,
            handle,
            os.fsdecode(directory),
            format=format,
            max_file_bytes=max_file_bytes,
            under=under,
            timeout_ms=milliseconds(timeout),
            progress=watched,
        )
        settle_progress(watched)

    def close(self) -> None:
        """Close the checkpoint."""
        _core.checkpoint_destroy(self._handle)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other
