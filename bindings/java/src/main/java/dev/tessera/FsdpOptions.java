package dev.tessera;

/** Options of {@link Fsdp}, the same on every rank. What is not set has the library's default. */
public final class FsdpOptions {
    int given;
    int shardRanks;
    int forwardPrefetch;
    int backwardPrefetch;
    int gradsInFlight;
    int paramDtype;
    int reduceDtype;
    int op;
    double preDivide;
    boolean syncValues;

    /** All defaults. */
    public FsdpOptions() {}

    /**
     * Parameters are cut among so many ranks that follow each other, of which the number of all ranks is a multiple; each such
     * group holds a replica. The default is 0: among all.
     *
     * @param ranks at least 0
     * @return this
     */
    public FsdpOptions shardRanks(int ranks) {
        shardRanks = ranks;
        given |= 1;
        return this;
    }

    /**
     * How many units are on their way while one computes, in the order of the forward before; the default is 1.
     *
     * @param units at least 0
     * @return this
     */
    public FsdpOptions forwardPrefetch(int units) {
        forwardPrefetch = units;
        given |= 2;
        return this;
    }

    /**
     * The same in backward, in the reverse order of this forward; the default is 1.
     *
     * @param units at least 0
     * @return this
     */
    public FsdpOptions backwardPrefetch(int units) {
        backwardPrefetch = units;
        given |= 4;
        return this;
    }

    /**
     * A unit's backward waits for memory while the gradients of so many units are being reduced; with 1 they take turns. The
     * default is 2.
     *
     * @param units at least 1
     * @return this
     */
    public FsdpOptions gradsInFlight(int units) {
        gradsInFlight = units;
        given |= 8;
        return this;
    }

    /**
     * The type of whole parameters; shards keep the one that was registered. The default is none: as registered.
     *
     * @param dtype F16, BF16, F32 or F64
     * @return this
     */
    public FsdpOptions paramDtype(DType dtype) {
        paramDtype = dtype.number();
        given |= 16;
        return this;
    }

    /**
     * The type of whole gradients, in which they are reduced; the default is none: as whole parameters.
     *
     * @param dtype F16, BF16, F32 or F64
     * @return this
     */
    public FsdpOptions reduceDtype(DType dtype) {
        reduceDtype = dtype.number();
        given |= 32;
        return this;
    }

    /**
     * What becomes of the ranks' gradients; the default is AVG.
     *
     * @param value AVG or SUM
     * @return this
     */
    public FsdpOptions op(ReduceOp value) {
        op = value.number();
        given |= 64;
        return this;
    }

    /**
     * Each rank divides its gradients by this before they are summed; what is left of the average (or sum) is made up for
     * afterwards. Keeps sums of F16 in range. The default is 1.
     *
     * @param factor above 0
     * @return this
     */
    public FsdpOptions preDivide(double factor) {
        preDivide = factor;
        given |= 128;
        return this;
    }

    /**
     * Whether shards begin with the values of rank 0; the default is true. Otherwise they begin with each rank's own.
     *
     * @param value whether
     * @return this
     */
    public FsdpOptions syncValues(boolean value) {
        syncValues = value;
        given |= 256;
        return this;
    }
}
