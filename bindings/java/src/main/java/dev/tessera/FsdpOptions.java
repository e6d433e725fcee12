package dev.tessera;

import java.util.Objects;

/** Options of {@link Fsdp}, the same on every rank. Options that are not set have the library's defaults. */
public final class FsdpOptions extends FsdpOptionsFields<FsdpOptions> {
    private TensorParallel tp; // null: the parameters are whole

    /** All defaults. */
    public FsdpOptions() {}

    /**
     * Name the tensor-parallel model whose slices the parameters are; initially they are full parameters. The
     * communicator then has the ranks with the same slices and other data, such as a mesh's "dp". Optimizers, norms and
     * states are those of the whole model, and {@link TensorParallel#sumGrads} is not needed.
     *
     * @param model kept reachable; closing it closes the FSDP object
     * @return this
     */
    public FsdpOptions tp(TensorParallel model) {
        tp = Objects.requireNonNull(model, "model");
        return this;
    }

    /** Null if there is none. */
    TensorParallel tp() {
        return tp;
    }
}
