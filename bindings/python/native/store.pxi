# store.h: the key-value store.

cdef class Store(Handle):
    cdef void free(self) noexcept nogil:
        tsr_store_destroy(<tsr_store *>self.ptr)


cdef class StoreServer(Handle):
    cdef void free(self) noexcept nogil:
        tsr_store_server_destroy(<tsr_store_server *>self.ptr)


def store_serve(object host, object port, **given):
    cdef tsr_store_options o
    cdef tsr_store_server *out = NULL
    cdef list keep = store_options(&o, given)
    cdef const char *address = text_or_null(keep, host, "the host")
    cdef uint16_t number = <uint16_t>whole(port, "the port", 0, 65535)
    with nogil:
        check(tsr_store_serve(address, number, &o, &out))
    return adopt(StoreServer.__new__(StoreServer), out)


def store_server_port(StoreServer server not None):
    cdef Lease lease = share(server)
    cdef uint16_t port = 0
    check(tsr_store_server_port(<tsr_store_server *>lease.ptr, &port))
    return port


def store_server_destroy(StoreServer server not None):
    retire(server)


def store_open(object uri, **given):
    cdef tsr_store_options o
    cdef tsr_store *out = NULL
    cdef list keep = store_options(&o, given)
    cdef const char *address = text_or_null(keep, uri, "the store's address")
    arm()
    with nogil:
        check(tsr_store_open(address, &o, &out))
    return adopt(Store.__new__(Store), out)


def store_destroy(Store store not None):
    retire(store)


def store_set(Store store not None, object key, bytes value not None):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    cdef const char *v = value
    cdef size_t size = len(value)
    with nogil:
        check(tsr_store_set(<tsr_store *>lease.ptr, k, v, size))


def store_get(Store store not None, object key):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    cdef size_t size = 4096
    cdef size_t capacity = 0
    cdef bytes value = b""
    cdef char *v
    while size > capacity:  # retry with enough space for the value that was found
        capacity = size
        value = PyBytes_FromStringAndSize(NULL, capacity)
        v = PyBytes_AsString(value)
        with nogil:
            check(tsr_store_get(<tsr_store *>lease.ptr, k, v, capacity, &size))
    return value[:size]


def store_wait(Store store not None, object key, object timeout_ms):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    cdef int32_t patience = -1 if timeout_ms is None else int32(timeout_ms, "the timeout in ms")
    with nogil:
        check(tsr_store_wait(<tsr_store *>lease.ptr, k, patience))


def store_add(Store store not None, object key, object delta):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    cdef int64_t result = 0
    cdef int64_t summand = int64(delta, "the number to add")
    with nogil:
        check(tsr_store_add(<tsr_store *>lease.ptr, k, summand, &result))
    return result


def store_compare_set(Store store not None, object key, bytes expected, bytes desired not None):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    cdef const char *e = NULL
    cdef const char *d = desired
    cdef size_t expected_size = 0
    cdef size_t desired_size = len(desired)
    cdef int32_t swapped = 0
    if expected is not None:
        e = expected
        expected_size = len(expected)
    with nogil:
        check(tsr_store_compare_set(<tsr_store *>lease.ptr, k, e, expected_size, d, desired_size, &swapped))
    return swapped != 0


def store_delete(Store store not None, object key):
    cdef Lease lease = share(store)
    cdef bytes name = utf8(key, "the key")
    cdef const char *k = name
    cdef int32_t existed = 0
    with nogil:
        check(tsr_store_delete(<tsr_store *>lease.ptr, k, &existed))
    return existed != 0
