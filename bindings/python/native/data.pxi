# data.h: the distributed sampler.

cdef class Sampler(Handle):
    cdef void free(self) noexcept nogil:
        tsr_sampler_destroy(<tsr_sampler *>self.ptr)


def sampler_create(Comm comm not None, object length, **given):
    cdef Lease lease = share(comm)
    cdef tsr_sampler_options o
    cdef tsr_sampler *out = NULL
    cdef int64_t samples = int64(length, "length")
    cdef list keep = sampler_options(&o, given)
    with nogil:
        check(tsr_sampler_create(<tsr_comm *>lease.ptr, samples, &o, &out))
    return adopt(Sampler.__new__(Sampler), out)


def sampler_next(Sampler sampler not None, Tensor indices not None):
    """Fills `indices` (int64, one dimension) from the start. Returns how many it wrote."""
    cdef Lease lease = use(sampler)
    cdef size_t count = 0
    cdef int64_t *words = <int64_t *>indices.view.data
    cdef size_t size = indices.shape_words[0]
    if indices.view.ndim != 1 or indices.view.dtype != TSR_DTYPE_I64:
        raise InvalidArgument("indices must be a one-dimensional int64 array")
    with nogil:
        check(tsr_sampler_next(<tsr_sampler *>lease.ptr, words, size, &count))
    return count


def sampler_valid(Sampler sampler not None, Tensor valid not None):
    """Fills `valid` (uint8, one dimension), which is as long as the last batch."""
    cdef Lease lease = share(sampler)
    if valid.view.ndim != 1 or valid.view.dtype != TSR_DTYPE_U8:
        raise InvalidArgument("valid must be a one-dimensional uint8 array")
    check(tsr_sampler_valid(<tsr_sampler *>lease.ptr, <uint8_t *>valid.view.data, valid.shape_words[0]))


def sampler_position(Sampler sampler not None):
    """(epoch, consumed)"""
    cdef Lease lease = share(sampler)
    cdef int64_t epoch = 0
    cdef int64_t consumed = 0
    check(tsr_sampler_position(<tsr_sampler *>lease.ptr, &epoch, &consumed))
    return epoch, consumed


def sampler_set_epoch(Sampler sampler not None, object epoch):
    cdef Lease lease = use(sampler)
    check(tsr_sampler_set_epoch(<tsr_sampler *>lease.ptr, int64(epoch, "epoch")))


def sampler_destroy(Sampler sampler not None):
    retire(sampler)
