/* Tessera: dynamic loss scaling, which keeps small f16 gradients from underflowing. The trainer multiplies its loss by
 * the scale. If the gradients contain an infinity or NaN, all ranks skip the step and the scale shrinks; after some
 * steps without one it grows.
 *
 * A step: loss times tsr_grad_scaler_scale, backward, tsr_grad_scaler_step, tsr_grad_scaler_update. To clip gradients,
 * call tsr_grad_scaler_unscale and tsr_optimizer_clip_grad_norm before the step. */
#ifndef TESSERA_GRAD_SCALER_H
#define TESSERA_GRAD_SCALER_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options of a scaler, with the names and defaults of PyTorch's. `_init` writes the defaults; afterwards every field
 *  is taken literally. */
typedef struct tsr_grad_scaler_options {
    size_t struct_size;
    double init_scale;     /* the first scale, above 0; default 65536 */
    double growth_factor;  /* the factor by which the scale grows, above 1; default 2 */
    double backoff_factor; /* the factor by which the scale shrinks, between 0 and 1; default 0.5 */
    /* the scale grows after this many consecutive steps without a skip; at least 1, default 2000 */
    int64_t growth_interval;
} tsr_grad_scaler_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_grad_scaler_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_options_init(tsr_grad_scaler_options *options, size_t struct_size);

/** Create a scaler for one or several optimizers. Each rank has its own; they stay in step.
 *  @param options  borrowed for the call; NULL: all defaults; the same on every rank
 *  @param out      the scaler
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_create(const tsr_grad_scaler_options *options, tsr_grad_scaler **out);

/** The factor by which losses, or the gradients where backward begins, are multiplied.
 *  @param scaler  borrowed for the call
 *  @param scale   out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_scale(const tsr_grad_scaler *scaler, double *scale);

/** Divide the gradients by the scale, so that they can be used before the step. Once between two updates.
 *  @param scaler     borrowed for the call
 *  @param optimizer  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (the gradients are already unscaled or are being reduced, or the
 *          optimizer steps in backward); over a tsr_fsdp also MISMATCH, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED (which
 *          fails the communicator). After INVALID_ARGUMENT and INVALID_STATE this rank has not entered the collective:
 *          it may call again; the others wait for it until their deadline and then name it
 *  @threadsafety exclusive, both  @collective yes over a tsr_fsdp  @blocking only over a tsr_fsdp or on a device
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_unscale(tsr_grad_scaler *scaler, tsr_optimizer *optimizer);

/** Make the optimizer's step unless its gradients contain an infinity or NaN: over a tsr_fsdp on any rank; over a
 *  tsr_ddp, whose gradients are the same on every rank, on this rank. Gradients that are still scaled are unscaled
 *  first.
 *  @param scaler     borrowed for the call
 *  @param optimizer  borrowed for the call
 *  @param stepped    out, may be NULL: 1 if the step was made, 0 if it was skipped
 *  @return as tsr_grad_scaler_unscale; INVALID_STATE also for a second step before the update
 *  @threadsafety exclusive, both  @collective yes over a tsr_fsdp  @blocking only over a tsr_fsdp or on a device
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_step(tsr_grad_scaler *scaler, tsr_optimizer *optimizer,
                                                     tsr_flag *stepped);

/** End an iteration: set the next scale from what was found in the gradients of all optimizers since the last update.
 *  @param scaler  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (no gradients were unscaled)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_grad_scaler_update(tsr_grad_scaler *scaler);

/** Free the scaler. NULL is ignored.
 *  @param scaler  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_grad_scaler_destroy(tsr_grad_scaler *scaler);

#ifdef __cplusplus
}
#endif
#endif
