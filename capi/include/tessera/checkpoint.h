/* Tessera: checkpoints: the saver that writes them under one root, and the committed checkpoint opened to read. */
#ifndef TESSERA_CHECKPOINT_H
#define TESSERA_CHECKPOINT_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What is being done, for tsr_progress_fn. */
enum {
    TSR_PHASE_STAGE = 1,  /* what tsr_saver_save_async copies before it returns */
    TSR_PHASE_WRITE = 2,  /* this rank's files are written */
    TSR_PHASE_COMMIT = 3, /* all ranks have written; of rank 0 alone, without bytes */
    TSR_PHASE_READ = 4,
    TSR_PHASE_VERIFY = 5
};

/** Told how far a save, a load or a check is: at the begin and the end of a phase, and about ten times a second between.
 *  `done` is `total` at the end alone; a phase that fails has no end. It must not unwind, call into the saver or wait
 *  for long.
 *  @param phase      TSR_PHASE_
 *  @param done       bytes of this rank
 *  @param total      bytes of this rank; 0 if there is nothing to count
 *  @param user_data  as it was given */
typedef void (*tsr_progress_fn)(int32_t phase, int64_t done, int64_t total, void *user_data);

/** What tsr_saver_save_async does while another save is in flight. */
enum {
    TSR_BUSY_WAIT = 0,   /* waits until it is done */
    TSR_BUSY_REFUSE = 1, /* returns NOT_READY on every rank */
    TSR_BUSY_REPLACE = 2 /* queues behind it; a save that is queued and has not begun gives way: its work is ABORTED */
};
typedef int32_t tsr_busy;

/** Options of a saver. `_init` writes the defaults; then every field is literal. What stays under the root is the union of
 *  keep_latest, keep_best and keep_every; the newest save, the best one and any that is open for reading always stay. */
typedef struct tsr_saver_options {
    size_t struct_size;
    int32_t keep_latest;        /* how many of the newest to keep; 0 (default) keeps all, whatever else is said */
    int32_t timeout_ms;         /* deadline of the votes; default 600000, or TESSERA_TIMEOUT_MS */
    const char *writer;         /* language of the trainer, stored in the manifest; NULL (default): "c" */
    const char *writer_version; /* NULL (default): "" */
    const char *format;         /* NULL (default) or "tessera": docs/FORMAT.md; "torch_dcp": what an unmodified PyTorch
                                   loads by torch.distributed.checkpoint */
    const char *best_metric;    /* the metric of rank 0's tsr_state_set_metric by which saves are compared: ROOT/best is
                                   the best of them; NULL (default): none. NaN, or no such metric, is never the best */
    tsr_flag best_is_higher;    /* 0 (default): lower is better, as of a loss; 1: higher, as of an accuracy */
    int32_t keep_best;          /* how many of the best to keep; default 0. Needs best_metric and keep_latest */
    int64_t keep_every; /* steps that are multiples of it are kept for ever; 0 (default): none. Needs keep_latest */
    tsr_busy
        when_busy; /* what tsr_saver_save_async does while another save is in flight, the same on every rank; default TSR_BUSY_WAIT */
    tsr_flag low_priority; /* 1: the threads of saves in the background yield CPU and disk to the trainer; default 0 */
    /* Bound of the memory for copies of the state on this rank, at least 8 MiB; 0 (default): what it needs. If the state is
     * larger, or larger than this rank's share of the memory that is free, tsr_saver_save_async writes a part before it
     * returns. */
    int64_t staging_bytes;
    int64_t write_bytes_per_s; /* limit of this rank's writing; 0 (default): none */
    tsr_progress_fn progress;  /* NULL (default), or called on the thread of the call; WRITE and COMMIT of a save in the
                                   background on the saver's own thread, at the same time as STAGE where a part is written
                                   before tsr_saver_save_async returns */
    void *progress_data;       /* borrowed until destroy */
    /* storage.h: the root is a key in it; NULL (default): a directory of this machine. Borrowed for the call; the saver
     * keeps it alive. */
    const tsr_storage *storage;
    tsr_flag copy_on_demand; /* 0 (default): all is copied before tsr_saver_save_async returns. 1: what an optimizer
                               of the state updates, its parameters and moments, is copied later: by the saver's threads,
                               or where the optimizer's next step, its destroy or a load into the state comes first, just
                               before that. Nobody else may write there from the call to the end of that step, or until
                               tsr_work_staged tells that all is copied: neither the trainer, nor a load of another
                               state or a collective into the same memory. If the state is larger than staging_bytes, or than what is free, all is copied at once */
    /* 1: a save compares what several ranks hold, tensors, shards and values, byte by byte (-0.0 is not 0.0), before
     * anything is written. If something differs, it is a MISMATCH on every rank, which names the first that differs and the
     * ranks. Each rank reads all that it shares with others. 0 (default): nothing is compared; large replicas are written in
     * parts by several ranks, and have to be equal; of values rank 0's are saved. The same on every rank. */
    tsr_flag check_replicas;
} tsr_saver_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_saver_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_options_init(tsr_saver_options *options, size_t struct_size);

/** Open `root` for saving; it is created if absent. One live job at a time may own a root. A job whose process cannot be seen
 *  from here lives until it has not renewed its lease for 60 s.
 *  @param comm     borrowed for the call (a private communicator is split off); NULL: one rank
 *  @param root     directory, a relative one of the working directory of now, or a key of the options' storage; UTF-8, the
 *                  same on every rank; borrowed for the call
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the saver
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE (another live job saves here: names host and pid, and says when a
 *          lease lapses whose process cannot be seen), IO, PERMISSION,
 *          TIMEOUT, ABORTED, PEER_LOST, INTERRUPTED.
 *          This and the calls below also return what a callback of the storage chose, or USER
 *  @threadsafety exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_create(tsr_comm *comm, const char *root, const tsr_saver_options *options,
                                                 tsr_saver **out);

/** Save and return when the checkpoint is durable and committed on every rank. All ranks get the same error.
 *  @param saver  borrowed for the call
 *  @param step   steps completed, not negative, the same on every rank
 *  @param state  borrowed for the call; the same names, dtypes, shapes and layouts on every rank
 *  @return TSR_OK, MISMATCH (states or steps differ, or, with check_replicas, what ranks hold of the same), IO, TIMEOUT,
 *          ABORTED, PEER_LOST, COMMIT_UNKNOWN, INVALID_ARGUMENT, INVALID_STATE, INTERRUPTED
 *  @threadsafety exclusive saver and state  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_save(tsr_saver *saver, int64_t step, tsr_state *state);

/** Copy the state, return, and save the copy in the background. When it returns all is staged: the trainer may change
 *  everything, except that with copy_on_demand the optimizer alone may change what it owns, until tsr_work_staged tells that
 *  this is staged too. When `work` is done the save is durable. What happens while another save is in flight `when_busy` says; the error of an earlier save that no call on
 *  the saver has returned yet is returned here, and then nothing is saved; that its work was waited for does not count, so
 *  that all ranks do the same.
 *  @param saver  borrowed until the work is done
 *  @param step   as tsr_saver_save
 *  @param state  borrowed for the call: when it returns the trainer may go on
 *  @param work   out, may be NULL
 *  @return as tsr_saver_save
 *  @threadsafety exclusive saver and state  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_save_async(tsr_saver *saver, int64_t step, tsr_state *state, tsr_work **work);

/** Wait for the saves in flight, if there are any.
 *  @param saver  borrowed for the call
 *  @return TSR_OK or the first error that was not returned yet, once
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

/** Whether all ranks shall save now and stop. Call it on every rank at each step: as soon as one rank was told to stop
 *  (tsr_preempt_requested(), or `told`) all get 1 at the same step, and from then on. Costs one small all-reduce. In a training loop:
 *
 *      CHECK(tsr_saver_should_stop(saver, step + 1, 0, &stop));
 *      if (stop || step % 50 == 49) CHECK(tsr_saver_save_async(saver, step + 1, state, NULL));
 *      if (stop) break;        // then tsr_saver_wait, and return 0
 *
 *  @param saver  borrowed for the call
 *  @param step   the same on every rank
 *  @param told   1 if this rank was told to stop in another way than by the launcher, else 0
 *  @param stop   out: 1 or 0
 *  @return TSR_OK, MISMATCH (the ranks are at different steps), TIMEOUT, ABORTED, PEER_LOST, INVALID_ARGUMENT,
 *          INVALID_STATE, INTERRUPTED
 *  @threadsafety exclusive saver  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_should_stop(tsr_saver *saver, int64_t step, tsr_flag told, tsr_flag *stop);

/** Free the staging memory that no save in flight uses. It is kept from save to save, since fresh memory is slow.
 *  @param saver  borrowed for the call
 *  @return TSR_OK, INVALID_ARGUMENT, INVALID_STATE
 *  @threadsafety exclusive saver  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_saver_trim(tsr_saver *saver);

/** Free the saver; a save in flight is waited for, at most its deadline. NULL is taken. A program that ends (exit, return
 *  from main) without this, and without tsr_saver_wait, waits for the save in flight all the same, at most the saver's
 *  timeout, and tells on stderr which step is lost if that is over. It does not wait, tells so, and the checkpoint before
 *  stands, where the save needs something of the program's: progress, a storage, the function of tsr_log_set_callback, or
 *  with copy_on_demand tensors that are not staged; nor does _exit. In a progress callback this returns at once: the save
 *  goes on, tells no more, and then the saver is freed.
 *  @param saver  transferred
 *  @threadsafety exclusive  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API void tsr_saver_destroy(tsr_saver *saver);

/** A name of the checkpoint and what it is in the state. If `saved` ends with '.' or is empty, it is what names begin with,
 *  there and here, and `here` must end with '.' or be empty, too. Of a value of one rank, `rank/<r>/NAME`, it is about NAME. */
typedef struct tsr_name_rule {
    const char *saved; /* "model.encoder."; borrowed for the call */
    const char *here;  /* "encoder."; borrowed for the call */
} tsr_name_rule;

/** What a load did beyond what is strict, and whether it was verified: `{"missing": [NAME, ...], "unexpected": [NAME, ...],
 *  "cast": [{"name": NAME, "from": "f32", "to": "bf16"}, ...], "left_alone": [NAME, ...], "verified": true}`, all by names of
 *  the state. "left_alone" are those that `only` does not have. "verified" is whether checksums have shown that all data of
 *  tensors that was read is sound: not if `verify` is 0, and not of formats without checksums, such as safetensors of
 *  others. It must not unwind.
 *  @param json       UTF-8, valid for the call
 *  @param user_data  report_data */
typedef void (*tsr_load_report_fn)(const char *json, void *user_data);

/** How to load. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_load_options {
    size_t struct_size;
    tsr_flag verify;           /* 1 (default): check the checksum of every block read; 0: bare ranges */
    tsr_flag allow_missing;    /* 1: names of the state that the checkpoint lacks stay as they are; default 0 */
    tsr_flag allow_unexpected; /* 1: names of the checkpoint that the state lacks are left out; default 0 */
    tsr_flag allow_cast;       /* 1: floating-point tensors of another dtype are converted; default 0 */
    tsr_progress_fn progress;  /* NULL (default), or called on the thread of the call with TSR_PHASE_READ */
    void *progress_data;       /* borrowed for the call */
    tsr_comm *comm; /* NULL (default): this rank loads for itself; else the ranks that load together, which makes
                                 the load collective. Borrowed for the call, in the caller's exclusive use */
    /* Names of the state, or patterns of them, that are loaded; all other names, of the state and of the checkpoint, are left
     * alone: neither loaded nor missing nor unexpected. '*' is any characters, dots too, '?' one, "[a-c]" and "[!a-c]" one of
     * a set, '\' takes the next one as it is. One that no name of the state fits is a MISMATCH. NULL (default): all names.
     * Borrowed for the call, as its strings are. */
    const char *const *only;
    size_t only_count; /* at least 1 if `only` is given; default 0 */
    /* What names of the checkpoint are in the state, of which the first that fits counts; one that fits nothing does
     * nothing. Two names that would be one are INVALID_ARGUMENT. NULL (default): the same names. Borrowed for the call. */
    const tsr_name_rule *rules;
    size_t rule_count; /* default 0 */
    /* NULL (default), or called once on the thread of the call, before that returns TSR_OK. */
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
 *  "best" (tsr_saver_options.best_metric); or what PyTorch wrote: the directory of a torch.distributed.checkpoint or its
 *  ".metadata", or a file of torch.save or the directory of a model.pt; or safetensors as Hugging Face lays them out: a
 *  file, an index, or a directory of them, also the parts that PyTorch's HuggingFaceStorageWriter saves. No pickle is ever
 *  executed. No job is needed. While a save of Tessera is open no saver removes it, also one of another process, where the
 *  file system has advisory locks.
 *  @param path  borrowed for the call
 *  @param out   the checkpoint
 *  @return TSR_OK, NOT_FOUND (no manifest: not a committed checkpoint), CORRUPT, VERSION, UNSUPPORTED (of PyTorch's: what
 *          is not read, such as a compressed or big-endian archive), IO, INVALID_ARGUMENT (also: a directory of safetensors
 *          holds more than one model)
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_open(const char *path, tsr_checkpoint **out);

/** Options of tsr_checkpoint_open_with. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_open_options {
    size_t struct_size;
    /* storage.h: the path is a key in it; NULL (default): a path of this machine. Borrowed for the call; the checkpoint
     * keeps it alive. */
    const tsr_storage *storage;
} tsr_open_options;

/** Write the defaults into `options`.
 *  @param options      out
 *  @param struct_size  sizeof(tsr_open_options) of the caller
 *  @return TSR_OK, INVALID_ARGUMENT
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_open_options_init(tsr_open_options *options, size_t struct_size);

/** tsr_checkpoint_open with options, such as the storage that the checkpoint lies in.
 *  @param path     borrowed for the call
 *  @param options  borrowed for the call; NULL: all defaults
 *  @param out      the checkpoint
 *  @return as tsr_checkpoint_open; what a callback of the storage chose, or USER
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_open_with(const char *path, const tsr_open_options *options,
                                                         tsr_checkpoint **out);

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
 *  from its metadata, with "format" "torch_dcp" or "torch_save", and "unreadable": names of what is not read, and why; so
 *  it is of safetensors, with "format" "safetensors".
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
 *  @param step        out; -1 of the formats that do not tell: PyTorch's and safetensors
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

/** Load this rank's part into `state`, in place, whatever the world size and layouts of the save were. When it fails, parts
 *  of the state may have been overwritten, unless the error is MISMATCH.
 *  Without options->comm no communication is made, except by ranks of a host that share parameters (share_params of ddp.h):
 *  each loads its rows, so all of them load, and the same names of the same checkpoint. With it all its ranks call this,
 *  each with the same checkpoint opened and the same `verify`; state, layouts, names and what is allowed may differ. Ranks
 *  of one host then read each byte that several of them want once and hand it on through shared memory (from 8 MiB on that
 *  are wanted so; without shared memory, and small or unaligned storages of other formats, each reads for itself). All
 *  ranks get the same error. A rank that does not come is named by TIMEOUT when the communicator's deadline is over, one
 *  that calls another collective by MISMATCH at once.
 *  @param checkpoint  borrowed for the call
 *  @param state       borrowed for the call
 *  @param options     borrowed for the call; NULL: all defaults
 *  @return TSR_OK, MISMATCH (lists all differences; with a comm also: the ranks load different checkpoints), CORRUPT, IO,
 *          INVALID_ARGUMENT (also: rules make one name of two), INVALID_STATE, INTERRUPTED; with a comm also TIMEOUT,
 *          ABORTED, PEER_LOST
 *  @threadsafety exclusive state and options->comm  @collective with options->comm  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_load(const tsr_checkpoint *checkpoint, tsr_state *state,
                                                    const tsr_load_options *options);

/** Check the checkpoint without loading it: sizes and headers, and with `full` every byte.
 *  @param checkpoint  borrowed for the call
 *  @param full        1 reads all data, 0 headers only
 *  @return TSR_OK, CORRUPT (names file and offset; causes list the others), IO, INVALID_ARGUMENT, INTERRUPTED
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_verify(const tsr_checkpoint *checkpoint, tsr_flag full);

/** tsr_checkpoint_verify that tells how far it is.
 *  @param checkpoint  borrowed for the call
 *  @param full        1 reads all data, 0 headers only
 *  @param progress    called on this thread with TSR_PHASE_VERIFY; may be NULL
 *  @param user_data   borrowed for the call
 *  @return as tsr_checkpoint_verify
 *  @threadsafety any thread  @collective no  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_verify_progress(const tsr_checkpoint *checkpoint, tsr_flag full,
                                                               tsr_progress_fn progress, void *user_data);

/** How tsr_checkpoint_export writes. `_init` writes the defaults; then every field is literal. */
typedef struct tsr_export_options {
    size_t struct_size;
    const char *format; /* NULL (default) or "safetensors": whole tensors as Hugging Face has them; "torch_dcp": what
                                 an unmodified PyTorch loads by torch.distributed.checkpoint; "torch_save": what it loads by
                                 torch.load(), one file model.pt; "npz": what numpy.load() loads, one file model.npz */
    /* Of safetensors: data of a file, unless one tensor is larger; then there are numbered files and an index. 0 (default):
     * one file, model.safetensors. */
    int64_t max_file_bytes;
    const char *under;        /* only what has a name that begins so ("model."), and without it; NULL (default): all */
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

/** Write the tensors of a checkpoint into a new directory in another format. All ranks write, each with at most 64 MiB in
 *  memory, reading from wherever the parts are; the directory gets its name when all of it is durable. What was begun is
 *  removed if it fails, unless rank 0 died: then DIRECTORY.tmp-... is left. Values are written as torch_dcp and torch_save;
 *  safetensors and npz have no place for them. What cannot be read ("unreadable" in the manifest) is left out, with a
 *  warning in the log.
 *  @param checkpoint  the same one, opened by every rank; borrowed for the call
 *  @param comm        borrowed for the call (a private communicator is split off); NULL: this process alone
 *  @param directory   must not exist; the same on every rank, on a file system that all see; borrowed for the call
 *  @param options     borrowed for the call; NULL: all defaults
 *  @return TSR_OK, INVALID_ARGUMENT (also: the directory exists, no tensor to write), MISMATCH (ranks differ), UNSUPPORTED
 *          (a dtype that the format does not have), CORRUPT, IO, PERMISSION, TIMEOUT, ABORTED, PEER_LOST, INVALID_STATE,
 *          INTERRUPTED
 *  @threadsafety any thread, exclusive comm  @collective yes  @blocking yes  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_checkpoint_export(const tsr_checkpoint *checkpoint, tsr_comm *comm,
                                                      const char *directory, const tsr_export_options *options);

/** Close the checkpoint. NULL is taken.
 *  @param checkpoint  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_checkpoint_destroy(tsr_checkpoint *checkpoint);

#ifdef __cplusplus
}
#endif
#endif
