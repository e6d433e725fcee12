# What threads of the library call. Each passes the gate of gate.h first, which closes before the interpreter ends.

cdef void on_work_done(tsr_status status, void *user_data) noexcept nogil:
    if not gate_enter():
        return
    with gil:
        call_back(<object>user_data, (status,))
    gate_leave()


cdef void on_forgotten(tsr_status status, void *user_data) noexcept nogil:
    pass


cdef void on_log(int32_t level, const char *line, void *user_data) noexcept nogil:
    if not gate_enter():
        return
    with gil:
        call_back(<object>user_data, (level, line.decode("utf-8", "replace")))
    gate_leave()


cdef void on_drop(void *user_data) noexcept nogil:
    if not gate_enter():
        return
    with gil:
        Py_DECREF(<object>user_data)
    gate_leave()


cdef void call_back(object fn, tuple arguments) noexcept:
    """A callback's exception cannot reach anybody: it is reported as unraisable."""
    fn(*arguments)


def _at_exit():
    with nogil:
        gate_close()
