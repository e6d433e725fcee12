# mesh.h: ranks arranged in named dimensions.

cdef class Mesh(Handle):
    cdef void free(self) noexcept nogil:
        tsr_mesh_destroy(<tsr_mesh *>self.ptr)


def mesh_create(Comm comm not None, object sizes):
    """`sizes` are by name. If they are not valid, the creation fails on all ranks."""
    cdef tsr_mesh *out = NULL
    cdef const char *name_words[8]
    cdef int32_t size_words[8]
    cdef list keep = []
    cdef int32_t ndim = 0
    cdef int i
    try:
        if not isinstance(sizes, Mapping):
            raise TypeError(f"sizes is a {type(sizes).__name__}; it must be a dict such as {{'dp': 2, 'tp': 4}}")
        given = list(sizes.items())
        ndim = len(given)
        for i in range(min(ndim, TSR_MAX_NDIM)):  # the library refuses more of them, on all ranks
            name_words[i] = text_or_null(keep, given[i][0], "the dimension's name")
            size_words[i] = int32(given[i][1], "the size of a dimension")
    except Exception as error:
        refuse(comm, TSR_CREATES_MESH, error)
        raise
    cdef Lease lease = use(comm)
    with nogil:
        check(tsr_mesh_create(<tsr_comm *>lease.ptr, name_words, size_words, ndim, &out))
    return adopt(Mesh.__new__(Mesh), out)


def mesh_ndim(Mesh mesh not None):
    cdef Lease lease = share(mesh)
    cdef int32_t ndim = 0
    check(tsr_mesh_ndim(<tsr_mesh *>lease.ptr, &ndim))
    return ndim


def mesh_dim(Mesh mesh not None, object name):
    cdef Lease lease = share(mesh)
    cdef bytes encoded = utf8(name, "the dimension's name")
    cdef int32_t size = 0
    cdef int32_t coordinate = 0
    check(tsr_mesh_dim(<tsr_mesh *>lease.ptr, encoded, &size, &coordinate))
    return size, coordinate


def mesh_comm(Mesh mesh not None, object name):
    cdef Lease lease = share(mesh)
    cdef bytes encoded = utf8(name, "the dimension's name")
    cdef tsr_comm *comm = NULL
    check(tsr_mesh_comm(<tsr_mesh *>lease.ptr, encoded, &comm))
    cdef Comm handle = adopt(Comm.__new__(Comm), comm, mesh)
    handle.borrowed = True
    return handle


def mesh_slice(Mesh mesh not None, list names not None):
    cdef Lease lease = share(mesh)
    cdef tsr_mesh *out = NULL
    cdef const char *name_words[8]
    cdef list keep = []
    cdef int32_t ndim = len(names)
    cdef int i
    if ndim > TSR_MAX_NDIM:
        raise InvalidArgument(f"a slice of {ndim} dimensions; a mesh has 1 to 8")
    for i in range(ndim):
        name_words[i] = text_or_null(keep, names[i], "the dimension's name")
    check(tsr_mesh_slice(<tsr_mesh *>lease.ptr, name_words, ndim, &out))
    return adopt(Mesh.__new__(Mesh), out)


def mesh_flatten(Mesh mesh not None, Comm comm not None, object name):
    cdef Lease lease
    cdef tsr_mesh *out = NULL
    cdef list keep = []
    cdef const char *text
    try:
        lease = share(mesh)
        text = text_or_null(keep, name, "the dimension's name")
    except Exception as error:
        refuse(comm, TSR_CREATES_MESH, error)
        raise
    cdef Lease ranks = use(comm)
    with nogil:
        check(tsr_mesh_flatten(<tsr_mesh *>lease.ptr, <tsr_comm *>ranks.ptr, text, &out))
    return adopt(Mesh.__new__(Mesh), out)


def mesh_destroy(Mesh mesh not None):
    retire(mesh)
