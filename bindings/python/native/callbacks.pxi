# Callbacks that threads of the library call. Each passes the gate of gate.h first, which closes before the interpreter
# shuts down.

cdef void on_work_done(tsr_status status, void *user_data) noexcept nogil:
    if not gate_enter():
        return
    with gil:
        call_back(<object>user_data, (status,))
    gate_leave()


cdef void on_report(const char *json, void *user_data) noexcept nogil:
    if not gate_enter():
        return
    with gil:
        call_back(<object>user_data, (json.decode("utf-8", "replace"),))
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


cdef void on_progress(int32_t phase, int64_t done, int64_t total, void *user_data) noexcept nogil:
    if not gate_enter():
        return
    with gil:
        tell(<object>user_data, phase, done, total)
    gate_leave()


cdef void tell(object fn, int32_t phase, int64_t done, int64_t total) noexcept:
    """Calls `fn`. An exception on the main thread, such as Ctrl-C, ends the wait there like one of a signal handler."""
    global pending, thread_has_pending
    if thread_has_pending:
        return
    try:
        fn(phase, done, total)
    except BaseException as error:
        if threading.current_thread() is not threading.main_thread():
            raise
        pending = error
        thread_has_pending = 1


cdef int explain(object error, char *message) except -1:
    """Writes what a callback raised into a message of TSR_MESSAGE_BYTES."""
    text = f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:TSR_MESSAGE_BYTES - 1]
    text = text.decode("utf-8", "ignore").encode().replace(b"\0", b"?")
    memcpy(message, PyBytes_AsString(text), len(text))
    return 0


cdef int32_t refused_at_exit(char *message) noexcept nogil:
    strcpy(message, "the Python interpreter is shutting down")
    return TSR_E_ABORTED


cdef void call_back(object fn, tuple arguments) noexcept:
    """Calls a callback. No caller can receive its exception, so Python reports it as unraisable."""
    fn(*arguments)


def _at_exit():
    """Waits for background saves before the gate closes: they may need the interpreter, for a storage in Python."""
    try:
        finish_saves()
    finally:
        with nogil:
            gate_close()
