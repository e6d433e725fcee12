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
    public static final class Builder {
        private final Comm comm;
        private final long length;
        private int given;
        private long seed;
        private boolean shuffle;
        private boolean dropLast;

        private Builder(Comm comm, long length) {
            this.comm = Objects.requireNonNull(comm, "comm");
            this.length = length;
        }

        /**
         * Of the shuffle, the same on every rank; the default is 0.
         *
         * @param value an unsigned number
         * @return this
         */
        public Builder seed(long value) {
            seed = value;
            given |= 1;
            return this;
        }

        /**
         * A new order each epoch, or 0, 1, 2, …; the default is true.
         *
         * @param value on or off
         * @return this
         */
        public Builder shuffle(boolean value) {
            shuffle = value;
            given |= 2;
            return this;
        }

        /**
         * Drop an epoch's short end, or fill it from the epoch's beginning; the default is false.
         *
         * @param value on or off
         * @return this
         */
        public Builder dropLast(boolean value) {
            dropLast = value;
            given |= 4;
            return this;
        }

        /**
         * Make the sampler.
         *
         * @return the sampler, at the beginning of epoch 0
         * @throws TesseraInvalidArgumentException if the length is none
         */
        public Sampler build() {
            return new Sampler(
                    comm.ref.callLong(c -> Native.samplerCreate(c, length, given, seed, shuffle, dropLast)), length);
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
            throw new IllegalArgumentException("a batch of " + size + " samples");
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
