package dev.tessera;

import java.nio.ByteBuffer;
import java.util.List;

/**
 * A storage for checkpoints, for {@link Saver.Builder#storage} and {@link Checkpoint#open(Storage, String)}: an object
 * store, or anything that keeps named objects. Keys are strings of parts joined by "/", without a leading or trailing
 * one. An object appears atomically and complete when {@link #put} or {@link Upload#finish} returns, and every later
 * call, from any process, sees it. A storage needs neither renames nor locks; docs/STORAGE.md describes how a save is
 * committed without them.
 *
 * <p>Every method may be called from many threads at once, including threads of the library, and must not use the saver
 * or checkpoint that it serves. It should have its own deadlines. An exception becomes the error of the save or load on
 * every rank: of the same kind for a {@link TesseraException} and for an {@link java.io.IOException}, else {@link
 * ErrorCode#USER}. Buffers are valid only during the call.
 */
public interface Storage {
    /** The status of a key. */
    final class Status {
        private static final Status DIRECTORY = new Status(true, 0, 0);

        final boolean directory;
        final long size;
        final long modifiedMs;

        private Status(boolean directory, long size, long modifiedMs) {
            this.directory = directory;
            this.size = size;
            this.modifiedMs = modifiedMs;
        }

        /**
         * An object.
         *
         * @param size in bytes
         * @param modifiedMs milliseconds since 1970 by the storage's clock; 0 if unknown: then the lease of a job that
         *     died on another machine must be removed by hand
         * @return the status
         */
        public static Status object(long size, long modifiedMs) {
            return new Status(false, size, modifiedMs);
        }

        /**
         * Not an object but a prefix of other keys: "runs/a" if "runs/a/latest" exists.
         *
         * @return the status
         */
        public static Status directory() {
            return DIRECTORY;
        }
    }

    /** An object opened for reading, by many threads at once. */
    interface Reader {
        /**
         * The object's size.
         *
         * @return bytes
         */
        long size();

        /**
         * Fill a buffer.
         *
         * @param offset of the first byte
         * @param into to be filled from its position to its limit
         * @return the number of bytes, fewer only at the object's end
         * @throws Exception any
         */
        int read(long offset, ByteBuffer into) throws Exception;

        /**
         * Called once, last.
         *
         * @throws Exception any; it is logged
         */
        void close() throws Exception;
    }

    /** A large object that is being written. */
    interface Upload {
        /**
         * Write one part. Called from many threads and in any order if the storage has {@link Storage#partsInAnyOrder},
         * else in sequence.
         *
         * @param index counted from 0
         * @param offset of its first byte in the object
         * @param data from its position to its limit
         * @throws Exception any
         */
        void part(long index, long offset, ByteBuffer data) throws Exception;

        /**
         * Called after all parts: the object appears, complete and durable.
         *
         * @throws Exception any
         */
        void finish() throws Exception;

        /**
         * Called once, last. Unless {@link #finish} returned, remove everything that was written.
         *
         * @throws Exception any; it is logged
         */
        void drop() throws Exception;
    }

    /**
     * Whether an upload's parts may come in any order and concurrently. If not, a save reads its data twice.
     *
     * @return false, unless overridden
     */
    default boolean partsInAnyOrder() {
        return false;
    }

    /**
     * Whether {@link #put} with {@code ifAbsent} is atomic.
     *
     * @return false, unless overridden
     */
    default boolean putsIfAbsent() {
        return false;
    }

    /**
     * The minimum size of all parts but the last. Parts are larger if there would be more than 10,000.
     *
     * @return bytes; 0, the default, means 8 MiB
     */
    default long partBytes() {
        return 0;
    }

    /**
     * The status of a key.
     *
     * @param key any
     * @return its status; null if it does not exist
     * @throws Exception any
     */
    Status status(String key) throws Exception;

    /**
     * Open an object for reading.
     *
     * @param key of the object
     * @return the reader; null if the object does not exist
     * @throws Exception any
     */
    Reader open(String key) throws Exception;

    /**
     * Write a small object atomically.
     *
     * @param key of the object
     * @param data from its position to its limit
     * @param ifAbsent only write if the object does not exist; used only with {@link #putsIfAbsent}
     * @return false if {@code ifAbsent} and the object exists, which is kept
     * @throws Exception any
     */
    boolean put(String key, ByteBuffer data, boolean ifAbsent) throws Exception;

    /**
     * Begin a large object. It replaces an existing one when it is finished.
     *
     * @param key of the object
     * @param size bytes, or up to 4095 more than will come
     * @return the upload
     * @throws Exception any
     */
    Upload begin(String key, long size) throws Exception;

    /**
     * The names directly below a key.
     *
     * @param key any; empty for the top level
     * @return in any order; empty if there are none
     * @throws Exception any
     */
    List<String> list(String key) throws Exception;

    /**
     * Remove an object. It is not an error if it does not exist.
     *
     * @param key of the object
     * @throws Exception any
     */
    void remove(String key) throws Exception;

    /**
     * Remove an empty directory, in storages that have directories.
     *
     * @param key any
     * @throws Exception any
     */
    default void removeDirectory(String key) throws Exception {}
}
