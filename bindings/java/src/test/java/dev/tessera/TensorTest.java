package dev.tessera;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

class TensorTest {
    private static ByteBuffer direct(int bytes) {
        return ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
    }

    private static void refused(String because, Executable call) {
        final String message = assertThrows(IllegalArgumentException.class, call).getMessage();
        assertTrue(message.contains(because), message);
    }

    @Test
    void coversABufferFromPositionToLimit() {
        final FloatBuffer data = direct(40).asFloatBuffer();
        data.put(new float[] {0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
        data.position(2).limit(8);
        final Tensor tensor = Tensor.of(data, 2, 3);
        assertEquals(6, tensor.numel());
        assertEquals(24, tensor.sizeBytes());
        assertArrayEquals(new long[] {2, 3}, tensor.shape());
        assertEquals(2f, tensor.floats().get(0));
        tensor.floats().put(5, -1f);
        assertEquals(-1f, data.get(7), "the same memory");
        assertArrayEquals(new long[] {6}, Tensor.of(data).shape());
    }

    @Test
    void everyKindOfBuffer() {
        assertEquals(DType.F64, Tensor.of(direct(16).asDoubleBuffer()).dtype());
        assertEquals(DType.I32, Tensor.of(direct(16).asIntBuffer()).dtype());
        assertEquals(DType.I64, Tensor.of(direct(16).asLongBuffer()).dtype());
        assertEquals(DType.BF16, Tensor.of(direct(16).asShortBuffer(), DType.BF16, 8).dtype());
        final Tensor bytes = Tensor.of(ByteBuffer.allocateDirect(3), DType.U8);
        assertEquals(3, bytes.numel());
        for (DType dtype : DType.values()) {
            final Tensor tensor = Tensor.zeros(dtype, 3, 5);
            assertEquals(15L * dtype.size(), tensor.sizeBytes());
            assertEquals(0, tensor.address() % 64);
            assertEquals(15 * dtype.size(), tensor.bytes().remaining());
            assertEquals(ByteOrder.nativeOrder(), tensor.bytes().order());
        }
        Tensor.zeros(DType.F64, 2).doubles().put(1, 3.0);
        Tensor.zeros(DType.I32, 2).ints().put(1, 3);
        Tensor.zeros(DType.I64, 2).longs().put(1, 3);
        Tensor.zeros(DType.F16, 2).shorts().put(1, (short) 3);
        assertArrayEquals(new long[0], Tensor.zeros(DType.F32).shape());
        assertEquals(1, Tensor.zeros(DType.F32).numel());
        assertArrayEquals(new long[0], Tensor.copyOf(new float[] {1}).reshape().shape());
        assertEquals(0, Tensor.zeros(DType.F32, 4, 0).numel());
        assertEquals(0, Tensor.zeros(DType.F32, 4, 0).floats().remaining());
    }

    @Test
    void reshapesAndSlicesShareMemory() {
        final Tensor tensor = Tensor.copyOf(new float[] {1, 2, 3, 4, 5, 6}, 2, 3);
        tensor.reshape(3, 2).floats().put(5, 60);
        assertEquals(60f, tensor.floats().get(5));
        final Tensor slice = tensor.slice(4, 2);
        assertEquals(5f, slice.floats().get(0));
        assertEquals(2, slice.floats().remaining());
        assertThrows(IndexOutOfBoundsException.class, () -> tensor.slice(5, 2));
        assertThrows(IndexOutOfBoundsException.class, () -> tensor.slice(-1, 1));
        refused("has 4 elements, got 6", () -> tensor.reshape(4));
    }

    @Test
    void memoryBehindAnAddress() {
        final Tensor owner = Tensor.copyOf(new float[] {1, 2, 3});
        final Tensor alias = Tensor.ofAddress(owner.address(), DType.F32, Device.cpu(), 3);
        assertEquals(2f, alias.floats().get(1));
        refused("address 0", () -> Tensor.ofAddress(0, DType.F32, Device.cpu(), 3));
        final Tensor gpu = Tensor.ofAddress(4096, DType.F32, Device.cuda(0), 3);
        assertThrows(UnsupportedOperationException.class, gpu::bytes);
        assertEquals("Tensor(F32[3], cuda:0)", gpu.toString());
        assertEquals(3, owner.floats().remaining()); // keeps it reachable until here
    }

    @Test
    void whatTheLibraryCouldNotUseIsRefusedHere() {
        refused("FloatBuffer is on the heap", () -> Tensor.of(FloatBuffer.allocate(4)));
        refused("ByteBuffer is on the heap", () -> Tensor.of(ByteBuffer.allocate(4), DType.U8));
        refused("read-only", () -> Tensor.of(direct(16).asReadOnlyBuffer().asFloatBuffer()));
        final ByteOrder foreign = ByteOrder.nativeOrder() == ByteOrder.BIG_ENDIAN ? ByteOrder.LITTLE_ENDIAN
                : ByteOrder.BIG_ENDIAN;
        refused("byte order is " + foreign,
                () -> Tensor.of(ByteBuffer.allocateDirect(16).order(foreign).asFloatBuffer()));
        refused("byte order", () -> Tensor.of(ByteBuffer.allocateDirect(16).order(foreign), DType.F32));
        refused("has 5 elements, got 4", () -> Tensor.of(direct(16).asFloatBuffer(), 5));
        refused("are not a multiple of", () -> Tensor.of(direct(15), DType.F32));
        refused("not aligned", () -> Tensor.of(direct(20).position(1).limit(17), DType.F32));
        refused("negative size", () -> Tensor.zeros(DType.F32, 2, -1));
        refused("at most 8", () -> Tensor.zeros(DType.F32, 1, 1, 1, 1, 1, 1, 1, 1, 1));
        refused("2^63", () -> Tensor.zeros(DType.F32, 1L << 40, 1L << 40));
        refused("2 GiB", () -> Tensor.zeros(DType.F32, 1L << 30));
        refused("this tensor is F32", () -> Tensor.zeros(DType.F32, 1).doubles());
        refused("2 bytes", () -> Tensor.of(direct(16).asShortBuffer(), DType.F32));
        assertThrows(NullPointerException.class, () -> Tensor.of((FloatBuffer) null));
        assertThrows(NullPointerException.class, () -> Tensor.zeros(null, 1));
    }
}
