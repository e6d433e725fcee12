package dev.tessera;

/**
 * Told how far a save, a load or a check is: at the begin and the end of a phase, and about ten times a second between. All
 * is done at the end alone; a phase that fails has none. Of a save in the background it is told on a thread of the library,
 * and while the state is larger than the staging memory on two threads at once; it must not wait for long. What it throws ends nothing, since the other ranks count on the save: it
 * is thrown when the call is over, of a save in the background by the next call of the saver.
 */
@FunctionalInterface
public interface Progress {
    /** What is being done. */
    enum Phase {
        /** What {@link Saver#saveAsync} copies before it returns. */
        STAGE,
        /** This rank's files are written. */
        WRITE,
        /** All ranks have written; of rank 0 alone, without bytes. */
        COMMIT,
        /** A checkpoint is loaded. */
        READ,
        /** A checkpoint is checked. */
        VERIFY
    }

    /**
     * Called by the library.
     *
     * @param phase what is being done
     * @param done bytes of this rank
     * @param total bytes of this rank; 0 if there is nothing to count
     */
    void update(Phase phase, long done, long total);
}
