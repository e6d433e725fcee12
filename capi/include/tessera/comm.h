/* Tessera: communicators (groups of ranks) and their collectives. */
#ifndef TESSERA_COMM_H
#define TESSERA_COMM_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options of a communicator. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_comm_options {
    size_t struct_size;
    int32_t timeout_ms; /* deadline of each collective; default 600000, or TESSERA_TIMEOUT_MS */
    int32_t spin_count; /* spins before a waiting rank yields the CPU; -1 (default): set from ranks and usable cores */
    /* "auto", "shm" or "gloo" for tensors on the CPU, and with "nccl" also for those on CUDA devices, in PyTorch's form:
     * "cpu:auto,cuda:nccl"; NULL (default): TESSERA_BACKEND or "auto" */
    const char *backend;
    const char *name; /* shown in messages and logs; NULL (default): "world" */
    /* how long a host that this rank waits for may leave heartbeats unanswered before it counts as lost (PEER_LOST);
     * 0: no heartbeats, only the deadline ends the wait; default 30000, or TESSERA_HEARTBEAT_TIMEOUT_MS */
    int32_t heartbeat_timeout_ms;
    /* with "nccl", the device of this rank's tensors; -1 (default): that of the parent in a split, else by the rank's place
     * among the ranks of its host, from 0 */
    int32_t cuda_device;
} tsr_comm_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_comm_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_options_init(tsr_comm_options *options, size_t struct_size);

/** Join the job that the environment describes: `tessera run` or torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
 *  mpirun (OMPI_*, PMI_*), srun (SLURM_*); without any of them, a communicator of one rank.
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the communicator
 *  @return TSR_OK, INVALID_ARGUMENT, TIMEOUT (a rank never joined), PEER_LOST (a rank of `tessera run` exited without
 *          joining), PERMISSION (token), IO, UNSUPPORTED, INTERRUPTED
 *  @threadsafety any thread  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_from_env(const tsr_comm_options *options, tsr_comm **out);

/** Join the `world_size` ranks that use the same store.
 *  @param store       borrowed until destroy of the communicator
 *  @param rank        0 to world_size - 1, different on every rank
 *  @param world_size  1 to 4096
 *  @param options     borrowed for the call; NULL: all defaults
 *  @param out         the communicator
 *  @return TSR_OK, INVALID_ARGUMENT, TIMEOUT (a rank never joined), MISMATCH, IO, UNSUPPORTED, INTERRUPTED
 *  @threadsafety any thread  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_create(tsr_store *store, int32_t rank, int32_t world_size,
                                                const tsr_comm_options *options, tsr_comm **out);

/** Split the ranks into groups: the ranks of one `color` form a group, ordered by `key`, then by rank. If one rank
 *  passes invalid options, all ranks get an error with the same code that names that rank; the communicator stays
 *  usable.
 *  @param comm     borrowed for the call; the new communicator does not need it
 *  @param color    negative: this rank joins no group and `out` becomes NULL
 *  @param key      order inside the group
 *  @param options  borrowed for the call; NULL: those of `comm`
 *  @param out      the communicator of this rank's group
 *  @return TSR_OK, INVALID_ARGUMENT, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_split(tsr_comm *comm, int32_t color, int32_t key,
                                               const tsr_comm_options *options, tsr_comm **out);

/** What ranks create together from a communicator. */
enum {
    TSR_CREATES_MODEL = 1,    /* a DDP, FSDP or tensor-parallel model, or an engine */
    TSR_CREATES_PIPELINE = 2, /* a pipeline */
    TSR_CREATES_MESH = 3,     /* tsr_mesh_create, tsr_mesh_flatten */
    TSR_CREATES_COMM = 4      /* tsr_comm_split, tsr_saver_create */
};
typedef int32_t tsr_creation;

/** Call instead of a collective creation on a rank that cannot take part in it, for example because it has no valid
 *  arguments: the creation fails on the other ranks with `code`, and the error names this rank and the reason. They
 *  would otherwise wait for it until their deadline. The communicator stays usable.
 *  @param comm      borrowed for the call; of a tensor-parallel model that of its dimension
 *  @param creation  a TSR_CREATES_ value: what the others create
 *  @param code      a TSR_E_ value; any other counts as TSR_E_INVALID_ARGUMENT
 *  @param reason    UTF-8, borrowed for the call; NULL: none
 *  @return never TSR_OK: `code` with the reason as its message, also if the others were not reached; INVALID_ARGUMENT
 *          (no such creation; nothing was sent), INVALID_STATE
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_refuse(tsr_comm *comm, tsr_creation creation, tsr_status code,
                                                const char *reason);

/** Continue with the remaining ranks: after a failure (PEER_LOST, TIMEOUT, ABORTED) the ranks that call this form a new
 *  communicator, numbered in the old order. Ranks that died or left are known to be gone; the call waits for the others
 *  until the deadline, then continues without them. All memory is new, so a rank that was only suspended does no harm
 *  when it resumes: its calls fail. Objects made from `comm` (communicators split from it, buffers, DDP objects,
 *  savers, meshes) can no longer be used, and their blocking calls fail with ABORTED; create them again from the new
 *  communicator and load a checkpoint, because a failed collective leaves its tensors half written. A communicator
 *  without an error is aborted first. The store at which the ranks met must still be served: a job whose rank 0 serves
 *  it cannot continue without rank 0, one under `tessera run` can. Without the store the call fails (immediately if the
 *  process that served it has exited), and the remaining ranks must exit too.
 *  @param comm     borrowed for the call; the caller still has to destroy it
 *  @param options  borrowed for the call; its timeout_ms is the deadline for missing ranks; NULL: those of `comm`
 *  @param out      the communicator of the remaining ranks
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (one rank without a store; finalized), ABORTED (the others continued
 *          without this rank), TIMEOUT (also: the store's host does not answer), PEER_LOST, IO (the store is gone),
 *          INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes, of the ranks that are left  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_shrink(tsr_comm *comm, const tsr_comm_options *options, tsr_comm **out);

/** Continue with all ranks, of which some are new processes: under `tessera run --on-loss replace`, after a failure
 *  (PEER_LOST, TIMEOUT, ABORTED), the ranks that live call this, and the process that the launcher starts for a dead rank
 *  calls tsr_comm_from_env() as any rank does. Together they make the new communicator, with the rank numbers and the
 *  world size of the old one. The call waits for all of them until the deadline; if another rank dies meanwhile, its
 *  replacement is waited for too. A process that the launcher has replaced, and that lives nevertheless, gets ABORTED.
 *  All memory is new. Objects made from `comm` can no longer be used, as after tsr_comm_shrink(); create them again and
 *  load a checkpoint. A communicator without an error is aborted first.
 *  @param comm     borrowed for the call, made by tsr_comm_from_env() under `tessera run --on-loss replace`, or by this
 *                  function; the caller still has to destroy it
 *  @param options  borrowed for the call; its timeout_ms is the deadline of the call; NULL: those of `comm`
 *  @param out      the communicator of all ranks
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (another kind of communicator; finalized), ABORTED (this process was
 *          replaced), TIMEOUT (the message names the ranks that did not come), PEER_LOST (a rank has ended, and is not
 *          replaced), MISMATCH (the ranks' backends or world sizes differ), UNSUPPORTED, VERSION, CUDA, NCCL, NO_MEMORY,
 *          IO (the store is gone), INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes, with tsr_comm_from_env() in new processes  @blocking yes
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_grow(tsr_comm *comm, const tsr_comm_options *options, tsr_comm **out);

/** Wait for all ranks and all issued work; no collective may follow.
 *  @param comm  borrowed for the call
 *  @return TSR_OK, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH (a rank makes another call), INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_finalize(tsr_comm *comm);

/** Fail every pending and later operation with ABORTED, on this rank and on its peers. Idempotent.
 *  @param comm    borrowed for the call
 *  @param reason  UTF-8, sent to the peers; may be NULL
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_abort(const tsr_comm *comm, const char *reason);

/** Leave the communicator and abort what is still running. NULL is ignored. Works, buffers and other objects made from
 *  it stay valid handles, but their calls fail.
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

/** The transport in use: "shm", "gloo", "hierarchical" (several hosts, some with several ranks) or "self" (one rank).
 *  @param comm  borrowed for the call
 *  @param name  out: borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_transport(const tsr_comm *comm, const char **name);

/** Set the deadline of the operations that this rank issues from now on, in place of the option. Operations already
 *  issued keep theirs, so a single operation gets its own deadline by setting it, issuing the operation and setting it
 *  back. Not collective: each rank has its own deadline, and the first one to pass fails the communicator on all ranks.
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

/** The error that failed the communicator; NULL if there is none. It is detected by a call or by a peer's death.
 *  @param comm   borrowed for the call
 *  @param error  out: a detached error, to be freed by tsr_error_destroy, or NULL
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_error(const tsr_comm *comm, tsr_error **error);

/** Write this rank's flight record: the last 1,024 operations of the communicator with their times, as JSON lines,
 *  which `tessera trace` reads. If TESSERA_TRACE_DIR is set (`tessera run --trace-dir`), every communicator writes its
 *  own into that directory when it fails, otherwise when it ends.
 *  @param comm  borrowed for the call
 *  @param path  UTF-8, the file to write; an existing file is replaced
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, IO, PERMISSION
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_write_trace(const tsr_comm *comm, const char *path);

/** Reduce `n` tensors over the ranks, in place, in the order given; every rank gets the same bits.
 *  @param comm     borrowed until the work is done
 *  @param tensors  n tensors of one dtype that share no memory, in place, borrowed until the work is done
 *  @param n        the same on every rank
 *  @param op       a TSR_REDUCE_ value
 *  @param stream   of CUDA tensors; NULL: the device's default stream, and on the CPU. While it is captured into a CUDA
 *                  graph, only calls without work are possible, in every collective: INVALID_STATE
 *  @param work     out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_all_reduce(tsr_comm *comm, const tsr_tensor *tensors, size_t n,
                                                    tsr_reduce_op op, void *stream, tsr_work **work);

/** Reduce `input` and leave the r-th of world-size equal parts of the result on rank r.
 *  @param comm    borrowed until the work is done
 *  @param input   borrowed until the work is done; elements = world size * output elements
 *  @param output  borrowed until the work is done; may be the r-th part of input
 *  @param op      a TSR_REDUCE_ value
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_reduce_scatter(tsr_comm *comm, const tsr_tensor *input,
                                                        const tsr_tensor *output, tsr_reduce_op op, void *stream,
                                                        tsr_work **work);

/** Concatenate all ranks' `input` in rank order.
 *  @param comm    borrowed until the work is done
 *  @param input   borrowed until the work is done
 *  @param output  borrowed until the work is done; elements = world size * input elements; input may be its r-th part
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_all_gather(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output,
                                                    void *stream, tsr_work **work);

/** Several reduce-scatters as one operation: like tsr_comm_reduce_scatter for each pair, but the ranks synchronise once
 *  and small tensors are sent together.
 *  @param comm     borrowed until the work is done
 *  @param inputs   n tensors, borrowed until the work is done
 *  @param outputs  n tensors of the same dtype, borrowed until the work is done; inputs[i] has world size * the
 *                  elements of outputs[i], which may be its r-th part; otherwise no two tensors share memory
 *  @param n        at least 1, the same on every rank
 *  @param op       a TSR_REDUCE_ value
 *  @param stream   of CUDA tensors; NULL: the device's default stream, and on the CPU
 *  @param work     out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_reduce_scatter_coalesced(tsr_comm *comm, const tsr_tensor *inputs,
                                                                  const tsr_tensor *outputs, size_t n, tsr_reduce_op op,
                                                                  void *stream, tsr_work **work);

/** Several all-gathers as one operation: like tsr_comm_all_gather for each pair, but the ranks synchronise once and
 *  small tensors are sent together.
 *  @param comm     borrowed until the work is done
 *  @param inputs   n tensors, borrowed until the work is done
 *  @param outputs  n tensors of the same dtype, borrowed until the work is done; outputs[i] has world size * the
 *                  elements of inputs[i], which may be its r-th part; otherwise no two tensors share memory
 *  @param n        at least 1, the same on every rank
 *  @param stream   of CUDA tensors; NULL: the device's default stream, and on the CPU
 *  @param work     out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_all_gather_coalesced(tsr_comm *comm, const tsr_tensor *inputs,
                                                              const tsr_tensor *outputs, size_t n, void *stream,
                                                              tsr_work **work);

/** Gather inputs of different lengths: outputs[r] receives rank r's input.
 *  @param comm     borrowed until the work is done
 *  @param input    borrowed until the work is done
 *  @param outputs  world-size tensors, borrowed until the work is done; the same lengths on every rank
 *  @param stream   of CUDA tensors; NULL: the device's default stream, and on the CPU
 *  @param work     out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_all_gather_v(tsr_comm *comm, const tsr_tensor *input,
                                                      const tsr_tensor *outputs, void *stream, tsr_work **work);

/** Copy the root's tensors to every rank.
 *  @param comm     borrowed until the work is done
 *  @param tensors  n tensors of one dtype that share no memory, in place, borrowed until the work is done
 *  @param n        the same on every rank
 *  @param root     a rank
 *  @param stream   of CUDA tensors; NULL: the device's default stream, and on the CPU
 *  @param work     out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_broadcast(tsr_comm *comm, const tsr_tensor *tensors, size_t n, int32_t root,
                                                   void *stream, tsr_work **work);

/** Reduce `input`; only the root gets the result.
 *  @param comm    borrowed until the work is done
 *  @param input   borrowed until the work is done
 *  @param output  borrowed until the work is done; used on the root only, NULL elsewhere; may be input
 *  @param op      a TSR_REDUCE_ value
 *  @param root    a rank
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_reduce(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output,
                                                tsr_reduce_op op, int32_t root, void *stream, tsr_work **work);

/** Concatenate all ranks' `input` on the root.
 *  @param comm    borrowed until the work is done
 *  @param input   borrowed until the work is done
 *  @param output  borrowed until the work is done; on the root: world size * input elements; NULL elsewhere
 *  @param root    a rank
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_gather(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output,
                                                int32_t root, void *stream, tsr_work **work);

/** Send the r-th of world-size equal parts of the root's `input` to rank r.
 *  @param comm    borrowed until the work is done
 *  @param input   borrowed until the work is done; on the root: world size * output elements; NULL elsewhere
 *  @param output  borrowed until the work is done
 *  @param root    a rank
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_scatter(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output,
                                                 int32_t root, void *stream, tsr_work **work);

/** Send the r-th of world-size equal parts of `input` to rank r; parts arrive in rank order.
 *  @param comm    borrowed until the work is done
 *  @param input   borrowed until the work is done
 *  @param output  borrowed until the work is done; as many elements as input
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_all_to_all(tsr_comm *comm, const tsr_tensor *input, const tsr_tensor *output,
                                                    void *stream, tsr_work **work);

/** Send a tensor to `peer`, which receives it with the same tag. Not collective. Whether the call returns before the
 *  peer receives depends on the transport and the size; do not rely on either.
 *  @param comm    borrowed until the work is done
 *  @param tensor  borrowed until the work is done
 *  @param peer    a rank other than this one
 *  @param tag     0 to 2^31 - 1
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective no  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_send(tsr_comm *comm, const tsr_tensor *tensor, int32_t peer, int32_t tag,
                                              void *stream, tsr_work **work);

/** Receive a tensor from `peer`; dtype and element count must match those sent. Not collective. Between ranks of one
 *  host, tensors that `peer` sent earlier with other tags are buffered until they are received, up to 64 MiB; beyond
 *  that the call fails with NO_MEMORY, which names peer and tag.
 *  @param comm    borrowed until the work is done
 *  @param tensor  borrowed until the work is done
 *  @param peer    a rank other than this one
 *  @param tag     0 to 2^31 - 1
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, NO_MEMORY, UNSUPPORTED,
 *          INTERRUPTED
 *  @threadsafety exclusive comm  @collective no  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_recv(tsr_comm *comm, const tsr_tensor *tensor, int32_t peer, int32_t tag,
                                              void *stream, tsr_work **work);

/** Wait until every rank has called it.
 *  @param comm  borrowed until the work is done
 *  @param work  out; NULL: the call returns when all ranks have called it
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_comm_barrier(tsr_comm *comm, tsr_work **work);

/** Wait until the work is done.
 *  @param work        borrowed for the call
 *  @param timeout_ms  negative: until the operation's own deadline
 *  @return TSR_OK, NOT_READY (timeout_ms passed; the work continues), INTERRUPTED, or the operation's error
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_work_wait(const tsr_work *work, int32_t timeout_ms);

/** Make a stream wait for the work, and return: what the stream gets later sees the result. If the operation is not on a
 *  device, or is still queued behind others, the call waits as tsr_work_wait does.
 *  @param work        borrowed for the call
 *  @param stream      CUDA stream of the tensors' device; NULL: its default stream
 *  @param timeout_ms  of a wait; negative: until the operation's own deadline
 *  @return TSR_OK, INVALID_ARGUMENT (a stream of another device), NOT_READY (timeout_ms passed; the work continues), CUDA,
 *          INTERRUPTED, or the operation's error
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_work_order(const tsr_work *work, void *stream, int32_t timeout_ms);

/** Whether the work is done, successfully or not.
 *  @param work  borrowed for the call
 *  @param done  out: 1 or 0
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_work_test(const tsr_work *work, tsr_flag *done);

/** The error of finished work.
 *  @param work   borrowed for the call
 *  @param error  out: a detached error, to be freed by tsr_error_destroy; NULL if the work succeeded
 *  @return TSR_OK, NOT_READY, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_work_error(const tsr_work *work, tsr_error **error);

/** The first of the two fences of a background save, as separate work: done when all of the state is copied, so that
 *  anyone may write to it. Without copy_on_demand that is before tsr_saver_save_async returns. The second fence is the
 *  save's own work: the checkpoint is durable. The first never finishes after the second; if the save fails earlier,
 *  the first gets the save's error. Its callback may also run inside a step, destroy or load that copies the last part.
 *  @param work    from tsr_saver_save_async; borrowed for the call
 *  @param staged  out: work, to be freed by tsr_work_destroy; every call returns the same work, with one callback
 *  @return TSR_OK, INVALID_ARGUMENT (also: work of any other call), INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_work_staged(const tsr_work *work, tsr_work **staged);

/** Called once when the work is done, on a library thread or inside tsr_work_on_done. `status` is its result. It must
 *  not block or call a function of the communicator. */
typedef void (*tsr_work_fn)(tsr_status status, void *user_data);

/** Register the completion callback; one per work.
 *  @param work       borrowed for the call
 *  @param fn         called exactly once
 *  @param user_data  passed to fn
 *  @param destroy    may be NULL; called on user_data after fn
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (a callback is already registered)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_work_on_done(const tsr_work *work, tsr_work_fn fn, void *user_data,
                                                 tsr_destroy_fn destroy);

/** Free the handle; the work continues, and what it borrowed must live until it is done. NULL is ignored.
 *  @param work  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_work_destroy(tsr_work *work);

#ifdef __cplusplus
}
#endif
#endif
