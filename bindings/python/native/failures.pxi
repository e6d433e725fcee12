# Converts the library's errors to exceptions, and handles Ctrl-C while it waits.

cdef object exception_of(const tsr_error *error):
    """The exception for `error`, with the exception for its cause as __cause__."""
    cdef int32_t domain = 0
    cdef int32_t native = tsr_error_native(error, &domain)
    cdef const tsr_error *cause = tsr_error_cause(error)
    return _from_native(
        tsr_error_code(error), tsr_error_message(error).decode("utf-8", "replace"), tsr_error_rank(error),
        tsr_error_peer(error), tsr_error_operation(error).decode("utf-8", "replace"), tsr_error_sequence(error),
        domain, native, tsr_error_retriable(error) != 0, exception_of(cause) if cause != NULL else None)


cdef object detached(tsr_error *error):
    """The exception for a detached error; None for NULL. Frees the error."""
    if error == NULL:
        return None
    try:
        return exception_of(error)
    finally:
        tsr_error_destroy(error)


cdef int check(tsr_status status) except -1 nogil:
    """Raises the error of a failed call. Takes it on the failing thread before anything else can run there."""
    cdef tsr_error *error = NULL
    if status == TSR_OK and not thread_has_pending:
        return 0
    if status != TSR_OK and tsr_error_last() != NULL and tsr_error_take(&error) != TSR_OK:
        error = NULL
    with gil:
        raise_failure(status, error)
    return 0


cdef int raise_failure(tsr_status status, tsr_error *error) except -1:
    global pending
    caught = None
    if thread_has_pending:
        if status == TSR_OK:  # the signal arrived as the call ended: return the result and deliver the signal again
            redeliver()
            return 0
        thread_has_pending_clear()
        caught, pending = pending, None
    failure = detached(error)
    if caught is not None:
        raise caught from failure
    if failure is None:
        name = tsr_status_name(status).decode()
        failure = _from_native(status, f"Tessera failed with {name}", -1, -1, "", -1, 0, 0, False, None)
    raise failure



# The exception that a Python signal handler raised during a blocking call of the main thread.
cdef object pending = None


cdef void thread_has_pending_clear() noexcept nogil:
    global thread_has_pending
    thread_has_pending = 0


cdef int32_t on_poll(void *user_data) noexcept with gil:
    """Runs the Python signal handlers while the main thread waits. Returns non-zero if one raised."""
    global pending, thread_has_pending
    if thread_has_pending:
        return 1
    try:
        PyErr_CheckSignals()
    except BaseException as error:
        pending = error
        thread_has_pending = 1
        return 1
    return 0


cdef void redeliver() noexcept:
    global pending
    thread_has_pending_clear()
    pending = None
    PyErr_SetInterrupt()


cdef int arm() except -1:
    """Runs once per thread. Python runs signal handlers on the main thread, so only that thread polls for them."""
    global thread_is_armed
    if thread_is_armed:
        return 0
    if threading.current_thread() is threading.main_thread():
        check(tsr_interrupt_set(on_poll, NULL))
    thread_is_armed = 1
    return 0
