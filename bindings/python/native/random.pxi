# random.h: random numbers that do not depend on how a tensor is distributed.

cdef tsr_layout *layout_or_null(Layout layout, list keep) except? NULL:
    cdef Lease lease
    if layout is None:
        return NULL
    lease = share(layout)
    keep.append(lease)
    return <tsr_layout *>lease.ptr


def random_uniform(Tensor output not None, object seed, object stream, object low, object high, Layout layout,
                   object rank):
    cdef list keep = []
    cdef tsr_layout *held = layout_or_null(layout, keep)
    cdef uint64_t key = uint64(seed, "seed"), number = uint64(stream, "stream")
    cdef double least = real(low, "low"), most = real(high, "high")
    cdef int32_t whose = int32(rank, "rank")
    with nogil:
        check(tsr_random_uniform(&output.view, key, number, least, most, held, whose))


def random_normal(Tensor output not None, object seed, object stream, object mean, object deviation, Layout layout,
                  object rank):
    cdef list keep = []
    cdef tsr_layout *held = layout_or_null(layout, keep)
    cdef uint64_t key = uint64(seed, "seed"), number = uint64(stream, "stream")
    cdef double middle = real(mean, "mean"), width = real(deviation, "deviation")
    cdef int32_t whose = int32(rank, "rank")
    with nogil:
        check(tsr_random_normal(&output.view, key, number, middle, width, held, whose))


def random_bernoulli(Tensor output not None, object seed, object stream, object p, Layout layout, object rank):
    cdef list keep = []
    cdef tsr_layout *held = layout_or_null(layout, keep)
    cdef uint64_t key = uint64(seed, "seed"), number = uint64(stream, "stream")
    cdef double share_of_ones = real(p, "p")
    cdef int32_t whose = int32(rank, "rank")
    with nogil:
        check(tsr_random_bernoulli(&output.view, key, number, share_of_ones, held, whose))
