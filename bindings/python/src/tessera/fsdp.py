"""Fully sharded data-parallel training: ranks hold shards, and units of the model are unsharded while they compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, get_args

from . import _core, _options
from ._base import Closable, checked, there_are
from ._given import raw, takes
from ._params import Block, Deferred, Grads, Params, named, parameter_or_deferred
from .comm import Comm
from .errors import InvalidArgument, NotFound
from .layout import Layout
from .tensor import DTypeLike, array_over, dtype_of
from .work import Stream, stream_of

if TYPE_CHECKING:
    from ._options import FSDPOptions
    from .tp import TensorParallel

__all__ = ["FSDP", "Deferred"]

DTypes = DTypeLike | Mapping[str, DTypeLike] | None
Arrays = Mapping[str, Any]  # of NumPy, or on a device CudaArrays
Phase = Literal["sharded", "on_its_way", "whole", "backward", "reducing"]


@takes(_options.FSDP)
class FSDP(Closable):
    """A model of which each rank holds a shard of every parameter. Collective.

    The parameters are grouped into units, such as layers. A unit's parameters are unsharded inside `forward` and
    `backward`, in one copy that the ranks of a host share. In between, each rank keeps only its rows, of parameters,
    gradients and optimizer state. All ranks enter the same units in the same order.

    Parameters
    ----------
    comm : Comm
        The ranks that train together.
    units : mapping of str to parameters
        The parameters of each unit, as for `DDP`, or `Deferred` ones; names must be unique in the model. All are in CPU
        memory or all on the communicator's CUDA device (see `set_stream`). The arrays are read here, on a device in the
        order of its default stream, and not used later. A leading ``module.`` or ``_orig_mod.`` of a name is stripped.
    frozen : collection of str, default ()
        Names of parameters without a gradient. They may have any dtype; those that are not floating-point keep it when
        unsharded.
    keep_whole : collection of str, default ()
        Units that stay unsharded from their forward to their backward: more memory, less communication.
    keep_among : mapping of str to int, default {}
        Units that are kept, from their forward to their backward, in groups of that many consecutive ranks, which must
        divide the number of ranks that they are sharded over: unsharded on each host if a group fits on one, else a
        part on each rank. The backward then communicates parameters only within a group.
    row_block : int, or mapping of str to int, default 0
        Shard parameters only between blocks of that many rows, for all units or by unit name; 0 shards between any
        rows, as ``torch.chunk`` does.
    flat : collection of str, default ()
        Units whose parameters of one dtype are sharded together, as one row of elements, at any element: all ranks hold
        equally much, and shards have one dimension. Parameters of these units may have no dimension.
    param_dtype : dtype, or mapping of str to dtype, default None
        The dtype of unsharded parameters ("bf16", ...), for all units or by unit name. Shards keep the registered
        dtype, as do unsharded parameters by default.
    reduce_dtype : dtype, or mapping of str to dtype, default None
        The dtype in which gradients are reduced; by default that of the unsharded parameters.
    tp : TensorParallel, optional
        The model whose slices the parameters are: units of ``tp.slices``, by name. `comm` has the ranks with the same
        slices, such as ``mesh["dp"]``. Layouts, optimizers, norms and states are then those of the whole model.
    <options>

    Raises
    ------
    Mismatch
        The ranks registered different models; the message names the first difference.
    InvalidArgument
        An array is not contiguous, not floating-point (unless frozen) or has no dimension (unless in a flat unit), or
        a name occurs twice.
    Unsupported
        An option is not available for parameters on a CUDA device; the message names it.

    Examples
    --------
    >>> fsdp = ts.FSDP(comm, {"fc1": {"w1": w1}, "fc2": {"w2": w2}})  # doctest: +SKIP
    >>> opt = ts.AdamW(fsdp, lr=1e-3)  # doctest: +SKIP
    >>> with fsdp.forward("fc1") as params:  # doctest: +SKIP
    ...     hidden = inputs @ params["w1"].T
    >>> with fsdp.backward("fc1") as (params, grads):  # doctest: +SKIP
    ...     grads["w1"][...] = delta.T @ inputs
    >>> fsdp.wait()  # doctest: +SKIP
    >>> opt.step()  # doctest: +SKIP
    """

    _handle: _core.FSDP
    _names: tuple[str, ...] = ()
    _units: Mapping[str, int] = MappingProxyType({})
    _syncs = True

    def __init__(
        self,
        comm: Comm,
        units: Mapping[str, Params | Mapping[str, Deferred]],
        *,
        frozen: Collection[str] = (),
        keep_whole: Collection[str] = (),
        keep_among: Mapping[str, int] = MappingProxyType({}),
        row_block: int | Mapping[str, int] | None = None,
        flat: Collection[str] = (),
        param_dtype: DTypes = None,
        reduce_dtype: DTypes = None,
        tp: TensorParallel | None = None,
        **options: Unpack[FSDPOptions],
    ) -> None:
        handle = checked(comm, Comm, "comm", units)._handle
        given: dict[str, Any] = {}

        def arguments() -> tuple[list[Any], _core.TensorParallel | None, dict[str, Any]]:
            if not isinstance(units, Mapping):
                raise TypeError(f"units is a {type(units).__name__}; it must be a dict of parameters by unit")
            blocks = (
                row_block
                if isinstance(row_block, Mapping)
                else {}
                if row_block is None
                else dict.fromkeys(units, row_block)
            )
            for what, chosen in (
                ("keep_whole", keep_whole),
                ("keep_among", keep_among),
                ("row_block", blocks),
                ("flat", flat),
            ):
                for name in chosen:
                    if name not in units:
                        raise NotFound(f"{what} names {name!r}, but there is no such unit; {there_are(name, units)}")
            for name in keep_among:
                if name in keep_whole:
                    raise InvalidArgument(f"keep_among and keep_whole both name {name!r}; use one of the two")
            whole, whole_of = _dtypes(param_dtype, "param_dtype", units)
            reduced, reduced_of = _dtypes(reduce_dtype, "reduce_dtype", units)
            given.update({name: named(params, f"unit {name!r}") for name, params in units.items()})
            known = {name for names, _ in given.values() for name in names}
            for name in frozen:
                if name not in known:
                    raise NotFound(f"frozen names {name!r}, but there is no such parameter; {there_are(name, known)}")
            described = [
                (
                    names,
                    [parameter_or_deferred(name, array) for name, array in zip(names, arrays, strict=True)],
                    [name not in frozen for name in names],
                    {
                        "name": unit,
                        "reshard_after_forward": 0 if unit in keep_whole else keep_among.get(unit),
                        "param_dtype": whole_of.get(unit),
                        "reduce_dtype": reduced_of.get(unit),
                        "row_block": blocks.get(unit),
                        "flat": unit in flat,
                    },
                )
                for unit, (names, arrays) in given.items()
            ]
            chosen_for_all = {"param_dtype": whole, "reduce_dtype": reduced, **raw(_options.FSDP, options)}
            return described, None if tp is None else tp._handle, chosen_for_all

        self._handle = _core.fsdp_create(handle, arguments)
        self._tp = tp
        self._units = {_core.fsdp_unit_name(self._handle, i): i for i in range(_core.fsdp_unit_count(self._handle))}
        self._params = [_core.fsdp_param(self._handle, i) for i in range(_core.fsdp_param_count(self._handle))]
        self._of_unit: list[list[int]] = [[] for _ in self._units]
        for i, (_, _, unit, _) in enumerate(self._params):
            self._of_unit[unit].append(i)
        self._names = tuple(name for name, _, _, _ in self._params)
        registered = [name for names, _ in given.values() for name in names]
        self._index = {name: i for i, name in enumerate(registered)} | {name: i for i, name in enumerate(self._names)}
        self._shards = MappingProxyType(
            {name: array_over(*_core.fsdp_shard(self._handle, i)) for i, name in enumerate(self._names)}
        )
        self._shard_grads = MappingProxyType(
            {
                name: array_over(*_core.fsdp_shard_grad(self._handle, i))
                for i, (name, _, _, trained) in enumerate(self._params)
                if trained
            }
        )

    @property
    def units(self) -> tuple[str, ...]:
        """The names of the units, in the order of registration."""
        return tuple(self._units)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, unit after unit."""
        return self._names

    @property
    def shards(self) -> Arrays:
        """This rank's rows (in a flat unit: elements) of each parameter, which optimizers update and checkpoints save.

        A shard may be empty. Views of memory that never changes: NumPy arrays, or for parameters on a CUDA device
        objects that share its memory by DLPack, ``torch.from_dlpack(fsdp.shards["w"])``. Do not write to them while the
        unit is unsharded.
        """
        return self._shards

    @property
    def shard_grads(self) -> Arrays:
        """The gradients of the shards of trained parameters, reduced when `wait` returns. Views like the shards."""
        return self._shard_grads

    def layout(self, name: str) -> Layout:
        """Which rank holds which part of a parameter."""
        number = self._number(name)
        shape = self._params[number][1] if self._tp is None else self._tp.shape(self._names[number])
        return Layout._adopt(_core.fsdp_layout(self._handle, number), shape)

    def phase(self, unit: str) -> Phase:
        """The phase of a unit in the current step.

        Returns
        -------
        {"sharded", "on_its_way", "whole", "backward", "reducing"}
            "on_its_way" is being unsharded; "whole" is unsharded; "reducing" is sharded while its gradients are reduced
            until `wait`. A program may write a unit's shards while it is sharded or reducing; an optimizer and a load
            may write while all units are sharded.
        """
        phases: tuple[Phase, ...] = get_args(Phase)
        return phases[_core.fsdp_unit_phase(self._handle, self._unit(unit))]

    def _unit(self, name: str) -> int:
        number = self._units.get(name)
        if number is None:
            raise NotFound(f"there is no unit {name!r}; {there_are(name, self._units)}")
        return number

    def _number(self, name: str) -> int:
        number = self._index.get(name)
        if number is None:
            raise NotFound(f"there is no parameter {name!r}; {there_are(name, self._names)}")
        return number

    def _whole(self, *units: int) -> Block:
        whole = {}
        for i in (i for unit in units for i in self._of_unit[unit]):
            whole[self._names[i]] = array_over(*_core.fsdp_whole(self._handle, i))
        of = f"unit {self.units[units[0]]!r}" if len(units) == 1 else "the model"
        return Block(whole, "the unsharded parameter", of)

    @contextmanager
    def forward(self, unit: str) -> Iterator[Arrays]:
        """A unit's forward: its parameters are unsharded inside the block. Collective.

        Yields
        ------
        mapping of str to array
            The unsharded parameters by name: read-only views, valid only inside the block. Delete variables that hold
            one before it ends, also those of another library that shares one by DLPack.

        Raises
        ------
        InvalidState
            A backward is in progress; views are still held at the end of the block; or a parameter is accessed after
            it.
        Mismatch
            Another rank enters a different unit.

        An exception in the block leaves the unit unsharded: see `abandon`.
        """
        number = self._unit(unit)
        _core.fsdp_forward(self._handle, number)
        whole = self._whole(number)
        try:
            yield whole
        finally:
            whole.end()
        _core.fsdp_forward_done(self._handle, number)

    @contextmanager
    def backward(self, unit: str) -> Iterator[tuple[Arrays, Grads]]:
        """A unit's backward: write its gradients inside the block. Collective.

        After the block they are reduced into `shard_grads` in the background. A unit that a step uses more than once
        has one backward after all uses or one for each; their gradients are added up.

        Yields
        ------
        params : mapping of str to array
            As for `forward`.
        grads : mapping of str to array
            The unsharded gradients of the trained parameters; write all of them (see `unused`). They are uninitialised
            and may hold NaN, except inside `no_sync`, where they hold the accumulated gradients, initially zero.

        Raises
        ------
        InvalidState
            At the end of the block, some gradients were neither written nor marked `unused`; the message names them.
            Another `backward` of the unit continues.
        """
        number = self._unit(unit)
        _core.fsdp_backward(self._handle, number)
        whole = self._whole(number)
        views = {
            self._names[i]: array_over(*_core.fsdp_grad(self._handle, i))
            for i in self._of_unit[number]
            if self._params[i][3]
        }
        grads = Block(views, "the gradient of", f"unit {unit!r}")
        del views
        try:
            yield whole, Grads(grads, f"unit {unit!r}")
        finally:
            whole.end()
            grads.end()
        _core.fsdp_grads_ready(self._handle, number)

    def unused(self, name: str) -> None:
        """Mark a parameter as having no gradient on this rank in this `backward` of its unit; it counts as zeros."""
        _core.fsdp_unused(self._handle, self._number(name))

    def used(self, name: str) -> bool:
        """Whether any rank had a gradient of a parameter in the last reduced step.

        If no rank had one (with accumulation: since gradients were set to zero), its gradients are zero, and optimizers
        leave the parameter, its moments and its step count unchanged.
        """
        return _core.fsdp_used(self._handle, self._number(name))

    def wait(self) -> None:
        """End the backward pass: the gradients of all shards are then reduced and every unit is sharded. Collective.

        Raises
        ------
        InvalidState
            Some units had no backward; the message names them. Complete the step and call `wait` again.
        TesseraTimeout, PeerLost, Aborted
            A rank is late or lost; the message names it.
        """
        _core.fsdp_wait(self._handle)

    def abandon(self) -> None:
        """Abandon the current step at any point, such as after an exception in a block. Collective.

        Every unit is then sharded and every gradient zero, including accumulated ones. All ranks must call it after
        the same calls of the step.

        Raises
        ------
        InvalidState
            Views of unsharded parameters or gradients are still held.
        """
        _core.fsdp_abandon(self._handle)

    @contextmanager
    def summon_full_params(self, *units: str) -> Iterator[Arrays]:
        """Unshard all units, or the named ones, between steps, for evaluation or inspection. Collective.

        Yields
        ------
        mapping of str to array
            As for `forward`.
        """
        numbers = [self._unit(name) for name in units or self._units]
        for number in numbers:
            _core.fsdp_unshard(self._handle, number)
        for number in numbers:
            _core.fsdp_await(self._handle, number)
        whole = self._whole(*numbers)
        try:
            yield whole
        finally:
            whole.end()
            for number in numbers:
                _core.fsdp_reshard(self._handle, number)

    def set_stream(self, stream: Stream = None) -> None:
        """Name the CUDA stream on which the trainer computes and updates shards.

        For parameters on a device, everything is in its order: the beginning of a block and `wait` make this stream
        wait for the device, not the caller. Reductions take what this stream has written when the block ends.

        Parameters
        ----------
        stream : stream, optional
            PyTorch's, CuPy's, any object with ``__cuda_stream__``, or an address. None, as at first, is the device's
            default stream. It must exist until another one is set. A new one continues after what the previous one had.

        Raises
        ------
        InvalidArgument
            The stream is of another device, or the parameters are on the CPU.
        InvalidState
            A unit is not sharded, or its gradients are being reduced.
        """
        _core.fsdp_set_stream(self._handle, stream_of(stream))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block reduce nothing: each rank accumulates unsharded gradients, which need memory.

        The first backward after the block reduces the sums. Enter and leave it between steps, on every rank alike.
        """
        former = self._syncs
        self.set_sync(False)
        try:
            yield
        finally:
            self.set_sync(former)

    def set_sync(self, sync: bool) -> None:
        """Set whether the following backwards reduce; see `no_sync`."""
        _core.fsdp_set_sync(self._handle, sync)
        self._syncs = sync

    def set_accumulate(self, accumulate: bool) -> None:
        """Set whether the following backwards add to the gradients of the shards instead of replacing them."""
        _core.fsdp_set_accumulate(self._handle, accumulate)

    def set_all_reduce(self, all_reduce: bool) -> None:
        """Set whether the following backwards also reduce over replicas (`shard_ranks`).

        If not, the sums over the ranks of each replica (which may be all ranks) are kept and accumulated until the next
        backward that does.
        """
        _core.fsdp_set_all_reduce(self._handle, all_reduce)

    def set_reshard_after_backward(self, reshard: bool, *units: str) -> None:
        """Set whether all units, or the named ones, free their memory after the following backwards.

        If not, they keep their memory, and the next forward reuses its contents unless some rank changed a shard since.
        Nothing is then sent between hosts, which speeds up steps that accumulate gradients. Call it between steps, on
        every rank alike.
        """
        for number in [self._unit(name) for name in units or self._units]:
            _core.fsdp_set_reshard_after_backward(self._handle, number, reshard)

    def zero_grad(self) -> None:
        """Set the gradients of the shards to zero and drop accumulated unsharded gradients."""
        _core.fsdp_zero_grad(self._handle)

    def close(self) -> None:
        """Refuse further calls. The memory is freed once no view and no optimizer uses it."""
        _core.fsdp_destroy(self._handle)

    def __repr__(self) -> str:
        closed = " (closed)" if self.closed else ""
        return f"<tessera.FSDP of {len(self._names)} parameters in {len(self._units)} units{closed}>"


def _dtypes(given: DTypes, what: str, units: Collection[str]) -> tuple[int | None, dict[str, int]]:
    """The dtype for all units, and the dtypes by unit."""
    if given is None:
        return None, {}
    if not isinstance(given, Mapping):
        return int(dtype_of(given)), {}
    by_unit = cast("Mapping[str, DTypeLike]", given)
    for unit in by_unit:
        if unit not in units:
            raise NotFound(f"{what} names {unit!r}, but there is no such unit; {there_are(unit, units)}")
    return None, {unit: int(dtype_of(dtype)) for unit, dtype in by_unit.items()}
