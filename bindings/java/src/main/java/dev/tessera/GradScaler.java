package dev.tessera;

/**
 * A scale for the loss that follows what becomes of the gradients, so that small ones of F16 are not lost. A step whose
 * gradients have an infinity or NaN is left out, over an {@link Fsdp} on all ranks if any has one, and the scale becomes smaller;
 * after some steps in a row that were made it grows.
 *
 * <pre>{@code
 * for (...) {
 *     // gradients of loss * scaler.scale()
 *     fsdp.await();
 *     scaler.step(optimizer);
 *     scaler.update();
 * }
 * }</pre>
 *
 * <p>Exclusive: one thread at a time. Each rank has its own; they stay alike.
 */
public final class GradScaler extends NativeObject {
    private GradScaler(long handle) {
        super(new Ref("GradScaler", handle, Native::gradScalerDestroy));
    }

    /**
     * Begin a scaler.
     *
     * @return a builder with the library's defaults
     */
    public static Builder builder() {
        return new Builder();
    }

    /** Settings of a scaler, the same on every rank; what is not set has the library's default, which is PyTorch's. */
    public static final class Builder extends GradScalerOptionsFields<Builder> {
        private Builder() {}

        /**
         * Make the scaler.
         *
         * @return the scaler
         * @throws TesseraInvalidArgumentException if a setting cannot be
         */
        public GradScaler build() {
            return new GradScaler(Native.gradScalerCreate(this));
        }
    }

    /**
     * What losses, or the gradients where backward begins, are multiplied by.
     *
     * @return above 0
     */
    public double scale() {
        return ref.callExclusive(Native::gradScalerScale);
    }

    /**
     * Divide the gradients by the scale before the step, to bound them; once between two updates. Collective over an {@link Fsdp}.
     *
     * @param optimizer whose gradients
     * @throws TesseraInvalidStateException if they are unscaled already or being reduced, or the optimizer steps in backward
     * @throws TesseraInterruptedException over an Fsdp: its communicator has ended
     */
    public void unscale(Optimizer optimizer) {
        ref.runExclusive(h -> optimizer.ref.runExclusive(o -> Native.gradScalerUnscale(h, o)));
    }

    /**
     * Make the optimizer's step, unless its gradients, divided by the scale if they were not yet, have an infinity or NaN.
     * Collective over an {@link Fsdp}.
     *
     * @param optimizer whose step
     * @return whether it was made, the same on every rank
     * @throws TesseraInvalidStateException as {@link #unscale}, and for a second step before {@link #update}
     * @throws TesseraInterruptedException over an Fsdp: its communicator has ended
     */
    public boolean step(Optimizer optimizer) {
        return ref.callExclusive(h -> optimizer.ref.callExclusive(o -> Native.gradScalerStep(h, o)));
    }

    /**
     * End an iteration: the scale of the next, by what was found in the gradients of all optimizers.
     *
     * @throws TesseraInvalidStateException if no gradients were unscaled since the last update
     */
    public void update() {
        ref.runExclusive(Native::gradScalerUpdate);
    }
}
