# turn.h: one rank works while the others wait.

cdef class Turn(Handle):
    cdef Comm comm

    cdef void free(self) noexcept nogil:
        tsr_turn_destroy(<tsr_turn *>self.ptr)


def turn_create(Comm comm not None, object rank, object timeout_ms):
    cdef Lease lease = use(comm)
    cdef tsr_turn *out = NULL
    cdef int32_t whose = int32(rank, "the rank"), patience = int32(timeout_ms, "the timeout in ms")
    check(tsr_turn_create(<tsr_comm *>lease.ptr, whose, patience, &out))
    cdef Turn turn = adopt(Turn.__new__(Turn), out, comm)
    turn.comm = comm
    return turn


def turn_progress(Turn turn not None, object done, object total):
    cdef Lease comm = use(turn.comm)
    cdef Lease lease = use(turn)
    cdef int64_t made = int64(done, "the steps done"), of = int64(total, "the total of steps")
    check(tsr_turn_progress(<tsr_turn *>lease.ptr, made, of))


def turn_end(Turn turn not None, str failure):
    cdef Lease comm = use(turn.comm)
    cdef Lease lease = use(turn)
    cdef bytes encoded = None if failure is None else failure.encode("utf-8", "replace").replace(b"\0", b" ")
    cdef const char *text = NULL if encoded is None else <const char *>encoded
    with nogil:
        check(tsr_turn_end(<tsr_turn *>lease.ptr, text))


def turn_destroy(Turn turn not None):
    retire(turn)
