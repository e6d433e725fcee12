package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import org.junit.jupiter.api.Test;

/** F16 and BF16 as floats: every element, and what lies between two. */
class HalfTest {
    private static float value(int bits, DType dtype) {
        return Half.toFloats(new short[] {(short) bits}, dtype)[0];
    }

    private static int rounded(float value, DType dtype) {
        return Half.toBits(new float[] {value}, dtype)[0] & 0xffff;
    }

    private static int infinity(DType dtype) {
        return dtype == DType.F16 ? 0x7c00 : 0x7f80;
    }

    @Test
    void everyElementComesBack() {
        for (DType dtype : List.of(DType.F16, DType.BF16)) {
            for (int bits = 0; bits <= 0xffff; ++bits) {
                final float value = value(bits, dtype);
                if ((bits & 0x7fff) > infinity(dtype)) {
                    assertTrue(Float.isNaN(value) && Float.isNaN(value(rounded(value, dtype), dtype)), dtype + " " + bits);
                } else if (bits != rounded(value, dtype)) {
                    throw new AssertionError(dtype + " " + bits + " is " + value + " and then " + rounded(value, dtype));
                }
            }
        }
    }

    @Test
    void whatLiesBetweenTwoElementsIsRoundedToTheNearestAndTiesToEven() {
        for (DType dtype : List.of(DType.F16, DType.BF16)) {
            for (int bits = 0; bits + 1 < infinity(dtype); ++bits) {
                final float low = value(bits, dtype);
                final float middle = (float) (((double) low + value(bits + 1, dtype)) / 2);
                assertTrue(low < value(bits + 1, dtype));
                for (int sign = 0; sign <= 0x8000; sign += 0x8000) {
                    final float signed = sign == 0 ? 1 : -1;
                    final int even = bits + (bits & 1);
                    if (rounded(signed * middle, dtype) != (sign | even)
                            || rounded(signed * Math.nextDown(middle), dtype) != (sign | bits)
                            || rounded(signed * Math.nextUp(middle), dtype) != (sign | bits + 1)) {
                        throw new AssertionError(dtype + " " + bits + ": around " + signed * middle);
                    }
                }
            }
        }
        assertEquals(0x7bff, rounded(Math.nextDown(65520f), DType.F16));
        assertEquals(0x7c00, rounded(65520f, DType.F16));
        assertEquals(0x7c00, rounded(100_000f, DType.F16));
        assertEquals(0xfc00, rounded(-1e30f, DType.F16));
        assertEquals(0x7f80, rounded(Float.MAX_VALUE, DType.BF16));
    }

    @Test
    void knownElements() {
        assertArrayEquals(new short[] {0x3555, (short) 0xbe00, 1, 0x3c00, 0x7bff},
                Half.toBits(new float[] {1 / 3f, -1.5f, 0x1p-24f, 1, 65504}, DType.F16));
        assertArrayEquals(new short[] {0x3eab, (short) 0xbfc0, 0x3f80}, Half.toBits(new float[] {1 / 3f, -1.5f, 1}, DType.BF16));
        assertEquals(0x1p-14f, Half.fromF16((short) 0x400));
        assertEquals(-2f, Half.fromBf16((short) 0xc000));
        for (int bits : new int[] {0x7f800001, 0xff800001, 0x7fffffff}) { // none becomes an infinity
            assertTrue(Float.isNaN(Half.fromF16(Half.toF16(Float.intBitsToFloat(bits)))));
            assertTrue(Float.isNaN(Half.fromBf16(Half.toBf16(Float.intBitsToFloat(bits)))));
        }
    }

    @Test
    void tensorsGiveAndTakeFloats() {
        final float[] values = {1.5f, -2, 0.25f, 1e6f, 3, 0};
        for (DType dtype : List.of(DType.F32, DType.F16, DType.BF16)) {
            final Tensor tensor = Tensor.copyOf(values, dtype, 2, 3);
            assertArrayEquals(new long[] {2, 3}, tensor.shape());
            final float large = dtype == DType.F32 ? 1e6f : dtype == DType.F16 ? Float.POSITIVE_INFINITY : 999424;
            assertArrayEquals(new float[] {1.5f, -2, 0.25f, large, 3, 0}, tensor.toFloats());
            tensor.slice(1, 2).setFloats(new float[] {7, 8});
            assertArrayEquals(new float[] {1.5f, 7, 8, large, 3, 0}, tensor.toFloats());
            assertThrows(IllegalArgumentException.class, () -> tensor.setFloats(new float[5]));
        }
        assertArrayEquals(new long[] {6}, Tensor.copyOf(values, DType.F16).shape());
        assertThrows(IllegalArgumentException.class, () -> Tensor.copyOf(values, DType.I16));
        assertThrows(IllegalArgumentException.class, () -> Tensor.zeros(DType.F64, 2).toFloats());
        assertThrows(IllegalArgumentException.class, () -> Half.toBits(values, DType.U16));
        assertThrows(IllegalArgumentException.class, () -> Half.toFloats(new short[1], DType.I16));
        assertThrows(NullPointerException.class, () -> Half.toBits(values, null));
    }
}
