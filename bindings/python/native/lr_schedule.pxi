# lr_schedule.h: learning-rate schedules.

cdef class LRSchedule(Handle):
    cdef void free(self) noexcept nogil:
        tsr_lr_schedule_destroy(<tsr_lr_schedule *>self.ptr)


cdef object schedule_of(tsr_lr_schedule *out):
    return adopt(LRSchedule.__new__(LRSchedule), out)


cdef bytes steps_array(list steps):
    """A C array, which lives as long as the result."""
    return pack(f"{len(steps)}q", *[int64(step, "a milestone") for step in steps])


cdef bytes schedule_array(list leases):
    return pack(f"{len(leases)}P", *[<size_t>(<Lease>lease).ptr for lease in leases])


def lr_constant(object factor, object total_steps):
    cdef tsr_lr_schedule *out = NULL
    check(tsr_lr_constant(real(factor, "factor"), int64(total_steps, "total_steps"), &out))
    return schedule_of(out)


def lr_linear(object start_factor, object end_factor, object total_steps):
    cdef tsr_lr_schedule *out = NULL
    check(tsr_lr_linear(real(start_factor, "start_factor"), real(end_factor, "end_factor"),
                        int64(total_steps, "total_steps"), &out))
    return schedule_of(out)


def lr_step_decay(object step_size, object gamma):
    cdef tsr_lr_schedule *out = NULL
    check(tsr_lr_step_decay(int64(step_size, "step_size"), real(gamma, "gamma"), &out))
    return schedule_of(out)


def lr_multi_step_decay(list milestones not None, object gamma):
    cdef tsr_lr_schedule *out = NULL
    cdef bytes steps = steps_array(milestones)
    cdef double factor = real(gamma, "gamma")
    check(tsr_lr_multi_step_decay(<const int64_t *>PyBytes_AsString(steps), len(milestones), factor, &out))
    return schedule_of(out)


def lr_exponential(object gamma):
    cdef tsr_lr_schedule *out = NULL
    check(tsr_lr_exponential(real(gamma, "gamma"), &out))
    return schedule_of(out)


def lr_polynomial(object total_steps, object power):
    cdef tsr_lr_schedule *out = NULL
    check(tsr_lr_polynomial(int64(total_steps, "total_steps"), real(power, "power"), &out))
    return schedule_of(out)


def lr_cosine(object total_steps, object min_lr):
    cdef tsr_lr_schedule *out = NULL
    check(tsr_lr_cosine(int64(total_steps, "total_steps"), real(min_lr, "min_lr"), &out))
    return schedule_of(out)


def lr_cosine_restarts(object first_steps, object multiplier, object min_lr):
    cdef tsr_lr_schedule *out = NULL
    check(tsr_lr_cosine_restarts(int64(first_steps, "first_steps"), int64(multiplier, "multiplier"),
                                 real(min_lr, "min_lr"), &out))
    return schedule_of(out)


def lr_inverse_sqrt(object warmup_steps):
    cdef tsr_lr_schedule *out = NULL
    check(tsr_lr_inverse_sqrt(int64(warmup_steps, "warmup_steps"), &out))
    return schedule_of(out)


def lr_wsd(object warmup_steps, object stable_steps, object decay_steps, object decay, object min_ratio):
    cdef tsr_lr_schedule *out = NULL
    check(tsr_lr_wsd(int64(warmup_steps, "warmup_steps"), int64(stable_steps, "stable_steps"),
                     int64(decay_steps, "decay_steps"), int32(decay, "decay"), real(min_ratio, "min_ratio"), &out))
    return schedule_of(out)


def lr_warmup(**given):
    cdef tsr_lr_warmup_options o
    cdef tsr_lr_schedule *out = NULL
    cdef list keep = lr_warmup_options(&o, given)
    check(tsr_lr_warmup(&o, &out))
    return schedule_of(out)


def lr_warmup_cosine(**given):
    cdef tsr_lr_warmup_cosine_options o
    cdef tsr_lr_schedule *out = NULL
    cdef list keep = lr_warmup_cosine_options(&o, given)
    check(tsr_lr_warmup_cosine(&o, &out))
    return schedule_of(out)


def lr_one_cycle(**given):
    cdef tsr_lr_one_cycle_options o
    cdef tsr_lr_schedule *out = NULL
    cdef list keep = lr_one_cycle_options(&o, given)
    check(tsr_lr_one_cycle(&o, &out))
    return schedule_of(out)


def lr_range_test(object min_lr, object step_size, object step_rate, object staircase):
    cdef tsr_lr_schedule *out = NULL
    check(tsr_lr_range_test(real(min_lr, "min_lr"), int64(step_size, "step_size"), real(step_rate, "step_rate"),
                            flag(staircase, "staircase"), &out))
    return schedule_of(out)


def lr_sequential(list schedules not None, list milestones not None):
    cdef tsr_lr_schedule *out = NULL
    cdef list leases = [share(<LRSchedule?>each) for each in schedules]
    cdef bytes pointers = schedule_array(leases), steps = steps_array(milestones)
    check(tsr_lr_sequential(<const tsr_lr_schedule *const *>PyBytes_AsString(pointers), len(leases),
                            <const int64_t *>PyBytes_AsString(steps), len(milestones), &out))
    return schedule_of(out)


def lr_chained(list schedules not None):
    cdef tsr_lr_schedule *out = NULL
    cdef list leases = [share(<LRSchedule?>each) for each in schedules]
    cdef bytes pointers = schedule_array(leases)
    check(tsr_lr_chained(<const tsr_lr_schedule *const *>PyBytes_AsString(pointers), len(leases), &out))
    return schedule_of(out)


def lr_schedule_lr_at(LRSchedule schedule not None, object step, object base_lr):
    cdef Lease lease = share(schedule)
    cdef double lr = 0
    check(tsr_lr_schedule_lr_at(<tsr_lr_schedule *>lease.ptr, int64(step, "step"), real(base_lr, "base_lr"), &lr))
    return lr


def lr_schedule_momentum_at(LRSchedule schedule not None, object step):
    """NaN: the schedule has none."""
    cdef Lease lease = share(schedule)
    cdef double momentum = 0
    check(tsr_lr_schedule_momentum_at(<tsr_lr_schedule *>lease.ptr, int64(step, "step"), &momentum))
    return momentum


def lr_schedule_attach(LRSchedule schedule not None, Optimizer optimizer not None):
    cdef Lease lease = use(schedule)
    cdef Lease on = use(optimizer)
    check(tsr_lr_schedule_attach(<tsr_lr_schedule *>lease.ptr, <tsr_optimizer *>on.ptr))


def lr_schedule_step(LRSchedule schedule not None):
    cdef Lease lease = use(schedule)
    check(tsr_lr_schedule_step(<tsr_lr_schedule *>lease.ptr))


def lr_schedule_steps(LRSchedule schedule not None):
    cdef Lease lease = share(schedule)
    cdef int64_t steps = 0
    check(tsr_lr_schedule_steps(<tsr_lr_schedule *>lease.ptr, &steps))
    return steps


def lr_schedule_set_steps(LRSchedule schedule not None, object steps):
    cdef Lease lease = use(schedule)
    check(tsr_lr_schedule_set_steps(<tsr_lr_schedule *>lease.ptr, int64(steps, "steps")))


def lr_schedule_destroy(LRSchedule schedule not None):
    retire(schedule)
