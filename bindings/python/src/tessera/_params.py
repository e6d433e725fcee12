"""Parameters as models take them: named arrays, and gradients by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import _core
from ._base import there_are
from ._core import CudaArray
from .errors import InvalidArgument, InvalidState, NotFound
from .tensor import ArrayLike, DTypeLike, dtype_of, is_array

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Block", "Deferred", "Grads", "Params", "named", "parameter", "parameter_or_deferred"]

Params = Mapping[str, ArrayLike] | Sequence[tuple[str, ArrayLike]] | Sequence[ArrayLike]
"""Named arrays: a mapping, (name, array) pairs, or bare arrays, which are named "0", "1", ..."""


def named(params: Params | Iterable[Any], what: str = "params") -> tuple[list[str], list[Any]]:
    """The names and arrays of parameters, in order."""
    if isinstance(params, Mapping):
        for name in params:
            if not isinstance(name, str):
                raise TypeError(f"{what} has the key {name!r}; parameter names must be str")
        return list(params), list(params.values())
    if is_array(params) or isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
        raise TypeError(f"{what} is a {type(params).__name__}; it must be a dict of arrays, {{'weight': weight, ...}}")
    names, arrays = [], []
    for number, param in enumerate(params):
        pair = isinstance(param, tuple) and len(param) == 2 and isinstance(param[0], str)
        names.append(param[0] if pair else str(number))
        arrays.append(param[1] if pair else param)
    return names, arrays


def parameter(name: str, array: ArrayLike) -> _core.Tensor:
    """An array as the library takes it; errors name the parameter. The library itself refuses arrays that are not
    contiguous, because it reports that to all ranks."""
    try:
        return _core.Tensor(array, strided=True)
    except (InvalidArgument, TypeError) as error:
        raise type(error)(f"parameter {name!r}: {error}") from None


def parameter_or_deferred(name: str, given: ArrayLike | Deferred) -> _core.Tensor:
    """The same where the values may come later."""
    if isinstance(given, Deferred):
        return _core.described(tuple(given.shape), int(dtype_of(given.dtype)), given.device)
    return parameter(name, given)


def _advice(name: str, array: npt.NDArray[Any], view: npt.NDArray[Any]) -> str:
    """How to write `array`, whose shape or dtype differs, into the view."""
    into = f"grads[{name!r}][...] ="
    if array.shape == view.shape:
        return f"{into} value converts"
    try:
        broadcasts = np.broadcast_shapes(array.shape, view.shape) == view.shape
    except ValueError:
        broadcasts = False
    if broadcasts:
        return f"{into} value broadcasts" + ("" if array.dtype == view.dtype else " and converts")
    if array.shape == view.shape[::-1]:
        return f"for a transposed gradient, {into} np.transpose(value)"
    if array.size == view.size:
        return f"for the same elements in the same order, {into} np.reshape(value, {view.shape})"
    return f"compute a gradient of shape {view.shape}"


class Grads(Mapping[str, Any]):
    """Gradients by name: views to write them into, NumPy arrays or, of parameters on a device, `CudaArray`.

    Assigning to a name copies into the view, if that is an array.
    """

    __slots__ = ("_of", "_views")

    def __init__(self, views: Mapping[str, npt.NDArray[Any] | CudaArray], of: str) -> None:
        self._views = views
        self._of = of  # in messages: "the model"

    def _no(self, name: object) -> str:
        return f"{self._of} has no gradient of {name!r}; {there_are(name, self._views)}"

    def __getitem__(self, name: str) -> Any:
        if name not in self._views:
            raise KeyError(self._no(name))
        return self._views[name]

    def __setitem__(self, name: str, value: ArrayLike) -> None:
        """Copy an array with the gradient's shape and dtype into the view."""
        if name not in self._views:
            raise NotFound(self._no(name))
        view = self._views[name]
        if value is view:  # grads[name] += ... has written already
            return
        if isinstance(view, CudaArray):
            raise InvalidArgument(
                f"the gradient of {name!r} is on CUDA device {view.device}; write it there, such as by "
                f"torch.from_dlpack(grads[{name!r}]).copy_(value)"
            )
        array = np.asarray(value)
        if array.shape != view.shape or array.dtype != view.dtype:
            raise InvalidArgument(
                f"the gradient of {name!r} has shape {view.shape} and dtype {view.dtype}, got shape {array.shape} and "
                f"dtype {array.dtype}; {_advice(name, array, view)}"
            )
        view[...] = array

    def __contains__(self, name: object) -> bool:  # also after the views have expired
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __repr__(self) -> str:
        return f"<gradients of {', '.join(self._views)}>"


class Block(Mapping[str, Any]):
    """Views by name, valid in a block; only their names remain afterwards."""

    __slots__ = ("_names", "_of", "_views", "_what")

    def __init__(self, views: dict[str, Any], what: str, of: str) -> None:
        self._names = tuple(views)
        self._views: dict[str, Any] | None = views
        self._what = what  # in messages: "the gradient of",
        self._of = of  # and "unit 'fc1'"

    def end(self) -> None:
        self._views = None

    def __getitem__(self, name: str) -> Any:
        if self._views is not None and name in self._views:
            return self._views[name]
        if name not in self._names:
            raise KeyError(f"{self._of} has no parameter {name!r}; {there_are(name, self._names)}")
        raise InvalidState(
            f"{self._what} {name!r} is valid only inside its block; copy what you need inside the block, or enter its "
            "unit again"
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


class Deferred(NamedTuple):
    """A parameter whose values are written into its shards later; no rank ever needs memory for all of it."""

    shape: tuple[int, ...]
    dtype: DTypeLike = "float32"
    device: int | None = None
    """The number of the CUDA device that its shards are on; None: the CPU."""
