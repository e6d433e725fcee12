package dev.tessera;

import java.lang.ref.Cleaner;

/** An object with a native part; {@link Ref} describes when that is freed. */
abstract class NativeObject implements AutoCloseable {
    static final Cleaner CLEANER = Cleaner.create();

    final Ref ref;

    NativeObject(Ref ref) {
        this.ref = ref;
        CLEANER.register(this, ref);
    }

    /** A view of another object, whose native part it shares and does not free. */
    NativeObject(NativeObject viewed) {
        this.ref = viewed.ref;
    }

    /**
     * Close this object: later calls throw {@link IllegalStateException}. Does nothing the second time. The native part
     * is freed as soon as no other thread is inside a call and no view of its memory is reachable.
     */
    @Override
    public void close() {
        ref.close();
    }

    /**
     * Whether {@link #close} was called.
     *
     * @return true once it is closed
     */
    public final boolean isClosed() {
        return ref.isClosed();
    }
}
