"""Pickles that hold only data: what torch.load(weights_only=True) accepts, plus plain types of NumPy and the library.

A pickle is read twice. `refusal` reads it with PyTorch's restricted unpickler and stand-ins for NumPy's constructors.
The stand-ins make nothing but refuse everything that NumPy's own pickles do not contain, because NumPy itself trusts
the sizes in a pickle. A pickle that passes is safe to read.
"""

from __future__ import annotations

import datetime
import decimal
import io
import math
import pathlib
import re
import uuid
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

__all__ = ["refusal"]

_PLAIN_DTYPE = re.compile(r"[biufcSUVMm][0-9]{1,9}")
_UNITS = (b"Y", b"M", b"W", b"D", b"h", b"m", b"s", b"ms", b"us", b"ns", b"ps", b"fs", b"as", b"generic")


class _DType:
    """Stand-in for numpy.dtype."""

    itemsize: int

    def __new__(cls, *arguments: Any) -> _DType:
        text = arguments[0] if arguments else None
        plain = type(text) is str and _PLAIN_DTYPE.fullmatch(text) is not None
        if not plain or arguments[1:] not in ((), (False, True), (False, False)):
            raise UnpicklingError(f"the NumPy dtype {text!r} is not a number, string or time")
        made = super().__new__(cls)
        made.itemsize = np.dtype(text).itemsize
        return made

    def __setstate__(self, state: Any) -> None:
        """Only the byte order may change: arrays that already have the dtype rely on the rest."""
        version, order, *nothing, size, alignment, flags = state[:8]
        sizes = type(size) is type(alignment) is int and size in (-1, self.itemsize) and alignment in (-1, 1, 4)
        if nothing != [None] * 3 or not sizes or flags not in (0, 8) or order not in ("<", ">", "|", "="):
            raise UnpicklingError("a NumPy dtype has fields or wrong sizes")
        if version == 4 and len(state) == 9:
            (attributes, (unit, count, *rest)) = state[8]
            if attributes or unit not in _UNITS or type(count) is not int or count < 1 or rest not in ([1, 1], [1]):
                raise UnpicklingError("a NumPy time has an unknown unit")
        elif version != 3 or len(state) != 8:
            raise UnpicklingError("a NumPy dtype was pickled in an unknown way")


class _NDArray:
    """Stand-in for numpy.ndarray, which a pickle names but does not call."""

    def __new__(cls, *_: Any) -> _NDArray:
        raise UnpicklingError("numpy.ndarray is called")


class _Array:
    """The result of `_reconstruct`."""

    def __setstate__(self, state: Any) -> None:
        version, shape, dtype, fortran, data = state
        known = version == 1 and type(dtype) is _DType and type(fortran) in (bool, int) and type(data) is bytes
        if not known or type(shape) is not tuple or any(type(size) is not int or size < 0 for size in shape):
            raise UnpicklingError("a NumPy array holds objects, or was pickled in an unknown way")
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise UnpicklingError(f"a NumPy array of shape {shape} has {len(data)} bytes")


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _NDArray or shape != (0,) or code != b"b":
        raise UnpicklingError("a NumPy array was pickled in an unknown way")
    return _Array()


def _scalar(dtype: Any, data: Any = None) -> None:
    if type(dtype) is not _DType or type(data) is not bytes or len(data) != dtype.itemsize:
        raise UnpicklingError("a NumPy scalar is an object, or was pickled in an unknown way")


def _deque(items: Any = (), _most: Any = None) -> list[Any]:
    """A list, because the restricted unpickler appends only to lists."""
    return list(items)


def _bytes() -> bytes:
    """The encoding of b"" in PyTorch's pickles."""
    return b""


_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
_DATA: list[Any] = [
    (_DType, "numpy.dtype"),
    (_NDArray, "numpy.ndarray"),
    (_Array, f"{__name__}._Array of no pickle"),
    *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    (_deque, "collections.deque"),
    *((kind, f"{module}.{kind.__name__}") for module in ("pathlib", "pathlib._local") for kind in _PATHS),
    (_bytes, "builtins.bytes"),
    (frozenset, "builtins.frozenset"),
    (io.BytesIO, "_io.BytesIO"),
    *((getattr(datetime, name), f"datetime.{name}") for name in ("date", "datetime", "time", "timedelta", "timezone")),
    (decimal.Decimal, "decimal.Decimal"),
    (uuid.UUID, "uuid.UUID"),
]


def refusal(content: bytes) -> str | None:
    """Why a file of torch.save holds more than data; None if it holds only data. Nothing is executed."""
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return None
    except Exception:
        try:
            with torch.serialization.safe_globals(_DATA):
                torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            return None
        except Exception as error:
            return _reason(error)


def _reason(error: Exception) -> str:
    """The sentence of torch.load's error that names the reason."""
    text = str(error).split("WeightsUnpickler error:")[-1].strip()
    return text.split("\n")[0].split(" Please use ")[0].rstrip(".") + "."
