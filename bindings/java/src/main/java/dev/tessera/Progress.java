package dev.tessera;

/**
 * A callback for the progress of a save, a load or a verification: called at the beginning and the end of a phase and
 * about ten times a second in between. The bytes done equal the total only at the end; a phase that fails has no end.
 * For a save in the background it is called on a thread of the library, and on two threads at once while the state is
 * larger than the staging memory; it must not block for long. An exception does not stop the operation, because other
 * ranks depend on it: it is thrown when the call ends, or, for a save in the background, by the saver's next call.
 */
@FunctionalInterface
public interface Progress {
    /** The phase of an operation. */
    enum Phase {
        /** {@link Saver#saveAsync} copies the state before it returns. */
        STAGE,
        /** This rank writes its files. */
        WRITE,
        /** All ranks have written. Reported on rank 0 only, without bytes. */
        COMMIT,
        /** A checkpoint is being loaded. */
        READ,
        /** A checkpoint is being verified. */
        VERIFY
    }

    /**
     * Called by the library.
     *
     * @param phase the phase
     * @param done bytes done on this rank
     * @param total bytes in total on this rank; 0 if there is nothing to count
     */
    void update(Phase phase, long done, long total);
}
