/* Tessera: what a checkpoint saves and loads in place: named tensors with layouts, and named values. */
#ifndef TESSERA_STATE_H
#define TESSERA_STATE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Create an empty state.
 *  @param out  the state
 *  @return TSR_OK, INVALID_ARGUMENT, NO_MEMORY
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_create(tsr_state **out);

/** Add a tensor that every rank holds in full, with the same content.
 *  @param state   borrowed for the call
 *  @param name    UTF-8, not empty, at most 1 KiB, unique in the state; a "module." or "_orig_mod." part is stripped
 *  @param tensor  contiguous, on the CPU or a CUDA device; its memory is borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, UNSUPPORTED (on a device, but CUDA cannot be used), CUDA
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_tensor(tsr_state *state, const char *name, const tsr_tensor *tensor);

/** Add this rank's pieces of a tensor that is distributed over the ranks by `layout`.
 *  @param state   borrowed for the call
 *  @param name    as tsr_state_add_tensor
 *  @param layout  borrowed for the call (copied); its world size is the saver's
 *  @param dtype   of the global tensor
 *  @param pieces  contiguous tensors, one per box that the layout gives this rank, with the boxes' sizes; memory
 *                 borrowed until destroy; NULL if there are none. On the CPU or all on one CUDA device
 *  @param rank    this rank
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE, UNSUPPORTED (on a device, but CUDA cannot be used, or on several), CUDA
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_sharded(tsr_state *state, const char *name, const tsr_layout *layout,
                                                      tsr_dtype dtype, const tsr_tensor *pieces, int32_t rank);

/** Set the stream on which the program makes and uses the state's tensors of a CUDA device. A save reads them after what
 *  that stream has when it is called, a load overwrites them after it. What the stream gets after a background save was
 *  called waits, on the device, until the tensors are copied. A load returns when the values are there, for any stream.
 *  @param state        borrowed for the call
 *  @param cuda_device  the device's number
 *  @param stream       a CUstream or cudaStream_t of that device, borrowed until destroy or the next call; NULL: the
 *                      device's default stream, as without this call
 *  @return TSR_OK, INVALID_ARGUMENT (there is no such device, or the stream is of another), INVALID_STATE, UNSUPPORTED
 *          (CUDA cannot be used), CUDA
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_set_stream(tsr_state *state, int32_t cuda_device, void *stream);

/** Add a DDP model's parameters as `<prefix>.<parameter>`.
 *  @param state   borrowed for the call
 *  @param prefix  for example "model"; borrowed for the call
 *  @param ddp     borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_ddp(tsr_state *state, const char *prefix, tsr_ddp *ddp);

/** Add the shards of an FSDP model's parameters as `<prefix>.<parameter>`: this rank's rows are saved and loaded in
 *  place, whatever the layout and number of ranks of the checkpoint. While a unit is unsharded or its gradients are
 *  being reduced, a load is INVALID_STATE.
 *  @param state   borrowed for the call
 *  @param prefix  for example "model"; borrowed for the call
 *  @param fsdp    borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_fsdp(tsr_state *state, const char *prefix, tsr_fsdp *fsdp);

/** Add the slices of a tensor-parallel model's parameters as `<prefix>.<parameter>`: this rank's slice is saved and loaded
 *  in place, whatever the layout and number of ranks of the checkpoint. The saver's communicator has the ranks of the one
 *  that the mesh was created from.
 *  @param state   borrowed for the call
 *  @param prefix  for example "model"; borrowed for the call
 *  @param tp      borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_tp(tsr_state *state, const char *prefix, tsr_tp *tp);

/** Add an optimizer's moments as `<prefix>.state.<parameter>.<moment>` and its settings as
 *  `<prefix>.param_groups.0.<setting>`. A load also sets the settings; the step count continues from the moments.
 *  @param state      borrowed for the call
 *  @param prefix     for example "optim"; borrowed for the call
 *  @param optimizer  borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_optimizer(tsr_state *state, const char *prefix, tsr_optimizer *optimizer);

/** Add a scaler's scale, step count and options as `<prefix>.*`, with the names of PyTorch's state_dict. A load sets
 *  them all.
 *  @param state   borrowed for the call
 *  @param prefix  for example "scaler"; borrowed for the call
 *  @param scaler  borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_grad_scaler(tsr_state *state, const char *prefix,
                                                          tsr_grad_scaler *scaler);

/** Add a learning-rate schedule's position as `<prefix>.steps`, the base rates of the attached optimizers as
 *  `<prefix>.base_lrs`, and a text that identifies the schedule as `<prefix>.schedule`. A load sets steps and base rates,
 *  and the optimizers accordingly. It is MISMATCH if the schedule is not the saved one, or not attached to as many
 *  optimizers.
 *  @param state     borrowed for the call
 *  @param prefix    for example "schedule"; borrowed for the call
 *  @param schedule  borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_lr_schedule(tsr_state *state, const char *prefix,
                                                          tsr_lr_schedule *schedule);

/** Add what an engine trains and counts: the model's parameters as `<prefix>.model.<parameter>`, its optimizer and schedule
 *  as `<prefix>.optim` and `<prefix>.schedule` (see above), its counters and loss scale as `<prefix>.engine.*`. Parameters
 *  are those that the optimizer updates, in their own dtype, also with "fp16" and "bf16". A load continues the run at any
 *  number of ranks, stage, precision and batch sizes. Between an engine with a schedule and one without, it must allow the
 *  names of the schedule to be missing or unexpected. From a backward pass to the optimizer's step saves and loads are
 *  INVALID_STATE, as gradients are not saved.
 *  @param state   borrowed for the call
 *  @param prefix  for example "engine"; borrowed for the call
 *  @param engine  borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_engine(tsr_state *state, const char *prefix, tsr_engine *engine);

/** Add a sampler's position as `<prefix>.*`.
 *  @param state    borrowed for the call
 *  @param prefix   for example "data"; borrowed for the call
 *  @param sampler  borrowed until destroy of the state
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_sampler(tsr_state *state, const char *prefix, tsr_sampler *sampler);

/** Add the samples of a metric as `<prefix>.*`. Rank 0 has them all: call tsr_metric_gather before a save. A load gives rank 0 of
 *  `comm` the samples and resets the metric on the other ranks, whatever the number of ranks. A save or load while another rank
 *  has samples, or after an update that failed and was not reported, is INVALID_STATE: gather the metric or reset it. Saves
 *  with check_replicas refuse metrics, as the ranks differ.
 *  @param state   borrowed for the call
 *  @param prefix  for example "auroc"; borrowed for the call
 *  @param metric  borrowed until destroy of the state
 *  @param comm    the ranks that compute the metric; borrowed for the call (its rank is read)
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_add_metric(tsr_state *state, const char *prefix, tsr_metric *metric,
                                                     const tsr_comm *comm);

/* An object of your own that a state saves and loads through callbacks.
 *
 * The callbacks get a separate state, which lives for the call and holds only values: `collect` sets them
 * (tsr_state_set_int64, tsr_state_set_double, tsr_state_set_value), `check` and `apply` read them (tsr_state_get_...),
 * by their names without the prefix. Add tensors of the object to the state like any others, under the prefix or not.
 *
 * All are called on the thread that calls the save or load, before that call returns, even for a background save:
 * - A save calls `collect`. Rank 0's values are saved; all ranks must give the same names. Under the prefix
 *   `rank/<r>/...` each rank has its own values.
 * - A load calls `collect` for the names it needs, then `check` and, when the tensors are in place, `apply`. Both get a
 *   value for each name from `collect`: the saved value, whatever its type, or the value from `collect` if the load
 *   allowed the name to be missing. The rules of tsr_load_options on missing and unexpected names apply.
 * - tsr_state_get_... on a name under the prefix calls `collect`.
 *
 * Each callback returns 0 or a reason for failure: a TSR_E_ code of error.h, which becomes the code of the call, or any
 * other number, which the call returns as USER with the number as native code. `message` has room for
 * TSR_MESSAGE_BYTES; text written there (UTF-8, terminated by 0) becomes part of the error. Otherwise the error
 * contains the message of a tsr_ function that failed in the callback with the returned code, if any. A save or load
 * over several ranks fails in the same way on all of them: if `collect` or `check` failed, nothing was saved or
 * overwritten; if `apply` failed, the tensors and the objects before it are loaded.
 *
 * A callback must not unwind. Calls on the state or saver that it serves are INVALID_STATE; if it destroys them, they
 * are freed when the call ends. It may use communicators if the callbacks of all ranks do the same. */

/** Sets in `values` the values to save. */
typedef int32_t (*tsr_state_collect_fn)(tsr_state *values, char *message, void *user_data);
/** Applies `values` (`apply`), or only checks whether it would (`check`). If `check` fails, the load has not
 *  overwritten anything yet. */
typedef int32_t (*tsr_state_take_fn)(const tsr_state *values, char *message, void *user_data);

/** An object's callbacks and data. Zero the struct, then set struct_size and the fields you need. */
typedef struct tsr_state_source {
    size_t struct_size;
    tsr_state_collect_fn collect; /* required */
    tsr_state_take_fn check;      /* may be NULL: all values are accepted */
    tsr_state_take_fn apply;      /* required */
    tsr_destroy_fn destroy;       /* may be NULL; see tsr_state_add_source */
    void *user_data;              /* passed to each */
} tsr_state_source;

/** Add an object of your own as `<prefix>.<name>`; its values are collected at each save and returned at each load.
 *  destroy(user_data) is called exactly once: on the thread that destroys the state or, if this call fails, before it
 *  returns. It is not called for a `source` that cannot be read: NULL, a wrong struct_size, or fields that this library
 *  does not know.
 *  @param state   borrowed for the call
 *  @param prefix  for example "loader"; borrowed for the call. It must not contain another source (optimizer, sampler)
 *                 or value, or be inside another source's prefix.
 *  @param source  copied; its user_data is borrowed until destroy
 *  @return TSR_OK, INVALID_ARGUMENT (invalid prefix, or a callback is NULL), INVALID_STATE, UNSUPPORTED (unknown
 *          fields)
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
 *  @return TSR_OK, NOT_FOUND, INVALID_ARGUMENT (the value has another type), INVALID_STATE
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
 *  @return TSR_OK, NOT_FOUND, INVALID_ARGUMENT (the value has another type), INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_get_double(const tsr_state *state, const char *name, double *value);

/** Set the value `name` to any value of docs/FORMAT.md's typed JSON (null, bool, int, big int, double, string, bytes,
 *  list, tuple, map; nested at most 64 deep).
 *  @param state  borrowed for the call
 *  @param name   UTF-8, borrowed for the call
 *  @param json   UTF-8, borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT (the message says where the JSON is invalid), INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_set_value(tsr_state *state, const char *name, const char *json);

/** The value `name` as typed JSON.
 *  @param state     borrowed for the call
 *  @param name      borrowed for the call
 *  @param json      out: `capacity` bytes, terminated by 0; not written if it does not fit; may be NULL if capacity is
 *                   0
 *  @param capacity  bytes
 *  @param size      out: bytes needed, including the terminating 0
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

/** The name, dtype and global shape of a tensor. Tensors are in the order of their names.
 *  @param state   borrowed for the call
 *  @param index   0 to tensor count - 1
 *  @param tensor  out: name, dtype and global shape, borrowed until destroy; data is NULL
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_tensor(const tsr_state *state, size_t index, tsr_param *tensor);

/** Join the states of ranks that have different tensors, such as the stages of a pipeline: afterwards each rank's state
 *  has every name, and a save, a load and a gather work as with any other state. Call it when everything is added, and
 *  again when more is. Give a parameter that several stages share the same name in each. A layout may be of other ranks
 *  than those of `comm`, such as that of a model made over a stage's own communicator: this rank's pieces count. Values
 *  are not joined: their names must be the same on every rank.
 *  @param state  borrowed for the call
 *  @param comm   borrowed for the call: the saver's ranks
 *  @return TSR_OK, INVALID_ARGUMENT (parts of a tensor overlap without being equal), INVALID_STATE, MISMATCH (two ranks
 *          have the same name with different dtypes or shapes), TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY; after an error
 *          no rank's state has changed
 *  @threadsafety exclusive state and comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_join(tsr_state *state, tsr_comm *comm);

/** Gather a tensor of which each rank holds a part. Gathering the tensors one after another gives a full state without
 *  any rank needing memory for all of it at once. A tensor that a rank holds in full is copied.
 *  @param state  borrowed for the call; its tensor is the same on every rank
 *  @param comm   borrowed for the call: the ranks that hold the parts
 *  @param name   the tensor's name; borrowed for the call
 *  @param root   the rank that gets it; -1: all ranks
 *  @param whole  out, borrowed for the call: contiguous memory with the tensor's dtype and global shape on ranks that
 *                get it; ignored on the others, may be NULL there
 *  @return TSR_OK, NOT_FOUND, INVALID_ARGUMENT, INVALID_STATE, MISMATCH (the ranks name different tensors, or another
 *          rank got one of these errors), TIMEOUT, ABORTED, PEER_LOST, NO_MEMORY
 *  @threadsafety exclusive state and comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_gather(tsr_state *state, tsr_comm *comm, const char *name, int32_t root,
                                                 const tsr_tensor *whole);

/** Set a metric ("loss") for the next save, which consumes it even if it fails. `tessera ckpt ls` shows it.
 *  @param state  borrowed for the call
 *  @param name   UTF-8, borrowed for the call
 *  @param value  any double
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_state_set_metric(tsr_state *state, const char *name, double value);

/** Free the state. NULL is ignored. No save or load may be using it.
 *  @param state  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_state_destroy(tsr_state *state);

#ifdef __cplusplus
}
#endif
#endif
