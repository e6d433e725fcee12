package dev.tessera;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;

/**
 * A collective over fixed tensors, prepared and checked once and launched many times. A launch matches an ordinary call
 * of the same collective on another rank. Exclusive, together with its communicator; {@link #await} may be called from
 * any thread.
 */
public final class Plan extends NativeObject {
    /** The collective of a plan, like the method of {@link Collectives} with that name. */
    public enum Collective {
        /** {@link Collectives#barrier}. */
        BARRIER(1),
        /** {@link Collectives#allReduce(List, ReduceOp)}, of the outputs. */
        ALL_REDUCE(2),
        /** {@link Collectives#reduceScatterCoalesced}. */
        REDUCE_SCATTER(3),
        /** {@link Collectives#allGatherCoalesced}. */
        ALL_GATHER(4),
        /** {@link Collectives#allGather(Tensor, List)}. */
        ALL_GATHER_V(5),
        /** {@link Collectives#broadcast(List, int)}, of the outputs. */
        BROADCAST(6),
        /** {@link Collectives#reduce}. */
        REDUCE(7),
        /** {@link Collectives#gather}. */
        GATHER(8),
        /** {@link Collectives#scatter}. */
        SCATTER(9),
        /** {@link Collectives#allToAll}. */
        ALL_TO_ALL(10);

        private final int number;

        Collective(int number) {
            this.number = number;
        }
    }

    private final Collectives comm;

    private Plan(Collectives comm, long handle, Object memory) {
        super(new Ref("Plan", handle, h -> end(h)).mayLeak().keep(memory).dependOn(comm.ref));
        this.comm = comm;
    }

    /** The library must not access freed memory, so this waits for a launch in flight, at most until its deadline. */
    private static void end(long handle) {
        try {
            Native.planWait(handle, -1);
        } catch (TesseraException failed) {
            // It is told to whoever awaits it.
        }
        Native.planDestroy(handle);
    }

    /**
     * Prepare a collective. Local.
     *
     * @param comm the communicator, or {@link Comm#onStream} for tensors on a device
     * @param collective the collective
     * @param inputs as for its method; empty for collectives in place
     * @param outputs as for its method; empty if this rank gets nothing
     * @param op the reduction; ignored by others
     * @param root the root; ignored by collectives without one
     * @return the plan; it keeps the tensors reachable and is closed with the communicator
     * @throws IllegalArgumentException if a tensor belongs to a {@link Fsdp.Pass} or {@link StageCall}, whose memory is
     *     reused
     */
    public static Plan of(Collectives comm, Collective collective, List<Tensor> inputs, List<Tensor> outputs, ReduceOp op,
            int root) {
        Objects.requireNonNull(collective, "collective");
        final List<Tensor> memory = new ArrayList<>(List.copyOf(inputs));
        memory.addAll(List.copyOf(outputs));
        memory.forEach(Tensor::requireForGood);
        final long[] in = Tensor.descriptors(List.copyOf(inputs));
        final long[] out = Tensor.descriptors(List.copyOf(outputs));
        final int number = op.number();
        return comm.ref.callExclusive(
                c -> new Plan(comm, Native.planCreate(c, collective.number, in, out, number, root, comm.stream), memory));
    }

    /** Launch the collective and wait until it is done. */
    public void run() {
        comm.ref.runExclusive(c -> ref.runExclusive(Native::planRun));
    }

    /**
     * Launch the collective in the background, in the order of the communicator's calls.
     *
     * @throws TesseraInvalidStateException if the previous launch is not done
     */
    public void start() {
        comm.ref.runExclusive(c -> ref.runExclusive(Native::planStart));
    }

    /** Wait until the last launch is done, at most until its own deadline. */
    public void await() {
        ref.run(h -> Native.planWait(h, -1));
    }

    /**
     * Wait for the last launch.
     *
     * @param timeout how long
     * @return whether it is done
     */
    public boolean await(Duration timeout) {
        final int millis = Native.millis(timeout, "timeout");
        try {
            ref.run(h -> Native.planWait(h, millis));
            return true;
        } catch (TesseraException e) {
            if (e.code() == ErrorCode.NOT_READY) {
                return false;
            }
            throw e;
        }
    }
}
