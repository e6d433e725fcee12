/* Tessera: DeepSpeed's engine. A configuration (ds_config) makes the data-parallel model, the optimizer, the loss scale and
 * the learning-rate schedule; a step does what the configuration asks. The trainer computes. docs/ENGINE.md has the keys.
 *
 * A step:
 *
 *     tsr_engine_forward(u), tsr_engine_forward_done(u)         for each unit
 *     the loss times tsr_engine_loss_factor
 *     tsr_engine_backward(u), gradients, tsr_engine_unit_ready(u)   for each unit, last first
 *     tsr_engine_backward_done
 *     tsr_engine_step          at a boundary: unscale, clip, update, set gradients to zero, move the schedule
 *
 * Every gradient_accumulation_steps-th tsr_engine_step is a boundary, where the optimizer makes a step. Between boundaries
 * gradients add up: tsr_engine_adds_gradients says whether a pass writes its gradients or adds to what is there. All ranks
 * make the same calls. */
#ifndef TESSERA_ENGINE_H
#define TESSERA_ENGINE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A part of the model whose parameters are used together, such as a layer. `reserved` must be zero. The size of this
 *  struct is frozen. */
typedef struct tsr_engine_unit {
    const char *name; /* unique in the model */
    /* n contiguous floating-point tensors on the CPU, each with its own memory and a name that is unique in the model */
    const tsr_param *params;
    size_t n; /* at least 1 */
    uint64_t reserved;
} tsr_engine_unit;

/** What a configuration says, without an engine, for `ranks` data-parallel ranks: a JSON object with the batch sizes and
 *  every default filled in. An optimizer or scheduler that this library does not have is passed through with
 *  "core": false, for engines that have it. docs/ENGINE.md lists the members.
 *  @param config    the text of a ds_config: JSON, comments and trailing commas allowed; or, without a brace, the path of
 *                   its file. Borrowed for the call
 *  @param ranks     at least 1
 *  @param json      buffer of `capacity` bytes for the UTF-8 text with a terminating 0; written only if it fits. NULL if
 *                   capacity is 0
 *  @param capacity  bytes of the buffer
 *  @param size      out: bytes needed, with the terminating 0
 *  @return TSR_OK, INVALID_ARGUMENT (malformed, or contradicts itself; the message has the key, its line, its value and
 *          what to do), UNSUPPORTED (a key that is refused), NOT_FOUND or IO (the file cannot be read)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_config(const char *config, int32_t ranks, char *json, size_t capacity,
                                                  size_t *size);

/** The learning-rate schedule of a configuration's "scheduler", for trainers without an engine.
 *  @param config  as for tsr_engine_config
 *  @param out     the schedule
 *  @return TSR_OK, INVALID_ARGUMENT (also: there is no "scheduler"), UNSUPPORTED (this library does not have its type),
 *          NOT_FOUND or IO (as for tsr_engine_config), NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_config_schedule(const char *config, tsr_lr_schedule **out);

/** Make an engine, check that all ranks have the same configuration and model, and begin with rank 0's parameters. A
 *  leading "module." or "_orig_mod." of a name is stripped. Rank 0 logs the keys that are unknown or without effect.
 *  @param comm      the data-parallel ranks; borrowed until destroy
 *  @param units     the model in the order of its forward; the structs are borrowed for the call, the parameters' memory
 *                   until destroy: at stage 0 without "fp16" and "bf16" it is trained in place, otherwise it is read here
 *                   only
 *  @param n         at least 1
 *  @param config    as for tsr_engine_config, for the ranks of `comm`
 *  @param schedule  NULL: that of the configuration, if any. Otherwise the configuration must have none: the engine attaches
 *                   its optimizer to this one and steps it; the handle may be destroyed before the engine
 *  @param out       the engine
 *  @return TSR_OK, INVALID_ARGUMENT (also: the configuration has no "optimizer"), INVALID_STATE, UNSUPPORTED (an
 *          optimizer or scheduler that this library does not have, a key that is refused, tensors on a device), MISMATCH
 *          (names the first difference between ranks), NOT_FOUND or IO (a rank cannot read the file; on every rank),
 *          TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY
 *  @threadsafety exclusive comm and schedule  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_create(tsr_comm *comm, const tsr_engine_unit *units, size_t n,
                                                  const char *config, tsr_lr_schedule *schedule, tsr_engine **out);

/** What the configuration says, as tsr_engine_config, with the batch sizes as they are now.
 *  @param engine    borrowed for the call
 *  @param json      as for tsr_engine_config
 *  @param capacity  bytes of the buffer
 *  @param size      out: bytes needed, with the terminating 0
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_description(const tsr_engine *engine, char *json, size_t capacity,
                                                       size_t *size);

/** The number of units.
 *  @param engine  borrowed for the call
 *  @param count   out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_unit_count(const tsr_engine *engine, size_t *count);

/** The number of parameters, which are numbered through the units.
 *  @param engine  borrowed for the call
 *  @param count   out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_param_count(const tsr_engine *engine, size_t *count);

/** The name and unit of a parameter.
 *  @param engine  borrowed for the call
 *  @param index   0 to parameter count - 1
 *  @param name    out, may be NULL: borrowed until destroy
 *  @param unit    out, may be NULL: the index of its unit
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_param_name(const tsr_engine *engine, size_t index, const char **name,
                                                      size_t *unit);

/** The parameter with a name.
 *  @param engine  borrowed for the call
 *  @param name    borrowed for the call
 *  @param index   out
 *  @return TSR_OK, INVALID_ARGUMENT (also: there is none), INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_find(const tsr_engine *engine, const char *name, size_t *index);

/** The values of a parameter, in f16 or bf16 with "fp16" or "bf16", to be read between tsr_engine_forward and
 *  tsr_engine_forward_done and between tsr_engine_backward and the last ready of its unit. To read the values between
 *  steps, call tsr_engine_forward and, after tsr_engine_set_training(0), tsr_engine_forward_done.
 *  @param engine  borrowed for the call
 *  @param index   0 to parameter count - 1
 *  @param param   out: shape borrowed until destroy, memory as long as the values are valid
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (its unit is sharded)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_param(tsr_engine *engine, size_t index, tsr_tensor *param);

/** The memory for the gradient of a parameter, to be written between tsr_engine_backward of its unit and its ready, in the
 *  dtype of the tensor. If tsr_engine_adds_gradients, add to what it holds, otherwise overwrite it: then its content is
 *  undefined.
 *  @param engine  borrowed for the call
 *  @param index   0 to parameter count - 1
 *  @param grad    out: shape borrowed until destroy, memory until the gradient is ready
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (its unit is not in its backward)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_grad(tsr_engine *engine, size_t index, tsr_tensor *grad);

/** Begin a unit's forward: its parameters are valid when it returns.
 *  @param engine  borrowed for the call
 *  @param unit    0 to unit count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (during a backward pass), MISMATCH, TIMEOUT, ABORTED, PEER_LOST,
 *          NO_MEMORY, INTERRUPTED (call again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_forward(tsr_engine *engine, size_t unit);

/** End a unit's forward. From then on its parameters may be sharded.
 *  @param engine  borrowed for the call
 *  @param unit    0 to unit count - 1
 *  @return as tsr_engine_forward
 *  @threadsafety exclusive  @collective yes  @blocking only a unit on its way  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_forward_done(tsr_engine *engine, size_t unit);

/** Begin a unit's backward: its parameters and the memory of its gradients are valid when it returns. The first one begins
 *  a backward pass. A unit has one backward in a pass; until all its gradients are ready, a further call does nothing.
 *  @param engine  borrowed for the call
 *  @param unit    0 to unit count - 1
 *  @return as tsr_engine_forward; INVALID_STATE if tsr_engine_step was not called after the last pass, or all gradients of
 *          the unit are ready in this one
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_backward(tsr_engine *engine, size_t unit);

/** Mark a gradient ready: it is written. When all of a unit are, its reduction begins in the background, unless the pass
 *  is not reduced.
 *  @param engine  borrowed for the call
 *  @param param   0 to parameter count - 1
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (marked twice, or its unit is not in its backward), ABORTED
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_ready(tsr_engine *engine, size_t param);

/** Mark the gradients of a unit ready that are not yet.
 *  @param engine  borrowed for the call
 *  @param unit    0 to unit count - 1
 *  @return as tsr_engine_ready
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_unit_ready(tsr_engine *engine, size_t unit);

/** End a backward pass: returns when its gradients are reduced or accumulated. Gradients that are not ready, also of units
 *  without a backward, count as zeros, unless "ignore_unused_parameters" is false.
 *  @param engine  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (names parameters that are not ready, and their units), TIMEOUT, ABORTED, PEER_LOST, MISMATCH
 *          (also: the ranks' boundaries, batch sizes or settings of the optimizer differ; then every later pass and step fails
 *          with it), INTERRUPTED (call again)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_backward_done(tsr_engine *engine);

/** What the loss is multiplied by before its backward pass: the loss scale over the accumulation.
 *  @param engine  borrowed for the call
 *  @param factor  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_loss_factor(const tsr_engine *engine, double *factor);

/** Whether this backward pass must add its gradients to what their memory holds, instead of overwriting it.
 *  @param engine  borrowed for the call
 *  @param adds    out: 1 or 0
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_adds_gradients(const tsr_engine *engine, tsr_flag *adds);

/** Whether the next tsr_engine_step is one of the optimizer.
 *  @param engine    borrowed for the call
 *  @param boundary  out: 1 or 0
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_is_boundary(const tsr_engine *engine, tsr_flag *boundary);

/** Override from now on whether steps are boundaries.
 *  @param engine    borrowed for the call
 *  @param boundary  1 or 0, the same on every rank; -1 (as created): as the accumulation says
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (from the beginning of a backward pass to its step)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_set_boundary(tsr_engine *engine, int32_t boundary);

/** From now on backward passes are not reduced, and tsr_engine_step is refused.
 *  @param engine  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (on already, from stage 2 on, or from the beginning of a backward pass
 *          to its step)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_begin_no_sync(tsr_engine *engine);

/** The next backward pass is reduced again, with what those before it accumulated.
 *  @param engine  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (not on, or during a backward pass)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_end_no_sync(tsr_engine *engine);

/** End a micro-step, after each backward pass. At a boundary the optimizer makes a step, unless the gradients of any rank
 *  have an infinity or NaN and the configuration skips such steps; the schedule then stays as well.
 *  @param engine   borrowed for the call
 *  @param stepped  out, may be NULL: 1 if the optimizer made a step, otherwise 0; the same on every rank
 *  @return TSR_OK, INVALID_STATE (without a backward pass, in one, inside no_sync; or the loss scale must shrink below its
 *          minimum, which every later call repeats), INVALID_ARGUMENT (the schedule's next rate would be infinite, NaN or
 *          negative: nothing is stepped), MISMATCH, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED (which fails the communicator)
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_step(tsr_engine *engine, tsr_flag *stepped);

/** Set whether backward passes follow. While none do, tsr_engine_forward_done shards every unit.
 *  @param engine    borrowed for the call
 *  @param training  1 (as created) or 0
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_set_training(tsr_engine *engine, tsr_flag training);

/** Whether backward passes follow.
 *  @param engine    borrowed for the call
 *  @param training  out: 1 or 0
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_is_training(const tsr_engine *engine, tsr_flag *training);

/** What an engine has counted, including what a loaded checkpoint had. */
typedef struct tsr_engine_counts {
    size_t struct_size;
    int64_t global_steps;   /* boundaries, with those whose step was skipped */
    int64_t global_samples; /* of all ranks */
    int64_t skipped_steps;  /* boundaries whose step was skipped */
    int64_t micro_steps;    /* calls of tsr_engine_step */
} tsr_engine_counts;

/** The counters.
 *  @param engine  borrowed for the call
 *  @param counts  out: `struct_size` set by the caller to sizeof(tsr_engine_counts); that many bytes are written
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_counters(const tsr_engine *engine, tsr_engine_counts *counts);

/** The norm of the gradients of all ranks at the last boundary, before they were clipped and without the loss scale.
 *  @param engine  borrowed for the call
 *  @param norm    out; NaN: there was no boundary yet, or "compute_grad_norm" is false; infinite: a gradient was infinite
 *                 or NaN
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_grad_norm(const tsr_engine *engine, double *norm);

/** The learning rate of the next step.
 *  @param engine  borrowed for the call
 *  @param lr      out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_lr(const tsr_engine *engine, double *lr);

/** Set the learning rate. A schedule sets it again after each step.
 *  @param engine  borrowed for the call
 *  @param lr      finite, not negative; the same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_set_lr(tsr_engine *engine, double lr);

/** The loss scale; 1 without "fp16".
 *  @param engine  borrowed for the call
 *  @param scale   out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_loss_scale(const tsr_engine *engine, double *scale);

/** The batch sizes: train = micro * accumulation * ranks.
 *  @param engine        borrowed for the call
 *  @param train         out, may be NULL: samples of all ranks per step of the optimizer
 *  @param micro         out, may be NULL: samples of a rank per backward pass
 *  @param accumulation  out, may be NULL: backward passes per step of the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_batch(const tsr_engine *engine, int64_t *train, int64_t *micro,
                                                 int64_t *accumulation);

/** Set another train batch by another accumulation, between steps of the optimizer.
 *  @param engine  borrowed for the call
 *  @param train   a multiple of micro * ranks; the same on every rank
 *  @return TSR_OK, INVALID_ARGUMENT (the message has the formula), INVALID_STATE (gradients have accumulated)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_set_train_batch_size(tsr_engine *engine, int64_t train);

/** Set another micro-batch, and so another train batch, between steps of the optimizer.
 *  @param engine  borrowed for the call
 *  @param micro   at least 1; the same on every rank
 *  @return as tsr_engine_set_train_batch_size
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_set_train_micro_batch_size(tsr_engine *engine, int64_t micro);

/** The engine's optimizer, for its settings. The engine makes its steps: those of the handle, and its calls that change gradients,
 *  fail with INVALID_STATE.
 *  @param engine  borrowed for the call
 *  @param out     another handle, to be destroyed by the caller, before or after the engine
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_optimizer(tsr_engine *engine, tsr_optimizer **out);

/** The engine's learning-rate schedule. The engine makes its steps.
 *  @param engine  borrowed for the call
 *  @param out     another handle, to be destroyed by the caller, before or after the engine
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (it has none), NO_MEMORY
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_engine_lr_schedule(tsr_engine *engine, tsr_lr_schedule **out);

/** Free the engine. NULL is ignored.
 *  @param engine  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_engine_destroy(tsr_engine *engine);

#ifdef __cplusplus
}
#endif
#endif
