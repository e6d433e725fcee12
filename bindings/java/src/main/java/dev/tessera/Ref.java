package dev.tessera;

import java.util.ArrayList;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ForkJoinPool;
import java.util.function.LongConsumer;
import java.util.function.LongFunction;
import java.util.function.LongUnaryOperator;

/**
 * The native part of an object: a handle and its users. Users are calls in flight, memory views handed out, and objects
 * that borrow it. The handle is destroyed once, when it is closed and has no users, so that nothing native is freed
 * while in use. Closing first closes the dependents (a state of a DDP object, say).
 *
 * <p>It does not refer to its owner, so that a cleaner may hold it. The monitor guards the fields and is never held
 * during a native call.
 */
final class Ref implements Runnable {
    private static final System.Logger LOG = System.getLogger("dev.tessera");

    private final String what;
    private final LongConsumer destroy;
    private long handle;
    private LongConsumer wake; // makes calls in flight return early when it is closed; may be null
    private boolean mayLeak; // no message when the garbage collector finds it
    private int users;
    private Thread exclusive; // the thread inside an exclusive call
    private boolean closed;
    private boolean destroyed;
    private String reason = "";
    private final Set<Ref> dependents = new LinkedHashSet<>();
    private final List<Ref> borrowed = new ArrayList<>();
    private Object kept; // Java memory that the native half borrows until it is destroyed

    /** @param what name of the type for messages, "Ddp" */
    Ref(String what, long handle, LongConsumer destroy) {
        this.what = what;
        this.handle = handle;
        this.destroy = destroy;
    }

    Ref mayLeak() {
        mayLeak = true;
        return this;
    }

    Ref wakenBy(LongConsumer call) {
        wake = call;
        return this;
    }

    /** Keep {@code memory} reachable until the native part is destroyed. */
    Ref keep(Object memory) {
        kept = memory;
        return this;
    }

    /** The native part borrows that of {@code other} until it is destroyed. */
    Ref borrow(Ref other) {
        try {
            other.retain();
        } catch (IllegalStateException closedMeanwhile) {
            close();
            throw closedMeanwhile;
        }
        synchronized (this) {
            borrowed.add(other);
        }
        return this;
    }

    /** As {@link #borrow}, and closing {@code other} closes this. */
    Ref dependOn(Ref other) {
        borrow(other);
        synchronized (other) {
            other.dependents.add(this);
        }
        return this;
    }

    // Calls: shared ones, then exclusive ones.

    long callLong(LongUnaryOperator body) {
        final long h = enter(false);
        try {
            return body.applyAsLong(h);
        } finally {
            release();
        }
    }

    <T> T call(LongFunction<T> body) {
        final long h = enter(false);
        try {
            return body.apply(h);
        } finally {
            release();
        }
    }

    void run(LongConsumer body) {
        final long h = enter(false);
        try {
            body.accept(h);
        } finally {
            release();
        }
    }

    long callLongExclusive(LongUnaryOperator body) {
        final long h = enter(true);
        try {
            return body.applyAsLong(h);
        } finally {
            releaseExclusive();
        }
    }

    <T> T callExclusive(LongFunction<T> body) {
        final long h = enter(true);
        try {
            return body.apply(h);
        } finally {
            releaseExclusive();
        }
    }

    void runExclusive(LongConsumer body) {
        final long h = enter(true);
        try {
            body.accept(h);
        } finally {
            releaseExclusive();
        }
    }

    /** As {@link #runExclusive}, but does nothing while it is closed or in exclusive use. */
    void runExclusiveIfFree(LongConsumer body) {
        final long h;
        synchronized (this) {
            if (closed || exclusive != null) {
                return;
            }
            h = enter(true);
        }
        try {
            body.accept(h);
        } finally {
            releaseExclusive();
        }
    }

    /** A call by a user that has called {@link #retain}: it works even if the object was closed since. */
    <T> T callRetained(LongFunction<T> body) {
        final long h;
        synchronized (this) {
            h = handle;
        }
        return body.apply(h);
    }

    private synchronized long enter(boolean exclusively) {
        checkOpen();
        if (exclusively) {
            if (exclusive != null) {
                throw new IllegalStateException("this " + what + " is in use by " + exclusive
                        + "; only one thread may use it at a time");
            }
            exclusive = Thread.currentThread();
        }
        ++users;
        return handle;
    }

    private void checkOpen() {
        if (closed) {
            throw new IllegalStateException("this " + what + " is closed" + reason);
        }
    }

    private void releaseExclusive() {
        if (lastUserGone(true)) {
            destroyNow();
        }
    }

    /** Add a user, to be removed by {@link #release} or {@link #releaseLater}. */
    synchronized void retain() {
        checkOpen();
        ++users;
    }

    /** Add a user by one that there is already: it works even if the object was closed since. */
    synchronized void retainAgain() {
        ++users;
    }

    void release() {
        if (lastUserGone(false)) {
            destroyNow();
        }
    }

    /** As {@link #release}, but never destroys on the calling thread, which may be one of the library's own. */
    void releaseLater() {
        if (lastUserGone(false)) {
            ForkJoinPool.commonPool().execute(this::destroyNow);
        }
    }

    private synchronized boolean lastUserGone(boolean exclusively) {
        if (exclusively) {
            exclusive = null;
        }
        --users;
        return mustDestroy();
    }

    private boolean mustDestroy() {
        if (!closed || users > 0 || destroyed) {
            return false;
        }
        destroyed = true;
        return true;
    }

    synchronized boolean isClosed() {
        return closed;
    }

    /** Whether the native part is destroyed; for tests. */
    synchronized boolean isDestroyed() {
        return destroyed;
    }

    /** Whether a thread is inside an exclusive call; for tests. */
    synchronized boolean isBusy() {
        return exclusive != null;
    }

    void close() {
        close("");
    }

    private void close(String why) {
        final List<Ref> first;
        final boolean waken;
        synchronized (this) {
            if (closed) {
                return;
            }
            closed = true;
            reason = why;
            first = new ArrayList<>(dependents);
            waken = wake != null && users > 0;
            ++users; // this call
        }
        try {
            if (waken) {
                wake.accept(handle); // first: a dependent that is in the middle of something waits for its end
            }
            for (Ref dependent : first) {
                dependent.close(": the " + what + " that it belongs to was closed");
            }
        } finally {
            release();
        }
    }

    private void destroyNow() {
        try {
            destroy.accept(handle);
        } finally {
            final List<Ref> others;
            synchronized (this) {
                handle = 0;
                kept = null;
                others = new ArrayList<>(borrowed);
                borrowed.clear();
            }
            for (Ref other : others) {
                synchronized (other) {
                    other.dependents.remove(this);
                }
                other.release();
            }
        }
    }

    /** Called by the cleaner when the owner is unreachable. */
    @Override
    public void run() {
        if (isClosed()) {
            return;
        }
        if (!mayLeak) {
            LOG.log(System.Logger.Level.WARNING, "a {0} was garbage-collected without being closed; "
                    + "use try-with-resources.", what);
        }
        close();
    }
}
