# Converts arrays to tsr_tensor, by the buffer protocol, the array interface or DLPack.

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
        void *context
        void (*deleter)(void *) noexcept nogil
        uint64_t flags
        dl_tensor tensor


cdef int DLPACK_PINNED = 3  # memory of the host that CUDA has registered

cdef str DTYPES = ("float16, bfloat16, float32, float64, int8, uint8, int16, int32, int64 and bool, and in checkpoints "
                   "also uint16, uint32, uint64, complex64, complex128, float8_e4m3fn, float8_e5m2 and float8_e8m0fnu")

cdef dict NAMED_DTYPES = {  # types of ml_dtypes: their kind and size do not identify them
    "bfloat16": TSR_DTYPE_BF16, "float8_e4m3fn": TSR_DTYPE_F8_E4M3, "float8_e5m2": TSR_DTYPE_F8_E5M2,
    "float8_e8m0fnu": TSR_DTYPE_F8_E8M0}


cdef int dtype_of(char kind, Py_ssize_t size) noexcept:
    """The dtype for a kind, as in NumPy's array interface, and a size in bytes; 0 if there is no such dtype."""
    if kind == c"f":
        return TSR_DTYPE_F32 if size == 4 else TSR_DTYPE_F64 if size == 8 else TSR_DTYPE_F16 if size == 2 else 0
    if kind == c"i":
        return (TSR_DTYPE_I64 if size == 8 else TSR_DTYPE_I32 if size == 4 else TSR_DTYPE_I8 if size == 1 else
                TSR_DTYPE_I16 if size == 2 else 0)
    if kind == c"u":
        return (TSR_DTYPE_U8 if size == 1 else TSR_DTYPE_U16 if size == 2 else TSR_DTYPE_U32 if size == 4 else
                TSR_DTYPE_U64 if size == 8 else 0)
    if kind == c"c":
        return TSR_DTYPE_C64 if size == 8 else TSR_DTYPE_C128 if size == 16 else 0
    return TSR_DTYPE_BOOL if kind == c"b" and size == 1 else 0


cdef char kind_of_format(const char *form) noexcept:
    """The kind for a buffer's format, a letter of the struct module; 0 if it is not a plain number."""
    if form == NULL:
        return c"u"
    if form[0] == c"@" or form[0] == c"=" or form[0] == c"<":
        form += 1
    if form[0] == c"Z" and form[1] in (c"f", c"d") and form[2] == 0:
        return c"c"
    if form[0] == 0 or form[1] != 0:
        return 0
    if form[0] in (c"e", c"f", c"d"):
        return c"f"
    if form[0] in (c"b", c"h", c"i", c"l", c"q", c"n"):
        return c"i"
    return c"u" if form[0] in (c"B", c"H", c"I", c"L", c"Q", c"N") else c"b" if form[0] == c"?" else 0


cdef int dtype_of_dlpack(const dl_tensor *tensor) noexcept:
    if tensor.lanes != 1 or tensor.bits % 8:
        return 0
    if tensor.code == 4 and tensor.bits == 16:
        return TSR_DTYPE_BF16
    if tensor.bits == 8 and tensor.code in (10, 12, 14):
        return TSR_DTYPE_F8_E4M3 if tensor.code == 10 else TSR_DTYPE_F8_E5M2 if tensor.code == 12 else TSR_DTYPE_F8_E8M0
    if tensor.code == 5:
        return dtype_of(c"c", tensor.bits // 8)
    if tensor.code == 6:
        return dtype_of(c"b", tensor.bits // 8)
    return dtype_of(c"i" if tensor.code == 0 else c"u" if tensor.code == 1 else c"f" if tensor.code == 2 else 0,
                    tensor.bits // 8)


cdef Py_ssize_t item_size_of(int dtype) noexcept:
    if dtype in (TSR_DTYPE_I8, TSR_DTYPE_U8, TSR_DTYPE_BOOL, TSR_DTYPE_F8_E4M3, TSR_DTYPE_F8_E5M2, TSR_DTYPE_F8_E8M0):
        return 1
    if dtype in (TSR_DTYPE_F16, TSR_DTYPE_BF16, TSR_DTYPE_I16, TSR_DTYPE_U16):
        return 2
    if dtype in (TSR_DTYPE_F32, TSR_DTYPE_I32, TSR_DTYPE_U32):
        return 4
    return 16 if dtype == TSR_DTYPE_C128 else 8


cdef object LATER = object()  # the source of a Tensor that is filled in after its construction


@cython.final
@cython.no_gc_clear
cdef class Tensor:
    """A C tensor over memory that a Python object owns. Keeps this memory alive."""

    cdef tsr_tensor view
    cdef int64_t shape_words[8]
    cdef int64_t stride_words[8]
    cdef Py_buffer buffer
    cdef bint has_buffer
    cdef bint strided  # passes arrays that are not contiguous to the library, which refuses them on all ranks
    cdef object owner

    def __cinit__(self, object source, int dtype=0, bint writable=True, *, bint strided=False):
        memset(&self.view, 0, sizeof(tsr_tensor))
        self.view.device_type = TSR_DEVICE_CPU
        self.view.shape = self.shape_words  # strides are set only if the array is not contiguous
        self.strided = strided
        if source is LATER:
            return
        if PyObject_CheckBuffer(source) and self.from_buffer(source, dtype, writable):
            return
        if hasattr(source, "__array_interface__"):
            self.from_array_interface(source, dtype, writable)
        elif hasattr(source, "__dlpack__"):
            self.from_dlpack(source, dtype, writable)
        else:
            raise TypeError(f"a {type(source).__name__} is not a tensor; expected a NumPy array or an object with the "
                            "buffer protocol, __array_interface__ or __dlpack__")

    def __dealloc__(self):
        if self.has_buffer:
            PyBuffer_Release(&self.buffer)

    cdef int from_buffer(self, object source, int dtype, bint writable) except -1:
        """Returns 0 if the array interface is needed instead: types of ml_dtypes have no buffer format."""
        try:
            PyObject_GetBuffer(source, &self.buffer, PyBUF_STRIDES | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0))
        except (BufferError, ValueError) as error:
            if hasattr(source, "__array_interface__"):
                return 0
            raise InvalidArgument(f"the {type(source).__name__} cannot be used here: {error}") from None
        self.has_buffer = True
        self.set_dtype(dtype_of(kind_of_format(self.buffer.format), self.buffer.itemsize), dtype, self.buffer.itemsize,
                       source)
        self.set_dims(self.buffer.ndim, self.buffer.shape, self.buffer.strides, self.buffer.itemsize, source)
        self.view.data = self.buffer.buf
        return 1

    cdef int from_array_interface(self, object source, int dtype, bint writable) except -1:
        cdef Py_ssize_t shape[8]
        cdef Py_ssize_t strides[8]
        cdef int i
        kind = type(source).__name__
        if isinstance(source, generic):  # its array interface would describe a temporary array
            raise InvalidArgument(f"a NumPy scalar ({kind}) has no memory that a call can use; pass a zero-dimensional "
                                  "array, np.array(x), and read the result from it")
        interface = source.__array_interface__
        try:
            address, read_only = interface["data"]
            form, dims, steps = interface["typestr"], tuple(interface["shape"]), interface.get("strides")
            size = int(form[2:]) if form[2:].isdigit() else 0
            address, ndim = index(address), len(dims)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InvalidArgument(f"the array interface of the {kind} lacks its memory, type or shape") from None
        if writable and read_only:
            raise InvalidArgument(f"the {kind} is read-only; this call writes into it")
        name = str(getattr(source, "dtype", form))
        found = 0
        if form[:1] != ">":
            found = NAMED_DTYPES.get(name) or dtype_of(ord(form[1]) if size else 0, size)
        self.set_dtype(found, dtype, size, source)
        if steps is not None and len(steps) != ndim:
            raise InvalidArgument(f"the array interface of the {kind} has {ndim} sizes and {len(steps)} strides")
        if ndim <= TSR_MAX_NDIM:
            for i in range(ndim):
                shape[i] = int64(dims[i], "a size in the array interface")
                if steps is not None:
                    strides[i] = int64(steps[i], "a stride in the array interface")
        self.set_dims(ndim, shape, NULL if steps is None else strides, size, source)
        self.view.data = <void *><size_t>address
        self.owner = (source, interface)
        return 0

    cdef int from_dlpack(self, object source, int dtype, bint writable) except -1:
        cdef Py_ssize_t shape[8]
        cdef Py_ssize_t strides[8]
        cdef dl_tensor *tensor
        cdef dl_versioned *versioned
        cdef Py_ssize_t size
        cdef int i
        kind, number = source.__dlpack_device__()
        if int(kind) not in (TSR_DEVICE_CPU, TSR_DEVICE_CUDA, DLPACK_PINNED):
            raise InvalidArgument(f"the {type(source).__name__} is on DLPack device {int(kind)}; this call needs a "
                                  "tensor in CPU memory or on a CUDA device")
        on_cuda = int(kind) == TSR_DEVICE_CUDA
        is_negative = getattr(source, "is_neg", None)  # PyTorch exports such a view without the sign
        if is_negative is not None and is_negative():
            raise InvalidArgument(f"the {type(source).__name__} cannot be used here: it is a view of negated memory; "
                                  "resolve_neg() makes a plain copy")
        stream = {"stream": -1} if on_cuda else {}  # calls say on which stream they run: the export makes none wait
        try:
            try:
                capsule = source.__dlpack__(max_version=(1, 1), **stream)
            except TypeError:
                capsule = source.__dlpack__(**stream)
        except (BufferError, RuntimeError) as error:
            raise InvalidArgument(f"the {type(source).__name__} cannot be used here: {error}") from None
        if PyCapsule_IsValid(capsule, "dltensor_versioned"):
            versioned = <dl_versioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
            if versioned.major != 1:
                raise InvalidArgument(f"the {type(source).__name__} uses DLPack {versioned.major}; supported: 0, 1")
            if writable and versioned.flags & 1:
                raise InvalidArgument(f"the {type(source).__name__} is read-only; this call writes into it")
            tensor = &versioned.tensor
        else:
            tensor = <dl_tensor *>PyCapsule_GetPointer(capsule, "dltensor")
        size = tensor.bits * tensor.lanes // 8
        self.set_dtype(dtype_of_dlpack(tensor), dtype, size, source)
        if 0 <= tensor.ndim <= TSR_MAX_NDIM:
            for i in range(tensor.ndim):
                shape[i] = tensor.shape[i]
                if tensor.strides != NULL:
                    strides[i] = tensor.strides[i] * size
        self.set_dims(tensor.ndim, shape, NULL if tensor.strides == NULL else strides, size, source)
        self.view.data = tensor.data
        self.view.byte_offset = tensor.byte_offset
        if on_cuda:
            self.view.device_type = TSR_DEVICE_CUDA
            self.view.device_index = int32(number, "the number of the device")
        self.owner = capsule  # not consumed: the capsule frees the tensor when it is destroyed
        return 0

    cdef int set_dtype(self, int found, int wanted, Py_ssize_t item_size, object source) except -1:
        if wanted:
            if item_size_of(wanted) != item_size:
                raise InvalidArgument(f"the given dtype has {item_size_of(wanted)} bytes per element, but the array's, "
                                      f"{type_name(source)}, has {item_size}")
            found = wanted
        if not found or (wanted and type_name(source).startswith(">")):
            raise unusable_dtype(type_name(source))
        self.view.dtype = found
        return 0

    cdef int set_dims(self, int ndim, const Py_ssize_t *shape, const Py_ssize_t *strides, Py_ssize_t item_size,
                      object source) except -1:
        """Copies the shape; strides are in bytes. Refuses an array that is not contiguous, unless it may be strided."""
        cdef uint64_t expected = item_size
        cdef bint empty = False, contiguous = True
        cdef int i
        if ndim < 0 or ndim > TSR_MAX_NDIM:
            raise InvalidArgument(f"the array has {ndim} dimensions; at most {TSR_MAX_NDIM} are supported")
        self.view.ndim = ndim
        for i in range(ndim - 1, -1, -1):
            self.shape_words[i] = shape[i]
            if strides != NULL and shape[i] != 1 and <uint64_t>strides[i] != expected:
                contiguous = False
            empty = empty or shape[i] == 0
            expected *= <uint64_t>shape[i]
        if contiguous or empty:
            return 0
        if not self.strided:
            raise InvalidArgument(
                f"the {type(source).__name__} of shape {self.shape} is not contiguous (its strides are "
                f"{tuple([strides[i] for i in range(ndim)])} bytes): pass np.ascontiguousarray(x), which is "
                "a copy, and copy results back from it")
        for i in range(ndim):  # in elements; 0, which a contiguous array never has, if not a multiple
            self.stride_words[i] = strides[i] // item_size if strides[i] % item_size == 0 else 0
        self.view.strides = self.stride_words
        return 0

    @property
    def dtype(self):
        return self.view.dtype

    @property
    def shape(self):
        return tuple([self.shape_words[i] for i in range(self.view.ndim)])


def tensor_at(size_t address, int dtype, object count, object owner):
    """A view of `count` contiguous elements in CPU memory, which `owner` keeps alive. The caller ensures all of this."""
    cdef Tensor tensor = Tensor.__new__(Tensor, LATER)
    tensor.view.data = <void *>address
    tensor.view.dtype = dtype
    tensor.view.ndim = 1
    tensor.shape_words[0] = size_of(count, "the number of elements")
    tensor.owner = owner
    return tensor


cdef str type_name(object source):
    """The dtype of an array, for messages."""
    dtype = getattr(source, "dtype", None)
    return str(getattr(source, "format", "of bytes") if dtype is None else dtype)


cdef object unusable_dtype(str name):
    hint = ""
    if name.startswith(">"):
        hint = "; this array has the opposite byte order: convert it with x.astype(x.dtype.newbyteorder('='))"
    return InvalidArgument(f"an array of dtype {name} is not supported; supported are {DTYPES}{hint}")


@cython.final
@cython.no_gc_clear
cdef class TensorArray:
    """C arrays of tensors or of named tensors. Keeps their Tensor objects alive."""

    cdef tsr_tensor *tensors
    cdef tsr_tensor one  # the tensor, if there is only one
    cdef tsr_param *params
    cdef size_t count
    cdef object keep

    def __dealloc__(self):
        if self.tensors != &self.one:
            PyMem_Free(self.tensors)
        PyMem_Free(self.params)


cdef bint has_elements(Tensor tensor):
    cdef int i
    for i in range(tensor.view.ndim):
        if tensor.view.shape[i] == 0:
            return False
    return True


cdef TensorArray tensor_array(object tensors, list names=None):
    """From a list of Tensors, or from one array: most calls have one, and then need no list."""
    cdef TensorArray array = TensorArray.__new__(TensorArray)
    cdef Tensor tensor
    cdef list keep
    cdef size_t i
    if type(tensors) is not list:
        tensor = Tensor.__new__(Tensor, tensors)
        array.one = tensor.view
        array.tensors = &array.one
        array.count = 1
        array.keep = tensor
        return array
    array.count = len(tensors)
    keep = [tensors]
    array.keep = keep
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
            if names[i] is None:
                raise TypeError("a parameter's name is None")
            array.params[i].name = text_or_null(keep, names[i], "the parameter name")
    return array
