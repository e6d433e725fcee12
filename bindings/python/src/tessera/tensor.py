"""Element types, and conversion of arrays to and from the library.

The library takes arrays in CPU memory that support the buffer protocol, ``__array_interface__`` or ``__dlpack__``:
NumPy arrays, `array.array`, `memoryview`, PyTorch's CPU tensors. Nothing is copied; arrays must be contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, overload, runtime_checkable

import numpy as np

from . import _core
from .errors import InvalidArgument, Named

if TYPE_CHECKING:
    import numpy.typing as npt
    from _typeshed import ReadableBuffer

__all__ = ["ArrayLike", "DType", "DTypeLike"]


class DType(Named):
    """Element types of the library. Those from ``I16`` on are for checkpoints and cannot be reduced."""

    F16 = 1
    BF16 = 2
    F32 = 3
    F64 = 4
    I8 = 5
    U8 = 6
    I32 = 7
    I64 = 8
    I16 = 9
    BOOL = 10
    U16 = 11
    U32 = 12
    U64 = 13
    F8_E4M3 = 14
    F8_E5M2 = 15
    F8_E8M0 = 16
    C64 = 17
    C128 = 18

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type; for ``BF16`` and the 8-bit floats that of ml_dtypes, or ``uint16`` or ``uint8`` for their
        bits if it is not installed."""
        return _numpy_of(self)


@runtime_checkable
class _ArrayInterface(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...


@runtime_checkable
class _DLPack(Protocol):
    def __dlpack__(self) -> object: ...


if TYPE_CHECKING:
    ArrayLike = npt.NDArray[Any] | ReadableBuffer | _ArrayInterface | _DLPack
    DTypeLike = DType | npt.DTypeLike
else:
    ArrayLike = object
    DTypeLike = object

_NAMES = {
    DType.F16: "float16",
    DType.F32: "float32",
    DType.F64: "float64",
    DType.I8: "int8",
    DType.U8: "uint8",
    DType.I32: "int32",
    DType.I64: "int64",
    DType.I16: "int16",
    DType.BOOL: "bool",
    DType.U16: "uint16",
    DType.U32: "uint32",
    DType.U64: "uint64",
    DType.C64: "complex64",
    DType.C128: "complex128",
}
_ML_NAMES = {
    DType.BF16: "bfloat16",
    DType.F8_E4M3: "float8_e4m3fn",
    DType.F8_E5M2: "float8_e5m2",
    DType.F8_E8M0: "float8_e8m0fnu",
}
_BY_NAME = {name: dtype for dtype, name in (_NAMES | _ML_NAMES).items()}


@cache
def _numpy_of(dtype: DType) -> np.dtype[Any]:
    if dtype in _NAMES:
        return np.dtype(_NAMES[dtype])
    bits: np.dtype[Any] = np.dtype("uint16" if dtype is DType.BF16 else "uint8")
    try:
        import ml_dtypes
    except ImportError:
        return bits
    scalar = getattr(ml_dtypes, _ML_NAMES[dtype], None)  # older ones lack float8_e8m0fnu
    return bits if scalar is None else np.dtype(scalar)


def has_other_bits(dtype: DType) -> bool:
    """Whether NumPy lacks this type, so that an array may hold its bits as another type."""
    return dtype in _ML_NAMES


def dtype_of(dtype: DTypeLike) -> DType:
    """The library's element type for a `DType`, a NumPy type or a name ("float32", "bfloat16", "bf16")."""
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str) and dtype.upper() in DType.__members__:
        return DType[dtype.upper()]
    name: object = dtype
    if not (isinstance(dtype, str) and dtype in _BY_NAME):
        try:
            known = np.dtype(dtype)
            name = known.name if known.isnative else known
        except TypeError:
            name = repr(dtype)
    found = _BY_NAME.get(str(name))
    if found is None:
        raise InvalidArgument(f"dtype {name} is not supported; supported are {', '.join(sorted(_BY_NAME))}")
    return found


def tensor(source: ArrayLike, dtype: DTypeLike | None = None, *, writable: bool = True) -> _core.Tensor:
    """The view of an array that `_core` takes; `dtype` is the element type if the array cannot provide it."""
    return _core.Tensor(source, 0 if dtype is None else int(dtype_of(dtype)), writable)


def tensors(source: ArrayLike | Sequence[ArrayLike], dtype: DTypeLike | None = None) -> list[_core.Tensor]:
    """One array or a list or tuple of them, as a list."""
    arrays: Sequence[Any] = source if isinstance(source, (list, tuple)) else [source]
    try:
        return [tensor(array, dtype) for array in arrays]
    except (InvalidArgument, TypeError):
        if arrays is source and any(isinstance(one, (int, float)) for one in arrays):
            what = f"a {type(source).__name__} of numbers"
            raise TypeError(f"{what} is not a tensor; pass an array: np.array(numbers)") from None
        raise


@overload
def array_over(memory: _core.Memory, dtype: int, shape: tuple[int, ...]) -> npt.NDArray[Any]: ...
@overload
def array_over(memory: _core.CudaArray, dtype: int, shape: tuple[int, ...]) -> _core.CudaArray: ...
def array_over(memory: Any, dtype: int, shape: tuple[int, ...]) -> Any:
    """An array over memory of the library, which it keeps alive: of NumPy, or on a device a `CudaArray`."""
    if isinstance(memory, _core.CudaArray):
        return memory
    return np.ndarray(shape, _numpy_of(DType(dtype)), memoryview(memory))


def is_array(value: object) -> bool:
    """Whether `value` is an array that a checkpoint loads in place, not a plain Python value."""
    if isinstance(value, (np.ndarray, bytearray)):
        return True
    if isinstance(value, (np.generic, bytes, str, int, float)) or value is None:
        return False
    if isinstance(value, memoryview):
        return not value.readonly
    return isinstance(value, (_ArrayInterface, _DLPack)) or type(value).__module__ == "array"
