package dev.tessera;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;
import java.nio.ShortBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.List;
import java.util.Objects;

/**
 * A view of memory: address, element type and shape; contiguous, row-major. It owns no native handle, needs no closing, and
 * keeps the buffer that it was made from reachable. Operations read and write the memory in place.
 *
 * <p>Buffers must be direct, writable and in native byte order; a tensor covers them from position to limit. Without a
 * shape the tensor has one dimension. {@code reshape()} makes a 0-d tensor of one element.
 */
public final class Tensor {
    /** Words of a descriptor before the sizes: address, dtype, device type, device index, number of dimensions. */
    private static final int HEADER_WORDS = 5;
    private static final int MAX_NDIM = 8;

    static { // here too: a buffer may be refused before anything native is used
        Launch.recordUncaughtOfMain();
    }

    private final long address;
    private final DType dtype;
    private final Device device;
    private final long[] shape;
    private final long numel;
    private final Object owner; // what keeps the memory; null if that is the caller's affair
    private final Lease lease; // how and how long it may be used; null: written, and for good

    /** Operations in the background over lent memory. */
    static final class Uses {
        private final List<Work.Completion> works = new ArrayList<>(); // guards itself

        private void add(Work.Completion work) {
            synchronized (works) {
                works.removeIf(Work.Completion::isOver);
                if (!works.contains(work)) { // of several tensors in one operation
                    works.add(work);
                }
            }
        }

        /** Keeps the native part of {@code ref}, which has other users, until those in progress have ended. */
        void hold(Ref ref) {
            synchronized (works) {
                for (Work.Completion work : works) {
                    if (!work.isOver()) {
                        ref.retainAgain();
                        work.future().whenComplete((done, failed) -> ref.release());
                    }
                }
                works.clear();
            }
        }

        /** @throws IllegalStateException while one of them is in progress */
        void requireNone(String what) {
            synchronized (works) {
                works.removeIf(Work.Completion::isOver);
                if (!works.isEmpty()) {
                    throw new IllegalStateException(works.size() + " operations in the background still use " + what
                            + ", whose memory would be reused; await them first");
                }
            }
        }
    }

    /** Whose memory is lent, for messages. */
    enum Lender {
        FSDP_PASS("a tensor of an FSDP pass", "the pass ends", "an unsharded FSDP parameter"),
        ENGINE_PASS("a tensor of an engine's pass", "the pass ends", "a parameter of an engine"),
        STAGE_CALL("a tensor of a pipeline's call", "its time ends", "this tensor of a pipeline's call"),
        PART("a part of an activation", "its call ends", "this part of an activation");

        private final String any;
        private final String end;
        private final String unwritten;

        Lender(String any, String end, String unwritten) {
            this.any = any;
            this.end = end;
            this.unwritten = unwritten;
        }
    }

    /** Memory that is lent for a while. */
    static final class Lease {
        private final Lender lender;
        private volatile boolean readOnly;
        private final String ending; // the message of an exception
        private final Uses uses;
        private volatile boolean over;

        Lease(Lender lender, boolean readOnly, String ending, Uses uses) {
            this.lender = lender;
            this.readOnly = readOnly;
            this.ending = ending;
            this.uses = uses;
        }

        void end() {
            over = true;
        }

        /** From now on it is not written. */
        void freeze() {
            readOnly = true;
        }

        boolean isOver() {
            return over;
        }

        void check() {
            if (over) {
                throw new IllegalStateException(ending);
            }
        }
    }

    private Tensor(long address, DType dtype, Device device, long[] shape, Object owner) {
        this(address, dtype, device, shape, owner, null);
    }

    private Tensor(long address, DType dtype, Device device, long[] shape, Object owner, Lease lease) {
        this.address = address;
        this.dtype = Objects.requireNonNull(dtype, "dtype");
        this.device = Objects.requireNonNull(device, "device");
        this.shape = shape.clone();
        this.numel = numel(shape, dtype);
        this.owner = owner;
        this.lease = lease;
    }

    /**
     * A tensor of F32 over a direct buffer.
     *
     * @param data direct, native byte order
     * @param shape sizes of the dimensions; none for one dimension
     * @return the tensor
     * @throws IllegalArgumentException if the buffer is on the heap, is read-only, has foreign byte order, or does not
     *     fit the shape
     */
    public static Tensor of(FloatBuffer data, long... shape) {
        return over(data, data.order(), DType.F32, 4, shape);
    }

    /**
     * A tensor of F64 over a direct buffer.
     *
     * @param data direct, native byte order
     * @param shape sizes of the dimensions; none for one dimension
     * @return the tensor
     * @throws IllegalArgumentException as {@link #of(FloatBuffer, long...)}
     */
    public static Tensor of(DoubleBuffer data, long... shape) {
        return over(data, data.order(), DType.F64, 8, shape);
    }

    /**
     * A tensor of I32 over a direct buffer.
     *
     * @param data direct, native byte order
     * @param shape sizes of the dimensions; none for one dimension
     * @return the tensor
     * @throws IllegalArgumentException as {@link #of(FloatBuffer, long...)}
     */
    public static Tensor of(IntBuffer data, long... shape) {
        return over(data, data.order(), DType.I32, 4, shape);
    }

    /**
     * A tensor of I64 over a direct buffer.
     *
     * @param data direct, native byte order
     * @param shape sizes of the dimensions; none for one dimension
     * @return the tensor
     * @throws IllegalArgumentException as {@link #of(FloatBuffer, long...)}
     */
    public static Tensor of(LongBuffer data, long... shape) {
        return over(data, data.order(), DType.I64, 8, shape);
    }

    /**
     * A tensor of two-byte elements over a direct buffer.
     *
     * @param data direct, native byte order
     * @param dtype F16, BF16, I16 or U16
     * @param shape sizes of the dimensions; none for one dimension
     * @return the tensor
     * @throws IllegalArgumentException as {@link #of(FloatBuffer, long...)}, or if the dtype's elements do not have two
     *     bytes
     */
    public static Tensor of(ShortBuffer data, DType dtype, long... shape) {
        if (dtype.size() != 2) {
            throw new IllegalArgumentException("a ShortBuffer holds elements of 2 bytes; " + dtype + " has " + dtype.size());
        }
        return over(data, data.order(), dtype, 2, shape);
    }

    /**
     * A tensor of any dtype over the bytes of a direct buffer.
     *
     * @param data direct; native byte order unless elements have one byte
     * @param dtype the element type
     * @param shape sizes of the dimensions; none for one dimension
     * @return the tensor
     * @throws IllegalArgumentException as {@link #of(FloatBuffer, long...)}
     */
    public static Tensor of(ByteBuffer data, DType dtype, long... shape) {
        return over(data, dtype.size() == 1 ? ByteOrder.nativeOrder() : data.order(), dtype, 1, shape);
    }

    /**
     * A tensor over memory that the caller manages: it must stay allocated as long as an operation or object uses this
     * tensor. For memory of other libraries, and for more than 2 GiB.
     *
     * @param address of the first element
     * @param dtype the element type
     * @param device where the address points
     * @param shape sizes of the dimensions; none for a 0-d tensor
     * @return the tensor
     * @throws IllegalArgumentException if the shape is invalid, or the address is 0 and the tensor is not empty
     */
    public static Tensor ofAddress(long address, DType dtype, Device device, long... shape) {
        final Tensor tensor = new Tensor(address, dtype, device, shape, null);
        if (address == 0 && tensor.numel > 0) {
            throw new IllegalArgumentException("a tensor of " + tensor.numel + " elements at address 0");
        }
        return tensor;
    }

    /**
     * A new zero-initialised tensor in its own memory, aligned to 64 bytes.
     *
     * @param dtype the element type
     * @param shape sizes of the dimensions; none for a 0-d tensor
     * @return the tensor
     * @throws IllegalArgumentException if it has 2 GiB or more (use {@link dev.tessera.Buffer} or {@link #ofAddress})
     */
    public static Tensor zeros(DType dtype, long... shape) {
        final long bytes = numel(shape, dtype) * dtype.size();
        if (bytes > Integer.MAX_VALUE - 64) {
            throw new IllegalArgumentException("a ByteBuffer holds at most 2 GiB; " + dtype + Arrays.toString(shape) + " has "
                    + bytes + " bytes");
        }
        final ByteBuffer raw = ByteBuffer.allocateDirect((int) bytes + 64);
        final int begin = (64 - raw.alignmentOffset(0, 64)) % 64;
        raw.position(begin).limit(begin + (int) bytes);
        final ByteBuffer data = raw.slice().order(ByteOrder.nativeOrder());
        return new Tensor(Native.directAddress(data), dtype, Device.cpu(), shape, data);
    }

    /**
     * A new tensor of F32 with a copy of {@code values}.
     *
     * @param values the elements, row-major
     * @param shape sizes of the dimensions; none for one dimension
     * @return the tensor
     * @throws IllegalArgumentException if the shape has another number of elements
     */
    public static Tensor copyOf(float[] values, long... shape) {
        final Tensor tensor = zeros(DType.F32, shape.length == 0 ? new long[] {values.length} : shape);
        tensor.requireNumel(values.length);
        tensor.floats().put(values);
        return tensor;
    }

    /**
     * A new tensor of F32, F16 or BF16 with a copy of {@code values}, rounded as {@link Half} does.
     *
     * @param values the elements, row-major
     * @param dtype the element type
     * @param shape sizes of the dimensions; none for one dimension
     * @return the tensor
     * @throws IllegalArgumentException if the shape has another number of elements, or it is another dtype
     */
    public static Tensor copyOf(float[] values, DType dtype, long... shape) {
        final Tensor tensor = zeros(dtype, shape.length == 0 ? new long[] {values.length} : shape);
        tensor.setFloats(values);
        return tensor;
    }

    /**
     * A new tensor of F64 with a copy of {@code values}.
     *
     * @param values the elements, row-major
     * @param shape sizes of the dimensions; none for one dimension
     * @return the tensor
     * @throws IllegalArgumentException if the shape has another number of elements
     */
    public static Tensor copyOf(double[] values, long... shape) {
        final Tensor tensor = zeros(DType.F64, shape.length == 0 ? new long[] {values.length} : shape);
        tensor.requireNumel(values.length);
        tensor.doubles().put(values);
        return tensor;
    }

    /**
     * A new tensor of I64, such as labels, with a copy of {@code values}.
     *
     * @param values the elements, row-major
     * @param shape sizes of the dimensions; none for one dimension
     * @return the tensor
     * @throws IllegalArgumentException if the shape has another number of elements
     */
    public static Tensor copyOf(long[] values, long... shape) {
        final Tensor tensor = zeros(DType.I64, shape.length == 0 ? new long[] {values.length} : shape);
        tensor.requireNumel(values.length);
        tensor.longs().put(values);
        return tensor;
    }

    /**
     * A new tensor of I32 with a copy of {@code values}.
     *
     * @param values the elements, row-major
     * @param shape sizes of the dimensions; none for one dimension
     * @return the tensor
     * @throws IllegalArgumentException if the shape has another number of elements
     */
    public static Tensor copyOf(int[] values, long... shape) {
        final Tensor tensor = zeros(DType.I32, shape.length == 0 ? new long[] {values.length} : shape);
        tensor.requireNumel(values.length);
        tensor.ints().put(values);
        return tensor;
    }

    /** A tensor over memory of the library that {@code owner} keeps. */
    static Tensor overNative(long[] descriptor, Object owner) {
        final long[] shape = Arrays.copyOfRange(descriptor, HEADER_WORDS, descriptor.length);
        return new Tensor(descriptor[0], DType.of(descriptor[1]),
                descriptor[2] == 1 ? Device.cpu() : Device.cuda((int) descriptor[3]), shape, owner);
    }

    /** What describes a parameter whose values come later. */
    static Tensor deferred(DType dtype, Device device, long[] shape) {
        return new Tensor(0, dtype, device, shape, null);
    }

    static Tensor overNative(long address, DType dtype, long[] shape, Object owner) {
        return new Tensor(address, dtype, Device.cpu(), shape, owner);
    }

    void usedBy(Work.Completion work) {
        if (lease != null) {
            lease.uses.add(work);
        }
    }

    void requireForGood() {
        if (lease != null) {
            throw new IllegalArgumentException(lease.lender.any
                    + " cannot be used in a plan: its memory is reused when " + lease.lender.end + "; use a copy of it");
        }
    }

    /** What keeps its memory; may be null. */
    Object owner() {
        return owner;
    }

    /** The same while {@code terms} lasts. */
    Tensor leased(Lease terms) {
        return new Tensor(address, dtype, device, shape, owner, terms);
    }

    private static Tensor over(Buffer data, ByteOrder order, DType dtype, int unit, long[] shape) {
        if (!data.isDirect()) {
            throw new IllegalArgumentException("the " + data.getClass().getSuperclass().getSimpleName() + " is on the heap; use"
                    + " a direct buffer (ByteBuffer.allocateDirect(n).order(ByteOrder.nativeOrder()))");
        }
        if (data.isReadOnly()) {
            throw new IllegalArgumentException("the buffer is read-only, but operations write tensors in place");
        }
        if (order != ByteOrder.nativeOrder()) {
            throw new IllegalArgumentException("the buffer's byte order is " + order + ", but the machine's is "
                    + ByteOrder.nativeOrder() + "; call order(ByteOrder.nativeOrder()) on the ByteBuffer first");
        }
        final long bytes = (long) data.remaining() * unit;
        if (bytes % dtype.size() != 0) {
            throw new IllegalArgumentException(bytes + " bytes are not a multiple of the size of " + dtype);
        }
        final long[] sizes = shape.length == 0 ? new long[] {bytes / dtype.size()} : shape;
        final long address = Native.directAddress(data) + (long) data.position() * unit;
        if (address % dtype.size() != 0) {
            throw new IllegalArgumentException("the buffer's first " + dtype + " element is not aligned to "
                    + dtype.size() + " bytes");
        }
        final Tensor tensor = new Tensor(address, dtype, Device.cpu(), sizes, data);
        tensor.requireNumel(bytes / dtype.size());
        return tensor;
    }

    private void requireNumel(long given) {
        if (given != numel) {
            throw new IllegalArgumentException("the shape " + Arrays.toString(shape) + " has " + numel
                    + " elements, got " + given);
        }
    }

    private static long numel(long[] shape, DType dtype) {
        Objects.requireNonNull(dtype, "dtype");
        if (shape.length > MAX_NDIM) {
            throw new IllegalArgumentException("the shape has " + shape.length + " dimensions; at most 8 are supported");
        }
        long product = 1;
        boolean empty = false;
        for (long size : shape) {
            if (size < 0) {
                throw new IllegalArgumentException("the shape " + Arrays.toString(shape) + " has a negative size");
            }
            empty |= size == 0;
        }
        if (empty) {
            return 0;
        }
        try {
            for (long size : shape) {
                product = Math.multiplyExact(product, size);
            }
            Math.multiplyExact(product, (long) dtype.size());
        } catch (ArithmeticException overflow) {
            throw new IllegalArgumentException("the shape " + Arrays.toString(shape) + " has more than 2^63 bytes");
        }
        return product;
    }

    /**
     * The address of the first element.
     *
     * @return the address; valid while this tensor, or what it was made from, is reachable and not closed
     * @throws IllegalStateException if it belongs to a {@link Fsdp.Pass} or {@link StageCall} whose time has ended
     */
    public long address() {
        checkLease();
        return address;
    }

    /**
     * The element type.
     *
     * @return the dtype
     */
    public DType dtype() {
        return dtype;
    }

    /**
     * Where the memory is.
     *
     * @return the device
     */
    public Device device() {
        return device;
    }

    /**
     * The sizes of the dimensions.
     *
     * @return a copy
     */
    public long[] shape() {
        return shape.clone();
    }

    /**
     * The number of elements.
     *
     * @return the product of the sizes, 1 for a 0-d tensor
     */
    public long numel() {
        return numel;
    }

    /**
     * The size in bytes.
     *
     * @return elements times their size
     */
    public long sizeBytes() {
        return numel * dtype.size();
    }

    /**
     * The same memory in another shape.
     *
     * @param newShape with the same number of elements
     * @return a tensor over the same memory
     * @throws IllegalArgumentException if the number of elements differs
     */
    public Tensor reshape(long... newShape) {
        final Tensor tensor = new Tensor(address, dtype, device, newShape, owner, lease);
        tensor.requireNumel(numel);
        return tensor;
    }

    /**
     * A range of the elements, as one dimension.
     *
     * @param from first element, in row-major order
     * @param count number of elements
     * @return a tensor over a part of the same memory
     * @throws IndexOutOfBoundsException if the range exceeds this tensor
     */
    public Tensor slice(long from, long count) {
        if (from < 0 || count < 0 || from > numel - count) {
            throw new IndexOutOfBoundsException("elements " + from + " to " + (from + count) + " are outside the tensor of "
                    + numel + " elements");
        }
        return new Tensor(address + from * dtype.size(), dtype, device, new long[] {count}, owner, lease);
    }

    /**
     * The bytes as a buffer.
     *
     * @return a direct buffer over the same memory, native byte order; read-only if it is an unsharded parameter of a
     *     {@link Fsdp.Pass}, or what a {@link StageCall} only lends to read
     * @throws UnsupportedOperationException if the memory is not CPU memory or has 2 GiB or more
     * @throws IllegalStateException if it belongs to a {@link Fsdp.Pass} or {@link StageCall} whose time has ended
     */
    public ByteBuffer bytes() {
        checkLease();
        final ByteBuffer data = allBytes();
        return lease == null || !lease.readOnly ? data : data.asReadOnlyBuffer().order(ByteOrder.nativeOrder());
    }

    private void checkLease() {
        if (lease != null) {
            lease.check();
        }
    }

    private ByteBuffer allBytes() {
        if (!device.equals(Device.cpu())) {
            throw new UnsupportedOperationException("memory on " + device
                    + " cannot be a ByteBuffer; use it there, at its address()");
        }
        if (sizeBytes() > Integer.MAX_VALUE) {
            throw new UnsupportedOperationException("a ByteBuffer holds at most 2 GiB; use slice()");
        }
        if (owner instanceof ByteBuffer) { // cut it out of the owner, which the new buffer then keeps reachable
            final ByteBuffer all = ((ByteBuffer) owner).duplicate();
            final int offset = (int) (address - Native.directAddress(all));
            all.limit(offset + (int) sizeBytes()).position(offset);
            return all.slice().order(ByteOrder.nativeOrder());
        }
        final ByteBuffer view = numel == 0 ? ByteBuffer.allocateDirect(0)
                : (ByteBuffer) Native.directBuffer(address, sizeBytes());
        if (owner != null) {
            final Object keep = owner;
            NativeObject.CLEANER.register(view, () -> java.lang.ref.Reference.reachabilityFence(keep));
        }
        return view.order(ByteOrder.nativeOrder());
    }

    /**
     * The elements of a tensor of F32.
     *
     * @return a direct buffer over the same memory
     * @throws IllegalArgumentException if the dtype differs
     */
    public FloatBuffer floats() {
        return require(DType.F32).asFloatBuffer();
    }

    /**
     * The elements of a tensor of F64.
     *
     * @return a direct buffer over the same memory
     * @throws IllegalArgumentException if the dtype differs
     */
    public DoubleBuffer doubles() {
        return require(DType.F64).asDoubleBuffer();
    }

    /**
     * The elements of a tensor of I32.
     *
     * @return a direct buffer over the same memory
     * @throws IllegalArgumentException if the dtype differs
     */
    public IntBuffer ints() {
        return require(DType.I32).asIntBuffer();
    }

    /**
     * The elements of a tensor of I64.
     *
     * @return a direct buffer over the same memory
     * @throws IllegalArgumentException if the dtype differs
     */
    public LongBuffer longs() {
        return require(DType.I64).asLongBuffer();
    }

    /**
     * The elements of a tensor of F16, BF16, I16 or U16, as their bits.
     *
     * @return a direct buffer over the same memory
     * @throws IllegalArgumentException if the dtype differs
     */
    public ShortBuffer shorts() {
        return (dtype.size() == 2 ? bytes() : require(DType.I16)).asShortBuffer();
    }

    /**
     * A copy of the elements of a tensor of F32, F16 or BF16.
     *
     * @return the values, row-major
     * @throws IllegalArgumentException if it is another dtype
     * @throws UnsupportedOperationException as {@link #bytes}
     * @throws IllegalStateException as {@link #bytes}
     */
    public float[] toFloats() {
        if (dtype != DType.F16 && dtype != DType.BF16) {
            final FloatBuffer data = floats();
            final float[] values = new float[data.remaining()];
            data.get(values);
            return values;
        }
        final ShortBuffer data = shorts();
        final short[] bits = new short[data.remaining()];
        data.get(bits);
        return Half.toFloats(bits, dtype);
    }

    /**
     * Overwrite the elements of a tensor of F32, F16 or BF16, rounded as {@link Half} does.
     *
     * @param values the elements, row-major
     * @throws IllegalArgumentException if it is another dtype, or the tensor has another number of elements
     * @throws java.nio.ReadOnlyBufferException if its memory is only lent to read
     * @throws UnsupportedOperationException as {@link #bytes}
     * @throws IllegalStateException as {@link #bytes}
     */
    public void setFloats(float[] values) {
        requireNumel(values.length);
        if (dtype == DType.F16 || dtype == DType.BF16) {
            shorts().put(Half.toBits(values, dtype));
        } else {
            floats().put(values);
        }
    }

    private ByteBuffer require(DType wanted) {
        if (dtype != wanted) {
            throw new IllegalArgumentException("this tensor is " + dtype + ", not " + wanted
                    + (dtype == DType.F16 || dtype == DType.BF16
                            ? "; use toFloats() and setFloats(), or its bits, shorts() (in a pass, of paramTensor and"
                                    + " gradTensor)"
                            : ""));
        }
        return bytes();
    }

    /** The dtype, the shape and the device. */
    @Override
    public String toString() {
        return "Tensor(" + dtype + Arrays.toString(shape) + ", " + device + ")";
    }

    // Descriptors: what the shims take.

    long[] descriptor() {
        return descriptors(List.of(this));
    }

    /** Of a tensor that a call only reads before it returns: an unsharded FSDP parameter, too. */
    long[] readDescriptor() {
        return descriptors(List.of(this), true);
    }

    static long[] optionalDescriptor(Tensor tensor) {
        return tensor == null ? null : tensor.descriptor();
    }

    static long[] descriptors(Collection<Tensor> tensors) {
        return descriptors(tensors, false);
    }

    private static long[] descriptors(Collection<Tensor> tensors, boolean onlyRead) {
        int words = 0;
        for (Tensor tensor : tensors) {
            words += HEADER_WORDS + Objects.requireNonNull(tensor, "a tensor of the list is null").shape.length;
        }
        final long[] out = new long[words];
        int at = 0;
        for (Tensor tensor : tensors) {
            tensor.checkLease();
            if (tensor.lease != null && tensor.lease.readOnly && !onlyRead) {
                throw new IllegalArgumentException(tensor.lease.lender.unwritten
                        + " is read-only, but operations write tensors in place; use a copy of it");
            }
            out[at++] = tensor.address;
            out[at++] = tensor.dtype.number();
            out[at++] = tensor.device.type();
            out[at++] = tensor.device.index();
            out[at++] = tensor.shape.length;
            System.arraycopy(tensor.shape, 0, out, at, tensor.shape.length);
            at += tensor.shape.length;
        }
        return out;
    }
}
