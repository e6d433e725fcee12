package dev.tessera;

/** Options of {@link TensorParallel}, the same on every rank. Options that are not set have the library's defaults. */
public final class TpOptions extends TpOptionsFields<TpOptions> {
    /** All defaults. */
    public TpOptions() {}

    /**
     * True: between regions, activations are cut along the sequence ({@link TensorParallel#enter(Tensor, int, Tensor)}
     * and {@link TensorParallel#leave(Tensor, int, Tensor)} with a dimension), so {@link TensorParallel#sumGrads} sums
     * the gradients of the biases of {@link TensorParallel.Style#ROW} like those of {@link
     * TensorParallel.Style#SEQUENCE}; default false.
     *
     * @param value the new one
     * @return this
     */
    @Override
    public TpOptions sequenceParallel(boolean value) {
        return super.sequenceParallel(value);
    }
}
