package dev.tessera;

import java.lang.ref.Reference;
import java.util.Objects;

/**
 * Random numbers that do not depend on how a tensor is distributed. The number of an element follows from the seed, the
 * stream and the element's index in the full tensor alone. A slice or a shard has, bit for bit, the numbers that the same
 * call writes into the full tensor on one rank, in every language. They are Philox4x32-10's (Salmon et al. 2011), not
 * those of {@link java.util.Random} or PyTorch.
 *
 * <pre>{@code
 * RandomFill.normal(tp.slice("fc1.weight"), 7, 0, 0, 0.02, tp.layout("fc1.weight"), comm.rank());
 * RandomFill.bernoulli(mask, 7, step, 0.9); // the same on every rank
 * }</pre>
 *
 * <p>Seed and stream are unsigned numbers of 64 bits. Different ones give unrelated numbers: use, for example, one seed per
 * run and one stream per parameter or step. With a layout, the tensor is what {@code rank} holds of it, its boxes one after
 * another, as the slices of {@link TensorParallel} and the shards of {@link Fsdp} are; it may be empty. All methods may be
 * called from any thread.
 */
public final class RandomFill {
    private RandomFill() {}

    @FunctionalInterface
    private interface Call {
        void on(long[] output, long layout);
    }

    private static void fill(Tensor out, Call call) {
        final long[] output = out.descriptor();
        try {
            call.on(output, 0);
        } finally {
            Reference.reachabilityFence(out);
        }
    }

    private static void fill(Tensor out, Layout layout, Call call) {
        final long[] output = out.descriptor();
        try {
            Objects.requireNonNull(layout, "layout").ref.run(handle -> call.on(output, handle));
        } finally {
            Reference.reachabilityFence(out);
        }
    }

    /**
     * Fill a full tensor with numbers from {@code low} to below {@code high}, also after rounding to its dtype.
     *
     * @param out F16, BF16, F32 or F64
     * @param seed unsigned
     * @param stream unsigned
     * @param low finite in the dtype
     * @param high likewise, at least {@code low}
     * @throws TesseraInvalidArgumentException if the range or the dtype is invalid
     */
    public static void uniform(Tensor out, long seed, long stream, double low, double high) {
        fill(out, (output, layout) -> Native.randomUniform(output, seed, stream, low, high, layout, 0));
    }

    /**
     * Fill the part of a tensor that a rank holds with numbers from {@code low} to below {@code high}, also after rounding
     * to its dtype.
     *
     * @param out F16, BF16, F32 or F64
     * @param seed unsigned
     * @param stream unsigned
     * @param low finite in the dtype
     * @param high likewise, at least {@code low}
     * @param layout of the full tensor
     * @param rank whose part {@code out} is
     * @throws TesseraInvalidArgumentException if the range, the dtype or the shape is invalid; the message has the right
     *     shape
     */
    public static void uniform(
            Tensor out, long seed, long stream, double low, double high, Layout layout, int rank) {
        fill(out, layout, (output, held) -> Native.randomUniform(output, seed, stream, low, high, held, rank));
    }

    /**
     * Fill a full tensor with normally distributed numbers.
     *
     * @param out F16, BF16, F32 or F64
     * @param seed unsigned
     * @param stream unsigned
     * @param mean finite in the dtype
     * @param deviation the standard deviation: likewise, at least 0
     * @throws TesseraInvalidArgumentException if a number or the dtype is invalid
     */
    public static void normal(Tensor out, long seed, long stream, double mean, double deviation) {
        fill(out, (output, layout) -> Native.randomNormal(output, seed, stream, mean, deviation, layout, 0));
    }

    /**
     * Fill the part of a tensor that a rank holds with normally distributed numbers.
     *
     * @param out F16, BF16, F32 or F64
     * @param seed unsigned
     * @param stream unsigned
     * @param mean finite in the dtype
     * @param deviation the standard deviation: likewise, at least 0
     * @param layout of the full tensor
     * @param rank whose part {@code out} is
     * @throws TesseraInvalidArgumentException if a number, the dtype or the shape is invalid; the message has the right
     *     shape
     */
    public static void normal(
            Tensor out, long seed, long stream, double mean, double deviation, Layout layout, int rank) {
        fill(out, layout, (output, held) -> Native.randomNormal(output, seed, stream, mean, deviation, held, rank));
    }

    /**
     * Fill a full tensor with 1 with the probability {@code p}, otherwise 0: a dropout mask that keeps a share {@code p}.
     *
     * @param out floating-point, an integer dtype or BOOL
     * @param seed unsigned
     * @param stream unsigned
     * @param p 0 to 1
     * @throws TesseraInvalidArgumentException if {@code p} or the dtype is invalid
     */
    public static void bernoulli(Tensor out, long seed, long stream, double p) {
        fill(out, (output, layout) -> Native.randomBernoulli(output, seed, stream, p, layout, 0));
    }

    /**
     * Fill the part of a tensor that a rank holds with 1 with the probability {@code p}, otherwise 0.
     *
     * @param out floating-point, an integer dtype or BOOL
     * @param seed unsigned
     * @param stream unsigned
     * @param p 0 to 1
     * @param layout of the full tensor
     * @param rank whose part {@code out} is
     * @throws TesseraInvalidArgumentException if {@code p}, the dtype or the shape is invalid; the message has the right
     *     shape
     */
    public static void bernoulli(Tensor out, long seed, long stream, double p, Layout layout, int rank) {
        fill(out, layout, (output, held) -> Native.randomBernoulli(output, seed, stream, p, held, rank));
    }
}
