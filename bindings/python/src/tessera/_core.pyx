# cython: language_level=3
"""The C library's functions one to one, for the typed modules of this package; not for users.

`tsr_x_verb` is `x_verb` here: status codes become exceptions, out-arguments results, options a dict of what was given
(the library holds the defaults), and whatever can block or log releases the GIL. What stands under it is in
`_handle.pxi`.
"""
include "_handle.pxi"

ABI_VERSION = TSR_ABI_VERSION

# ---------------------------------------------------------------- version.h


def abi_version():
    return tsr_abi_version()


def version():
    return tsr_version().decode()


def library_path():
    return tsr_library_path().decode("utf-8", "surrogateescape")


# ---------------------------------------------------------------- error.h


def status_name(int status):
    return tsr_status_name(status).decode()


# ---------------------------------------------------------------- log.h


def log_set_level(int level):
    with nogil:
        check(tsr_log_set_level(level))


def log_set_callback(object fn):
    cdef void *user_data = <void *>fn
    if fn is None:
        with nogil:
            check(tsr_log_set_callback(NULL, NULL, NULL))
        return
    Py_INCREF(fn)
    with nogil:
        check(tsr_log_set_callback(on_log, user_data, on_drop))


# ---------------------------------------------------------------- store.h


cdef class Store(Handle):
    cdef void free(self) noexcept nogil:
        tsr_store_destroy(<tsr_store *>self.ptr)


cdef class StoreServer(Handle):
    cdef void free(self) noexcept nogil:
        tsr_store_server_destroy(<tsr_store_server *>self.ptr)


cdef list store_options(tsr_store_options *o, dict given):
    cdef list keep = []
    check(tsr_store_options_init(o, sizeof(tsr_store_options)))
    for name, value in given.items():
        if name == "timeout_ms":
            o.timeout_ms = value
        elif name == "insecure":
            o.insecure = value
        elif name == "token":
            o.token = text_or_null(keep, value, "the token")
        elif name == "job_id":
            o.job_id = text_or_null(keep, value, "the job id")
        elif name == "epoch":
            o.epoch = value
        else:
            raise unknown_option("store options", name)
    return keep


def store_serve(str host, uint16_t port, dict options):
    cdef tsr_store_options o
    cdef tsr_store_server *out = NULL
    cdef list keep = store_options(&o, options)
    cdef const char *address = text_or_null(keep, host, "the host")
    with nogil:
        check(tsr_store_serve(address, port, &o, &out))
    return adopt(StoreServer.__new__(StoreServer), out)


def store_server_port(StoreServer server not None):
    cdef Lease lease = share(server)
    cdef uint16_t port = 0
    check(tsr_store_server_port(<tsr_store_server *>lease.ptr, &port))
    return port


def store_server_destroy(StoreServer server not None):
    retire(server)


def store_open(str uri, dict options):
    cdef tsr_store_options o
    cdef tsr_store *out = NULL
    cdef list keep = store_options(&o, options)
    cdef const char *address = text_or_null(keep, uri, "the store's address")
    arm()
    with nogil:
        check(tsr_store_open(address, &o, &out))
    return adopt(Store.__new__(Store), out)


def store_destroy(Store store not None):
    retire(store)


def store_set(Store store not None, str key, bytes value not None):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    cdef const char *v = value
    cdef size_t size = len(value)
    with nogil:
        check(tsr_store_set(<tsr_store *>lease.ptr, k, v, size))


def store_get(Store store not None, str key):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    cdef size_t size = 4096
    cdef size_t capacity = 0
    cdef bytes value = b""
    cdef char *v
    while size > capacity:  # again, with room for the value that was there
        capacity = size
        value = PyBytes_FromStringAndSize(NULL, capacity)
        v = PyBytes_AsString(value)
        with nogil:
            check(tsr_store_get(<tsr_store *>lease.ptr, k, v, capacity, &size))
    return value[:size]


def store_wait(Store store not None, str key, int32_t timeout_ms):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    with nogil:
        check(tsr_store_wait(<tsr_store *>lease.ptr, k, timeout_ms))


def store_add(Store store not None, str key, int64_t delta):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    cdef int64_t result = 0
    with nogil:
        check(tsr_store_add(<tsr_store *>lease.ptr, k, delta, &result))
    return result


def store_compare_set(Store store not None, str key, bytes expected, bytes desired not None):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    cdef const char *e = NULL
    cdef const char *d = desired
    cdef size_t expected_size = 0
    cdef size_t desired_size = len(desired)
    cdef int32_t swapped = 0
    if expected is not None:
        e = expected
        expected_size = len(expected)
    with nogil:
        check(tsr_store_compare_set(<tsr_store *>lease.ptr, k, e, expected_size, d, desired_size, &swapped))
    return swapped != 0


def store_delete(Store store not None, str key):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    cdef int32_t existed = 0
    with nogil:
        check(tsr_store_delete(<tsr_store *>lease.ptr, k, &existed))
    return existed != 0


# ---------------------------------------------------------------- comm.h


cdef class Comm(Handle):
    cdef void free(self) noexcept nogil:
        tsr_comm_destroy(<tsr_comm *>self.ptr)


cdef class Work(Handle):
    cdef bint watched  # a completion callback is set, which keeps what the operation borrows

    cdef void free(self) noexcept nogil:
        tsr_work_destroy(<tsr_work *>self.ptr)

    cdef void release(self) noexcept:
        """A forgotten operation goes on: what it borrows is handed to its completion."""
        cdef int32_t done = 1
        cdef tsr_work *work = <tsr_work *>self.ptr
        cdef void *keep = <void *>self.keep
        if work != NULL and not self.watched and self.generation == current_generation():
            if tsr_work_test(work, &done) == TSR_OK and not done:
                Py_INCREF(self.keep)
                with nogil:
                    if tsr_work_on_done(work, on_forgotten, keep, on_drop) != TSR_OK:
                        on_drop(keep)
        Handle.release(self)


cdef list comm_options(tsr_comm_options *o, dict given):
    cdef list keep = []
    check(tsr_comm_options_init(o, sizeof(tsr_comm_options)))
    for name, value in given.items():
        if name == "timeout_ms":
            o.timeout_ms = value
        elif name == "spin_count":
            o.spin_count = value
        elif name == "backend":
            o.backend = text_or_null(keep, value, "the backend")
        elif name == "name":
            o.name = text_or_null(keep, value, "the name")
        else:
            raise unknown_option("communicator options", name)
    return keep


def comm_from_env(dict options):
    cdef tsr_comm_options o
    cdef tsr_comm *out = NULL
    cdef list keep = comm_options(&o, options)
    arm()
    with nogil:
        check(tsr_comm_from_env(&o, &out))
    return adopt(Comm.__new__(Comm), out)


def comm_create(Store store not None, int32_t rank, int32_t world_size, dict options):
    # Ranks as threads may share one store: the communicator serialises its own use of it.
    cdef Lease lease = share(store)
    cdef tsr_comm_options o
    cdef tsr_comm *out = NULL
    cdef list keep = comm_options(&o, options)
    with nogil:
        check(tsr_comm_create(<tsr_store *>lease.ptr, rank, world_size, &o, &out))
    return adopt(Comm.__new__(Comm), out, None, [store])


def comm_split(Comm comm not None, int32_t color, int32_t key, dict options):
    cdef Lease lease = use(comm)
    cdef tsr_comm_options o
    cdef tsr_comm_options *given = NULL
    cdef tsr_comm *out = NULL
    cdef list keep
    if options:
        keep = comm_options(&o, options)
        given = &o
    with nogil:
        check(tsr_comm_split(<tsr_comm *>lease.ptr, color, key, given, &out))
    return None if out == NULL else adopt(Comm.__new__(Comm), out)


def comm_finalize(Comm comm not None):
    cdef Lease lease = use(comm)
    with nogil:
        check(tsr_comm_finalize(<tsr_comm *>lease.ptr))


def comm_abort(Comm comm not None, str reason):
    cdef Lease lease = share(comm)
    cdef list keep = []
    cdef const char *text = text_or_null(keep, reason, "the reason")
    with nogil:
        check(tsr_comm_abort(<tsr_comm *>lease.ptr, text))


def comm_destroy(Comm comm not None):
    retire(comm)


def comm_rank(Comm comm not None):
    cdef Lease lease = share(comm)
    cdef int32_t rank = 0
    check(tsr_comm_rank(<tsr_comm *>lease.ptr, &rank))
    return rank


def comm_world_size(Comm comm not None):
    cdef Lease lease = share(comm)
    cdef int32_t world_size = 0
    check(tsr_comm_world_size(<tsr_comm *>lease.ptr, &world_size))
    return world_size


def comm_transport(Comm comm not None):
    cdef Lease lease = share(comm)
    cdef const char *name = NULL
    check(tsr_comm_transport(<tsr_comm *>lease.ptr, &name))
    return name.decode()


def comm_error(Comm comm not None):
    cdef Lease lease = share(comm)
    cdef tsr_error *error = NULL
    with nogil:
        check(tsr_comm_error(<tsr_comm *>lease.ptr, &error))
    return detached(error)


cdef object finished(tsr_work *work, object keep):
    """None for a call that has returned its result; a Work that keeps what the operation borrows for one in flight."""
    return None if work == NULL else adopt(Work.__new__(Work), work, keep)


def comm_all_reduce(Comm comm not None, list tensors not None, tsr_reduce_op op, bint async_op):
    cdef Lease lease = use(comm)
    cdef TensorArray array = tensor_array(tensors)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_all_reduce(<tsr_comm *>lease.ptr, array.tensors, array.count, op, NULL,
                                  &work if async_op else NULL))
    return finished(work, (comm, array))


def comm_reduce_scatter(Comm comm not None, Tensor input not None, Tensor output not None, tsr_reduce_op op,
                        bint async_op):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_reduce_scatter(<tsr_comm *>lease.ptr, &input.view, &output.view, op, NULL,
                                      &work if async_op else NULL))
    return finished(work, (comm, input, output))


def comm_all_gather(Comm comm not None, Tensor input not None, Tensor output not None, bint async_op):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_all_gather(<tsr_comm *>lease.ptr, &input.view, &output.view, NULL,
                                  &work if async_op else NULL))
    return finished(work, (comm, input, output))


def comm_all_gather_v(Comm comm not None, Tensor input not None, list outputs not None, bint async_op):
    cdef Lease lease = use(comm)
    cdef TensorArray array = tensor_array(outputs)
    cdef tsr_work *work = NULL
    cdef int32_t world_size = 0
    check(tsr_comm_world_size(<tsr_comm *>lease.ptr, &world_size))
    if array.count != <size_t>world_size:
        raise InvalidArgument(f"all_gather_v takes one output a rank: {array.count} were given, the communicator has "
                              f"{world_size} ranks")
    with nogil:
        check(tsr_comm_all_gather_v(<tsr_comm *>lease.ptr, &input.view, array.tensors, NULL,
                                    &work if async_op else NULL))
    return finished(work, (comm, input, array))


def comm_broadcast(Comm comm not None, list tensors not None, int32_t root, bint async_op):
    cdef Lease lease = use(comm)
    cdef TensorArray array = tensor_array(tensors)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_broadcast(<tsr_comm *>lease.ptr, array.tensors, array.count, root, NULL,
                                 &work if async_op else NULL))
    return finished(work, (comm, array))


def comm_reduce(Comm comm not None, Tensor input not None, Tensor output, tsr_reduce_op op, int32_t root,
                bint async_op):
    cdef Lease lease = use(comm)
    cdef tsr_tensor *out = NULL if output is None else &output.view
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_reduce(<tsr_comm *>lease.ptr, &input.view, out, op, root, NULL, &work if async_op else NULL))
    return finished(work, (comm, input, output))


def comm_gather(Comm comm not None, Tensor input not None, Tensor output, int32_t root, bint async_op):
    cdef Lease lease = use(comm)
    cdef tsr_tensor *out = NULL if output is None else &output.view
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_gather(<tsr_comm *>lease.ptr, &input.view, out, root, NULL, &work if async_op else NULL))
    return finished(work, (comm, input, output))


def comm_scatter(Comm comm not None, Tensor input, Tensor output not None, int32_t root, bint async_op):
    cdef Lease lease = use(comm)
    cdef tsr_tensor *from_ = NULL if input is None else &input.view
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_scatter(<tsr_comm *>lease.ptr, from_, &output.view, root, NULL, &work if async_op else NULL))
    return finished(work, (comm, input, output))


def comm_all_to_all(Comm comm not None, Tensor input not None, Tensor output not None, bint async_op):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_all_to_all(<tsr_comm *>lease.ptr, &input.view, &output.view, NULL,
                                  &work if async_op else NULL))
    return finished(work, (comm, input, output))


def comm_send(Comm comm not None, Tensor tensor not None, int32_t peer, int32_t tag, bint async_op):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_send(<tsr_comm *>lease.ptr, &tensor.view, peer, tag, NULL, &work if async_op else NULL))
    return finished(work, (comm, tensor))


def comm_recv(Comm comm not None, Tensor tensor not None, int32_t peer, int32_t tag, bint async_op):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_recv(<tsr_comm *>lease.ptr, &tensor.view, peer, tag, NULL, &work if async_op else NULL))
    return finished(work, (comm, tensor))


def comm_barrier(Comm comm not None, bint async_op):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_barrier(<tsr_comm *>lease.ptr, &work if async_op else NULL))
    return finished(work, (comm,))


def work_wait(Work work not None, int32_t timeout_ms):
    cdef Lease lease = share(work)
    with nogil:
        check(tsr_work_wait(<tsr_work *>lease.ptr, timeout_ms))


def work_test(Work work not None):
    cdef Lease lease = share(work)
    cdef int32_t done = 0
    check(tsr_work_test(<tsr_work *>lease.ptr, &done))
    return done != 0


def work_error(Work work not None):
    cdef Lease lease = share(work)
    cdef tsr_error *error = NULL
    check(tsr_work_error(<tsr_work *>lease.ptr, &error))
    return detached(error)


def work_on_done(Work work not None, object fn not None):
    """`fn(status)`; what the operation borrows lives until it was called, whatever becomes of `work`."""
    cdef Lease lease = share(work)
    keep = work.keep

    def callback(status, _keep=keep):
        fn(status)

    cdef void *user_data = <void *>callback
    cdef tsr_status status
    Py_INCREF(callback)
    with nogil:
        status = tsr_work_on_done(<tsr_work *>lease.ptr, on_work_done, user_data, on_drop)
    if status != TSR_OK:
        Py_DECREF(callback)
    check(status)
    work.watched = True


def work_destroy(Work work not None):
    retire(work)


# ---------------------------------------------------------------- memory.h


cdef class Buffer(Handle):
    cdef void free(self) noexcept nogil:
        tsr_buffer_destroy(<tsr_buffer *>self.ptr)


def buffer_create(Comm comm not None, size_t size):
    cdef Lease lease = use(comm)
    cdef tsr_buffer *out = NULL
    with nogil:
        check(tsr_buffer_create(<tsr_comm *>lease.ptr, size, &out))
    return adopt(Buffer.__new__(Buffer), out)


def buffer_data(Buffer buffer not None):
    cdef Lease lease = share(buffer)
    cdef void *data = NULL
    cdef size_t size = 0
    check(tsr_buffer_data(<tsr_buffer *>lease.ptr, &data, &size))
    return memory_of(buffer, data, size)


def buffer_destroy(Buffer buffer not None):
    retire(buffer)


# ---------------------------------------------------------------- mesh.h


cdef class Mesh(Handle):
    cdef void free(self) noexcept nogil:
        tsr_mesh_destroy(<tsr_mesh *>self.ptr)


def mesh_create(Comm comm not None, list names not None, list sizes not None):
    cdef Lease lease = use(comm)
    cdef tsr_mesh *out = NULL
    cdef const char *name_words[8]
    cdef int32_t size_words[8]
    cdef list keep = []
    cdef int32_t ndim = len(names)
    cdef int i
    if ndim > TSR_MAX_NDIM or len(sizes) != ndim:
        raise InvalidArgument(f"{len(names)} names and {len(sizes)} sizes; a mesh has 1 to 8 dimensions, each with both")
    for i in range(ndim):
        name_words[i] = text_or_null(keep, names[i], "the dimension's name")
        size_words[i] = sizes[i]
    with nogil:
        check(tsr_mesh_create(<tsr_comm *>lease.ptr, name_words, size_words, ndim, &out))
    return adopt(Mesh.__new__(Mesh), out)


def mesh_ndim(Mesh mesh not None):
    cdef Lease lease = share(mesh)
    cdef int32_t ndim = 0
    check(tsr_mesh_ndim(<tsr_mesh *>lease.ptr, &ndim))
    return ndim


def mesh_dim(Mesh mesh not None, str name):
    cdef Lease lease = share(mesh)
    cdef bytes encoded = utf8(name, "the dimension's name")
    cdef int32_t size = 0
    cdef int32_t coordinate = 0
    check(tsr_mesh_dim(<tsr_mesh *>lease.ptr, encoded, &size, &coordinate))
    return size, coordinate


def mesh_comm(Mesh mesh not None, str name):
    cdef Lease lease = share(mesh)
    cdef bytes encoded = utf8(name, "the dimension's name")
    cdef tsr_comm *comm = NULL
    check(tsr_mesh_comm(<tsr_mesh *>lease.ptr, encoded, &comm))
    cdef Comm handle = adopt(Comm.__new__(Comm), comm, mesh)
    handle.borrowed = True
    return handle


def mesh_destroy(Mesh mesh not None):
    retire(mesh)


# ---------------------------------------------------------------- layout.h


cdef class Layout(Handle):
    cdef void free(self) noexcept nogil:
        tsr_layout_destroy(<tsr_layout *>self.ptr)


cdef int copy_dims(int64_t *words, object dims) except -1:
    if len(dims) > TSR_MAX_NDIM:
        raise InvalidArgument(f"the shape {tuple(dims)} has {len(dims)} dimensions; at most {TSR_MAX_NDIM} are supported")
    cdef int i
    for i in range(len(dims)):
        words[i] = dims[i]
    return len(dims)


def layout_create(tuple shape not None, list mesh_sizes not None, list placements not None):
    """`placements` are (kind, dim) pairs, one a mesh dimension."""
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
        size_words[i] = mesh_sizes[i]
        placement_words[i].kind, placement_words[i].dim = placements[i]
    check(tsr_layout_create(shape_words, ndim, size_words, placement_words, mesh_ndim, &out))
    return adopt(Layout.__new__(Layout), out)


def layout_from_boxes(tuple shape not None, list ranks not None):
    """`ranks` holds a list of (offsets, sizes) for each rank."""
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
            for offsets, sizes in ranks[i]:
                if len(offsets) != ndim or len(sizes) != ndim:
                    raise InvalidArgument(f"a box of rank {i} has {len(offsets)} offsets and {len(sizes)} sizes; the "
                                          f"tensor has {ndim} dimensions")
                copy_dims(boxes[next_box].offsets, offsets)
                copy_dims(boxes[next_box].sizes, sizes)
                next_box += 1
        check(tsr_layout_from_boxes(shape_words, ndim, boxes, counts, <int32_t>len(ranks), &out))
    finally:
        PyMem_Free(boxes)
        PyMem_Free(counts)
    return adopt(Layout.__new__(Layout), out)


def layout_box_count(Layout layout not None, int32_t rank):
    cdef Lease lease = share(layout)
    cdef int32_t count = 0
    check(tsr_layout_box_count(<tsr_layout *>lease.ptr, rank, &count))
    return count


def layout_box(Layout layout not None, int32_t rank, int32_t index, int ndim):
    """(offsets, sizes) of `ndim` numbers each."""
    cdef Lease lease = share(layout)
    cdef tsr_box box
    check(tsr_layout_box(<tsr_layout *>lease.ptr, rank, index, &box))
    return (tuple([box.offsets[i] for i in range(ndim)]), tuple([box.sizes[i] for i in range(ndim)]))


def layout_destroy(Layout layout not None):
    retire(layout)


# ---------------------------------------------------------------- ddp.h


cdef class Ddp(Handle):
    cdef void free(self) noexcept nogil:
        tsr_ddp_destroy(<tsr_ddp *>self.ptr)


cdef int ddp_options(tsr_ddp_options *o, dict given) except -1:
    check(tsr_ddp_options_init(o, sizeof(tsr_ddp_options)))
    for name, value in given.items():
        if name == "bucket_bytes":
            o.bucket_bytes = value
        elif name == "first_bucket_bytes":
            o.first_bucket_bytes = value
        elif name == "op":
            o.op = value
        else:
            raise unknown_option("DDP options", name)
    return 0


def ddp_create(Comm comm not None, list names not None, list tensors not None, dict options):
    cdef Lease lease = use(comm)
    cdef TensorArray params = tensor_array(tensors, names)
    cdef tsr_ddp_options o
    cdef tsr_ddp *out = NULL
    ddp_options(&o, options)
    with nogil:
        check(tsr_ddp_create(<tsr_comm *>lease.ptr, params.params, params.count, &o, &out))
    return adopt(Ddp.__new__(Ddp), out, (comm, params))


def ddp_param_count(Ddp ddp not None):
    cdef Lease lease = share(ddp)
    cdef size_t count = 0
    check(tsr_ddp_param_count(<tsr_ddp *>lease.ptr, &count))
    return count


cdef tuple shape_of(const tsr_tensor *tensor):
    return tuple([tensor.shape[i] for i in range(tensor.ndim)])


def ddp_param(Ddp ddp not None, size_t index):
    """(name, dtype, shape)"""
    cdef Lease lease = share(ddp)
    cdef tsr_param param
    check(tsr_ddp_param(<tsr_ddp *>lease.ptr, index, &param))
    return param.name.decode("utf-8", "surrogateescape"), param.tensor.dtype, shape_of(&param.tensor)


def ddp_grad(Ddp ddp not None, size_t index):
    """(memory, dtype, shape)"""
    cdef Lease lease = share(ddp)
    cdef tsr_tensor grad
    cdef size_t size
    check(tsr_ddp_grad(<tsr_ddp *>lease.ptr, index, &grad))
    shape = shape_of(&grad)
    size = ITEM_SIZES[grad.dtype]
    for length in shape:
        size *= length
    return memory_of(ddp, <char *>grad.data + grad.byte_offset, size), grad.dtype, shape


def ddp_ready(Ddp ddp not None, size_t index):
    cdef Lease lease = use(ddp)
    with nogil:
        check(tsr_ddp_ready(<tsr_ddp *>lease.ptr, index))


def ddp_ready_all(Ddp ddp not None):
    cdef Lease lease = use(ddp)
    with nogil:
        check(tsr_ddp_ready_all(<tsr_ddp *>lease.ptr))


def ddp_wait(Ddp ddp not None):
    cdef Lease lease = use(ddp)
    with nogil:
        check(tsr_ddp_wait(<tsr_ddp *>lease.ptr))


def ddp_zero_grad(Ddp ddp not None):
    cdef Lease lease = use(ddp)
    with nogil:
        check(tsr_ddp_zero_grad(<tsr_ddp *>lease.ptr))


def ddp_destroy(Ddp ddp not None):
    retire(ddp)


# ---------------------------------------------------------------- optim.h


cdef class Optimizer(Handle):
    cdef void free(self) noexcept nogil:
        tsr_optimizer_destroy(<tsr_optimizer *>self.ptr)


cdef int sgd_options(tsr_sgd_options *o, dict given) except -1:
    check(tsr_sgd_options_init(o, sizeof(tsr_sgd_options)))
    for name, value in given.items():
        if name == "lr":
            o.lr = value
        elif name == "momentum":
            o.momentum = value
        elif name == "dampening":
            o.dampening = value
        elif name == "weight_decay":
            o.weight_decay = value
        elif name == "nesterov":
            o.nesterov = value
        else:
            raise unknown_option("SGD options", name)
    return 0


ctypedef fused adam_family:
    tsr_adam_options
    tsr_adamw_options


cdef int adam_options(adam_family *o, dict given) except -1:
    for name, value in given.items():
        if name == "lr":
            o.lr = value
        elif name == "beta1":
            o.beta1 = value
        elif name == "beta2":
            o.beta2 = value
        elif name == "eps":
            o.eps = value
        elif name == "weight_decay":
            o.weight_decay = value
        else:
            raise unknown_option("Adam options", name)
    return 0


cdef object optimizer_over(tsr_optimizer *out, TensorArray params, TensorArray grads):
    return adopt(Optimizer.__new__(Optimizer), out, (params, grads))


def sgd_create(list names not None, list params not None, list grads not None, dict options):
    cdef TensorArray p = tensor_array(params, names)
    cdef TensorArray g = tensor_array(grads)
    cdef tsr_sgd_options o
    cdef tsr_optimizer *out = NULL
    sgd_options(&o, options)
    check_lengths(p, g)
    with nogil:
        check(tsr_sgd_create(p.params, g.tensors, p.count, &o, &out))
    return optimizer_over(out, p, g)


def ddp_sgd(Ddp ddp not None, dict options):
    cdef Lease lease = use(ddp)
    cdef tsr_sgd_options o
    cdef tsr_optimizer *out = NULL
    sgd_options(&o, options)
    with nogil:
        check(tsr_ddp_sgd(<tsr_ddp *>lease.ptr, &o, &out))
    return adopt(Optimizer.__new__(Optimizer), out, None, [ddp])


def adam_create(list names not None, list params not None, list grads not None, dict options):
    cdef TensorArray p = tensor_array(params, names)
    cdef TensorArray g = tensor_array(grads)
    cdef tsr_adam_options o
    cdef tsr_optimizer *out = NULL
    check(tsr_adam_options_init(&o, sizeof(tsr_adam_options)))
    adam_options(&o, options)
    check_lengths(p, g)
    with nogil:
        check(tsr_adam_create(p.params, g.tensors, p.count, &o, &out))
    return optimizer_over(out, p, g)


def ddp_adam(Ddp ddp not None, dict options):
    cdef Lease lease = use(ddp)
    cdef tsr_adam_options o
    cdef tsr_optimizer *out = NULL
    check(tsr_adam_options_init(&o, sizeof(tsr_adam_options)))
    adam_options(&o, options)
    with nogil:
        check(tsr_ddp_adam(<tsr_ddp *>lease.ptr, &o, &out))
    return adopt(Optimizer.__new__(Optimizer), out, None, [ddp])


def adamw_create(list names not None, list params not None, list grads not None, dict options):
    cdef TensorArray p = tensor_array(params, names)
    cdef TensorArray g = tensor_array(grads)
    cdef tsr_adamw_options o
    cdef tsr_optimizer *out = NULL
    check(tsr_adamw_options_init(&o, sizeof(tsr_adamw_options)))
    adam_options(&o, options)
    check_lengths(p, g)
    with nogil:
        check(tsr_adamw_create(p.params, g.tensors, p.count, &o, &out))
    return optimizer_over(out, p, g)


def ddp_adamw(Ddp ddp not None, dict options):
    cdef Lease lease = use(ddp)
    cdef tsr_adamw_options o
    cdef tsr_optimizer *out = NULL
    check(tsr_adamw_options_init(&o, sizeof(tsr_adamw_options)))
    adam_options(&o, options)
    with nogil:
        check(tsr_ddp_adamw(<tsr_ddp *>lease.ptr, &o, &out))
    return adopt(Optimizer.__new__(Optimizer), out, None, [ddp])


cdef int check_lengths(TensorArray params, TensorArray grads) except -1:
    if params.count != grads.count:
        raise InvalidArgument(f"{params.count} parameters and {grads.count} gradients; each parameter needs its own")
    return 0


def optimizer_step(Optimizer optimizer not None):
    cdef Lease lease = use(optimizer)
    with nogil:
        check(tsr_optimizer_step(<tsr_optimizer *>lease.ptr))


def optimizer_zero_grad(Optimizer optimizer not None):
    cdef Lease lease = use(optimizer)
    with nogil:
        check(tsr_optimizer_zero_grad(<tsr_optimizer *>lease.ptr))


def optimizer_lr(Optimizer optimizer not None):
    cdef Lease lease = share(optimizer)
    cdef double lr = 0
    check(tsr_optimizer_lr(<tsr_optimizer *>lease.ptr, &lr))
    return lr


def optimizer_set_lr(Optimizer optimizer not None, double lr):
    cdef Lease lease = use(optimizer)
    check(tsr_optimizer_set_lr(<tsr_optimizer *>lease.ptr, lr))


def optimizer_steps(Optimizer optimizer not None):
    cdef Lease lease = share(optimizer)
    cdef int64_t steps = 0
    check(tsr_optimizer_steps(<tsr_optimizer *>lease.ptr, &steps))
    return steps


def optimizer_destroy(Optimizer optimizer not None):
    retire(optimizer)


# ---------------------------------------------------------------- data.h


cdef class Sampler(Handle):
    cdef void free(self) noexcept nogil:
        tsr_sampler_destroy(<tsr_sampler *>self.ptr)


def sampler_create(Comm comm not None, int64_t length, dict options):
    cdef Lease lease = share(comm)
    cdef tsr_sampler_options o
    cdef tsr_sampler *out = NULL
    check(tsr_sampler_options_init(&o, sizeof(tsr_sampler_options)))
    for name, value in options.items():
        if name == "seed":
            o.seed = value
        elif name == "shuffle":
            o.shuffle = value
        elif name == "drop_last":
            o.drop_last = value
        else:
            raise unknown_option("sampler options", name)
    with nogil:
        check(tsr_sampler_create(<tsr_comm *>lease.ptr, length, &o, &out))
    return adopt(Sampler.__new__(Sampler), out)


def sampler_next(Sampler sampler not None, Tensor indices not None):
    """Fills `indices` (int64, one dimension) from its beginning; how many."""
    cdef Lease lease = use(sampler)
    cdef size_t count = 0
    cdef int64_t *words = <int64_t *>indices.view.data
    cdef size_t size = indices.shape_words[0]
    if indices.view.ndim != 1 or indices.view.dtype != TSR_DTYPE_I64 or (size > 1 and indices.stride_words[0] != 1):
        raise InvalidArgument("the indices need a contiguous int64 array of one dimension")
    with nogil:
        check(tsr_sampler_next(<tsr_sampler *>lease.ptr, words, size, &count))
    return count


def sampler_position(Sampler sampler not None):
    """(epoch, consumed)"""
    cdef Lease lease = share(sampler)
    cdef int64_t epoch = 0
    cdef int64_t consumed = 0
    check(tsr_sampler_position(<tsr_sampler *>lease.ptr, &epoch, &consumed))
    return epoch, consumed


def sampler_set_epoch(Sampler sampler not None, int64_t epoch):
    cdef Lease lease = use(sampler)
    check(tsr_sampler_set_epoch(<tsr_sampler *>lease.ptr, epoch))


def sampler_destroy(Sampler sampler not None):
    retire(sampler)


# ---------------------------------------------------------------- state.h


cdef class State(Handle):
    cdef void free(self) noexcept nogil:
        tsr_state_destroy(<tsr_state *>self.ptr)


def state_create():
    cdef tsr_state *out = NULL
    check(tsr_state_create(&out))
    return adopt(State.__new__(State), out, [], [])


cdef int pin(State state, Handle parent) except -1:
    state.parents.append(parent)
    parent.pins += 1
    return 0


def state_add_tensor(State state not None, str name, Tensor tensor not None):
    cdef Lease lease = use(state)
    cdef bytes encoded = utf8(name, "the name")
    check(tsr_state_add_tensor(<tsr_state *>lease.ptr, encoded, &tensor.view))
    state.keep.append(tensor)


def state_add_sharded(State state not None, str name, Layout layout not None, tsr_dtype dtype, list pieces not None,
                      int32_t rank):
    cdef Lease lease = use(state)
    cdef Lease layout_lease = share(layout)
    cdef bytes encoded = utf8(name, "the name")
    cdef TensorArray array = tensor_array(pieces)
    cdef int32_t count = 0
    check(tsr_layout_box_count(<tsr_layout *>layout_lease.ptr, rank, &count))
    if array.count != <size_t>count:
        raise InvalidArgument(f"{name!r}: {array.count} pieces were given, the layout gives rank {rank} {count}")
    check(tsr_state_add_sharded(<tsr_state *>lease.ptr, encoded, <tsr_layout *>layout_lease.ptr, dtype,
                                array.tensors if array.count else NULL, rank))
    state.keep.append(array)


def state_add_ddp(State state not None, str prefix, Ddp ddp not None):
    cdef Lease lease = use(state)
    cdef Lease ddp_lease = use(ddp)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_ddp(<tsr_state *>lease.ptr, encoded, <tsr_ddp *>ddp_lease.ptr))
    pin(state, ddp)


def state_add_optimizer(State state not None, str prefix, Optimizer optimizer not None):
    cdef Lease lease = use(state)
    cdef Lease optimizer_lease = use(optimizer)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_optimizer(<tsr_state *>lease.ptr, encoded, <tsr_optimizer *>optimizer_lease.ptr))
    pin(state, optimizer)


def state_add_sampler(State state not None, str prefix, Sampler sampler not None):
    cdef Lease lease = use(state)
    cdef Lease sampler_lease = use(sampler)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_sampler(<tsr_state *>lease.ptr, encoded, <tsr_sampler *>sampler_lease.ptr))
    pin(state, sampler)


def state_set_int64(State state not None, str name, int64_t value):
    cdef Lease lease = use(state)
    cdef bytes encoded = utf8(name, "the name")
    check(tsr_state_set_int64(<tsr_state *>lease.ptr, encoded, value))


def state_get_int64(State state not None, str name):
    cdef Lease lease = share(state)
    cdef bytes encoded = utf8(name, "the name")
    cdef int64_t value = 0
    check(tsr_state_get_int64(<tsr_state *>lease.ptr, encoded, &value))
    return value


def state_set_double(State state not None, str name, double value):
    cdef Lease lease = use(state)
    cdef bytes encoded = utf8(name, "the name")
    check(tsr_state_set_double(<tsr_state *>lease.ptr, encoded, value))


def state_get_double(State state not None, str name):
    cdef Lease lease = share(state)
    cdef bytes encoded = utf8(name, "the name")
    cdef double value = 0
    check(tsr_state_get_double(<tsr_state *>lease.ptr, encoded, &value))
    return value


def state_set_value(State state not None, str name, str json):
    cdef Lease lease = use(state)
    cdef bytes encoded = utf8(name, "the name")
    cdef bytes text = utf8(json, "the value")
    check(tsr_state_set_value(<tsr_state *>lease.ptr, encoded, text))


def state_get_value(State state not None, str name):
    cdef Lease lease = share(state)
    cdef bytes encoded = utf8(name, "the name")
    cdef size_t size = 256
    cdef size_t capacity = 0
    cdef bytes text = b""
    while size > capacity:
        capacity = size
        text = PyBytes_FromStringAndSize(NULL, capacity)
        check(tsr_state_get_value(<tsr_state *>lease.ptr, encoded, PyBytes_AsString(text), capacity, &size))
    return text[:size - 1].decode("utf-8", "surrogateescape")


def state_set_metric(State state not None, str name, double value):
    cdef Lease lease = use(state)
    cdef bytes encoded = utf8(name, "the name")
    check(tsr_state_set_metric(<tsr_state *>lease.ptr, encoded, value))


def state_destroy(State state not None):
    retire(state)


# ---------------------------------------------------------------- checkpoint.h


cdef class Saver(Handle):
    cdef void free(self) noexcept nogil:
        tsr_saver_destroy(<tsr_saver *>self.ptr)


cdef class Checkpoint(Handle):
    cdef void free(self) noexcept nogil:
        tsr_checkpoint_destroy(<tsr_checkpoint *>self.ptr)


cdef list saver_options(tsr_saver_options *o, dict given):
    cdef list keep = []
    check(tsr_saver_options_init(o, sizeof(tsr_saver_options)))
    for name, value in given.items():
        if name == "keep_latest":
            o.keep_latest = value
        elif name == "timeout_ms":
            o.timeout_ms = value
        elif name == "writer":
            o.writer = text_or_null(keep, value, "the writer")
        elif name == "writer_version":
            o.writer_version = text_or_null(keep, value, "the writer's version")
        elif name == "format":
            o.format = text_or_null(keep, value, "the format")
        else:
            raise unknown_option("saver options", name)
    return keep


def saver_create(Comm comm, str root, dict options):
    cdef Lease lease = None if comm is None else use(comm)
    cdef tsr_saver_options o
    cdef tsr_saver *out = NULL
    cdef list keep = saver_options(&o, options)
    cdef const char *path = text_or_null(keep, root, "the path")
    cdef tsr_comm *ranks = NULL if comm is None else <tsr_comm *>lease.ptr
    arm()
    with nogil:
        check(tsr_saver_create(ranks, path, &o, &out))
    return adopt(Saver.__new__(Saver), out)


def saver_save(Saver saver not None, int64_t step, State state not None):
    cdef Lease lease = use(saver)
    cdef Lease state_lease = use(state)
    with nogil:
        check(tsr_saver_save(<tsr_saver *>lease.ptr, step, <tsr_state *>state_lease.ptr))


def saver_save_async(Saver saver not None, int64_t step, State state not None):
    cdef Lease lease = use(saver)
    cdef Lease state_lease = use(state)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_saver_save_async(<tsr_saver *>lease.ptr, step, <tsr_state *>state_lease.ptr, &work))
    return finished(work, (saver,))


def saver_wait(Saver saver not None):
    cdef Lease lease = use(saver)
    with nogil:
        check(tsr_saver_wait(<tsr_saver *>lease.ptr))


def saver_resume(Saver saver not None, State state not None):
    cdef Lease lease = use(saver)
    cdef Lease state_lease = use(state)
    cdef int64_t step = 0
    with nogil:
        check(tsr_saver_resume(<tsr_saver *>lease.ptr, <tsr_state *>state_lease.ptr, &step))
    return step


def saver_destroy(Saver saver not None):
    retire(saver)


def checkpoint_open(str path):
    cdef list keep = []
    cdef const char *text = text_or_null(keep, path, "the path")
    cdef tsr_checkpoint *out = NULL
    arm()
    with nogil:
        check(tsr_checkpoint_open(text, &out))
    return adopt(Checkpoint.__new__(Checkpoint), out)


def checkpoint_path(Checkpoint checkpoint not None):
    cdef Lease lease = share(checkpoint)
    cdef size_t size = 256
    cdef size_t capacity = 0
    cdef bytes text = b""
    while size > capacity:
        capacity = size
        text = PyBytes_FromStringAndSize(NULL, capacity)
        check(tsr_checkpoint_path(<tsr_checkpoint *>lease.ptr, PyBytes_AsString(text), capacity, &size))
    return text[:size - 1].decode("utf-8", "surrogateescape")


def checkpoint_manifest(Checkpoint checkpoint not None):
    cdef Lease lease = share(checkpoint)
    cdef size_t size = 65536
    cdef size_t capacity = 0
    cdef bytes text = b""
    while size > capacity:
        capacity = size
        text = PyBytes_FromStringAndSize(NULL, capacity)
        check(tsr_checkpoint_manifest(<tsr_checkpoint *>lease.ptr, PyBytes_AsString(text), capacity, &size))
    return text[:size - 1].decode("utf-8", "surrogateescape")


def checkpoint_step(Checkpoint checkpoint not None):
    cdef Lease lease = share(checkpoint)
    cdef int64_t step = 0
    check(tsr_checkpoint_step(<tsr_checkpoint *>lease.ptr, &step))
    return step


def checkpoint_tensor_count(Checkpoint checkpoint not None):
    cdef Lease lease = share(checkpoint)
    cdef size_t count = 0
    check(tsr_checkpoint_tensor_count(<tsr_checkpoint *>lease.ptr, &count))
    return count


def checkpoint_tensor(Checkpoint checkpoint not None, size_t index):
    """(name, dtype, shape)"""
    cdef Lease lease = share(checkpoint)
    cdef const char *name = NULL
    cdef tsr_dtype dtype = 0
    cdef const int64_t *shape = NULL
    cdef int32_t ndim = 0
    check(tsr_checkpoint_tensor(<tsr_checkpoint *>lease.ptr, index, &name, &dtype, &shape, &ndim))
    return name.decode("utf-8", "surrogateescape"), dtype, tuple([shape[i] for i in range(ndim)])


def checkpoint_read(Checkpoint checkpoint not None, str name, Tensor tensor not None):
    cdef Lease lease = share(checkpoint)
    cdef bytes encoded = utf8(name, "the name")
    cdef const char *text = encoded
    with nogil:
        check(tsr_checkpoint_read(<tsr_checkpoint *>lease.ptr, text, &tensor.view))


cdef int load_options(tsr_load_options *o, dict given) except -1:
    check(tsr_load_options_init(o, sizeof(tsr_load_options)))
    for name, value in given.items():
        if name == "verify":
            o.verify = value
        elif name == "allow_missing":
            o.allow_missing = value
        elif name == "allow_unexpected":
            o.allow_unexpected = value
        elif name == "allow_cast":
            o.allow_cast = value
        else:
            raise unknown_option("load options", name)
    return 0


def checkpoint_load(Checkpoint checkpoint not None, State state not None, dict options):
    cdef Lease lease = share(checkpoint)
    cdef Lease state_lease = use(state)
    cdef tsr_load_options o
    load_options(&o, options)
    with nogil:
        check(tsr_checkpoint_load(<tsr_checkpoint *>lease.ptr, <tsr_state *>state_lease.ptr, &o))


def checkpoint_verify(Checkpoint checkpoint not None, bint full):
    cdef Lease lease = share(checkpoint)
    with nogil:
        check(tsr_checkpoint_verify(<tsr_checkpoint *>lease.ptr, full))


def checkpoint_destroy(Checkpoint checkpoint not None):
    retire(checkpoint)


# ---------------------------------------------------------------- launch.h


def preempt_requested():
    return tsr_preempt_requested() != 0


def record_error(str message, str traceback):
    cdef list keep = []
    cdef const char *text = text_or_null(keep, message, "the message")
    cdef const char *trace = text_or_null(keep, traceback, "the traceback")
    with nogil:
        check(tsr_record_error(text, trace))
