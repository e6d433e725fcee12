package dev.tessera;

import java.nio.ByteBuffer;
import java.util.List;

/**
 * A storage for checkpoints, for {@link Saver.Builder#storage} and {@link Checkpoint#open(Storage, String)}: an object store,
 * or whatever keeps named objects. Keys are texts, parts joined by "/" without one at either end. An object appears at once
 * and whole when {@link #put} or {@link Upload#finish} returns, and every later call, from any process, sees it. A storage
 * renames nothing and locks nothing; docs/STORAGE.md says how a save is committed without.
 *
 * <p>Every method may be called from many threads at once, also from threads of the library, and must not use the saver or
 * checkpoint that it serves. It should have deadlines of its own. What it throws becomes the error of the save or load, on
 * every rank: of the same kind for a {@link TesseraException} and for an {@link java.io.IOException}, else
 * {@link ErrorCode#USER}. Buffers are borrowed for the call.
 */
public interface Storage {
    /** What a key is. */
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
         * @param modifiedMs since 1970 by the storage's clock; 0 if it does not tell: then the lease of a job that died on
         *     another machine must be removed by hand
         * @return the status
         */
        public static Status object(long size, long modifiedMs) {
            return new Status(false, size, modifiedMs);
        }

        /**
         * No object, but other keys go on after it: "runs/a" if there is "runs/a/latest".
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
         * @return how many bytes: fewer only at the object's end
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

    /** A large object while it is written. */
    interface Upload {
        /**
         * One part. From many threads and in any order if the storage has {@link Storage#partsInAnyOrder}, else one after the
         * other.
         *
         * @param index from 0
         * @param offset of its first byte in the object
         * @param data from its position to its limit
         * @throws Exception any
         */
        void part(long index, long offset, ByteBuffer data) throws Exception;

        /**
         * All parts were there: the object appears, whole and durable.
         *
         * @throws Exception any
         */
        void finish() throws Exception;

        /**
         * Called once, last. Unless {@link #finish} returned, nothing may be left of the object.
         *
         * @throws Exception any; it is logged
         */
        void drop() throws Exception;
    }

    /**
     * Whether an upload's parts may come in any order and at once. If not, a save looks at its data twice.
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
     * The least size of all parts but the last. Parts are larger where there would be more than 10,000.
     *
     * @return bytes; 0, unless overridden, is 8 MiB
     */
    default long partBytes() {
        return 0;
    }

    /**
     * What a key is.
     *
     * @param key any
     * @return its status; null if it is nothing
     * @throws Exception any
     */
    Status status(String key) throws Exception;

    /**
     * Open an object for reading.
     *
     * @param key of the object
     * @return the reader; null if there is no such object
     * @throws Exception any
     */
    Reader open(String key) throws Exception;

    /**
     * Put a small object, whole.
     *
     * @param key of the object
     * @param data from its position to its limit
     * @param ifAbsent only if there is none; asked for only of what {@link #putsIfAbsent}
     * @return false: {@code ifAbsent}, and there is one, which stays
     * @throws Exception any
     */
    boolean put(String key, ByteBuffer data, boolean ifAbsent) throws Exception;

    /**
     * Begin a large object; one that is there is replaced when it is finished.
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
     * @param key any; empty: the top
     * @return in any order; none if there is nothing
     * @throws Exception any
     */
    List<String> list(String key) throws Exception;

    /**
     * Remove an object; one that is not there is no error.
     *
     * @param key of the object
     * @throws Exception any
     */
    void remove(String key) throws Exception;

    /**
     * Remove an empty directory, where there are such.
     *
     * @param key any
     * @throws Exception any
     */
    default void removeDirectory(String key) throws Exception {}
}
