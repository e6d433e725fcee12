package dev.tessera;

import java.util.Objects;

/**
 * Which samples this rank takes next. The order of an epoch depends on seed, epoch and length alone, not on the number of
 * ranks, so that training goes on in mid-epoch at another one. {@link #batch} and {@link #setEpoch} are exclusive.
 */
public final class Sampler extends NativeObject {
    private final long length;

    private Sampler(long handle, long length) {
        super(new Ref("Sampler", handle, Native::samplerDestroy));
        this.length = length;
    }

    /**
     * Begin a sampler over the ranks of {@code comm}.
     *
     * @param comm whose rank and world size are read
     * @param length samples of the data set, at least 1
     * @return a builder with the library's defaults
     */
    public static Builder of(Comm comm, long length) {
        return new Builder(comm, length);
    }

    /** Settings of a sampler; what is not set has the library's default. */
    public static final class Builder extends SamplerOptionsFields<Builder> {
        private final Comm comm;
        private final long length;
        private Builder(Comm comm, long length) {
            this.comm = Objects.requireNonNull(comm, "comm");
            this.length = length;
        }

        /**
         * Make the sampler.
         *
         * @return the sampler, at the beginning of epoch 0
         * @throws TesseraInvalidArgumentException if the length is none
         */
        public Sampler build() {
            return new Sampler(
                    comm.ref.callLong(c -> Native.samplerCreate(c, length, this)), length);
        }
    }

    /**
     * This rank's next batch. All ranks must ask for the same sizes in the same order. The next epoch begins by itself; a
     * batch never spans two.
     *
     * @param size samples wanted on this rank, at least 1
     * @return indices of samples, 1 to {@code size} of them, as many on every rank
     */
    public long[] batch(int size) {
        if (size < 1) {
            throw new IllegalArgumentException("the batch size is " + size + "; it must be at least 1");
        }
        final int possible = (int) Math.min(size, length); // the native side has room for no more than can come
        return ref.callExclusive(h -> Native.samplerNext(h, possible));
    }

    /**
     * The epoch that the next batch belongs to.
     *
     * @return from 0
     */
    public long epoch() {
        return ref.call(Native::samplerPosition)[0];
    }

    /**
     * How many of the epoch's samples all ranks together have taken.
     *
     * @return samples
     */
    public long consumed() {
        return ref.call(Native::samplerPosition)[1];
    }

    /**
     * Go to the beginning of an epoch.
     *
     * @param epoch not negative
     */
    public void setEpoch(long epoch) {
        ref.runExclusive(h -> Native.samplerSetEpoch(h, epoch));
    }
}
