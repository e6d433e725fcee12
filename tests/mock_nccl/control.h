/* A libnccl.so.2 for machines without a GPU: NCCL's functions over memory that the ranks share, with simulated CUDA devices
 * (simulated_cuda/control.h). Ranks may be threads or processes of one host. As in NCCL, operations of a communicator run in the order
 * in which they were called, whatever their streams; ranks whose calls do not match wait for each other until they abort;
 * a rank that dies is noticed by nobody. Here a test says what goes wrong. All functions are for this process. */
#ifndef TESSERA_TESTS_MOCK_NCCL_H
#define TESSERA_TESTS_MOCK_NCCL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ncclGetVersion: TESSERA_MOCK_NCCL_VERSION, or 22907. Only what that version has is accepted. */

/* The next call of `symbol` ("ncclAllReduce"), after `calls` more that succeed, returns `result`. NULL: no function does. */
void mock_nccl_fail(const char* symbol, unsigned calls, int result);
/* How often `symbol` was called. */
unsigned mock_nccl_calls(const char* symbol);
/* The next operation or split of rank `rank` of any communicator never ends, until it is aborted. */
void mock_nccl_hang(int rank);
/* From now on ncclCommGetAsyncError of rank `rank` reports `result`; 0: no more. */
void mock_nccl_async_error(int rank, int result);
/* How often it has reported that since. */
int mock_nccl_reported(void);
/* Every call on a communicator that does not block stays in progress for `polls` questions after it. */
void mock_nccl_slow(unsigned polls);
/* From now on a collective, or a group of them, takes `latency_ns` and the time for its bytes (of all ranks) at `bytes_per_us`, by the
 * simulated clock of the devices, from when its last rank is there. 0 bytes: no time. Communicators have a link each. */
void mock_nccl_speed(uint64_t latency_ns, uint64_t bytes_per_us);
/* Operations of rank `rank` of any communicator that have not ended; those of graphs do not count. */
int mock_nccl_running(int rank);
/* Communicators that exist. */
int mock_nccl_communicators(void);

#ifdef __cplusplus
}
#endif

#endif
