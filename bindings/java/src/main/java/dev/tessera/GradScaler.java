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
    public static final class Builder {
        private int given;
        private double initScale;
        private double growthFactor;
        private double backoffFactor;
        private long growthInterval;

        private Builder() {}

        /**
         * The first scale; the default is 65536.
         *
         * @param value above 0
         * @return this
         */
        public Builder initScale(double value) {
            initScale = value;
            given |= 1;
            return this;
        }

        /**
         * By which the scale grows; the default is 2.
         *
         * @param value above 1
         * @return this
         */
        public Builder growthFactor(double value) {
            growthFactor = value;
            given |= 2;
            return this;
        }

        /**
         * By which it becomes smaller; the default is 0.5.
         *
         * @param value between 0 and 1
         * @return this
         */
        public Builder backoffFactor(double value) {
            backoffFactor = value;
            given |= 4;
            return this;
        }

        /**
         * After so many steps in a row that were made it grows; the default is 2000.
         *
         * @param steps at least 1
         * @return this
         */
        public Builder growthInterval(long steps) {
            growthInterval = steps;
            given |= 8;
            return this;
        }

        /**
         * Make the scaler.
         *
         * @return the scaler
         * @throws TesseraInvalidArgumentException if a setting cannot be
         */
        public GradScaler build() {
            return new GradScaler(Native.gradScalerCreate(given, initScale, growthFactor, backoffFactor, growthInterval));
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
