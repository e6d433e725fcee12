/* The C part of the binding: the gate between library threads and the interpreter, and the guard after fork.
 *
 * A thread of the library may run a callback at any time, even while the interpreter shuts down, when requesting the
 * GIL would end that thread. So each callback passes the gate first. `gate_close`, called at exit without the GIL, lets
 * callbacks inside finish and rejects all others; what these would have released stays until the process ends. */
#ifndef TESSERA_PYTHON_GATE_H
#define TESSERA_PYTHON_GATE_H

#include <Python.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

/* Every CPython since 3.4 exports it, but the stable ABI includes it only from 3.15 on. */
PyAPI_FUNC(int) PyObject_CallFinalizerFromDealloc(PyObject*);

static atomic_int gate_is_closed;
static atomic_int gate_inside;

static int gate_enter(void) {
    atomic_fetch_add(&gate_inside, 1);
    if (!atomic_load(&gate_is_closed)) return 1;
    atomic_fetch_sub(&gate_inside, 1);
    return 0;
}

static void gate_leave(void) { atomic_fetch_sub(&gate_inside, 1); }

static int gate_closed(void) { return atomic_load(&gate_is_closed); }

static void gate_close(void) {
    const struct timespec pause = {0, 1000000};
    int turns;
    atomic_store(&gate_is_closed, 1);
    for (turns = 0; atomic_load(&gate_inside) != 0 && turns < 5000; ++turns) nanosleep(&pause, NULL);
}

/* Counts the forks above this process. A handle with another number was made in an ancestor. */
static atomic_uint fork_generation;

static void count_fork(void) {
    atomic_fetch_add(&fork_generation, 1);
    atomic_store(&gate_inside, 0);
}

static int watch_forks(void) { return pthread_atfork(NULL, NULL, count_fork); }

static unsigned current_generation(void) { return atomic_load_explicit(&fork_generation, memory_order_relaxed); }

/* Per thread: whether `arm` has run on it, and whether its interrupt callback caught an exception. */
static _Thread_local int thread_is_armed;
static _Thread_local int thread_has_pending;

#endif
