/* Tessera: the ranks of a group and their collectives. */
#ifndef TESSERA_COMM_H
#define TESSERA_COMM_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options of a communicator. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_comm_options {
    size_t struct_size;
    int32_t timeout_ms; /* deadline of each collective; default 600000, or TESSERA_TIMEOUT_MS */
    int32_t spin_count; /* busy turns before a waiting rank yields; -1 (default): from ranks and usable cores */
    const char
        *backend; /* NULL (default): TESSERA_BACKEND or "auto"; "shm", "gloo", or as PyTorch writes it, "cpu:gloo" */
    const char *name;             /* in messages and logs; NULL (default): "world" */
    int32_t heartbeat_timeout_ms; /* how long another host that is waited for may give no sign of life, though it is
                                     asked, before it counts as lost (PEER_LOST); 0: it is not asked, and only the
                                     deadline ends the wait; default 30000, or TESSERA_HEARTBEAT_TIMEOUT_MS */
} tsr_comm_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_comm_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_options_init(tsr_comm_options *options, size_t struct_size);

/** Join the job that the environment describes: `tessera run` or torchrun (RANK, WORLD_SIZE, MASTER_ADDR,
 *  MASTER_PORT), mpirun (OMPI_*, PMI_*), srun (SLURM_*); with none of them a communicator of one rank.
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the communicator
 *  @return TSR_OK, INVALID_ARGUMENT, TIMEOUT (a rank never came), PEER_LOST (a rank of `tessera run` ended without coming),
 *          PERMISSION (token), IO, UNSUPPORTED, INTERRUPTED
 *  @threadsafety any thread  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_from_env(const tsr_comm_options *options, tsr_comm **out);

/** Join `world_size` ranks that use the same store.
 *  @param store       borrowed until destroy of the communicator
 *  @param rank        0 to world_size - 1, each once
 *  @param world_size  1 to 4096
 *  @param options     borrowed for the call; NULL: all defaults
 *  @param out         the communicator
 *  @return TSR_OK, INVALID_ARGUMENT, TIMEOUT (a rank never came), MISMATCH, IO, UNSUPPORTED, INTERRUPTED
 *  @threadsafety any thread  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_create(tsr_store *store, int32_t rank, int32_t world_size,
                                                const tsr_comm_options *options, tsr_comm **out);

/** Divide the ranks into groups: those of one `color` form one, ordered by `key`, then by rank. Options that one rank
 *  alone gives badly are an error of the same code on all, which names that rank; the communicator can be used on.
 *  @param comm     borrowed for the call; the new communicator does not need it
 *  @param color    negative: this rank joins no group and `out` becomes NULL
 *  @param key      order inside the group
 *  @param options  borrowed for the call; NULL: those of `comm`
 *  @param out      the communicator of this rank's group
 *  @return TSR_OK, INVALID_ARGUMENT, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_split(tsr_comm *comm, int32_t color, int32_t key,
                                               const tsr_comm_options *options, tsr_comm **out);

/** Go on with the ranks that are left: after a failure (PEER_LOST, TIMEOUT, ABORTED) those who call it form a new
 *  communicator, numbered in the old one's order. Ranks that died, or left, are known to be gone; for others it waits until
 *  the deadline, then goes on without them. All memory is new, so that a rank which was only stopped harms nobody when it
 *  wakes up: its calls fail. What was made from `comm` (communicators split from it, buffers, DDP objects, savers, meshes)
 *  is out of use, and calls of it that wait fail with ABORTED; make it anew from the new one, and load a checkpoint, since a
 *  collective that failed left its tensors half done. A communicator that is well is aborted first. The store that the ranks
 *  met at must still be served: a job whose rank 0 serves it cannot go on without rank 0, one under `tessera run` can.
 *  Without it the call fails, at once where the process that served it has ended, and the ranks that are left have to end
 *  too.
 *  @param comm     borrowed for the call; to be destroyed by the caller, as ever
 *  @param options  borrowed for the call; its timeout_ms is the deadline for ranks that do not come; NULL: those of `comm`
 *  @param out      the communicator of those that are left
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (one rank without a store; finalized), ABORTED (the others went on without
 *          this rank), TIMEOUT (also: the store's host is silent), PEER_LOST, IO (the store is gone), INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes, of the ranks that are left  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_shrink(tsr_comm *comm, const tsr_comm_options *options, tsr_comm **out);

/** Wait for all ranks and all issued work; no collective may follow.
 *  @param comm  borrowed for the call
 *  @return TSR_OK, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH (a rank calls something else), INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_finalize(tsr_comm *comm);

/** Fail every waiting and later operation, here and at the peers, with ABORTED. Idempotent.
 *  @param comm    borrowed for the call
 *  @param reason  UTF-8, told to the peers; may be NULL
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_abort(const tsr_comm *comm, const char *reason);

/** Leave the communicator: aborts what is still running. NULL is taken. Works, buffers and other objects made
 *  from it stay valid handles; their calls fail.
 *  @param comm  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_comm_destroy(tsr_comm *comm);

/** This rank's number.
 *  @param comm  borrowed for the call
 *  @param rank  out: 0 to world size - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_rank(const tsr_comm *comm, int32_t *rank);

/** The number of ranks.
 *  @param comm        borrowed for the call
 *  @param world_size  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_world_size(const tsr_comm *comm, int32_t *world_size);

/** The transport in use: "shm", "gloo", "hierarchical" (several hosts, on some several ranks) or "self" (one rank).
 *  @param comm  borrowed for the call
 *  @param name  out: borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_transport(const tsr_comm *comm, const char **name);

/** Set the deadline of the operations that this rank issues from here on, instead of the option's; those that were issued
 *  keep theirs, so that one operation gets its own by setting it, issuing that, and setting it back. Not collective: each
 *  rank has its own, and the first that passes fails the communicator on all.
 *  @param comm        borrowed for the call
 *  @param timeout_ms  of each operation, counted from when it starts; positive
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_set_timeout(const tsr_comm *comm, int32_t timeout_ms);

/** The deadline of an operation issued now.
 *  @param comm        borrowed for the call
 *  @param timeout_ms  out: milliseconds
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_timeout(const tsr_comm *comm, int32_t *timeout_ms);

/** The error that failed the communicator; NULL while it is well. Noticed by a call or by a peer's death.
 *  @param comm   borrowed for the call
 *  @param error  out: a detached error, to be freed by tsr_error_destroy, or NULL
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_error(const tsr_comm *comm, tsr_error **error);

/** Write this rank's flight record: the last 1,024 operations of the communicator with their times, as JSON lines, which
 *  `tessera trace` reads. Where TESSERA_TRACE_DIR is set (`tessera run --trace-dir`) every communicator writes its own
 *  into that directory when it fails, or else at its end.
 *  @param comm  borrowed for the call
 *  @param path  UTF-8, the file to write; one that is there is replaced whole
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, IO, PERMISSION
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_write_trace(const tsr_comm *comm, const char *path);

/** Reduce `n` tensors over the ranks, in place, in the order given; every rank gets the same bits.
 *  @param comm     borrowed until the work is done
 *  @param tensors  n tensors of one dtype that share no memory, in place, borrowed until the work is done
 *  @param n        the same on every rank
 *  @param op       a TSR_REDUCE_ value
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_all_reduce(tsr_comm *comm, const tsr_tensor *tensors, size_t n,
                                                    tsr_reduce_op op, void *stream, tsr_work **work);

/** Reduce `input` and leave the r-th of world-size equal parts on rank r.
 *  @param comm     borrowed until the work is done
 *  @param input    borrowed until the work is done; elements = world size * output elements
 *  @param output   borrowed until the work is done; may be the r-th part of input
 *  @param op       a TSR_REDUCE_ value
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_reduce_scatter(tsr_comm *comm, const tsr_tensor *input,
                                                        const tsr_tensor *output, tsr_reduce_op op, void *stream,
                                                        tsr_work **work);

/** Concatenate all ranks' `input` in rank order.
 *  @param comm     borrowed until the work is done
 *  @param input    borrowed until the work is done
 *  @param output   borrowed until the work is done; elements = world size * input elements; input may be its r-th part
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_all_gather(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output,
                                                    void *stream, tsr_work **work);

/** Several reduce-scatters as one operation: as tsr_comm_reduce_scatter of each pair, but the ranks meet once, and small
 *  tensors travel together.
 *  @param comm     borrowed until the work is done
 *  @param inputs   n tensors, borrowed until the work is done
 *  @param outputs  n tensors of the same dtype, borrowed until the work is done; inputs[i] has world size * the elements of
 *                  outputs[i], which may be its r-th part; else no two tensors share memory
 *  @param n        at least 1, the same on every rank
 *  @param op       a TSR_REDUCE_ value
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_reduce_scatter_coalesced(tsr_comm *comm, const tsr_tensor *inputs,
                                                                  const tsr_tensor *outputs, size_t n, tsr_reduce_op op,
                                                                  void *stream, tsr_work **work);

/** Several all-gathers as one operation: as tsr_comm_all_gather of each pair, but the ranks meet once, and small tensors
 *  travel together.
 *  @param comm     borrowed until the work is done
 *  @param inputs   n tensors, borrowed until the work is done
 *  @param outputs  n tensors of the same dtype, borrowed until the work is done; outputs[i] has world size * the elements
 *                  of inputs[i], which may be its r-th part; else no two tensors share memory
 *  @param n        at least 1, the same on every rank
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_all_gather_coalesced(tsr_comm *comm, const tsr_tensor *inputs,
                                                              const tsr_tensor *outputs, size_t n, void *stream,
                                                              tsr_work **work);

/** Gather inputs of different lengths: outputs[r] receives rank r's input.
 *  @param comm     borrowed until the work is done
 *  @param input    borrowed until the work is done
 *  @param outputs  world-size tensors, borrowed until the work is done; the same lengths on every rank
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_all_gather_v(tsr_comm *comm, const tsr_tensor *input,
                                                      const tsr_tensor *outputs, void *stream, tsr_work **work);

/** Give every rank the root's tensors.
 *  @param comm     borrowed until the work is done
 *  @param tensors  n tensors of one dtype that share no memory, in place, borrowed until the work is done
 *  @param n        the same on every rank
 *  @param root     a rank
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_broadcast(tsr_comm *comm, const tsr_tensor *tensors, size_t n, int32_t root,
                                                   void *stream, tsr_work **work);

/** Reduce `input`; the result is on the root alone.
 *  @param comm     borrowed until the work is done
 *  @param input    borrowed until the work is done
 *  @param output   borrowed until the work is done; read on the root only, NULL elsewhere; may be input
 *  @param op       a TSR_REDUCE_ value
 *  @param root     a rank
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_reduce(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output,
                                                tsr_reduce_op op, int32_t root, void *stream, tsr_work **work);

/** Concatenate all ranks' `input` on the root.
 *  @param comm     borrowed until the work is done
 *  @param input    borrowed until the work is done
 *  @param output   borrowed until the work is done; on the root: world size * input elements; NULL elsewhere
 *  @param root     a rank
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_gather(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output,
                                                int32_t root, void *stream, tsr_work **work);

/** Give rank r the r-th of world-size equal parts of the root's `input`.
 *  @param comm     borrowed until the work is done
 *  @param input    borrowed until the work is done; on the root: world size * output elements; NULL elsewhere
 *  @param output   borrowed until the work is done
 *  @param root     a rank
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_scatter(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output,
                                                 int32_t root, void *stream, tsr_work **work);

/** Send the r-th of world-size equal parts of `input` to rank r; parts arrive in rank order.
 *  @param comm     borrowed until the work is done
 *  @param input    borrowed until the work is done
 *  @param output   borrowed until the work is done; as many elements as input
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_all_to_all(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output,
                                                    void *stream, tsr_work **work);

/** Send a tensor to `peer`, which receives it with the same tag. Not collective. Whether it returns before the peer
 *  receives depends on the transport and the size: rely on neither.
 *  @param comm     borrowed until the work is done
 *  @param tensor   borrowed until the work is done
 *  @param peer     a rank other than this one
 *  @param tag      0 to 2^31 - 1
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective no  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_send(tsr_comm *comm, const tsr_tensor *tensor, int32_t peer, int32_t tag,
                                              void *stream, tsr_work **work);

/** Receive a tensor from `peer`; dtype and element count must be those sent. Not collective. Between ranks of one host,
 *  what `peer` has sent before with other tags is kept until it is received, 64 MiB at most: NO_MEMORY names peer and tag.
 *  @param comm     borrowed until the work is done
 *  @param tensor   borrowed until the work is done
 *  @param peer     a rank other than this one
 *  @param tag      0 to 2^31 - 1
 *  @param stream   CUDA stream, or NULL on the CPU
 *  @param work     out, may be NULL: then the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, NO_MEMORY, UNSUPPORTED,
 *    INTERRUPTED
 *  @threadsafety exclusive comm  @collective no  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_recv(tsr_comm *comm, const tsr_tensor *tensor, int32_t peer, int32_t tag,
                                              void *stream, tsr_work **work);

/** Return when every rank has called it.
 *  @param comm  borrowed until the work is done
 *  @param work  out, may be NULL: then the call returns when all ranks have come
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_barrier(tsr_comm *comm, tsr_work **work);

/** Wait until the work is done.
 *  @param work        borrowed for the call
 *  @param timeout_ms  negative: until the operation's own deadline
 *  @return TSR_OK, NOT_READY (timeout_ms passed; the work lives on), INTERRUPTED, or the operation's error
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_work_wait(const tsr_work *work, int32_t timeout_ms);

/** Whether the work is done, well or not.
 *  @param work  borrowed for the call
 *  @param done  out: 1 or 0
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_work_test(const tsr_work *work, tsr_flag *done);

/** The error of work that is done.
 *  @param work   borrowed for the call
 *  @param error  out: a detached error, to be freed by tsr_error_destroy; NULL if the work went well
 *  @return TSR_OK, NOT_READY, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_work_error(const tsr_work *work, tsr_error **error);

/** The first of the two fences of a save in the background, as work of its own: done when nothing of the state is left to
 *  copy, so that anybody may write there. Without copy_on_demand that is before tsr_saver_save_async returns. The save's
 *  work itself is the second: the checkpoint is durable. The first is never done after it; of a save that fails earlier it
 *  has the save's error. Its callback may also run inside a step, destroy or load that copies the last of it.
 *  @param work    of tsr_saver_save_async; borrowed for the call
 *  @param staged  out: work, to be forgotten by tsr_work_destroy; it is the same at each call, with one callback
 *  @return TSR_OK, INVALID_ARGUMENT (also: work of anything else), INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_work_staged(const tsr_work *work, tsr_work **staged);

/** Called once when the work is done, on a library thread or inside tsr_work_on_done. `status` is its result.
 *  It must neither block nor call a function of the communicator. */
typedef void (*tsr_work_fn)(tsr_status status, void *user_data);

/** Register the completion callback; one per work.
 *  @param work       borrowed for the call
 *  @param fn         called exactly once
 *  @param user_data  passed to fn
 *  @param destroy    may be NULL; called on user_data after fn
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (there is one already)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_work_on_done(const tsr_work *work, tsr_work_fn fn, void *user_data,
                                                 tsr_destroy_fn destroy);

/** Forget the work; it goes on, and what it borrowed must live until it is done. NULL is taken.
 *  @param work  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_work_destroy(tsr_work *work);

#ifdef __cplusplus
}
#endif
#endif
