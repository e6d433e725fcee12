package dev.tessera;

import java.time.Duration;

/** Options of a {@link Comm}. What is not set has the library's default. */
public final class CommOptions {
    int given;
    int timeoutMs;
    int heartbeatTimeoutMs;
    int spinCount;
    byte[] backend;
    byte[] name;

    /** All defaults. */
    public CommOptions() {}

    /**
     * Deadline of each collective; the default is 600 s, or the environment's TESSERA_TIMEOUT_MS.
     *
     * @param timeout rounded up to milliseconds
     * @return this
     */
    public CommOptions timeout(Duration timeout) {
        timeoutMs = Native.millis(timeout, "timeout");
        given |= 1;
        return this;
    }

    /**
     * Busy turns before a waiting rank yields; the default is -1: from ranks and usable cores.
     *
     * @param count -1: chosen by the library
     * @return this
     */
    public CommOptions spinCount(int count) {
        spinCount = count;
        given |= 2;
        return this;
    }

    /**
     * How long another host that is waited for may give no sign of life, though it is asked, before it counts as lost
     * ({@link TesseraPeerLostException}); the default is 30 s, or the environment's TESSERA_HEARTBEAT_TIMEOUT_MS.
     *
     * @param timeout rounded up to milliseconds; zero: it is not asked, and only the deadline ends the wait
     * @return this
     */
    public CommOptions heartbeatTimeout(Duration timeout) {
        heartbeatTimeoutMs = Native.millis(timeout, "heartbeatTimeout");
        given |= 4;
        return this;
    }

    /**
     * The transport; the default is the environment's TESSERA_BACKEND, or "auto": shared memory between ranks of one
     * host, Gloo between hosts. There is none between GPUs yet: asking for one, as by "cuda:nccl", is UNSUPPORTED.
     *
     * @param value "auto", "shm" or "gloo", or one of them behind "cpu:"
     * @return this
     */
    public CommOptions backend(String value) {
        backend = Native.utf8(value, "backend");
        return this;
    }

    /**
     * The name in messages and logs; the default is "world".
     *
     * @param value any text
     * @return this
     */
    public CommOptions name(String value) {
        name = Native.utf8(value, "name");
        return this;
    }
}
