package dev.tessera;

import java.lang.ref.Cleaner;

/** An object with a native half; {@link Ref} says when that is freed. */
abstract class NativeObject implements AutoCloseable {
    static final Cleaner CLEANER = Cleaner.create();

    final Ref ref;

    NativeObject(Ref ref) {
        this.ref = ref;
        CLEANER.register(this, ref);
    }

    /**
     * Ends this object: its later calls throw {@link IllegalStateException}. Does nothing the second time. The native half
     * is freed at once, or, if another thread is inside a call or views of its memory are reachable, as soon as they are
     * gone.
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
