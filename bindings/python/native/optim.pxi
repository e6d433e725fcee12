# optim.h: optimizers. Each is made over a DDP, an FSDP, or over parameters and gradients of the caller's.

cdef class Optimizer(Handle):
    cdef void free(self) noexcept nogil:
        tsr_optimizer_destroy(<tsr_optimizer *>self.ptr)


@cython.final
@cython.no_gc_clear
cdef class Trained:
    """What an optimizer works on: a DDP or an FSDP for the length of a call, or arrays of parameters and their gradients."""

    cdef Lease lease
    cdef TensorArray params
    cdef TensorArray grads
    cdef tsr_ddp *ddp
    cdef tsr_fsdp *fsdp

    def __cinit__(self, *over):
        if len(over) == 1 and isinstance(over[0], FSDP):
            self.lease = use(<FSDP>over[0])
            self.fsdp = <tsr_fsdp *>self.lease.ptr
            return
        if len(over) == 1:
            self.lease = use(<DDP?>over[0])
            self.ddp = <tsr_ddp *>self.lease.ptr
            return
        names, params, grads = over
        self.params = tensor_array(params, names)
        self.grads = tensor_array(grads)
        if self.params.count != self.grads.count:
            raise InvalidArgument(f"{self.params.count} parameters and {self.grads.count} gradients; each parameter "
                                  "needs its own")

    cdef object optimizer(self, tsr_optimizer *out):
        optimizer = Optimizer.__new__(Optimizer)
        if self.lease is not None:
            return adopt(optimizer, out, None, [self.lease.handle])
        return adopt(optimizer, out, (self.params, self.grads))


def sgd(*over, lr=None, momentum=None, dampening=None, weight_decay=None, nesterov=None):
    """Over a DDP or an FSDP, or over `names, params, grads`; as the others."""
    cdef Trained on = Trained(*over)
    cdef tsr_sgd_options o
    cdef tsr_optimizer *out = NULL
    check(tsr_sgd_options_init(&o, sizeof(tsr_sgd_options)))
    if lr is not None:
        o.lr = real(lr, "lr")
    if momentum is not None:
        o.momentum = real(momentum, "momentum")
    if dampening is not None:
        o.dampening = real(dampening, "dampening")
    if weight_decay is not None:
        o.weight_decay = real(weight_decay, "weight_decay")
    if nesterov is not None:
        o.nesterov = bool(nesterov)
    with nogil:
        if on.ddp != NULL:
            check(tsr_ddp_sgd(on.ddp, &o, &out))
        elif on.fsdp != NULL:
            check(tsr_fsdp_sgd(on.fsdp, &o, &out))
        else:
            check(tsr_sgd_create(on.params.params, on.grads.tensors, on.params.count, &o, &out))
    return on.optimizer(out)


ctypedef fused adam_family:
    tsr_adam_options
    tsr_adamw_options


cdef int adam_settings(adam_family *o, lr, betas, eps, weight_decay) except -1:
    if lr is not None:
        o.lr = real(lr, "lr")
    if betas is not None:
        try:
            first, second = betas
        except (TypeError, ValueError):
            raise TypeError(f"betas is {betas!r}; a pair of numbers is wanted") from None
        o.beta1 = real(first, "betas[0]")
        o.beta2 = real(second, "betas[1]")
    if eps is not None:
        o.eps = real(eps, "eps")
    if weight_decay is not None:
        o.weight_decay = real(weight_decay, "weight_decay")
    return 0


def adam(*over, lr=None, betas=None, eps=None, weight_decay=None):
    cdef Trained on = Trained(*over)
    cdef tsr_adam_options o
    cdef tsr_optimizer *out = NULL
    check(tsr_adam_options_init(&o, sizeof(tsr_adam_options)))
    adam_settings(&o, lr, betas, eps, weight_decay)
    with nogil:
        if on.ddp != NULL:
            check(tsr_ddp_adam(on.ddp, &o, &out))
        elif on.fsdp != NULL:
            check(tsr_fsdp_adam(on.fsdp, &o, &out))
        else:
            check(tsr_adam_create(on.params.params, on.grads.tensors, on.params.count, &o, &out))
    return on.optimizer(out)


def adamw(*over, lr=None, betas=None, eps=None, weight_decay=None):
    cdef Trained on = Trained(*over)
    cdef tsr_adamw_options o
    cdef tsr_optimizer *out = NULL
    check(tsr_adamw_options_init(&o, sizeof(tsr_adamw_options)))
    adam_settings(&o, lr, betas, eps, weight_decay)
    with nogil:
        if on.ddp != NULL:
            check(tsr_ddp_adamw(on.ddp, &o, &out))
        elif on.fsdp != NULL:
            check(tsr_fsdp_adamw(on.fsdp, &o, &out))
        else:
            check(tsr_adamw_create(on.params.params, on.grads.tensors, on.params.count, &o, &out))
    return on.optimizer(out)


def optimizer_step(Optimizer optimizer not None):
    cdef Lease lease = use(optimizer)
    with nogil:
        check(tsr_optimizer_step(<tsr_optimizer *>lease.ptr))


def optimizer_zero_grad(Optimizer optimizer not None):
    cdef Lease lease = use(optimizer)
    with nogil:
        check(tsr_optimizer_zero_grad(<tsr_optimizer *>lease.ptr))


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
    # A state pins it, and has all that it needs itself. What a save has yet to copy is copied now, before the caller
    # changes it, not when the state goes.
    optimizer.borrowed = True
    with nogil:
        tsr_optimizer_destroy(<tsr_optimizer *>optimizer.ptr)
