/* Tessera: learning-rate schedules. A schedule computes the learning rate of any step from a base rate, counts steps,
 * and sets the optimizers that are attached to it. Steps count from 0, the optimizer's first: create the schedule,
 * attach optimizers, and call tsr_lr_schedule_step after each optimizer step. The kinds that PyTorch or DeepSpeed have
 * give their values. docs/SCHEDULES.md has the formulas. */
#ifndef TESSERA_LR_SCHEDULE_H
#define TESSERA_LR_SCHEDULE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** base_lr times `factor` for the first steps, then base_lr (PyTorch's ConstantLR).
 *  @param factor       finite, not negative
 *  @param total_steps  at least 1
 *  @param out          the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_constant(double factor, int64_t total_steps, tsr_lr_schedule **out);

/** base_lr times a factor that changes linearly, and then stays (PyTorch's LinearLR); a warm-up, for example.
 *  @param start_factor  finite, not negative
 *  @param end_factor    finite, not negative
 *  @param total_steps   at least 1
 *  @param out           the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_linear(double start_factor, double end_factor, int64_t total_steps,
                                              tsr_lr_schedule **out);

/** base_lr times `gamma` to the power of step / step_size, rounded down (PyTorch's StepLR).
 *  @param step_size  at least 1
 *  @param gamma      finite, not negative
 *  @param out        the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_step_decay(int64_t step_size, double gamma, tsr_lr_schedule **out);

/** base_lr times `gamma` for each milestone that was reached (PyTorch's MultiStepLR).
 *  @param milestones  n steps in ascending order, from 1; borrowed for the call
 *  @param n           1 to 1000
 *  @param gamma       finite, not negative
 *  @param out         the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_multi_step_decay(const int64_t *milestones, size_t n, double gamma,
                                                        tsr_lr_schedule **out);

/** base_lr times `gamma` to the power of the step (PyTorch's ExponentialLR).
 *  @param gamma  finite, not negative
 *  @param out    the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_exponential(double gamma, tsr_lr_schedule **out);

/** base_lr times (1 - step / total_steps) to the power of `power`, then 0 (PyTorch's PolynomialLR).
 *  @param total_steps  at least 1
 *  @param power        finite, not negative
 *  @param out          the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_polynomial(int64_t total_steps, double power, tsr_lr_schedule **out);

/** From base_lr to `min_lr` along half a cosine, and back in as many steps, repeatedly (PyTorch's CosineAnnealingLR): the
 *  rate rises again after `total_steps`.
 *  @param total_steps  from base_lr to min_lr (T_max); at least 1
 *  @param min_lr       finite, not negative (eta_min)
 *  @param out          the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_cosine(int64_t total_steps, double min_lr, tsr_lr_schedule **out);

/** From base_lr to `min_lr` along half a cosine, then again from base_lr (PyTorch's CosineAnnealingWarmRestarts).
 *  @param first_steps  of the first cycle (T_0); at least 1
 *  @param multiplier   by which each cycle is longer than the previous one (T_mult); at least 1
 *  @param min_lr       finite, not negative (eta_min)
 *  @param out          the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_cosine_restarts(int64_t first_steps, int64_t multiplier, double min_lr,
                                                       tsr_lr_schedule **out);

/** base_lr times min(s / w, sqrt(w / s)), where s is the step + 1 and w the number of warm-up steps (Vaswani et al.
 *  2017).
 *  @param warmup_steps  at least 1
 *  @param out           the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_inverse_sqrt(int64_t warmup_steps, tsr_lr_schedule **out);

/** How the rate decays at the end of tsr_lr_wsd, by the share u of the decay that is done. */
enum {
    TSR_LR_DECAY_LINEAR = 0, /* 1 - u */
    TSR_LR_DECAY_COSINE = 1, /* (1 + cos(pi u)) / 2 */
    TSR_LR_DECAY_SQRT = 2    /* 1 - sqrt(u) */
};
typedef int32_t tsr_lr_decay;

/** Warm-up, stable, decay (Hu et al. 2024): base_lr times a factor that rises linearly from `min_ratio` to 1, stays
 *  there, falls to `min_ratio`, and stays there.
 *  @param warmup_steps  at least 0
 *  @param stable_steps  at least 0
 *  @param decay_steps   at least 1
 *  @param decay         TSR_LR_DECAY_
 *  @param min_ratio     finite, not negative
 *  @param out           the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_wsd(int64_t warmup_steps, int64_t stable_steps, int64_t decay_steps,
                                           tsr_lr_decay decay, double min_ratio, tsr_lr_schedule **out);

/** How the warm-ups of DeepSpeed rise: with the logarithm of the step, or linearly. */
enum { TSR_LR_WARMUP_LOG = 0, TSR_LR_WARMUP_LINEAR = 1 };
typedef int32_t tsr_lr_warmup_type;

/** Options of a warm-up, with DeepSpeed's names. `_init` writes the defaults; afterwards every field is taken
 *  literally. */
typedef struct tsr_lr_warmup_options {
    size_t struct_size;
    double warmup_min_lr;           /* the first rate; default 0 */
    double warmup_max_lr;           /* the rate after the warm-up; -1 (default): the optimizer's own */
    int64_t warmup_num_steps;       /* how long the warm-up lasts; 1 counts as 2; default 1000 */
    tsr_lr_warmup_type warmup_type; /* how the rate rises; default TSR_LR_WARMUP_LOG */
    /* the step at which a linear decay has reached warmup_min_lr (WarmupDecayLR); 0 (default): the rate stays
     * (WarmupLR) */
    int64_t total_num_steps;
} tsr_lr_warmup_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_lr_warmup_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_warmup_options_init(tsr_lr_warmup_options *options, size_t struct_size);

/** DeepSpeed's WarmupLR or, with total_num_steps, WarmupDecayLR. Its iteration number is the step - 1.
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_warmup(const tsr_lr_warmup_options *options, tsr_lr_schedule **out);

/** Options of a warm-up that a cosine follows, with DeepSpeed's names. `_init` writes the defaults; afterwards every
 *  field is taken literally. */
typedef struct tsr_lr_warmup_cosine_options {
    size_t struct_size;
    int64_t total_num_steps;        /* required: the step at which the cosine ends */
    double warmup_min_ratio;        /* where the warm-up begins, as a share of the optimizer's own rate; default 0 */
    int64_t warmup_num_steps;       /* how long the warm-up lasts; 1 counts as 2; default 1000 */
    double cos_min_ratio;           /* where the cosine ends, likewise; default 0.0001 */
    tsr_lr_warmup_type warmup_type; /* how the rate rises; default TSR_LR_WARMUP_LOG */
} tsr_lr_warmup_cosine_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_lr_warmup_cosine_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_warmup_cosine_options_init(tsr_lr_warmup_cosine_options *options,
                                                                  size_t struct_size);

/** DeepSpeed's WarmupCosineLR. Its iteration number is the step - 1; at step 0 the rate is 0.
 *  @param options  borrowed for the call
 *  @param out      the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_warmup_cosine(const tsr_lr_warmup_cosine_options *options,
                                                     tsr_lr_schedule **out);

/** Options of one cycle, with DeepSpeed's names. `_init` writes the defaults; afterwards every field is taken
 *  literally. */
typedef struct tsr_lr_one_cycle_options {
    size_t struct_size;
    double cycle_min_lr;              /* the rate at the beginning and end of the cycle; default 0 */
    double cycle_max_lr;              /* required: the rate between its two halves */
    double decay_lr_rate;             /* after the cycle, how much the rate shrinks per decay_step_size; default 0 */
    int64_t cycle_first_step_size;    /* steps of the first half; default 2000 */
    int64_t cycle_second_step_size;   /* steps of the second half; -1 (default): as many as the first */
    int64_t cycle_first_stair_count;  /* stairs of the first half, within which nothing changes; 0 (default): none */
    int64_t cycle_second_stair_count; /* stairs of the second half; -1 (default): as many as the first */
    int64_t decay_step_size;          /* steps of a decay; 0 (default): neither rate nor momentum decays */
    tsr_flag cycle_momentum; /* 1 (default): momentum falls while the rate rises, and rises again; 0: it stays */
    double cycle_min_mom;    /* the momentum between the two halves; default 0.8 */
    double cycle_max_mom;    /* the momentum at the beginning and end; default 0.9 */
    double decay_mom_rate;   /* after the cycle, how much the momentum grows per decay_step_size; default 0 */
} tsr_lr_one_cycle_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_lr_one_cycle_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_one_cycle_options_init(tsr_lr_one_cycle_options *options, size_t struct_size);

/** DeepSpeed's OneCycle, which sets the rate whatever base_lr is, and the momentum: that of SGD, or beta1 of Adam and
 *  AdamW. Create these with a beta2 of 0.99 for the values of DeepSpeed, which sets that too.
 *  @param options  borrowed for the call
 *  @param out      the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_one_cycle(const tsr_lr_one_cycle_options *options, tsr_lr_schedule **out);

/** `min_lr` times 1 + step_rate * step / step_size, whatever base_lr is (DeepSpeed's LRRangeTest).
 *  @param min_lr     the first rate; finite, not negative
 *  @param step_size  at least 1
 *  @param step_rate  finite, not negative
 *  @param staircase  1: step / step_size is rounded down
 *  @param out        the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_range_test(double min_lr, int64_t step_size, double step_rate,
                                                  tsr_flag staircase, tsr_lr_schedule **out);

/** One schedule after the other (PyTorch's SequentialLR). Each begins with its step 0.
 *  @param schedules     n schedules, of which only the values count, not the steps; borrowed for the call
 *  @param n             at least 1; at most 1000 with all that they are composed of, nested at most 16 deep
 *  @param milestones    the steps at which the second to last schedule begin: at least 1, strictly
 *                       ascending; borrowed for the call
 *  @param n_milestones  n - 1
 *  @param out           the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_sequential(const tsr_lr_schedule *const *schedules, size_t n,
                                                  const int64_t *milestones, size_t n_milestones,
                                                  tsr_lr_schedule **out);

/** Several schedules at once (PyTorch's ChainedScheduler): each takes the rate of the previous one as its base_lr, so
 *  that factors multiply.
 *  @param schedules  n schedules, of which only the values count; borrowed for the call. One that sets the
 *                    rate whatever base_lr is can only be the first
 *  @param n          as for tsr_lr_sequential
 *  @param out        the schedule
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_chained(const tsr_lr_schedule *const *schedules, size_t n,
                                               tsr_lr_schedule **out);

/** The learning rate of a step. This and tsr_lr_schedule_momentum_at depend on nothing else and change nothing.
 *  @param schedule  borrowed for the call
 *  @param step      not negative
 *  @param base_lr   finite, not negative; some kinds ignore it
 *  @param lr        out
 *  @return TSR_OK, INVALID_ARGUMENT (also if the rate is not finite at this step), INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_schedule_lr_at(const tsr_lr_schedule *schedule, int64_t step, double base_lr,
                                                      double *lr);

/** The momentum of a step: that of SGD, or beta1 of Adam and AdamW.
 *  @param schedule  borrowed for the call
 *  @param step      not negative
 *  @param momentum  out; NaN: the schedule leaves it unchanged
 *  @return TSR_OK, INVALID_ARGUMENT (also if it has grown to 1), INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_schedule_momentum_at(const tsr_lr_schedule *schedule, int64_t step,
                                                            double *momentum);

/** Let the schedule set an optimizer from now on: its learning rate, whose value so far becomes base_lr, and its
 *  momentum if the schedule has one. Attach it before a checkpoint is loaded. It may be destroyed before the schedule.
 *  Another schedule may take over an optimizer: attach it there too and step only that one from then on, because each
 *  schedule sets the rate whatever the other has set.
 *  @param schedule   borrowed for the call
 *  @param optimizer  borrowed until destroy of the schedule or the optimizer
 *  @return TSR_OK, INVALID_ARGUMENT (it has no momentum, but the schedule sets one), INVALID_STATE (attached
 *          already; its gradients are being reduced)
 *  @threadsafety exclusive, both  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_schedule_attach(tsr_lr_schedule *schedule, tsr_optimizer *optimizer);

/** Move on to the next step and set the attached optimizers. Call it after their step, if it was not skipped.
 *  @param schedule  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT (a value is out of range), INVALID_STATE (gradients of an optimizer that steps in
 *          backward are being reduced); the step is then unchanged, and the call can be repeated
 *  @threadsafety exclusive, with its optimizers  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_schedule_step(tsr_lr_schedule *schedule);

/** The number of steps made, including those before a loaded checkpoint: the step that the optimizers are set for.
 *  @param schedule  borrowed for the call
 *  @param steps     out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_schedule_steps(const tsr_lr_schedule *schedule, int64_t *steps);

/** Go to a step and set the attached optimizers.
 *  @param schedule  borrowed for the call
 *  @param steps     not negative
 *  @return as tsr_lr_schedule_step
 *  @threadsafety exclusive, with its optimizers  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_lr_schedule_set_steps(tsr_lr_schedule *schedule, int64_t steps);

/** Free the schedule. NULL is ignored. The optimizers keep what it has set.
 *  @param schedule  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_lr_schedule_destroy(tsr_lr_schedule *schedule);

#ifdef __cplusplus
}
#endif
#endif
