/* Tessera: metrics over the samples of all ranks, exactly: with the same bits on all ranks, for every number of ranks and every
 * distribution of the samples over them. Definitions are scikit-learn's; docs/METRICS.md has them.
 *
 * A rank updates its metric with its own samples, which communicates nothing. Computing is collective: over the ranks among
 * which the samples are distributed, which in a mesh are those of the data-parallel dimension. Ranks without samples take part.
 *
 *     tsr_metric_create(TSR_METRIC_AUROC, NULL, &auroc);
 *     for each batch:
 *         tsr_sampler_valid(sampler, mask, count)       what fills up the last step is not counted
 *         tsr_metric_update(auroc, &scores, &labels, NULL, &valid)
 *     tsr_metric_compute(auroc, comm, &value) */
#ifndef TESSERA_METRICS_H
#define TESSERA_METRICS_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What a metric computes. A sample has a prediction and a target: a number, a label (an integer from 0 to classes - 1), or
 *  several of them in the last dimension. "Scores" rank samples; any finite numbers do, except where probabilities are
 *  required. Arrays are the results of tsr_metric_result; without one the result is the number that compute returns. It is NaN
 *  where the metric is not defined, such as without samples. */
enum {
    TSR_METRIC_MEAN = 0,                /* of numbers; no targets */
    TSR_METRIC_SUM = 1,                 /* of numbers; no targets */
    TSR_METRIC_MEAN_ABSOLUTE_ERROR = 2, /* numbers, numbers; `outputs` columns */
    TSR_METRIC_MEAN_SQUARED_ERROR = 3,  /* likewise */
    /* likewise: the root of each output's error, then the average */
    TSR_METRIC_ROOT_MEAN_SQUARED_ERROR = 4,
    /* likewise: the coefficient of determination. NaN where the squares of targets underflow */
    TSR_METRIC_R2_SCORE = 5,
    TSR_METRIC_ACCURACY = 6, /* labels, labels. Multilabel: all labels of a sample must match */
    /* scores of each class, labels. The higher of two classes with equal scores is the larger */
    TSR_METRIC_TOP_K_ACCURACY = 7,
    /* labels, labels: the mean recall of the classes that have samples */
    TSR_METRIC_BALANCED_ACCURACY = 8,
    /* labels, labels. "matrix" [true class, predicted class]: i64, or f64 if weighted or normalized */
    TSR_METRIC_CONFUSION_MATRIX = 9,
    TSR_METRIC_PRECISION = 10, /* labels, labels */
    TSR_METRIC_RECALL = 11,    /* labels, labels */
    TSR_METRIC_F_BETA = 12,    /* labels, labels */
    /* scores, labels. "fpr", "tpr", "thresholds", which begin with infinity */
    TSR_METRIC_ROC_CURVE = 13,
    /* scores, labels. "precision", "recall", "thresholds", one shorter, ascending */
    TSR_METRIC_PRECISION_RECALL_CURVE = 14,
    /* scores, labels: the sum of precision times steps of recall */
    TSR_METRIC_AVERAGE_PRECISION = 15,
    TSR_METRIC_AUROC = 16,    /* scores, labels: the area under the ROC curve */
    TSR_METRIC_LOG_LOSS = 17, /* probabilities or logits, labels. Binary: of class 1 */
    /* logits [..., classes], labels [...]: exp of the mean cross entropy */
    TSR_METRIC_PERPLEXITY = 18,
    /* The same four at `thresholds` evenly spaced thresholds from 0 to 1, for scores from 0 to 1. Their state has constant size,
     * and areas are those of the curve through these points: approximations */
    TSR_METRIC_BINNED_ROC_CURVE = 19,
    TSR_METRIC_BINNED_PRECISION_RECALL_CURVE = 20,
    TSR_METRIC_BINNED_AVERAGE_PRECISION = 21,
    TSR_METRIC_BINNED_AUROC = 22
};
typedef int32_t tsr_metric_kind;

/** What labels are. */
enum {
    /* 0 or 1; predictions have one score. Precision, recall and F-beta are those of class 1 */
    TSR_TASK_BINARY = 0,
    /* one of `classes`; predictions have a score for each. Curves are of each class against the rest */
    TSR_TASK_MULTICLASS = 1,
    /* `classes` labels of 0 or 1; predictions have a score or label for each */
    TSR_TASK_MULTILABEL = 2
};
typedef int32_t tsr_metric_task;

/** How the values of classes, labels or outputs become one. */
enum {
    TSR_AVERAGE_NONE = 0,  /* not: the array "values" has them, and the number is NaN */
    TSR_AVERAGE_MICRO = 1, /* the metric of all decisions together */
    TSR_AVERAGE_MACRO = 2, /* the mean */
    /* weighted by the samples of each class; r2_score: by the variance of each output */
    TSR_AVERAGE_WEIGHTED = 3,
    /* precision, recall and F-beta, multilabel: the mean of each sample's value */
    TSR_AVERAGE_SAMPLES = 4
};
typedef int32_t tsr_metric_average;

/** What the cells of a confusion matrix are divided by. */
enum {
    TSR_NORMALIZE_NONE = 0,
    TSR_NORMALIZE_TRUE = 1,        /* the sum of the row; a row of zeros stays */
    TSR_NORMALIZE_PREDICTIONS = 2, /* the sum of the column */
    TSR_NORMALIZE_ALL = 3          /* the sum of all */
};
typedef int32_t tsr_metric_normalize;

/** Options of a metric, the same on every rank. `_init` writes the defaults; afterwards every field is taken literally. A kind
 *  refuses options that it has not. */
typedef struct tsr_metric_options {
    size_t struct_size;
    /* what labels are; default TSR_TASK_BINARY. Kinds of classes alone, such as the confusion matrix, also take
     * TSR_TASK_MULTICLASS, which changes nothing */
    tsr_metric_task task;
    /* how the values of classes, labels or outputs become one; default TSR_AVERAGE_MACRO */
    tsr_metric_average average;
    /* what cells of a confusion matrix are divided by; default TSR_NORMALIZE_NONE */
    tsr_metric_normalize normalize;
    /* 1: the multiclass AUROC is the mean over pairs of classes (Hand and Till 2001); default 0: of each class against the
     * rest */
    tsr_flag one_vs_one;
    tsr_flag adjusted; /* 1: balanced accuracy is 0 for chance and 1 at best; default 0 */
    /* 1: the ROC curve keeps points on straight lines, which scikit-learn drops too; default 0 */
    tsr_flag all_points;
    /* 1: a curve stays distributed over the ranks by score, with all its points. In the order of the ranks (precision-recall:
     * from the last rank to the first) their arrays are the curve; default 0: every rank gets it */
    tsr_flag sharded;
    /* 1: predictions of log_loss are logits; default 0: probabilities, which sum to 1 */
    tsr_flag from_logits;
    /* of multiclass tasks and perplexity the number of classes, of multilabel that of labels; default 2 */
    int64_t classes;
    int64_t outputs;      /* columns of predictions and targets of a regression; default 1 */
    int64_t top_k;        /* how many classes a prediction of top_k_accuracy has; at most `classes`; default 2 */
    int64_t thresholds;   /* of binned kinds, at least 2; default 100 */
    int64_t ignore_index; /* perplexity leaves out tokens with this target; default -100 */
    double beta;          /* how much more recall counts than precision in F-beta; default 1 */
    /* precision, recall or F-beta where it is 0/0: 0 (default), 1, or NaN, which averages leave out */
    double zero_division;
    /* below 1: the standardized partial AUROC up to this false positive rate; default 1 */
    double max_fpr;
} tsr_metric_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_metric_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_metric_options_init(tsr_metric_options *options, size_t struct_size);

/** Create a metric without samples.
 *  @param kind     a TSR_METRIC_ value
 *  @param options  borrowed for the call; NULL: all defaults; the same on every rank
 *  @param out      the metric
 *  @return TSR_OK, INVALID_ARGUMENT (also for classes whose matrix would have more than 2^26 cells), NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_metric_create(tsr_metric_kind kind, const tsr_metric_options *options,
                                                  tsr_metric **out);

/** Add this rank's samples. Tensors are contiguous and on the CPU. Numbers are f64, f32, f16 or bf16, or integers that double has;
 *  labels are i64, i32, u8 or bool. An update that fails has added nothing; if it is not followed by one that succeeds, the next
 *  tsr_metric_compute or tsr_metric_gather fails with its error on every rank, which names this rank, and the one after that
 *  continues without it. Until then a merge or save of the metric is INVALID_STATE.
 *  Numbers of means, sums and regressions, and weights, are at most 2^256 in magnitude, so that their squares are finite; so
 *  are the losses of logits. Integers that are numbers are within 2^53.
 *  @param metric       borrowed for the call
 *  @param predictions  [samples] or [samples, columns]; samples may have several dimensions; borrowed for the call
 *  @param targets      the same samples; NULL for kinds without; borrowed for the call
 *  @param weights      of the samples, numbers of 0 or more; NULL: 1 each; borrowed for the call
 *  @param valid        u8 or bool of the samples: those with 0 are left out (tsr_sampler_valid); NULL: all count; borrowed for
 *                      the call
 *  @return TSR_OK, INVALID_ARGUMENT (shapes or dtypes that do not fit, a number that is not finite or a label out of range: the
 *          message has its index), INVALID_STATE, UNSUPPORTED (on a device), NO_MEMORY
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_metric_update(tsr_metric *metric, const tsr_tensor *predictions,
                                                  const tsr_tensor *targets, const tsr_tensor *weights,
                                                  const tsr_tensor *valid);

/** Compute the metric of all samples of all ranks. The samples stay, so that more can be added.
 *  @param metric  borrowed for the call
 *  @param comm    the ranks that have the samples, each sample once; borrowed for the call. NULL: this rank's samples alone
 *  @param value   out: the number; NaN for kinds that have arrays
 *  @return TSR_OK, INVALID_ARGUMENT (of an update), INVALID_STATE, MISMATCH (ranks compute different metrics), TIMEOUT, ABORTED,
 *          PEER_LOST, NO_MEMORY, INTERRUPTED
 *  @threadsafety exclusive metric and comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_metric_compute(tsr_metric *metric, tsr_comm *comm, double *value);

/** An array that the last tsr_metric_compute found. For several classes or labels, the arrays of curves have the class after
 *  their name: "fpr.0".
 *  @param metric  borrowed for the call
 *  @param name    UTF-8; borrowed for the call
 *  @param array   out: f64 or i64; memory and shape are the metric's, until the next compute, reset or destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NOT_FOUND (the message lists the names)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_metric_result(const tsr_metric *metric, const char *name, tsr_tensor *array);

/** Add the samples of another metric of the same kind and options, which keeps them.
 *  @param metric  borrowed for the call
 *  @param other   borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (an update of `other` failed, and no call has reported it), NO_MEMORY
 *  @threadsafety exclusive, both  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_metric_merge(tsr_metric *metric, const tsr_metric *other);

/** Move the samples of all ranks to rank 0, for example before a save. What tsr_metric_compute returns stays the same.
 *  @param metric  borrowed for the call
 *  @param comm    as for tsr_metric_compute
 *  @return as tsr_metric_compute
 *  @threadsafety exclusive metric and comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_metric_gather(tsr_metric *metric, tsr_comm *comm);

/** Forget all samples and results.
 *  @param metric  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_metric_reset(tsr_metric *metric);

/** Free the metric and its arrays. NULL is ignored.
 *  @param metric  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_metric_destroy(tsr_metric *metric);

#ifdef __cplusplus
}
#endif
#endif
