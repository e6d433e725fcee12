# storage.h: a Python object as the library's storage. Threads of the library call its methods with the GIL and through
# the gate. An exception of a method becomes the error of the call that failed.

cdef extern from "Python.h":
    object PyMemoryView_FromMemory(char *memory, Py_ssize_t size, int flags)
    int PyBUF_READ
    int PyBUF_WRITE


cdef class Storage(Handle):
    cdef void free(self) noexcept nogil:
        tsr_storage_destroy(<tsr_storage *>self.ptr)


cdef int32_t storage_failed(object error, char *message) noexcept:
    """Converts a method's exception to a status and a message. The failed call raises Ctrl-C on the main thread."""
    global pending, thread_has_pending
    try:
        explain(error, message)
        if not isinstance(error, Exception) and thread_is_armed and threading.current_thread() is threading.main_thread():
            pending = error
            thread_has_pending = 1
            return TSR_E_INTERRUPTED
        return _status_of(error)
    except BaseException:
        return -1


cdef object view_of(const void *data, int64_t size, bint writable):
    return PyMemoryView_FromMemory(<char *>data, size, PyBUF_WRITE if writable else PyBUF_READ)


cdef int32_t storage_status(const char *key, int32_t *kind, int64_t *size, int64_t *modified_ms, char *message,
                            object storage) noexcept:
    try:
        found = storage._status(key.decode())
        if found is None:
            return TSR_E_NOT_FOUND
        kind[0] = TSR_STORAGE_DIRECTORY if found[0] else TSR_STORAGE_OBJECT
        size[0] = found[1]
        modified_ms[0] = found[2]
        return TSR_OK
    except BaseException as error:
        return storage_failed(error, message)


cdef int32_t storage_open(const char *key, void **opened, int64_t *size, char *message, object storage) noexcept:
    try:
        reader = storage._open(key.decode())
        if reader is None:
            return TSR_E_NOT_FOUND
        size[0] = reader.size
        Py_INCREF(reader)
        opened[0] = <void *>reader
        return TSR_OK
    except BaseException as error:
        return storage_failed(error, message)


cdef int32_t storage_read(object reader, int64_t offset, void *data, int64_t size, int64_t *got, char *message) noexcept:
    try:
        with view_of(data, size, True) as into:
            got[0] = reader.read(offset, into)
        return TSR_OK
    except BaseException as error:
        return storage_failed(error, message)


cdef int32_t storage_put(const char *key, const void *data, int64_t size, int32_t if_absent, char *message,
                         object storage) noexcept:
    try:
        with view_of(data, size, False) as given:
            if storage.put(key.decode(), given, if_absent != 0) is False:
                return TSR_E_INVALID_STATE
        return TSR_OK
    except BaseException as error:
        return storage_failed(error, message)


cdef int32_t storage_begin(const char *key, int64_t size, void **upload, char *message, object storage) noexcept:
    try:
        begun = storage.begin(key.decode(), size)
        Py_INCREF(begun)
        upload[0] = <void *>begun
        return TSR_OK
    except BaseException as error:
        return storage_failed(error, message)


cdef int32_t storage_part(object upload, int64_t place, int64_t offset, const void *data, int64_t size,
                          char *message) noexcept:
    try:
        with view_of(data, size, False) as given:
            upload.part(place, offset, given)
        return TSR_OK
    except BaseException as error:
        return storage_failed(error, message)


cdef int32_t storage_finish(object upload, char *message) noexcept:
    try:
        upload.finish()
        return TSR_OK
    except BaseException as error:
        return storage_failed(error, message)


cdef void storage_close(object end) noexcept:
    """Calls `end`. No caller can receive its exception, so Python reports it as unraisable."""
    end()


cdef int32_t storage_list(const char *key, tsr_storage_found_fn found, void *found_data, char *message,
                          object storage) noexcept:
    try:
        for name in storage.list(key.decode()):
            found(PyBytes_AsString(utf8(name, "a name in the storage")), found_data)
        return TSR_OK
    except BaseException as error:
        return storage_failed(error, message)


cdef int32_t storage_remove(const char *key, bint directory, char *message, object storage) noexcept:
    try:
        if directory:
            storage.remove_directory(key.decode())
        else:
            storage.remove(key.decode())
        return TSR_OK
    except BaseException as error:
        return storage_failed(error, message)


cdef int32_t on_storage_status(const char *key, int32_t *kind, int64_t *size, int64_t *modified_ms, char *message,
                               void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = storage_status(key, kind, size, modified_ms, message, <object>user_data)
    gate_leave()
    return status


cdef int32_t on_storage_open(const char *key, void **opened, int64_t *size, char *message,
                             void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = storage_open(key, opened, size, message, <object>user_data)
    gate_leave()
    return status


cdef int32_t on_storage_read(void *opened, int64_t offset, void *data, int64_t size, int64_t *got, char *message,
                             void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = storage_read(<object>opened, offset, data, size, got, message)
    gate_leave()
    return status


cdef void on_storage_close(void *opened, void *user_data) noexcept nogil:
    if not gate_enter():
        return
    with gil:
        storage_close((<object>opened).close)
        Py_DECREF(<object>opened)
    gate_leave()


cdef int32_t on_storage_put(const char *key, const void *data, int64_t size, int32_t if_absent, char *message,
                            void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = storage_put(key, data, size, if_absent, message, <object>user_data)
    gate_leave()
    return status


cdef int32_t on_storage_begin(const char *key, int64_t size, void **upload, char *message,
                              void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = storage_begin(key, size, upload, message, <object>user_data)
    gate_leave()
    return status


cdef int32_t on_storage_part(void *upload, int64_t place, int64_t offset, const void *data, int64_t size, char *message,
                             void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = storage_part(<object>upload, place, offset, data, size, message)
    gate_leave()
    return status


cdef int32_t on_storage_finish(void *upload, char *message, void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = storage_finish(<object>upload, message)
    gate_leave()
    return status


cdef void on_storage_drop(void *upload, void *user_data) noexcept nogil:
    if not gate_enter():
        return
    with gil:
        storage_close((<object>upload).drop)
        Py_DECREF(<object>upload)
    gate_leave()


cdef int32_t on_storage_list(const char *key, tsr_storage_found_fn found, void *found_data, char *message,
                             void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = storage_list(key, found, found_data, message, <object>user_data)
    gate_leave()
    return status


cdef int32_t on_storage_remove(const char *key, char *message, void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = storage_remove(key, False, message, <object>user_data)
    gate_leave()
    return status


cdef int32_t on_storage_remove_directory(const char *key, char *message, void *user_data) noexcept nogil:
    cdef int32_t status
    if not gate_enter():
        return refused_at_exit(message)
    with gil:
        status = storage_remove(key, True, message, <object>user_data)
    gate_leave()
    return status


def storage_create(object storage, *, bint parts_in_any_order, bint puts_if_absent, part_bytes):
    cdef tsr_storage_vtable table
    cdef tsr_storage *out = NULL
    cdef void *user_data = <void *>storage
    memset(&table, 0, sizeof(tsr_storage_vtable))
    table.struct_size = sizeof(tsr_storage_vtable)
    if parts_in_any_order:
        table.capabilities |= TSR_STORAGE_PARTS_IN_ANY_ORDER
    if puts_if_absent:
        table.capabilities |= TSR_STORAGE_PUT_IF_ABSENT
    table.part_bytes = int64(part_bytes, "part_bytes")
    table.status = on_storage_status
    table.open = on_storage_open
    table.read = on_storage_read
    table.close = on_storage_close
    table.put = on_storage_put
    table.begin = on_storage_begin
    table.part = on_storage_part
    table.finish = on_storage_finish
    table.drop = on_storage_drop
    table.list = on_storage_list
    table.remove = on_storage_remove
    table.remove_directory = on_storage_remove_directory
    with nogil:
        check(tsr_storage_create(&table, user_data, on_drop, &out))
    Py_INCREF(storage)
    return adopt(Storage.__new__(Storage), out)


def storage_destroy(Storage storage not None):
    retire(storage)
