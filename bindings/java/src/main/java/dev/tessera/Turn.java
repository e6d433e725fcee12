package dev.tessera;

/**
 * The turn of one rank, which works alone while the others wait for it: see {@link Comm#turn}. Exclusive, together with
 * its communicator.
 */
public final class Turn extends NativeObject {
    /**
     * What the rank does in its turn.
     *
     * @param <T> what it returns
     * @param <E> what it may throw
     */
    @FunctionalInterface
    public interface Body<T, E extends Exception> {
        /**
         * Work, on the rank whose turn it is.
         *
         * @param turn for reports of progress
         * @return the result
         * @throws E if the work fails
         */
        T run(Turn turn) throws E;
    }

    private final Comm comm;

    Turn(Comm comm, int rank, int timeoutMs) {
        super(new Ref("Turn", comm.ref.callLongExclusive(h -> Native.turnCreate(h, rank, timeoutMs)), Native::turnDestroy)
                .dependOn(comm.ref));
        this.comm = comm;
    }

    /**
     * Report progress, after which the other ranks wait up to the timeout again. They log a report every 10 s and name
     * the last one if they time out. The call does not wait.
     *
     * @param done steps that are done
     * @param total the number of all steps; 0 if unknown
     * @throws TesseraException what a peer failed with while it waited
     */
    public void progress(long done, long total) {
        comm.ref.runExclusive(c -> ref.runExclusive(h -> Native.turnProgress(h, done, total)));
    }

    /** @param failure why the work failed; null if it succeeded */
    void end(String failure) {
        final byte[] text = Native.optionalUtf8(failure == null ? null : failure.replace('\0', ' '), "failure");
        comm.ref.runExclusive(c -> ref.runExclusive(h -> Native.turnEnd(h, text)));
    }
}
