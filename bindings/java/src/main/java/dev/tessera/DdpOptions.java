package dev.tessera;

/** Options of {@link Ddp}. What is not set has the library's default. */
public final class DdpOptions {
    int given;
    long bucketBytes;
    long firstBucketBytes;
    int op;
    double preDivide;
    boolean findUnused;
    boolean staticGraph;
    boolean rebuildBuckets;
    int reduceDtype;
    int hook;
    int powersgdRank;
    int powersgdStartStep;
    int join;
    boolean shareParams;

    /** What reduces a bucket; {@link Ddp#setHook} brings one's own. The ordinals are the library's numbers. */
    public enum Hook {
        /** An all-reduce. */
        ALL_REDUCE,
        /** Products of low rank stand for matrices, with error feedback. */
        POWER_SGD,
        /** Nothing: each rank keeps its own gradients. */
        NOOP
    }

    /** Whether ranks may have different numbers of steps, and by what their sum is divided when some have joined. */
    public enum Join {
        /** All ranks make equally many steps. */
        OFF,
        /** By the number of ranks. */
        DIVIDE_BY_WORLD,
        /** By the number of ranks that have not joined. */
        DIVIDE_BY_ACTIVE
    }

    /** All defaults. */
    public DdpOptions() {}

    /**
     * A bucket closes when it reaches this size; the default is 25 MiB.
     *
     * @param bytes the size
     * @return this
     */
    public DdpOptions bucketBytes(long bytes) {
        bucketBytes = notNegative(bytes);
        given |= 1;
        return this;
    }

    /**
     * The same for the first bucket of each dtype; the default is 1 MiB.
     *
     * @param bytes the size
     * @return this
     */
    public DdpOptions firstBucketBytes(long bytes) {
        firstBucketBytes = notNegative(bytes);
        given |= 2;
        return this;
    }

    /**
     * What becomes of the ranks' gradients; the default is AVG.
     *
     * @param value AVG or SUM
     * @return this
     */
    public DdpOptions op(ReduceOp value) {
        op = value.number();
        given |= 4;
        return this;
    }

    /**
     * Each rank divides its gradients by this before they are summed; what is left of the average (or sum) is made up for
     * afterwards. Keeps sums of F16 in range. The default is 1.
     *
     * @param factor above 0
     * @return this
     */
    public DdpOptions preDivide(double factor) {
        preDivide = factor;
        given |= 8;
        return this;
    }

    /**
     * Gradients that are not ready at {@link Ddp#await} are unused by this rank, which adds zeros; those that no rank used
     * stay as they are. The default is false: they are an error.
     *
     * @param value whether
     * @return this
     */
    public DdpOptions findUnused(boolean value) {
        findUnused = value;
        given |= 16;
        return this;
    }

    /**
     * Every step uses the parameters of the first one; the default is false.
     *
     * @param value whether
     * @return this
     */
    public DdpOptions staticGraph(boolean value) {
        staticGraph = value;
        given |= 32;
        return this;
    }

    /**
     * After the first step, buckets follow the order in which rank 0's gradients were ready; the default is false.
     * Gradients keep their memory.
     *
     * @param value whether
     * @return this
     */
    public DdpOptions rebuildBuckets(boolean value) {
        rebuildBuckets = value;
        given |= 64;
        return this;
    }

    /**
     * Gradients are converted to this type, reduced, and converted back; the default is none: reduced as they are.
     *
     * @param dtype F16, BF16, F32 or F64
     * @return this
     */
    public DdpOptions reduceDtype(DType dtype) {
        reduceDtype = dtype.number();
        given |= 128;
        return this;
    }

    /**
     * What reduces a bucket; the default is ALL_REDUCE.
     *
     * @param value the hook
     * @return this
     */
    public DdpOptions hook(Hook value) {
        hook = value.ordinal();
        given |= 256;
        return this;
    }

    /**
     * The rank of the products that stand for gradients under {@link Hook#POWER_SGD}; the default is 1.
     *
     * @param rank at least 1
     * @return this
     */
    public DdpOptions powersgdRank(int rank) {
        powersgdRank = rank;
        given |= 512;
        return this;
    }

    /**
     * Reductions before this one are whole under {@link Hook#POWER_SGD}; the default is 1000.
     *
     * @param step at least 0
     * @return this
     */
    public DdpOptions powersgdStartStep(int step) {
        powersgdStartStep = step;
        given |= 1024;
        return this;
    }

    /**
     * Whether ranks may have different numbers of steps; the default is OFF. See {@link Ddp#join}.
     *
     * @param value by what sums are divided
     * @return this
     */
    public DdpOptions join(Join value) {
        join = value.ordinal();
        given |= 2048;
        return this;
    }

    /**
     * The ranks of a host have one copy of the parameters and of the optimizer's state, of which each updates a slice; the
     * default is false. {@link Ddp#param} is a view into it then, what was registered is not used any more; an optimizer
     * of the model steps in backward from the beginning ({@link Ddp#stepInBackward}), and what is in the gradients after
     * {@link Ddp#await} is not specified.
     *
     * @param value whether
     * @return this
     */
    public DdpOptions shareParams(boolean value) {
        shareParams = value;
        given |= 4096;
        return this;
    }

    private static long notNegative(long bytes) {
        if (bytes < 0) {
            throw new IllegalArgumentException("a bucket of " + bytes + " bytes");
        }
        return bytes;
    }
}
