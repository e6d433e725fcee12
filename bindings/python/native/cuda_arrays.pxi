# Memory of the library on a CUDA device, as other libraries take it: by DLPack.

cdef extern from *:
    """
    #include <stdlib.h>
    /* What the consumer of an export gives back, versions 0 and 1. */
    typedef struct dl_managed { dl_tensor tensor; void *context; void (*deleter)(struct dl_managed *); } dl_managed;
    """
    ctypedef struct dl_managed:
        dl_tensor tensor
        void *context
        void (*deleter)(dl_managed *) noexcept nogil
    void *calloc(size_t count, size_t size) nogil
    void free(void *memory) nogil


cdef void drop_export(void *context, void *managed) noexcept nogil:
    """Called by the consumer, on any thread. Once the interpreter ends, the array stays until the process does."""
    if gate_enter():
        with gil:
            Py_DECREF(<object>context)
        gate_leave()
    free(managed)


cdef void drop_managed(dl_managed *managed) noexcept nogil:
    drop_export(managed.context, managed)


cdef void drop_versioned(dl_versioned *managed) noexcept nogil:
    drop_export(managed.context, managed)


cdef void drop_capsule(object capsule) noexcept:
    """Of an export that nobody has taken; who takes one gives it another name."""
    if PyCapsule_IsValid(capsule, "dltensor"):
        drop_managed(<dl_managed *>PyCapsule_GetPointer(capsule, "dltensor"))
    elif PyCapsule_IsValid(capsule, "dltensor_versioned"):
        drop_versioned(<dl_versioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned"))


@cython.final
@cython.no_gc_clear
cdef class CudaArray(Lent):
    """A contiguous array of the library on a CUDA device. It has no operations: pass it to a library that has, such
    as ``torch.from_dlpack(array)``, ``cupy.from_dlpack(array)`` or ``jax.dlpack.from_dlpack(array)``, which share its memory.

    The export makes no stream wait: use the memory on the stream of the object that the array is from. A
    read-only array has DLPack's flag for that, but PyTorch has no read-only tensors.
    """

    cdef tsr_tensor view
    cdef int64_t shape_words[8]
    cdef int64_t stride_words[8]

    @property
    def shape(self):
        return tuple([self.shape_words[i] for i in range(self.view.ndim)])

    @property
    def dtype(self):
        """The number of the element type: a `tessera.DType`."""
        return self.view.dtype

    @property
    def device(self):
        """The number of the CUDA device."""
        return self.view.device_index

    @property
    def address(self):
        """Where the first element is on the device."""
        return <size_t>self.view.data

    def __array__(self, *arguments, **named):
        raise self.no_host_access()

    def __getitem__(self, place):
        raise self.no_host_access()

    def __setitem__(self, place, value):
        raise self.no_host_access()

    cdef object no_host_access(self):
        return TypeError(f"the array is on CUDA device {self.view.device_index}, where the host cannot reach it; use it "
                         "there, such as by torch.from_dlpack(array)")

    def __dlpack_device__(self):
        return TSR_DEVICE_CUDA, self.view.device_index

    def freeze(self):
        """Exports from now on are read-only."""
        self.read_only = True

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        cdef dl_managed *managed
        cdef dl_versioned *versioned
        cdef void *memory
        cdef bint is_versioned = max_version is not None and max_version[0] >= 1
        self.check_owner()
        if copy:
            raise BufferError("the memory is shared, not copied; pass copy=False")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the array is on CUDA device {self.view.device_index}, not on {tuple(dl_device)}")
        memory = calloc(1, sizeof(dl_versioned) if is_versioned else sizeof(dl_managed))
        if memory == NULL:
            raise MemoryError()
        if is_versioned:
            versioned = <dl_versioned *>memory
            versioned.major = 1
            versioned.flags = self.read_only
            versioned.context = <void *>self
            versioned.deleter = <void (*)(void *) noexcept nogil>drop_versioned
            self.describe(&versioned.tensor)
            capsule = PyCapsule_New(memory, "dltensor_versioned", drop_capsule)
        else:
            managed = <dl_managed *>memory
            managed.context = <void *>self
            managed.deleter = drop_managed
            self.describe(&managed.tensor)
            capsule = PyCapsule_New(memory, "dltensor", drop_capsule)
        Py_INCREF(self)
        return capsule

    cdef void describe(self, dl_tensor *out):
        cdef Py_ssize_t bits = 8 * item_size_of(self.view.dtype)
        out.data = self.view.data
        out.device_type = TSR_DEVICE_CUDA
        out.device_id = self.view.device_index
        out.ndim = self.view.ndim
        out.code = dlpack_code_of(self.view.dtype)
        out.bits = <unsigned char>bits
        out.lanes = 1
        out.shape = self.shape_words
        out.strides = self.stride_words

    def __repr__(self):
        return f"<array of shape {self.shape} on CUDA device {self.view.device_index}>"


cdef unsigned char dlpack_code_of(int dtype) noexcept:
    if dtype in (TSR_DTYPE_F16, TSR_DTYPE_F32, TSR_DTYPE_F64):
        return 2
    if dtype in (TSR_DTYPE_I8, TSR_DTYPE_I16, TSR_DTYPE_I32, TSR_DTYPE_I64):
        return 0
    if dtype in (TSR_DTYPE_U8, TSR_DTYPE_U16, TSR_DTYPE_U32, TSR_DTYPE_U64):
        return 1
    if dtype in (TSR_DTYPE_C64, TSR_DTYPE_C128):
        return 5
    return (4 if dtype == TSR_DTYPE_BF16 else 6 if dtype == TSR_DTYPE_BOOL else 10 if dtype == TSR_DTYPE_F8_E4M3 else
            12 if dtype == TSR_DTYPE_F8_E5M2 else 14)


cdef CudaArray cuda_array(Handle owner, const tsr_tensor *tensor):
    """Over memory of `owner`, which stays alive for it."""
    cdef CudaArray array = CudaArray.__new__(CudaArray)
    cdef int64_t stride = 1
    cdef int i
    array.view = tensor[0]
    array.view.data = <char *>tensor.data + tensor.byte_offset
    array.view.byte_offset = 0
    for i in range(tensor.ndim - 1, -1, -1):
        array.shape_words[i] = tensor.shape[i]
        array.stride_words[i] = stride
        stride *= tensor.shape[i]
    array.view.shape = array.shape_words
    array.owner = owner
    owner.pins += 1
    return array
