/* Tessera: a storage of the program's own, such as an object store, for checkpoints. What it does: callbacks. */
#ifndef TESSERA_STORAGE_H
#define TESSERA_STORAGE_H

#include "types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** What a storage can do beyond the least. Tessera needs no rename, append, lock or random write of it. */
enum {
    TSR_STORAGE_PARTS_IN_ANY_ORDER =
        1,                        /* `part` may come from several threads and in any order: saves in the background
                                           need no second look at their data, and parts go out in parallel */
    TSR_STORAGE_PUT_IF_ABSENT = 2 /* `put` with if_absent is atomic: of two savers that begin at once one is refused
                                           at once, not at its first save */
};

/** What a key is, for the callback `status`. */
enum {
    TSR_STORAGE_OBJECT = 1,
    TSR_STORAGE_DIRECTORY = 2 /* keys go on after it: "runs/a" if there is "runs/a/latest" */
};

/** Tells of one name to the callback `list`'s caller; any number of times, in any order, only during the callback. */
typedef void (*tsr_storage_found_fn)(const char *name, void *found_data);

/* The callbacks.
 *
 * Keys are UTF-8, parts joined by "/", without one at either end ("runs/a/step-00000042-5f3a91c2/manifest.json").
 * An object appears at once and whole, and is durable, when `put` or `finish` returns; before, nobody sees it. What was
 * put is seen by every later `status`, `open` and `list`, from any process.
 *
 * Every callback may be called from several threads at once, also ones of the library; must not unwind, and must not call
 * into the saver or checkpoint that it serves: calls on that saver are INVALID_STATE, and if it is destroyed there it ends
 * when its saves have. A callback should have deadlines of its own: a save waits as long as it does.
 *
 * Each returns 0, or why not: a TSR_E_ code of error.h (NOT_FOUND, IO, PERMISSION, TIMEOUT, ...), which becomes that of
 * the call; or any other number, which the call returns as USER, with the number as native code. `message` has room for
 * TSR_MESSAGE_BYTES; text put there (UTF-8, ended by 0) stands in the error. `user_data` is as it was given. */

/** What `key` is. NOT_FOUND if it is nothing. `modified_ms`: since 1970 by the storage's clock, 0 if it does not tell: then
 *  the lease of a job that died on another machine must be removed by hand. */
typedef int32_t (*tsr_storage_status_fn)(const char *key, int32_t *kind, int64_t *size, int64_t *modified_ms,
                                         char *message, void *user_data);
/** Open an object for reading, by many threads; NOT_FOUND if there is none. `object` is whatever you like. */
typedef int32_t (*tsr_storage_open_fn)(const char *key, void **object, int64_t *size, char *message, void *user_data);
/** Read; `got` is `size` unless the object ends before. */
typedef int32_t (*tsr_storage_read_fn)(void *object, int64_t offset, void *data, int64_t size, int64_t *got,
                                       char *message, void *user_data);
/** Frees `object`, once, whatever happened. */
typedef void (*tsr_storage_close_fn)(void *object, void *user_data);
/** Put a small object, whole. `if_absent` 1: only if there is none; INVALID_STATE if there is. That is asked for only with
 *  TSR_STORAGE_PUT_IF_ABSENT. */
typedef int32_t (*tsr_storage_put_fn)(const char *key, const void *data, int64_t size, int32_t if_absent, char *message,
                                      void *user_data);
/** Begin a large object, of `size` bytes or up to 4095 less. It replaces one that is there. */
typedef int32_t (*tsr_storage_begin_fn)(const char *key, int64_t size, void **upload, char *message, void *user_data);
/** Part `index`, counted from 0, whose first byte is byte `offset` of the object. Only the last part may be smaller. */
typedef int32_t (*tsr_storage_part_fn)(void *upload, int64_t index, int64_t offset, const void *data, int64_t size,
                                       char *message, void *user_data);
/** All parts were there: the object appears. */
typedef int32_t (*tsr_storage_finish_fn)(void *upload, char *message, void *user_data);
/** Frees `upload`, once, whatever happened. Unless `finish` returned 0 nothing may be left of it. */
typedef void (*tsr_storage_drop_fn)(void *upload, void *user_data);
/** Call `found` for each name directly below `key`: "latest" and "step-00000042-5f3a91c2" below "runs/a". An empty key is
 *  the top. Nothing below, or no such key: 0. */
typedef int32_t (*tsr_storage_list_fn)(const char *key, tsr_storage_found_fn found, void *found_data, char *message,
                                       void *user_data);
/** Remove an object, or an empty directory; 0 if there is none. */
typedef int32_t (*tsr_storage_remove_fn)(const char *key, char *message, void *user_data);

/** The callbacks of a storage. Zero the struct, set struct_size and what you have; all but `remove_directory` are needed. */
typedef struct tsr_storage_vtable {
    size_t struct_size;
    int32_t capabilities; /* of TSR_STORAGE_, added */
    int32_t reserved;     /* 0 */
    int64_t part_bytes;   /* of all parts but the last, at least: 0 (8 MiB), or 64 KiB or more; S3 takes 5 MiB or more.
                             Parts are larger where an object would have more than 10,000. */
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
    tsr_storage_remove_fn remove_directory; /* NULL where directories need no removing */
} tsr_storage_vtable;

/** Make a storage of callbacks, for tsr_saver_options and tsr_open_options. It lives until it is destroyed and no saver or
 *  checkpoint uses it any more; then destroy(user_data) is called, on whatever thread that was.
 *  @param vtable     copied
 *  @param user_data  passed to each callback
 *  @param destroy    may be NULL; not called if this fails
 *  @param out        the storage
 *  @return TSR_OK, INVALID_ARGUMENT (a callback is NULL, part_bytes), UNSUPPORTED (a capability that is not known)
 *  @threadsafety any thread  @collective no  @blocking no  @since 0.1 experimental */
TSR_API TSR_MUST_USE tsr_status tsr_storage_create(const tsr_storage_vtable *vtable, void *user_data,
                                                   tsr_destroy_fn destroy, tsr_storage **out);

/** Free the handle; what uses the storage goes on. NULL is taken.
 *  @param storage  transferred
 *  @threadsafety exclusive  @collective no  @blocking no  @since 0.1 experimental */
TSR_API void tsr_storage_destroy(tsr_storage *storage);

#ifdef __cplusplus
}
#endif
#endif
