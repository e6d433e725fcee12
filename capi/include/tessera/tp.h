/* Tessera: tensor-parallel training. Each rank of a group holds a slice of every large parameter and computes with it;
 * between such regions of the model, activations are gathered, summed or split.
 *
 * A two-layer perceptron whose first weight is cut by columns and whose second by rows needs one sum in forward and one
 * in backward:
 *
 *     tsr_tp_rule rules[] = {{.pattern = "fc1", .style = TSR_TP_COLUMN}, {.pattern = "fc2", .style = TSR_TP_ROW}};
 *     tsr_tp_create(mesh, params, n, rules, 2, NULL, &tp);
 *     h = relu(x @ fc1.T)            my outputs of fc1
 *     y = h @ fc2.T                  my summand
 *     tsr_tp_leave(tp, &y, -1, &fc2_bias, &y, NULL, NULL)
 *     dx = (dy @ fc2 * relu') @ fc1  my summand
 *     tsr_tp_enter_backward(tp, &dx, -1, &dx, NULL, NULL)
 *
 * Parameters and activations are on the CPU or on the communicator's CUDA device (docs/TENSOR_PARALLEL.md). On a device a call
 * returns once its operation is on `stream`, in whose order it reads and writes its tensors. With a work it runs on a stream of the
 * model, after what `stream` has then: tsr_work_order makes a stream wait for it. Operations of a model on a device are done one
 * after the other. Where a call below says that it waits, that is for the host.
 *
 * docs/TENSOR_PARALLEL.md has complete examples. */
#ifndef TESSERA_TP_H
#define TESSERA_TP_H

#include "layout.h"
#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What a rule does with a parameter. Weights are [outputs, inputs, ...]. Dimensions are cut like torch.chunk (equal
 *  parts of ceil(size / ranks), then a shorter one, then empty ones), so sizes need not be divisible by the number of
 *  ranks. */
enum {
    TSR_TP_REPLICATE = 1,  /* every rank holds it; the default for parameters that no rule matches */
    TSR_TP_COLUMN = 2,     /* cut along dimension 0, weights and biases: each rank computes some of the outputs */
    TSR_TP_ROW = 3,        /* weights are cut along dimension 1: each rank takes some of the inputs; biases, which have
                            * one dimension, are replicated and added once, after the sum (tsr_tp_leave) */
    TSR_TP_VOCABULARY = 4, /* the weight [words, features] of an embedding, cut along dimension 0 (tsr_tp_embed) */
    TSR_TP_SEQUENCE = 5,   /* replicated, used where each rank has a part of the sequence, such as the weight of a norm:
                            * tsr_tp_sum_grads sums its gradient over the ranks */
    TSR_TP_SHARD = 6,      /* cut along the rule's `dim` */
    TSR_TP_LAYOUT = 7      /* cut as the rule's `layout` says: for weights that join several, such as q, k and v */
};
typedef int32_t tsr_tp_style;

/** One entry of a plan. The pattern is a shell pattern for each dotted part of a name: '*' matches any characters but
 *  dots, '?' one character, "[abc]" one of a set. It matches a parameter, or all parameters of a module:
 *  "layers.*.attn.w[qkv]" matches "layers.0.attn.wq.weight" and "layers.0.attn.wq.bias". */
typedef struct tsr_tp_rule {
    const char *pattern; /* UTF-8 */
    tsr_tp_style style;  /* a TSR_TP_ value */
    int32_t dim;         /* of TSR_TP_SHARD; otherwise 0 */
    /* of TSR_TP_LAYOUT: of the parameter, over the ranks of the group; its boxes are whole in all dimensions but one, and
     * a rank's slice has its boxes one after another along that dimension. Otherwise NULL */
    const tsr_layout *layout;
    /* of TSR_TP_COLUMN, TSR_TP_ROW and TSR_TP_SHARD: the number of attention heads, of one size, that the dimension which is
     * cut consists of. Each rank gets the same number of complete heads; another number of ranks is an error. 0: cut
     * between any rows */
    int32_t heads;
    int32_t reserved; /* 0 */
} tsr_tp_rule;

/** Options, the same on every rank. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_tp_options {
    size_t struct_size;
    tsr_flag sync_values; /* 1 (default): slices are cut from rank 0's values; 0: each rank cuts its own */
    /* 1: between regions, activations are cut along the sequence (tsr_tp_enter and tsr_tp_leave with a dimension), so
     * gradients of row biases are summed over the ranks like those of the style sequence; default 0 */
    tsr_flag sequence_parallel;
} tsr_tp_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_tp_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_options_init(tsr_tp_options *options, size_t struct_size);

/** Cut the parameters of a model over the ranks of a mesh dimension, check that the ranks' plans are equal, and give each
 *  rank its slices.
 *  @param mesh     of one dimension, such as a slice (tsr_mesh_slice) of a larger one. The model keeps its communicator, and
 *                  its calls exclude those on that communicator
 *  @param params   n contiguous tensors with unique names and the shapes of the whole parameters; borrowed for the call. A
 *                  leading "module." or "_orig_mod." of a name is stripped.
 *                  Their values are read on rank 0 (without sync_values on every rank); data may be NULL on the others.
 *                  If it is NULL there too, the slices are zeros, for example until a checkpoint is loaded. All on the CPU
 *                  or all on the communicator's CUDA device, where they are read in the order of the default stream, for
 *                  which the call waits
 *  @param n        at least 1
 *  @param rules    borrowed for the call; NULL if n_rules is 0
 *  @param n_rules  number of rules
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the tensor-parallel model
 *  @return TSR_OK, INVALID_ARGUMENT (also: a pattern that matches nothing, a parameter that several match, or one that
 *          cannot have its style; on all ranks, naming the rank), MISMATCH (names the first difference between plans),
 *          UNSUPPORTED (parameters on a device that the communicator has no transport for), TIMEOUT, ABORTED, PEER_LOST,
 *          NO_MEMORY, CUDA, INTERRUPTED
 *  @threadsafety exclusive mesh  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_create(tsr_mesh *mesh, const tsr_param *params, size_t n,
                                              const tsr_tp_rule *rules, size_t n_rules, const tsr_tp_options *options,
                                              tsr_tp **out);

/** The number of parameters.
 *  @param tp     borrowed for the call
 *  @param count  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_param_count(const tsr_tp *tp, size_t *count);

/** A parameter as registered.
 *  @param tp     borrowed for the call
 *  @param index  0 to count - 1, in the order of registration
 *  @param param  out, may be NULL: name, whole shape and dtype, borrowed until destroy; data is NULL
 *  @param style  out, may be NULL: a TSR_TP_ value
 *  @param cut    out, may be NULL: the dimension along which it is cut; -1: it is replicated
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_param(const tsr_tp *tp, size_t index, tsr_param *param, tsr_tp_style *style,
                                             int32_t *cut);

/** This rank's slice of a parameter. It may be empty. The trainer and its optimizer write it.
 *  @param tp     borrowed for the call
 *  @param index  0 to count - 1
 *  @param slice  out: name, shape and memory, aligned to 64 bytes, borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_slice(const tsr_tp *tp, size_t index, tsr_param *slice);

/** The gradient of this rank's slice, which the trainer writes. Its memory exists from the first call of this function.
 *  @param tp     borrowed for the call
 *  @param index  0 to count - 1
 *  @param grad   out: shape and memory, aligned to 64 bytes and initially zero, borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (not a floating-point parameter), NO_MEMORY
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_grad(tsr_tp *tp, size_t index, tsr_tensor *grad);

/** The layout of a parameter: which rank holds which part, over all ranks of the communicator that the mesh, or the mesh
 *  that it is a slice of, was created from.
 *  @param tp     borrowed for the call
 *  @param index  0 to count - 1
 *  @param out    the layout, to be destroyed by the caller
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_layout(const tsr_tp *tp, size_t index, tsr_layout **out);

/** Set the stream of the parameters' CUDA device in whose order tsr_tp_sum_grads and tsr_tp_zero_grad run: that of the backward
 *  pass and of the optimizer. What the previous one has of that comes first.
 *  @param tp      borrowed for the call
 *  @param stream  a CUDA stream that outlives its use, or NULL for the device's default stream, which is the default
 *  @return TSR_OK, INVALID_ARGUMENT (also: a stream for parameters on the CPU, or of another device), INVALID_STATE, CUDA
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_set_stream(tsr_tp *tp, void *stream);

/* Activations. `dim` is the dimension along which an activation is cut over the ranks outside of the region; -1: every
 * rank has all of it there. It is cut like torch.chunk and may be any dimension. All tensors are contiguous, of one
 * dtype, and borrowed until the work is done. */

/** Enter a region, in which every rank has all of an activation: forward. With `dim` it gathers the ranks' parts,
 *  otherwise it copies (in place: does nothing).
 *  @param tp      borrowed until the work is done
 *  @param input   this rank's part along `dim`
 *  @param dim     the dimension, or -1
 *  @param output  the whole activation; without `dim` it may be `input`
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, NO_MEMORY,
 *          INTERRUPTED
 *  @threadsafety exclusive  @collective yes, with dim  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_enter(tsr_tp *tp, const tsr_tensor *input, int32_t dim, const tsr_tensor *output,
                                             void *stream, tsr_work **work);

/** The adjoint of tsr_tp_enter: the sum over the ranks of their gradients of the activation, and with `dim` this rank's
 *  part of it.
 *  @param tp      borrowed until the work is done
 *  @param grad    this rank's gradient of the whole activation
 *  @param dim     as in forward
 *  @param output  the gradient of tsr_tp_enter's `input`, in its shape; without `dim` it may be `grad`
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, NO_MEMORY,
 *          INTERRUPTED
 *  @threadsafety exclusive  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_enter_backward(tsr_tp *tp, const tsr_tensor *grad, int32_t dim,
                                                      const tsr_tensor *output, void *stream, tsr_work **work);

/** Leave a region, in which each rank computed a summand of an activation: forward. The result is the sum over the ranks,
 *  and with `dim` this rank's part of it; then the bias is added, once.
 *  @param tp      borrowed until the work is done
 *  @param input   this rank's summand
 *  @param dim     the dimension, or -1
 *  @param bias    NULL, or as many elements as the last dimension of `output`; borrowed until the work is done
 *  @param output  the sum, or this rank's part; without `dim` it may be `input`
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, NO_MEMORY,
 *          INTERRUPTED
 *  @threadsafety exclusive  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_leave(tsr_tp *tp, const tsr_tensor *input, int32_t dim, const tsr_tensor *bias,
                                             const tsr_tensor *output, void *stream, tsr_work **work);

/** The adjoint of tsr_tp_leave: the gradient of every rank's summand, which with `dim` is gathered from the ranks' parts.
 *  @param tp      borrowed until the work is done
 *  @param grad    the gradient of tsr_tp_leave's `output`
 *  @param dim     as in forward
 *  @param output  the gradient of tsr_tp_leave's `input`; without `dim` it may be `grad`
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, NO_MEMORY,
 *          INTERRUPTED
 *  @threadsafety exclusive  @collective yes, with dim  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_leave_backward(tsr_tp *tp, const tsr_tensor *grad, int32_t dim,
                                                      const tsr_tensor *output, void *stream, tsr_work **work);

/** Computes with one part of an activation, on the thread of the call. It must not call functions of the same tsr_tp, and
 *  must not unwind.
 *  @param begin      the part's first index along the dimension; parts come once each, in order, except empty ones
 *  @param part       contiguous, with the part's shape; memory borrowed until it returns. On a device it is called while
 *                    earlier parts are computed, and puts what it does onto the stream of the call, in whose order the
 *                    part is there and its memory borrowed
 *  @param message    room for TSR_MESSAGE_BYTES: text written there (UTF-8, terminated by 0) becomes part of the error
 *  @param user_data  that of the call
 *  @return 0, or a reason for failure: a TSR_E_ code of error.h, or any other number, which the call returns as USER with
 *          the number as native code */
typedef int32_t (*tsr_tp_part_fn)(int64_t begin, const tsr_tensor *part, char *message, void *user_data);

/** tsr_tp_enter with a dimension, overlapped: `compute` gets the part of one rank after the other, while the next ones are
 *  on their way. Its adjoint is tsr_tp_leave_parts, or tsr_tp_enter_backward.
 *  @param tp         borrowed for the call
 *  @param input      this rank's part along `dim`
 *  @param dim        at least 0
 *  @param output     out: the whole activation
 *  @param stream     CUDA stream, or NULL on the CPU
 *  @param compute    reads each part
 *  @param user_data  passed to `compute`
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, NO_MEMORY,
 *          INTERRUPTED, or what `compute` returned: then `output` is complete, and no other rank has failed
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_enter_parts(tsr_tp *tp, const tsr_tensor *input, int32_t dim,
                                                   const tsr_tensor *output, void *stream, tsr_tp_part_fn compute,
                                                   void *user_data);

/** tsr_tp_leave with a dimension, overlapped: `compute` writes this rank's summand of the part of one rank after the other,
 *  while the one before is being summed. No rank needs memory for its summand of the whole activation. Its adjoint is
 *  tsr_tp_enter_parts, or tsr_tp_leave_backward.
 *  @param tp         borrowed for the call
 *  @param size       of the whole activation along `dim`
 *  @param dim        at least 0
 *  @param bias       NULL, or as many elements as the last dimension of `output`, added once; borrowed for the call
 *  @param output     out: this rank's part along `dim` of the sum
 *  @param stream     CUDA stream, or NULL on the CPU
 *  @param compute    writes each part
 *  @param user_data  passed to `compute`
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, NO_MEMORY,
 *          INTERRUPTED, or what `compute` returned, which ends the communicator: the other ranks get ABORTED
 *  @threadsafety exclusive  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_leave_parts(tsr_tp *tp, int64_t size, int32_t dim, const tsr_tensor *bias,
                                                   const tsr_tensor *output, void *stream, tsr_tp_part_fn compute,
                                                   void *user_data);

/** Gather an activation that is cut along `dim` inside of a region, such as the outputs of a TSR_TP_COLUMN weight. Its
 *  adjoint is tsr_tp_split if every rank then computes the same, otherwise tsr_tp_enter_backward.
 *  @param tp      borrowed until the work is done
 *  @param input   this rank's part along `dim`
 *  @param dim     at least 0
 *  @param output  the whole activation
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, NO_MEMORY,
 *          INTERRUPTED
 *  @threadsafety exclusive  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_gather(tsr_tp *tp, const tsr_tensor *input, int32_t dim,
                                              const tsr_tensor *output, void *stream, tsr_work **work);

/** Take this rank's part of an activation that every rank has, such as the input of a TSR_TP_ROW weight. Its adjoint is
 *  tsr_tp_gather.
 *  @param tp      borrowed for the call
 *  @param input   the whole activation
 *  @param dim     at least 0
 *  @param output  this rank's part along `dim`
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_split(const tsr_tp *tp, const tsr_tensor *input, int32_t dim,
                                             const tsr_tensor *output, void *stream);

/** Look up words in an embedding that is cut over the ranks (TSR_TP_VOCABULARY) or whole. The results of the ranks are
 *  added, which is exact, since all but one are zeros.
 *  @param tp      borrowed until the work is done
 *  @param index   the parameter, [words, features]
 *  @param ids     i32 or i64, of any shape with at most 7 dimensions, the same on every rank; borrowed until the work is
 *                 done. On a device the call cannot see them: an id outside of the vocabulary gives zeros, and once the
 *                 device is done the communicator fails with INVALID_ARGUMENT, and with it the work
 *  @param dim     the dimension along which the result is cut over the ranks, or -1
 *  @param output  ids' shape and the features as the last dimension; with `dim` this rank's part
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT (also: an id outside of the vocabulary), INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST,
 *          MISMATCH, UNSUPPORTED, NO_MEMORY, INTERRUPTED
 *  @threadsafety exclusive  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_embed(tsr_tp *tp, size_t index, const tsr_tensor *ids, int32_t dim,
                                             const tsr_tensor *output, void *stream, tsr_work **work);

/** The adjoint of tsr_tp_embed: adds the gradients of this rank's words to `sum`, in the order of the ids.
 *  @param tp      borrowed until the work is done
 *  @param index   the parameter
 *  @param ids     as in forward. On a device, each of n ids looks through all of them, so the time grows with n * n
 *  @param grad    the gradient of tsr_tp_embed's `output`
 *  @param dim     as in forward
 *  @param sum     of the slice's shape and dtype, such as tsr_tp_grad's; borrowed until the work is done
 *  @param stream  CUDA stream, or NULL on the CPU
 *  @param work    out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, NO_MEMORY,
 *          INTERRUPTED
 *  @threadsafety exclusive  @collective yes, with dim  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_embed_backward(tsr_tp *tp, size_t index, const tsr_tensor *ids,
                                                      const tsr_tensor *grad, int32_t dim, const tsr_tensor *sum,
                                                      void *stream, tsr_work **work);

/** How the losses of the rows are joined. */
enum { TSR_LOSS_NONE = 0, TSR_LOSS_MEAN = 1, TSR_LOSS_SUM = 2 };
typedef int32_t tsr_loss_reduction;

/** Options of tsr_tp_cross_entropy, those of torch.nn.functional.cross_entropy. `_init` writes the defaults. */
typedef struct tsr_cross_entropy_options {
    size_t struct_size;
    int64_t ignore_index;         /* rows with this target do not count; default -100 */
    double label_smoothing;       /* 0 (default) to 1, over the whole vocabulary */
    tsr_loss_reduction reduction; /* TSR_LOSS_MEAN (default): by the weights of the targets, like PyTorch */
    /* NULL (default), or f32 or f64 with a weight for each class of the whole vocabulary; borrowed until the work is done */
    const tsr_tensor *class_weights;
    double grad_scale; /* multiplies the gradient; default 1 */
    /* NULL (default), or the communicator of the ranks that have other rows of the batch, such as a mesh's "dp": the mean
     * is then over the rows of all of them, each rank's loss is its own rows' part, and losses and gradients of these ranks
     * add up (reduce them by TSR_REDUCE_SUM, not AVG). Borrowed for the call, which on the CPU blocks until these ranks have
     * called */
    tsr_comm *data_ranks;
} tsr_cross_entropy_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_cross_entropy_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_cross_entropy_options_init(tsr_cross_entropy_options *options, size_t struct_size);

/** Cross-entropy of logits whose vocabulary is cut over the ranks, and its gradient, by two sums of a few numbers a row
 *  (Shoeybi et al. 2019). It computes in f32, or in f64 for f64 logits.
 *  @param tp          borrowed until the work is done
 *  @param logits      [..., classes of this rank], f16, bf16, f32 or f64: the vocabulary is cut like torch.chunk, and a rank
 *                     may have no classes; borrowed until the work is done
 *  @param vocabulary  the number of classes over all ranks
 *  @param targets     i32 or i64 [...], the same on every rank; borrowed until the work is done. On a device the call cannot
 *                     see them: a wrong one counts as ignored, and once the device is done the communicator fails with
 *                     INVALID_ARGUMENT, and with it the work
 *  @param options     borrowed for the call; NULL: all defaults
 *  @param loss        f32, or f64 for f64 logits; of no dimension, or with TSR_LOSS_NONE of the targets' shape. The mean
 *                     over no rows is NaN, like PyTorch's. Borrowed until the work is done
 *  @param grad        NULL, or of the logits' shape and dtype (it may be their memory): receives the gradient of the loss
 *                     (TSR_LOSS_NONE: of each row's loss); borrowed until the work is done
 *  @param stream      CUDA stream, or NULL on the CPU
 *  @param work        out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT (also: a target that is neither a class nor ignore_index), INVALID_STATE, TIMEOUT,
 *          ABORTED, PEER_LOST, MISMATCH, UNSUPPORTED, INTERRUPTED
 *  @threadsafety exclusive  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_cross_entropy(tsr_tp *tp, const tsr_tensor *logits, int64_t vocabulary,
                                                     const tsr_tensor *targets,
                                                     const tsr_cross_entropy_options *options, const tsr_tensor *loss,
                                                     const tsr_tensor *grad, void *stream, tsr_work **work);

/** Sum over the ranks the gradients of which each rank has a part: those of TSR_TP_SEQUENCE and, with sequence_parallel,
 *  of TSR_TP_ROW's biases. Call it once per step, after backward and before clipping and the optimizer's step. All other
 *  gradients are complete on their rank. On a device it goes onto the stream of tsr_tp_set_stream; with a work, order the
 *  stream of the optimizer after it.
 *  @param tp    borrowed until the work is done
 *  @param work  out; NULL: the call returns when the operation is done
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, TIMEOUT, ABORTED, PEER_LOST, MISMATCH, INTERRUPTED
 *  @threadsafety exclusive  @collective yes  @blocking only without work  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_sum_grads(tsr_tp *tp, tsr_work **work);

/** Set the gradients of all slices to zero.
 *  @param tp  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_tp_zero_grad(tsr_tp *tp);

/** Free the tensor-parallel model. NULL is ignored. Views become invalid; optimizers and states created from it keep the
 *  slices.
 *  @param tp  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_tp_destroy(tsr_tp *tp);

#ifdef __cplusplus
}
#endif
#endif
