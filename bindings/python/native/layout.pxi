# layout.h: how a tensor is distributed over ranks.

cdef class Layout(Handle):
    cdef void free(self) noexcept nogil:
        tsr_layout_destroy(<tsr_layout *>self.ptr)


cdef int copy_dims(int64_t *words, object dims) except -1:
    if len(dims) > TSR_MAX_NDIM:
        raise InvalidArgument(f"the shape {tuple(dims)} has {len(dims)} dimensions; at most {TSR_MAX_NDIM} are supported")
    cdef int i
    for i in range(len(dims)):
        words[i] = int64(dims[i], "a size or an offset")
    return len(dims)


def layout_create(tuple shape not None, list mesh_sizes not None, list placements not None):
    """`placements` are (kind, dim) pairs, one per mesh dimension."""
    cdef tsr_layout *out = NULL
    cdef int64_t shape_words[8]
    cdef int32_t size_words[8]
    cdef tsr_placement placement_words[8]
    cdef int32_t ndim = copy_dims(shape_words, shape)
    cdef int32_t mesh_ndim = len(mesh_sizes)
    cdef int i
    if mesh_ndim > TSR_MAX_NDIM or len(placements) != mesh_ndim:
        raise InvalidArgument(f"{len(mesh_sizes)} mesh sizes and {len(placements)} placements; a mesh has 1 to 8 "
                              "dimensions, each with one placement")
    for i in range(mesh_ndim):
        size_words[i] = int32(mesh_sizes[i], "a mesh size")
        kind, dim = placements[i]
        placement_words[i].kind = int32(kind, "the kind")
        placement_words[i].dim = int32(dim, "the dimension")
    check(tsr_layout_create(shape_words, ndim, size_words, placement_words, mesh_ndim, &out))
    return adopt(Layout.__new__(Layout), out)


cdef int copy_boxes(tsr_box *words, list boxes, int ndim, str whose) except -1:
    cdef size_t next_box = 0
    for offsets, sizes in boxes:
        if len(offsets) != ndim or len(sizes) != ndim:
            raise InvalidArgument(f"a box of {whose} has {len(offsets)} offsets and {len(sizes)} sizes; the tensor has "
                                  f"{ndim} dimensions")
        copy_dims(words[next_box].offsets, offsets)
        copy_dims(words[next_box].sizes, sizes)
        next_box += 1
    return 0


def layout_from_boxes(tuple shape not None, list ranks not None):
    """`ranks` has a list of (offsets, sizes) for each rank."""
    cdef tsr_layout *out = NULL
    cdef int64_t shape_words[8]
    cdef int32_t ndim = copy_dims(shape_words, shape)
    cdef size_t total = sum([len(held) for held in ranks])
    cdef tsr_box *boxes = <tsr_box *>PyMem_Calloc(total + 1, sizeof(tsr_box))
    cdef int32_t *counts = <int32_t *>PyMem_Calloc(len(ranks) + 1, sizeof(int32_t))
    cdef size_t next_box = 0
    cdef int i
    try:
        if boxes == NULL or counts == NULL:
            raise MemoryError
        for i in range(len(ranks)):
            counts[i] = len(ranks[i])
            copy_boxes(boxes + next_box, ranks[i], ndim, f"rank {i}")
            next_box += counts[i]
        check(tsr_layout_from_boxes(shape_words, ndim, boxes, counts, <int32_t>len(ranks), &out))
    finally:
        PyMem_Free(boxes)
        PyMem_Free(counts)
    return adopt(Layout.__new__(Layout), out)


def layout_gather(Comm comm not None, tuple shape not None, list boxes not None):
    """`boxes` are this rank's (offsets, sizes)."""
    cdef Lease lease = use(comm)
    cdef tsr_layout *out = NULL
    cdef int64_t shape_words[8]
    cdef int32_t ndim = copy_dims(shape_words, shape)
    cdef int32_t count = int32(len(boxes), "the number of boxes")
    cdef tsr_box *words = <tsr_box *>PyMem_Calloc(<size_t>count + 1, sizeof(tsr_box))
    try:
        if words == NULL:
            raise MemoryError
        copy_boxes(words, boxes, ndim, "this rank")
        with nogil:
            check(tsr_layout_gather(<tsr_comm *>lease.ptr, shape_words, ndim, words, count, &out))
    finally:
        PyMem_Free(words)
    return adopt(Layout.__new__(Layout), out)


def layout_box_count(Layout layout not None, object rank):
    cdef Lease lease = share(layout)
    cdef int32_t count = 0
    check(tsr_layout_box_count(<tsr_layout *>lease.ptr, int32(rank, "rank"), &count))
    return count


def layout_box(Layout layout not None, object rank, int32_t place, int ndim):
    """(offsets, sizes) of `ndim` numbers each."""
    cdef Lease lease = share(layout)
    cdef tsr_box box
    check(tsr_layout_box(<tsr_layout *>lease.ptr, int32(rank, "rank"), place, &box))
    return (tuple([box.offsets[i] for i in range(ndim)]), tuple([box.sizes[i] for i in range(ndim)]))


def layout_destroy(Layout layout not None):
    retire(layout)
