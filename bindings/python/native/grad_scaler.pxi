# grad_scaler.h: dynamic scaling of losses.

cdef class GradScaler(Handle):
    cdef void free(self) noexcept nogil:
        tsr_grad_scaler_destroy(<tsr_grad_scaler *>self.ptr)


def grad_scaler_create(**given):
    cdef tsr_grad_scaler_options o
    cdef tsr_grad_scaler *out = NULL
    cdef list keep = grad_scaler_options(&o, given)
    check(tsr_grad_scaler_create(&o, &out))
    return adopt(GradScaler.__new__(GradScaler), out)


def grad_scaler_scale(GradScaler scaler not None):
    cdef Lease lease = use(scaler)
    cdef double scale = 0
    check(tsr_grad_scaler_scale(<tsr_grad_scaler *>lease.ptr, &scale))
    return scale


def grad_scaler_unscale(GradScaler scaler not None, Optimizer optimizer not None):
    cdef Lease lease = use(scaler)
    cdef Lease on = use(optimizer)
    with nogil:
        check(tsr_grad_scaler_unscale(<tsr_grad_scaler *>lease.ptr, <tsr_optimizer *>on.ptr))


def grad_scaler_step(GradScaler scaler not None, Optimizer optimizer not None):
    """Returns whether the optimizer took the step."""
    cdef Lease lease = use(scaler)
    cdef Lease on = use(optimizer)
    cdef int32_t stepped = 0
    with nogil:
        check(tsr_grad_scaler_step(<tsr_grad_scaler *>lease.ptr, <tsr_optimizer *>on.ptr, &stepped))
    return stepped != 0


def grad_scaler_update(GradScaler scaler not None):
    cdef Lease lease = use(scaler)
    check(tsr_grad_scaler_update(<tsr_grad_scaler *>lease.ptr))


def grad_scaler_destroy(GradScaler scaler not None):
    retire(scaler)
