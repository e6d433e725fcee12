# engine.h: DeepSpeed's engine.

cdef class Engine(Handle):
    cdef list units  # their names,
    cdef list views  # and how many views of each unit's parameters or gradients are alive

    cdef void free(self) noexcept nogil:
        tsr_engine_destroy(<tsr_engine *>self.ptr)


@cython.final
@cython.no_gc_clear
cdef class EngineUnitArray:
    """A C array of units. Keeps alive what the units point to."""

    cdef tsr_engine_unit *units
    cdef size_t count
    cdef list keep

    def __dealloc__(self):
        PyMem_Free(self.units)


cdef EngineUnitArray engine_units(list units):
    """`units` are (name, names of parameters, tensors)."""
    cdef EngineUnitArray array = EngineUnitArray.__new__(EngineUnitArray)
    cdef TensorArray params
    cdef size_t i
    array.keep = []
    array.units = <tsr_engine_unit *>PyMem_Calloc(len(units) + 1, sizeof(tsr_engine_unit))
    if array.units == NULL:
        raise MemoryError
    array.count = len(units)
    for i in range(array.count):
        unit, names, tensors = units[i]
        encoded = utf8(unit, "a unit's name")
        array.units[i].name = PyBytes_AsString(encoded)
        params = tensor_array(tensors, names)
        array.keep.append((encoded, params))
        array.units[i].params = params.params
        array.units[i].n = params.count
    return array


def engine_config(object config, object ranks):
    cdef bytes text = utf8(config, "the configuration"), json = b""
    cdef int32_t count = int32(ranks, "ranks")
    cdef size_t size = 2048
    cdef size_t capacity = 0
    while size > capacity:
        capacity = size
        json = PyBytes_FromStringAndSize(NULL, capacity)
        check(tsr_engine_config(text, count, PyBytes_AsString(json), capacity, &size))
    return json[:size - 1].decode("utf-8", "surrogateescape")


def engine_config_schedule(object config):
    cdef bytes text = utf8(config, "the configuration")
    cdef tsr_lr_schedule *out = NULL
    check(tsr_engine_config_schedule(text, &out))
    return schedule_of(out)


def engine_create(Comm comm not None, object arguments):
    """`arguments()` returns the units, which are (name, names of parameters, tensors), the configuration, and the schedule
    or None. If that fails, so does the creation on all ranks."""
    cdef Lease moved = None
    cdef tsr_lr_schedule *given = NULL
    cdef EngineUnitArray array
    cdef bytes encoded
    cdef list units
    try:
        units, config, schedule = arguments()
        array = engine_units(units)
        encoded = utf8(config, "the configuration")
        if schedule is not None:
            moved = use(<LRSchedule?>schedule)
            given = <tsr_lr_schedule *>moved.ptr
    except Exception as error:
        refuse(comm, TSR_CREATES_MODEL, error)
        raise
    cdef Lease lease = use(comm)
    cdef const char *text = encoded
    cdef tsr_engine *out = NULL
    cdef Engine engine
    with nogil:
        check(tsr_engine_create(<tsr_comm *>lease.ptr, array.units, array.count, text, given, &out))
    engine = Engine.__new__(Engine)
    engine.units = [unit for unit, _, _ in units]
    engine.views = [0] * array.count
    return adopt(engine, out, (comm, array))


def engine_drop_params(Engine engine not None):
    """Lets go of the caller's parameters: the engine does not train them in place."""
    use(engine)
    engine.keep = engine.keep[0]


def engine_description(Engine engine not None):
    cdef Lease lease = use(engine)
    cdef bytes json = b""
    cdef size_t size = 2048
    cdef size_t capacity = 0
    while size > capacity:
        capacity = size
        json = PyBytes_FromStringAndSize(NULL, capacity)
        check(tsr_engine_description(<tsr_engine *>lease.ptr, PyBytes_AsString(json), capacity, &size))
    return json[:size - 1].decode("utf-8", "surrogateescape")


def engine_unit_count(Engine engine not None):
    cdef Lease lease = share(engine)
    cdef size_t count = 0
    check(tsr_engine_unit_count(<tsr_engine *>lease.ptr, &count))
    return count


def engine_param_count(Engine engine not None):
    cdef Lease lease = share(engine)
    cdef size_t count = 0
    check(tsr_engine_param_count(<tsr_engine *>lease.ptr, &count))
    return count


def engine_param_name(Engine engine not None, size_t place):
    """(name, unit)"""
    cdef Lease lease = share(engine)
    cdef const char *name = NULL
    cdef size_t unit = 0
    check(tsr_engine_param_name(<tsr_engine *>lease.ptr, place, &name, &unit))
    return name.decode("utf-8", "surrogateescape"), unit


def engine_find(Engine engine not None, object name):
    cdef Lease lease = share(engine)
    cdef bytes encoded = utf8(name, "the name")
    cdef size_t place = 0
    check(tsr_engine_find(<tsr_engine *>lease.ptr, encoded, &place))
    return place


cdef tuple view_in_engine(Engine engine, size_t place, const tsr_tensor *tensor, bint read_only):
    """A view that its unit counts while it is alive."""
    cdef tuple view = tensor_view(engine, tensor)
    cdef Lent memory = view[0]
    cdef size_t unit = 0
    check(tsr_engine_param_name(<tsr_engine *>engine.ptr, place, NULL, &unit))
    memory.count_in(engine.views, unit)
    memory.read_only = read_only
    return view


def engine_param(Engine engine not None, size_t place):
    """(memory, dtype, shape)"""
    cdef Lease lease = use(engine)
    cdef tsr_tensor param
    check(tsr_engine_param(<tsr_engine *>lease.ptr, place, &param))
    return view_in_engine(engine, place, &param, True)


def engine_grad(Engine engine not None, size_t place):
    """(memory, dtype, shape)"""
    cdef Lease lease = use(engine)
    cdef tsr_tensor grad
    check(tsr_engine_grad(<tsr_engine *>lease.ptr, place, &grad))
    return view_in_engine(engine, place, &grad, False)


cdef int refuse_if_engine_viewed(Engine engine, size_t unit) except -1:
    if unit < <size_t>len(engine.views) and engine.views[unit] > 0:
        refuse_views(engine.units[unit], engine.views[unit])
    return 0


def engine_forward(Engine engine not None, size_t unit):
    cdef Lease lease = use(engine)
    with nogil:
        check(tsr_engine_forward(<tsr_engine *>lease.ptr, unit))


def engine_forward_done(Engine engine not None, size_t unit):
    cdef Lease lease = use(engine)
    refuse_if_engine_viewed(engine, unit)
    with nogil:
        check(tsr_engine_forward_done(<tsr_engine *>lease.ptr, unit))


def engine_backward(Engine engine not None, size_t unit):
    cdef Lease lease = use(engine)
    with nogil:
        check(tsr_engine_backward(<tsr_engine *>lease.ptr, unit))


def engine_ready(Engine engine not None, size_t place, bint last):
    """`last`: no other gradient of its unit is missing, so that the unit's memory is used for others from now on."""
    cdef Lease lease = use(engine)
    cdef size_t unit = 0
    check(tsr_engine_param_name(<tsr_engine *>lease.ptr, place, NULL, &unit))
    if last:
        refuse_if_engine_viewed(engine, unit)
    with nogil:
        check(tsr_engine_ready(<tsr_engine *>lease.ptr, place))


def engine_unit_ready(Engine engine not None, size_t unit):
    cdef Lease lease = use(engine)
    refuse_if_engine_viewed(engine, unit)
    with nogil:
        check(tsr_engine_unit_ready(<tsr_engine *>lease.ptr, unit))


def engine_backward_done(Engine engine not None):
    cdef Lease lease = use(engine)
    cdef size_t unit
    for unit in range(len(engine.views)):
        refuse_if_engine_viewed(engine, unit)
    with nogil:
        check(tsr_engine_backward_done(<tsr_engine *>lease.ptr))


def engine_loss_factor(Engine engine not None):
    cdef Lease lease = use(engine)
    cdef double factor = 0
    check(tsr_engine_loss_factor(<tsr_engine *>lease.ptr, &factor))
    return factor


def engine_adds_gradients(Engine engine not None):
    cdef Lease lease = use(engine)
    cdef tsr_flag adds = 0
    check(tsr_engine_adds_gradients(<tsr_engine *>lease.ptr, &adds))
    return adds != 0


def engine_is_boundary(Engine engine not None):
    cdef Lease lease = use(engine)
    cdef tsr_flag boundary = 0
    check(tsr_engine_is_boundary(<tsr_engine *>lease.ptr, &boundary))
    return boundary != 0


def engine_set_boundary(Engine engine not None, object boundary):
    """None: as the accumulation says."""
    cdef Lease lease = use(engine)
    cdef int32_t which = -1 if boundary is None else flag(boundary, "boundary")
    check(tsr_engine_set_boundary(<tsr_engine *>lease.ptr, which))


def engine_begin_no_sync(Engine engine not None):
    cdef Lease lease = use(engine)
    check(tsr_engine_begin_no_sync(<tsr_engine *>lease.ptr))


def engine_end_no_sync(Engine engine not None):
    cdef Lease lease = use(engine)
    check(tsr_engine_end_no_sync(<tsr_engine *>lease.ptr))


def engine_step(Engine engine not None):
    """Returns whether the optimizer made a step."""
    cdef Lease lease = use(engine)
    cdef tsr_flag stepped = 0
    with nogil:
        check(tsr_engine_step(<tsr_engine *>lease.ptr, &stepped))
    return stepped != 0


def engine_set_training(Engine engine not None, object training):
    cdef Lease lease = use(engine)
    check(tsr_engine_set_training(<tsr_engine *>lease.ptr, flag(training, "mode")))


def engine_is_training(Engine engine not None):
    cdef Lease lease = use(engine)
    cdef tsr_flag training = 0
    check(tsr_engine_is_training(<tsr_engine *>lease.ptr, &training))
    return training != 0


def engine_counters(Engine engine not None):
    """(global_steps, global_samples, skipped_steps, micro_steps)"""
    cdef Lease lease = use(engine)
    cdef tsr_engine_counts counts
    counts.struct_size = sizeof(tsr_engine_counts)
    check(tsr_engine_counters(<tsr_engine *>lease.ptr, &counts))
    return counts.global_steps, counts.global_samples, counts.skipped_steps, counts.micro_steps


def engine_grad_norm(Engine engine not None):
    """NaN: there is none."""
    cdef Lease lease = use(engine)
    cdef double norm = 0
    check(tsr_engine_grad_norm(<tsr_engine *>lease.ptr, &norm))
    return norm


def engine_lr(Engine engine not None):
    cdef Lease lease = use(engine)
    cdef double lr = 0
    check(tsr_engine_lr(<tsr_engine *>lease.ptr, &lr))
    return lr


def engine_set_lr(Engine engine not None, object lr):
    cdef Lease lease = use(engine)
    check(tsr_engine_set_lr(<tsr_engine *>lease.ptr, real(lr, "lr")))


def engine_loss_scale(Engine engine not None):
    cdef Lease lease = use(engine)
    cdef double scale = 0
    check(tsr_engine_loss_scale(<tsr_engine *>lease.ptr, &scale))
    return scale


def engine_batch(Engine engine not None):
    """(train, micro, accumulation)"""
    cdef Lease lease = use(engine)
    cdef int64_t train = 0, micro = 0, accumulation = 0
    check(tsr_engine_batch(<tsr_engine *>lease.ptr, &train, &micro, &accumulation))
    return train, micro, accumulation


def engine_set_train_batch_size(Engine engine not None, object train):
    cdef Lease lease = use(engine)
    check(tsr_engine_set_train_batch_size(<tsr_engine *>lease.ptr, int64(train, "train_batch_size")))


def engine_set_train_micro_batch_size(Engine engine not None, object micro):
    cdef Lease lease = use(engine)
    check(tsr_engine_set_train_micro_batch_size(<tsr_engine *>lease.ptr, int64(micro, "train_micro_batch_size")))


def engine_optimizer(Engine engine not None):
    cdef Lease lease = use(engine)
    cdef tsr_optimizer *out = NULL
    check(tsr_engine_optimizer(<tsr_engine *>lease.ptr, &out))
    return adopt(Optimizer.__new__(Optimizer), out, None, [engine])


def engine_lr_schedule(Engine engine not None):
    cdef Lease lease = use(engine)
    cdef tsr_lr_schedule *out = NULL
    check(tsr_engine_lr_schedule(<tsr_engine *>lease.ptr, &out))
    return schedule_of(out)


def engine_destroy(Engine engine not None):
    retire(engine)
