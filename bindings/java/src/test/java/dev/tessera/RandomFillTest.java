package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.Arrays;
import org.junit.jupiter.api.Test;

class RandomFillTest {
    private static float[] floats(Tensor tensor) {
        final float[] values = new float[(int) tensor.numel()];
        tensor.floats().get(values);
        return values;
    }

    @Test
    void partsHaveTheBitsOfTheFullTensor() {
        final Tensor full = Tensor.zeros(DType.F32, 7, 5);
        try (Layout layout = Layout.of(new long[] {7, 5}, new int[] {3}, Placement.shard(0))) {
            for (int kind = 0; kind < 3; ++kind) {
                fill(kind, full, null, 0);
                for (int rank = 0; rank < 3; ++rank) {
                    final int rows = rank < 2 ? 3 : 1;
                    final Tensor part = Tensor.zeros(DType.F32, rows, 5);
                    fill(kind, part, layout, rank);
                    assertArrayEquals(
                            Arrays.copyOfRange(floats(full), 15 * rank, 15 * rank + 5 * rows), floats(part));
                }
            }
        }
    }

    private static void fill(int kind, Tensor out, Layout layout, int rank) {
        if (layout == null) {
            if (kind == 0) {
                RandomFill.uniform(out, 7, 3, -1, 1);
            } else if (kind == 1) {
                RandomFill.normal(out, 7, 3, 0, 0.02);
            } else {
                RandomFill.bernoulli(out, 7, 3, 0.5);
            }
        } else if (kind == 0) {
            RandomFill.uniform(out, 7, 3, -1, 1, layout, rank);
        } else if (kind == 1) {
            RandomFill.normal(out, 7, 3, 0, 0.02, layout, rank);
        } else {
            RandomFill.bernoulli(out, 7, 3, 0.5, layout, rank);
        }
    }

    @Test
    void numbersAreInTheirRangeAndDifferByStream() {
        final Tensor first = Tensor.zeros(DType.F32, 10000);
        RandomFill.uniform(first, -1, 0, 2, 4);
        double sum = 0;
        for (float value : floats(first)) {
            assertTrue(value >= 2 && value < 4);
            sum += value;
        }
        assertEquals(3, sum / 10000, 0.03);
        final Tensor second = Tensor.zeros(DType.F32, 10000);
        RandomFill.uniform(second, -1, 1, 2, 4);
        assertFalse(Arrays.equals(floats(first), floats(second)));
    }

    @Test
    void badInputIsRefused() {
        final Tensor out = Tensor.zeros(DType.F32, 2, 5);
        assertThrows(TesseraInvalidArgumentException.class, () -> RandomFill.uniform(out, 0, 0, 1, 0));
        assertThrows(TesseraInvalidArgumentException.class, () -> RandomFill.normal(out, 0, 0, 0, -1));
        assertThrows(TesseraInvalidArgumentException.class, () -> RandomFill.bernoulli(out, 0, 0, Double.NaN));
        assertThrows(NullPointerException.class, () -> RandomFill.uniform(null, 0, 0, 0, 1));
        assertThrows(NullPointerException.class, () -> RandomFill.uniform(out, 0, 0, 0, 1, null, 0));
        final Layout layout = Layout.of(new long[] {7, 5}, new int[] {3}, Placement.shard(0));
        final TesseraException wrong = assertThrows(
                TesseraInvalidArgumentException.class, () -> RandomFill.normal(out, 0, 0, 0, 1, layout, 0));
        assertTrue(wrong.getMessage().contains("output needs shape [3, 5] or [15]"), wrong.getMessage());
        layout.close();
        assertThrows(IllegalStateException.class, () -> RandomFill.normal(out, 0, 0, 0, 1, layout, 0));
    }
}
