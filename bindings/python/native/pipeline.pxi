# pipeline.h: pipeline-parallel training. The callbacks run on the thread that made the call, with the GIL. What one
# raises ends the call, which raises it again.
#
# A view of a micro-batch's tensor is counted while it is alive, because the library uses the memory again once the
# micro-batch is done. Views of the batch and the targets, which are the caller's memory, keep these alive instead.

cdef class Pipeline(Handle):
    cdef object compute  # see pipeline_create
    cdef object lent     # the batch and targets of the call in progress
    cdef object refusal  # an exception with which its first callback fails
    cdef object raised   # what a callback raised
    cdef dict held       # by stage and micro-batch: how many views are alive, and how many of them for one call
    cdef list running    # the entry of `held` for the callback that runs; None if none does

    cdef void free(self) noexcept nogil:
        tsr_pipeline_destroy(<tsr_pipeline *>self.ptr)


cdef Lease outside_of_callbacks(Pipeline pipeline):
    if pipeline.running is not None:
        raise InvalidState("the pipeline runs a callback, which may only make outputs and report its loss")
    return use(pipeline)


cdef list stage_views(Pipeline pipeline, const tsr_tensor *tensors, size_t n, size_t place, object lent=None):
    """(memory, dtype, shape) of each tensor; None for gradients that do not exist. Place 0 counts views that are valid
    until the micro-batch is done, place 1 those of one call."""
    cdef Lent memory
    cdef list views = []
    cdef size_t i
    for i in range(n):
        if tensors[i].data == NULL and tensors[i].dtype not in (TSR_DTYPE_F16, TSR_DTYPE_BF16, TSR_DTYPE_F32,
                                                                TSR_DTYPE_F64):
            views.append(None)
            continue
        view = tensor_view(pipeline, &tensors[i])
        memory = view[0]
        memory.read_only = place == 0
        memory.keep = lent
        if lent is None:
            memory.count_in(pipeline.running, place)
        views.append(view)
    return views


cdef int no_views(Pipeline pipeline, size_t place, tuple cell, str what, str when) except -1:
    if pipeline.held[cell][place] > 0:
        gc.collect()  # of what only garbage refers to
    count = pipeline.held[cell][place]
    if count > 0:
        raise InvalidState(f"stage {cell[0]}, micro-batch {cell[1]}: {count} of its {what} are still held after {when} "
                           "(by a variable, a view, or a container such as a dict of saved inputs), and the library "
                           "uses their memory again; delete them in the callback, or keep copies")
    return 0


cdef int compute_stage(const tsr_stage_call *call, Pipeline pipeline) except -1:
    cdef tuple cell = (call.stage, call.microbatch)
    if pipeline.refusal is not None:
        raise pipeline.refusal
    pipeline.running = pipeline.held.setdefault(cell, [0, 0])
    try:
        pipeline.compute(
            pipeline,
            (call.work, call.stage, call.microbatch, call.microbatches, call.training != 0, call.is_last_backward != 0,
             call.weight),
            (stage_views(pipeline, call.inputs, call.n_inputs, 0, pipeline.lent if call.stage == 0 else None),
             stage_views(pipeline, call.targets, call.n_targets, 0, pipeline.lent),
             stage_views(pipeline, call.outputs, call.n_outputs, 0),
             stage_views(pipeline, call.output_grads, call.n_output_grads, 0),
             stage_views(pipeline, call.input_grads, call.n_input_grads, 1)))
    finally:
        pipeline.running = None
    no_views(pipeline, 1, cell, "input gradients", "the call that had them")
    if call.work in (TSR_STAGE_BACKWARD, TSR_STAGE_BACKWARD_WEIGHT) or not call.training:
        no_views(pipeline, 0, cell, "arrays", "its backward" if call.training else "its forward in an evaluation")
        del pipeline.held[cell]
    return 0


cdef int32_t run_stage(const tsr_stage_call *call, char *message, Pipeline pipeline) noexcept:
    try:
        compute_stage(call, pipeline)
        return TSR_OK
    except BaseException as error:
        pipeline.raised = error
        try:
            explain(error, message)
            return _status_of(error) if isinstance(error, Exception) else TSR_E_INTERRUPTED
        except BaseException:
            return -1


cdef int32_t on_stage(const tsr_stage_call *call, char *message, void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = run_stage(call, message, <Pipeline>user_data)
    gate_leave()
    return status


@cython.final
@cython.no_gc
cdef class Int32s:
    """A C array of numbers."""

    cdef int32_t *numbers
    cdef size_t count

    def __cinit__(self, list given not None, str what):
        cdef size_t i
        self.count = len(given)
        self.numbers = <int32_t *>PyMem_Calloc(self.count + 1, sizeof(int32_t))
        if self.numbers == NULL:
            raise MemoryError
        for i in range(self.count):
            self.numbers[i] = int32(given[i], what)

    def __dealloc__(self):
        PyMem_Free(self.numbers)


def pipeline_create(Comm comm not None, object arguments):
    """`arguments()` returns the stages, `compute`, which of the four callbacks there are, the edges, which are (from_stage,
    output, to_stage), and the options. If that fails, so does the creation on all ranks. The pipeline calls
    `compute(pipeline, facts, views)` for each action."""
    cdef Int32s own, ends
    cdef tsr_pipeline_callbacks callbacks
    cdef tsr_pipeline_options o
    cdef tsr_pipeline *out = NULL
    cdef tsr_pipeline_edge *lines
    cdef list keep
    cdef Pipeline pipeline = Pipeline.__new__(Pipeline)
    cdef size_t i
    try:
        stages, compute, has, edges, given = arguments()
        own = Int32s.__new__(Int32s, stages, "a stage")
        ends = Int32s.__new__(Int32s, [number for edge in edges for number in edge], "a number of an edge")
        keep = pipeline_options(&o, given)
    except Exception as error:
        refuse(comm, TSR_CREATES_PIPELINE, error)
        raise
    cdef Lease lease = use(comm)
    memset(&callbacks, 0, sizeof(tsr_pipeline_callbacks))
    callbacks.struct_size = sizeof(tsr_pipeline_callbacks)
    # The callbacks belong to this object, not to the library, so that the collector sees cycles through them.
    callbacks.user_data = <void *>pipeline
    if has[0]:
        callbacks.forward = on_stage
    if has[1]:
        callbacks.backward = on_stage
    if has[2]:
        callbacks.backward_input = on_stage
    if has[3]:
        callbacks.backward_weight = on_stage
    lines = <tsr_pipeline_edge *>PyMem_Calloc(len(edges) + 1, sizeof(tsr_pipeline_edge))
    if lines == NULL:
        raise MemoryError
    try:
        for i in range(len(edges)):
            lines[i].from_stage = ends.numbers[3 * i]
            lines[i].output = ends.numbers[3 * i + 1]
            lines[i].to_stage = ends.numbers[3 * i + 2]
        o.edges = lines
        o.edge_count = len(edges)
        with nogil:
            check(tsr_pipeline_create(<tsr_comm *>lease.ptr, own.numbers, own.count, &callbacks, &o, &out))
    finally:
        PyMem_Free(lines)
    pipeline.compute = compute
    return adopt(pipeline, out, comm)


cdef int begin_pass(Pipeline pipeline, object lent, object refusal) except -1:
    pipeline.held = {}
    pipeline.lent = lent
    pipeline.refusal = refusal
    pipeline.raised = None
    return 0


cdef int end_pass(Pipeline pipeline, object failure) except -1:
    """Raises what a callback raised, with the library's error at the end of its chain, or else this error."""
    raised, pipeline.raised = pipeline.raised, None
    pipeline.lent = None
    pipeline.refusal = None
    if failure is None:
        return 0
    if raised is None or not isinstance(failure, TesseraError):  # Ctrl-C comes first
        raise failure
    last, seen = raised, set()
    while last is not None and id(last) not in seen:
        seen.add(id(last))
        before = last.__cause__ or last.__context__
        if before is None:
            last.__cause__ = failure
        last = before
    raise raised


cdef double *doubles(Tensor tensor) except? NULL:
    if tensor is None:
        return NULL
    if tensor.view.ndim != 1 or tensor.view.dtype != TSR_DTYPE_F64:
        raise InvalidArgument("losses and weights must be one-dimensional float64 arrays")
    return <double *>tensor.view.data


cdef size_t count_of(Tensor tensor):
    return 0 if tensor is None else <size_t>tensor.shape_words[0]


def pipeline_stages(Pipeline pipeline not None):
    cdef Lease lease = share(pipeline)
    cdef int32_t stages
    check(tsr_pipeline_stages(<tsr_pipeline *>lease.ptr, &stages))
    return stages


def pipeline_microbatches(Pipeline pipeline not None):
    cdef Lease lease = share(pipeline)
    cdef int32_t microbatches
    check(tsr_pipeline_microbatches(<tsr_pipeline *>lease.ptr, &microbatches))
    return microbatches


def pipeline_step(Pipeline pipeline not None, list batch not None, list targets not None, Tensor weights,
                  Tensor losses not None, object refusal):
    """Fails in the first callback if there is a refusal."""
    cdef Lease lease = outside_of_callbacks(pipeline)
    cdef TensorArray x = tensor_array(batch)
    cdef TensorArray y = tensor_array(targets)
    cdef double *factors = doubles(weights)
    cdef double *found = doubles(losses)
    cdef size_t n_factors = count_of(weights)
    cdef size_t n_found = count_of(losses)
    failure = None
    begin_pass(pipeline, (x, y), refusal)
    try:
        with nogil:
            check(tsr_pipeline_step(<tsr_pipeline *>lease.ptr, x.tensors, x.count, y.tensors, y.count, factors,
                                    n_factors, found, n_found))
    except BaseException as error:
        failure = error
    end_pass(pipeline, failure)


def pipeline_eval(Pipeline pipeline not None, list batch not None, list targets not None, Tensor weights,
                  Tensor losses not None, object refusal):
    cdef Lease lease = outside_of_callbacks(pipeline)
    cdef TensorArray x = tensor_array(batch)
    cdef TensorArray y = tensor_array(targets)
    cdef double *factors = doubles(weights)
    cdef double *found = doubles(losses)
    cdef size_t n_factors = count_of(weights)
    cdef size_t n_found = count_of(losses)
    failure = None
    begin_pass(pipeline, (x, y), refusal)
    try:
        with nogil:
            check(tsr_pipeline_eval(<tsr_pipeline *>lease.ptr, x.tensors, x.count, y.tensors, y.count, factors,
                                    n_factors, found, n_found))
    except BaseException as error:
        failure = error
    end_pass(pipeline, failure)


cdef Lease inside_of_callback(Pipeline pipeline):
    # The GIL is held until the library returns: the call that runs the callback cannot continue meanwhile.
    if pipeline.running is None:
        raise InvalidState("the pipeline runs no callback")
    return share(pipeline)


def pipeline_output(Pipeline pipeline not None, int dtype, tuple shape not None):
    """(memory, dtype, shape) of the next output"""
    cdef Lease lease = inside_of_callback(pipeline)
    cdef Tensor wanted = described(shape, dtype)
    cdef tsr_tensor tensor
    check(tsr_pipeline_output(<tsr_pipeline *>lease.ptr, dtype, wanted.shape_words, wanted.view.ndim, &tensor))
    memory, dtype, shape = tensor_view(pipeline, &tensor)
    (<Lent>memory).count_in(pipeline.running, 0)
    return memory, dtype, shape


def pipeline_loss(Pipeline pipeline not None, object loss):
    cdef Lease lease = inside_of_callback(pipeline)
    check(tsr_pipeline_loss(<tsr_pipeline *>lease.ptr, real(loss, "the loss")))


def copy_elements(Tensor source not None, Tensor target not None):
    """Copies between tensors of the same dtype and number of elements, on the CPU."""
    cdef size_t size = item_size_of(source.view.dtype)
    cdef const char *begin = <const char *>source.view.data + source.view.byte_offset
    cdef char *to = <char *>target.view.data + target.view.byte_offset
    cdef int i
    if source.view.dtype != target.view.dtype or source.shape != target.shape:
        raise InvalidArgument(f"a tensor of shape {source.shape} cannot be copied into one of shape {target.shape}")
    if source.view.device_type != TSR_DEVICE_CPU or target.view.device_type != TSR_DEVICE_CPU:
        raise Unsupported("an array that a callback returns is copied only on the CPU; on a device, write into "
                          "StageCall.output() or StageCall.input_grads, on the stream of the pipeline")
    for i in range(source.view.ndim):
        size *= <size_t>source.view.shape[i]
    if size > 0:
        with nogil:
            memcpy(to, begin, size)


def pipeline_sum_tied(Pipeline pipeline not None, Tensor gradient not None, list stages not None):
    cdef Lease lease = outside_of_callbacks(pipeline)
    cdef Int32s tied = Int32s.__new__(Int32s, stages, "a stage")
    with nogil:
        check(tsr_pipeline_sum_tied(<tsr_pipeline *>lease.ptr, &gradient.view, tied.numbers, tied.count))


def pipeline_set_stream(Pipeline pipeline not None, size_t stream):
    cdef Lease lease = outside_of_callbacks(pipeline)
    with nogil:
        check(tsr_pipeline_set_stream(<tsr_pipeline *>lease.ptr, <void *>stream))


def pipeline_stats(Pipeline pipeline not None):
    """(wall_ns, busy_ns, waited_ns, longest_ns, longest_stage, longest_rank, peak_activations, peak_bytes)"""
    cdef Lease lease = outside_of_callbacks(pipeline)
    cdef tsr_pass_stats stats
    stats.struct_size = sizeof(tsr_pass_stats)
    check(tsr_pipeline_stats(<tsr_pipeline *>lease.ptr, &stats))
    return (stats.wall_ns, stats.busy_ns, stats.waited_ns, stats.longest_ns, stats.longest_stage, stats.longest_rank,
            stats.peak_activations, stats.peak_bytes)


def pipeline_destroy(Pipeline pipeline not None):
    if pipeline.running is not None:
        raise InvalidState("the pipeline runs a callback; close it after the call that runs it")
    retire(pipeline)
    if pipeline.ptr == NULL:
        pipeline.compute = None
