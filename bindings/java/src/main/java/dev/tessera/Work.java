package dev.tessera;

import java.time.Duration;
import java.util.concurrent.CompletableFuture;

/**
 * An operation in flight. Do not touch the memory of its tensors until it is done; it is kept reachable until then,
 * even if this object is dropped. {@link #close} does not cancel the operation, which continues. All methods may be
 * called from any thread.
 */
public final class Work extends NativeObject {
    private final Completion completion;

    /**
     * @param pinned what must stay reachable until the work is done
     * @param borrowed objects whose native parts it uses until then; the caller is inside a call of each
     */
    Work(long handle, Object pinned, Ref... borrowed) {
        super(new Ref("Work", handle, Native::workDestroy).mayLeak());
        completion = new Completion(ref, pinned, borrowed);
        ref.run(h -> Native.workOnDone(h, completion));
    }

    Completion completion() {
        return completion;
    }

    /**
     * What the library calls when the work is done; a global reference keeps it, and so the operation's memory, until then.
     */
    static final class Completion {
        private final Ref work;
        private final Ref[] borrowed;
        private Object pinned;
        private boolean done;
        private CompletableFuture<Void> future;

        Completion(Ref work, Object pinned, Ref... borrowed) {
            this.work = work;
            this.pinned = pinned;
            this.borrowed = borrowed;
            work.retain(); // so that the error can still be read
            for (Ref other : borrowed) {
                other.retainAgain();
            }
        }

        /** Called once by the shims, on a thread of the library: must not block, and runs no user code. */
        synchronized void done(int status) {
            done = true;
            pinned = null;
            for (Ref other : borrowed) {
                other.releaseLater();
            }
            if (future == null) {
                work.releaseLater();
            } else {
                final CompletableFuture<Void> target = future;
                target.defaultExecutor().execute(() -> {
                    try {
                        complete(target, status);
                    } finally {
                        work.release();
                    }
                });
            }
        }

        /** Whether the library has ended the operation; those who wait may learn it before {@link #done} is called. */
        synchronized boolean isOver() {
            return done || work.<Boolean>callRetained(Native::workTest);
        }

        private void complete(CompletableFuture<Void> target, int status) {
            if (status == 0) {
                target.complete(null);
                return;
            }
            // A user of the handle itself: the work may be closed by now, its native half is not.
            target.completeExceptionally(work.callRetained(h -> (TesseraException) Native.workError(h)));
        }

        synchronized CompletableFuture<Void> future() {
            if (future == null) {
                future = new CompletableFuture<>();
                if (done) {
                    final TesseraException error = work.call(h -> (TesseraException) Native.workError(h));
                    if (error == null) {
                        future.complete(null);
                    } else {
                        future.completeExceptionally(error);
                    }
                }
            }
            return future;
        }
    }

    /**
     * Wait until the work is done, at most until the operation's own deadline.
     *
     * @throws TesseraException the operation's error
     * @throws TesseraInterruptedException if the thread is interrupted; the work continues
     */
    public void await() {
        ref.run(h -> Native.workWait(h, -1));
    }

    /**
     * Make a CUDA stream wait for the work, and return: what the stream gets later sees the result. Work on tensors of the
     * CPU, or not yet on its stream since other work is queued before it, is waited for as by {@link #await()}.
     *
     * @param stream address of a stream of the tensors' device; 0 for its default stream
     * @throws TesseraException the operation's error, or if the stream is of another device
     * @throws TesseraInterruptedException if the thread is interrupted; the work continues
     */
    public void order(long stream) {
        ref.run(h -> Native.workOrder(h, stream, -1));
    }

    /**
     * Wait until the work is done, at most {@code timeout}.
     *
     * @param timeout how long to wait
     * @return whether it is done; if not, it continues
     * @throws TesseraException the operation's error
     * @throws TesseraInterruptedException if the thread is interrupted; the work continues
     */
    public boolean await(Duration timeout) {
        final int millis = Native.millis(timeout, "timeout");
        return ref.call(h -> Native.workWait(h, millis));
    }

    /**
     * Whether the work is done, successfully or not.
     *
     * @return true if so
     */
    public boolean isDone() {
        return ref.call(Native::workTest);
    }

    /**
     * The error of work that is done.
     *
     * @return the error, or null if the work succeeded
     * @throws TesseraException with {@link ErrorCode#NOT_READY} while it is not done
     */
    public TesseraException error() {
        return ref.call(h -> (TesseraException) Native.workError(h));
    }

    /**
     * The work as a future, the same one on every call. It is completed on the common pool, so its stages may block.
     * Cancelling it does not cancel the operation.
     *
     * @return completes with null, or exceptionally with a {@link TesseraException}
     */
    public CompletableFuture<Void> toFuture() {
        return ref.call(h -> completion.future());
    }
}
