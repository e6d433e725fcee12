# cython: language_level=3
"""Wraps each function of the C library for the typed modules of this package. Not for users.

`tsr_x_verb` is `x_verb` here. Status codes become exceptions, output arguments become results, and options become
keywords (None keeps the library's default). Functions that can block or log release the GIL. Each header of the library
has its own included file; failures, handles, arguments, callbacks, tensors and memory are shared by all of them.
"""
cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_CheckBuffer,
    PyObject_GetBuffer)
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t
from libc.string cimport memcpy, memset, strcpy

from libtessera cimport *

import atexit
import gc
import threading
import weakref
from collections.abc import Mapping
from operator import index
from struct import pack

from numpy import bool_, generic

from tessera.errors import InvalidArgument, InvalidState, TesseraError, Unsupported, _from_native, _status_of


cdef extern from "gate.h" nogil:
    int gate_enter()
    int gate_closed()
    void gate_leave()
    void gate_close()
    int watch_forks()
    unsigned current_generation()
    int thread_is_armed
    int thread_has_pending


cdef extern from "Python.h":
    void PyErr_SetInterrupt()
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1


include "failures.pxi"
include "handles.pxi"
include "arguments.pxi"
include "callbacks.pxi"
include "tensors.pxi"
include "options.pxi"
include "store.pxi"
include "comm.pxi"
include "memory.pxi"
include "cuda_arrays.pxi"
include "mesh.pxi"
include "plan.pxi"
include "turn.pxi"
include "layout.pxi"
include "random.pxi"
include "tp.pxi"
include "ddp.pxi"
include "fsdp.pxi"
include "pipeline.pxi"
include "optim.pxi"
include "grad_scaler.pxi"
include "loss_scale.pxi"
include "lr_schedule.pxi"
include "engine.pxi"
include "data.pxi"
include "metrics.pxi"
include "state.pxi"
include "storage.pxi"
include "checkpoint.pxi"

ABI_VERSION = TSR_ABI_VERSION

# ---------------------------------------------------------------- version.h


def abi_version():
    return tsr_abi_version()


def version():
    return tsr_version().decode()


def library_path():
    return tsr_library_path().decode("utf-8", "surrogateescape")


# ---------------------------------------------------------------- error.h


def status_name(int status):
    return tsr_status_name(status).decode()


# ---------------------------------------------------------------- log.h


def log_set_level(int level):
    with nogil:
        check(tsr_log_set_level(level))


def log_set_callback(object fn):
    cdef void *user_data = <void *>fn
    if fn is None:
        with nogil:
            check(tsr_log_set_callback(NULL, NULL, NULL))
        return
    Py_INCREF(fn)
    with nogil:
        check(tsr_log_set_callback(on_log, user_data, on_drop))


# ---------------------------------------------------------------- launch.h


def preempt_requested():
    return tsr_preempt_requested() != 0


def record_error(str message, str traceback):
    cdef list keep = []
    cdef const char *text = text_or_null(keep, message, "the message")
    cdef const char *trace = text_or_null(keep, traceback, "the traceback")
    with nogil:
        check(tsr_record_error(text, trace))


def record_error_about(str message, str traceback, int code, int peer):
    cdef list keep = []
    cdef const char *text = text_or_null(keep, message, "the message")
    cdef const char *trace = text_or_null(keep, traceback, "the traceback")
    with nogil:
        check(tsr_record_error_about(text, trace, code, peer))


if watch_forks() != 0:
    raise ImportError("tessera: pthread_atfork failed")
atexit.register(_at_exit)
