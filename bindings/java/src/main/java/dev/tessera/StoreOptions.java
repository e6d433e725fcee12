package dev.tessera;

import java.time.Duration;

/** Options of a {@link Store} and a {@link StoreServer}. What is not set has the library's default. */
public final class StoreOptions {
    int given;
    int timeoutMs;
    boolean insecure;
    long epoch;
    byte[] token;
    byte[] jobId;

    /** All defaults. */
    public StoreOptions() {}

    /**
     * Deadline of the connection and of calls; the default is 60 s.
     *
     * @param timeout rounded up to milliseconds
     * @return this
     */
    public StoreOptions timeout(Duration timeout) {
        timeoutMs = Native.millis(timeout, "timeout");
        given |= 1;
        return this;
    }

    /**
     * Without job token and handshake, for networks where everyone is trusted.
     *
     * @param value the default is false, or true if the environment has TESSERA_INSECURE=1
     * @return this
     */
    public StoreOptions insecure(boolean value) {
        insecure = value;
        given |= 2;
        return this;
    }

    /**
     * Part of the handshake: ranks of another epoch are refused.
     *
     * @param value an unsigned number; the default is the environment's TESSERA_EPOCH, or 0
     * @return this
     */
    public StoreOptions epoch(long value) {
        epoch = value;
        given |= 4;
        return this;
    }

    /**
     * The job token. The default is the environment's TESSERA_TOKEN_FD, TESSERA_TOKEN_FILE or TESSERA_TOKEN; on loopback
     * also a file in the user's runtime directory.
     *
     * @param hex 64 hexadecimal digits
     * @return this
     */
    public StoreOptions token(String hex) {
        token = Native.utf8(hex, "token");
        return this;
    }

    /**
     * Part of the handshake; the default is the environment's TESSERA_JOB_ID, or "".
     *
     * @param id the same on all ranks
     * @return this
     */
    public StoreOptions jobId(String id) {
        jobId = Native.utf8(id, "jobId");
        return this;
    }
}
