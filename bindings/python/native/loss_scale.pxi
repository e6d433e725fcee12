# loss_scale.h: DeepSpeed's loss scale, for trainers without an engine.

cdef class LossScale(Handle):
    cdef void free(self) noexcept nogil:
        tsr_loss_scale_destroy(<tsr_loss_scale *>self.ptr)


def loss_scale_create(**given):
    cdef tsr_loss_scale_options o
    cdef tsr_loss_scale *out = NULL
    cdef list keep = loss_scale_options(&o, given)
    check(tsr_loss_scale_create(&o, &out))
    return adopt(LossScale.__new__(LossScale), out)


def loss_scale_value(LossScale scale not None):
    cdef Lease lease = use(scale)
    cdef double value = 0
    check(tsr_loss_scale_value(<tsr_loss_scale *>lease.ptr, &value))
    return value


def loss_scale_update(LossScale scale not None, object overflow):
    """Returns the next scale."""
    cdef Lease lease = use(scale)
    cdef double value = 0
    check(tsr_loss_scale_update(<tsr_loss_scale *>lease.ptr, flag(overflow, "overflow"), &value))
    return value


def loss_scale_get_state(LossScale scale not None):
    """(scale, iteration, last_overflow, hysteresis)"""
    cdef Lease lease = use(scale)
    cdef tsr_loss_scale_state state
    state.struct_size = sizeof(tsr_loss_scale_state)
    check(tsr_loss_scale_get_state(<tsr_loss_scale *>lease.ptr, &state))
    return state.scale, state.iteration, state.last_overflow, state.hysteresis


def loss_scale_set_state(LossScale scale not None, object value, object iteration, object last_overflow,
                         object hysteresis):
    cdef Lease lease = use(scale)
    cdef tsr_loss_scale_state state
    state.struct_size = sizeof(tsr_loss_scale_state)
    state.scale = real(value, "scale")
    state.iteration = int64(iteration, "iteration")
    state.last_overflow = int64(last_overflow, "last_overflow")
    state.hysteresis = int64(hysteresis, "hysteresis")
    check(tsr_loss_scale_set_state(<tsr_loss_scale *>lease.ptr, &state))


def loss_scale_destroy(LossScale scale not None):
    retire(scale)
