# Memory that peers access without a copy, and any memory of the library as a program sees it: on the CPU as a Python
# buffer, on a device as a CudaArray.

@cython.no_gc_clear
cdef class Lent:
    """Memory that the library lends. Keeps the handle that owns it alive."""

    cdef Handle owner
    cdef object keep  # what else it needs, such as the array that it is a part of
    cdef list counts  # where it is counted while it is alive, or None
    cdef size_t place
    cdef bint read_only

    def __dealloc__(self):
        if self.counts is not None and self.place < <size_t>len(self.counts):  # the collector may have emptied it
            self.counts[self.place] -= 1
        if self.owner is not None:
            unpin(self.owner)

    cdef void count_in(self, list counts, size_t place):
        counts[place] += 1
        self.counts = counts
        self.place = place

    cdef int check_owner(self) except -1:
        if self.owner is None:
            raise BufferError(f"{type(self).__name__} objects are made by the objects that own their memory")
        if self.owner.generation != current_generation():
            raise BufferError("the memory belongs to the parent of this forked process")
        return 0


@cython.final
@cython.no_gc_clear
cdef class Memory(Lent):
    """Memory of the host as a Python buffer."""

    cdef void *data
    cdef Py_ssize_t size

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        self.check_owner()
        PyBuffer_FillInfo(buffer, self, self.data, self.size, self.read_only, flags)

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


cdef tuple shape_of(const tsr_tensor *tensor):
    return tuple([tensor.shape[i] for i in range(tensor.ndim)])


cdef tuple tensor_view(Handle model, const tsr_tensor *tensor):
    """(memory, dtype, shape) of memory of `model`: a Memory, or on a device a CudaArray"""
    cdef size_t size = item_size_of(tensor.dtype)
    shape = shape_of(tensor)
    if tensor.device_type == TSR_DEVICE_CUDA:
        return cuda_array(model, tensor), tensor.dtype, shape
    for length in shape:
        size *= length
    return memory_of(model, <char *>tensor.data + tensor.byte_offset, size), tensor.dtype, shape


cdef class Buffer(Handle):
    cdef void free(self) noexcept nogil:
        tsr_buffer_destroy(<tsr_buffer *>self.ptr)


def buffer_create(Comm comm not None, object size):
    cdef Lease lease = use(comm)
    cdef tsr_buffer *out = NULL
    cdef size_t size_bytes = size_of(size, "the size in bytes")
    with nogil:
        check(tsr_buffer_create(<tsr_comm *>lease.ptr, size_bytes, &out))
    return adopt(Buffer.__new__(Buffer), out)


def buffer_data(Buffer buffer not None):
    cdef Lease lease = share(buffer)
    cdef void *data = NULL
    cdef size_t size = 0
    check(tsr_buffer_data(<tsr_buffer *>lease.ptr, &data, &size))
    return memory_of(buffer, data, size)


def buffer_destroy(Buffer buffer not None):
    retire(buffer)
