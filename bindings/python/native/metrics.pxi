# metrics.h: metrics over the samples of all ranks.

cdef class Metric(Handle):
    cdef void free(self) noexcept nogil:
        tsr_metric_destroy(<tsr_metric *>self.ptr)


METRIC_KINDS = {
    "mean": TSR_METRIC_MEAN,
    "sum": TSR_METRIC_SUM,
    "mean_absolute_error": TSR_METRIC_MEAN_ABSOLUTE_ERROR,
    "mean_squared_error": TSR_METRIC_MEAN_SQUARED_ERROR,
    "root_mean_squared_error": TSR_METRIC_ROOT_MEAN_SQUARED_ERROR,
    "r2_score": TSR_METRIC_R2_SCORE,
    "accuracy": TSR_METRIC_ACCURACY,
    "top_k_accuracy": TSR_METRIC_TOP_K_ACCURACY,
    "balanced_accuracy": TSR_METRIC_BALANCED_ACCURACY,
    "confusion_matrix": TSR_METRIC_CONFUSION_MATRIX,
    "precision": TSR_METRIC_PRECISION,
    "recall": TSR_METRIC_RECALL,
    "f_beta": TSR_METRIC_F_BETA,
    "roc_curve": TSR_METRIC_ROC_CURVE,
    "precision_recall_curve": TSR_METRIC_PRECISION_RECALL_CURVE,
    "average_precision": TSR_METRIC_AVERAGE_PRECISION,
    "auroc": TSR_METRIC_AUROC,
    "log_loss": TSR_METRIC_LOG_LOSS,
    "perplexity": TSR_METRIC_PERPLEXITY,
    "binned_roc_curve": TSR_METRIC_BINNED_ROC_CURVE,
    "binned_precision_recall_curve": TSR_METRIC_BINNED_PRECISION_RECALL_CURVE,
    "binned_average_precision": TSR_METRIC_BINNED_AVERAGE_PRECISION,
    "binned_auroc": TSR_METRIC_BINNED_AUROC,
}


def metric_create(int kind, **given):
    cdef tsr_metric_options o
    cdef tsr_metric *out = NULL
    cdef list keep = metric_options(&o, given)
    check(tsr_metric_create(kind, &o, &out))
    return adopt(Metric.__new__(Metric), out)


cdef const tsr_tensor *given_tensor(Tensor tensor) noexcept:
    return NULL if tensor is None else &tensor.view


def metric_update(Metric metric not None, Tensor predictions not None, Tensor targets, Tensor weights, Tensor valid):
    cdef Lease lease = use(metric)
    cdef const tsr_tensor *p = given_tensor(predictions)
    cdef const tsr_tensor *t = given_tensor(targets)
    cdef const tsr_tensor *w = given_tensor(weights)
    cdef const tsr_tensor *v = given_tensor(valid)
    with nogil:
        check(tsr_metric_update(<tsr_metric *>lease.ptr, p, t, w, v))


def metric_compute(Metric metric not None, Comm comm):
    cdef Lease lease = use(metric)
    cdef Lease comm_lease = None if comm is None else use(comm)
    cdef tsr_comm *ranks = NULL if comm is None else <tsr_comm *>comm_lease.ptr
    cdef double value = 0
    with nogil:
        check(tsr_metric_compute(<tsr_metric *>lease.ptr, ranks, &value))
    return value


def metric_result(Metric metric not None, object name):
    """(bytes, dtype, shape), copied."""
    cdef Lease lease = use(metric)
    cdef bytes encoded = utf8(name, "the name")
    cdef tsr_tensor array
    cdef Py_ssize_t size = 8
    cdef int i
    check(tsr_metric_result(<tsr_metric *>lease.ptr, encoded, &array))
    for i in range(array.ndim):
        size *= array.shape[i]
    shape = tuple([array.shape[i] for i in range(array.ndim)])
    return PyBytes_FromStringAndSize(<const char *>array.data, size), array.dtype, shape


def metric_merge(Metric metric not None, Metric other not None):
    cdef Lease lease = use(metric)
    cdef Lease other_lease = share(other)
    with nogil:
        check(tsr_metric_merge(<tsr_metric *>lease.ptr, <tsr_metric *>other_lease.ptr))


def metric_gather(Metric metric not None, Comm comm not None):
    cdef Lease lease = use(metric)
    cdef Lease comm_lease = use(comm)
    with nogil:
        check(tsr_metric_gather(<tsr_metric *>lease.ptr, <tsr_comm *>comm_lease.ptr))


def metric_reset(Metric metric not None):
    cdef Lease lease = use(metric)
    check(tsr_metric_reset(<tsr_metric *>lease.ptr))


def metric_destroy(Metric metric not None):
    retire(metric)
