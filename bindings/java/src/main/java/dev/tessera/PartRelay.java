package dev.tessera;

import java.nio.ByteBuffer;
import java.util.function.LongConsumer;

/** What computes the parts of an activation, which tp.cc calls, during one call of a {@link TensorParallel}. */
final class PartRelay {
    private final TensorParallel.PartCallback compute;
    private final boolean readOnly;
    private final Tensor.Uses uses = new Tensor.Uses();
    private Throwable thrown;

    PartRelay(TensorParallel.PartCallback compute, boolean readOnly) {
        this.compute = compute;
        this.readOnly = readOnly;
    }

    /** Makes the call, which leads to calls of {@link #call}. An exception of the callback is the cause of its error. */
    void run(Ref ref, Comm comm, LongConsumer made) {
        try {
            ref.runExclusive(h -> comm.ref.runExclusive(c -> made.accept(h)));
        } catch (TesseraException failed) {
            if (thrown != null && failed.getCause() == null) {
                failed.initCause(thrown);
            }
            throw failed;
        } finally {
            uses.hold(ref); // after an exception there may be some
        }
    }

    /** Called by the shims; a status, and on failure a message. */
    int call(long begin, long[] descriptor, ByteBuffer message) {
        final String ending = "the call for the part from " + begin + " on has ended";
        final Tensor.Lease lease = new Tensor.Lease(Tensor.Lender.PART, readOnly, ending, uses);
        try {
            compute.compute(begin, Tensor.overNative(descriptor, null).leased(lease));
            uses.requireNone("the part from " + begin + " on");
            return 0;
        } catch (Throwable error) {
            thrown = error;
            return Failures.failed(error, message);
        } finally {
            lease.end();
        }
    }
}
