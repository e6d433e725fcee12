package dev.tessera;

import java.util.Objects;

/** Options of {@link Ddp}. Options that are not set have the library's defaults. */
public final class DdpOptions extends DdpOptionsFields<DdpOptions> {
    private TensorParallel tp; // null: the parameters are whole

    /** How a bucket is reduced; {@link Ddp#setHook} sets a custom hook. The ordinals are the library's numbers. */
    public enum Hook {
        /** An all-reduce. */
        ALL_REDUCE,
        /** Products of low rank stand for matrices, with error feedback. */
        POWER_SGD,
        /** Nothing: each rank keeps its own gradients. */
        NOOP
    }

    /** Whether ranks may have different numbers of steps, and what sums are divided by once some ranks have joined. */
    public enum Join {
        /** All ranks make the same number of steps. */
        OFF,
        /** By the number of ranks. */
        DIVIDE_BY_WORLD,
        /** By the number of ranks that have not joined. */
        DIVIDE_BY_ACTIVE
    }

    /** All defaults. */
    public DdpOptions() {}

    /**
     * Name the tensor-parallel model whose slices the parameters are; initially they are full parameters. The
     * communicator then has the ranks with the same slices and other data, such as a mesh's "dp". Optimizers, norms and
     * states are those of the whole model, and {@link TensorParallel#sumGrads} is not needed.
     *
     * @param model kept reachable; closing it closes the DDP object
     * @return this
     */
    public DdpOptions tp(TensorParallel model) {
        tp = Objects.requireNonNull(model, "model");
        return this;
    }

    /** Null if there is none. */
    TensorParallel tp() {
        return tp;
    }
}
