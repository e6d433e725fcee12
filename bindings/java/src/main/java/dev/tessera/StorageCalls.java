package dev.tessera;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.function.LongUnaryOperator;

/**
 * Called by the shims of storage.cc. These methods return only a status: 0, or the status that {@link Failures} gives
 * an exception, with a message. Numbers are returned in {@code out}, objects in {@code made}.
 */
final class StorageCalls {
    private static final int KIND_OBJECT = 1;
    private static final int KIND_DIRECTORY = 2;

    private StorageCalls() {}

    /** Runs {@code call} with the library's handle of {@code storage}; objects made with it keep the storage alive. */
    static long with(Storage storage, LongUnaryOperator call) {
        final int capabilities = (storage.partsInAnyOrder() ? 1 : 0) | (storage.putsIfAbsent() ? 2 : 0);
        final long handle = Native.storageCreate(storage, capabilities, storage.partBytes());
        try {
            return call.applyAsLong(handle);
        } finally {
            Native.storageDestroy(handle);
        }
    }

    static int status(Object storage, byte[] key, long[] out, ByteBuffer message) {
        try {
            final Storage.Status found = ((Storage) storage).status(Native.text(key));
            if (found == null) {
                return ErrorCode.NOT_FOUND.number();
            }
            out[0] = found.directory ? KIND_DIRECTORY : KIND_OBJECT;
            out[1] = found.size;
            out[2] = found.modifiedMs;
            return 0;
        } catch (Throwable error) {
            return Failures.failed(error, message);
        }
    }

    static int open(Object storage, byte[] key, Object[] made, long[] out, ByteBuffer message) {
        try {
            final Storage.Reader reader = ((Storage) storage).open(Native.text(key));
            if (reader == null) {
                return ErrorCode.NOT_FOUND.number();
            }
            made[0] = reader;
            out[0] = reader.size();
            return 0;
        } catch (Throwable error) {
            return Failures.failed(error, message);
        }
    }

    static int read(Object reader, long offset, ByteBuffer into, long[] out, ByteBuffer message) {
        try {
            out[0] = ((Storage.Reader) reader).read(offset, into);
            return 0;
        } catch (Throwable error) {
            return Failures.failed(error, message);
        }
    }

    static int put(Object storage, byte[] key, ByteBuffer data, boolean ifAbsent, ByteBuffer message) {
        try {
            final boolean put = ((Storage) storage).put(Native.text(key), readOnly(data), ifAbsent);
            return put ? 0 : ErrorCode.INVALID_STATE.number();
        } catch (Throwable error) {
            return Failures.failed(error, message);
        }
    }

    static int begin(Object storage, byte[] key, long size, Object[] made, ByteBuffer message) {
        try {
            made[0] = ((Storage) storage).begin(Native.text(key), size);
            return 0;
        } catch (Throwable error) {
            return Failures.failed(error, message);
        }
    }

    static int part(Object upload, long index, long offset, ByteBuffer data, ByteBuffer message) {
        try {
            ((Storage.Upload) upload).part(index, offset, readOnly(data));
            return 0;
        } catch (Throwable error) {
            return Failures.failed(error, message);
        }
    }

    static int finish(Object upload, ByteBuffer message) {
        try {
            ((Storage.Upload) upload).finish();
            return 0;
        } catch (Throwable error) {
            return Failures.failed(error, message);
        }
    }

    /** Ends a reader or an upload; errors can only be logged. */
    static void end(Object readerOrUpload) {
        try {
            if (readerOrUpload instanceof Storage.Reader) {
                ((Storage.Reader) readerOrUpload).close();
            } else {
                ((Storage.Upload) readerOrUpload).drop();
            }
        } catch (Throwable dropped) {
            System.getLogger("dev.tessera").log(System.Logger.Level.WARNING, "a storage failed to close or drop", dropped);
        }
    }

    static int list(Object storage, byte[] key, Object[] made, ByteBuffer message) {
        try {
            made[0] = ((Storage) storage)
                    .list(Native.text(key)).stream().map(name -> Native.utf8(name, "name")).toArray(byte[][]::new);
            return 0;
        } catch (Throwable error) {
            return Failures.failed(error, message);
        }
    }

    static int remove(Object storage, byte[] key, boolean directory, ByteBuffer message) {
        try {
            if (directory) {
                ((Storage) storage).removeDirectory(Native.text(key));
            } else {
                ((Storage) storage).remove(Native.text(key));
            }
            return 0;
        } catch (Throwable error) {
            return Failures.failed(error, message);
        }
    }

    private static ByteBuffer readOnly(ByteBuffer data) {
        return data == null ? ByteBuffer.allocate(0) : data.asReadOnlyBuffer().order(ByteOrder.nativeOrder());
    }
}
