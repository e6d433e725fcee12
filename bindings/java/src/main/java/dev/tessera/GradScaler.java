package dev.tessera;

/**
 * Dynamic loss scaling, so that small F16 gradients are not lost. A step whose gradients hold an infinity or NaN (over
 * an {@link Fsdp}: on any rank) is skipped, on all ranks, and the scale shrinks; after some successful steps in a row
 * it grows.
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
 * <p>Exclusive: one thread at a time. Each rank has its own scaler; they stay equal.
 */
public final class GradScaler extends NativeObject {
    private GradScaler(long handle) {
        super(new Ref("GradScaler", handle, Native::gradScalerDestroy));
    }

    /**
     * Start building a scaler.
     *
     * @return a builder with the library's defaults
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Settings of a scaler, the same on every rank; options that are not set have the library's defaults, which are
     * PyTorch's.
     */
    public static final class Builder extends GradScalerOptionsFields<Builder> {
        private Builder() {}

        /**
         * Create the scaler.
         *
         * @return the scaler
         * @throws TesseraInvalidArgumentException if a setting is invalid
         */
        public GradScaler build() {
            return new GradScaler(Native.gradScalerCreate(this));
        }
    }

    /**
     * The factor for losses, or for the gradients where backward begins.
     *
     * @return a positive number
     */
    public double scale() {
        return ref.callExclusive(Native::gradScalerScale);
    }

    /**
     * Divide the gradients by the scale before the step, for example to clip them. At most once between updates.
     * Collective over an {@link Fsdp}.
     *
     * @param optimizer whose gradients
     * @throws TesseraInvalidStateException if they are already unscaled or being reduced, or the optimizer steps in
     *     backward
     * @throws TesseraInterruptedException over an Fsdp: its communicator has ended
     */
    public void unscale(Optimizer optimizer) {
        ref.runExclusive(h -> optimizer.ref.runExclusive(o -> Native.gradScalerUnscale(h, o)));
    }

    /**
     * Divide the gradients by the scale, unless {@link #unscale} has, and step the optimizer if all are finite.
     * Collective over an {@link Fsdp}.
     *
     * @param optimizer whose step
     * @return whether the optimizer stepped, the same on every rank
     * @throws TesseraInvalidStateException as {@link #unscale}, and for a second step before {@link #update}
     * @throws TesseraInterruptedException over an Fsdp: its communicator has ended
     */
    public boolean step(Optimizer optimizer) {
        return ref.callExclusive(h -> optimizer.ref.callExclusive(o -> Native.gradScalerStep(h, o)));
    }

    /**
     * End the iteration: update the scale according to the gradients of all optimizers.
     *
     * @throws TesseraInvalidStateException if no gradients were unscaled since the last update
     */
    public void update() {
        ref.runExclusive(Native::gradScalerUpdate);
    }
}
