package dev.tessera;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/**
 * Memory that a communicator's transport accesses without copies: the ranks of a host share it, and collectives on
 * tensors inside it need no staging. Zero-initialised and aligned to 4096 bytes.
 *
 * <p>Closing it frees the memory, as soon as no view of it is reachable: a view never points at freed memory.
 */
public final class Buffer extends NativeObject {
    private final long size;
    private final Views.View view;

    private Buffer(long handle) {
        super(new Ref("Buffer", handle, Native::bufferDestroy));
        final long[] data = ref.call(Native::bufferData);
        size = data[1];
        view = new Views.View(ref, data[0], size);
    }

    /**
     * Allocate on every rank. Collective.
     *
     * @param comm the ranks; in exclusive use during the call
     * @param sizeBytes the same on every rank
     * @return the buffer
     * @throws TesseraMismatchException if the sizes differ
     */
    public static Buffer create(Comm comm, long sizeBytes) {
        if (sizeBytes < 0) {
            throw new IllegalArgumentException("the buffer size is " + sizeBytes + "; it must not be negative");
        }
        return new Buffer(comm.ref.callLongExclusive(c -> Native.bufferCreate(c, sizeBytes)));
    }

    /**
     * The size.
     *
     * @return bytes
     */
    public long sizeBytes() {
        return size;
    }

    /**
     * All bytes of the buffer.
     *
     * @return a direct buffer, native byte order
     * @throws UnsupportedOperationException if it has 2 GiB or more; use {@link #tensor} instead
     */
    public ByteBuffer bytes() {
        final Tensor all = ref.call(h -> Tensor.overNative(view.address(), DType.U8, new long[] {size}, view.owner()));
        return all.bytes().order(ByteOrder.nativeOrder());
    }

    /**
     * A tensor inside the buffer.
     *
     * @param offsetBytes offset of its first byte, a multiple of the element size
     * @param dtype the element type
     * @param shape sizes of the dimensions; none for a 0-d tensor
     * @return the tensor
     * @throws IndexOutOfBoundsException if it exceeds the buffer
     */
    public Tensor tensor(long offsetBytes, DType dtype, long... shape) {
        return ref.call(h -> {
            final Tensor tensor = Tensor.overNative(view.address() + offsetBytes, dtype, shape, view.owner());
            if (offsetBytes < 0 || offsetBytes % dtype.size() != 0 || tensor.sizeBytes() > size - offsetBytes) {
                throw new IndexOutOfBoundsException(tensor + " at byte " + offsetBytes + " is misaligned or exceeds the "
                        + "buffer of " + size + " bytes");
            }
            return tensor;
        });
    }
}
