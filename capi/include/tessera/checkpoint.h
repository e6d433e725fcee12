/* Tessera: checkpoints: the saver, which writes them under one root, and the committed checkpoint, opened for
 * reading. */
#ifndef TESSERA_CHECKPOINT_H
#define TESSERA_CHECKPOINT_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The phases that tsr_progress_fn reports. */
enum {
    TSR_PHASE_STAGE = 1,  /* tsr_saver_save_async copies the state before it returns */
    TSR_PHASE_WRITE = 2,  /* this rank's files are being written */
    TSR_PHASE_COMMIT = 3, /* all ranks have written; only on rank 0, without bytes */
    TSR_PHASE_READ = 4,
    TSR_PHASE_VERIFY = 5
};

/** Reports the progress of a save, load or check: at the start and end of each phase, and about ten times a second in
 *  between. `done` equals `total` only at the end; a phase that fails does not report its end. It must not unwind, call
 *  into the saver or block for long.
 *  @param phase      a TSR_PHASE_ value
 *  @param done       bytes of this rank so far
 *  @param total      bytes of this rank in total; 0 if there is nothing to count
 *  @param user_data  as given with the callback */
typedef void (*tsr_progress_fn)(int32_t phase, int64_t done, int64_t total, void *user_data);

/** What tsr_saver_save_async does while another save is in flight. */
enum {
    TSR_BUSY_WAIT = 0,   /* wait until it is done */
    TSR_BUSY_REFUSE = 1, /* return NOT_READY on every rank */
    TSR_BUSY_REPLACE = 2 /* queue behind it; a queued save that has not begun is dropped, and its work is ABORTED */
};
typedef int32_t tsr_busy;

/** Options of a saver. `_init` writes the defaults; afterwards every field is taken literally. The saves kept under the
 *  root are the union of keep_latest, keep_best and keep_every; the newest save, the best one and any that is open for
 *  reading are always kept. */
typedef struct tsr_saver_options {
    size_t struct_size;
    int32_t keep_latest;        /* how many of the newest saves to keep; 0 (default) keeps all, whatever else is set */
    int32_t timeout_ms;         /* deadline of the votes; default 600000, or TESSERA_TIMEOUT_MS */
    const char *writer;         /* language of the trainer, stored in the manifest; NULL (default): "c" */
    const char *writer_version; /* NULL (default): "" */
    /* NULL (default) or "tessera": docs/FORMAT.md; "torch_dcp": a torch.distributed.checkpoint, which an unmodified
     * PyTorch can load */
    const char *format;
    /* the metric of rank 0's tsr_state_set_metric by which saves are compared; ROOT/best is the best save. NULL
     * (default): none. A save with NaN or without the metric is never the best */
    const char *best_metric;
    tsr_flag best_is_higher; /* 0 (default): lower is better, as for a loss; 1: higher is better, as for an accuracy */
    int32_t keep_best;       /* how many of the best saves to keep; default 0. Needs best_metric and keep_latest */
    int64_t keep_every; /* saves at multiples of this step are kept forever; 0 (default): none. Needs keep_latest */
    /* what tsr_saver_save_async does while another save is in flight, the same on every rank; default TSR_BUSY_WAIT */
    tsr_busy when_busy;
    tsr_flag low_priority; /* 1: the threads of background saves yield CPU and disk to the trainer; default 0 */
    /* Limit of the memory for copies of the state on this rank, at least 8 MiB; 0 (default): as much as the state
     * needs. If the state is larger than this, or than this rank's share of free memory, tsr_saver_save_async writes a
     * part before it returns. */
    int64_t staging_bytes;
    int64_t write_bytes_per_s; /* limit of this rank's write rate; 0 (default): none */
    /* NULL (default), or called on the thread of the call. The WRITE and COMMIT phases of a background save are
     * reported on the saver's own thread, at the same time as STAGE if a part is written before tsr_saver_save_async
     * returns */
    tsr_progress_fn progress;
    void *progress_data; /* borrowed until destroy */
    /* a storage (storage.h) in which the root is a key; NULL (default): the root is a local directory. Borrowed for the
     * call; the saver keeps it alive. */
    const tsr_storage *storage;
    /* 0 (default): everything is copied before tsr_saver_save_async returns. 1: what an optimizer of the state updates
     * (its parameters and moments) is copied later by the saver's threads, or just before the optimizer's next step,
     * its destroy or a load into the state if that comes first. Nothing else may write to that memory from the call
     * until the end of that step, or until tsr_work_staged reports that all is copied: not the trainer, a load of
     * another state, or a collective. If the state is larger than staging_bytes or than free memory, everything is
     * copied at once */
    tsr_flag copy_on_demand;
    /* 1: before anything is written, a save compares byte by byte (-0.0 is not 0.0) the tensors, shards and values that
     * several ranks hold. A difference is a MISMATCH on every rank, which names the first difference and the ranks.
     * Each rank reads everything that it shares with others. 0 (default): nothing is compared; large replicas, which
     * must be equal, are written in parts by several ranks, and values are saved from rank 0. The same on every
     * rank. */
    tsr_flag check_replicas;
} tsr_saver_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_saver_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_options_init(tsr_saver_options *options, size_t struct_size);

/** Open `root` for saving; it is created if it does not exist. Only one live job at a time may own a root. A job whose
 *  process is not visible from here counts as live until it has not renewed its lease for 60 s.
 *  @param comm     borrowed for the call (a private communicator is split off); NULL: one rank
 *  @param root     directory (relative to the current working directory), or a key of the options' storage; UTF-8, the
 *                  same on every rank; borrowed for the call
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the saver
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (another live job saves here; the message names host and pid, and
 *          when the lease of a process that is not visible expires), IO, PERMISSION, TIMEOUT, ABORTED, PEER_LOST,
 *          INTERRUPTED. This call and the ones below also return the code of a failed storage callback, or USER
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_create(tsr_comm *comm, const char *root, const tsr_saver_options *options,
                                                 tsr_saver **out);

/** Save, and return when the checkpoint is durable and committed on every rank. All ranks get the same error.
 *  @param saver  borrowed for the call
 *  @param step   number of completed steps, not negative, the same on every rank
 *  @param state  borrowed for the call; the same names, dtypes, shapes and layouts on every rank
 *  @return TSR_OK, MISMATCH (states or steps differ or, with check_replicas, replicas differ), IO, TIMEOUT, ABORTED,
 *          PEER_LOST, COMMIT_UNKNOWN, INVALID_ARGUMENT, INVALID_STATE, INTERRUPTED
 *  @threadsafety exclusive saver and state  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_save(tsr_saver *saver, int64_t step, tsr_state *state);

/** Copy the state, return, and save the copy in the background. When the call returns, everything is staged and the
 *  trainer may change it. With copy_on_demand, only the optimizer may change what it owns until tsr_work_staged reports
 *  that this is staged too. Tensors on CUDA devices are copied after the call: what their stream (tsr_state_set_stream)
 *  gets from then on waits for that on the device. The save is durable when `work` is done. The option when_busy determines what happens while
 *  another save is in flight. If an earlier save failed and no call on the saver has returned its error yet, this call
 *  returns that error and saves nothing. Waiting for the earlier save's work does not count as returning its error, so
 *  all ranks do the same.
 *  @param saver  borrowed until the work is done
 *  @param step   as tsr_saver_save
 *  @param state  borrowed for the call
 *  @param work   out, may be NULL
 *  @return as tsr_saver_save
 *  @threadsafety exclusive saver and state  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_save_async(tsr_saver *saver, int64_t step, tsr_state *state, tsr_work **work);

/** Wait for all saves in flight.
 *  @param saver  borrowed for the call
 *  @return TSR_OK, or the first error not returned yet; each error is returned once
 *  @threadsafety exclusive saver  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_wait(tsr_saver *saver);

/** Load the newest committed checkpoint of the root into `state`, with strict matching of names. If there is none,
 *  nothing is loaded.
 *  @param saver  borrowed for the call
 *  @param state  borrowed for the call
 *  @param step   out: the checkpoint's step; 0 if there is none
 *  @return TSR_OK, CORRUPT, MISMATCH (names, dtypes or shapes differ; the message lists all), IO, VERSION, TIMEOUT,
 *          ABORTED, PEER_LOST, INTERRUPTED
 *  @threadsafety exclusive saver and state  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_resume(tsr_saver *saver, tsr_state *state, int64_t *step);

/** Whether all ranks should save now and stop. Call it on every rank at each step: as soon as one rank is asked to stop
 *  (by tsr_preempt_requested() or `told`), all ranks get 1 at the same step and from then on. It costs one small
 *  all-reduce. In a training loop:
 *
 *      CHECK(tsr_saver_should_stop(saver, step + 1, 0, &stop));
 *      if (stop || step % 50 == 49) CHECK(tsr_saver_save_async(saver, step + 1, state, NULL));
 *      if (stop) break;        // then tsr_saver_wait, and return 0
 *
 *  @param saver  borrowed for the call
 *  @param step   the same on every rank
 *  @param told   1 if this rank was asked to stop other than by the launcher, otherwise 0
 *  @param stop   out: 1 or 0
 *  @return TSR_OK, MISMATCH (the ranks are at different steps), TIMEOUT, ABORTED, PEER_LOST, INVALID_ARGUMENT,
 *          INVALID_STATE, INTERRUPTED
 *  @threadsafety exclusive saver  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_should_stop(tsr_saver *saver, int64_t step, tsr_flag told, tsr_flag *stop);

/** Free the staging memory that no save in flight uses. It is otherwise kept between saves, because fresh memory is
 *  slow.
 *  @param saver  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive saver  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_trim(tsr_saver *saver);

/** Free the saver, after waiting for a save in flight until its deadline at most. NULL is ignored. A program that ends
 *  (exit, return from main) without this call or tsr_saver_wait still waits for the save in flight, up to the saver's
 *  timeout, and reports on stderr which step is lost if that passes. It does not wait, prints a warning and leaves the
 *  previous checkpoint in place, if the save needs something of the program: a progress callback, a storage, the
 *  function of tsr_log_set_callback or, with copy_on_demand, tensors that are not staged. _exit does not wait either.
 *  In a progress callback this call returns immediately: the save continues without reporting progress, and the saver
 *  is freed afterwards.
 *  @param saver  transferred
 *  @threadsafety exclusive  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API void tsr_saver_destroy(tsr_saver *saver);

/** Maps a name of the checkpoint to a name of the state. If `saved` ends with '.' or is empty, both are prefixes, and
 *  `here` must also end with '.' or be empty. For a value of one rank, `rank/<r>/NAME`, the rule applies to NAME. */
typedef struct tsr_name_rule {
    const char *saved; /* "model.encoder."; borrowed for the call */
    const char *here;  /* "encoder."; borrowed for the call */
} tsr_name_rule;

/** Receives what a load did beyond strict matching, and whether it was verified: `{"missing": [NAME, ...],
 *  "unexpected": [NAME, ...], "cast": [{"name": NAME, "from": "f32", "to": "bf16"}, ...], "left_alone": [NAME, ...],
 *  "verified": true}`, with names of the state. "left_alone" lists the names that `only` excludes. "verified" is true
 *  if checksums confirmed all tensor data that was read; it is false if `verify` is 0 and for formats without
 *  checksums, such as safetensors from other programs. The callback must not unwind.
 *  @param json       UTF-8, valid for the call
 *  @param user_data  report_data */
typedef void (*tsr_load_report_fn)(const char *json, void *user_data);

/** Options of a load. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_load_options {
    size_t struct_size;
    tsr_flag verify;           /* 1 (default): check the checksum of every block read; 0: read only the needed ranges */
    tsr_flag allow_missing;    /* 1: names of the state that the checkpoint lacks stay unchanged; default 0 */
    tsr_flag allow_unexpected; /* 1: names of the checkpoint that the state lacks are ignored; default 0 */
    tsr_flag allow_cast;       /* 1: floating-point tensors of another dtype are converted; default 0 */
    tsr_progress_fn progress;  /* NULL (default), or called on the thread of the call with TSR_PHASE_READ */
    void *progress_data;       /* borrowed for the call */
    /* NULL (default): this rank loads for itself; otherwise the ranks that load together, which makes the load
     * collective. Borrowed for the call, during which nothing else may use it */
    tsr_comm *comm;
    /* Names of the state to load, or patterns of them. All other names of the state and the checkpoint are left alone:
     * neither loaded nor missing nor unexpected. '*' matches any characters including dots, '?' one character, "[a-c]"
     * and "[!a-c]" one of a set, and '\' takes the next character literally. A pattern that matches no name of the
     * state is a MISMATCH. NULL (default): all names. Borrowed for the call, with its strings. */
    const char *const *only;
    size_t only_count; /* at least 1 if `only` is given; default 0 */
    /* Rules that map names of the checkpoint to names of the state. The first matching rule applies; a rule that
     * matches nothing has no effect. Two names that map to one are INVALID_ARGUMENT. NULL (default): the same names.
     * Borrowed for the call. */
    const tsr_name_rule *rules;
    size_t rule_count; /* default 0 */
    /* NULL (default), or called once on the thread of the call before it returns TSR_OK. */
    tsr_load_report_fn report;
    void *report_data; /* borrowed for the call */
} tsr_load_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_load_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_load_options_init(tsr_load_options *options, size_t struct_size);

/** Open a committed checkpoint: the newest one if `path` is a root or a root's "latest", the best one if it is a root's
 *  "best" (tsr_saver_options.best_metric). It also opens checkpoints of PyTorch (the directory of a
 *  torch.distributed.checkpoint or its ".metadata", a file of torch.save or the directory of a model.pt),
 *  safetensors in the layout of Hugging Face (a file, an index or a directory, including the parts saved by PyTorch's
 *  HuggingFaceStorageWriter) and those of DeepSpeed's engine (the directory of a tag, or the one above it with its
 *  "latest"; ZeRO stages 0 to 3). Pickles are never executed. No job is needed. While a checkpoint of Tessera is open, no
 *  saver removes it, not even one in another process, if the file system has advisory locks.
 *  @param path  borrowed for the call
 *  @param out   the checkpoint
 *  @return TSR_OK, NOT_FOUND (no manifest: not a committed checkpoint), CORRUPT, VERSION, UNSUPPORTED (PyTorch and
 *          DeepSpeed formats: something that cannot be read, such as a compressed or big-endian archive, or model
 *          parallelism), IO, INVALID_ARGUMENT (also: a directory of safetensors holds more than one model)
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_open(const char *path, tsr_checkpoint **out);

/** Options of tsr_checkpoint_open_with. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_open_options {
    size_t struct_size;
    /* a storage (storage.h) in which the path is a key; NULL (default): a local path. Borrowed for the call; the
     * checkpoint keeps it alive. */
    const tsr_storage *storage;
} tsr_open_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_open_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_open_options_init(tsr_open_options *options, size_t struct_size);

/** tsr_checkpoint_open with options, such as the storage that holds the checkpoint.
 *  @param path     borrowed for the call
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the checkpoint
 *  @return as tsr_checkpoint_open; also the code of a failed storage callback, or USER
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_open_with(const char *path, const tsr_open_options *options,
                                                         tsr_checkpoint **out);

/** The path of the opened checkpoint directory.
 *  @param checkpoint  borrowed for the call
 *  @param text        out: `capacity` bytes, terminated by 0; not written if it does not fit; may be NULL if capacity
 *                     is 0
 *  @param capacity    bytes
 *  @param size        out: bytes needed, including the terminating 0
 *  @return TSR_OK (compare size with capacity), INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_path(const tsr_checkpoint *checkpoint, char *text, size_t capacity,
                                                    size_t *size);

/** The manifest as stored in its file (UTF-8 JSON, docs/manifest.schema.json). For checkpoints of PyTorch it is
 *  generated from their metadata, with "format" "torch_dcp" or "torch_save" and "unreadable": the names that cannot be
 *  read, and why. For safetensors and DeepSpeed it is generated likewise, with "format" "safetensors" or "deepspeed".
 *  @param checkpoint  borrowed for the call
 *  @param text        out: `capacity` bytes, terminated by 0; not written if it does not fit; may be NULL if capacity
 *                     is 0
 *  @param capacity    bytes
 *  @param size        out: bytes needed, including the terminating 0
 *  @return TSR_OK (compare size with capacity), INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_manifest(const tsr_checkpoint *checkpoint, char *text, size_t capacity,
                                                        size_t *size);

/** The step at which the checkpoint was saved.
 *  @param checkpoint  borrowed for the call
 *  @param step        out; -1 for formats that do not store it: PyTorch's and safetensors
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

/** Read one full tensor, whichever ranks wrote it, and check its checksums.
 *  @param checkpoint  borrowed for the call
 *  @param name        borrowed for the call
 *  @param tensor      contiguous, with the tensor's dtype and shape, on the CPU or on a CUDA device, where it is
 *                     overwritten after what the default stream has; borrowed for the call
 *  @return TSR_OK, NOT_FOUND, MISMATCH (dtype or shape), CORRUPT, UNSUPPORTED (PyTorch formats: a dtype or kind of
 *          tensor that cannot be read), IO, INVALID_ARGUMENT, INVALID_STATE, INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_read(const tsr_checkpoint *checkpoint, const char *name,
                                                    const tsr_tensor *tensor);

/** Load this rank's part into `state` in place, whatever the world size and layouts of the save. If it fails, parts of
 *  the state may have been overwritten, unless the error is MISMATCH. Without options->comm the ranks do not
 *  communicate, except ranks of a host that share parameters (share_params in ddp.h): each loads its rows, so all of
 *  them must load the same names of the same checkpoint. With options->comm all its ranks call this, each with the same
 *  checkpoint opened and the same `verify`; state, layouts, names and the allow options may differ. Ranks of one host
 *  then read each byte that several of them need only once and pass it on through shared memory. (This applies from 8
 *  MiB of such data. Without shared memory, and for small or unaligned storages of other formats, each rank reads for
 *  itself.) All ranks get the same error. A rank that does not arrive is named by TIMEOUT when the communicator's
 *  deadline passes; a rank that calls another collective is named by MISMATCH immediately.
 *  @param checkpoint  borrowed for the call
 *  @param state       borrowed for the call
 *  @param options     borrowed for the call; NULL: all defaults
 *  @return TSR_OK, MISMATCH (the message lists all differences; with a comm also: the ranks load different
 *          checkpoints), CORRUPT, IO, INVALID_ARGUMENT (also: rules map two names to one), INVALID_STATE, INTERRUPTED;
 *          with a comm also TIMEOUT, ABORTED, PEER_LOST
 *  @threadsafety exclusive state and options->comm  @collective with options->comm  @blocking yes
 *  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_load(const tsr_checkpoint *checkpoint, tsr_state *state,
                                                    const tsr_load_options *options);

/** Check the checkpoint without loading it: sizes and headers and, with `full`, every byte.
 *  @param checkpoint  borrowed for the call
 *  @param full        1 reads all data, 0 headers only
 *  @return TSR_OK, CORRUPT (the message names file and offset; the causes list further faults), IO, INVALID_ARGUMENT,
 *          INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_verify(const tsr_checkpoint *checkpoint, tsr_flag full);

/** tsr_checkpoint_verify with progress reports.
 *  @param checkpoint  borrowed for the call
 *  @param full        1 reads all data, 0 headers only
 *  @param progress    called on this thread with TSR_PHASE_VERIFY; may be NULL
 *  @param user_data   borrowed for the call
 *  @return as tsr_checkpoint_verify
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_verify_progress(const tsr_checkpoint *checkpoint, tsr_flag full,
                                                               tsr_progress_fn progress, void *user_data);

/** Options of tsr_checkpoint_export. `_init` writes the defaults; afterwards every field is taken literally. */
typedef struct tsr_export_options {
    size_t struct_size;
    /* NULL (default) or "safetensors": full tensors in the layout of Hugging Face; "torch_dcp": a
     * torch.distributed.checkpoint, which an unmodified PyTorch can load; "torch_save": one file model.pt for
     * torch.load(); "npz": one file model.npz for numpy.load() */
    const char *format;
    /* safetensors only: maximum data per file, unless one tensor is larger; this writes numbered files and an index.
     * 0 (default): one file, model.safetensors. */
    int64_t max_file_bytes;
    /* export only names with this prefix ("model."), and strip it; NULL (default): all names */
    const char *under;
    int32_t timeout_ms;       /* deadline of each wait for the other ranks; default 600000, or TESSERA_TIMEOUT_MS */
    tsr_progress_fn progress; /* NULL (default), or called on the thread of the call with TSR_PHASE_WRITE */
    void *progress_data;      /* borrowed for the call */
} tsr_export_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_export_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_export_options_init(tsr_export_options *options, size_t struct_size);

/** Export the tensors of a checkpoint to a new directory in another format. All ranks write, each using at most 64 MiB
 *  of memory, and read the parts from wherever they are. The directory gets its name when everything in it is durable.
 *  On failure partial output is removed, unless rank 0 died: then DIRECTORY.tmp-... remains. Values are exported to
 *  torch_dcp and torch_save only; safetensors and npz cannot hold them. What cannot be read ("unreadable" in the
 *  manifest) is left out, with a warning in the log.
 *  @param checkpoint  the same checkpoint, opened by every rank; borrowed for the call
 *  @param comm        borrowed for the call (a private communicator is split off); NULL: this process alone
 *  @param directory   must not exist; the same on every rank, on a file system that all ranks share; borrowed for the
 *                     call
 *  @param options     borrowed for the call; NULL: all defaults
 *  @return TSR_OK, INVALID_ARGUMENT (also: the directory exists, no tensor to write), MISMATCH (ranks differ),
 *          UNSUPPORTED (a dtype that the format does not support), CORRUPT, IO, PERMISSION, TIMEOUT, ABORTED,
 *          PEER_LOST, INVALID_STATE, INTERRUPTED
 *  @threadsafety any thread, exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_export(const tsr_checkpoint *checkpoint, tsr_comm *comm,
                                                      const char *directory, const tsr_export_options *options);

/** Close the checkpoint. NULL is ignored.
 *  @param checkpoint  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_checkpoint_destroy(tsr_checkpoint *checkpoint);

#ifdef __cplusplus
}
#endif
#endif
