# state.h: what a checkpoint holds.

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


def state_add_tensor(State state not None, object name, Tensor tensor not None):
    cdef Lease lease = use(state)
    cdef bytes encoded = utf8(name, "the name")
    check(tsr_state_add_tensor(<tsr_state *>lease.ptr, encoded, &tensor.view))
    state.keep.append(tensor)


def state_add_sharded(State state not None, object name, Layout layout not None, tsr_dtype dtype, list pieces not None,
                      object rank):
    cdef Lease lease = use(state)
    cdef Lease layout_lease = share(layout)
    cdef bytes encoded = utf8(name, "the name")
    cdef TensorArray array
    cdef int32_t count = 0, own = int32(rank, "rank")
    check(tsr_layout_box_count(<tsr_layout *>layout_lease.ptr, own, &count))
    if len(pieces) != count:  # a layout has no box for a shard without rows
        pieces = [piece for piece in pieces if has_elements(piece)]
    array = tensor_array(pieces)
    if array.count != <size_t>count:
        raise InvalidArgument(f"{name!r}: {array.count} pieces, but the layout gives rank {rank} {count} boxes")
    check(tsr_state_add_sharded(<tsr_state *>lease.ptr, encoded, <tsr_layout *>layout_lease.ptr, dtype,
                                array.tensors if array.count else NULL, own))
    state.keep.extend(pieces)  # the library has copied the array itself


def state_set_stream(State state not None, object device, size_t stream):
    cdef Lease lease = use(state)
    check(tsr_state_set_stream(<tsr_state *>lease.ptr, int32(device, "device"), <void *>stream))


def state_add_ddp(State state not None, object prefix, DDP ddp not None):
    cdef Lease lease = use(state)
    cdef Lease ddp_lease = use(ddp)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_ddp(<tsr_state *>lease.ptr, encoded, <tsr_ddp *>ddp_lease.ptr))
    pin(state, ddp)


def state_add_tp(State state not None, object prefix, TensorParallel tp not None):
    cdef Lease lease = use(state)
    cdef Lease tp_lease = use(tp)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_tp(<tsr_state *>lease.ptr, encoded, <tsr_tp *>tp_lease.ptr))
    pin(state, tp)


def state_add_fsdp(State state not None, object prefix, FSDP fsdp not None):
    cdef Lease lease = use(state)
    cdef Lease fsdp_lease = use(fsdp)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_fsdp(<tsr_state *>lease.ptr, encoded, <tsr_fsdp *>fsdp_lease.ptr))
    pin(state, fsdp)


def state_add_optimizer(State state not None, object prefix, Optimizer optimizer not None):
    cdef Lease lease = use(state)
    cdef Lease optimizer_lease = use(optimizer)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_optimizer(<tsr_state *>lease.ptr, encoded, <tsr_optimizer *>optimizer_lease.ptr))
    pin(state, optimizer)


def state_add_grad_scaler(State state not None, object prefix, GradScaler scaler not None):
    cdef Lease lease = use(state)
    cdef Lease scaler_lease = use(scaler)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_grad_scaler(<tsr_state *>lease.ptr, encoded, <tsr_grad_scaler *>scaler_lease.ptr))
    pin(state, scaler)


def state_add_metric(State state not None, object prefix, Metric metric not None, Comm comm not None):
    cdef Lease lease = use(state)
    cdef Lease metric_lease = use(metric)
    cdef Lease comm_lease = share(comm)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_metric(<tsr_state *>lease.ptr, encoded, <tsr_metric *>metric_lease.ptr, <tsr_comm *>comm_lease.ptr))
    pin(state, metric)


def state_add_lr_schedule(State state not None, object prefix, LRSchedule schedule not None):
    cdef Lease lease = use(state)
    cdef Lease schedule_lease = use(schedule)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_lr_schedule(<tsr_state *>lease.ptr, encoded, <tsr_lr_schedule *>schedule_lease.ptr))
    pin(state, schedule)


def state_add_engine(State state not None, object prefix, Engine engine not None):
    cdef Lease lease = use(state)
    cdef Lease engine_lease = use(engine)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_engine(<tsr_state *>lease.ptr, encoded, <tsr_engine *>engine_lease.ptr))
    pin(state, engine)


def state_add_sampler(State state not None, object prefix, Sampler sampler not None):
    cdef Lease lease = use(state)
    cdef Lease sampler_lease = use(sampler)
    cdef bytes encoded = utf8(prefix, "the prefix")
    check(tsr_state_add_sampler(<tsr_state *>lease.ptr, encoded, <tsr_sampler *>sampler_lease.ptr))
    pin(state, sampler)


def state_set_int64(State state not None, object name, object value):
    cdef Lease lease = use(state)
    cdef bytes encoded = utf8(name, "the name")
    check(tsr_state_set_int64(<tsr_state *>lease.ptr, encoded, int64(value, "the value")))


def state_get_int64(State state not None, object name):
    cdef Lease lease = share(state)
    cdef bytes encoded = utf8(name, "the name")
    cdef int64_t value = 0
    check(tsr_state_get_int64(<tsr_state *>lease.ptr, encoded, &value))
    return value


def state_set_double(State state not None, object name, double value):
    cdef Lease lease = use(state)
    cdef bytes encoded = utf8(name, "the name")
    check(tsr_state_set_double(<tsr_state *>lease.ptr, encoded, value))


def state_get_double(State state not None, object name):
    cdef Lease lease = share(state)
    cdef bytes encoded = utf8(name, "the name")
    cdef double value = 0
    check(tsr_state_get_double(<tsr_state *>lease.ptr, encoded, &value))
    return value


def state_set_value(State state not None, object name, str json):
    cdef Lease lease = use(state)
    cdef bytes encoded = utf8(name, "the name")
    cdef bytes text = utf8(json, "the value")
    check(tsr_state_set_value(<tsr_state *>lease.ptr, encoded, text))


def state_get_value(State state not None, object name):
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


def state_tensor_count(State state not None):
    cdef Lease lease = share(state)
    cdef size_t count = 0
    check(tsr_state_tensor_count(<tsr_state *>lease.ptr, &count))
    return count


def state_tensor(State state not None, size_t place):
    """(name, dtype, shape)"""
    cdef Lease lease = share(state)
    cdef tsr_param tensor
    check(tsr_state_tensor(<tsr_state *>lease.ptr, place, &tensor))
    shape = tuple([tensor.tensor.shape[i] for i in range(tensor.tensor.ndim)])
    return tensor.name.decode("utf-8", "surrogateescape"), tensor.tensor.dtype, shape


def state_join(State state not None, Comm comm not None):
    cdef Lease lease = use(state)
    cdef Lease comm_lease = use(comm)
    with nogil:
        check(tsr_state_join(<tsr_state *>lease.ptr, <tsr_comm *>comm_lease.ptr))


def state_gather(State state not None, Comm comm not None, object name, object root, Tensor whole):
    """`whole` may be None on ranks that receive nothing."""
    cdef Lease lease = use(state)
    cdef Lease comm_lease = use(comm)
    cdef bytes encoded = utf8(name, "the name")
    cdef const char *text = encoded
    cdef int32_t where = int32(root, "root")
    cdef const tsr_tensor *out = NULL if whole is None else &whole.view
    with nogil:
        check(tsr_state_gather(<tsr_state *>lease.ptr, <tsr_comm *>comm_lease.ptr, text, where, out))


def state_set_metric(State state not None, object name, double value):
    cdef Lease lease = use(state)
    cdef bytes encoded = utf8(name, "the name")
    check(tsr_state_set_metric(<tsr_state *>lease.ptr, encoded, value))


def state_destroy(State state not None):
    retire(state)
