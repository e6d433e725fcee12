/* Simulated CUDA devices: what a test sets and asks besides the driver's own functions. The library of that name is a
 * libcuda.so.1 (driver.cc), so that all code above the driver runs on machines without a GPU as it runs with one.
 *
 * A stream is a thread that runs its operations in order. Memory of a device is mapped twice: nobody may touch the addresses
 * that a program sees (a fault), only operations on streams reach the bytes, through the second mapping. Which address is not
 * of a live allocation when an operation runs makes the device fail for good, as an illegal address does on a GPU. Copies
 * from and to memory of the host that is pinned run beside the host; other memory of the host is read before the call
 * returns, and written before it returns. A module's kernels are those of src/kernels, compiled for the host (kernels.cc); the
 * plug-in beside this library, libtessera_cuda.so, holds an image that says so, and no code. */
#ifndef TESSERA_TESTS_SIMULATED_CUDA_H
#define TESSERA_TESTS_SIMULATED_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The number of devices, before the first use: TESSERA_SIMULATED_CUDA_DEVICES, or 2. */

/* Each operation of a stream first waits a random time up to `us` microseconds, drawn from `seed`. 0: none. */
void simulated_cuda_delay(unsigned us, uint64_t seed);
/* The memory of each device in bytes; 0: 16 GiB. */
void simulated_cuda_capacity(size_t bytes);
/* The next call of the driver's function `symbol` ("cuMemAlloc_v2"), after `calls` more that succeed, fails with `error`.
 * NULL: no function does. */
void simulated_cuda_fail(const char* symbol, unsigned calls, int error);
/* Every later call and operation on the device fails with `error`; 0 ends this, as only a new process does on a GPU. */
void simulated_cuda_break(int device, int error);
/* Of all devices together: bytes and pieces of memory that are allocated (of ranges of addresses, too); streams, events and pinned ranges that exist. */
typedef struct simulated_cuda_usage {
    size_t bytes;
    size_t allocations;
    size_t streams;
    size_t events;
    size_t pinned;
} simulated_cuda_usage;
void simulated_cuda_used(simulated_cuda_usage* usage);

/* For programs without a GPU's tools, in any language: memory of a device (NULL: none left), and one float of it. These wait for
 * all that the device has to do. In Java they are natives of a class OnDevice. */
void* simulated_cuda_allocate(int device, size_t size);
void simulated_cuda_store(void* address, float value);
float simulated_cuda_load(const void* address);

/* For code that plays a kernel. Runs `body` on `stream`, in order (NULL: the default stream of the calling thread's context);
 * what it returns, if not 0, is an error that breaks the device. */
int simulated_cuda_launch(void* stream, int (*body)(void*), void* argument);
/* The same, and calls `ended` once that is over, or will not run because the device has failed; not if this fails. */
int simulated_cuda_launch_until(void* stream, int (*body)(void*), void (*ended)(void*), void* argument);
/* Whether a graph is being captured from the stream. An operation then runs whenever the graph does, and `ended` is called with
 * the graph's end. */
int simulated_cuda_captures(void* stream);
/* A clock for schedules. Each stream has its own; it stands still but in operations that call the following, and moves up to what
 * the stream waits for. Whether cuEventElapsedTime is by that clock; by default it is by the host's. */
void simulated_cuda_use_simulated_clock(int yes);
/* In an operation: the time of its stream, in nanoseconds, and that it ends no earlier. */
uint64_t simulated_cuda_now(void);
void simulated_cuda_take_until(uint64_t ns);
/* Where an operation reaches the bytes at an address of a device; NULL if `size` bytes there are not allocated. Memory of the
 * host is where it is. Only while an operation runs. */
void* simulated_cuda_bytes(const void* address, size_t size);

#ifdef __cplusplus
}
#endif

#endif
