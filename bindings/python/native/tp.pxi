# tp.h: tensor-parallel training.

cdef class TensorParallel(Handle):
    cdef void free(self) noexcept nogil:
        tsr_tp_destroy(<tsr_tp *>self.ptr)


def tp_create(Mesh mesh not None, Comm comm, object arguments):
    """`arguments()` returns the names and the tensors of parameters, the rules, which are (pattern, style, dim, Layout or
    None, heads), and the options. If that fails, so does the creation on all ranks of `comm`, the mesh's; None if the mesh
    has several dimensions, which the library refuses."""
    cdef TensorArray params
    cdef size_t count = 0
    cdef tsr_tp_options o
    cdef tsr_tp *out = NULL
    cdef list keep
    cdef Lease lease, layout
    cdef size_t i
    cdef tsr_tp_rule *words = NULL
    try:
        try:
            names, tensors, rules, given = arguments()
            params = tensor_array(tensors, names)
            keep = tp_options(&o, given)
            count = len(rules)
            words = <tsr_tp_rule *>PyMem_Calloc(count + 1, sizeof(tsr_tp_rule))
            if words == NULL:
                raise MemoryError
            for i in range(count):
                pattern, style, dim, cut, heads = rules[i]
                words[i].pattern = text_or_null(keep, pattern, "the pattern")
                words[i].style = int32(style, "the style")
                words[i].dim = int32(dim, "the dimension")
                words[i].heads = int32(heads, "the number of heads")
                if cut is not None:
                    layout = share(<Layout?>cut)
                    keep.append(layout)
                    words[i].layout = <tsr_layout *>layout.ptr
        except Exception as error:
            if comm is not None:
                refuse(comm, TSR_CREATES_MODEL, error)
            raise
        lease = use(mesh)
        with nogil:
            check(tsr_tp_create(<tsr_mesh *>lease.ptr, params.params, params.count, words, count, &o, &out))
    finally:
        PyMem_Free(words)
    return adopt(TensorParallel.__new__(TensorParallel), out, mesh)


def tp_param_count(TensorParallel tp not None):
    cdef Lease lease = share(tp)
    cdef size_t count = 0
    check(tsr_tp_param_count(<tsr_tp *>lease.ptr, &count))
    return count


def tp_param(TensorParallel tp not None, size_t place):
    """(name, shape, dtype, style, cut)"""
    cdef Lease lease = share(tp)
    cdef tsr_param param
    cdef int32_t style = 0, cut = 0
    cdef int32_t d
    check(tsr_tp_param(<tsr_tp *>lease.ptr, place, &param, &style, &cut))
    shape = tuple([param.tensor.shape[d] for d in range(param.tensor.ndim)])
    return param.name.decode("utf-8", "surrogateescape"), shape, param.tensor.dtype, style, cut


def tp_slice(TensorParallel tp not None, size_t place):
    """(memory, dtype, shape)"""
    cdef Lease lease = share(tp)
    cdef tsr_param part
    check(tsr_tp_slice(<tsr_tp *>lease.ptr, place, &part))
    return tensor_view(tp, &part.tensor)


def tp_grad(TensorParallel tp not None, size_t place):
    """(memory, dtype, shape)"""
    cdef Lease lease = use(tp)
    cdef tsr_tensor grad
    check(tsr_tp_grad(<tsr_tp *>lease.ptr, place, &grad))
    return tensor_view(tp, &grad)


def tp_layout(TensorParallel tp not None, size_t place):
    cdef Lease lease = share(tp)
    cdef tsr_layout *out = NULL
    check(tsr_tp_layout(<tsr_tp *>lease.ptr, place, &out))
    return adopt(Layout.__new__(Layout), out)


def tp_set_stream(TensorParallel tp not None, size_t stream):
    cdef Lease lease = use(tp)
    with nogil:
        check(tsr_tp_set_stream(<tsr_tp *>lease.ptr, <void *>stream))


cdef void *stream_for(Tensor tensor, size_t stream) noexcept:
    """The stream of an operation on the tensor; those on the CPU have none."""
    return <void *>stream if tensor.view.device_type == TSR_DEVICE_CUDA else NULL


cdef object work_of(tsr_work *work, tuple keep):
    return None if work == NULL else adopt(Work.__new__(Work), work, keep)


def tp_enter(TensorParallel tp not None, Tensor input not None, object dim, Tensor output not None, size_t stream,
             bint async_op):
    cdef Lease lease = use(tp)
    cdef tsr_work *work = NULL
    cdef int32_t d = int32(dim, "dim")
    cdef void *on = stream_for(input, stream)
    with nogil:
        check(tsr_tp_enter(<tsr_tp *>lease.ptr, &input.view, d, &output.view, on, &work if async_op else NULL))
    return work_of(work, (tp, input, output))


def tp_enter_backward(TensorParallel tp not None, Tensor input not None, object dim, Tensor output not None,
                      size_t stream, bint async_op):
    cdef Lease lease = use(tp)
    cdef tsr_work *work = NULL
    cdef int32_t d = int32(dim, "dim")
    cdef void *on = stream_for(input, stream)
    with nogil:
        check(tsr_tp_enter_backward(<tsr_tp *>lease.ptr, &input.view, d, &output.view, on,
                                    &work if async_op else NULL))
    return work_of(work, (tp, input, output))


def tp_leave(TensorParallel tp not None, Tensor input not None, object dim, Tensor bias, Tensor output not None,
             size_t stream, bint async_op):
    cdef Lease lease = use(tp)
    cdef tsr_work *work = NULL
    cdef const tsr_tensor *added = NULL if bias is None else &bias.view
    cdef int32_t d = int32(dim, "dim")
    cdef void *on = stream_for(input, stream)
    with nogil:
        check(tsr_tp_leave(<tsr_tp *>lease.ptr, &input.view, d, added, &output.view, on,
                           &work if async_op else NULL))
    return work_of(work, (tp, input, bias, output))


def tp_leave_backward(TensorParallel tp not None, Tensor input not None, object dim, Tensor output not None,
                      size_t stream, bint async_op):
    cdef Lease lease = use(tp)
    cdef tsr_work *work = NULL
    cdef int32_t d = int32(dim, "dim")
    cdef void *on = stream_for(input, stream)
    with nogil:
        check(tsr_tp_leave_backward(<tsr_tp *>lease.ptr, &input.view, d, &output.view, on,
                                    &work if async_op else NULL))
    return work_of(work, (tp, input, output))


@cython.final
@cython.no_gc
cdef class Parts:
    """What computes the parts of an activation, during one call."""

    cdef TensorParallel tp
    cdef object compute
    cdef object raised

    def __cinit__(self, TensorParallel tp not None, object compute not None):
        self.tp = tp
        self.compute = compute


cdef int32_t compute_part(int64_t begin, const tsr_tensor *part, char *message, Parts parts) noexcept:
    try:
        parts.compute(begin, tensor_view(parts.tp, part))
        return TSR_OK
    except BaseException as error:
        parts.raised = error
        try:
            explain(error, message)
            return _status_of(error) if isinstance(error, Exception) else TSR_E_INTERRUPTED
        except BaseException:
            return -1


cdef int32_t on_part(int64_t begin, const tsr_tensor *part, char *message, void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = compute_part(begin, part, message, <Parts>user_data)
    gate_leave()
    return status


cdef object check_parts(tsr_status status, Parts parts):
    """Raises what `compute` raised, or the error of the call."""
    if parts.raised is not None:
        raise parts.raised
    check(status)


def tp_enter_parts(TensorParallel tp not None, Tensor input not None, object dim, Tensor output not None,
                   size_t stream, object compute not None):
    """Calls `compute(begin, (memory, dtype, shape))`; the memory is valid for the call."""
    cdef Lease lease = use(tp)
    cdef int32_t d = int32(dim, "dim")
    cdef Parts parts = Parts(tp, compute)
    cdef tsr_status status
    cdef void *on = stream_for(output, stream)
    with nogil:
        status = tsr_tp_enter_parts(<tsr_tp *>lease.ptr, &input.view, d, &output.view, on, on_part, <void *>parts)
    check_parts(status, parts)


def tp_leave_parts(TensorParallel tp not None, object size, object dim, Tensor bias, Tensor output not None,
                   size_t stream, object compute not None):
    """Calls `compute(begin, (memory, dtype, shape))`, which writes the memory; it is valid for the call."""
    cdef Lease lease = use(tp)
    cdef int64_t whole = int64(size, "size")
    cdef int32_t d = int32(dim, "dim")
    cdef const tsr_tensor *added = NULL if bias is None else &bias.view
    cdef Parts parts = Parts(tp, compute)
    cdef tsr_status status
    cdef void *on = stream_for(output, stream)
    with nogil:
        status = tsr_tp_leave_parts(<tsr_tp *>lease.ptr, whole, d, added, &output.view, on, on_part, <void *>parts)
    check_parts(status, parts)


def tp_gather(TensorParallel tp not None, Tensor input not None, object dim, Tensor output not None, size_t stream,
              bint async_op):
    cdef Lease lease = use(tp)
    cdef tsr_work *work = NULL
    cdef int32_t d = int32(dim, "dim")
    cdef void *on = stream_for(input, stream)
    with nogil:
        check(tsr_tp_gather(<tsr_tp *>lease.ptr, &input.view, d, &output.view, on, &work if async_op else NULL))
    return work_of(work, (tp, input, output))


def tp_split(TensorParallel tp not None, Tensor input not None, object dim, Tensor output not None, size_t stream):
    cdef Lease lease = share(tp)
    cdef int32_t d = int32(dim, "dim")
    cdef void *on = stream_for(input, stream)
    with nogil:
        check(tsr_tp_split(<tsr_tp *>lease.ptr, &input.view, d, &output.view, on))


def tp_embed(TensorParallel tp not None, size_t place, Tensor ids not None, object dim, Tensor output not None,
             size_t stream, bint async_op):
    cdef Lease lease = use(tp)
    cdef tsr_work *work = NULL
    cdef int32_t d = int32(dim, "dim")
    cdef void *on = stream_for(output, stream)
    with nogil:
        check(tsr_tp_embed(<tsr_tp *>lease.ptr, place, &ids.view, d, &output.view, on, &work if async_op else NULL))
    return work_of(work, (tp, ids, output))


def tp_embed_backward(TensorParallel tp not None, size_t place, Tensor ids not None, Tensor grad not None, object dim,
                      Tensor sum not None, size_t stream, bint async_op):
    cdef Lease lease = use(tp)
    cdef tsr_work *work = NULL
    cdef int32_t d = int32(dim, "dim")
    cdef void *on = stream_for(grad, stream)
    with nogil:
        check(tsr_tp_embed_backward(<tsr_tp *>lease.ptr, place, &ids.view, &grad.view, d, &sum.view, on,
                                    &work if async_op else NULL))
    return work_of(work, (tp, ids, grad, sum))


def tp_cross_entropy(TensorParallel tp not None, Tensor logits not None, object vocabulary, Tensor targets not None,
                     Tensor weights, Comm data_ranks, Tensor loss not None, Tensor grad, size_t stream,
                     bint async_op, **given):
    cdef Lease lease = use(tp)
    cdef Lease data
    cdef tsr_work *work = NULL
    cdef tsr_cross_entropy_options o
    cdef list keep = cross_entropy_options(&o, given)
    cdef const tsr_tensor *wanted = NULL if grad is None else &grad.view
    cdef int64_t classes = int64(vocabulary, "vocabulary")
    if weights is not None:
        o.class_weights = &weights.view
    if data_ranks is not None:
        data = use(data_ranks)
        o.data_ranks = <tsr_comm *>data.ptr
    cdef void *on = stream_for(logits, stream)
    with nogil:
        check(tsr_tp_cross_entropy(<tsr_tp *>lease.ptr, &logits.view, classes, &targets.view, &o, &loss.view, wanted,
                                   on, &work if async_op else NULL))
    return work_of(work, (tp, logits, targets, weights, loss, grad))


def tp_sum_grads(TensorParallel tp not None, bint async_op):
    cdef Lease lease = use(tp)
    cdef tsr_work *work = NULL
    with nogil:
        check(tsr_tp_sum_grads(<tsr_tp *>lease.ptr, &work if async_op else NULL))
    return work_of(work, (tp,))


def tp_zero_grad(TensorParallel tp not None):
    cdef Lease lease = use(tp)
    check(tsr_tp_zero_grad(<tsr_tp *>lease.ptr))


def tp_destroy(TensorParallel tp not None):
    retire(tp)
