package dev.tessera;

/** How a {@link Checkpoint} is loaded. What is not set has the library's default: strict and verified. */
public final class LoadOptions {
    int given;
    int values;
    Progress progress;
    Comm comm;

    /** All defaults. */
    public LoadOptions() {}

    /**
     * Check the checksum of every block read; the default is true.
     *
     * @param value on or off
     * @return this
     */
    public LoadOptions verify(boolean value) {
        return set(0, value);
    }

    /**
     * Names of the state that the checkpoint lacks stay as they are; the default is false.
     *
     * @param value on or off
     * @return this
     */
    public LoadOptions allowMissing(boolean value) {
        return set(1, value);
    }

    /**
     * Names of the checkpoint that the state lacks are left out; the default is false.
     *
     * @param value on or off
     * @return this
     */
    public LoadOptions allowUnexpected(boolean value) {
        return set(2, value);
    }

    /**
     * Floating-point tensors of another dtype are converted; the default is false.
     *
     * @param value on or off
     * @return this
     */
    public LoadOptions allowCast(boolean value) {
        return set(3, value);
    }

    /**
     * Tell how far the load is, on the thread that loads.
     *
     * @param told called with {@link Progress.Phase#READ}; null: nobody
     * @return this
     */
    public LoadOptions progress(Progress told) {
        progress = told;
        return this;
    }

    /**
     * The ranks that load together, which makes the load collective: each of them loads the same checkpoint with the same
     * {@link #verify}; states, layouts and what is allowed may differ. Ranks of one host then read each byte that several
     * of them want once (from 8 MiB on), and hand it on through shared memory. All get the same
     * error. The deadline of each wait is the communicator's timeout.
     *
     * @param ranks in exclusive use during the load; null, the default: each loads for itself
     * @return this
     */
    public LoadOptions comm(Comm ranks) {
        comm = ranks;
        return this;
    }

    private LoadOptions set(int bit, boolean value) {
        given |= 1 << bit;
        values = value ? values | 1 << bit : values & ~(1 << bit);
        return this;
    }
}
