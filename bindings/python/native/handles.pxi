# The machinery under `_core.pyx`: errors, Ctrl-C, handles and their guards, callbacks, tensors. Included, not compiled
# alone. The invariant: no C handle is used after its destroy, by two exclusive callers at once, or in a forked child.
cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer,
    PyObject_GetBuffer)
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.string cimport memset

import atexit
import threading

from tessera.errors import InvalidArgument, InvalidState, _from_native


cdef extern from "_gate.h" nogil:
    int gate_enter()
    void gate_leave()
    void gate_close()
    int watch_forks()
    unsigned current_generation()
    int thread_is_armed
    int thread_has_pending


cdef extern from "Python.h":
    void PyErr_SetInterrupt()


# ---------------------------------------------------------------- errors

cdef object exception_of(const tsr_error *error):
    """The exception for `error` and, as its __cause__, those for its causes."""
    cdef int32_t domain = 0
    cdef int32_t native = tsr_error_native(error, &domain)
    cdef const tsr_error *cause = tsr_error_cause(error)
    return _from_native(
        tsr_error_code(error), tsr_error_message(error).decode("utf-8", "replace"), tsr_error_rank(error),
        tsr_error_peer(error), tsr_error_operation(error).decode("utf-8", "replace"), tsr_error_sequence(error),
        domain, native, tsr_error_retriable(error) != 0, exception_of(cause) if cause != NULL else None)


cdef object detached(tsr_error *error):
    """The exception for a detached error, which is freed; None for NULL."""
    if error == NULL:
        return None
    try:
        return exception_of(error)
    finally:
        tsr_error_destroy(error)


cdef int check(tsr_status status) except -1 nogil:
    """Raise what a call failed with. Takes the error on the failing thread before anything else can run there."""
    cdef tsr_error *error = NULL
    if status == TSR_OK and not thread_has_pending:
        return 0
    if status != TSR_OK and tsr_error_last() != NULL and tsr_error_take(&error) != TSR_OK:
        error = NULL
    with gil:
        raise_failure(status, error)
    return 0


cdef int raise_failure(tsr_status status, tsr_error *error) except -1:
    global pending
    failure = detached(error)
    if thread_has_pending:
        if status == TSR_OK:  # the signal came as the call ended: the result counts, the signal is delivered again
            redeliver()
            return 0
        thread_has_pending_clear()
        caught, pending = pending, None
        raise caught from failure
    if failure is None:
        name = tsr_status_name(status).decode()
        failure = _from_native(status, f"Tessera failed with {name}", -1, -1, "", -1, 0, 0, False, None)
    raise failure


# ---------------------------------------------------------------- Ctrl-C

# What a Python signal handler raised inside a blocking call of the main thread.
cdef object pending = None


cdef void thread_has_pending_clear() noexcept nogil:
    global thread_has_pending
    thread_has_pending = 0


cdef int32_t on_poll(void *user_data) noexcept with gil:
    """Runs the Python signal handlers during a wait of the main thread; non-zero when one raised."""
    global pending, thread_has_pending
    if thread_has_pending:
        return 1
    try:
        PyErr_CheckSignals()
    except BaseException as error:
        pending = error
        thread_has_pending = 1
        return 1
    return 0


cdef void redeliver() noexcept:
    global pending
    thread_has_pending_clear()
    pending = None
    PyErr_SetInterrupt()


cdef int arm() except -1:
    """Once a thread: Python runs signal handlers on the main thread, so that one alone polls for them."""
    global thread_is_armed
    if thread_is_armed:
        return 0
    if threading.current_thread() is threading.main_thread():
        check(tsr_interrupt_set(on_poll, NULL))
    thread_is_armed = 1
    return 0


# ---------------------------------------------------------------- handles

@cython.no_gc_clear
cdef class Handle:
    """A handle of the C library, and what it borrows.

    What is made from a parent's memory pins the parent: a pinned handle that is closed refuses calls at once and is
    destroyed when the last pin goes, so that no view and no optimizer is left over freed memory.
    """

    cdef void *ptr
    cdef int calls          # calls that are inside now, on any thread
    cdef int pins           # living objects that use this one's memory
    cdef bint in_exclusive  # one of the calls needs the object for itself
    cdef bint shut          # closed by the user
    cdef bint borrowed      # another handle owns it: never destroyed here
    cdef unsigned generation
    cdef object keep        # what it borrows but does not pin
    cdef list parents       # handles that it pins
    cdef object __weakref__

    def __cinit__(self):
        self.generation = current_generation()

    def __init__(self):
        raise TypeError(f"{type(self).__name__} handles are made by functions of tessera._core")

    def __dealloc__(self):
        self.release()

    cdef void free(self) noexcept nogil:
        pass

    cdef void release(self) noexcept:
        """Destroy, once. In a forked child nothing is touched: threads and segments are the parent's."""
        cdef Handle parent
        if self.ptr == NULL:
            return
        if not self.borrowed and self.generation == current_generation():
            with nogil:
                self.free()
            if thread_has_pending:
                redeliver()
        self.ptr = NULL
        if self.parents is not None:
            for parent in self.parents:
                unpin(parent)

    @property
    def closed(self):
        return self.shut or self.ptr == NULL

    @property
    def foreign(self):
        """Whether the handle was made before this process was forked."""
        return self.generation != current_generation()


cdef void unpin(Handle handle) noexcept:
    handle.pins -= 1
    if handle.pins == 0 and handle.shut:
        handle.release()


cdef object adopt(Handle handle, void *ptr, object keep=None, list parents=None):
    """Complete a new handle object around `ptr`."""
    cdef Handle parent
    handle.ptr = ptr
    handle.keep = keep
    handle.parents = parents
    if parents is not None:
        for parent in parents:
            parent.pins += 1
    return handle


cdef int retire(Handle handle) except -1:
    """The explicit destroy; closing twice is fine."""
    if handle.shut or handle.ptr == NULL:
        return 0
    if handle.calls > 0 and handle.generation == current_generation():
        raise InvalidState(f"the {type(handle).__name__} is in use by another thread: it cannot be closed now")
    handle.shut = True
    if handle.pins == 0:
        handle.release()
        handle.keep = None
    return 0


@cython.final
@cython.no_gc
cdef class Lease:
    """The right to use a handle's pointer for the length of one call."""

    cdef Handle handle
    cdef void *ptr
    cdef bint exclusive

    def __dealloc__(self):
        if self.ptr != NULL:
            self.handle.calls -= 1
            if self.exclusive:
                self.handle.in_exclusive = False


cdef Lease borrow(Handle handle, bint exclusive):
    if handle.shut or handle.ptr == NULL:
        raise InvalidState(f"the {type(handle).__name__} is closed")
    if handle.generation != current_generation():
        raise InvalidState(f"the {type(handle).__name__} belongs to the parent of this forked process; create one here, "
                           "or start processes with the 'spawn' method")
    if exclusive and handle.in_exclusive:
        raise InvalidState(f"the {type(handle).__name__} is in use by another thread")
    arm()
    cdef Lease lease = Lease.__new__(Lease)
    lease.handle = handle
    lease.ptr = handle.ptr
    lease.exclusive = exclusive
    handle.calls += 1
    if exclusive:
        handle.in_exclusive = True
    return lease


cdef Lease use(Handle handle):
    """For calls whose handle argument is not const."""
    return borrow(handle, True)


cdef Lease share(Handle handle):
    """For calls whose handle argument is const: any number of threads at once."""
    return borrow(handle, False)


# ---------------------------------------------------------------- text

cdef bytes utf8(str text, str what):
    if "\0" in text:
        raise InvalidArgument(f"{what} {text!r} holds a zero character")
    return text.encode("utf-8", "surrogateescape")


cdef const char *text_or_null(list keep, object text, str what) except? NULL:
    """A C string that lives as long as `keep`; NULL for None."""
    if text is None:
        return NULL
    encoded = utf8(text, what)
    keep.append(encoded)
    return PyBytes_AsString(encoded)


cdef object unknown_option(str what, str name):
    return TypeError(f"{what} have no {name!r}")


# ---------------------------------------------------------------- callbacks

cdef void on_work_done(tsr_status status, void *user_data) noexcept nogil:
    if not gate_enter():
        return
    with gil:
        call_back(<object>user_data, (status,))
    gate_leave()


cdef void on_forgotten(tsr_status status, void *user_data) noexcept nogil:
    pass


cdef void on_log(int32_t level, const char *line, void *user_data) noexcept nogil:
    if not gate_enter():
        return
    with gil:
        call_back(<object>user_data, (level, line.decode("utf-8", "replace")))
    gate_leave()


cdef void on_drop(void *user_data) noexcept nogil:
    if not gate_enter():
        return
    with gil:
        Py_DECREF(<object>user_data)
    gate_leave()


cdef void call_back(object fn, tuple arguments) noexcept:
    """A callback's exception cannot reach anybody: it is reported as unraisable."""
    fn(*arguments)


def _at_exit():
    with nogil:
        gate_close()


# ---------------------------------------------------------------- tensors

cdef extern from *:
    """
    #include <stdint.h>
    /* DLPack's tensor, versions 0 and 1, as its specification lays it out. */
    typedef struct { void *data; int32_t device_type, device_id; int32_t ndim; uint8_t code, bits; uint16_t lanes;
                     int64_t *shape, *strides; uint64_t byte_offset; } dl_tensor;
    typedef struct { uint32_t major, minor; void *context; void (*deleter)(void *); uint64_t flags;
                     dl_tensor tensor; } dl_versioned;
    """
    ctypedef struct dl_tensor:
        void *data
        int32_t device_type
        int32_t device_id
        int32_t ndim
        unsigned char code
        unsigned char bits
        uint16_t lanes
        int64_t *shape
        int64_t *strides
        uint64_t byte_offset
    ctypedef struct dl_versioned:
        uint32_t major
        uint64_t flags
        dl_tensor tensor


# (kind letter, bytes) of struct formats and NumPy's array interface; DLPack's (code, bits).
cdef dict KINDS = {
    ("f", 2): TSR_DTYPE_F16, ("f", 4): TSR_DTYPE_F32, ("f", 8): TSR_DTYPE_F64, ("i", 1): TSR_DTYPE_I8,
    ("u", 1): TSR_DTYPE_U8, ("i", 2): TSR_DTYPE_I16, ("i", 4): TSR_DTYPE_I32, ("i", 8): TSR_DTYPE_I64,
    ("b", 1): TSR_DTYPE_BOOL,
}
cdef dict FORMATS = {"e": "f", "f": "f", "d": "f", "b": "i", "h": "i", "i": "i", "l": "i", "q": "i", "n": "i", "B": "u",
                     "?": "b"}
cdef dict DLPACK = {
    (2, 16): TSR_DTYPE_F16, (4, 16): TSR_DTYPE_BF16, (2, 32): TSR_DTYPE_F32, (2, 64): TSR_DTYPE_F64,
    (0, 8): TSR_DTYPE_I8, (1, 8): TSR_DTYPE_U8, (0, 16): TSR_DTYPE_I16, (0, 32): TSR_DTYPE_I32, (0, 64): TSR_DTYPE_I64,
    (6, 8): TSR_DTYPE_BOOL,
}
cdef dict ITEM_SIZES = {
    TSR_DTYPE_F16: 2, TSR_DTYPE_BF16: 2, TSR_DTYPE_F32: 4, TSR_DTYPE_F64: 8, TSR_DTYPE_I8: 1, TSR_DTYPE_U8: 1,
    TSR_DTYPE_I16: 2, TSR_DTYPE_I32: 4, TSR_DTYPE_I64: 8, TSR_DTYPE_BOOL: 1,
}


@cython.final
@cython.no_gc_clear
cdef class Tensor:
    """A view of memory that a Python object owns, as the C library takes it. Keeps the object's memory alive."""

    cdef tsr_tensor view
    cdef int64_t shape_words[8]
    cdef int64_t stride_words[8]
    cdef Py_buffer buffer
    cdef bint has_buffer
    cdef object owner

    def __init__(self, object source, int dtype=0, bint writable=True):
        memset(&self.view, 0, sizeof(tsr_tensor))
        self.view.device_type = TSR_DEVICE_CPU
        self.view.shape = self.shape_words
        self.view.strides = self.stride_words
        if PyObject_CheckBuffer(source) and self.from_buffer(source, dtype, writable):
            return
        if hasattr(source, "__array_interface__"):
            self.from_array_interface(source, dtype, writable)
        elif hasattr(source, "__dlpack__"):
            self.from_dlpack(source, dtype, writable)
        else:
            raise TypeError(f"a {type(source).__name__} is no tensor: wanted is a NumPy array or an object with the "
                            "buffer protocol, __array_interface__ or __dlpack__")

    def __dealloc__(self):
        if self.has_buffer:
            PyBuffer_Release(&self.buffer)

    cdef int from_buffer(self, object source, int dtype, bint writable) except -1:
        """0 if the array interface has to tell more: ml_dtypes' types have no buffer format."""
        try:
            PyObject_GetBuffer(source, &self.buffer, PyBUF_STRIDES | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0))
        except (BufferError, ValueError) as error:
            if hasattr(source, "__array_interface__"):
                return 0
            raise InvalidArgument(f"the {type(source).__name__} cannot be used here: {error}") from None
        self.has_buffer = True
        form = self.buffer.format.decode() if self.buffer.format != NULL else "B"
        letter = form[1:] if form[:1] in ("@", "=", "<") else form
        found = KINDS.get((FORMATS.get(letter), self.buffer.itemsize), 0)
        self.set_dtype(found, dtype, self.buffer.itemsize, f"format {form!r}")
        self.set_dims(self.buffer.ndim)
        cdef int i
        for i in range(self.buffer.ndim):
            self.shape_words[i] = self.buffer.shape[i]
            self.set_stride(i, self.buffer.strides[i], self.buffer.itemsize)
        self.view.data = self.buffer.buf
        return 1

    cdef int from_array_interface(self, object source, int dtype, bint writable) except -1:
        cdef dict interface = source.__array_interface__
        if interface.get("data") is None:
            raise InvalidArgument(f"the array interface of the {type(source).__name__} names no memory")
        address, read_only = interface["data"]
        if writable and read_only:
            raise InvalidArgument(f"the {type(source).__name__} is read-only; this call writes into it")
        form = interface["typestr"]
        if form[0] == ">":
            raise InvalidArgument(f"the byte order of dtype {form!r} is not this machine's")
        size = int(form[2:])
        name = getattr(getattr(source, "dtype", None), "name", "")
        found = TSR_DTYPE_BF16 if name == "bfloat16" else KINDS.get((form[1], size), 0)
        self.set_dtype(found, dtype, size, f"dtype {name or form}")
        shape = interface["shape"]
        strides = interface.get("strides")
        self.set_dims(len(shape))
        cdef int i
        for i in range(len(shape)):
            self.shape_words[i] = shape[i]
            if strides is not None:
                self.set_stride(i, strides[i], size)
        if strides is None:
            self.view.strides = NULL
        self.view.data = <void *><size_t>address
        self.owner = source
        return 0

    cdef int from_dlpack(self, object source, int dtype, bint writable) except -1:
        kind = int(source.__dlpack_device__()[0])
        if kind != TSR_DEVICE_CPU:
            raise InvalidArgument(f"the {type(source).__name__} lies on DLPack device {kind}; this call takes tensors "
                                  "in the memory of the CPU")
        try:
            try:
                capsule = source.__dlpack__(max_version=(1, 1))
            except TypeError:
                capsule = source.__dlpack__()
        except (BufferError, RuntimeError) as error:
            raise InvalidArgument(f"the {type(source).__name__} cannot be used here: {error}") from None
        cdef dl_tensor *tensor
        cdef dl_versioned *versioned
        if PyCapsule_IsValid(capsule, "dltensor_versioned"):
            versioned = <dl_versioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
            if versioned.major != 1:
                raise InvalidArgument(f"DLPack {versioned.major} of the {type(source).__name__} is not known")
            if writable and versioned.flags & 1:
                raise InvalidArgument(f"the {type(source).__name__} is read-only; this call writes into it")
            tensor = &versioned.tensor
        else:
            tensor = <dl_tensor *>PyCapsule_GetPointer(capsule, "dltensor")
        found = DLPACK.get((tensor.code, tensor.bits), 0) if tensor.lanes == 1 else 0
        self.set_dtype(found, dtype, tensor.bits * tensor.lanes // 8,
                       f"DLPack type code {tensor.code} of {tensor.bits} bits")
        self.set_dims(tensor.ndim)
        cdef int i
        for i in range(tensor.ndim):
            self.shape_words[i] = tensor.shape[i]
            if tensor.strides != NULL:
                self.stride_words[i] = tensor.strides[i]
        if tensor.strides == NULL:
            self.view.strides = NULL
        self.view.data = tensor.data
        self.view.byte_offset = tensor.byte_offset
        self.owner = capsule  # not consumed: the capsule frees the tensor when it goes
        return 0

    cdef int set_dtype(self, int found, int wanted, size_t item_size, str what) except -1:
        if wanted:
            if ITEM_SIZES.get(wanted) != item_size:
                raise InvalidArgument(f"dtype {wanted} has {ITEM_SIZES.get(wanted)} bytes an element, the array's "
                                      f"{what} has {item_size}")
            found = wanted
        if not found:
            raise InvalidArgument(f"{what} is not supported; float16, bfloat16, float32, float64, int8, uint8, int16, "
                                  "int32, int64 and bool in this machine's byte order are")
        self.view.dtype = found
        return 0

    cdef int set_dims(self, int ndim) except -1:
        if ndim > TSR_MAX_NDIM:
            raise InvalidArgument(f"the array has {ndim} dimensions; at most {TSR_MAX_NDIM} are supported")
        self.view.ndim = ndim
        return 0

    cdef int set_stride(self, int dim, Py_ssize_t size_bytes, Py_ssize_t item_size) except -1:
        if size_bytes % item_size:
            raise InvalidArgument(f"the array is not contiguous: stride {size_bytes} bytes of dimension {dim}; make a "
                                  "contiguous copy")
        self.stride_words[dim] = size_bytes // item_size
        return 0

    @property
    def dtype(self):
        return self.view.dtype

    @property
    def shape(self):
        return tuple([self.shape_words[i] for i in range(self.view.ndim)])


@cython.final
@cython.no_gc_clear
cdef class TensorArray:
    """C arrays of tensors and of named tensors, over Tensor objects that it keeps."""

    cdef tsr_tensor *tensors
    cdef tsr_param *params
    cdef size_t count
    cdef list keep

    def __dealloc__(self):
        PyMem_Free(self.tensors)
        PyMem_Free(self.params)


cdef TensorArray tensor_array(list tensors, list names=None):
    cdef TensorArray array = TensorArray.__new__(TensorArray)
    cdef Tensor tensor
    cdef size_t i
    array.count = len(tensors)
    array.keep = [tensors]
    if names is None:
        array.tensors = <tsr_tensor *>PyMem_Calloc(array.count + 1, sizeof(tsr_tensor))
    else:
        array.params = <tsr_param *>PyMem_Calloc(array.count + 1, sizeof(tsr_param))
    if array.tensors == NULL and array.params == NULL:
        raise MemoryError
    for i in range(array.count):
        tensor = tensors[i]
        if tensor is None:
            raise TypeError("a tensor is None")
        if names is None:
            array.tensors[i] = tensor.view
        else:
            array.params[i].tensor = tensor.view
            array.params[i].name = text_or_null(array.keep, names[i], "the parameter name")
    return array


@cython.final
@cython.no_gc_clear
cdef class Memory:
    """Bytes of the library as a writable Python buffer, which keeps the handle that owns them."""

    cdef void *data
    cdef Py_ssize_t size
    cdef Handle owner

    def __dealloc__(self):
        if self.owner is not None:
            unpin(self.owner)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if self.owner.generation != current_generation():
            raise BufferError("the memory belongs to the parent of this forked process")
        PyBuffer_FillInfo(buffer, self, self.data, self.size, 0, flags)

    def __releasebuffer__(self, Py_buffer *buffer):
        pass

    def __len__(self):
        return self.size


cdef Memory memory_of(Handle owner, void *data, size_t size):
    cdef Memory memory = Memory.__new__(Memory)
    memory.owner = owner
    owner.pins += 1
    memory.data = data
    memory.size = size
    return memory


if watch_forks() != 0:
    raise ImportError("tessera: pthread_atfork failed")
atexit.register(_at_exit)
