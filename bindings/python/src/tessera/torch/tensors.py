"""PyTorch's tensors as the core takes them: contiguous, in CPU memory, of a dtype that it supports.

If a tensor already is, its own memory is used. Dtypes that the core lacks are passed as integers of their size.
"""

from __future__ import annotations

import torch

from ..errors import InvalidArgument, Unsupported
from ..tensor import DType

__all__ = ["CORE", "Copies", "bits_of", "core_dtype", "dtype_name", "named_dtype", "of_core", "staged"]

_MAX_NDIM = 8  # TSR_MAX_NDIM
CORE = {
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float32: DType.F32,
    torch.float64: DType.F64,
    torch.int8: DType.I8,
    torch.uint8: DType.U8,
    torch.int16: DType.I16,
    torch.int32: DType.I32,
    torch.int64: DType.I64,
    torch.bool: DType.BOOL,
    torch.uint16: DType.U16,
    torch.uint32: DType.U32,
    torch.uint64: DType.U64,
    torch.float8_e4m3fn: DType.F8_E4M3,
    torch.float8_e5m2: DType.F8_E5M2,
    torch.float8_e8m0fnu: DType.F8_E8M0,
    torch.complex64: DType.C64,
    torch.complex128: DType.C128,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """The dtype with a name.

    Raises
    ------
    Unsupported
        This PyTorch has no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Unsupported(f"this PyTorch ({torch.__version__}) has no dtype {name!r}")
    return found


def of_core(dtype: int) -> torch.dtype:
    """PyTorch's dtype for a core dtype."""
    return next(known for known, core in CORE.items() if int(core) == int(dtype))


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which a tensor of `dtype` is passed to the core; the same if the core supports it."""
    return dtype if dtype in CORE else _BITS[dtype.itemsize]


def core_dtype(dtype: torch.dtype) -> DType:
    """The core's dtype as which `dtype` is passed."""
    return CORE[bits_of(dtype)]


class Copies:
    """Copies of tensors, in memory that is reused from save to save; pinned for tensors from a GPU."""

    def __init__(self) -> None:
        self._kept: dict[object, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor, key: object) -> torch.Tensor:
        """The values as a contiguous CPU tensor, in the memory for this key."""
        kept = self._kept.get(key)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[key] = kept
        with torch.no_grad():
            kept.copy_(tensor)
        return kept


def staged(tensor: torch.Tensor, name: str, copies: Copies | None = None, key: object = None) -> torch.Tensor:
    """The values as a contiguous plain CPU tensor, as the core takes them: in the same memory if possible.

    With `copies` the values are always copied there, under the name and `key`.
    """
    if tensor.layout is not torch.strided:
        raise Unsupported(f"{name!r} is a {tensor.layout} tensor; only dense tensors can be saved")
    if tensor.device.type == "meta":
        raise InvalidArgument(f"{name!r} is on the meta device and has no values to save")
    if tensor.is_quantized:
        raise Unsupported(f"{name!r} is quantised; save its int_repr() instead")
    if tensor.ndim > _MAX_NDIM:
        raise InvalidArgument(f"{name!r} has {tensor.ndim} dimensions; at most {_MAX_NDIM} are supported")
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.to("cpu").contiguous() if copies is None else copies.of(plain, (name, key))
    travels = bits_of(plain.dtype)
    return plain if travels is plain.dtype else plain.view(travels)
