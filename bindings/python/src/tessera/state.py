"""The state that a checkpoint saves and loads: models, optimizers, samplers, arrays (in place) and plain Python values.

A state is a tree of parts. The names of its leaves are the names of the parts joined by dots, the same on every rank
and in every language: ``model.fc1.weight``, ``optim.param_groups.0.lr``, ``epoch``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_, setitem
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from . import _core
from ._base import Closable, checked, stays
from .comm import Comm
from .data import Sampler
from .ddp import DDP
from .engine import Engine
from .errors import InvalidArgument
from .fsdp import FSDP
from .grad_scaler import GradScaler
from .layout import Layout
from .lr_schedule import LRSchedule
from .metrics import Metric
from .optim import Optimizer
from .tensor import ArrayLike, DType, DTypeLike, dtype_of, has_other_bits, is_array, tensor
from .tp import TensorParallel
from .values import decode, encode
from .work import Stream, Work, stream_of

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MetricPart", "PerRank", "Sharded", "State", "Stateful"]


@runtime_checkable
class Stateful(Protocol):
    """An object that provides its own state, like PyTorch's modules."""

    def state_dict(self) -> dict[Any, Any]:
        """The state. A load may write its arrays in place."""
        ...

    def load_state_dict(self, state_dict: dict[Any, Any], /) -> object:
        """Restore the state after a load."""
        ...


@dataclass(frozen=True, eq=False)
class Sharded:
    """A tensor of which each rank holds pieces. Immutable.

    Parameters
    ----------
    layout : Layout
        How the global tensor is distributed over the ranks.
    pieces : sequence of arrays
        One for each of ``layout.boxes(rank)``, with its size; loaded in place. Pieces without elements, which the
        layout omits, are allowed.
    rank : int
        This rank.
    dtype : optional
        The element type; required if this rank holds no piece.
    """

    layout: Layout
    pieces: Sequence[ArrayLike]
    rank: int
    dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", tuple(self.pieces))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_of(self.dtype))
        elif not self.pieces:
            raise InvalidArgument("this rank holds no piece; pass dtype")


class PerRank:
    """A value that differs per rank, such as the state of a random generator.

    Saved as ``rank/<r>/<name>``; after a load `value` is this rank's.

    Parameters
    ----------
    comm : Comm
        Provides the rank.
    value : object
        A plain Python value.
    """

    def __init__(self, comm: Comm, value: object) -> None:
        self.rank = comm.rank
        self.value: Any = value


@dataclass(frozen=True, eq=False)
class MetricPart:
    """A metric and the ranks that compute it. Immutable.

    Rank 0 saves all samples: call `Metric.gather` before a save. A load gives them to rank 0 and resets the metric on
    the other ranks, whatever their number. A save or load while another rank has samples raises `InvalidState`.

    Parameters
    ----------
    comm : Comm
        The ranks that compute the metric.
    metric : Metric
        The metric.
    """

    comm: Comm
    metric: Metric

    def __post_init__(self) -> None:
        checked(self.comm, Comm, "comm", self.metric)
        checked(self.metric, Metric, "metric")


class _Value(NamedTuple):
    name: str
    value: Any
    store: Callable[[Any], object]  # where a load puts it


class _Finish(NamedTuple):
    """Gives an object its loaded state. Its names are a slice of the found names and a slice of the found values."""

    step: Callable[[], object]
    names: slice
    values: slice


class _Found:
    """What a walk over the parts of a state finds. Tensors, which may be many, are in two plain lists."""

    def __init__(self) -> None:
        self.names: list[str] = []  # of objects of the library and arrays,
        self.parts: list[Any] = []  # and these themselves
        self.values: list[_Value] = []
        self.finish: list[_Finish] = []


class State(MutableMapping[str, Any]):
    """The parts of a checkpoint, by name; also a mutable mapping of them.

    A part is

    - a `DDP`, an `FSDP`, an optimizer, a `GradScaler`, an `LRSchedule`, a `Sampler`, a `MetricPart` or a `Sharded`
    - an `Engine`, with all that it trains and counts: as the part "engine" it has ``engine.model.fc1.weight``, and more
      below ``engine.optim``, ``engine.schedule`` and ``engine.engine``. It loads at any number of ranks, stage,
      precision and batch sizes. From a backward pass to the optimizer's step it cannot be saved or loaded
    - an array as for `Comm`, on the CPU or a CUDA device, which is replicated on every rank and loaded in place
    - a plain value (None, bool, int, float, str, bytes, or a list, tuple or dict of them), or a `PerRank` of one; read
      it from the state after a load
    - an object with ``state_dict()`` and ``load_state_dict()``; a PyTorch optimizer that has not stepped yet can load
      state that was saved after a step
    - a dict, list or tuple that holds more than plain values: its members become separate parts, and a load replaces
      the values in it. A load replaces a tuple by a new one: read it from the state, or from its container, after a
      load. A read-only mapping is refused if it holds values

    Parameters
    ----------
    **parts
        The parts by name.

    Raises
    ------
    InvalidArgument
        A part or a member of it is none of the above; the message names it.

    Examples
    --------
    >>> state = ts.State(model=ddp, optim=opt, data=sampler, epoch=0)  # doctest: +SKIP
    >>> first = saver.resume(state)  # doctest: +SKIP
    >>> state["epoch"]  # doctest: +SKIP
    3
    """

    __reduce_ex__ = stays

    def __init__(self, **parts: Any) -> None:
        self._parts: dict[str, Any] = {}
        self._handle: _core.State | None = None
        self._comm: Comm | None = None  # of the ranks that are joined
        self._streams: dict[int, int] = {}  # by device
        # Of the handle: its names, their objects, its values; and where the memory of tensors was that may move.
        self._built: tuple[list[str], list[Any], list[str]] = ([], [], [])
        self._places: list[tuple[Any, int]] = []
        self.update(parts)

    if not TYPE_CHECKING:  # which refuses it by itself

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_"):
                raise AttributeError(f"a State has no attribute {name!r}; set a part with state[{name!r}] = ...")
            super().__setattr__(name, value)

    def __getitem__(self, name: str) -> Any:
        part = self._parts[name]
        return part.value if isinstance(part, PerRank) else part

    def __setitem__(self, name: str, part: Any) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a part is {name!r}; it must be a str")
        _check(name, part)
        known = self._parts.get(name)
        if isinstance(known, PerRank) and not isinstance(part, PerRank):
            known.value = part
        else:
            self._parts[name] = part

    def __delitem__(self, name: str) -> None:
        del self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"<tessera.State of {', '.join(self._parts) or 'nothing'}>"

    def set_stream(self, device: int, stream: Stream) -> State:
        """Set the stream on which the program makes and uses the state's arrays of a CUDA device.

        A save reads them after what that stream has when it is called, a load overwrites them after it. What the stream
        gets after `Saver.save_async` waits, on the device, until they are copied. Without this call it is the device's
        default stream, as PyTorch's is.

        Parameters
        ----------
        device : int
            The device's number.
        stream : stream
            As for `Comm.on_stream`.

        Returns
        -------
        State
            This state.

        Raises
        ------
        InvalidArgument
            There is no such device, or the stream is of another.
        Unsupported
            CUDA cannot be used.

        Examples
        --------
        >>> state.set_stream(0, torch.cuda.current_stream())  # doctest: +SKIP
        """
        address = stream_of(stream)
        handle, _ = self._prepare()
        _core.state_set_stream(handle, device, address)
        self._streams[device] = address
        return self

    def join(self, comm: Comm) -> State:
        """Join the states of ranks that have different parts, such as the stages of a pipeline.

        From now on a save, a load and a gather have the tensors of all ranks. Collective; a save or a load on all ranks
        repeats it after parts were added or replaced. Give a parameter that several stages share the same name in each.
        The names of values must be the same on every rank.

        Parameters
        ----------
        comm : Comm
            The saver's ranks.

        Returns
        -------
        State
            This state.

        Raises
        ------
        Mismatch
            Two ranks have the same name with different dtypes or shapes.
        InvalidArgument
            Parts of a tensor overlap on two ranks without being equal.

        Examples
        --------
        >>> state = ts.State(model=stage, optim=opt).join(comm)  # doctest: +SKIP
        """
        self._comm = checked(comm, Comm, "comm")
        self._handle = None  # joined when it is made, which is now
        self._prepare()
        return self

    def gather(self, comm: Comm, root: int | None = 0) -> Iterator[tuple[str, npt.NDArray[Any] | None]]:
        """Gather the complete tensors, one after the other. Each is collective.

        ``dict(state.gather(comm))`` is the full state of a sharded model and its optimizer; a loop that writes each
        tensor somewhere needs memory for only one at a time. All ranks must iterate over all tensors.

        Parameters
        ----------
        comm : Comm
            The ranks that hold the parts; the state must have the same tensors on each.
        root : int or None, default 0
            The rank that gets the tensors; None for all ranks.

        Yields
        ------
        name : str
            The name as in a checkpoint; in sorted order.
        array : array or None
            A new array; None on ranks other than the root.

        Raises
        ------
        Mismatch
            The ranks' states differ in this tensor.
        """
        handle, _ = self._prepare()
        wanted = root is None or checked(comm, Comm, "comm").rank == root
        for i in range(_core.state_tensor_count(handle)):
            name, number, shape = _core.state_tensor(handle, i)
            dtype = DType(number)
            array: npt.NDArray[Any] | None = np.empty(shape, dtype.numpy) if wanted else None
            whole = None if array is None else tensor(array, dtype if has_other_bits(dtype) else None)
            _core.state_gather(handle, comm._handle, name, -1 if root is None else root, whole)
            yield name, array

    def _prepare(self, metrics: Mapping[str, float] | None = None) -> tuple[_core.State, Callable[..., None]]:
        """The handle with the current values, and a function that takes over loaded values except the given names."""
        found = _Found()
        _walk_members("", self._parts.items(), self, found)
        handle = self._build(found)
        for leaf in found.values:
            _set_value(handle, leaf.name, leaf.value)
        for name, value in (metrics or {}).items():
            _core.state_set_metric(handle, name, float(value))

        def take_over(left_alone: Collection[str] = ()) -> None:
            for leaf in found.values:
                if leaf.name not in left_alone:
                    leaf.store(decode(_core.state_get_value(handle, leaf.name)))
            for step, names, values in found.finish:
                own = [*found.names[names], *(leaf.name for leaf in found.values[values])]
                if not left_alone or any(name not in left_alone for name in own):
                    step()

        return handle, take_over

    def _build(self, found: _Found) -> _core.State:
        """The handle over the found parts; made again if names, objects or arrays changed."""
        names, parts, values = self._built
        of_values = [leaf.name for leaf in found.values]
        same = found.names == names and all(map(is_, found.parts, parts)) and of_values == values
        same = same and all(part.data_ptr() == place for part, place in self._places)
        if self._handle is None or not same or self._handle.foreign:
            every = found.names + of_values
            if len(set(every)) != len(every):
                twice = min(name for name, times in Counter(every).items() if times > 1)
                raise InvalidArgument(f"two parts of the state have the name {twice!r}")
            handle = _core.state_create()
            for device, stream in self._streams.items():
                _core.state_set_stream(handle, device, stream)
            for name, part in zip(found.names, found.parts, strict=True):
                if hasattr(part, "to_local") and hasattr(part, "placements"):
                    raise InvalidArgument(
                        f"{name} is a {type(part).__name__}, of which this rank holds only a part; use "
                        "tessera.torch.checkpoint for such models and their optimizers"
                    )
                _add(handle, name, part)
            if self._comm is not None:
                _core.state_join(handle, self._comm._handle)
            self._handle, self._built = handle, (found.names, found.parts, of_values)
            self._places = [(part, part.data_ptr()) for part in _movable(found.parts)]
        return self._handle


def _movable(parts: Iterable[Any]) -> Iterator[Any]:
    """PyTorch's tensors, whose memory may be replaced (``.data =``, ``set_``). NumPy's cannot be while exported."""
    for part in parts:
        if type(part) is np.ndarray:
            continue
        yield from (a for a in (part.pieces if isinstance(part, Sharded) else [part]) if hasattr(a, "data_ptr"))


def _check(name: str, part: Any, depth: int = 0) -> None:
    """Refuse early, and by name, what a save would refuse later."""
    if isinstance(part, type):
        raise InvalidArgument(f"{name} is the class {part.__name__}; pass an object of it")
    if isinstance(part, PerRank):
        encode(part.value, name)
    elif isinstance(part, (*_OBJECTS, Stateful)):
        pass
    elif is_array(part):
        _view(name, part)
    elif _is_namespace(part) and depth < 64:
        for key, member in part.items() if isinstance(part, Mapping) else enumerate(part):
            _check(f"{name}.{key}", member, depth + 1)
            _check_place(f"{name}.{key}", member, part)
    elif isinstance(part, (Closable, Work, State)):
        raise InvalidArgument(
            f"{name} is a tessera.{type(part).__name__}, which has no state to save; pass a model, an optimizer, a "
            "Sampler, a MetricPart, a Sharded, arrays or plain values"
        )
    else:
        encode(part, name)


def _check_place(name: str, part: Any, container: Any) -> None:
    """A load replaces values, and tuples, in what holds them."""
    takes_items = isinstance(container, tuple) or hasattr(container, "__setitem__")
    if takes_items or isinstance(part, (PerRank, Stateful)) or _is_leaf(part):
        return
    if isinstance(part, tuple) or not _is_namespace(part):
        kind = type(container).__name__
        raise InvalidArgument(f"{name}: a load cannot replace a value in a {kind}; use a dict or a list instead")


def _walk_members(prefix: str, members: Iterable[tuple[Any, Any]], container: Any, found: _Found) -> None:
    """Walk the members of a container, in which a load replaces values."""
    for key, part in members:
        name = f"{prefix}{key}"
        if type(part) is np.ndarray or type(part) is Sharded:  # nearly all, where there are many
            found.names.append(name)
            found.parts.append(part)
        else:
            _check_place(name, part, container)
            _walk(name, part, partial(setitem, container, key), found)


def _walk(name: str, part: Any, store: Callable[[Any], object], found: _Found) -> None:
    if isinstance(part, PerRank):
        found.values.append(_Value(f"rank/{part.rank}/{name}", part.value, partial(setattr, part, "value")))
    elif _is_leaf(part):
        found.names.append(name)
        found.parts.append(part)
    elif isinstance(part, Stateful):
        inner = part.state_dict()
        names, values = len(found.names), len(found.values)
        _walk_members(f"{name}.", inner.items(), inner, found)
        own = slice(names, len(found.names)), slice(values, len(found.values))
        found.finish.append(_Finish(partial(part.load_state_dict, inner), *own))
    elif _is_namespace(part):
        items = part.items() if isinstance(part, Mapping) else enumerate(part)
        container = list(part) if isinstance(part, tuple) else part
        names, values = len(found.names), len(found.values)
        _walk_members(f"{name}.", _named(name, items), container, found)
        if isinstance(part, tuple):
            own = slice(names, len(found.names)), slice(values, len(found.values))
            found.finish.append(_Finish(partial(_replace, part, container, store), *own))
    else:
        found.values.append(_Value(name, part, store))


def _replace(part: tuple[Any, ...], members: list[Any], store: Callable[[Any], object]) -> None:
    """Put a tuple of these members, some of which a load may have replaced, where `part` is."""
    if any(new is not old for new, old in zip(members, part, strict=True)):
        make = getattr(part, "_make", type(part))  # a named tuple has the former
        store(make(members))


def _named(name: str, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    for key, member in items:
        if not isinstance(key, (str, int)):
            raise InvalidArgument(f"{name}: the key {key!r} of a dict that holds arrays must be a str or an int")
        yield key, member


# What the library itself adds to a state.
_OBJECTS = (DDP, Engine, FSDP, GradScaler, LRSchedule, MetricPart, Optimizer, Sampler, Sharded, TensorParallel)


def _is_leaf(part: Any) -> bool:
    return isinstance(part, _OBJECTS) or is_array(part)


def _is_namespace(part: Any, depth: int = 0) -> bool:
    """Whether a container holds more than plain values, at any depth."""
    if depth > 64:
        return False
    if isinstance(part, Mapping):
        members: Any = part.values()
    elif isinstance(part, (list, tuple)):
        members = part
    else:
        return False
    return any(
        _is_leaf(one) or isinstance(one, (PerRank, Stateful)) or _is_namespace(one, depth + 1) for one in members
    )


def _add(handle: _core.State, name: str, part: Any) -> None:
    if isinstance(part, DDP):
        _core.state_add_ddp(handle, name, part._handle)
    elif isinstance(part, Engine):
        _core.state_add_engine(handle, name, part._handle)
    elif isinstance(part, FSDP):
        _core.state_add_fsdp(handle, name, part._handle)
    elif isinstance(part, TensorParallel):
        _core.state_add_tp(handle, name, part._handle)
    elif isinstance(part, Optimizer):
        _core.state_add_optimizer(handle, name, part._handle)
    elif isinstance(part, GradScaler):
        _core.state_add_grad_scaler(handle, name, part._handle)
    elif isinstance(part, LRSchedule):
        _core.state_add_lr_schedule(handle, name, part._handle)
    elif isinstance(part, Sampler):
        _core.state_add_sampler(handle, name, part._handle)
    elif isinstance(part, MetricPart):
        _core.state_add_metric(handle, name, part.metric._handle, part.comm._handle)
    elif isinstance(part, Sharded):
        dtype: Any = part.dtype or 0  # a DType by now
        pieces = [_view(name, piece, dtype) for piece in part.pieces]
        dtype = pieces[0].dtype if pieces else dtype
        _core.state_add_sharded(handle, name, part.layout._handle, dtype, pieces, part.rank)
    else:
        _core.state_add_tensor(handle, name, _view(name, part))


def _view(name: str, array: Any, dtype: DTypeLike | None = None) -> _core.Tensor:
    try:
        return tensor(array, dtype or None)
    except (InvalidArgument, TypeError, ValueError) as error:  # the latter from PyTorch: of a lazy or meta tensor
        raise InvalidArgument(f"{name}: {error}") from None


def _set_value(handle: _core.State, name: str, value: Any) -> None:
    if type(value) is int and -(2**63) <= value < 2**63:
        _core.state_set_int64(handle, name, value)
    elif type(value) is float:
        _core.state_set_double(handle, name, value)
    else:
        _core.state_set_value(handle, name, encode(value, name))
