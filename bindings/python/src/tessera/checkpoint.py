"""Checkpoints: the `Saver` that writes them under one root, and the committed `Checkpoint` opened to read."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _core
from ._base import Closable, Timeout, checked, milliseconds
from .comm import Comm
from .errors import NotFound
from .state import State
from .tensor import DType, has_other_bits, tensor
from .values import decode
from .work import Work

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Checkpoint", "Saver", "TensorInfo"]


class Saver(Closable):
    """Saves under one root directory. Collective, as its other calls are.

    A checkpoint exists once its manifest does, which is written last: whatever fails or dies before leaves the former
    one as it was. One live job at a time may own a root.

    Parameters
    ----------
    comm : Comm or None
        The ranks that save together; None: this process alone.
    root : path
        Directory, the same on every rank; created if absent.
    keep_latest : int, optional
        How many of the newest checkpoints to keep; 0 keeps all.
    timeout : float or timedelta, optional
        Deadline of the ranks' votes, in seconds.
    format : str, optional
        ``"tessera"`` (the default), or ``"torch_dcp"``: an unmodified PyTorch loads a save's directory by
        ``torch.distributed.checkpoint``.

    Raises
    ------
    InvalidState
        Another live job saves here; its host and pid are named.
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
    ) -> None:
        handle = None if comm is None else checked(comm, Comm, "comm", root)._handle
        self._root = os.fsdecode(root)
        self._handle = _core.saver_create(
            handle,
            self._root,
            keep_latest=keep_latest,
            format=format,
            timeout_ms=milliseconds(timeout),
            writer="python",
            writer_version=platform.python_version(),
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
            Shown by ``tessera ckpt ls``.

        Raises
        ------
        Mismatch
            The ranks' states or steps differ.
        TesseraIOError, TesseraTimeout, PeerLost, CommitUnknown
            The save failed; all ranks get the same error, and the former checkpoint is untouched.
        """
        handle, _ = checked(state, State, "state", step)._prepare(metrics)
        _core.saver_save(self._handle, step, handle)

    def save_async(self, step: int, state: State, *, metrics: Mapping[str, float] | None = None) -> Work:
        """Copy the state, return, and save the copy in the background.

        A save still running is waited for first; its error is raised here.

        Parameters
        ----------
        step, state, metrics
            As `save` takes them; when this returns training may go on.

        Returns
        -------
        Work
            Done when the checkpoint is committed. May be dropped: `wait` raises the error too.
        """
        handle, _ = checked(state, State, "state", step)._prepare(metrics)
        return Work(_core.saver_save_async(self._handle, step, handle))

    def wait(self) -> None:
        """Wait for the save in flight, if there is one; raises its error, once. Not collective."""
        _core.saver_wait(self._handle)

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
        handle, take_over = checked(state, State, "state")._prepare()
        before = _core.saver_resume(self._handle, handle)
        take_over()
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


class TensorInfo(NamedTuple):
    """What a checkpoint tells of a tensor without reading it."""

    dtype: DType
    shape: tuple[int, ...]


class Checkpoint(Closable, Mapping[str, "npt.NDArray[Any]"]):
    """A committed checkpoint, from whatever world size, layout and language; no job is needed.

    A mapping from names to whole tensors, which are read when they are asked for.

    Parameters
    ----------
    path : path
        The directory of a checkpoint, or a root: then its newest. Or what PyTorch wrote: the directory of a
        ``torch.distributed.checkpoint``, or a file of ``torch.save``; no pickle is executed, and PyTorch is not needed.
        Or safetensors as Hugging Face lays them out: a file, an index, or a directory of them.

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

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._handle = _core.checkpoint_open(os.fsdecode(path))

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
        return {name: decode(json.dumps(value)) for name, value in self.manifest.get("values", {}).items()}

    @property
    def unreadable(self) -> dict[str, str]:
        """What of a PyTorch checkpoint is not read (other dtypes, pickled classes), by name, and why."""
        return dict(self.manifest.get("unreadable", {}))

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the save."""
        return {name: decode(json.dumps(value)) for name, value in self.manifest.get("metrics", {}).items()}

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
    ) -> None:
        """Load this rank's part into `state`, in place. Makes no communication.

        Parameters
        ----------
        state : State
            Any layout and world size.
        verify : bool, optional
            Check the checksum of every block that is read.
        allow_missing : bool, optional
            Leave alone what the checkpoint lacks.
        allow_unexpected : bool, optional
            Leave out what the state lacks.
        allow_cast : bool, optional
            Convert floating-point tensors of another dtype.

        Raises
        ------
        Mismatch
            All differences are listed; nothing was loaded.
        """
        handle, take_over = checked(state, State, "state")._prepare()
        _core.checkpoint_load(
            self._handle,
            handle,
            verify=verify,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            allow_cast=allow_cast,
        )
        take_over()

    def verify(self, *, full: bool = True) -> None:
        """Check the checkpoint without loading it.

        Parameters
        ----------
        full : bool
            Read every byte; else sizes and headers alone.

        Raises
        ------
        Corrupt
            File and offset are named; ``__cause__`` leads to further ones.
        """
        _core.checkpoint_verify(self._handle, full)

    def export(
        self,
        directory: str | os.PathLike[str],
        comm: Comm | None = None,
        *,
        format: str | None = None,
        max_file_bytes: int | None = None,
        under: str | None = None,
        timeout: Timeout = None,
    ) -> None:
        """Write the tensors into a new directory in another format, in bounded memory.

        With a `comm` it is collective: every rank has opened the same checkpoint, and all of them write.

        Parameters
        ----------
        directory : path
            Must not exist; the same on every rank, on a file system that all see. It appears when all is durable.
        comm : Comm, optional
            The ranks that write; without it this process alone.
        format : {"safetensors", "torch_dcp"}, optional
            Whole tensors as Hugging Face has them, the default; or what `torch.distributed.checkpoint` loads.
        max_file_bytes : int, optional
            Of safetensors: cut into files of about this size, with an index.
        under : str, optional
            Only what has a name that begins so (``"model."``), and without it.
        timeout : float or timedelta, optional
            Deadline of each wait for the other ranks.
        """
        handle = None if comm is None else checked(comm, Comm, "comm", directory)._handle
        _core.checkpoint_export(
            self._handle,
            handle,
            os.fsdecode(directory),
            format=format,
            max_file_bytes=max_file_bytes,
            under=under,
            timeout_ms=milliseconds(timeout),
        )

    def close(self) -> None:
        """Close the checkpoint."""
        _core.checkpoint_destroy(self._handle)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other
