# ddp.h: data-parallel training.

cdef class DDP(Handle):
    cdef void free(self) noexcept nogil:
        tsr_ddp_destroy(<tsr_ddp *>self.ptr)


def ddp_create(Comm comm not None, object arguments):
    """`arguments()` returns the names and the tensors of parameters, the TensorParallel or None, and the options. If that
    fails, so does the creation on all ranks."""
    cdef TensorArray params
    cdef tsr_ddp_options o
    cdef tsr_ddp *out = NULL
    cdef list keep
    cdef Lease slices
    try:
        names, tensors, tp, given = arguments()
        params = tensor_array(tensors, names)
        keep = ddp_options(&o, given)
        if tp is not None:
            slices = use(<TensorParallel?>tp)
            o.tp = <tsr_tp *>slices.ptr
    except Exception as error:
        refuse(comm, TSR_CREATES_MODEL, error)
        raise
    cdef Lease lease = use(comm)
    with nogil:
        check(tsr_ddp_create(<tsr_comm *>lease.ptr, params.params, params.count, &o, &out))
    # With share_params the host's copy has the values: the registered arrays need not stay alive.
    return adopt(DDP.__new__(DDP), out, comm if o.share_params else (comm, params),
                 None if tp is None else [tp])


def ddp_param_count(DDP ddp not None):
    cdef Lease lease = share(ddp)
    cdef size_t count = 0
    check(tsr_ddp_param_count(<tsr_ddp *>lease.ptr, &count))
    return count


def ddp_param(DDP ddp not None, size_t place):
    """(name, dtype, shape)"""
    cdef Lease lease = share(ddp)
    cdef tsr_param param
    check(tsr_ddp_param(<tsr_ddp *>lease.ptr, place, &param))
    return param.name.decode("utf-8", "surrogateescape"), param.tensor.dtype, shape_of(&param.tensor)


def ddp_shared_param(DDP ddp not None, size_t place):
    """(memory, dtype, shape) of a parameter in the copy that the host shares"""
    cdef Lease lease = share(ddp)
    cdef tsr_param param
    check(tsr_ddp_param(<tsr_ddp *>lease.ptr, place, &param))
    return tensor_view(ddp, &param.tensor)


def ddp_grad(DDP ddp not None, size_t place):
    """(memory, dtype, shape)"""
    cdef Lease lease = share(ddp)
    cdef tsr_tensor grad
    check(tsr_ddp_grad(<tsr_ddp *>lease.ptr, place, &grad))
    return tensor_view(ddp, &grad)


def ddp_ready(DDP ddp not None, object which):
    cdef Lease lease = use(ddp)
    cdef size_t place = size_of(which, "the number of a parameter")
    with nogil:
        check(tsr_ddp_ready(<tsr_ddp *>lease.ptr, place))


def ddp_ready_all(DDP ddp not None):
    cdef Lease lease = use(ddp)
    with nogil:
        check(tsr_ddp_ready_all(<tsr_ddp *>lease.ptr))


def ddp_wait(DDP ddp not None):
    cdef Lease lease = use(ddp)
    with nogil:
        check(tsr_ddp_wait(<tsr_ddp *>lease.ptr))


def ddp_set_stream(DDP ddp not None, size_t stream):
    cdef Lease lease = use(ddp)
    with nogil:
        check(tsr_ddp_set_stream(<tsr_ddp *>lease.ptr, <void *>stream))


def ddp_set_sync(DDP ddp not None, object sync):
    cdef Lease lease = use(ddp)
    cdef int32_t on = flag(sync, "sync")
    check(tsr_ddp_set_sync(<tsr_ddp *>lease.ptr, on))


def ddp_used(DDP ddp not None, object which):
    cdef Lease lease = use(ddp)
    cdef size_t place = size_of(which, "the number of a parameter")
    cdef int32_t used = 0
    check(tsr_ddp_used(<tsr_ddp *>lease.ptr, place, &used))
    return bool(used)


def ddp_bucket_count(DDP ddp not None):
    cdef Lease lease = use(ddp)
    cdef size_t count = 0
    check(tsr_ddp_bucket_count(<tsr_ddp *>lease.ptr, &count))
    return count


def ddp_stats(DDP ddp not None, object bucket):
    """(size_bytes, params, ready_ns, start_ns, end_ns, exposed_ns)"""
    cdef Lease lease = use(ddp)
    cdef size_t place = size_of(bucket, "the number of a bucket")
    cdef tsr_bucket_stats stats
    stats.struct_size = sizeof(tsr_bucket_stats)
    with nogil:
        check(tsr_ddp_stats(<tsr_ddp *>lease.ptr, place, &stats))
    return stats.size_bytes, stats.params, stats.ready_ns, stats.start_ns, stats.end_ns, stats.exposed_ns


cdef int32_t on_bucket(const tsr_ddp_bucket *bucket, void *user_data) noexcept nogil:
    cdef int32_t failed
    if not gate_enter():
        return 1
    with gil:
        failed = reduce_bucket(bucket, <object>user_data)
    gate_leave()
    return failed


cdef int32_t reduce_bucket(const tsr_ddp_bucket *bucket, object fn) noexcept:
    """Calls `fn`, which keeps its exception for the thread that waits for the step, and closes the communicator."""
    cdef Comm comm
    cdef size_t i
    try:
        comm = adopt(Comm.__new__(Comm), bucket.comm)
        comm.borrowed = True
        fn(bucket.bucket, [bucket.params[i] for i in range(bucket.n)], comm, <size_t>bucket.stream)
        return 0
    except BaseException:
        return 1


def ddp_set_hook(DDP ddp not None, object fn):
    """Calls `fn(bucket, params, comm, stream)` on a thread of the library. If it raises, the step fails."""
    cdef Lease lease = use(ddp)
    cdef void *user_data = <void *>fn
    cdef tsr_status status
    if fn is None:
        with nogil:
            check(tsr_ddp_set_hook(<tsr_ddp *>lease.ptr, NULL, NULL, NULL))
        return
    Py_INCREF(fn)
    with nogil:
        status = tsr_ddp_set_hook(<tsr_ddp *>lease.ptr, on_bucket, user_data, on_drop)
    if status != TSR_OK:
        Py_DECREF(fn)
    check(status)


def ddp_step_in_backward(DDP ddp not None, Optimizer optimizer not None):
    cdef Lease lease = use(ddp)
    cdef Lease stepping = use(optimizer)
    with nogil:
        check(tsr_ddp_step_in_backward(<tsr_ddp *>lease.ptr, <tsr_optimizer *>stepping.ptr))


def ddp_register_buffers(DDP ddp not None, list names not None, list tensors not None):
    cdef Lease lease = use(ddp)
    cdef TensorArray buffers = tensor_array(tensors, names)
    with nogil:
        check(tsr_ddp_register_buffers(<tsr_ddp *>lease.ptr, buffers.params, buffers.count))
    ddp.keep = (ddp.keep, buffers)


def ddp_broadcast_buffers(DDP ddp not None):
    cdef Lease lease = use(ddp)
    with nogil:
        check(tsr_ddp_broadcast_buffers(<tsr_ddp *>lease.ptr))


def ddp_join(DDP ddp not None, object sync_params):
    cdef Lease lease = use(ddp)
    cdef int32_t sync = flag(sync_params, "sync_params")
    with nogil:
        check(tsr_ddp_join(<tsr_ddp *>lease.ptr, sync))


def ddp_shared_step(DDP ddp not None):
    cdef Lease lease = use(ddp)
    cdef int64_t steps = 0
    check(tsr_ddp_shared_step(<tsr_ddp *>lease.ptr, &steps))
    return steps


def ddp_zero_grad(DDP ddp not None):
    cdef Lease lease = use(ddp)
    with nogil:
        check(tsr_ddp_zero_grad(<tsr_ddp *>lease.ptr))


def ddp_destroy(DDP ddp not None):
    retire(ddp)
