/* Tessera: checkpoints: the saver that writes them under one root, and the committed checkpoint opened to read. */
#ifndef TESSERA_CHECKPOINT_H
#define TESSERA_CHECKPOINT_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Options of a saver. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_saver_options {
    size_t struct_size;
    int32_t keep_latest;        /* how many of the newest to keep; 0 (default) keeps all */
    int32_t timeout_ms;         /* deadline of the votes; default 600000, or TESSERA_TIMEOUT_MS */
    const char *writer;         /* language of the trainer, stored in the manifest; NULL (default): "c" */
    const char *writer_version; /* NULL (default): "" */
    const char *format;         /* NULL (default) or "tessera": docs/FORMAT.md; "torch_dcp": what an unmodified PyTorch
                                   loads by torch.distributed.checkpoint */
} tsr_saver_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_saver_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_options_init(tsr_saver_options *options, size_t struct_size);

/** Open `root` for saving; it is created if absent. One live job at a time may own a root.
 *  @param comm     borrowed for the call (a private communicator is split off); NULL: one rank
 *  @param root     directory, UTF-8, the same on every rank; borrowed for the call
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the saver
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (another live job saves here: names host and pid), IO, PERMISSION,
 *          TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_create(tsr_comm *comm, const char *root, const tsr_saver_options *options,
                                                 tsr_saver **out);

/** Save and return when the checkpoint is durable and committed on every rank. All ranks get the same error.
 *  @param saver  borrowed for the call
 *  @param step   steps completed, not negative, the same on every rank
 *  @param state  borrowed for the call; the same names, dtypes, shapes and layouts on every rank
 *  @return TSR_OK, MISMATCH (states or steps differ), IO, TIMEOUT, ABORTED, PEER_LOST, COMMIT_UNKNOWN, INVALID_ARGUMENT,
 *          INVALID_STATE, INTERRUPTED
 *  @threadsafety exclusive saver and state  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_save(tsr_saver *saver, int64_t step, tsr_state *state);

/** Copy the state, return, and save the copy in the background. A save still running is waited for first; its error is
 *  returned here.
 *  @param saver  borrowed until the work is done
 *  @param step   as tsr_saver_save
 *  @param state  borrowed for the call: when it returns the trainer may go on
 *  @param work   out, may be NULL
 *  @return as tsr_saver_save
 *  @threadsafety exclusive saver and state  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_save_async(tsr_saver *saver, int64_t step, tsr_state *state, tsr_work **work);

/** Wait for the save in flight, if there is one.
 *  @param saver  borrowed for the call
 *  @return TSR_OK or the save's error, once
 *  @threadsafety exclusive saver  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_wait(tsr_saver *saver);

/** Load the newest committed checkpoint of the root into `state`, strictly; nothing is loaded if there is none.
 *  @param saver  borrowed for the call
 *  @param state  borrowed for the call
 *  @param step   out: its step, or 0 if there is no checkpoint
 *  @return TSR_OK, CORRUPT, MISMATCH (names, dtypes or shapes differ: lists all), IO, VERSION, TIMEOUT, ABORTED,
 *          PEER_LOST, INTERRUPTED
 *  @threadsafety exclusive saver and state  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_resume(tsr_saver *saver, tsr_state *state, int64_t *step);

/** Free the saver; a save in flight is waited for, at most its deadline. NULL is taken.
 *  @param saver  transferred
 *  @threadsafety exclusive  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API void tsr_saver_destroy(tsr_saver *saver);

/** How to load. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_load_options {
    size_t struct_size;
    int32_t verify;           /* 1 (default): check the checksum of every block read; 0: bare ranges */
    int32_t allow_missing;    /* 1: names of the state that the checkpoint lacks stay as they are; default 0 */
    int32_t allow_unexpected; /* 1: names of the checkpoint that the state lacks are left out; default 0 */
    int32_t allow_cast;       /* 1: floating-point tensors of another dtype are converted; default 0 */
} tsr_load_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_load_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_load_options_init(tsr_load_options *options, size_t struct_size);

/** Open a committed checkpoint, or the newest one if `path` is a root or a root's "latest", or what PyTorch wrote: the
 *  directory of a torch.distributed.checkpoint or its ".metadata", or a file of torch.save. No pickle is ever executed. No
 *  job is needed.
 *  @param path  borrowed for the call
 *  @param out   the checkpoint
 *  @return TSR_OK, NOT_FOUND (no manifest: not a committed checkpoint), CORRUPT, VERSION, UNSUPPORTED (of PyTorch's: what
 *          is not read, such as a compressed or big-endian archive), IO, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_open(const char *path, tsr_checkpoint **out);

/** The directory that was opened.
 *  @param checkpoint  borrowed for the call
 *  @param text      out: `capacity` bytes, ended by 0; not written if it does not fit; may be NULL if capacity is 0
 *  @param capacity  bytes
 *  @param size      out: bytes needed, the final 0 included
 *  @return TSR_OK (compare size with capacity), INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_path(const tsr_checkpoint *checkpoint, char *text, size_t capacity,
                                                    size_t *size);

/** The manifest as it stands in the file (UTF-8 JSON, docs/manifest.schema.json). Of what PyTorch wrote the same is made
 *  from its metadata, with "format" "torch_dcp" or "torch_save", and "unreadable": names of what is not read, and why.
 *  @param checkpoint  borrowed for the call
 *  @param text      out: `capacity` bytes, ended by 0; not written if it does not fit; may be NULL if capacity is 0
 *  @param capacity  bytes
 *  @param size      out: bytes needed, the final 0 included
 *  @return TSR_OK (compare size with capacity), INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_manifest(const tsr_checkpoint *checkpoint, char *text, size_t capacity,
                                                        size_t *size);

/** The step that the checkpoint was saved at.
 *  @param checkpoint  borrowed for the call
 *  @param step        out; -1 of what PyTorch wrote, which does not tell
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_step(const tsr_checkpoint *checkpoint, int64_t *step);

/** The number of tensors, aliases included.
 *  @param checkpoint  borrowed for the call
 *  @param count       out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_tensor_count(const tsr_checkpoint *checkpoint, size_t *count);

/** Name, dtype and global shape of the `index`-th tensor, in order of names.
 *  @param checkpoint  borrowed for the call
 *  @param index       0 to count - 1
 *  @param name        out: borrowed until destroy
 *  @param dtype       out
 *  @param shape       out: ndim numbers, borrowed until destroy
 *  @param ndim        out
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_tensor(const tsr_checkpoint *checkpoint, size_t index, const char **name,
                                                      tsr_dtype *dtype, const int64_t **shape, int32_t *ndim);

/** Read one whole tensor, from whatever ranks wrote it, and check its checksums.
 *  @param checkpoint  borrowed for the call
 *  @param name        borrowed for the call
 *  @param tensor      contiguous, on the CPU, of the tensor's dtype and shape; borrowed for the call
 *  @return TSR_OK, NOT_FOUND, MISMATCH (dtype or shape), CORRUPT, UNSUPPORTED (of PyTorch's: a dtype or kind of tensor that
 *          is not read), IO, INVALID_ARGUMENT, INVALID_STATE, INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_read(const tsr_checkpoint *checkpoint, const char *name,
                                                    const tsr_tensor *tensor);

/** Load this rank's part into `state`, in place, whatever the world size and layouts of the save were. Makes no
 *  communication; when it fails, parts of the state may have been overwritten, unless the error is MISMATCH.
 *  @param checkpoint  borrowed for the call
 *  @param state       borrowed for the call
 *  @param options     borrowed for the call; NULL: all defaults
 *  @return TSR_OK, MISMATCH (lists all differences), CORRUPT, IO, INVALID_ARGUMENT, INVALID_STATE, INTERRUPTED
 *  @threadsafety exclusive state  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_load(const tsr_checkpoint *checkpoint, tsr_state *state,
                                                    const tsr_load_options *options);

/** Check the checkpoint without loading it: sizes and headers, and with `full` every byte.
 *  @param checkpoint  borrowed for the call
 *  @param full        1 reads all data, 0 headers only
 *  @return TSR_OK, CORRUPT (names file and offset; causes list the others), IO, INVALID_ARGUMENT, INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_verify(const tsr_checkpoint *checkpoint, int32_t full);

/** Close the checkpoint. NULL is taken.
 *  @param checkpoint  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_checkpoint_destroy(tsr_checkpoint *checkpoint);

#ifdef __cplusplus
}
#endif
#endif
