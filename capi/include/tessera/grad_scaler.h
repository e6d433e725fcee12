/* Tessera: dynamic scaling of losses, so that small gradients of f16 are not lost. The trainer multiplies its loss by the scale;
 * a step whose gradients have an infinity or NaN is left out on all ranks, and the scale becomes smaller; after some steps
 * without one it grows.
 *
 * A step: loss times tsr_grad_scaler_scale, backward, tsr_grad_scaler_step, tsr_grad_scaler_update. To bound gradients,
 * tsr_grad_scaler_unscale and tsr_optimizer_clip_grad_norm before the step. */
#ifndef TESSERA_GRAD_SCALER_H
#define TESSERA_GRAD_SCALER_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options of a scaler, with the names and defaults of PyTorch's. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_grad_scaler_options {
    size_t struct_size;
    double init_scale;       /* the first scale, above 0; default 65536 */
    double growth_factor;    /* by which the scale grows, above 1; default 2 */
    double backoff_factor;   /* by which the scale becomes smaller, between 0 and 1; default 0.5 */
    int64_t growth_interval; /* the scale grows after so many steps in a row that were made; at least 1, default 2000 */
} tsr_grad_scaler_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_grad_scaler_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_options_init(tsr_grad_scaler_options *options, size_t struct_size);

/** A scaler, of one or several optimizers. Each rank has its own; they stay alike.
 *  @param options  borrowed for the call; NULL: all defaults; the same on every rank
 *  @param out      the scaler
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_create(const tsr_grad_scaler_options *options, tsr_grad_scaler **out);

/** What losses, or the gradients where backward begins, are multiplied by.
 *  @param scaler  borrowed for the call
 *  @param scale   out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_scale(const tsr_grad_scaler *scaler, double *scale);

/** Divide the gradients by the scale, once between two updates, to use them before the step.
 *  @param scaler     borrowed for the call
 *  @param optimizer  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (they are unscaled already, are being reduced, or the optimizer steps in
 *          backward); over a tsr_fsdp also MISMATCH, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED (which ends its communicator). With
 *          INVALID_ARGUMENT and INVALID_STATE this rank has not entered it: it may call again, for which the others wait until
 *          their deadline, and then name it
 *  @threadsafety exclusive, both  @collective yes over a tsr_fsdp  @blocking only over a tsr_fsdp  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_unscale(tsr_grad_scaler *scaler, tsr_optimizer *optimizer);

/** Make the optimizer's step, unless its gradients, unscaled here if they were not yet, have an infinity or NaN: over a
 *  tsr_fsdp on any rank; over a tsr_ddp, whose gradients are the same on every rank, here.
 *  @param scaler     borrowed for the call
 *  @param optimizer  borrowed for the call
 *  @param stepped    out, may be NULL: 1 if the step was made, 0 if it was left out
 *  @return as tsr_grad_scaler_unscale; INVALID_STATE also for a second step before the update
 *  @threadsafety exclusive, both  @collective yes over a tsr_fsdp  @blocking only over a tsr_fsdp  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_step(tsr_grad_scaler *scaler, tsr_optimizer *optimizer,
                                                     tsr_flag *stepped);

/** End an iteration: the scale of the next, by what was found in the gradients of all optimizers since the last update.
 *  @param scaler  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (no gradients were unscaled)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_update(tsr_grad_scaler *scaler);

/** Free the scaler. NULL is taken.
 *  @param scaler  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_grad_scaler_destroy(tsr_grad_scaler *scaler);

#ifdef __cplusplus
}
#endif
#endif
