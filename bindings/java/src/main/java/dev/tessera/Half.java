package dev.tessera;

import java.util.Objects;

/**
 * Conversion between {@code float} and the bits of F16 and BF16, which Java has no type for. Values are rounded to the
 * nearest, ties to even; F16 becomes infinite from 65520 on. A NaN stays one. {@link Tensor#toFloats} and
 * {@link Tensor#setFloats} convert a tensor.
 */
public final class Half {
    private static final int F32_INFINITY = 0x7f800000;
    private static final int F16_INFINITY = 0x7c00;
    private static final int REBIAS = 127 - 15 << 23; // from exponents of F16 to those of F32

    private Half() {}

    /**
     * The value of F16 bits.
     *
     * @param bits of one element
     * @return the same value
     */
    public static float fromF16(short bits) {
        final int sign = (bits & 0x8000) << 16;
        final int magnitude = bits & 0x7fff;
        if (magnitude >= F16_INFINITY) {
            return Float.intBitsToFloat(sign | F32_INFINITY | magnitude << 13);
        }
        if (magnitude < 0x400) { // a multiple of the smallest
            return Float.intBitsToFloat(sign | Float.floatToRawIntBits(magnitude * 0x1p-24f));
        }
        return Float.intBitsToFloat(sign | (magnitude << 13) + REBIAS);
    }

    /**
     * The F16 bits of a value.
     *
     * @param value to round
     * @return the bits
     */
    public static short toF16(float value) {
        final int bits = Float.floatToRawIntBits(value);
        final int sign = bits >>> 16 & 0x8000;
        final int magnitude = bits & 0x7fffffff;
        if (magnitude > F32_INFINITY) {
            return (short) (sign | F16_INFINITY | 0x200 | magnitude >>> 13 & 0x1ff);
        }
        if (magnitude >= REBIAS + (31 << 23)) {
            return (short) (sign | F16_INFINITY);
        }
        if (magnitude < REBIAS + (1 << 23)) { // a sum with 0.5 counts units of 2^-24, and rounds as floats do
            final float sum = Float.intBitsToFloat(magnitude) + 0.5f;
            return (short) (sign | Float.floatToRawIntBits(sum) - Float.floatToRawIntBits(0.5f));
        }
        return (short) (sign | rounded(magnitude - REBIAS, 13));
    }

    /**
     * The value of BF16 bits.
     *
     * @param bits of one element
     * @return the same value
     */
    public static float fromBf16(short bits) {
        return Float.intBitsToFloat(bits << 16);
    }

    /**
     * The BF16 bits of a value.
     *
     * @param value to round
     * @return the bits
     */
    public static short toBf16(float value) {
        final int bits = Float.floatToRawIntBits(value);
        if (Float.isNaN(value)) {
            return (short) (bits >>> 16 | 0x40);
        }
        return (short) rounded(bits, 16);
    }

    /**
     * The values of bits.
     *
     * @param bits of the elements
     * @param dtype F16 or BF16
     * @return a new array
     * @throws IllegalArgumentException if it is another dtype
     */
    public static float[] toFloats(short[] bits, DType dtype) {
        final boolean isF16 = isF16(dtype);
        final float[] values = new float[bits.length];
        for (int i = 0; i < bits.length; ++i) {
            values[i] = isF16 ? fromF16(bits[i]) : fromBf16(bits[i]);
        }
        return values;
    }

    /**
     * The bits of values.
     *
     * @param values to round
     * @param dtype F16 or BF16
     * @return a new array
     * @throws IllegalArgumentException if it is another dtype
     */
    public static short[] toBits(float[] values, DType dtype) {
        final boolean isF16 = isF16(dtype);
        final short[] bits = new short[values.length];
        for (int i = 0; i < values.length; ++i) {
            bits[i] = isF16 ? toF16(values[i]) : toBf16(values[i]);
        }
        return bits;
    }

    private static boolean isF16(DType dtype) {
        if (Objects.requireNonNull(dtype, "dtype") != DType.F16 && dtype != DType.BF16) {
            throw new IllegalArgumentException("the dtype is " + dtype + "; it must be F16 or BF16");
        }
        return dtype == DType.F16;
    }

    /** Without the lowest {@code count} bits, to the nearest, ties to even. */
    private static int rounded(int bits, int count) {
        return bits + (1 << count - 1) - 1 + (bits >>> count & 1) >>> count;
    }
}
