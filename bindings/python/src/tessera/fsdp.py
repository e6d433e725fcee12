"""Fully sharded data-parallel training: ranks hold shards, and units of the model are whole while they compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, cast, get_args

from . import _core, _options
from ._base import Closable, checked, there_are
from ._given import raw, takes
from .comm import Comm
from .ddp import Grads, Params, named, parameter
from .errors import InvalidArgument, InvalidState, NotFound
from .layout import Layout
from .tensor import DTypeLike, array_over, dtype_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._options import FSDPOptions

__all__ = ["FSDP", "Deferred"]

DTypes = DTypeLike | Mapping[str, DTypeLike] | None
Arrays = Mapping[str, "npt.NDArray[Any]"]
Phase = Literal["sharded", "on_its_way", "whole", "backward", "reducing"]


class Deferred(NamedTuple):
    """A parameter whose values come later, into its shards: no rank ever needs memory for all of it."""

    shape: tuple[int, ...]
    dtype: DTypeLike = "float32"


class _Block(Mapping[str, "npt.NDArray[Any]"]):
    """Views by name for the length of a block; afterwards their names alone."""

    __slots__ = ("_names", "_of", "_views", "_what")

    def __init__(self, views: dict[str, npt.NDArray[Any]], what: str, of: str) -> None:
        self._names = tuple(views)
        self._views: dict[str, npt.NDArray[Any]] | None = views
        self._what = what  # in messages: "the gradient of",
        self._of = of  # and "unit 'fc1'"

    def end(self) -> None:
        self._views = None

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if self._views is not None and name in self._views:
            return self._views[name]
        if name not in self._names:
            raise KeyError(f"{self._of} has no parameter {name!r}; {there_are(name, self._names)}")
        raise InvalidState(
            f"{self._what} {name!r} was there until the end of its block; copy inside the block what is used later, or "
            "enter its unit again"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        ended = " (ended)" if self._views is None else ""
        return f"<whole parameters {', '.join(self._names)}{ended}>"


@takes(_options.FSDP)
class FSDP(Closable):
    """A model of which each rank holds a shard of every parameter. Collective.

    The parameters are grouped into units, such as layers. A unit's parameters are whole inside `forward` and
    `backward`, in one copy that the ranks of a host share; in between each rank keeps its rows alone, and so do the
    gradients and an optimizer over the model. All ranks enter the same units in the same order.

    Parameters
    ----------
    comm : Comm
        The ranks that train together.
    units : mapping of str to parameters
        For each unit its parameters, as `DDP` takes them, or `Deferred` ones; names differ over the whole model. The
        arrays are read here and not used later. A leading ``module.`` or ``_orig_mod.`` of a name is stripped.
    frozen : collection of str, default ()
        Names of parameters without a gradient. They may be of any dtype; those that are not floating-point ones keep it
        when whole.
    keep_whole : collection of str, default ()
        Units that stay whole from their forward to their backward: more memory, less communication.
    keep_among : mapping of str to int, default {}
        Units that are kept, from their forward to their backward, among each so many ranks that follow each other, of
        which the ranks that they are cut among are a multiple: whole on each host if they fit on one, else a part on
        each. Between those is all communication of the backward for parameters.
    row_block : int, or mapping of str to int, default 0
        Parameters are cut between blocks of so many rows, of all units or by the unit's name; 0: between any rows, as
        ``torch.chunk`` does.
    flat : collection of str, default ()
        Units whose parameters of one dtype are cut together, as one row of elements, anywhere: the ranks have equally
        much of them, and shards have one dimension. Here parameters may be without a dimension.
    param_dtype : dtype, or mapping of str to dtype, default None
        Of whole parameters ("bf16", ...), of all units or by the unit's name. Shards keep the dtype that was
        registered, and so do whole parameters where nothing else is said.
    reduce_dtype : dtype, or mapping of str to dtype, default None
        Of whole gradients, in which they are reduced; where nothing is said, that of whole parameters.
    <options>

    Raises
    ------
    Mismatch
        The ranks registered different models; the first difference is named.
    InvalidArgument
        An array is not contiguous, not of a floating-point type (unless it is frozen), without a dimension (but in a
        flat unit), or a name occurs twice.

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
        **options: Unpack[FSDPOptions],
    ) -> None:
        handle = checked(comm, Comm, "comm", units)._handle
        if not isinstance(units, Mapping):
            raise TypeError(f"units is a {type(units).__name__}; a dict of parameters by unit is wanted")
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
                    raise NotFound(f"{what} names {name!r}; there is no such unit, {there_are(name, units)}")
        for name in keep_among:
            if name in keep_whole:
                raise InvalidArgument(f"keep_among and keep_whole both name {name!r}; it can be kept in one way")
        whole, whole_of = _dtypes(param_dtype, "param_dtype", units)
        reduced, reduced_of = _dtypes(reduce_dtype, "reduce_dtype", units)
        given = {name: named(params, f"unit {name!r}") for name, params in units.items()}
        known = {name for names, _ in given.values() for name in names}
        for name in frozen:
            if name not in known:
                raise NotFound(f"frozen names {name!r}; there is no such parameter, {there_are(name, known)}")
        self._handle = _core.fsdp_create(
            handle,
            [
                (
                    names,
                    [
                        _core.described(tuple(array.shape), int(dtype_of(array.dtype)))
                        if isinstance(array, Deferred)
                        else parameter(name, array)
                        for name, array in zip(names, arrays, strict=True)
                    ],
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
            ],
            param_dtype=whole,
            reduce_dtype=reduced,
            **raw(_options.FSDP, options),
        )
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
        """This rank's rows of each parameter, or elements, of a flat unit: what an optimizer updates and is saved.

        They may be none.

        NumPy views, the same memory for good. Not to be written while the unit is whole.
        """
        return self._shards

    @property
    def shard_grads(self) -> Arrays:
        """The gradients of the shards, reduced when `wait` returns, of the parameters that are trained."""
        return self._shard_grads

    def layout(self, name: str) -> Layout:
        """Who holds which part of a parameter."""
        number = self._number(name)
        return Layout._adopt(_core.fsdp_layout(self._handle, number), self._params[number][1])

    def phase(self, unit: str) -> Phase:
        """Where a unit is in its step.

        Returns
        -------
        {"sharded", "on_its_way", "whole", "backward", "reducing"}
            On its way: to be whole. Reducing: sharded, and until `wait` its gradients are reduced. A program may write
            a unit's shards while it is sharded or reducing; an optimizer and a load, while all units are sharded.
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

    def _whole(self, *units: int) -> _Block:
        whole = {}
        for i in (i for unit in units for i in self._of_unit[unit]):
            array = array_over(*_core.fsdp_whole(self._handle, i))
            array.flags.writeable = False
            whole[self._names[i]] = array
        of = f"unit {self.units[units[0]]!r}" if len(units) == 1 else "the model"
        return _Block(whole, "the whole parameter", of)

    @contextmanager
    def forward(self, unit: str) -> Iterator[Arrays]:
        """A unit's forward: inside, its parameters are whole. Collective.

        Yields
        ------
        mapping of str to array
            The whole parameters by name: read-only NumPy views, valid inside the block alone. Variables that hold one
            must be gone by its end, and afterwards the mapping has none.

        Raises
        ------
        InvalidState
            In the middle of a backward; at the end of the block, views are held; after it, a parameter is asked for.
        Mismatch
            Another rank enters another unit.

        An exception in the block leaves the unit whole: see `abandon`.
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
        """A unit's backward: inside, its gradients are written. Collective.

        After the block they are reduced into `shard_grads` in the background. A unit that a step uses more than once
        has one backward after its uses or one for each; the gradients of all are added up.

        Yields
        ------
        params : mapping of str to array
            As `forward`.
        grads : mapping of str to array
            Where the whole gradients of the trained parameters are to be written, all of them (see `unused`). They hold
            anything at first, NaN among it, but inside `no_sync` what has added up, zeros at first.

        Raises
        ------
        InvalidState
            After the block: gradients, which are named, were neither written nor `unused`; another `backward` of the
            unit goes on with it.
        """
        number = self._unit(unit)
        _core.fsdp_backward(self._handle, number)
        whole = self._whole(number)
        views = {
            self._names[i]: array_over(*_core.fsdp_grad(self._handle, i))
            for i in self._of_unit[number]
            if self._params[i][3]
        }
        grads = _Block(views, "the gradient of", f"unit {unit!r}")
        del views
        try:
            yield whole, Grads(grads, f"unit {unit!r}")
        finally:
            whole.end()
            grads.end()
        _core.fsdp_grads_ready(self._handle, number)

    def unused(self, name: str) -> None:
        """This rank has no gradient of a parameter in this `backward` of its unit, which counts as zeros."""
        _core.fsdp_unused(self._handle, self._number(name))

    def used(self, name: str) -> bool:
        """Whether any rank had a gradient of a parameter in the last step that was reduced.

        Of one that no rank had, since gradients were set to zero if they add up, gradients are zeros, and optimizers
        leave it, its moments and its count of steps as they are.
        """
        return _core.fsdp_used(self._handle, self._number(name))

    def wait(self) -> None:
        """End the backward pass: the gradients of all shards are reduced, and every unit is sharded. Collective.

        Raises
        ------
        InvalidState
            Some units had no backward; they are named, and the step may be completed and waited for again.
        TesseraTimeout, PeerLost, Aborted
            A rank is late or lost; it is named.
        """
        _core.fsdp_wait(self._handle)

    def abandon(self) -> None:
        """Give up the step that has begun, however far it is, such as after an exception in a block. Collective.

        Every unit is sharded then and every gradient zero, also what was accumulated. All ranks do so after the same
        calls of that step.

        Raises
        ------
        InvalidState
            Views of whole parameters or gradients are held.
        """
        _core.fsdp_abandon(self._handle)

    @contextmanager
    def summon_full_params(self, *units: str) -> Iterator[Arrays]:
        """All units whole, or those that are named, between steps; for evaluation or to look at. Collective.

        Yields
        ------
        mapping of str to array
            As `forward`.
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block reduce nothing: gradients add up whole on each rank, in memory for all of them.

        The first backward after it reduces the sums. To be entered and left between steps, on every rank alike.
        """
        former = self._syncs
        self.set_sync(False)
        try:
            yield
        finally:
            self.set_sync(former)

    def set_sync(self, sync: bool) -> None:
        """Whether the following backwards reduce; see `no_sync`."""
        _core.fsdp_set_sync(self._handle, sync)
        self._syncs = sync

    def set_accumulate(self, accumulate: bool) -> None:
        """Whether the following backwards add to the gradients of the shards instead of replacing them."""
        _core.fsdp_set_accumulate(self._handle, accumulate)

    def set_all_reduce(self, all_reduce: bool) -> None:
        """Whether the following backwards reduce over replicas (`shard_ranks`), too.

        Without, the sums over the ranks of each replica, which may be all ranks, are kept, and added up, until the next
        backward with it.
        """
        _core.fsdp_set_all_reduce(self._handle, all_reduce)

    def set_reshard_after_backward(self, reshard: bool, *units: str) -> None:
        """Whether the memory of all units, or of those that are named, is free after their following backwards.

        Without, their memory stays theirs, and the forward that comes next uses what lies there, unless a shard was
        changed on some rank since: between hosts nothing is sent then, which steps that add up gradients gain by. To be
        called between steps, on every rank alike.
        """
        for number in [self._unit(name) for name in units or self._units]:
            _core.fsdp_set_reshard_after_backward(self._handle, number, reshard)

    def zero_grad(self) -> None:
        """Set the gradients of the shards to zero, and forget those that add up whole."""
        _core.fsdp_zero_grad(self._handle)

    def close(self) -> None:
        """Refuse further calls. The memory is freed when no view and no optimizer uses it any longer."""
        _core.fsdp_destroy(self._handle)

    def __repr__(self) -> str:
        closed = " (closed)" if self.closed else ""
        return f"<tessera.FSDP of {len(self._names)} parameters in {len(self._units)} units{closed}>"


def _dtypes(given: DTypes, what: str, units: Collection[str]) -> tuple[int | None, dict[str, int]]:
    """The dtype of all units, and those of some."""
    if given is None:
        return None, {}
    if not isinstance(given, Mapping):
        return int(dtype_of(given)), {}
    by_unit = cast("Mapping[str, DTypeLike]", given)
    for unit in by_unit:
        if unit not in units:
            raise NotFound(f"{what} names {unit!r}; there is no such unit, {there_are(unit, units)}")
    return None, {unit: int(dtype_of(dtype)) for unit, dtype in by_unit.items()}
