# comm.h: communicators, collectives, and work in flight.

cdef class Comm(Handle):
    cdef void free(self) noexcept nogil:
        tsr_comm_destroy(<tsr_comm *>self.ptr)


cdef class Work(Handle):
    cdef bint watched  # a completion callback is set; it keeps alive what the operation uses

    cdef void free(self) noexcept nogil:
        tsr_work_destroy(<tsr_work *>self.ptr)

    cdef void release(self) noexcept:
        """A dropped operation continues: its completion then frees what it uses."""
        cdef int32_t done = 1
        cdef tsr_work *work = <tsr_work *>self.ptr
        cdef void *keep = <void *>self.keep
        if work != NULL and not self.watched and self.generation == current_generation():
            if tsr_work_test(work, &done) == TSR_OK and not done:
                Py_INCREF(self.keep)  # never released if the interpreter is shutting down
                if not gate_closed():
                    with nogil:
                        if tsr_work_on_done(work, on_forgotten, keep, on_drop) != TSR_OK:
                            on_drop(keep)
        Handle.release(self)


def comm_from_env(**given):
    cdef tsr_comm_options o
    cdef tsr_comm *out = NULL
    cdef list keep = comm_options(&o, given)
    arm()
    with nogil:
        check(tsr_comm_from_env(&o, &out))
    return adopt(Comm.__new__(Comm), out)


def comm_create(Store store not None, object rank, object world_size, **given):
    # Ranks that are threads may share one store: each communicator serialises its own calls.
    cdef Lease lease = share(store)
    cdef tsr_comm_options o
    cdef tsr_comm *out = NULL
    cdef list keep = comm_options(&o, given)
    cdef int32_t own = int32(rank, "rank"), ranks = int32(world_size, "world_size")
    with nogil:
        check(tsr_comm_create(<tsr_store *>lease.ptr, own, ranks, &o, &out))
    return adopt(Comm.__new__(Comm), out, None, [store])


def comm_split(Comm comm not None, object color, object key, **given):
    cdef tsr_comm_options o
    cdef tsr_comm_options *options = NULL
    cdef tsr_comm *out = NULL
    cdef list keep
    cdef int32_t group, order
    try:
        if given:
            keep = comm_options(&o, given)
            options = &o
        group = int32(color, "color")
        order = int32(key, "key")
    except Exception as error:
        refuse(comm, TSR_CREATES_COMM, error)
        raise
    cdef Lease lease = use(comm)
    with nogil:
        check(tsr_comm_split(<tsr_comm *>lease.ptr, group, order, options, &out))
    return None if out == NULL else adopt(Comm.__new__(Comm), out)


cdef object remade(Comm comm, bint grows, dict given):
    cdef Lease lease = use(comm)
    cdef tsr_comm_options o
    cdef tsr_comm_options *options = NULL
    cdef tsr_comm *out = NULL
    cdef list keep
    if given:
        keep = comm_options(&o, given)
        options = &o
    with nogil:
        if grows:
            check(tsr_comm_grow(<tsr_comm *>lease.ptr, options, &out))
        else:
            check(tsr_comm_shrink(<tsr_comm *>lease.ptr, options, &out))
    return adopt(Comm.__new__(Comm), out)


def comm_shrink(Comm comm not None, **given):
    return remade(comm, False, given)


def comm_grow(Comm comm not None, **given):
    return remade(comm, True, given)


def comm_finalize(Comm comm not None):
    cdef Lease lease = use(comm)
    with nogil:
        check(tsr_comm_finalize(<tsr_comm *>lease.ptr))


def comm_abort(Comm comm not None, object reason):
    cdef Lease lease = share(comm)
    cdef list keep = []
    cdef const char *text = text_or_null(keep, reason, "the reason")
    with nogil:
        check(tsr_comm_abort(<tsr_comm *>lease.ptr, text))


cdef int refuse(Comm comm, tsr_creation creation, object error) except -1:
    """Fails a creation on the other ranks: instead of it, on a rank whose arguments are refused before the library has
    them. Nothing of what that finds is raised: the error says more."""
    cdef Lease lease = use(comm)
    cdef tsr_status code = TSR_E_USER
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, TesseraError):
        code = error.code
        reason = str(error)
    elif isinstance(error, MemoryError):
        code = TSR_E_NO_MEMORY
    elif isinstance(error, (TypeError, ValueError)):
        code = TSR_E_INVALID_ARGUMENT
    cdef bytes encoded = reason.encode("utf-8", "replace").replace(b"\0", b" ")
    cdef const char *text = encoded
    try:
        with nogil:
            check(tsr_comm_refuse(<tsr_comm *>lease.ptr, creation, code, text))
    except TesseraError:
        pass
    return 0


def comm_refuse(Comm comm not None, int creation, object error not None):
    refuse(comm, creation, error)


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


def comm_set_timeout(Comm comm not None, object timeout_ms):
    cdef Lease lease = share(comm)
    check(tsr_comm_set_timeout(<tsr_comm *>lease.ptr, int32(timeout_ms, "the timeout in ms")))


def comm_timeout(Comm comm not None):
    cdef Lease lease = share(comm)
    cdef int32_t timeout_ms = 0
    check(tsr_comm_timeout(<tsr_comm *>lease.ptr, &timeout_ms))
    return timeout_ms


def comm_write_trace(Comm comm not None, object path):
    cdef Lease lease = share(comm)
    cdef list keep = []
    cdef const char *text = text_or_null(keep, path, "the path")
    with nogil:
        check(tsr_comm_write_trace(<tsr_comm *>lease.ptr, text))


def comm_error(Comm comm not None):
    cdef Lease lease = share(comm)
    cdef tsr_error *error = NULL
    with nogil:
        check(tsr_comm_error(<tsr_comm *>lease.ptr, &error))
    return detached(error)


def comm_all_reduce(Comm comm not None, object tensors, tsr_reduce_op op, bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef TensorArray array = tensor_array(tensors)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_all_reduce(<tsr_comm *>lease.ptr, array.tensors, array.count, op, <void *>stream,
                                  &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, array))


def comm_reduce_scatter(Comm comm not None, Tensor input not None, Tensor output not None, tsr_reduce_op op,
                        bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_reduce_scatter(<tsr_comm *>lease.ptr, &input.view, &output.view, op, <void *>stream,
                                      &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, input, output))


def comm_all_gather(Comm comm not None, Tensor input not None, Tensor output not None, bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_all_gather(<tsr_comm *>lease.ptr, &input.view, &output.view, <void *>stream,
                                  &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, input, output))


cdef same_length(TensorArray inputs, TensorArray outputs):
    if inputs.count != outputs.count:
        raise InvalidArgument(f"{inputs.count} inputs and {outputs.count} outputs; pass one output per input")


def comm_reduce_scatter_coalesced(Comm comm not None, list inputs not None, list outputs not None, tsr_reduce_op op,
                                  bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef TensorArray ins = tensor_array(inputs)
    cdef TensorArray outs = tensor_array(outputs)
    cdef tsr_work *work = NULL
    same_length(ins, outs)
    with nogil:
        check(tsr_comm_reduce_scatter_coalesced(<tsr_comm *>lease.ptr, ins.tensors, outs.tensors, ins.count, op,
                                                <void *>stream, &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, ins, outs))


def comm_all_gather_coalesced(Comm comm not None, list inputs not None, list outputs not None, bint async_op,
                              size_t stream=0):
    cdef Lease lease = use(comm)
    cdef TensorArray ins = tensor_array(inputs)
    cdef TensorArray outs = tensor_array(outputs)
    cdef tsr_work *work = NULL
    same_length(ins, outs)
    with nogil:
        check(tsr_comm_all_gather_coalesced(<tsr_comm *>lease.ptr, ins.tensors, outs.tensors, ins.count, <void *>stream,
                                            &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, ins, outs))


def comm_all_gather_v(Comm comm not None, Tensor input not None, list outputs not None, bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef TensorArray array = tensor_array(outputs)
    cdef tsr_work *work = NULL
    cdef int32_t world_size = 0
    check(tsr_comm_world_size(<tsr_comm *>lease.ptr, &world_size))
    if array.count != <size_t>world_size:
        raise InvalidArgument(f"all_gather_v needs one output per rank, {world_size} in total, got {array.count}")
    with nogil:
        check(tsr_comm_all_gather_v(<tsr_comm *>lease.ptr, &input.view, array.tensors, <void *>stream,
                                    &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, input, array))


def comm_broadcast(Comm comm not None, object tensors, object root, bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef TensorArray array = tensor_array(tensors)
    cdef tsr_work *work = NULL
    cdef int32_t root_rank = int32(root, "root")
    with nogil:
        check(tsr_comm_broadcast(<tsr_comm *>lease.ptr, array.tensors, array.count, root_rank, <void *>stream,
                                 &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, array))


def comm_reduce(Comm comm not None, Tensor input not None, Tensor output, tsr_reduce_op op, object root,
                bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef tsr_tensor *out = NULL if output is None else &output.view
    cdef tsr_work *work = NULL
    cdef int32_t root_rank = int32(root, "root")
    with nogil:
        check(tsr_comm_reduce(<tsr_comm *>lease.ptr, &input.view, out, op, root_rank, <void *>stream,
              &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, input, output))


def comm_gather(Comm comm not None, Tensor input not None, Tensor output, object root, bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef tsr_tensor *out = NULL if output is None else &output.view
    cdef tsr_work *work = NULL
    cdef int32_t root_rank = int32(root, "root")
    with nogil:
        check(tsr_comm_gather(<tsr_comm *>lease.ptr, &input.view, out, root_rank, <void *>stream,
              &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, input, output))


def comm_scatter(Comm comm not None, Tensor input, Tensor output not None, object root, bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef tsr_tensor *from_ = NULL if input is None else &input.view
    cdef tsr_work *work = NULL
    cdef int32_t root_rank = int32(root, "root")
    with nogil:
        check(tsr_comm_scatter(<tsr_comm *>lease.ptr, from_, &output.view, root_rank, <void *>stream,
              &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, input, output))


def comm_all_to_all(Comm comm not None, Tensor input not None, Tensor output not None, bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_all_to_all(<tsr_comm *>lease.ptr, &input.view, &output.view, <void *>stream,
                                  &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, input, output))


def comm_send(Comm comm not None, Tensor tensor not None, object peer, object tag, bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    cdef int32_t peer_rank = int32(peer, "peer"), tag_number = int32(tag, "tag")
    with nogil:
        check(tsr_comm_send(<tsr_comm *>lease.ptr, &tensor.view, peer_rank, tag_number, <void *>stream,
              &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, tensor))


def comm_recv(Comm comm not None, Tensor tensor not None, object peer, object tag, bint async_op, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    cdef int32_t peer_rank = int32(peer, "peer"), tag_number = int32(tag, "tag")
    with nogil:
        check(tsr_comm_recv(<tsr_comm *>lease.ptr, &tensor.view, peer_rank, tag_number, <void *>stream,
              &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm, tensor))


def comm_barrier(Comm comm not None, bint async_op):
    cdef Lease lease = use(comm)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_comm_barrier(<tsr_comm *>lease.ptr, &work if async_op else NULL))
    return None if work == NULL else adopt(Work.__new__(Work), work, (comm,))


def work_wait(Work work not None, object timeout_ms):
    cdef Lease lease = share(work)
    cdef int32_t patience = -1 if timeout_ms is None else int32(timeout_ms, "the timeout in ms")
    with nogil:
        check(tsr_work_wait(<tsr_work *>lease.ptr, patience))


def work_order(Work work not None, size_t stream, object timeout_ms):
    cdef Lease lease = share(work)
    cdef int32_t patience = -1 if timeout_ms is None else int32(timeout_ms, "the timeout in ms")
    with nogil:
        check(tsr_work_order(<tsr_work *>lease.ptr, <void *>stream, patience))


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


def work_staged(Work work not None):
    cdef Lease lease = share(work)
    cdef tsr_work *staged = NULL
    check(tsr_work_staged(<tsr_work *>lease.ptr, &staged))
    return None if staged == NULL else adopt(Work.__new__(Work), staged, None)


def work_on_done(Work work not None, object fn not None):
    """Calls `fn(status)` on completion. What the operation uses stays alive until then, even if `work` does not."""
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
