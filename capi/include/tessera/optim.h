/* Tessera: optimizers over local parameters: SGD, Adam, AdamW, Adagrad, Lion, Lamb. */
#ifndef TESSERA_OPTIM_H
#define TESSERA_OPTIM_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options of SGD. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_sgd_options {
    size_t struct_size;
    double lr;           /* the learning rate; default 0.001 */
    double momentum;     /* the momentum factor: the share of the previous update that is kept; default 0 */
    double dampening;    /* the dampening of momentum: the share of the gradient that it leaves out; default 0 */
    double weight_decay; /* multiplied by the parameter and added to the gradient; default 0 */
    tsr_flag nesterov;   /* 1: Nesterov momentum; needs momentum > 0 and dampening 0; default 0 */
} tsr_sgd_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_sgd_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_sgd_options_init(tsr_sgd_options *options, size_t struct_size);

/** Stochastic gradient descent as PyTorch defines it (momentum after Sutskever et al. 2013).
 *  @param params   n contiguous f32 or f64 tensors with unique names, on the CPU or all on one CUDA device; memory
 *                  borrowed until destroy
 *  @param grads    n tensors of the same shapes and dtypes; memory borrowed until destroy
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY; on a device also UNSUPPORTED (no kernels for it), CUDA
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_sgd_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                                               const tsr_sgd_options *options, tsr_optimizer **out);

/** The same over the parameters and gradient views of `ddp`. With share_params, all ranks create the same optimizer:
 *  the call is then collective and blocking, and the optimizer steps in backward (tsr_ddp_step_in_backward) from the
 *  start.
 *  @param ddp      borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY; with share_params also MISMATCH, TIMEOUT, ABORTED,
 *          PEER_LOST
 *  @threadsafety exclusive ddp  @collective yes with share_params  @blocking only with share_params
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_sgd(tsr_ddp *ddp, const tsr_sgd_options *options, tsr_optimizer **out);

/** The same over the shards of the trained parameters of `fsdp` and their gradients; the optimizer's state is sharded
 *  likewise. It steps between tsr_fsdp_wait and the next forward.
 *  @param fsdp     borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive fsdp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_sgd(tsr_fsdp *fsdp, const tsr_sgd_options *options, tsr_optimizer **out);

/** The same over this rank's slices of the floating-point parameters of `tp` and their gradients (tsr_tp_grad); the
 *  optimizer's state is cut likewise. It steps after tsr_tp_sum_grads.
 *  @param tp       borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive tp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_sgd(tsr_tp *tp, const tsr_sgd_options *options, tsr_optimizer **out);

/** Options of Adam. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_adam_options {
    size_t struct_size;
    double lr;           /* the learning rate; default 0.001 */
    double beta1;        /* the decay rate of the mean of gradients; default 0.9 */
    double beta2;        /* the decay rate of the mean of their squares; default 0.999 */
    double eps;          /* added to the square root of the latter; default 1e-8 */
    double weight_decay; /* multiplied by the parameter and added to the gradient; default 0 */
} tsr_adam_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_adam_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_adam_options_init(tsr_adam_options *options, size_t struct_size);

/** Adam (Kingma and Ba 2015), with bias correction.
 *  @param params   n contiguous f32 or f64 tensors with unique names, on the CPU or all on one CUDA device; memory
 *                  borrowed until destroy
 *  @param grads    n tensors of the same shapes and dtypes; memory borrowed until destroy
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY; on a device also UNSUPPORTED (no kernels for it), CUDA
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_adam_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                                                const tsr_adam_options *options, tsr_optimizer **out);

/** The same over the parameters and gradient views of `ddp`. With share_params, all ranks create the same optimizer:
 *  the call is then collective and blocking, and the optimizer steps in backward (tsr_ddp_step_in_backward) from the
 *  start.
 *  @param ddp      borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY; with share_params also MISMATCH, TIMEOUT, ABORTED,
 *          PEER_LOST
 *  @threadsafety exclusive ddp  @collective yes with share_params  @blocking only with share_params
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_adam(tsr_ddp *ddp, const tsr_adam_options *options, tsr_optimizer **out);

/** The same over the shards of the trained parameters of `fsdp` and their gradients; the optimizer's state is sharded
 *  likewise. It steps between tsr_fsdp_wait and the next forward.
 *  @param fsdp     borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive fsdp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_adam(tsr_fsdp *fsdp, const tsr_adam_options *options, tsr_optimizer **out);

/** The same over this rank's slices of the floating-point parameters of `tp` and their gradients (tsr_tp_grad); the
 *  optimizer's state is cut likewise. It steps after tsr_tp_sum_grads.
 *  @param tp       borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive tp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_adam(tsr_tp *tp, const tsr_adam_options *options, tsr_optimizer **out);

/** Options of AdamW. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_adamw_options {
    size_t struct_size;
    double lr;           /* the learning rate; default 0.001 */
    double beta1;        /* the decay rate of the mean of gradients; default 0.9 */
    double beta2;        /* the decay rate of the mean of their squares; default 0.999 */
    double eps;          /* added to the square root of the latter; default 1e-8 */
    double weight_decay; /* decoupled: param *= 1 - lr * weight_decay; default 0.01 */
} tsr_adamw_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_adamw_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_adamw_options_init(tsr_adamw_options *options, size_t struct_size);

/** AdamW (Loshchilov and Hutter 2019): Adam with decoupled weight decay.
 *  @param params   n contiguous f32 or f64 tensors with unique names, on the CPU or all on one CUDA device; memory
 *                  borrowed until destroy
 *  @param grads    n tensors of the same shapes and dtypes; memory borrowed until destroy
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY; on a device also UNSUPPORTED (no kernels for it), CUDA
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_adamw_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                                                 const tsr_adamw_options *options, tsr_optimizer **out);

/** The same over the parameters and gradient views of `ddp`. With share_params, all ranks create the same optimizer:
 *  the call is then collective and blocking, and the optimizer steps in backward (tsr_ddp_step_in_backward) from the
 *  start.
 *  @param ddp      borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY; with share_params also MISMATCH, TIMEOUT, ABORTED,
 *          PEER_LOST
 *  @threadsafety exclusive ddp  @collective yes with share_params  @blocking only with share_params
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_adamw(tsr_ddp *ddp, const tsr_adamw_options *options, tsr_optimizer **out);

/** The same over the shards of the trained parameters of `fsdp` and their gradients; the optimizer's state is sharded
 *  likewise. It steps between tsr_fsdp_wait and the next forward.
 *  @param fsdp     borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive fsdp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_adamw(tsr_fsdp *fsdp, const tsr_adamw_options *options, tsr_optimizer **out);

/** The same over this rank's slices of the floating-point parameters of `tp` and their gradients (tsr_tp_grad); the
 *  optimizer's state is cut likewise. It steps after tsr_tp_sum_grads.
 *  @param tp       borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive tp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_adamw(tsr_tp *tp, const tsr_adamw_options *options, tsr_optimizer **out);

/** Options of Adagrad. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_adagrad_options {
    size_t struct_size;
    double lr;                        /* the learning rate; default 0.01 */
    double lr_decay;                  /* the rate of step n is lr / (1 + (n - 1) * lr_decay); default 0 */
    double weight_decay;              /* multiplied by the parameter and added to the gradient; default 0 */
    double initial_accumulator_value; /* with which the sums of squared gradients begin; default 0 */
    double eps;                       /* added to the square root of the sum; default 1e-10 */
} tsr_adagrad_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_adagrad_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_adagrad_options_init(tsr_adagrad_options *options, size_t struct_size);

/** Adagrad (Duchi et al. 2011) as PyTorch defines it.
 *  @param params   n contiguous f32 or f64 tensors with unique names, on the CPU or all on one CUDA device; memory
 *                  borrowed until destroy
 *  @param grads    n tensors of the same shapes and dtypes; memory borrowed until destroy
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY; on a device also UNSUPPORTED (no kernels for it), CUDA
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_adagrad_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                                                   const tsr_adagrad_options *options, tsr_optimizer **out);

/** The same over the parameters and gradient views of `ddp`. With share_params, all ranks create the same optimizer:
 *  the call is then collective and blocking, and the optimizer steps in backward (tsr_ddp_step_in_backward) from the
 *  start.
 *  @param ddp      borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY; with share_params also MISMATCH, TIMEOUT, ABORTED,
 *          PEER_LOST
 *  @threadsafety exclusive ddp  @collective yes with share_params  @blocking only with share_params
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_adagrad(tsr_ddp *ddp, const tsr_adagrad_options *options, tsr_optimizer **out);

/** The same over the shards of the trained parameters of `fsdp` and their gradients; the optimizer's state is sharded
 *  likewise. It steps between tsr_fsdp_wait and the next forward.
 *  @param fsdp     borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive fsdp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_adagrad(tsr_fsdp *fsdp, const tsr_adagrad_options *options,
                                                 tsr_optimizer **out);

/** The same over this rank's slices of the floating-point parameters of `tp` and their gradients (tsr_tp_grad); the
 *  optimizer's state is cut likewise. It steps after tsr_tp_sum_grads.
 *  @param tp       borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive tp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_adagrad(tsr_tp *tp, const tsr_adagrad_options *options, tsr_optimizer **out);

/** Options of Lion. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_lion_options {
    size_t struct_size;
    double lr;           /* the learning rate, by which each element moves; default 0.0001 */
    double beta1;        /* the weight of the mean of gradients in the direction of a step; default 0.9 */
    double beta2;        /* the decay rate of the mean of gradients; default 0.99 */
    double weight_decay; /* decoupled: param *= 1 - lr * weight_decay; default 0 */
} tsr_lion_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_lion_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lion_options_init(tsr_lion_options *options, size_t struct_size);

/** Lion (Chen et al. 2023): each element moves by lr against the sign of a mean of gradients. An element whose mean is 0
 *  stays, where DeepSpeed's Lion moves it.
 *  @param params   n contiguous f32 or f64 tensors with unique names, on the CPU or all on one CUDA device; memory
 *                  borrowed until destroy
 *  @param grads    n tensors of the same shapes and dtypes; memory borrowed until destroy
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY; on a device also UNSUPPORTED (no kernels for it), CUDA
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lion_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                                                const tsr_lion_options *options, tsr_optimizer **out);

/** The same over the parameters and gradient views of `ddp`. With share_params, all ranks create the same optimizer:
 *  the call is then collective and blocking, and the optimizer steps in backward (tsr_ddp_step_in_backward) from the
 *  start.
 *  @param ddp      borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY; with share_params also MISMATCH, TIMEOUT, ABORTED,
 *          PEER_LOST
 *  @threadsafety exclusive ddp  @collective yes with share_params  @blocking only with share_params
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_lion(tsr_ddp *ddp, const tsr_lion_options *options, tsr_optimizer **out);

/** The same over the shards of the trained parameters of `fsdp` and their gradients; the optimizer's state is sharded
 *  likewise. It steps between tsr_fsdp_wait and the next forward.
 *  @param fsdp     borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive fsdp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_lion(tsr_fsdp *fsdp, const tsr_lion_options *options, tsr_optimizer **out);

/** The same over this rank's slices of the floating-point parameters of `tp` and their gradients (tsr_tp_grad); the
 *  optimizer's state is cut likewise. It steps after tsr_tp_sum_grads.
 *  @param tp       borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety exclusive tp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_lion(tsr_tp *tp, const tsr_lion_options *options, tsr_optimizer **out);

/** Options of Lamb. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_lamb_options {
    size_t struct_size;
    double lr;           /* the learning rate; default 0.001 */
    double beta1;        /* the decay rate of the mean of gradients; default 0.9 */
    double beta2;        /* the decay rate of the mean of their squares; default 0.999 */
    double eps;          /* added to the square root of the latter; default 1e-8 */
    double weight_decay; /* multiplied by the parameter and added to the direction of a step; default 0 */
    double max_coeff;    /* the largest trust ratio; default 10 */
    double min_coeff;    /* the smallest trust ratio, at most max_coeff; default 0.01 */
    tsr_flag
        bias_correction; /* 1 (default): lr is multiplied by sqrt(1 - beta2^step) / (1 - beta1^step); 0: it is not */
} tsr_lamb_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_lamb_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lamb_options_init(tsr_lamb_options *options, size_t struct_size);

/** Lamb (You et al. 2020) as DeepSpeed's FusedLamb: the direction of Adam plus weight decay, scaled for each parameter by its
 *  trust ratio, the norm of the parameter over that of the direction (1 if one of them is 0). The norms have the same bits
 *  however ranks divide a parameter. On the CPU only.
 *  @param params   n contiguous f32 or f64 tensors with unique names, on the CPU; memory borrowed until destroy
 *  @param grads    n tensors of the same shapes and dtypes; memory borrowed until destroy
 *  @param n        at least 1
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, UNSUPPORTED (parameters on a device), NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lamb_create(const tsr_param *params, const tsr_tensor *grads, size_t n,
                                                const tsr_lamb_options *options, tsr_optimizer **out);

/** The same over the parameters and gradient views of `ddp`. If these are slices of a tsr_tp, a step is collective over its
 *  ranks.
 *  @param ddp      borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, UNSUPPORTED (share_params, with which each rank updates a part of a
 *          parameter, or a device), NO_MEMORY
 *  @threadsafety exclusive ddp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_ddp_lamb(tsr_ddp *ddp, const tsr_lamb_options *options, tsr_optimizer **out);

/** The same over the shards of the trained parameters of `fsdp` and their gradients; the optimizer's state is sharded
 *  likewise. It steps between tsr_fsdp_wait and the next forward, and a step is collective and blocking.
 *  @param fsdp     borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, UNSUPPORTED (a device), NO_MEMORY
 *  @threadsafety exclusive fsdp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_fsdp_lamb(tsr_fsdp *fsdp, const tsr_lamb_options *options, tsr_optimizer **out);

/** The same over this rank's slices of the floating-point parameters of `tp` and their gradients (tsr_tp_grad); the
 *  optimizer's state is cut likewise. It steps after tsr_tp_sum_grads, and a step is collective and blocking.
 *  @param tp       borrowed until destroy of the optimizer
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, UNSUPPORTED (a device), NO_MEMORY
 *  @threadsafety exclusive tp  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_lamb(tsr_tp *tp, const tsr_lamb_options *options, tsr_optimizer **out);

/** Update every parameter from its gradient. Gradients stay unchanged. On a CUDA device the call returns once the step
 *  is on the stream (tsr_optimizer_set_stream), with CUDA if it cannot get there.
 *  @param optimizer  borrowed for the call
 *  @return TSR_OK, INVALID_STATE (DDP: gradients are being reduced or, with synchronisation, none were reduced since
 *          the last step; FSDP: a unit is not sharded, or no gradients were reduced into the shards since the last
 *          step; tensor parallelism: tsr_tp_sum_grads is needed and was not called since the last step). Lamb whose ranks
 *          hold parts of parameters: also MISMATCH, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED, after which parameters and
 *          moments are unchanged and the communicator has failed
 *  @threadsafety exclusive  @collective yes for Lamb over a tsr_fsdp, a tsr_tp or a tsr_ddp of its slices
 *  @blocking only if collective  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_step(tsr_optimizer *optimizer);

/** Set every gradient to zero.
 *  @param optimizer  borrowed for the call
 *  @return TSR_OK, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_zero_grad(tsr_optimizer *optimizer);

/** Join the optimizers of ranks that have different parameters, such as the stages of a pipeline: from now on,
 *  tsr_optimizer_clip_grad_norm and a scaler's unscaling take the gradients of all of them into account and are
 *  collective over these ranks. A parameter that several stages share under the same name counts once.
 *  @param optimizer  borrowed for the call; joined at most once
 *  @param comm       one rank of each stage, such as those of the pipeline; borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT (on every rank: two ranks hold different parts of a parameter), INVALID_STATE (on
 *          every rank: joined already), TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY
 *  @threadsafety exclusive optimizer and comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_join(tsr_optimizer *optimizer, tsr_comm *comm);

/** Scale all gradients so that their norm is at most `max_norm`, like torch.nn.utils.clip_grad_norm_. Over a tsr_fsdp
 *  it is the norm of all shards, and every rank scales by the same factor; over a tsr_ddp, whose gradients are the same
 *  on every rank, it is local. On a CUDA device it waits for the stream. Call it before the step.
 *  @param optimizer  borrowed for the call
 *  @param max_norm   finite, not negative
 *  @param p          the order of the norm: 2, any other number from 1, or infinity for the largest magnitude
 *  @param norm       out, may be NULL: the norm before scaling; infinite if there are infinities or NaN, which stay
 *                    unchanged
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (gradients are being reduced, or it steps in backward; tensor
 *          parallelism: as tsr_optimizer_step); over a tsr_fsdp also MISMATCH, TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED
 *          (which, as with other collectives, fails the communicator). After INVALID_ARGUMENT and INVALID_STATE this
 *          rank has not entered the collective: it may call again; the others wait for it until their deadline and then
 *          name it. On a device also CUDA
 *  @threadsafety exclusive  @collective yes over a tsr_fsdp or tsr_tp, or if joined
 *  @blocking only over a tsr_fsdp or tsr_tp, if joined, or on a device  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_clip_grad_norm(tsr_optimizer *optimizer, double max_norm, double p,
                                                             double *norm);

/** Clamp every gradient to [-most, most]; NaN stays NaN. Call it before the step.
 *  @param optimizer  borrowed for the call
 *  @param most       finite, not negative
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (as tsr_optimizer_clip_grad_norm)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_clip_grad_value(tsr_optimizer *optimizer, double most);

/** Set the CUDA stream in whose order all later calls of the optimizer run; before the first call it is the default
 *  stream of the parameters' device. What the previous stream has of this optimizer runs before what the new one gets.
 *  @param optimizer  borrowed for the call
 *  @param stream     of the parameters' device, borrowed until another one is set or destroy; NULL: the default stream,
 *                    and the only one on the CPU
 *  @return TSR_OK, INVALID_ARGUMENT (a stream of another device, or parameters on the CPU), CUDA
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_set_stream(tsr_optimizer *optimizer, void *stream);

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

/** The number of steps made, including those before a loaded checkpoint.
 *  @param optimizer  borrowed for the call
 *  @param steps      out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_optimizer_steps(const tsr_optimizer *optimizer, int64_t *steps);

/** Free the optimizer. NULL is ignored. What a save with copy_on_demand still has to copy from its memory is copied
 *  first.
 *  @param optimizer  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_optimizer_destroy(tsr_optimizer *optimizer);

#ifdef __cplusplus
}
#endif
#endif
