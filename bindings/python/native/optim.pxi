# optim.h: optimizers, each over a DDP, an FSDP, a TensorParallel, or the caller's parameters and gradients.

cdef class Optimizer(Handle):
    cdef void free(self) noexcept nogil:
        tsr_optimizer_destroy(<tsr_optimizer *>self.ptr)


@cython.final
@cython.no_gc_clear
cdef class Trained:
    """What an optimizer updates: a model, borrowed for one call, or arrays of parameters and gradients."""

    cdef Lease lease
    cdef TensorArray params
    cdef TensorArray grads
    cdef tsr_ddp *ddp
    cdef tsr_fsdp *fsdp
    cdef tsr_tp *tp

    def __cinit__(self, *over):
        if len(over) == 1 and isinstance(over[0], FSDP):
            self.lease = use(<FSDP>over[0])
            self.fsdp = <tsr_fsdp *>self.lease.ptr
            return
        if len(over) == 1 and isinstance(over[0], TensorParallel):
            self.lease = use(<TensorParallel>over[0])
            self.tp = <tsr_tp *>self.lease.ptr
            return
        if len(over) == 1:
            self.lease = use(<DDP?>over[0])
            self.ddp = <tsr_ddp *>self.lease.ptr
            return
        names, params, grads = over
        self.params = tensor_array(params, names)
        self.grads = tensor_array(grads)
        if self.params.count != self.grads.count:
            raise InvalidArgument(f"{self.params.count} parameters and {self.grads.count} gradients; pass one "
                                  "gradient per parameter")

    cdef object optimizer(self, tsr_optimizer *out):
        optimizer = Optimizer.__new__(Optimizer)
        if self.lease is not None:
            return adopt(optimizer, out, None, [self.lease.handle])
        return adopt(optimizer, out, (self.params, self.grads))


def sgd(*over, **given):
    """Takes a DDP, an FSDP, a TensorParallel, or `names, params, grads`, like `adam` and `adamw`."""
    cdef Trained on = Trained(*over)
    cdef tsr_sgd_options o
    cdef tsr_optimizer *out = NULL
    cdef list keep = sgd_options(&o, given)
    with nogil:
        if on.ddp != NULL:
            check(tsr_ddp_sgd(on.ddp, &o, &out))
        elif on.fsdp != NULL:
            check(tsr_fsdp_sgd(on.fsdp, &o, &out))
        elif on.tp != NULL:
            check(tsr_tp_sgd(on.tp, &o, &out))
        else:
            check(tsr_sgd_create(on.params.params, on.grads.tensors, on.params.count, &o, &out))
    return on.optimizer(out)


def adam(*over, **given):
    cdef Trained on = Trained(*over)
    cdef tsr_adam_options o
    cdef tsr_optimizer *out = NULL
    cdef list keep = adam_options(&o, given)
    with nogil:
        if on.ddp != NULL:
            check(tsr_ddp_adam(on.ddp, &o, &out))
        elif on.fsdp != NULL:
            check(tsr_fsdp_adam(on.fsdp, &o, &out))
        elif on.tp != NULL:
            check(tsr_tp_adam(on.tp, &o, &out))
        else:
            check(tsr_adam_create(on.params.params, on.grads.tensors, on.params.count, &o, &out))
    return on.optimizer(out)


def adamw(*over, **given):
    cdef Trained on = Trained(*over)
    cdef tsr_adamw_options o
    cdef tsr_optimizer *out = NULL
    cdef list keep = adamw_options(&o, given)
    with nogil:
        if on.ddp != NULL:
            check(tsr_ddp_adamw(on.ddp, &o, &out))
        elif on.fsdp != NULL:
            check(tsr_fsdp_adamw(on.fsdp, &o, &out))
        elif on.tp != NULL:
            check(tsr_tp_adamw(on.tp, &o, &out))
        else:
            check(tsr_adamw_create(on.params.params, on.grads.tensors, on.params.count, &o, &out))
    return on.optimizer(out)


def adagrad(*over, **given):
    cdef Trained on = Trained(*over)
    cdef tsr_adagrad_options o
    cdef tsr_optimizer *out = NULL
    cdef list keep = adagrad_options(&o, given)
    with nogil:
        if on.ddp != NULL:
            check(tsr_ddp_adagrad(on.ddp, &o, &out))
        elif on.fsdp != NULL:
            check(tsr_fsdp_adagrad(on.fsdp, &o, &out))
        elif on.tp != NULL:
            check(tsr_tp_adagrad(on.tp, &o, &out))
        else:
            check(tsr_adagrad_create(on.params.params, on.grads.tensors, on.params.count, &o, &out))
    return on.optimizer(out)


def lion(*over, **given):
    cdef Trained on = Trained(*over)
    cdef tsr_lion_options o
    cdef tsr_optimizer *out = NULL
    cdef list keep = lion_options(&o, given)
    with nogil:
        if on.ddp != NULL:
            check(tsr_ddp_lion(on.ddp, &o, &out))
        elif on.fsdp != NULL:
            check(tsr_fsdp_lion(on.fsdp, &o, &out))
        elif on.tp != NULL:
            check(tsr_tp_lion(on.tp, &o, &out))
        else:
            check(tsr_lion_create(on.params.params, on.grads.tensors, on.params.count, &o, &out))
    return on.optimizer(out)


def lamb(*over, **given):
    cdef Trained on = Trained(*over)
    cdef tsr_lamb_options o
    cdef tsr_optimizer *out = NULL
    cdef list keep = lamb_options(&o, given)
    with nogil:
        if on.ddp != NULL:
            check(tsr_ddp_lamb(on.ddp, &o, &out))
        elif on.fsdp != NULL:
            check(tsr_fsdp_lamb(on.fsdp, &o, &out))
        elif on.tp != NULL:
            check(tsr_tp_lamb(on.tp, &o, &out))
        else:
            check(tsr_lamb_create(on.params.params, on.grads.tensors, on.params.count, &o, &out))
    return on.optimizer(out)


def optimizer_step(Optimizer optimizer not None):
    cdef Lease lease = use(optimizer)
    with nogil:
        check(tsr_optimizer_step(<tsr_optimizer *>lease.ptr))


def optimizer_zero_grad(Optimizer optimizer not None):
    cdef Lease lease = use(optimizer)
    with nogil:
        check(tsr_optimizer_zero_grad(<tsr_optimizer *>lease.ptr))


def optimizer_join(Optimizer optimizer not None, Comm comm not None):
    cdef Lease lease = use(optimizer)
    cdef Lease comm_lease = use(comm)
    with nogil:
        check(tsr_optimizer_join(<tsr_optimizer *>lease.ptr, <tsr_comm *>comm_lease.ptr))


def optimizer_clip_grad_norm(Optimizer optimizer not None, object max_norm, object p):
    cdef Lease lease = use(optimizer)
    cdef double most = real(max_norm, "max_norm"), which = real(p, "p"), norm = 0
    with nogil:
        check(tsr_optimizer_clip_grad_norm(<tsr_optimizer *>lease.ptr, most, which, &norm))
    return norm


def optimizer_clip_grad_value(Optimizer optimizer not None, object most):
    cdef Lease lease = use(optimizer)
    cdef double bound = real(most, "most")
    with nogil:
        check(tsr_optimizer_clip_grad_value(<tsr_optimizer *>lease.ptr, bound))


def optimizer_set_stream(Optimizer optimizer not None, size_t stream):
    cdef Lease lease = use(optimizer)
    with nogil:
        check(tsr_optimizer_set_stream(<tsr_optimizer *>lease.ptr, <void *>stream))


def optimizer_lr(Optimizer optimizer not None):
    cdef Lease lease = share(optimizer)
    cdef double lr = 0
    check(tsr_optimizer_lr(<tsr_optimizer *>lease.ptr, &lr))
    return lr


def optimizer_set_lr(Optimizer optimizer not None, object lr):
    cdef Lease lease = use(optimizer)
    check(tsr_optimizer_set_lr(<tsr_optimizer *>lease.ptr, real(lr, "lr")))


def optimizer_steps(Optimizer optimizer not None):
    cdef Lease lease = share(optimizer)
    cdef int64_t steps = 0
    check(tsr_optimizer_steps(<tsr_optimizer *>lease.ptr, &steps))
    return steps


def optimizer_destroy(Optimizer optimizer not None):
    retire(optimizer)
    if optimizer.ptr == NULL or optimizer.borrowed or optimizer.generation != current_generation():
        return
    # A state pins the optimizer, but has everything that it needs. Destroy the optimizer now, not with the state: this
    # copies what a save still needs, before the caller can change it.
    optimizer.borrowed = True
    with nogil:
        tsr_optimizer_destroy(<tsr_optimizer *>optimizer.ptr)
