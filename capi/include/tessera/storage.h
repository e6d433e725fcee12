/* Tessera: a custom storage for checkpoints, such as an object store, implemented by callbacks. */
#ifndef TESSERA_STORAGE_H
#define TESSERA_STORAGE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Optional capabilities of a storage. Tessera does not need it to rename, append, lock or write at random offsets. */
enum {
    /* `part` may be called from several threads and in any order: background saves need not read their data twice, and
     * parts are uploaded in parallel */
    TSR_STORAGE_PARTS_IN_ANY_ORDER = 1,
    /* `put` with if_absent is atomic: of two savers that start at the same time, one is refused immediately, not at its
     * first save */
    TSR_STORAGE_PUT_IF_ABSENT = 2
};

/** What a key is, for the callback `status`. */
enum {
    TSR_STORAGE_OBJECT = 1,
    TSR_STORAGE_DIRECTORY = 2 /* a prefix of other keys: "runs/a" if "runs/a/latest" exists */
};

/** Reports one name to the caller of the callback `list`. Call it any number of times, in any order, only during that
 *  callback. */
typedef void (*tsr_storage_found_fn)(const char *name, void *found_data);

/* The callbacks.
 *
 * Keys are UTF-8, with parts joined by "/" and no "/" at either end ("runs/a/step-00000042-5f3a91c2/manifest.json"). An
 * object appears atomically and is durable when `put` or `finish` returns; it is invisible before. Every later
 * `status`, `open` and `list` sees it, from any process.
 *
 * Every callback may be called from several threads at once, including threads of the library. It must not unwind or
 * call into the saver or checkpoint that it serves: calls on that saver are INVALID_STATE, and a saver destroyed in a
 * callback is freed when its saves end. A callback should have its own deadlines: a save waits as long as the callback
 * runs.
 *
 * Each callback returns 0 or a reason for failure: a TSR_E_ code of error.h (NOT_FOUND, IO, PERMISSION, TIMEOUT, ...),
 * which becomes the code of the call, or any other number, which the call returns as USER with the number as native
 * code. `message` has room for TSR_MESSAGE_BYTES; text written there (UTF-8, terminated by 0) becomes part of the
 * error. `user_data` is the pointer given to tsr_storage_create. */

/** Describe `key`; NOT_FOUND if it does not exist. `modified_ms`: milliseconds since 1970 by the storage's clock; 0 if
 *  unknown, in which case the lease of a job that died on another machine must be removed by hand. */
typedef int32_t (*tsr_storage_status_fn)(const char *key, int32_t *kind, int64_t *size, int64_t *modified_ms,
                                         char *message, void *user_data);
/** Open an object for reading by several threads; NOT_FOUND if it does not exist. `object` is a pointer of your
 *  choice. */
typedef int32_t (*tsr_storage_open_fn)(const char *key, void **object, int64_t *size, char *message, void *user_data);
/** Read `size` bytes at `offset`; `got` is `size` unless the object ends earlier. */
typedef int32_t (*tsr_storage_read_fn)(void *object, int64_t offset, void *data, int64_t size, int64_t *got,
                                       char *message, void *user_data);
/** Free `object`; called exactly once, even after errors. */
typedef void (*tsr_storage_close_fn)(void *object, void *user_data);
/** Write a small object in one call. `if_absent` 1: only if it does not exist, otherwise INVALID_STATE; used only with
 *  TSR_STORAGE_PUT_IF_ABSENT. */
typedef int32_t (*tsr_storage_put_fn)(const char *key, const void *data, int64_t size, int32_t if_absent, char *message,
                                      void *user_data);
/** Begin a large object of `size` bytes, or up to 4095 fewer. It replaces an existing object. */
typedef int32_t (*tsr_storage_begin_fn)(const char *key, int64_t size, void **upload, char *message, void *user_data);
/** Write part `index`, counted from 0, which starts at byte `offset` of the object. Only the last part may be
 *  smaller. */
typedef int32_t (*tsr_storage_part_fn)(void *upload, int64_t index, int64_t offset, const void *data, int64_t size,
                                       char *message, void *user_data);
/** Complete the object after all parts: it appears. */
typedef int32_t (*tsr_storage_finish_fn)(void *upload, char *message, void *user_data);
/** Free `upload`; called exactly once, even after errors. Unless `finish` returned 0, nothing of it may remain. */
typedef void (*tsr_storage_drop_fn)(void *upload, void *user_data);
/** Call `found` for each name directly below `key`: "latest" and "step-00000042-5f3a91c2" below "runs/a". An empty key
 *  is the root. Returns 0 if nothing is below the key or it does not exist. */
typedef int32_t (*tsr_storage_list_fn)(const char *key, tsr_storage_found_fn found, void *found_data, char *message,
                                       void *user_data);
/** Remove an object or an empty directory; 0 if it does not exist. */
typedef int32_t (*tsr_storage_remove_fn)(const char *key, char *message, void *user_data);

/** The callbacks of a storage. Zero the struct, then set struct_size and the callbacks; all except `remove_directory`
 *  are required. */
typedef struct tsr_storage_vtable {
    size_t struct_size;
    int32_t capabilities; /* sum of TSR_STORAGE_ capabilities */
    int32_t reserved;     /* 0 */
    /* minimum size of all parts except the last: 0 (8 MiB), or at least 64 KiB; S3 needs at least 5 MiB. Parts are
     * larger if an object would otherwise have more than 10,000. */
    int64_t part_bytes;
    tsr_storage_status_fn status;
    tsr_storage_open_fn open;
    tsr_storage_read_fn read;
    tsr_storage_close_fn close;
    tsr_storage_put_fn put;
    tsr_storage_begin_fn begin;
    tsr_storage_part_fn part;
    tsr_storage_finish_fn finish;
    tsr_storage_drop_fn drop;
    tsr_storage_list_fn list;
    tsr_storage_remove_fn remove;
    tsr_storage_remove_fn remove_directory; /* NULL if directories need not be removed */
} tsr_storage_vtable;

/** Create a storage from callbacks, for tsr_saver_options and tsr_open_options. It lives until it is destroyed and no
 *  saver or checkpoint uses it; then destroy(user_data) is called, on any thread.
 *  @param vtable     copied
 *  @param user_data  passed to each callback
 *  @param destroy    may be NULL; not called if this fails
 *  @param out        the storage
 *  @return TSR_OK, INVALID_ARGUMENT (a callback is NULL, part_bytes), UNSUPPORTED (an unknown capability)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_storage_create(const tsr_storage_vtable *vtable, void *user_data,
                                                   tsr_destroy_fn destroy, tsr_storage **out);

/** Free the handle; savers and checkpoints that use the storage continue. NULL is ignored.
 *  @param storage  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_storage_destroy(tsr_storage *storage);

#ifdef __cplusplus
}
#endif
#endif
