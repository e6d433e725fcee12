/* Tessera: what a checkpoint saves and loads in place: named tensors with layouts, and named values. */
#ifndef TESSERA_STATE_H
#define TESSERA_STATE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** An empty state.
 *  @param out  the state
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_create(tsr_state **out);

/** Add a tensor that every rank holds whole and equal.
 *  @param state   borrowed for the call
 *  @param name    UTF-8, not empty, at most 1 KiB, different from every other name; a "module." or "_orig_mod." part is
 *                 stripped
 *  @param tensor  contiguous, on the CPU; its memory is borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_tensor(tsr_state *state, const char *name, const tsr_tensor *tensor);

/** Add this rank's pieces of a tensor that lies on the ranks by `layout`.
 *  @param state    borrowed for the call
 *  @param name     as tsr_state_add_tensor
 *  @param layout   borrowed for the call (copied); its world size is the saver's
 *  @param dtype    of the whole tensor
 *  @param pieces   contiguous tensors, one per box that the layout gives this rank, of the boxes' sizes; memory borrowed
 *                  until destroy; NULL if there is none
 *  @param rank     this rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_sharded(tsr_state *state, const char *name, const tsr_layout *layout,
                                                      tsr_dtype dtype, const tsr_tensor *pieces, int32_t rank);

/** Add a DDP model's parameters as `<prefix>.<parameter>`.
 *  @param state   borrowed for the call
 *  @param prefix  "model", say; borrowed for the call
 *  @param ddp     borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_ddp(tsr_state *state, const char *prefix, tsr_ddp *ddp);

/** Add the shards of an FSDP model's parameters as `<prefix>.<parameter>`: saved and loaded in any layout, at any number of
 *  ranks, where this rank's rows are. While a unit is whole, or its gradients are reduced, a load is INVALID_STATE.
 *  @param state   borrowed for the call
 *  @param prefix  "model", say; borrowed for the call
 *  @param fsdp    borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_fsdp(tsr_state *state, const char *prefix, tsr_fsdp *fsdp);

/** Add an optimizer's moments as `<prefix>.state.<parameter>.<moment>` and its settings as
 *  `<prefix>.param_groups.0.<setting>`. A load sets the settings too; the steps are counted on from the moments.
 *  @param state      borrowed for the call
 *  @param prefix     "optim", say; borrowed for the call
 *  @param optimizer  borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_optimizer(tsr_state *state, const char *prefix, tsr_optimizer *optimizer);

/** Add a scaler's scale, its count of steps and its options as `<prefix>.*`, with the names of PyTorch's state_dict. A load sets
 *  them all.
 *  @param state   borrowed for the call
 *  @param prefix  "scaler", say; borrowed for the call
 *  @param scaler  borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_grad_scaler(tsr_state *state, const char *prefix,
                                                          tsr_grad_scaler *scaler);

/** Add a sampler's position as `<prefix>.*`.
 *  @param state    borrowed for the call
 *  @param prefix   "data", say; borrowed for the call
 *  @param sampler  borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_sampler(tsr_state *state, const char *prefix, tsr_sampler *sampler);

/* An object of yours that a state saves and loads: callbacks.
 *
 * They get a state of their own, which lives for the call and holds values alone: `collect` sets them (tsr_state_set_int64,
 * tsr_state_set_double, tsr_state_set_value), `check` and `apply` read them (tsr_state_get_...), by their names without the
 * prefix. Tensors of the object are added to the state as any other, under the prefix or not.
 *
 * All are called on the thread that calls the save or load, and before that returns, a save in the background too:
 * - a save calls `collect`. Rank 0's values are saved; all ranks give the same names. With the prefix `rank/<r>/...` a rank
 *   has values of its own.
 * - a load calls `collect` for the names that are wanted, `check`, and, when the tensors are in place, `apply`. Both get a
 *   value for each name that `collect` gave: as it was saved, whatever its type, and what the load allowed to be missing as
 *   `collect` gave it. The rules of tsr_load_options on missing and unexpected names hold.
 * - tsr_state_get_... of a name under the prefix calls `collect`.
 *
 * Each returns 0, or why not: a TSR_E_ code of error.h, which becomes that of the call; or any other number, which the call
 * returns as USER, with the number as native code. `message` has room for TSR_MESSAGE_BYTES; text put there (UTF-8, ended by
 * 0) stands in the error. Without it that of a tsr_ function which failed in the callback with that code does. A save or
 * load of several ranks fails alike on all of them: where `collect` or `check` did, nothing was saved or overwritten; where
 * `apply` did, tensors and objects before it are loaded.
 *
 * A callback must not unwind. What it calls on the state or saver that it serves is INVALID_STATE; if it destroys them, they
 * end when the call has. It may use communicators if all ranks' callbacks do alike. */

/** Sets the values that are saved, in `values`. */
typedef int32_t (*tsr_state_collect_fn)(tsr_state *values, char *message, void *user_data);
/** Takes `values`, or only looks whether it would (`check`): if not, nothing of the load has been overwritten yet. */
typedef int32_t (*tsr_state_take_fn)(const tsr_state *values, char *message, void *user_data);

/** An object's callbacks and data. Zero the struct, set struct_size and what you have. */
typedef struct tsr_state_source {
    size_t struct_size;
    tsr_state_collect_fn collect; /* needed */
    tsr_state_take_fn check;      /* may be NULL: all values are taken */
    tsr_state_take_fn apply;      /* needed */
    tsr_destroy_fn destroy;       /* may be NULL; see tsr_state_add_source */
    void *user_data;              /* passed to each */
} tsr_state_source;

/** Add an object of yours, whose values are collected at each save and given back at each load, as `<prefix>.<name>`.
 *  destroy(user_data) is called exactly once: on the thread that destroys the state, or, if this call fails, before it
 *  returns. Only a `source` that cannot be read stays the caller's: NULL, of a wrong struct_size, or with fields that this
 *  library does not know.
 *  @param state   borrowed for the call
 *  @param prefix  "loader", say; borrowed for the call. No other source (optimizer, sampler) and no value may be under it, nor
 *                 it under another's.
 *  @param source  copied; its user_data is borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT (the prefix, or a callback that is NULL), INVALID_STATE, UNSUPPORTED (fields that are
 *          not known)
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_source(tsr_state *state, const char *prefix,
                                                     const tsr_state_source *source);

/** Set the value `name` to an integer.
 *  @param state  borrowed for the call
 *  @param name   UTF-8, borrowed for the call
 *  @param value  copied
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_set_int64(tsr_state *state, const char *name, int64_t value);

/** The value `name`, which must be an integer.
 *  @param state  borrowed for the call
 *  @param name   borrowed for the call
 *  @param value  out
 *  @return TSR_OK, NOT_FOUND, INVALID_ARGUMENT (of another kind), INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_get_int64(const tsr_state *state, const char *name, int64_t *value);

/** Set the value `name` to a floating-point number (NaN and infinities too).
 *  @param state  borrowed for the call
 *  @param name   UTF-8, borrowed for the call
 *  @param value  copied
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_set_double(tsr_state *state, const char *name, double value);

/** The value `name`, which must be a floating-point number (NaN and infinities too).
 *  @param state  borrowed for the call
 *  @param name   borrowed for the call
 *  @param value  out
 *  @return TSR_OK, NOT_FOUND, INVALID_ARGUMENT (of another kind), INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_get_double(const tsr_state *state, const char *name, double *value);

/** Set the value `name` to any value of docs/FORMAT.md's typed JSON (null, bool, int, big int, double, string, bytes,
 *  list, tuple, map; nested at most 64 deep).
 *  @param state  borrowed for the call
 *  @param name   UTF-8, borrowed for the call
 *  @param json   UTF-8, borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT (says where the JSON is wrong), INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_set_value(tsr_state *state, const char *name, const char *json);

/** The value `name` as typed JSON.
 *  @param state     borrowed for the call
 *  @param name      borrowed for the call
 *  @param json      out: `capacity` bytes, ended by 0; not written if it does not fit; may be NULL if capacity is 0
 *  @param capacity  bytes
 *  @param size      out: bytes needed, the final 0 included
 *  @return TSR_OK (compare size with capacity), NOT_FOUND, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_get_value(const tsr_state *state, const char *name, char *json,
                                                    size_t capacity, size_t *size);

/** The number of tensors.
 *  @param state  borrowed for the call
 *  @param count  out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_tensor_count(const tsr_state *state, size_t *count);

/** What a tensor is, as a whole. They are in the order of their names.
 *  @param state   borrowed for the call
 *  @param index   0 to tensor count - 1
 *  @param tensor  out: name, dtype and the whole shape, borrowed until destroy; data is NULL
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_tensor(const tsr_state *state, size_t index, tsr_param *tensor);

/** Gather a whole tensor of which each rank holds a part. One after the other they are a full state, for which no rank needs
 *  memory all at once; of those that a rank holds whole, it is a copy.
 *  @param state  borrowed for the call; its tensor is the same on every rank
 *  @param comm   borrowed for the call: the ranks that hold the parts
 *  @param name   of the tensor, borrowed for the call
 *  @param root   the rank that gets it, or -1: all do
 *  @param whole  out, borrowed for the call: contiguous memory of its dtype and whole shape where it is gathered; else not
 *                looked at, may be NULL
 *  @return TSR_OK, NOT_FOUND, INVALID_ARGUMENT, INVALID_STATE, MISMATCH (the ranks name different tensors, or another rank
 *          has one of these errors), TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY
 *  @threadsafety exclusive state and comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_gather(tsr_state *state, tsr_comm *comm, const char *name, int32_t root,
                                                 const tsr_tensor *whole);

/** Set a metric of the next save ("loss"), which takes it, whatever comes of it; shown by `tessera ckpt ls`.
 *  @param state  borrowed for the call
 *  @param name   UTF-8, borrowed for the call
 *  @param value  any double
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_set_metric(tsr_state *state, const char *name, double value);

/** Free the state. NULL is taken. No save or load may be using it.
 *  @param state  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_state_destroy(tsr_state *state);

#ifdef __cplusplus
}
#endif
#endif
