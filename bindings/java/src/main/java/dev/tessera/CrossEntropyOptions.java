package dev.tessera;

import java.util.Objects;

/**
 * Options of {@link TensorParallel#crossEntropy(Tensor, Tensor, long, Tensor, Tensor, CrossEntropyOptions)}, those of
 * PyTorch's {@code cross_entropy}. Options that are not set have the library's defaults.
 */
public final class CrossEntropyOptions extends CrossEntropyOptionsFields<CrossEntropyOptions> {
    private Tensor classWeights;
    private Comm dataRanks;

    /** How the losses of the rows are joined. The ordinals are the library's numbers. */
    public enum Reduction {
        /** Not: each row has its loss. */
        NONE,
        /** By their mean, weighted by the weights of the targets; over no rows it is NaN. */
        MEAN,
        /** By their sum. */
        SUM
    }

    /** All defaults. */
    public CrossEntropyOptions() {}

    /**
     * Set the weights of classes; initially all are 1.
     *
     * @param weights F32 or F64, one for each class of the full vocabulary; kept reachable
     * @return this
     */
    public CrossEntropyOptions classWeights(Tensor weights) {
        classWeights = Objects.requireNonNull(weights, "weights");
        return this;
    }

    /**
     * Name the ranks that have other rows of the batch, such as those of a mesh's "dp": the mean is then over the rows
     * of all of them, each rank's loss is its own rows' part, and losses and gradients of these ranks add up (reduce
     * them by {@link ReduceOp#SUM}, not AVG). Initially there are none.
     *
     * @param ranks in exclusive use during each call, which blocks until these ranks have called too
     * @return this
     */
    public CrossEntropyOptions dataRanks(Comm ranks) {
        dataRanks = Objects.requireNonNull(ranks, "ranks");
        return this;
    }

    /** Null if there are none. */
    Tensor weights() {
        return classWeights;
    }

    /** Null if there are none. */
    Comm ranks() {
        return dataRanks;
    }
}
