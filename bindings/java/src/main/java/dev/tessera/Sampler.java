package dev.tessera;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Objects;

/**
 * Distributes samples over the ranks. The order of an epoch depends only on the seed, epoch and length, not on the
 * number of ranks, so that training can resume in mid-epoch with another number. {@link #batch} and {@link #setEpoch}
 * are exclusive.
 */
public final class Sampler extends NativeObject {
    private final long length;
    private int last; // the size of the last batch

    private Sampler(long handle, long length) {
        super(new Ref("Sampler", handle, Native::samplerDestroy));
        this.length = length;
    }

    /**
     * Start building a sampler over the ranks of {@code comm}.
     *
     * @param comm provides the rank and world size
     * @param length number of samples in the data set, at least 1
     * @return a builder with the library's defaults
     */
    public static Builder of(Comm comm, long length) {
        return new Builder(comm, length);
    }

    /** Settings of a sampler; options that are not set have the library's defaults. */
    public static final class Builder extends SamplerOptionsFields<Builder> {
        private final Comm comm;
        private final long length;
        private Builder(Comm comm, long length) {
            this.comm = Objects.requireNonNull(comm, "comm");
            this.length = length;
        }

        /**
         * Create the sampler.
         *
         * @return the sampler, at the beginning of epoch 0
         * @throws TesseraInvalidArgumentException if the length is invalid
         */
        public Sampler build() {
            return new Sampler(
                    comm.ref.callLong(c -> Native.samplerCreate(c, length, this)), length);
        }
    }

    /**
     * This rank's next batch. All ranks must ask for the same sizes in the same order. Starts the next epoch
     * automatically; a batch never spans two epochs.
     *
     * @param size number of samples for this rank, at least 1
     * @return indices of samples, 1 to {@code size} of them, the same number on every rank
     */
    public long[] batch(int size) {
        if (size < 1) {
            throw new IllegalArgumentException("the batch size is " + size + "; it must be at least 1");
        }
        final int possible = (int) Math.min(size, length); // the native side has room for no more than can come
        return ref.callExclusive(h -> {
            final long[] indices = Native.samplerNext(h, possible);
            last = indices.length;
            return indices;
        });
    }

    /**
     * Which samples of the last batch are not padding. Where the samples do not divide by the ranks, the last step of an
     * epoch is filled up with samples that some rank has taken already, which metrics leave out
     * ({@link Metric#update(Tensor, Tensor, Tensor, Tensor)}).
     *
     * @return U8, as long as the last batch, empty before the first: 1 for a sample, 0 for padding
     */
    public Tensor valid() {
        return ref.callExclusive(h -> {
            final Tensor valid = Tensor.of(ByteBuffer.allocateDirect(last).order(ByteOrder.nativeOrder()), DType.U8);
            Native.samplerValid(h, valid.address(), last);
            return valid;
        });
    }

    /**
     * The epoch of the next batch.
     *
     * @return counted from 0
     */
    public long epoch() {
        return ref.call(Native::samplerPosition)[0];
    }

    /**
     * How many of the epoch's samples all ranks together have consumed.
     *
     * @return samples
     */
    public long consumed() {
        return ref.call(Native::samplerPosition)[1];
    }

    /**
     * Move to the beginning of an epoch.
     *
     * @param epoch not negative
     */
    public void setEpoch(long epoch) {
        ref.runExclusive(h -> Native.samplerSetEpoch(h, epoch));
    }
}
