/* Tessera: optimizers over local parameters: SGD, Adam, AdamW. */
#ifndef TESSERA_OPTIM_H
#define TESSERA_OPTIM_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options of SGD. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_sgd_options {
    size_t struct_size;
    double lr;           /* the learning rate; default 0.001 */
    double momentum;     /* the share of the former update that is kept; default 0 */
    double dampening;    /* the share of the gradient that momentum leaves out; default 0 */
    double weight_decay; /* times the parameter, added to the gradient; default 0 */
    tsr_flag nesterov; /* 1: momentum looks ahead, as Nesterov's does; needs momentum > 0 and dampening 0; default 0 */
} tsr_sgd_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_sgd_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_sgd_options_init(tsr_sgd_options *options, size_t struct_size);

/** Stochastic gradient descent as PyTorch defines it (momentum after Sutskever et al. 2013).
 *  @param params   n contiguous f32 or f64 tensors with different names, memory borrowed until destroy
 *  @param grads    n tensors like them, memory borrowed until destroy
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_sgd_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                                               const tsr_sgd_options *options, tsr_optimizer **out);

/** The same over the parameters and gradient views of `ddp`. With its share_params, all ranks make the same one: it is
 *  collective and blocking then, and the optimizer steps in backward (tsr_ddp_step_in_backward) from the beginning.
 *  @param ddp      borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY; with share_params also MISMATCH, TIMEOUT, ABORTED, PEER_LOST
 *  @threadsafety exclusive ddp  @collective yes with share_params  @blocking only with share_params
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_sgd(tsr_ddp *ddp, const tsr_sgd_options *options, tsr_optimizer **out);

/** The same over the shards of `fsdp` and their gradients, of those parameters that are trained: its state is cut as they
 *  are. It steps between tsr_fsdp_wait and the next forward.
 *  @param fsdp     borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive fsdp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_sgd(tsr_fsdp *fsdp, const tsr_sgd_options *options, tsr_optimizer **out);

/** Options of Adam. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_adam_options {
    size_t struct_size;
    double lr;           /* the learning rate; default 0.001 */
    double beta1;        /* the decay of the mean of gradients; default 0.9 */
    double beta2;        /* the decay of the mean of their squares; default 0.999 */
    double eps;          /* added to the root of the latter; default 1e-8 */
    double weight_decay; /* times the parameter, added to the gradient; default 0 */
} tsr_adam_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_adam_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_adam_options_init(tsr_adam_options *options, size_t struct_size);

/** Adam (Kingma and Ba 2015), with bias correction.
 *  @param params   n contiguous f32 or f64 tensors with different names, memory borrowed until destroy
 *  @param grads    n tensors like them, memory borrowed until destroy
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_adam_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                                                const tsr_adam_options *options, tsr_optimizer **out);

/** The same over the parameters and gradient views of `ddp`. With its share_params, all ranks make the same one: it is
 *  collective and blocking then, and the optimizer steps in backward (tsr_ddp_step_in_backward) from the beginning.
 *  @param ddp      borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY; with share_params also MISMATCH, TIMEOUT, ABORTED, PEER_LOST
 *  @threadsafety exclusive ddp  @collective yes with share_params  @blocking only with share_params
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_adam(tsr_ddp *ddp, const tsr_adam_options *options, tsr_optimizer **out);

/** The same over the shards of `fsdp` and their gradients, of those parameters that are trained: its state is cut as they
 *  are. It steps between tsr_fsdp_wait and the next forward.
 *  @param fsdp     borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive fsdp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_adam(tsr_fsdp *fsdp, const tsr_adam_options *options, tsr_optimizer **out);

/** Options of AdamW. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_adamw_options {
    size_t struct_size;
    double lr;           /* the learning rate; default 0.001 */
    double beta1;        /* the decay of the mean of gradients; default 0.9 */
    double beta2;        /* the decay of the mean of their squares; default 0.999 */
    double eps;          /* added to the root of the latter; default 1e-8 */
    double weight_decay; /* decoupled: param *= 1 - lr * weight_decay; default 0.01 */
} tsr_adamw_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_adamw_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_adamw_options_init(tsr_adamw_options *options, size_t struct_size);

/** AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay.
 *  @param params   n contiguous f32 or f64 tensors with different names, memory borrowed until destroy
 *  @param grads    n tensors like them, memory borrowed until destroy
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_adamw_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                                                 const tsr_adamw_options *options, tsr_optimizer **out);

/** The same over the parameters and gradient views of `ddp`. With its share_params, all ranks make the same one: it is
 *  collective and blocking then, and the optimizer steps in backward (tsr_ddp_step_in_backward) from the beginning.
 *  @param ddp      borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY; with share_params also MISMATCH, TIMEOUT, ABORTED, PEER_LOST
 *  @threadsafety exclusive ddp  @collective yes with share_params  @blocking only with share_params
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_adamw(tsr_ddp *ddp, const tsr_adamw_options *options, tsr_optimizer **out);

/** The same over the shards of `fsdp` and their gradients, of those parameters that are trained: its state is cut as they
 *  are. It steps between tsr_fsdp_wait and the next forward.
 *  @param fsdp     borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive fsdp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_adamw(tsr_fsdp *fsdp, const tsr_adamw_options *options, tsr_optimizer **out);

/** Update every parameter from its gradient. Gradients are left as they are.
 *  @param optimizer  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (a ddp's gradients are being reduced, or none were since the last step, with
 *          synchronisation; a unit of a fsdp is not sharded, or no gradients were reduced into the shards since the last step)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_step(tsr_optimizer *optimizer);

/** Set every gradient to zero.
 *  @param optimizer  borrowed for the call
 *  @return TSR_OK, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_zero_grad(tsr_optimizer *optimizer);

/** Scale all gradients so that their norm is at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does. Over a tsr_fsdp it is
 *  the norm of all shards, and every rank scales alike; over a tsr_ddp, whose gradients are the same on every rank, it is
 *  local. Before the step.
 *  @param optimizer  borrowed for the call
 *  @param max_norm   finite, not negative
 *  @param p          which norm: 2, or any number from 1 on, or infinity for the largest magnitude
 *  @param norm       out, may be NULL: the norm as it was; infinite if there are infinities or NaN, which are left as they are
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (gradients are being reduced, or it steps in backward); over a tsr_fsdp
 *          also MISMATCH, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED (which ends its communicator, as of other collectives). With
 *          INVALID_ARGUMENT and INVALID_STATE this rank has not entered it: it may call again, for which the others wait until
 *          their deadline, and then name it
 *  @threadsafety exclusive  @collective yes over a tsr_fsdp  @blocking only over a tsr_fsdp  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_clip_grad_norm(tsr_optimizer *optimizer, double max_norm, double p,
                                                             double *norm);

/** Bring every gradient into [-most, most]; NaN stays. Before the step.
 *  @param optimizer  borrowed for the call
 *  @param most       finite, not negative
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_clip_grad_value(tsr_optimizer *optimizer, double most);

/** The learning rate of the next step.
 *  @param optimizer  borrowed for the call
 *  @param lr         out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_lr(const tsr_optimizer *optimizer, double *lr);

/** Set the learning rate of the next step.
 *  @param optimizer  borrowed for the call
 *  @param lr         finite, not negative
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_set_lr(tsr_optimizer *optimizer, double lr);

/** How many steps were made, those before a checkpoint included.
 *  @param optimizer  borrowed for the call
 *  @param steps      out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_steps(const tsr_optimizer *optimizer, int64_t *steps);

/** Free the optimizer. NULL is taken. What a save with copy_on_demand has yet to copy of its memory is copied first.
 *  @param optimizer  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_optimizer_destroy(tsr_optimizer *optimizer);

#ifdef __cplusplus
}
#endif
#endif
