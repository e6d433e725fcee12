"""Checkpoints: the `Saver` that writes them under one root, and the committed `Checkpoint` opened to read."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from . import _core
from ._base import Closable, Timeout, checked, milliseconds
from ._lazy import load_with_lazy_state
from .comm import Comm
from .errors import InvalidArgument, NotFound
from .state import State
from .storage import Storage, in_library
from .tensor import DType, has_other_bits, tensor
from .values import decode
from .work import Save

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Cast", "Checkpoint", "LoadReport", "Phase", "Saver", "TensorInfo"]


class Phase(IntEnum):
    """What a progress callback is told of."""

    STAGE = 1
    """What `Saver.save_async` copies before it returns."""
    WRITE = 2
    """This rank's files are written."""
    COMMIT = 3
    """All ranks have written; of rank 0 alone, without bytes."""
    READ = 4
    """A checkpoint is loaded."""
    VERIFY = 5
    """A checkpoint is checked."""


ProgressFn = Callable[[Phase, int, int], object]
"""Takes the phase, and bytes done and in total on this rank (0 if there is nothing to count): at the begin and the end
of a phase, and about ten times a second between. All is done at the end alone; a phase that fails has none. What it
raises ends nothing, since the other ranks count on the save: it is raised when the call is over, of a save in the
background by the saver's next call."""

_WHEN_BUSY = {"wait": 0, "refuse": 1, "replace": 2}


class _Progress:
    """A user's callback, and what it raised first; until that is settled the callback is left alone."""

    def __init__(self, progress: ProgressFn) -> None:
        if not callable(progress):
            raise TypeError(f"progress is {progress!r}; a callable is wanted")
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
    """Saves under one root directory. Collective, as its other calls are.

    A checkpoint exists once its manifest does, which is written last: whatever fails or dies before leaves the former
    one as it was. An interpreter that ends waits for saves in flight. One live job at a time may own a root. What stays
    under the root is the union of `keep_latest`, `keep_best` and `keep_every`; the newest save, the best one and what
    is open for reading always stay.

    Parameters
    ----------
    comm : Comm or None
        The ranks that save together; None: this process alone.
    root : path
        Directory, the same on every rank; created if absent.
    keep_latest : int, default 0
        How many of the newest checkpoints to keep; 0 keeps all, whatever else is said.
    timeout : float or timedelta, default 600
        Deadline of the ranks' votes, in seconds. ``TESSERA_TIMEOUT_MS`` in the environment is another default.
    format : str, default "tessera"
        ``"tessera"``, or ``"torch_dcp"``: an unmodified PyTorch loads a save's directory by
        ``torch.distributed.checkpoint``.
    best_metric : str, optional
        The metric of rank 0's saves by which they are compared: ``Checkpoint(root / "best")`` opens the best of them.
    best_is_higher : bool, default False
        Higher is better, as of an accuracy; else lower, as of a loss.
    keep_best : int, default 0
        How many of the best to keep. Needs `best_metric` and `keep_latest`.
    keep_every : int, default 0
        Keep for ever the steps that are multiples of it; 0: none. Needs `keep_latest`.
    when_busy : str, default "wait"
        What `save_async` does while another save is in flight: ``"wait"`` for it, ``"refuse"`` with
        `NotReady`, or ``"replace"``: queue behind it, in the place of a save that has not begun and is `Aborted`.
    low_priority : bool, default False
        Saves in the background yield CPU and disk to the trainer.
    copy_on_demand : bool, default False
        What an optimizer of the state updates, its parameters and moments, is copied after `save_async` has returned:
        by the saver's threads, or just before the optimizer's next step, its close or a load into the state needs the
        memory. Nobody else may write there from the call to the end of that step, or until `Save.staged` is done:
        neither the trainer, nor a load of another state or a collective into the same memory. If the state is larger
        than `staging_bytes`, or than what is free, all is copied at once.
    check_replicas : bool, default False
        A save compares what several ranks hold, tensors, shards and values, byte by byte (-0.0 is not 0.0), and raises
        `Mismatch`, which names the first that differs and the ranks. The same on every rank. Each rank reads all that
        is replicated. Else large replicas are written in parts by several ranks, and have to be equal; values are
        rank 0's.
    staging_bytes : int, default 0
        Bound of the memory for copies of the state on this rank, at least 8 MiB; 0: what it needs. For a larger state,
        or one larger than this rank's share of the memory that is free, `save_async` writes a part before it returns.
    write_bytes_per_s : int, default 0
        Limit of this rank's writing; 0: none.
    progress : callable, optional
        Called with a `Phase`, and bytes done and in total on this rank, a few times a second; of a save in the
        background on the library's thread. What it raises ends nothing: it is raised when the call is over, of a save
        in the background by the next call of the saver.
    storage : Storage, optional
        Where the root is a key: an object store, or whatever else `tessera.storage` makes of one.

    Raises
    ------
    InvalidState
        Another live job saves here; its host and pid are named, and when its lease lapses if it cannot be seen.
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
        if when_busy is not None and when_busy not in _WHEN_BUSY:
            raise InvalidArgument(f"when_busy is {when_busy!r}; it is 'wait', 'refuse' or 'replace'")
        self._progress = watch_progress(progress)
        handle = None if comm is None else checked(comm, Comm, "comm", root)._handle
        self._root, self._storage = os.fsdecode(root), storage
        with in_library(storage) as place:
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
                timeout_ms=milliseconds(timeout),
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
            Of this save alone. Shown by ``tessera ckpt ls``; rank 0's `best_metric` says which save is the best.

        Raises
        ------
        Mismatch
            The ranks' states or steps differ, or, with `check_replicas`, what they hold of the same.
        TesseraIOError, TesseraTimeout, PeerLost, CommitUnknown
            The save failed; all ranks get the same error, and the former checkpoint is untouched.
        """
        handle, _ = checked(state, State, "state", step)._prepare(metrics)
        _core.saver_save(self._handle, step, handle)
        settle_progress(self._progress)

    def save_async(self, step: int, state: State, *, metrics: Mapping[str, float] | None = None) -> Save:
        """Copy the state, return, and save the copy in the background.

        What happens while another save is in flight `when_busy` says. The error of an earlier save that no
        call on the saver has raised yet is raised here, and then nothing is saved; that its work was waited for does
        not count, so that all ranks do the same.

        Parameters
        ----------
        step, state, metrics
            As `save` takes them; when this returns training may go on, with `copy_on_demand` by the optimizer's step.

        Returns
        -------
        Save
            Done when the checkpoint is committed; its `staged`, when nothing of the state is left to copy. May be
            dropped: `wait` raises the error too.

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
        """Wait for the saves in flight, if there are any; raises the first error, once. Not collective."""
        _core.saver_wait(self._handle)
        settle_progress(self._progress)

    def should_stop(self, step: int, told: bool = False) -> bool:
        """Whether all ranks shall save now and stop. Call it on every rank at each step.

        As soon as one rank was told to stop, by the launcher (`preempt_requested`) or by `told`, all get True at the
        same step, and from then on. It costs one small all-reduce.

        Parameters
        ----------
        step : int
            The same on every rank.
        told : bool
            This rank was told to stop in another way than by the launcher.

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
        """Free the staging memory that no save in flight uses. It is kept from save to save: fresh memory is slow."""
        _core.saver_trim(self._handle)

    def resume(self, state: State) -> int:
        """Load the newest committed checkpoint into `state`, in place and strictly.

        Parameters
        ----------
        state : State
            Nothing of it changes if there is no checkpoint.

        Returns
        -------
        int
            The step it was saved at: where to go on. 0 without a checkpoint.

        Raises
        ------
        Mismatch
            Names, dtypes or shapes differ; all differences are listed.
        Corrupt
            A checksum is wrong; file and offset are named.
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
        """Free the saver; a save in flight is waited for. Call `wait` before to learn whether it went well."""
        _core.saver_destroy(self._handle)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Wait for the save in flight, raising its error unless another one is under way, and close."""
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
    """What a load did beyond what is strict, by names of the state, and whether it was verified."""

    missing: tuple[str, ...]
    """Of the state, not in the checkpoint (``allow_missing``); they are as they were."""
    unexpected: tuple[str, ...]
    """Of the checkpoint, not in the state (``allow_unexpected``)."""
    cast: tuple[Cast, ...]
    """Converted from another dtype (``allow_cast``)."""
    left_alone: tuple[str, ...]
    """Of the state, not loaded since ``only`` does not have them."""
    verified: bool
    """Whether checksums have shown that all data of tensors is sound: not with ``verify=False``, and not of formats
    that have none, such as safetensors of others."""

    @classmethod
    def _of(cls, told: dict[str, Any]) -> LoadReport:
        casts = (Cast(one["name"], DType[one["from"].upper()], DType[one["to"].upper()]) for one in told["cast"])
        missing, unexpected, left_alone = (tuple(told[kind]) for kind in ("missing", "unexpected", "left_alone"))
        return cls(missing, unexpected, tuple(casts), left_alone, told["verified"])


class TensorInfo(NamedTuple):
    """What a checkpoint tells of a tensor without reading it."""

    dtype: DType
    shape: tuple[int, ...]


TORCH_RECORD = "rank/0/torch"
"""The value that `tessera.torch.checkpoint` keeps for itself."""


def _is_torch_record(name: str, value: Any) -> bool:
    return name == TORCH_RECORD and isinstance(value, dict) and value.keys() >= {"version", "paths", "pickles"}


def _renamed(name: str, rules: Mapping[str, str]) -> str:
    for saved, here in rules.items():
        is_begin = saved == "" or saved.endswith(".")
        if name.startswith(saved) if is_begin else name == saved:
            return here + name[len(saved) :]
    return name


class Checkpoint(Closable, Mapping[str, "npt.NDArray[Any]"]):
    """A committed checkpoint, from whatever world size, layout and language; no job is needed.

    A mapping from names to whole tensors, which are read when they are asked for.

    Parameters
    ----------
    path : path
        The directory of a checkpoint, or a root: then its newest; ``root/best``: the best by the saver's `best_metric`.
        While it is open no saver removes it. Or what PyTorch wrote: the directory of a
        ``torch.distributed.checkpoint``, or a file of ``torch.save`` (or the directory of a ``model.pt``); no pickle is
        executed, and PyTorch is not needed.
        Or safetensors as Hugging Face lays them out: a file, an index, or a directory of them.
    storage : Storage, optional
        Where the path is a key.

    Raises
    ------
    NotFound
        There is no manifest: not a committed checkpoint.
    Corrupt, VersionMismatch
        The manifest is damaged, or of a newer format.

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
        """The step that it was saved at; -1 of the formats that do not tell: PyTorch's and safetensors."""
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
        """What of a PyTorch checkpoint is not read (other dtypes, pickled classes), by name, and why."""
        return dict(self.manifest.get("unreadable", {}))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the save."""
        return {name: decode(json.dumps(value)) for name, value in self.manifest.get("metrics", {}).items()}

    def _names(self, rename: Mapping[str, str] | None = None) -> list[str]:
        """What a state calls its tensors and values."""
        names = [*self.tensors, *self.manifest.get("values", {})]
        return [_renamed(name, rename) for name in names] if rename else names

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Read one whole tensor into a new array; its checksums are checked."""
        info = self.tensors.get(name)
        if info is None:
            raise NotFound(f"{self.path} has no tensor {name!r}; it has {', '.join(self.tensors) or 'none'}")
        array: npt.NDArray[Any] = np.empty(info.shape, info.dtype.numpy)
        self.read(name, array)
        return array

    def read(self, name: str, out: Any) -> None:
        """Read one whole tensor into an array that is there.

        Parameters
        ----------
        name : str
            Of the tensor.
        out : array
            Contiguous, of the tensor's dtype and shape.
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

        Without a `comm` it makes no communication. With one it is collective: every rank of it has opened the same
        checkpoint and loads it alike verified; states, layouts, names and what is allowed may differ. Ranks of one host
        then read each byte that several of them want once (from 8 MiB on), and hand it on
        through shared memory. All ranks get the same error.

        Parameters
        ----------
        state : State
            Any layout and world size.
        verify : bool, default True
            Check the checksum of every block that is read.
        allow_missing : bool, default False
            Leave alone what the checkpoint lacks.
        allow_unexpected : bool, default False
            Leave out what the state lacks.
        allow_cast : bool, default False
            Convert floating-point tensors of another dtype.
        progress : callable, optional
            As of `Saver`; called on this thread with `Phase.READ`.
        comm : Comm, optional
            The ranks that load together; without it each loads for itself. Its timeout is the deadline of each wait.
        only : iterable of str, optional
            Names of the state that are loaded, or patterns of them: ``*`` is any characters, dots too, ``?`` one,
            ``[a-c]`` and ``[!a-c]`` one of a set. All other names, of the state and of the checkpoint, are left alone:
            neither loaded nor missing nor unexpected. None, the default: all names.
        rename : mapping of str to str, optional
            What names of the checkpoint are in the state; with a ``.`` at the end, or empty, what names begin with
            there and here. The first that fits counts. Of a `PerRank` it is about the name without ``rank/<r>/``.

        Returns
        -------
        LoadReport
            What was not as strict as it can be.

        Raises
        ------
        Mismatch
            All differences are listed, and patterns of `only` that nothing fits; nothing was loaded. With a `comm`
            also: the ranks load different checkpoints, or one calls something else.
        InvalidArgument
            `only` is empty, or `rename` makes one name of two, which are told.
        TesseraTimeout
            A rank of `comm` did not come; it is named.
        """
        watched = watch_progress(progress)
        ranks = None if comm is None else checked(comm, Comm, "comm")._handle
        if isinstance(only, str):
            raise TypeError(f"only is the str {only!r}; a list of patterns is wanted")
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
            Read every byte; else sizes and headers alone.
        progress : callable, optional
            As of `Saver`; called on this thread with `Phase.VERIFY`.

        Raises
        ------
        Corrupt
            File and offset are named; ``__cause__`` leads to further ones.
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

        With a `comm` it is collective: every rank has opened the same checkpoint, and all of them write. What is
        `unreadable` is left out, with a warning in the log.

        Parameters
        ----------
        directory : path
            Must not exist; the same on every rank, on a file system that all see. It appears when all is durable.
        comm : Comm, optional
            The ranks that write; without it this process alone.
        format : str, default "safetensors"
            Whole tensors as Hugging Face has them; ``"torch_dcp"``, what `torch.distributed.checkpoint` loads;
            ``"torch_save"``, what `torch.load` loads: one file ``model.pt``; or ``"npz"``, what `numpy.load` loads: one
            file ``model.npz``.
        max_file_bytes : int, default 0
            Of safetensors: cut into files of about this size, with an index; 0: one file.
        under : str, optional
            Only what has a name that begins so (``"model."``), and without it.
        timeout : float or timedelta, default 600
            Deadline of each wait for the other ranks, in seconds. ``TESSERA_TIMEOUT_MS`` in the environment is another
            default.
        progress : callable, optional
            As of `Saver`; called on this thread with `Phase.WRITE`.
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
