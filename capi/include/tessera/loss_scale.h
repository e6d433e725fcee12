/* Tessera: DeepSpeed's loss scale, which an engine with "fp16" has. Trainers without an engine can use it alone. They
 * multiply their loss by the scale, and report after each step whether the gradients of any rank had an infinity or NaN.
 *
 * A dynamic scale halves after `hysteresis` overflows and doubles after `window` steps without one. */
#ifndef TESSERA_LOSS_SCALE_H
#define TESSERA_LOSS_SCALE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options of a loss scale. Scales are positive normal f32 numbers. `_init` writes the defaults; afterwards every field is
 *  taken literally. */
typedef struct tsr_loss_scale_options {
    size_t struct_size;
    double fixed;       /* the scale for good; 0 (default): it is dynamic */
    double initial;     /* the first scale of a dynamic one; default 65536 */
    int64_t window;     /* steps without overflow until it doubles; at least 1, default 1000 */
    int64_t hysteresis; /* overflows until it halves; at least 1, default 2 */
    /* 1: a step without overflow restores the hysteresis (consecutive_hysteresis); 0 (default): only a growth does */
    tsr_flag restores_every_step;
    double minimum; /* below which it does not shrink; default 1 */
} tsr_loss_scale_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_loss_scale_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_loss_scale_options_init(tsr_loss_scale_options *options, size_t struct_size);

/** Create a loss scale. Each rank has its own; they stay equal if all ranks report the same.
 *  @param options  borrowed for the call; NULL: all defaults; the same on every rank
 *  @param out      the loss scale
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_loss_scale_create(const tsr_loss_scale_options *options, tsr_loss_scale **out);

/** The factor by which losses are multiplied.
 *  @param scale  borrowed for the call
 *  @param value  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_loss_scale_value(const tsr_loss_scale *scale, double *value);

/** End a step.
 *  @param scale     borrowed for the call
 *  @param overflow  1 if the gradients of any rank had an infinity or NaN, otherwise 0; the same on every rank
 *  @param value     out, may be NULL: the next scale
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (it must halve, but is at its minimum; nothing has changed)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_loss_scale_update(tsr_loss_scale *scale, tsr_flag overflow, double *value);

/** What a checkpoint keeps of a loss scale. */
typedef struct tsr_loss_scale_state {
    size_t struct_size;
    double scale;
    int64_t iteration;     /* reported steps */
    int64_t last_overflow; /* the iteration of the last overflow; -1: there was none */
    int64_t hysteresis;    /* overflows left until it halves */
} tsr_loss_scale_state;

/** Read the state, for a checkpoint.
 *  @param scale  borrowed for the call
 *  @param state  out: `struct_size` set by the caller to sizeof(tsr_loss_scale_state); that many bytes are written
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_loss_scale_get_state(const tsr_loss_scale *scale, tsr_loss_scale_state *state);

/** Continue from a state. A fixed scale stays as the options have it.
 *  @param scale  borrowed for the call
 *  @param state  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT (a value is out of range; nothing has changed), INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_loss_scale_set_state(tsr_loss_scale *scale, const tsr_loss_scale_state *state);

/** Free the loss scale. NULL is ignored.
 *  @param scale  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_loss_scale_destroy(tsr_loss_scale *scale);

#ifdef __cplusplus
}
#endif
#endif
