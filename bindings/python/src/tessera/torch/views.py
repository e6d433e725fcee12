"""PyTorch's tensors as a communicator takes them: contiguous and in CPU memory.

A contiguous tensor's own memory is used. Any other tensor, and one that overlaps another tensor of the operation, is
replaced by a copy, which is copied back when the operation is done if it was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from .. import _core
from ..errors import InvalidArgument, Unsupported
from ..tensor import DType
from .tensors import CORE

__all__ = ["Views", "at", "joined", "pieces_of"]

# The dtype as which a reduction treats them, and how many of it an element has.
_REDUCED = {torch.bool: (DType.U8, 1), torch.complex64: (DType.F32, 2), torch.complex128: (DType.F64, 2)}


class Views:
    """The memory of one operation's tensors, and the actions to take when it is done."""

    def __init__(self) -> None:
        self._afterwards: list[Callable[[], object]] = []
        self._memory: dict[int, list[tuple[int, int, bool]]] = {}  # used, by storage: begin, end, whether written

    @property
    def copied(self) -> bool:
        """Whether `finish` has anything to do."""
        return bool(self._afterwards)

    def finish(self) -> None:
        """Copy results back into the tensors that were replaced by copies. Call once, when the operation is done."""
        if self._afterwards:
            with torch.no_grad():
                for act in self._afterwards:
                    act()

    def afterwards(self, act: Callable[[], object]) -> None:
        """Let `finish` call this too."""
        self._afterwards.append(act)

    def reads(self, tensor: torch.Tensor, *, reduced: bool = False, own: int = 0) -> _core.Tensor:
        """For an operation that only reads the tensor. It may be at the address `own` of the written tensor."""
        return at(self.whole(tensor, own=own), reduced)

    def writes(self, tensor: torch.Tensor, *, reduced: bool = False, own: int = 0) -> _core.Tensor:
        """For an operation that writes all of the tensor. It may be at the address `own` of the read tensor."""
        return at(self.whole(tensor, write=True, own=own), reduced)

    def updates(self, tensor: torch.Tensor, *, reduced: bool = False) -> _core.Tensor:
        """For an operation that works in place."""
        _check(tensor)
        if self._lies_apart(tensor, True):
            return at(tensor, reduced)
        whole = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._afterwards.append(partial(_copy, tensor, whole))
        return at(whole, reduced)

    def writes_joined(self, tensors: Sequence[torch.Tensor]) -> _core.Tensor:
        """For an operation that writes all of the tensors, which have the same length, as one tensor."""
        whole = _adjoining(tensors)
        if whole is None or not self._lies_apart(whole, True):
            whole = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
            parts = whole.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                _check(tensor)
                self._afterwards.append(partial(_copy, tensor, part))
        return at(whole, False)

    def whole(self, tensor: torch.Tensor, *, write: bool = False, own: int = 0) -> torch.Tensor:
        """The tensor itself, or a contiguous copy that replaces it."""
        _check(tensor)
        if self._lies_apart(tensor, write, own):
            return tensor
        if write:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._afterwards.append(partial(_copy, tensor, whole))
            return whole
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def _lies_apart(self, tensor: torch.Tensor, write: bool, own: int = 0) -> bool:
        """Whether its own memory can be used: contiguous, and not overlapping a written tensor of the operation."""
        if not tensor.is_contiguous():
            return False
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        others = self._memory.setdefault(tensor.untyped_storage().data_ptr(), [])
        if begin != own and any(first < end and begin < last and (write or written) for first, last, written in others):
            return False
        others.append((begin, end, write))
        return True


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of tensors of one dtype, concatenated; not copied if they are adjacent in memory."""
    whole = _adjoining(tensors)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if whole is None else whole


def pieces_of(tensor: torch.Tensor, splits: Sequence[int], world_size: int, what: str) -> Sequence[torch.Tensor]:
    """The rows of a contiguous tensor for each rank; equal numbers if `splits` is empty."""
    rows = tensor.shape[0]
    if not splits:
        if rows % world_size:
            raise InvalidArgument(f"all_to_all: the {what}'s {rows} rows are not divisible by {world_size} ranks")
        splits = [rows // world_size] * world_size
    if len(splits) != world_size or sum(splits) != rows:
        raise InvalidArgument(
            f"all_to_all: the {what} has {rows} rows for {world_size} ranks, but its split sizes are {list(splits)}"
        )
    return tensor.detach().split(list(splits))


def _adjoining(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor over tensors that are adjacent in one storage, like the chunks of a contiguous tensor; else None."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        _check(tensor)
        if not tensor.is_contiguous() or tensor.dtype is not first.dtype:
            return None
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += tensor.numel() * tensor.element_size()
    return first.detach().as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    to.copy_(of.view(to.shape))


def _check(tensor: torch.Tensor) -> None:
    if not tensor.is_cpu:
        raise Unsupported(
            f"a tensor is on {tensor.device}, but the backend 'tessera' supports only CPU memory; use "
            'init_process_group("cpu:tessera,cuda:nccl") for a backend per device'
        )
    if tensor.layout is not torch.strided:
        raise Unsupported(f"the backend 'tessera' does not support {tensor.layout} tensors; use x.to_dense()")


def at(tensor: torch.Tensor, reduced: bool = False) -> _core.Tensor:
    """A tensor from `Views.whole`, as the core takes it."""
    code, words = (_REDUCED.get(tensor.dtype) if reduced else None) or (CORE.get(tensor.dtype), 1)
    if code is None:
        raise Unsupported(f"the backend 'tessera' does not support tensors of {tensor.dtype}; use x.view(torch.uint8)")
    return _core.tensor_at(tensor.data_ptr(), code, tensor.numel() * words, tensor)
