"""Arrays on their way into the library: what is taken, what is refused, and what stays alive."""

import array
import gc
import weakref

import numpy as np
import pytest
import tessera as ts
from tessera import _core
from tessera.tensor import DType, dtype_of, tensor

NUMPY_TYPES = ["float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool"]


@pytest.mark.parametrize("name", NUMPY_TYPES)
def test_numpy_types_are_known(name):
    view = tensor(np.zeros((2, 3), name))
    assert DType(view.dtype).numpy == np.dtype(name)
    assert view.shape == (2, 3)
    assert dtype_of(name) == dtype_of(np.dtype(name)) == view.dtype


def test_bfloat16_comes_by_its_own_type_or_by_naming_it():
    bits = np.zeros(4, np.uint16)
    assert tensor(bits, "bfloat16").dtype == tensor(bits, DType.BF16).dtype == DType.BF16
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert tensor(np.zeros(4, ml_dtypes.bfloat16)).dtype == DType.BF16
    assert dtype_of(ml_dtypes.bfloat16) is DType.BF16


class ArrayInterface:
    def __init__(self, source):
        self.source = source

    @property
    def __array_interface__(self):
        return self.source.__array_interface__


class DLPack:
    def __init__(self, source, device=(1, 0), old=False):
        self.source, self.device, self.old = source, device, old

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.old and options:
            raise TypeError("an old producer")
        if self.device[0] == 2:
            assert options.pop("stream") == -1, "no stream waits for the export"
        return self.source.__dlpack__(**options)


SOURCES = {
    "numpy": lambda x: x,
    "memoryview": memoryview,
    "array interface": ArrayInterface,
    "dlpack": DLPack,
    "old dlpack": lambda x: DLPack(x, old=True),
}


@pytest.mark.parametrize("wrap", SOURCES.values(), ids=SOURCES)
def test_every_protocol_reaches_the_same_memory(wrap, alone: ts.Comm):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    out = np.zeros((2, 3), np.float32)
    alone.all_gather(wrap(x), wrap(out))
    assert (out == x).all()


def test_pytorch_tensors_are_taken(alone: ts.Comm, tmp_path):
    torch = pytest.importorskip("torch")
    out = torch.zeros(2, 3, dtype=torch.bfloat16)
    alone.all_gather(torch.ones(2, 3, dtype=torch.bfloat16), out)
    assert (out == 1).all()
    weight = torch.ones(4)
    with ts.Saver(alone, tmp_path) as saver:
        saver.save(1, ts.State(weight=weight))
        weight.zero_()
        saver.resume(ts.State(weight=weight))
    assert (weight == 1).all()
    with pytest.raises(ts.InvalidArgument, match="contiguous"):
        alone.all_reduce(torch.ones(4, 4).t()[:2])
    with pytest.raises(ts.InvalidArgument, match="grad"):
        alone.all_reduce(torch.ones(3, requires_grad=True))


def test_python_arrays_are_taken(alone: ts.Comm):
    out = array.array("i", [0, 0])
    alone.all_gather(array.array("i", [3, 4]), out)
    assert list(out) == [3, 4]
    data = bytearray(2)
    alone.all_gather(b"hi", data)
    assert data == b"hi"


@pytest.mark.parametrize("bad", [[1.0, 2.0], None, 3, "text", object()], ids=lambda bad: type(bad).__name__)
def test_what_is_no_array_is_a_type_error(bad, alone: ts.Comm):
    with pytest.raises(TypeError, match="not a tensor"):
        alone.all_reduce(bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros(2, ">f4"), "not supported|byte order"),
        (np.zeros(2, "U4"), "not supported"),
        (np.zeros((4, 4), np.float32)[:, ::2], "contiguous"),
        (np.zeros((4, 4), np.float32).T[:2], "contiguous"),
        (np.zeros(4, np.float32)[::-1], "contiguous"),
        (np.zeros(12, np.uint8)[2:10:2][:2], "contiguous"),
        (np.zeros((1,) * 9, np.float32), "dimensions"),
        (DLPack(np.zeros(2, np.float32), device=(10, 0)), "device"),
    ],
    ids=["byte order", "text", "columns", "transposed", "reversed", "step", "9-d", "rocm"],
)
def test_bad_arrays_are_refused_in_words(bad, message, alone: ts.Comm):
    with pytest.raises(ts.InvalidArgument, match=message):
        alone.all_reduce(bad)
    alone.barrier()


def test_an_array_on_a_cuda_device_needs_a_transport(alone: ts.Comm):
    on_device = DLPack(np.zeros(2, np.float32), device=(2, 3))
    with pytest.raises(ts.Unsupported, match="on CUDA device 3, but this communicator has no transport for it"):
        alone.all_reduce(on_device)


@pytest.mark.parametrize("dtype", [bool, np.int16, np.uint16, np.uint32, np.uint64, np.complex64, np.complex128])
def test_dtypes_that_cannot_be_reduced_are_unsupported(dtype, alone: ts.Comm):
    with pytest.raises(ts.Unsupported, match="cannot be reduced; use f16, bf16, f32"):
        alone.all_reduce(np.zeros(2, dtype))
    alone.barrier()


@pytest.mark.parametrize("wrap", SOURCES.values(), ids=SOURCES)
def test_a_read_only_array_is_taken_for_input_only(wrap, alone: ts.Comm):
    x = np.ones(2, np.float32)
    x.flags.writeable = False
    source = wrap(x)
    if getattr(source, "old", False):  # that protocol cannot say "read-only", so its producer refuses
        with pytest.raises(ts.InvalidArgument, match="readonly"):
            tensor(source, writable=False)
    else:
        tensor(source, writable=False)
    with pytest.raises(ts.InvalidArgument, match=r"read-?only|not writ"):
        alone.all_reduce(source)


def test_a_dtype_of_another_width_is_refused():
    with pytest.raises(ts.InvalidArgument, match="bytes"):
        tensor(np.zeros(2, np.float32), "bfloat16")


def test_the_array_lives_as_long_as_its_view():
    x = np.ones(3, np.float32)
    gone = weakref.ref(x)
    view = tensor(x)
    del x
    gc.collect()
    assert gone() is not None
    del view
    assert gone() is None


def test_a_view_of_an_address_keeps_the_memorys_owner(alone: ts.Comm):
    x = np.ones((2, 3), np.float32)
    gone = weakref.ref(x)
    view = _core.tensor_at(x.ctypes.data, DType.F32, 6, x)
    assert view.shape == (6,)
    assert view.dtype == DType.F32
    _core.comm_broadcast(alone._handle, [view], 0, False)
    del x
    gc.collect()
    assert gone() is not None
    del view
    assert gone() is None
    with pytest.raises(ts.InvalidArgument, match="number of elements"):
        _core.tensor_at(0, DType.F32, -1, None)


def test_empty_and_zero_dimensional_arrays_are_taken(alone: ts.Comm):
    alone.all_reduce(np.zeros((0, 3), np.float32))
    scalar = np.array(2.5)
    alone.all_reduce(scalar)
    assert scalar == 2.5


def test_memory_of_the_library_outlives_its_handles(alone: ts.Comm):
    x = alone.empty((3, 4), "float64")
    assert x.shape == (3, 4)
    assert not x.any()
    assert x.ctypes.data % 4096 == 0
    part = x[1]
    x[:] = 2
    del x
    gc.collect()
    assert (part == 2).all()
    assert alone.buffer(100).dtype == np.uint8
