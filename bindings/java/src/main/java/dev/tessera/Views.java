package dev.tessera;

import java.nio.ByteOrder;
import java.nio.ByteBuffer;

/** Views of memory that belongs to a native object, which is not freed while one of them is reachable. */
final class Views {
    private Views() {}

    /** A tensor over memory of {@code ref}'s native part. */
    static Tensor of(Ref ref, long[] descriptor) {
        return Tensor.overNative(descriptor, new View(ref, Tensor.overNative(descriptor, null)).owner());
    }

    /**
     * A tensor over memory of {@code ref}'s native part that is lent. {@code views[index]} remembers the memory, which may be
     * elsewhere next time.
     */
    static Tensor lent(Ref ref, long[] descriptor, View[] views, int index, Tensor.Lease lease) {
        final Tensor bare = Tensor.overNative(descriptor, null);
        if (views[index] == null || views[index].address() != bare.address()) {
            views[index] = new View(ref, bare);
        }
        return Tensor.overNative(descriptor, views[index].owner()).leased(lease);
    }

    /** A range of memory of {@code ref}'s native part. */
    static final class View {
        private final Ref ref;
        private final long address;
        private final long size;
        private java.lang.ref.WeakReference<Object> owner = new java.lang.ref.WeakReference<>(null);

        View(Ref ref, long address, long size) {
            this.ref = ref;
            this.address = address;
            this.size = size;
        }

        /** Of a tensor's memory. */
        View(Ref ref, Tensor bare) {
            this(ref, bare.address(), bare.device().equals(Device.cpu()) ? bare.sizeBytes() : 0);
        }

        long address() {
            return address;
        }

        /**
         * What tensors over this memory keep reachable, and what keeps the native half alive: the byte buffer of the whole
         * range (from which other buffers are cut), or, from 2 GiB on and on a device, an object without any other use.
         */
        synchronized Object owner() {
            Object object = owner.get();
            if (object == null) {
                object = size == 0 || size > Integer.MAX_VALUE ? new Object()
                        : ((ByteBuffer) Native.directBuffer(address, size)).order(ByteOrder.nativeOrder());
                ref.retain();
                final Ref held = ref; // the cleaner must not hold the view itself
                NativeObject.CLEANER.register(object, held::release);
                owner = new java.lang.ref.WeakReference<>(object);
            }
            return object;
        }
    }
}
