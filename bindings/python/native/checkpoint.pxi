# checkpoint.h: writing and reading checkpoints.

cdef class Saver(Handle):
    # `keep` is the progress callback. Unlike a field of this class, it still exists when `free` waits for a save.
    cdef void free(self) noexcept nogil:
        tsr_saver_destroy(<tsr_saver *>self.ptr)


cdef object savers = weakref.WeakSet()  # those that the interpreter waits for when it exits


cdef int finish_saves() except -1:
    """Waits for all saves in flight, for each until its deadline at most. The log has their failures."""
    for saver in list(savers):
        try:
            saver_wait(saver)
        except TesseraError:
            # The save failed; or the saver is closed, belongs to the parent process, or is in use by another thread.
            continue


cdef class Checkpoint(Handle):
    cdef void free(self) noexcept nogil:
        tsr_checkpoint_destroy(<tsr_checkpoint *>self.ptr)


def saver_create(Comm comm, object root, *, progress=None, Storage storage=None, **given):
    cdef Lease storage_lease
    cdef tsr_saver_options o
    cdef list keep
    cdef tsr_saver *out = NULL
    cdef const char *path
    try:
        storage_lease = None if storage is None else share(storage)
        keep = saver_options(&o, given)
        path = text_or_null(keep, root, "the path")
    except Exception as error:
        if comm is not None:
            refuse(comm, TSR_CREATES_COMM, error)
        raise
    cdef Lease lease = None if comm is None else use(comm)
    cdef tsr_comm *ranks = NULL if comm is None else <tsr_comm *>lease.ptr
    if progress is not None:
        o.progress = on_progress
        o.progress_data = <void *>progress
    if storage is not None:
        o.storage = <const tsr_storage *>storage_lease.ptr
    arm()
    with nogil:
        check(tsr_saver_create(ranks, path, &o, &out))
    saver = adopt(Saver.__new__(Saver), out, progress)
    savers.add(saver)
    return saver


def saver_save(Saver saver not None, object step, State state not None):
    cdef Lease lease = use(saver)
    cdef Lease state_lease = use(state)
    cdef int64_t steps = int64(step, "step")
    with nogil:
        check(tsr_saver_save(<tsr_saver *>lease.ptr, steps, <tsr_state *>state_lease.ptr))


def saver_save_async(Saver saver not None, object step, State state not None):
    cdef Lease lease = use(saver)
    cdef Lease state_lease = use(state)
    cdef tsr_work *work = NULL
    cdef int64_t steps = int64(step, "step")
    with nogil:
        check(tsr_saver_save_async(<tsr_saver *>lease.ptr, steps, <tsr_state *>state_lease.ptr, &work))
    return None if work == NULL else adopt(Work.__new__(Work), work, (saver,))


def saver_wait(Saver saver not None):
    cdef Lease lease = use(saver)
    with nogil:
        check(tsr_saver_wait(<tsr_saver *>lease.ptr))


def saver_resume(Saver saver not None, State state not None):
    cdef Lease lease = use(saver)
    cdef Lease state_lease = use(state)
    cdef int64_t step = 0
    with nogil:
        check(tsr_saver_resume(<tsr_saver *>lease.ptr, <tsr_state *>state_lease.ptr, &step))
    return step


def saver_should_stop(Saver saver not None, object step, object told):
    cdef Lease lease = use(saver)
    cdef int64_t steps = int64(step, "step")
    cdef int32_t here = flag(told, "told")
    cdef int32_t stop = 0
    with nogil:
        check(tsr_saver_should_stop(<tsr_saver *>lease.ptr, steps, here, &stop))
    return stop != 0


def saver_trim(Saver saver not None):
    cdef Lease lease = use(saver)
    with nogil:
        check(tsr_saver_trim(<tsr_saver *>lease.ptr))


def saver_destroy(Saver saver not None):
    retire(saver)


def checkpoint_open(object path):
    cdef list keep = []
    cdef const char *text = text_or_null(keep, path, "the path")
    cdef tsr_checkpoint *out = NULL
    arm()
    with nogil:
        check(tsr_checkpoint_open(text, &out))
    return adopt(Checkpoint.__new__(Checkpoint), out)


def checkpoint_open_with(object path, *, Storage storage=None):
    cdef list keep = []
    cdef Lease storage_lease = None if storage is None else share(storage)
    cdef const char *text = text_or_null(keep, path, "the path")
    cdef tsr_open_options o
    cdef tsr_checkpoint *out = NULL
    check(tsr_open_options_init(&o, sizeof(tsr_open_options)))
    if storage is not None:
        o.storage = <const tsr_storage *>storage_lease.ptr
    arm()
    with nogil:
        check(tsr_checkpoint_open_with(text, &o, &out))
    return adopt(Checkpoint.__new__(Checkpoint), out)


cdef str checkpoint_text(Checkpoint checkpoint, bint manifest):
    cdef Lease lease = share(checkpoint)
    cdef tsr_checkpoint *opened = <tsr_checkpoint *>lease.ptr
    cdef size_t size = 65536 if manifest else 256
    cdef size_t capacity = 0
    cdef bytes text = b""
    while size > capacity:  # retry with enough space for the text that was found
        capacity = size
        text = PyBytes_FromStringAndSize(NULL, capacity)
        if manifest:
            check(tsr_checkpoint_manifest(opened, PyBytes_AsString(text), capacity, &size))
        else:
            check(tsr_checkpoint_path(opened, PyBytes_AsString(text), capacity, &size))
    return text[:size - 1].decode("utf-8", "surrogateescape")


def checkpoint_path(Checkpoint checkpoint not None):
    return checkpoint_text(checkpoint, False)


def checkpoint_manifest(Checkpoint checkpoint not None):
    return checkpoint_text(checkpoint, True)


def checkpoint_step(Checkpoint checkpoint not None):
    cdef Lease lease = share(checkpoint)
    cdef int64_t step = 0
    check(tsr_checkpoint_step(<tsr_checkpoint *>lease.ptr, &step))
    return step


def checkpoint_tensor_count(Checkpoint checkpoint not None):
    cdef Lease lease = share(checkpoint)
    cdef size_t count = 0
    check(tsr_checkpoint_tensor_count(<tsr_checkpoint *>lease.ptr, &count))
    return count


def checkpoint_tensor(Checkpoint checkpoint not None, size_t place):
    """(name, dtype, shape)"""
    cdef Lease lease = share(checkpoint)
    cdef const char *name = NULL
    cdef tsr_dtype dtype = 0
    cdef const int64_t *shape = NULL
    cdef int32_t ndim = 0
    check(tsr_checkpoint_tensor(<tsr_checkpoint *>lease.ptr, place, &name, &dtype, &shape, &ndim))
    return name.decode("utf-8", "surrogateescape"), dtype, tuple([shape[i] for i in range(ndim)])


def checkpoint_read(Checkpoint checkpoint not None, object name, Tensor tensor not None):
    cdef Lease lease = share(checkpoint)
    cdef bytes encoded = utf8(name, "the name")
    cdef const char *text = encoded
    with nogil:
        check(tsr_checkpoint_read(<tsr_checkpoint *>lease.ptr, text, &tensor.view))


def checkpoint_load(Checkpoint checkpoint not None, State state not None, *, progress=None, Comm comm=None,
                    list only=None, dict rename=None, report=None, **given):
    """`report` is called with the report as JSON."""
    cdef Lease lease = share(checkpoint)
    cdef Lease state_lease = use(state)
    cdef Lease comm_lease = None if comm is None else use(comm)
    cdef tsr_load_options o
    cdef list keep = load_options(&o, given)
    cdef const char **patterns = NULL
    cdef tsr_name_rule *rules = NULL
    if progress is not None:
        o.progress = on_progress
        o.progress_data = <void *>progress
    if comm is not None:
        o.comm = <tsr_comm *>comm_lease.ptr
    if report is not None:
        o.report = on_report
        o.report_data = <void *>report
    try:
        if only is not None:
            patterns = <const char **>PyMem_Calloc(len(only) + 1, sizeof(char *))
            if patterns == NULL:
                raise MemoryError
            for i, pattern in enumerate(only):
                patterns[i] = text_or_null(keep, pattern, "a pattern of only")
            o.only = patterns
            o.only_count = len(only)
        if rename is not None:
            rules = <tsr_name_rule *>PyMem_Calloc(len(rename) + 1, sizeof(tsr_name_rule))
            if rules == NULL:
                raise MemoryError
            for i, (saved, here) in enumerate(rename.items()):
                rules[i].saved = text_or_null(keep, saved, "a name of rename")
                rules[i].here = text_or_null(keep, here, "a name of rename")
            o.rules = rules
            o.rule_count = len(rename)
        with nogil:
            check(tsr_checkpoint_load(<tsr_checkpoint *>lease.ptr, <tsr_state *>state_lease.ptr, &o))
    finally:
        PyMem_Free(patterns)
        PyMem_Free(rules)


def checkpoint_verify(Checkpoint checkpoint not None, object full):
    cdef Lease lease = share(checkpoint)
    cdef int32_t every_byte = flag(full, "full")
    with nogil:
        check(tsr_checkpoint_verify(<tsr_checkpoint *>lease.ptr, every_byte))


def checkpoint_verify_progress(Checkpoint checkpoint not None, object full, object progress not None):
    cdef Lease lease = share(checkpoint)
    cdef int32_t every_byte = flag(full, "full")
    with nogil:
        check(tsr_checkpoint_verify_progress(<tsr_checkpoint *>lease.ptr, every_byte, on_progress, <void *>progress))


def checkpoint_export(Checkpoint checkpoint not None, Comm comm, object directory, *, progress=None, **given):
    cdef Lease lease = share(checkpoint)
    cdef Lease comm_lease = None if comm is None else use(comm)
    cdef tsr_export_options o
    cdef list keep = export_options(&o, given)
    cdef const char *path = text_or_null(keep, directory, "the path")
    cdef tsr_comm *ranks = NULL if comm is None else <tsr_comm *>comm_lease.ptr
    if progress is not None:
        o.progress = on_progress
        o.progress_data = <void *>progress
    arm()
    with nogil:
        check(tsr_checkpoint_export(<tsr_checkpoint *>lease.ptr, ranks, path, &o))


def checkpoint_destroy(Checkpoint checkpoint not None):
    retire(checkpoint)
