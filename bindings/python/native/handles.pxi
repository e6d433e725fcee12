# Handles and their guards. The invariant: no C handle is used after its destroy, by two exclusive callers at once, or in
# a forked child.

@cython.no_gc_clear
cdef class Handle:
    """A handle of the C library, and what it borrows.

    What is made from a parent's memory pins the parent: a pinned handle that is closed refuses calls at once and is
    destroyed when the last pin goes, so that no view and no optimizer is left over freed memory.
    """

    cdef void *ptr
    cdef int calls          # calls that are inside now, on any thread
    cdef int pins           # living objects that use this one's memory
    cdef bint in_exclusive  # one of the calls needs the object for itself
    cdef bint shut          # closed by the user
    cdef bint borrowed      # another handle owns it: never destroyed here
    cdef unsigned generation
    cdef object keep        # what it borrows but does not pin
    cdef list parents       # handles that it pins
    cdef object __weakref__

    def __cinit__(self):
        self.generation = current_generation()

    def __init__(self):
        raise TypeError(f"{type(self).__name__} handles are made by functions of tessera._core")

    def __del__(self):
        """Before the cyclic collector clears what it has found: until here all that the library still uses is whole. One
        that is pinned is destroyed with its last pin, as if it had been closed."""
        if self.pins > 0:
            self.shut = True
        else:
            self.release()

    def __dealloc__(self):
        self.release()

    cdef void free(self) noexcept nogil:
        pass

    cdef void release(self) noexcept:
        """Destroy, once. In a forked child nothing is touched: threads and segments are the parent's."""
        cdef Handle parent
        if self.ptr == NULL:
            return
        if not self.borrowed and self.generation == current_generation():
            if gate_closed():
                # A thread that waits for the GIL while the interpreter ends is ended where it is when it gets its turn,
                # and one of PyTorch's ends the process then. So nobody gets it.
                self.free()
            else:
                with nogil:
                    self.free()
            if thread_has_pending:
                redeliver()
        self.ptr = NULL
        if self.parents is not None:
            for parent in self.parents:
                unpin(parent)

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} belongs to its process: it can be neither pickled nor copied")

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
    """Complete a new handle object around `ptr`."""
    cdef Handle parent
    handle.ptr = ptr
    handle.keep = keep
    handle.parents = parents
    if parents is not None:
        for parent in parents:
            parent.pins += 1
    return handle


cdef int retire(Handle handle) except -1:
    """The explicit destroy; closing twice is fine."""
    if handle.shut or handle.ptr == NULL:
        return 0
    if handle.calls > 0 and handle.generation == current_generation():
        raise InvalidState(f"the {type(handle).__name__} is in use by another thread: it cannot be closed now")
    handle.shut = True
    if handle.pins == 0:
        handle.release()
        handle.keep = None
    return 0


@cython.final
@cython.no_gc
cdef class Lease:
    """The right to use a handle's pointer for the length of one call."""

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
    """For calls whose handle argument is const: any number of threads at once."""
    return borrow(handle, False)
