package dev.tessera;

import java.time.Duration;
import java.util.Objects;

/**
 * The key-value store through which the ranks of a job find each other. Keys have at most 1 KiB of UTF-8, values at
 * most 8 MiB. All methods may be called from many threads; all but {@link #close} may block until the store's deadline
 * and throw {@link TesseraTimeoutException}, {@link TesseraIoException} or {@link TesseraInterruptedException}.
 */
public final class Store extends NativeObject {
    private Store(long handle) {
        super(new Ref("Store", handle, Native::storeDestroy));
    }

    /**
     * Connect, with default options.
     *
     * @param uri "tcp://host:port", or "file:///directory"
     * @return the store
     * @throws TesseraTimeoutException if the server does not answer
     * @throws TesseraPermissionException if the token is refused
     */
    public static Store open(String uri) {
        return open(uri, new StoreOptions());
    }

    /**
     * Connect.
     *
     * @param uri "tcp://host:port", or "file:///directory" (an empty or common directory on a shared file system)
     * @param options token, deadline and so on
     * @return the store
     * @throws TesseraTimeoutException if the server does not answer
     * @throws TesseraPermissionException if the token is refused
     */
    public static Store open(String uri, StoreOptions options) {
        Objects.requireNonNull(options, "options");
        return new Store(Native.storeOpen(Native.utf8(uri, "uri"), options));
    }

    /**
     * Set {@code key}.
     *
     * @param key the key
     * @param value its bytes, copied
     */
    public void set(String key, byte[] value) {
        final byte[] name = Native.utf8(key, "key");
        Objects.requireNonNull(value, "value");
        ref.run(h -> Native.storeSet(h, name, value));
    }

    /**
     * Read the current value of {@code key}.
     *
     * @param key the key
     * @return its bytes
     * @throws TesseraNotFoundException if the key does not exist
     */
    public byte[] get(String key) {
        final byte[] name = Native.utf8(key, "key");
        return ref.call(h -> Native.storeGet(h, name));
    }

    /**
     * Wait until {@code key} exists, at most until the store's own deadline.
     *
     * @param key the key
     * @throws TesseraTimeoutException if it does not appear in time
     */
    public void await(String key) {
        final byte[] name = Native.utf8(key, "key");
        ref.run(h -> Native.storeWait(h, name, -1));
    }

    /**
     * Wait until {@code key} exists.
     *
     * @param key the key
     * @param timeout deadline
     * @throws TesseraTimeoutException if it does not appear in time
     */
    public void await(String key, Duration timeout) {
        final byte[] name = Native.utf8(key, "key");
        final int millis = Native.millis(timeout, "timeout");
        ref.run(h -> Native.storeWait(h, name, millis));
    }

    /**
     * Add {@code delta} atomically to the integer at {@code key}; an absent key counts as 0.
     *
     * @param key the key, which holds decimal text
     * @param delta any number
     * @return the new value
     */
    public long add(String key, long delta) {
        final byte[] name = Native.utf8(key, "key");
        return ref.callLong(h -> Native.storeAdd(h, name, delta));
    }

    /**
     * Set {@code key} atomically to {@code desired} if it holds {@code expected}.
     *
     * @param key the key
     * @param expected null if the key must be absent
     * @param desired the new bytes
     * @return whether it was set
     */
    public boolean compareSet(String key, byte[] expected, byte[] desired) {
        final byte[] name = Native.utf8(key, "key");
        Objects.requireNonNull(desired, "desired");
        return ref.call(h -> Native.storeCompareSet(h, name, expected, desired));
    }

    /**
     * Delete {@code key}.
     *
     * @param key the key
     * @return whether the key existed
     */
    public boolean delete(String key) {
        final byte[] name = Native.utf8(key, "key");
        return ref.call(h -> Native.storeDelete(h, name));
    }
}
