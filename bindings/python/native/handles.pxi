# Handles and their guards. Invariant: no C handle is used after its destroy, by two exclusive callers simultaneously,
# or in a forked child.

@cython.no_gc_clear
cdef class Handle:
    """A handle of the C library, and the objects that it uses.

    An object made from a parent's memory pins the parent. A pinned handle that is closed refuses calls immediately, but
    is destroyed only when the last pin is released, so no view and no optimizer outlives its memory.
    """

    cdef void *ptr
    cdef int calls          # calls in progress, on any thread
    cdef int pins           # living objects that use this object's memory
    cdef bint in_exclusive  # one of the calls is exclusive
    cdef bint shut          # closed by the user
    cdef bint borrowed      # another handle owns it: never destroyed here
    cdef unsigned generation
    cdef object keep        # what it uses but does not pin
    cdef list parents       # handles that it pins
    cdef object __weakref__

    def __cinit__(self):
        self.generation = current_generation()

    def __init__(self):
        raise TypeError(f"{type(self).__name__} objects are created by functions of tessera._core")

    def __del__(self):
        """Runs before the cyclic collector clears objects, while everything that the library uses still exists. A
        pinned handle is destroyed when its last pin is released, as if it had been closed."""
        if self.pins > 0:
            self.shut = True
        else:
            self.release()

    def __dealloc__(self):
        self.release()

    cdef void free(self) noexcept nogil:
        pass

    cdef void release(self) noexcept:
        """Destroys the handle, once. Not in a forked child: threads and segments belong to the parent."""
        cdef Handle parent
        cdef bint had_pending = thread_has_pending  # the exception of a call around this one
        if self.ptr == NULL:
            return
        if not self.borrowed and self.generation == current_generation():
            if gate_closed():
                # Keep the GIL: while the interpreter shuts down, a thread that gets it is ended where it waited, and if
                # that is a thread of PyTorch, the process ends.
                self.free()
            else:
                with nogil:
                    self.free()
            if thread_has_pending and not had_pending:
                redeliver()
        self.ptr = NULL
        if self.parents is not None:
            for parent in self.parents:
                unpin(parent)

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied: it belongs to its process")

    @property
    def closed(self):
        return self.shut or self.ptr == NULL

    @property
    def foreign(self):
        """Whether the handle was made before this process was forked."""
        return self.generation != current_generation()


cdef void unpin(Handle handle) noexcept:
    handle.pins -= 1
    if handle.pins == 0 and handle.shut:
        handle.release()


cdef object adopt(Handle handle, void *ptr, object keep=None, list parents=None):
    """Completes a new handle object with `ptr`."""
    cdef Handle parent
    handle.ptr = ptr
    handle.keep = keep
    handle.parents = parents
    if parents is not None:
        for parent in parents:
            parent.pins += 1
    return handle


cdef int retire(Handle handle) except -1:
    """Closes a handle. Closing it again does nothing."""
    if handle.shut or handle.ptr == NULL:
        return 0
    if handle.calls > 0 and handle.generation == current_generation():
        raise InvalidState(f"the {type(handle).__name__} is in use by another thread; close it after that call")
    handle.shut = True
    if handle.pins == 0:
        handle.release()
        handle.keep = None
    return 0


@cython.final
@cython.no_gc
cdef class Lease:
    """The right to use a handle's pointer during one call."""

    cdef Handle handle
    cdef void *ptr
    cdef bint exclusive

    def __dealloc__(self):
        if self.ptr != NULL:
            self.handle.calls -= 1
            if self.exclusive:
                self.handle.in_exclusive = False


cdef Lease borrow(Handle handle, bint exclusive):
    if handle.shut or handle.ptr == NULL:
        raise InvalidState(f"the {type(handle).__name__} is closed")
    if handle.generation != current_generation():
        raise InvalidState(f"the {type(handle).__name__} belongs to the parent of this forked process; create one here, "
                           "or start processes with the 'spawn' method")
    if exclusive and handle.in_exclusive:
        raise InvalidState(f"the {type(handle).__name__} is in use by another thread")
    arm()
    cdef Lease lease = Lease.__new__(Lease)
    lease.handle = handle
    lease.ptr = handle.ptr
    lease.exclusive = exclusive
    handle.calls += 1
    if exclusive:
        handle.in_exclusive = True
    return lease


cdef Lease use(Handle handle):
    """For calls whose handle argument is not const."""
    return borrow(handle, True)


cdef Lease share(Handle handle):
    """For calls whose handle argument is const: any number of threads may make them simultaneously."""
    return borrow(handle, False)
