# ddp.h: data-parallel training.

cdef class DDP(Handle):
    cdef void free(self) noexcept nogil:
        tsr_ddp_destroy(<tsr_ddp *>self.ptr)


def ddp_create(Comm comm not None, list names not None, list tensors not None, *, bucket_bytes=None,
               first_bucket_bytes=None, op=None):
    cdef Lease lease = use(comm)
    cdef TensorArray params = tensor_array(tensors, names)
    cdef tsr_ddp_options o
    cdef tsr_ddp *out = NULL
    check(tsr_ddp_options_init(&o, sizeof(tsr_ddp_options)))
    if bucket_bytes is not None:
        o.bucket_bytes = size_of(bucket_bytes, "bucket_bytes")
    if first_bucket_bytes is not None:
        o.first_bucket_bytes = size_of(first_bucket_bytes, "first_bucket_bytes")
    if op is not None:
        o.op = int32(op, "op")
    with nogil:
        check(tsr_ddp_create(<tsr_comm *>lease.ptr, params.params, params.count, &o, &out))
    return adopt(DDP.__new__(DDP), out, (comm, params))


def ddp_param_count(DDP ddp not None):
    cdef Lease lease = share(ddp)
    cdef size_t count = 0
    check(tsr_ddp_param_count(<tsr_ddp *>lease.ptr, &count))
    return count


cdef tuple shape_of(const tsr_tensor *tensor):
    return tuple([tensor.shape[i] for i in range(tensor.ndim)])


def ddp_param(DDP ddp not None, size_t place):
    """(name, dtype, shape)"""
    cdef Lease lease = share(ddp)
    cdef tsr_param param
    check(tsr_ddp_param(<tsr_ddp *>lease.ptr, place, &param))
    return param.name.decode("utf-8", "surrogateescape"), param.tensor.dtype, shape_of(&param.tensor)


def ddp_grad(DDP ddp not None, size_t place):
    """(memory, dtype, shape)"""
    cdef Lease lease = share(ddp)
    cdef tsr_tensor grad
    cdef size_t size
    check(tsr_ddp_grad(<tsr_ddp *>lease.ptr, place, &grad))
    shape = shape_of(&grad)
    size = item_size_of(grad.dtype)
    for length in shape:
        size *= length
    return memory_of(ddp, <char *>grad.data + grad.byte_offset, size), grad.dtype, shape


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


def ddp_zero_grad(DDP ddp not None):
    cdef Lease lease = use(ddp)
    with nogil:
        check(tsr_ddp_zero_grad(<tsr_ddp *>lease.ptr))


def ddp_destroy(DDP ddp not None):
    retire(ddp)
