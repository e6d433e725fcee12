package dev.tessera;

/** Options of {@link Ddp}. What is not set has the library's default. */
public final class DdpOptions {
    int given;
    long bucketBytes;
    long firstBucketBytes;
    int op;

    /** All defaults. */
    public DdpOptions() {}

    /**
     * A bucket closes when it reaches this size; the default is 25 MiB.
     *
     * @param bytes the size
     * @return this
     */
    public DdpOptions bucketBytes(long bytes) {
        bucketBytes = notNegative(bytes);
        given |= 1;
        return this;
    }

    /**
     * The same for the first bucket of each dtype; the default is 1 MiB.
     *
     * @param bytes the size
     * @return this
     */
    public DdpOptions firstBucketBytes(long bytes) {
        firstBucketBytes = notNegative(bytes);
        given |= 2;
        return this;
    }

    /**
     * What becomes of the ranks' gradients; the default is AVG.
     *
     * @param value AVG or SUM
     * @return this
     */
    public DdpOptions op(ReduceOp value) {
        op = value.number();
        given |= 4;
        return this;
    }

    private static long notNegative(long bytes) {
        if (bytes < 0) {
            throw new IllegalArgumentException("a bucket of " + bytes + " bytes");
        }
        return bytes;
    }
}
