/* Tessera: pipeline-parallel training. The model is cut into stages, each rank has one or more of them, and a batch
 * passes through them in micro-batches. The trainer computes, in callbacks; the library calls them in the order of a
 * schedule, moves activations and gradients between the stages, and keeps what a backward needs.
 *
 * A step: tsr_pipeline_step with the batch on the rank of stage 0 and the targets on the rank of the last stage. The
 * trainer's callbacks run on the calling thread; gradients of parameters are the trainer's own and add up over the
 * micro-batches. Then the optimizer's step. Within a stage, a tsr_ddp or tsr_fsdp over the ranks that have the same
 * stage works as usual: leave its synchronisation off until a call says is_last_backward.
 *
 * With the option on_device, activations and gradients are on the CUDA device of a communicator with the backend
 * "cpu:auto,cuda:nccl", and everything is in the order of one stream of the trainer (tsr_pipeline_set_stream): a callback
 * puts its work on that stream and returns. A step waits for the device only when this rank has sent 16 tensors and more since
 * it last received one from that peer, and when memory is freed that no recent step has used. What fails on the device after a step
 * has returned is the result of a later call. An operation on the device fails when it has not ended within the
 * communicator's timeout after its launch. */
#ifndef TESSERA_PIPELINE_H
#define TESSERA_PIPELINE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The order in which a rank computes. P: number of ranks; m: number of micro-batches. Stage i of a loop is on rank i
 *  modulo P. In a V, each rank has two stages: rank r has r and 2P - 1 - r. */
enum {
    TSR_SCHEDULE_GPIPE = 0,                   /* one stage per rank: all forwards, then all backwards */
    TSR_SCHEDULE_1F1B = 1,                    /* one stage per rank, m >= P: fewer activations */
    TSR_SCHEDULE_LOOPED_BFS = 2,              /* loop: GPipe with several stages per rank */
    TSR_SCHEDULE_INTERLEAVED_1F1B = 3,        /* loop, m a multiple of max(1, m / P): shorter bubbles */
    TSR_SCHEDULE_INTERLEAVED_ZERO_BUBBLE = 4, /* the same, with a split backward */
    TSR_SCHEDULE_ZB_H2 = 5,                   /* one stage per rank, split backward: twice the activations of 1F1B */
    TSR_SCHEDULE_ZBV = 6,                     /* V, split backward: no bubble, the activations of 1F1B */
    TSR_SCHEDULE_DUALPIPEV = 7                /* V, m >= 2P, partly split backward */
};
typedef int32_t tsr_schedule;

/** What a callback is to compute. */
enum {
    TSR_STAGE_FORWARD = 1,
    TSR_STAGE_BACKWARD = 2,       /* gradients of inputs and weights */
    TSR_STAGE_BACKWARD_INPUT = 3, /* the gradients of the inputs, for which the previous stage waits */
    TSR_STAGE_BACKWARD_WEIGHT = 4 /* later: the gradients of the weights */
};
typedef int32_t tsr_stage_work;

/** What a callback computes with. Its lists are borrowed for the call. The memory of their tensors stays as it is until
 *  the micro-batch's BACKWARD or BACKWARD_WEIGHT has returned (in an evaluation, its FORWARD); that of input_grads only
 *  for the call. On a device, that is until the end of what the trainer's stream has by then. Only input_grads may be
 *  written: other stages may share the rest. */
typedef struct tsr_stage_call {
    size_t struct_size; /* as the library knows it */
    tsr_stage_work work;
    int32_t stage;
    int32_t microbatch;        /* 0 to microbatches - 1 */
    int32_t microbatches;      /* m */
    tsr_flag training;         /* 1 in tsr_pipeline_step, 0 in tsr_pipeline_eval */
    tsr_flag is_last_backward; /* 1: after it, the weights' gradients of this stage are complete for this step */
    /* on the last stage: the factor of this micro-batch's loss. Scale the loss by it before its backward, never
     * gradients afterwards, so that steps can be accumulated. 0 on other stages */
    double weight;
    /* of stage 0: this micro-batch's rows of the batch. Other stages get what the previous one sent, then what came
     * along each edge that ends here, in the order of the options */
    const tsr_tensor *inputs;
    size_t n_inputs;
    const tsr_tensor *targets; /* on the last stage: this micro-batch's rows of the targets */
    size_t n_targets;
    const tsr_tensor *outputs; /* what the forward made; none in a FORWARD */
    size_t n_outputs;
    /* in a backward: the gradients of the outputs that went to the next stage, then of each edge that begins here. data
     * is NULL for outputs that are not f16, bf16, f32 or f64: they have no gradient. None on the last stage */
    const tsr_tensor *output_grads;
    size_t n_output_grads;
    /* in BACKWARD and BACKWARD_INPUT: the gradients of the inputs, to be written; they are zero. data is NULL for
     * inputs that have none, as above. None on stage 0 */
    const tsr_tensor *input_grads;
    size_t n_input_grads;
} tsr_stage_call;

/** Computes one action of the schedule, on the thread that called tsr_pipeline_step or tsr_pipeline_eval. It may call
 *  tsr_pipeline_output and tsr_pipeline_loss; any other call on the pipeline is INVALID_STATE. It returns 0, or a
 *  reason for failure, which fails the step on every rank: a TSR_E_ code of error.h, which becomes the code of the
 *  call, or any other number, which the call returns as USER with the number as native code. `message` has room for
 *  TSR_MESSAGE_BYTES; text written there (UTF-8, terminated by 0) becomes part of the error on every rank. It must not
 *  unwind. */
typedef int32_t (*tsr_stage_fn)(const tsr_stage_call *call, char *message, void *user_data);

/** The callbacks of a pipeline. Zero the struct, then set struct_size and the callbacks. */
typedef struct tsr_pipeline_callbacks {
    size_t struct_size;
    tsr_stage_fn forward;        /* required */
    tsr_stage_fn backward;       /* required unless the schedule splits every backward */
    tsr_stage_fn backward_input; /* these two: required if the schedule splits backwards */
    tsr_stage_fn backward_weight;
    tsr_destroy_fn destroy; /* may be NULL; see tsr_pipeline_create */
    void *user_data;        /* passed to each */
} tsr_pipeline_callbacks;

/** A connection that skips stages. The output goes only along its edges; outputs without an edge go to the next stage.
 *  Name an edge for each stage that takes the output, the next one included. The size of this struct is frozen. */
typedef struct tsr_pipeline_edge {
    int32_t from_stage;
    int32_t output; /* of from_stage, counted from 0 */
    int32_t to_stage;
    int32_t reserved; /* 0 */
} tsr_pipeline_edge;

/** Options of a pipeline, the same on every rank. `_init` writes the defaults; afterwards every field is taken
 *  literally. */
typedef struct tsr_pipeline_options {
    size_t struct_size;
    tsr_schedule schedule; /* the order in which ranks compute; default TSR_SCHEDULE_1F1B */
    int32_t microbatches;  /* the number of micro-batches, at least 1; default 0: as many as schedule_csv has */
    /* a schedule of your own, instead of `schedule`: PyTorch's CSV, one line per rank, with cells like 2F0;
     * default NULL */
    const char *schedule_csv;
    const tsr_pipeline_edge *edges; /* connections that skip stages; default NULL */
    size_t edge_count;              /* default 0 */
    /* the largest tensor between two stages; a larger one is an error where it is made, and so is a message that claims
     * to have one; default 1 GiB */
    uint64_t max_message_bytes;
    tsr_flag on_device; /* 1: activations and gradients are on the communicator's CUDA device; default 0 */
} tsr_pipeline_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_pipeline_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_pipeline_options_init(tsr_pipeline_options *options, size_t struct_size);

/** Join the stages of all ranks to a pipeline. Together the ranks name each stage once, where the schedule puts it. The
 *  pipeline uses its own communicator, so collectives of `comm` may run meanwhile, in callbacks too.
 *  @param comm       borrowed until destroy
 *  @param stages     n stages of this rank, in any order
 *  @param n          at least 1
 *  @param callbacks  copied; its user_data is borrowed until destroy(user_data), which is called once: when the
 *                    pipeline is destroyed or, if this call fails, before it returns. It is not called for `callbacks`
 *                    that cannot be read: NULL, a wrong struct_size, or fields that this library does not know
 *  @param options    borrowed for the call; NULL: all defaults, which lack the number of micro-batches
 *  @param out        the pipeline
 *  @return TSR_OK, INVALID_ARGUMENT (on every rank: names stages that are missing, on two ranks or on the wrong one, a
 *          number of micro-batches that works, a missing callback, or an edge), MISMATCH (names the first difference),
 *          UNSUPPORTED (also: on_device, and `comm` has no device), TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY, CUDA, NCCL
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_pipeline_create(tsr_comm *comm, const int32_t *stages, size_t n,
                                                    const tsr_pipeline_callbacks *callbacks,
                                                    const tsr_pipeline_options *options, tsr_pipeline **out);

/** Name the stream of the trainer: callbacks put their work there. A new stream continues after what the previous one had when
 *  the last callback returned.
 *  @param pipeline  borrowed for the call
 *  @param stream    of the device that this rank communicates from (cudaStream_t), borrowed until another is set or
 *                   destroy; NULL, as created: the device's default stream
 *  @return TSR_OK, INVALID_ARGUMENT (of another device, or not NULL and the pipeline's tensors are on the CPU),
 *          INVALID_STATE (in a callback), CUDA
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_pipeline_set_stream(tsr_pipeline *pipeline, void *stream);

/** The number of stages of all ranks together. The last one is this minus 1.
 *  @param pipeline  borrowed for the call
 *  @param stages    out
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_pipeline_stages(const tsr_pipeline *pipeline, int32_t *stages);

/** m, the number of micro-batches of a step.
 *  @param pipeline      borrowed for the call
 *  @param microbatches  out
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_pipeline_microbatches(const tsr_pipeline *pipeline, int32_t *microbatches);

/** Train on one batch: forward and backward of all micro-batches. Batch and targets are cut along their first dimension
 *  into m parts, like torch.tensor_split: m need not divide the rows. Every rank calls it. A failure on one rank ends
 *  the step on every rank within the communicator's timeout, with an error that names stage and micro-batch; all later
 *  calls are ABORTED with that error as the cause. Each wait for another rank has the communicator's timeout; ranks
 *  that are not next to the late one wait up to 5 s longer, so that its neighbour reports.
 *  @param pipeline   borrowed for the call
 *  @param batch      n_batch tensors with the same number of rows, on the CPU or on the pipeline's device; used by the
 *                    rank of stage 0, ignored by others; borrowed for the call, and on a device until its stream has
 *                    done what callbacks put there
 *  @param n_batch    may be 0 if the callback of stage 0 has its own data
 *  @param targets    n_targets tensors likewise; used by the rank of the last stage, ignored by others
 *  @param n_targets  may be 0 if the callback of the last stage has its own
 *  @param weights    the factors of the micro-batches' losses; used by the rank of the last stage, ignored by others.
 *                    NULL: each micro-batch's share of the rows of the targets, or 1 / m without targets, so that a
 *                    loss which is a mean over rows stays one
 *  @param n_weights  m, or 0 for NULL
 *  @param losses     out: what the last stage reported, not scaled, NaN if it reported none; the same on every rank.
 *                    May be NULL
 *  @param n_losses   m, or 0 for NULL
 *  @return TSR_OK, INVALID_ARGUMENT (fewer rows than micro-batches, a wrong length, a tensor of another device),
 *          INVALID_STATE, UNSUPPORTED (a tensor on a device, in a pipeline on the CPU), TIMEOUT (names the stage that did
 *          not send), ABORTED (another rank failed), PEER_LOST, MISMATCH, CORRUPT, NO_MEMORY, INTERRUPTED (which fails the
 *          step), USER (a callback failed), CUDA, NCCL, or the code that a callback returned
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_pipeline_step(tsr_pipeline *pipeline, const tsr_tensor *batch, size_t n_batch,
                                                  const tsr_tensor *targets, size_t n_targets, const double *weights,
                                                  size_t n_weights, double *losses, size_t n_losses);

/** Evaluate one batch: the forwards of a step, in the same order. Parameters as those of tsr_pipeline_step. Ranks that
 *  are ahead do not wait: a slow last stage may have up to m activations in memory.
 *  @param pipeline   borrowed for the call
 *  @param batch      as in tsr_pipeline_step
 *  @param n_batch    as in tsr_pipeline_step
 *  @param targets    as in tsr_pipeline_step
 *  @param n_targets  may be 0
 *  @param weights    as in tsr_pipeline_step
 *  @param n_weights  as in tsr_pipeline_step
 *  @param losses     as in tsr_pipeline_step
 *  @param n_losses   as in tsr_pipeline_step
 *  @return as tsr_pipeline_step
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_pipeline_eval(tsr_pipeline *pipeline, const tsr_tensor *batch, size_t n_batch,
                                                  const tsr_tensor *targets, size_t n_targets, const double *weights,
                                                  size_t n_weights, double *losses, size_t n_losses);

/** In a FORWARD callback: memory for the next output of the stage. Its content is undefined. The first call makes
 *  output 0, the second output 1. Number, dtypes and shapes may differ from micro-batch to micro-batch.
 *  @param pipeline  the one that called back
 *  @param dtype     TSR_DTYPE_
 *  @param shape     ndim sizes
 *  @param ndim      0 to TSR_MAX_NDIM
 *  @param tensor    out: memory borrowed until the micro-batch's BACKWARD or BACKWARD_WEIGHT has returned (in an
 *                   evaluation, until the callback returns), aligned to 4096 bytes; shape borrowed until the callback
 *                   returns
 *  @return TSR_OK, INVALID_ARGUMENT (also: larger than max_message_bytes), INVALID_STATE (not in a FORWARD callback),
 *          NO_MEMORY
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_pipeline_output(tsr_pipeline *pipeline, tsr_dtype dtype, const int64_t *shape,
                                                    int32_t ndim, tsr_tensor *tensor);

/** In a callback of the last stage: report the loss of the micro-batch, without its weight. The last value counts. On a
 *  device, a program that reports it has to wait for its stream; one that does not want to reports none.
 *  @param pipeline  the one that called back
 *  @param loss      any number
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (not in a callback of the last stage)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_pipeline_loss(tsr_pipeline *pipeline, double loss);

/** After a step: sum the gradient of a parameter that several stages share, such as an embedding that is also the
 *  output layer. Each rank that has one of `stages` calls it once for each such parameter, in the same order; no other
 *  rank does. The gradient becomes the sum over these ranks, added in the order of the stages. A rank that has several
 *  of the stages has one gradient for them. A gradient on a device is summed on the host: the call waits for the
 *  trainer's stream.
 *  @param pipeline  borrowed for the call
 *  @param gradient  floating-point, the same dtype and number of elements on every rank, on the CPU or on the pipeline's
 *                   device; borrowed for the call
 *  @param stages    n stages in ascending order, the same on every rank
 *  @param n         at least 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, UNSUPPORTED, MISMATCH, TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY,
 *          INTERRUPTED, CUDA (any failure ends the pipeline, as one of a step does)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_pipeline_sum_tied(tsr_pipeline *pipeline, const tsr_tensor *gradient,
                                                      const int32_t *stages, size_t n);

/** Statistics of the last step or evaluation on this rank. Times are the host's: on a device, a callback is over when it has
 *  put its work on the stream. */
typedef struct tsr_pass_stats {
    size_t struct_size;
    int64_t wall_ns;
    int64_t busy_ns;         /* in callbacks */
    int64_t waited_ns;       /* for messages and, at the end, for the other ranks */
    int64_t longest_ns;      /* of that, for the stage whose messages this rank awaited longest */
    int32_t longest_stage;   /* that stage; -1: this rank awaited none */
    int32_t longest_rank;    /* the rank that has it */
    size_t peak_activations; /* the most micro-batches of a stage that were between their forward and backward */
    size_t peak_bytes;       /* the most memory of the library that tensors were in */
} tsr_pass_stats;

/** Statistics of the last step or evaluation on this rank; zeros and -1 before the first.
 *  @param pipeline  borrowed for the call
 *  @param stats     out: `struct_size` set by the caller to sizeof(tsr_pass_stats); that many bytes are written
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_pipeline_stats(tsr_pipeline *pipeline, tsr_pass_stats *stats);

/** Free the pipeline and its memory. NULL is ignored. Ranks that still wait for this one fail. On a device, it waits until
 *  the device is done.
 *  @param pipeline  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_pipeline_destroy(tsr_pipeline *pipeline);

#ifdef __cplusplus
}
#endif
#endif
