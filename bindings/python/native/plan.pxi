# plan.h: collectives that are prepared once and run many times.

cdef class Plan(Handle):
    cdef Comm comm
    cdef bint in_flight  # started, and not known to have ended

    cdef void free(self) noexcept nogil:
        if self.in_flight and tsr_plan_wait(<tsr_plan *>self.ptr, 0) == TSR_E_NOT_READY:
            # The library still uses the arrays, so they are never freed.
            with gil:
                Py_INCREF(self.keep)
        tsr_plan_destroy(<tsr_plan *>self.ptr)


def plan_create(Comm comm not None, object collective, list inputs not None, list outputs not None, tsr_reduce_op op,
                object root, size_t stream=0):
    cdef Lease lease = use(comm)
    cdef TensorArray ins = tensor_array(inputs)
    cdef TensorArray outs = tensor_array(outputs)
    cdef tsr_plan *out = NULL
    cdef int32_t what = int32(collective, "the collective"), root_rank = int32(root, "root")
    check(tsr_plan_create(<tsr_comm *>lease.ptr, what, ins.tensors, ins.count, outs.tensors, outs.count, op, root_rank,
                          <void *>stream, &out))
    cdef Plan plan = adopt(Plan.__new__(Plan), out, (comm, ins, outs))
    plan.comm = comm
    return plan


def plan_run(Plan plan not None):
    cdef Lease comm = use(plan.comm)
    cdef Lease lease = use(plan)
    with nogil:
        check(tsr_plan_run(<tsr_plan *>lease.ptr))


def plan_start(Plan plan not None):
    cdef Lease comm = use(plan.comm)
    cdef Lease lease = use(plan)
    with nogil:
        check(tsr_plan_start(<tsr_plan *>lease.ptr))
    plan.in_flight = True


def plan_wait(Plan plan not None, object timeout_ms):
    cdef Lease lease = share(plan)
    cdef int32_t patience = -1 if timeout_ms is None else int32(timeout_ms, "the timeout in ms")
    with nogil:
        check(tsr_plan_wait(<tsr_plan *>lease.ptr, patience))


def plan_destroy(Plan plan not None):
    retire(plan)
