# fsdp.h: fully sharded data-parallel training.

cdef class FSDP(Handle):
    cdef list views  # for each unit, how many views of its unsharded parameters or gradients are alive

    cdef void free(self) noexcept nogil:
        tsr_fsdp_destroy(<tsr_fsdp *>self.ptr)


@cython.final
@cython.no_gc_clear
cdef class UnitArray:
    """A C array of units. Keeps alive what the units point to."""

    cdef tsr_fsdp_unit *units
    cdef size_t count
    cdef list keep

    def __dealloc__(self):
        cdef size_t i
        if self.units != NULL:
            for i in range(self.count):
                PyMem_Free(<void *>self.units[i].trained)
        PyMem_Free(self.units)


cdef UnitArray unit_array(list units):
    """`units` are (names of parameters, tensors, flags or None, a dict of plain fields)."""
    cdef UnitArray array = UnitArray.__new__(UnitArray)
    cdef TensorArray params
    cdef int32_t *trained
    cdef size_t i, k
    array.keep = []
    array.units = <tsr_fsdp_unit *>PyMem_Calloc(len(units) + 1, sizeof(tsr_fsdp_unit))
    if array.units == NULL:
        raise MemoryError
    array.count = len(units)
    for i in range(array.count):
        names, tensors, flags, given = units[i]
        array.keep.append(fsdp_unit(&array.units[i], given))
        params = tensor_array(tensors, names)
        array.keep.append(params)
        array.units[i].params = params.params
        array.units[i].n = params.count
        if flags is None:
            continue
        trained = <int32_t *>PyMem_Calloc(params.count + 1, sizeof(int32_t))
        if trained == NULL:
            raise MemoryError
        array.units[i].trained = trained
        for k in range(params.count):
            trained[k] = bool(flags[k])
    return array


def described(tuple shape not None, int dtype, object device=None):
    """A tensor without memory: a parameter that gets its values later, on the CPU or on a CUDA device."""
    cdef Tensor tensor = Tensor.__new__(Tensor, LATER)
    if device is not None:
        tensor.view.device_type = TSR_DEVICE_CUDA
        tensor.view.device_index = int32(device, "the number of the device")
    tensor.view.ndim = copy_dims(tensor.shape_words, shape)
    tensor.view.dtype = dtype
    return tensor


def fsdp_create(Comm comm not None, object arguments):
    """`arguments()` returns the units, as `unit_array` takes them, the TensorParallel or None, and the options. If that
    fails, so does the creation on all ranks."""
    cdef UnitArray array
    cdef tsr_fsdp_options o
    cdef tsr_fsdp *out = NULL
    cdef FSDP fsdp
    cdef list keep
    cdef Lease slices
    try:
        units, tp, given = arguments()
        array = unit_array(units)
        keep = fsdp_options(&o, given)
        if tp is not None:
            slices = use(<TensorParallel?>tp)
            o.tp = <tsr_tp *>slices.ptr
    except Exception as error:
        refuse(comm, TSR_CREATES_MODEL, error)
        raise
    cdef Lease lease = use(comm)
    with nogil:
        check(tsr_fsdp_create(<tsr_comm *>lease.ptr, array.units, array.count, &o, &out))
    fsdp = FSDP.__new__(FSDP)
    fsdp.views = [0] * array.count
    return adopt(fsdp, out, comm, None if tp is None else [tp])


def fsdp_unit_count(FSDP fsdp not None):
    cdef Lease lease = share(fsdp)
    cdef size_t count = 0
    check(tsr_fsdp_unit_count(<tsr_fsdp *>lease.ptr, &count))
    return count


def fsdp_param_count(FSDP fsdp not None):
    cdef Lease lease = share(fsdp)
    cdef size_t count = 0
    check(tsr_fsdp_param_count(<tsr_fsdp *>lease.ptr, &count))
    return count


def fsdp_unit_name(FSDP fsdp not None, size_t unit):
    cdef Lease lease = share(fsdp)
    cdef const char *name = NULL
    check(tsr_fsdp_unit_name(<tsr_fsdp *>lease.ptr, unit, &name))
    return name.decode("utf-8", "surrogateescape")


def fsdp_param(FSDP fsdp not None, size_t place):
    """(name, shape, unit, trained)"""
    cdef Lease lease = share(fsdp)
    cdef tsr_param param
    cdef size_t unit = 0
    cdef int32_t trained = 0
    cdef int32_t d
    check(tsr_fsdp_param(<tsr_fsdp *>lease.ptr, place, &param, &unit, &trained))
    shape = tuple([param.tensor.shape[d] for d in range(param.tensor.ndim)])
    return param.name.decode("utf-8", "surrogateescape"), shape, unit, bool(trained)


def fsdp_unit_phase(FSDP fsdp not None, size_t unit):
    cdef Lease lease = use(fsdp)
    cdef int32_t phase = 0
    check(tsr_fsdp_unit_phase(<tsr_fsdp *>lease.ptr, unit, &phase))
    return phase


def fsdp_shard(FSDP fsdp not None, size_t place):
    """(memory, dtype, shape)"""
    cdef Lease lease = share(fsdp)
    cdef tsr_param shard
    check(tsr_fsdp_shard(<tsr_fsdp *>lease.ptr, place, &shard))
    return tensor_view(fsdp, &shard.tensor)


def fsdp_shard_grad(FSDP fsdp not None, size_t place):
    """(memory, dtype, shape)"""
    cdef Lease lease = share(fsdp)
    cdef tsr_tensor grad
    check(tsr_fsdp_shard_grad(<tsr_fsdp *>lease.ptr, place, &grad))
    return tensor_view(fsdp, &grad)


def fsdp_layout(FSDP fsdp not None, size_t place):
    cdef Lease lease = share(fsdp)
    cdef tsr_layout *out = NULL
    check(tsr_fsdp_layout(<tsr_fsdp *>lease.ptr, place, &out))
    return adopt(Layout.__new__(Layout), out)


cdef tuple view_of_pass(FSDP fsdp, size_t place, const tsr_tensor *tensor, bint counted, bint read_only):
    """A view that its unit counts while it is alive, or one that may outlive the pass: its owner must know when it is
    valid, and that it is not written."""
    cdef tuple view = tensor_view(fsdp, tensor)
    cdef Lent memory = view[0]
    cdef size_t unit = 0
    if counted:
        check(tsr_fsdp_param(<tsr_fsdp *>fsdp.ptr, place, NULL, &unit, NULL))
        memory.count_in(fsdp.views, unit)
        memory.read_only = read_only
    return view


cdef int refuse_views(str unit, object count) except -1:
    raise InvalidState(f"unit \"{unit}\" cannot be resharded: {count} views of its unsharded parameters or gradients "
                       "are still held (by a variable, such as a loop variable, or by a background operation), and "
                       "other units reuse this memory; delete or copy them first")


cdef int refuse_if_viewed(FSDP fsdp, size_t unit) except -1:
    cdef const char *name = NULL
    if unit < <size_t>len(fsdp.views) and fsdp.views[unit] > 0:
        check(tsr_fsdp_unit_name(<tsr_fsdp *>fsdp.ptr, unit, &name))
        refuse_views(name.decode(), fsdp.views[unit])
    return 0


def fsdp_whole(FSDP fsdp not None, size_t place, *, bint counted=True):
    """(memory, dtype, shape); see `view_of_pass`."""
    cdef Lease lease = use(fsdp)
    cdef tsr_tensor whole
    check(tsr_fsdp_whole(<tsr_fsdp *>lease.ptr, place, &whole))
    return view_of_pass(fsdp, place, &whole, counted, True)


def fsdp_grad(FSDP fsdp not None, size_t place, *, bint counted=True):
    """(memory, dtype, shape); see `view_of_pass`."""
    cdef Lease lease = use(fsdp)
    cdef tsr_tensor grad
    check(tsr_fsdp_grad(<tsr_fsdp *>lease.ptr, place, &grad))
    return view_of_pass(fsdp, place, &grad, counted, False)


def fsdp_forward(FSDP fsdp not None, size_t unit):
    cdef Lease lease = use(fsdp)
    with nogil:
        check(tsr_fsdp_forward(<tsr_fsdp *>lease.ptr, unit))


def fsdp_forward_done(FSDP fsdp not None, size_t unit):
    cdef Lease lease = use(fsdp)
    refuse_if_viewed(fsdp, unit)
    with nogil:
        check(tsr_fsdp_forward_done(<tsr_fsdp *>lease.ptr, unit))


def fsdp_backward(FSDP fsdp not None, size_t unit):
    cdef Lease lease = use(fsdp)
    with nogil:
        check(tsr_fsdp_backward(<tsr_fsdp *>lease.ptr, unit))


def fsdp_unused(FSDP fsdp not None, size_t place):
    cdef Lease lease = use(fsdp)
    check(tsr_fsdp_unused(<tsr_fsdp *>lease.ptr, place))


def fsdp_used(FSDP fsdp not None, size_t place):
    cdef Lease lease = use(fsdp)
    cdef int32_t used = 0
    check(tsr_fsdp_used(<tsr_fsdp *>lease.ptr, place, &used))
    return bool(used)


def fsdp_grads_ready(FSDP fsdp not None, size_t unit):
    cdef Lease lease = use(fsdp)
    refuse_if_viewed(fsdp, unit)
    with nogil:
        check(tsr_fsdp_grads_ready(<tsr_fsdp *>lease.ptr, unit))


cdef int refuse_if_any_viewed(FSDP fsdp) except -1:
    cdef size_t unit
    for unit in range(len(fsdp.views)):
        refuse_if_viewed(fsdp, unit)
    return 0


def fsdp_wait(FSDP fsdp not None):
    cdef Lease lease = use(fsdp)
    refuse_if_any_viewed(fsdp)
    with nogil:
        check(tsr_fsdp_wait(<tsr_fsdp *>lease.ptr))


def fsdp_abandon(FSDP fsdp not None):
    cdef Lease lease = use(fsdp)
    refuse_if_any_viewed(fsdp)
    with nogil:
        check(tsr_fsdp_abandon(<tsr_fsdp *>lease.ptr))


def fsdp_unshard(FSDP fsdp not None, size_t unit):
    cdef Lease lease = use(fsdp)
    check(tsr_fsdp_unshard(<tsr_fsdp *>lease.ptr, unit))


def fsdp_await(FSDP fsdp not None, size_t unit):
    cdef Lease lease = use(fsdp)
    with nogil:
        check(tsr_fsdp_await(<tsr_fsdp *>lease.ptr, unit))


def fsdp_reshard(FSDP fsdp not None, size_t unit):
    cdef Lease lease = use(fsdp)
    cdef int32_t phase = 0
    check(tsr_fsdp_unit_phase(<tsr_fsdp *>lease.ptr, unit, &phase))
    if phase != TSR_FSDP_BACKWARD:  # there the block's own views are alive, and the library reports the error
        refuse_if_viewed(fsdp, unit)
    with nogil:
        check(tsr_fsdp_reshard(<tsr_fsdp *>lease.ptr, unit))


def fsdp_set_stream(FSDP fsdp not None, size_t stream):
    cdef Lease lease = use(fsdp)
    with nogil:
        check(tsr_fsdp_set_stream(<tsr_fsdp *>lease.ptr, <void *>stream))


def fsdp_set_sync(FSDP fsdp not None, object sync):
    cdef Lease lease = use(fsdp)
    check(tsr_fsdp_set_sync(<tsr_fsdp *>lease.ptr, flag(sync, "sync")))


def fsdp_set_accumulate(FSDP fsdp not None, object accumulate):
    cdef Lease lease = use(fsdp)
    check(tsr_fsdp_set_accumulate(<tsr_fsdp *>lease.ptr, flag(accumulate, "accumulate")))


def fsdp_set_all_reduce(FSDP fsdp not None, object all_reduce):
    cdef Lease lease = use(fsdp)
    check(tsr_fsdp_set_all_reduce(<tsr_fsdp *>lease.ptr, flag(all_reduce, "all_reduce")))


def fsdp_set_reshard_after_backward(FSDP fsdp not None, size_t unit, object reshard):
    cdef Lease lease = use(fsdp)
    check(tsr_fsdp_set_reshard_after_backward(<tsr_fsdp *>lease.ptr, unit, flag(reshard, "reshard")))


def fsdp_zero_grad(FSDP fsdp not None):
    cdef Lease lease = use(fsdp)
    check(tsr_fsdp_zero_grad(<tsr_fsdp *>lease.ptr))


def fsdp_destroy(FSDP fsdp not None):
    retire(fsdp)
